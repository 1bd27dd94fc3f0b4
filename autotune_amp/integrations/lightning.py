"""Lightning: the controller as a Precision plugin, a callback, and Trainer arguments.

Trials run your module's `training_step` and `configure_optimizers`, clip gradients, and step the schedulers. The
recommended setting is confirmed by a short `fit` of a Trainer, with its callbacks and the cost of `self.log`, without
validation, checkpoints and loggers. Pass your Trainer, `Workload.from_lightning(model, Data(), trainer)`; it is not
changed.

The Trainer then trains with the controller as its precision plugin, and its checkpoints resume in their precision.
`AutotuneCallback`, which is added too, logs scale and moves, and ends the run with a checkpoint if a fallback needs
another batch size or no precision is left. Pass the controller's options to the plugin: `trainer_arguments(config,
plugins=[AutotunePrecision(config, run_log="run.jsonl", halt=False)])`. Use `import lightning`: a Trainer of the
standalone `pytorch_lightning` refuses the plugin. If Lightning runs your script again for its other devices, those
processes use the recommendation that the first process saved; an effective batch size is that of one process there.

```python
import lightning
import torch
from torch import nn
from autotune_amp import Workload, recommend_config
from autotune_amp.integrations.lightning import trainer_arguments

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Data(lightning.LightningDataModule):
    def __init__(self, batch_size=32, num_workers=0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers

    def setup(self, stage):
        self.samples = torch.utils.data.TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,)))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.samples, self.batch_size, shuffle=True, num_workers=self.num_workers)

model = Classifier()
config = recommend_config(Workload.from_lightning(model, Data()), budget=60).config
trainer = lightning.Trainer(**trainer_arguments(config, max_epochs=3))  # your callbacks, logger, accelerator: likewise
trainer.fit(model, Data(config.batch_size, config.num_workers or 0))
print(trainer.precision, trainer.precision_plugin.controller.status().num_steps)
```
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import msgspec
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from autotune_amp.core.config import AmpConfig, DemotedError
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.setting import DEFAULTS, Setting
from autotune_amp.dimensions.prepare import prepare
from autotune_amp.integrations.bridge import (
    AccumulationWindow,
    config_and_options,
    numeric_metrics,
    raise_if_argument_differs,
    raise_if_window_differs,
    replace_attributes,
)
from autotune_amp.precision.forward_wrapper import unwrap
from autotune_amp.runtime.controller import PrecisionController

__all__ = ["AutotuneCallback", "AutotunePrecision", "trainer_arguments"]

Result = TypeVar("Result")

_LIGHTNING_PRECISIONS = {"bf16": "bf16-mixed", "fp16": "16-mixed", "fp8": "bf16-mixed"}


class AutotunePrecision(Precision):
    """Precision plugin for Lightning whose scaler is a `PrecisionController`, on any device.

    Use ``Trainer(plugins=[AutotunePrecision(recommendation)])``; see `trainer_arguments` for the other settings. It is
    for ``import lightning``, not for ``pytorch_lightning``, and replaces ``Trainer(precision=...)``, whose fp16 on a
    CPU is bf16 without a scaler. A checkpoint holds the controller's state and resumes in its precision.

    With automatic optimization failing steps are diagnosed by running ``training_step`` again on the latest batch,
    without logging or updating torchmetrics. With manual optimization, and if ``training_step`` takes the
    ``dataloader_iter``, there is no diagnosis: the next precision is tried. With manual optimization
    ``optimizer.step()`` returns true if it stepped. Lightning steps schedulers for skipped steps too.

    If a fallback of the config was measured with another batch size or accumulation, which a DataLoader cannot change
    to, `fit` raises `DemotedError` with the config to start again with, as it always does with
    ``on_demotion="checkpoint_and_stop"``; with an `AutotuneCallback` it ends with a checkpoint instead. A checkpoint of
    such a fallback cannot continue with the earlier config: `fit` raises that error at once. `fit` also raises
    `NotPrecisionError` and `NoRungFitsError` (unless ``halt=False``).

    config: the config of the run, or the recommendation that holds it.
    options: those of `PrecisionController`: ``guard``, ``halt``, ``on_demotion``, ``run_log`` and so on.
    """

    def __init__(self, config: AmpConfig | Recommendation, **options: Any) -> None:
        self.config, own_options = config_and_options(config)
        self._options = own_options | options
        self._controller: PrecisionController | None = None
        self._module: LightningModule | None = None
        self._latest: tuple[Any, ...] = ()  # the arguments of the latest training step
        self._window: Any = None  # the controller's `AccumulationWindow`, from `connect` on

    @property
    def controller(self) -> PrecisionController:
        """Return the controller of the current or latest run. Raises `InvalidRequestError` before the first run."""
        if self._controller is None:
            raise InvalidRequestError(
                "AutotunePrecision has no controller yet: the Trainer makes it after putting the model on its device.",
                "Use it from on_fit_start on, in a callback or in the LightningModule.",
            )
        return self._controller

    @property
    def precision(self) -> Any:  # type: ignore[override] # an attribute of Lightning's, which only reads it
        """Return Lightning's name for the current precision: ``"16-mixed"``, ``"bf16-mixed"`` or ``"32-true"``."""
        return _LIGHTNING_PRECISIONS.get(
            (self._controller.config if self._controller else self.config).precision, "32-true"
        )

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Set dtype and memory format of the weights, before DistributedDataParallel reads the module."""
        weight_options = {name: getattr(self.config, name) for name in ("weights", "memory_format")}
        prepare(msgspec.structs.replace(Setting.of(self.config).without_variants, **weight_options), module, None)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Make the controller, and set up the config's other dimensions on the model and the optimizers.

        Lightning calls it when the model is on its device. For the same module as before, the controller's state is
        kept.
        """
        module = unwrap(model)
        assert isinstance(module, LightningModule)
        # Validation, tests and predictions have no optimizer, and no window at whose end SIGTERM could be handled.
        is_trained = module.trainer.state.fn == TrainerFn.FITTING
        setting = Setting.of(self.config)
        if not is_trained:
            setting = msgspec.structs.replace(setting, optimizer_impl=DEFAULTS["optimizer_impl"])
        prepare(setting, module, optimizers)
        saved_state = self._controller.state_dict() if self._controller is not None and self._module is module else None
        self._module = module
        options = self._options if is_trained else self._options | {"on_signal": None}
        self._controller = PrecisionController(self.config, module.trainer.strategy.root_device, **options)
        self._window = AccumulationWindow(self._controller)
        # Not by a callback: a learning rate finder replaces the Trainer's.
        vars(module.trainer.strategy)["training_step"] = self._run_step
        # A training_step that takes the steps itself, or its batches from the loader, cannot be rerun.
        draws_batches = is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
        can_rerun = module.automatic_optimization and not draws_batches
        self._controller.attach(model, self._recompute_loss if can_rerun else None)
        if saved_state is not None:
            self.load_state_dict(saved_state)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Restore the model and end the controller's reports. Its state is kept for the Trainer's next run."""
        if self._controller is not None and self._module is not None:
            self._controller.detach()
            vars(self._module.trainer.strategy).pop("training_step", None)
            self._latest = ()

    def _run_step(self, *args: Any) -> Any:
        """Run the strategy's training step, and keep its arguments for the diagnosis."""
        assert self._module is not None
        self._latest, strategy = args, self._module.trainer.strategy
        return type(strategy).training_step(strategy, *args)

    def _recompute_loss(self) -> Tensor:
        """Run ``training_step`` on the latest batch again and return its loss, divided by the accumulation steps.

        Logging is disabled, and the state of torchmetrics is restored.
        """
        module = self._module
        assert module is not None
        trainer = module.trainer
        with ExitStack() as stack:
            for part in module.modules():
                if isinstance(part, LightningModule):
                    stack.enter_context(replace_attributes(part, **NO_LOGGING))
                elif isinstance(part, Metric):
                    stack.enter_context(_preserve_metric_state(part))
            loss = loss_of(self._run_step(*self._latest))
        return loss / trainer.accumulate_grad_batches if isinstance(loss, Tensor) else loss  # a None is returned too

    def _raise_if_batches_differ(self) -> None:
        """Raise `DemotedError` if the current precision was measured with another batch size or accumulation."""
        raise_if_window_differs(
            self.controller,
            self.config,
            "a running Trainer cannot change its DataLoader",
            "Resume AutotuneCallback's checkpoint with a Trainer and a DataLoader made from the error's config.",
        )

    def run_or_stop(self, action: Callable[[], Result]) -> Result | None:
        """Run an action that may change the controller's precision, between two accumulation windows.

        If it ends the run with a `TrainingStoppedError`, store the error in the Trainer's `AutotuneCallback` and return
        None; raise it if there is no such callback.
        """
        try:
            try:
                return action()
            finally:
                self._raise_if_batches_differ()  # also in place of the controller's own error
        except TrainingStoppedError as error:
            callbacks: list[Callback] = self._module.trainer.callbacks if self._module else []  # type: ignore[attr-defined]
            callback = next((item for item in callbacks if isinstance(item, AutotuneCallback)), None)
            if callback is None:
                raise
            callback.stopped = error
            return None

    @contextmanager
    def train_step_context(self) -> Iterator[None]:
        """Run a training step's forward pass under autocast; with manual optimization the whole step."""
        # A change of precision that waited for the end of a manual training_step may end the run here.
        with self.run_or_stop(self.controller.autocast) or self.controller.autocast():
            yield
        self._end_window()

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Run a forward pass of validation, test or prediction in the current precision, without scaling."""
        with self.controller.validation():
            yield

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override] # as Lightning's
        """Scale the loss. After a step of manual optimization, another backward pass begins a new window."""
        self._end_window()
        return super().pre_backward(self.controller.scale(tensor), module)

    def optimizer_step(  # type: ignore[override] # as Lightning's
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, unscale, clip, and step if gradients and loss are finite. Return true if it stepped."""
        loss = closure()
        if loss is None and model.automatic_optimization:  # training_step returned None: Lightning drops the window
            self._after_closure(model, optimizer)
            self._window.clear()
            self.run_or_stop(self.controller.discard_window)
            return None
        self._window.unscale_(optimizer)
        self._after_closure(model, optimizer)
        stepped = self._window.step(optimizer, **kwargs)
        if model.automatic_optimization:
            self._end_window()
        return stepped

    def _end_window(self) -> None:
        if self._window.num_stepped:
            self.run_or_stop(self._window.end)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip the unscaled gradients, with manual optimization before the step too."""
        if clip_val > 0:
            self._window.unscale_(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, for Lightning's checkpoint."""
        return {} if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the saved state and precision.

        Raises `FormatError` if this run's config lacks that precision and, before training, `DemotedError` if it was
        measured with another batch size or accumulation.
        """
        self.controller.load_state_dict(state_dict)
        assert self._module is not None  # `connect` sets both
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._raise_if_batches_differ()


def training_loss(module: LightningModule, step: Callable[..., Any], batch: Any, batch_idx: int) -> Any:
    """Call `step`, the module's training_step, on a batch; return its result, or the value of its key "loss"."""
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    output = step(batch, batch_idx) if takes_index else step(batch)
    return loss_of(output)


def loss_of(output: Any) -> Any:
    """Return the output of a training_step, or the value of its key "loss"."""
    return output.get("loss") if isinstance(output, Mapping) else output


NO_LOGGING: dict[str, Any] = dict.fromkeys(("log", "log_dict"), lambda *_, **__: None)


@contextmanager
def _preserve_metric_state(metric: Metric) -> Iterator[None]:
    """Restore the state of a torchmetrics metric after the context."""
    counters = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
    metric_state = copy.deepcopy(metric.metric_state)
    try:
        yield
    finally:
        for name, value in (metric_state | counters).items():
            setattr(metric, name, value)


class AutotuneCallback(Callback):
    """Optional companion of `AutotunePrecision`: logs, warns of a wrong batch size, and ends a run with a checkpoint.

    Writes ``autotune_amp/rung`` (0 is the config's own precision, then its fallbacks), ``scale``, ``skips``, ``steps``
    and ``moves`` to the Trainer's loggers every ``log_every_n_steps`` optimizer steps and with every move.

    If the run has to start again (see `AutotunePrecision`) it saves a checkpoint at the end of that batch and stops the
    Trainer: `fit` returns, `demotion` is the `DemotedError` with the config to continue with, and `checkpoint_path`
    names the checkpoint for ``fit(ckpt_path=...)`` under a Trainer and a DataLoader made from that config. If the
    Trainer's ``min_epochs`` or ``min_steps`` keep it from stopping, `fit` raises that error after saving, as it does
    with `NotPrecisionError` and `NoRungFitsError`.

    checkpoint_path: where to save it, kept as a string; ``autotune_amp.ckpt`` in the Trainer's ``default_root_dir`` if
    None.
    """

    def __init__(self, checkpoint_path: str | os.PathLike[str] | None = None) -> None:
        self.checkpoint_path = None if checkpoint_path is None else os.fspath(checkpoint_path)
        self.demotion: DemotedError | None = None
        self.stopped: TrainingStoppedError | None = None  # set by `AutotunePrecision` to end the run
        self._logged_step = 0
        self._has_saved = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 # a hook
        """Register with the controller. Raises `InvalidRequestError` for a Trainer without `AutotunePrecision`."""
        self.demotion = self.stopped = None
        self._has_saved, self._logged_step = False, 0
        _require_plugin(trainer).controller.on_move(lambda _: self._log_metrics(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 # a hook
        """Warn if the DataLoader's batch size differs from the config's."""
        batch_size, loader = _require_plugin(trainer).controller.config.batch_size, trainer.train_dataloader
        if isinstance(loader, DataLoader) and loader.batch_size not in (None, batch_size):
            rank_zero_warn(f"DataLoader(batch_size) is {loader.batch_size}; the config was measured with {batch_size}.")

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log every ``log_every_n_steps`` optimizer steps, and end training if the run has to start again."""
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined] # set without a type; 0 for never
        if every and step != self._logged_step and step % every == 0:
            self._logged_step = step
            # Logging synchronizes with the device; an overflow found by that may end the run here.
            _require_plugin(trainer).run_or_stop(lambda: self._log_metrics(trainer))
        if self.stopped is None:
            return
        if self._has_saved:  # saved a batch before: min_epochs or min_steps kept the Trainer from stopping
            raise self.stopped
        # A text, since the folder may be remote, such as s3://bucket/run, which a Path would change.
        self.checkpoint_path = self.checkpoint_path or f"{trainer.default_root_dir}/autotune_amp.ckpt"
        trainer.save_checkpoint(self.checkpoint_path)
        self._has_saved = trainer.should_stop = True
        rank_zero_info(f"{self.stopped}\nThe checkpoint is {self.checkpoint_path}.")
        if not isinstance(self.stopped, DemotedError):
            raise self.stopped
        self.demotion = self.stopped

    def _log_metrics(self, trainer: Trainer) -> None:
        values = numeric_metrics(_require_plugin(trainer).controller)
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)


def _require_plugin(trainer: Trainer) -> AutotunePrecision:
    plugin = trainer.precision_plugin
    if not isinstance(plugin, AutotunePrecision):
        raise InvalidRequestError(
            f"AutotuneCallback needs AutotunePrecision; the Trainer's precision plugin is {type(plugin).__name__}.",
            "Make the Trainer with plugins=[AutotunePrecision(config)], or with trainer_arguments(config).",
        )
    return plugin


def trainer_arguments(config: AmpConfig | Recommendation, **others: Any) -> dict[str, Any]:
    """Return keyword arguments for ``lightning.Trainer``: those that the config or recommendation sets, and `others`.

    Use as ``Trainer(**trainer_arguments(config, max_epochs=3, callbacks=[mine]))``. `AutotunePrecision` is added to the
    plugins and `AutotuneCallback` to the callbacks, unless there is one. Set batch size and workers in the
    DataLoader and ``config.environment`` in the shell yourself.

    Raises `InvalidRequestError` if `others` contradict the config: another precision plugin, another accumulation.
    """
    own_config, _ = config_and_options(config)
    plugins, callbacks = _as_list(others.pop("plugins", None)), _as_list(others.pop("callbacks", None))
    precision: Any = others.pop("precision", None)
    precision = precision or next((p for p in plugins if isinstance(p, Precision | str)), None)
    if precision is not None and (not isinstance(precision, AutotunePrecision) or precision.config != own_config):
        raise InvalidRequestError(
            f"The Trainer's precision {precision!r} contradicts the config, which says {own_config.precision}.",
            "Leave it out: AutotunePrecision is the Trainer's precision, made from this config.",
        )
    raise_if_argument_differs(
        "accumulate_grad_batches", others.pop("accumulate_grad_batches", None), own_config.accumulation_steps
    )
    if precision is None:
        plugins.append(AutotunePrecision(config))
    if not any(isinstance(callback, AutotuneCallback) for callback in callbacks):
        callbacks.append(AutotuneCallback())
    return {
        **others,
        "plugins": plugins,
        "callbacks": callbacks,
        "accumulate_grad_batches": own_config.accumulation_steps,
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]

"""Workload made from a LightningModule. The recommended setting is confirmed in the steps of ``Trainer.fit``."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
)
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autotune_amp.core import precisions
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import Fitting, OptimizersOfModel, Workload, type_name
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.dimensions.optimizer_impl import OPTIMIZER_IMPL
from autotune_amp.integrations.bridge import hold_after_last_step, replace_attributes
from autotune_amp.integrations.lightning import NO_LOGGING, AutotunePrecision, loss_of, training_loss
from autotune_amp.precision.modes import MODES
from autotune_amp.trial.context import users_optimizers

__all__ = ["workload"]


def workload(
    module: LightningModule | Callable[[], LightningModule], data: Any, trainer: Trainer | None = None, **options: Any
) -> Workload:
    """Return the `Workload` of ``trainer.fit(module, data)``, for `recommend_config`.

    module: the LightningModule, or a function that makes one with automatic optimization. Trials train copies of it.
    data: the LightningDataModule, whose ``train_dataloader()`` is the baseline and is tried with other batch sizes; or
        data as in ``Workload(data=...)``. ``prepare_data()`` and ``setup("fit")`` are called here, on a copy.
    trainer: your Trainer, whose clipping, accumulation, precision, callbacks and logging interval are used; a
        ``Trainer()`` if None. It is not changed.
    options: other arguments of `Workload`: ``accumulation_steps`` and ``precision``, if your Trainer has other ones
        today, ``name``, ``worst_batch``, ``evaluate``, ``checkpoint``.

    A trial calls the module's ``setup``, ``configure_model``, ``configure_optimizers`` and ``training_step``, and the
    hooks around the batch's transfer of the module or the DataModule; it clips gradients, and steps the schedulers
    with ``interval="step"``. In it ``self.log`` does nothing, ``self.logger`` discards everything, and ``self.trainer``
    is a Trainer in the state of training, of 1,000 epochs and at most 10,000 steps on one device, with the copy of the
    DataModule and its loader.

    The recommended setting is confirmed in the steps of ``fit`` of such a Trainer, with its loop, its progress bar, the
    cost of ``self.log`` and your callbacks. Loggers discard everything, and there is no validation; callbacks that
    write checkpoints or need a validation (`Checkpoint`, `EarlyStopping`) and those that change the batch size or the
    accumulation are left out. ``fit`` is ended within a step, so that no hook of the end of training runs.

    Raises `WorkloadError` for anything but a LightningModule, for manual optimization, for data with several loaders,
    for a Trainer that divides the model among devices (FSDP, DeepSpeed) and, unless ``precision`` is given, for one
    whose precision is neither 32-true nor mixed.
    """
    if isinstance(module, LightningModule) or not callable(module):
        _check_module(module)
    fit = _TrainerFunctions(module, *_set_up_data(data), _step_arguments(trainer))
    trainer_options: dict[str, Any] = {"trainer": "Trainer" if trainer is None else type(trainer).__name__}
    if trainer is not None:
        _check_strategy(trainer)
        trainer_options["accumulation_steps"] = trainer.accumulate_grad_batches
        trainer_options["trainer_ranks"] = trainer.num_devices * trainer.num_nodes
        if "precision" not in options:
            trainer_options["precision"] = _precision(trainer)
    return Workload(
        fit.model,
        fit.loss,
        fit.data,
        OptimizersOfModel(fit.optimizers),
        clip=fit.clip,
        schedule=fit.schedule,
        fit=fit.run,
        **(trainer_options | options),
    )


# Callbacks that write, need a validation or print; and, in the last line, those that set what the search sets.
_EXCLUDED_CALLBACKS = (
    *(Checkpoint, EarlyStopping, ModelSummary),
    *(BatchSizeFinder, LearningRateFinder, GradientAccumulationScheduler),
)
# None is read from torch's flags.
_PRECISIONS: dict[str, precisions.Precision | None] = {"32-true": None, "bf16-mixed": "bf16", "16-mixed": "fp16"}


def _check_strategy(trainer: Trainer) -> None:
    """Raise `WorkloadError` if the Trainer divides the model among devices."""
    if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)):
        raise WorkloadError(
            f"The Trainer uses {type(trainer.strategy).__name__}, but trials run without it, on one device.",
            "Pass a Trainer without it, with a model that fits on one device.",
        )


def _precision(trainer: Trainer) -> precisions.Precision | None:
    """Return the precision of the user's Trainer; raise `WorkloadError` for one that a trial cannot have."""
    name, plugin = str(trainer.precision), type(trainer.precision_plugin)
    if name not in _PRECISIONS or plugin not in (Precision, MixedPrecision, AutotunePrecision):
        raise WorkloadError(
            f"The Trainer has precision={name!r} by {plugin.__name__}, which trials do not have: they train the module "
            "as it is.",
            'Name the precision to compare with, Workload.from_lightning(..., precision="fp32"), "bf16" or "fp16", or '
            "search the command that starts the training: autotune-amp search -- python train.py.",
        )
    return _PRECISIONS[name]


def _step_arguments(trainer: Trainer | None) -> dict[str, Any]:
    """Return the arguments of the user's Trainer that affect its steps, with copies of its callbacks."""
    if trainer is None:
        return {"logger": True, "callbacks": []}
    trainer_callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set without a type
    callbacks = [copy.copy(callback) for callback in trainer_callbacks if not isinstance(callback, _EXCLUDED_CALLBACKS)]
    for callback in callbacks:  # a progress bar refers to its trainer
        vars(callback).update({name: None for name, value in vars(callback).items() if value is trainer})
    return {
        "callbacks": callbacks,
        "enable_progress_bar": any(isinstance(callback, ProgressBar) for callback in callbacks),
        "logger": bool(trainer.loggers),
        "log_every_n_steps": trainer.log_every_n_steps,  # type: ignore[attr-defined]
        "limit_train_batches": trainer.limit_train_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "detect_anomaly": trainer._detect_anomaly,
    }


def _check_module(module: Any) -> None:
    """Raise `WorkloadError` unless `module` is a LightningModule with automatic optimization."""
    if not isinstance(module, LightningModule):
        raise WorkloadError(
            f"Workload.from_lightning needs a LightningModule or a function that returns one, not {type_name(module)}.",
            "Use the module itself, or `lambda: MyModule(...)`; its class comes from `import lightning`.",
        )
    if not module.automatic_optimization:
        raise WorkloadError(
            f"{type_name(module)} has manual optimization; a trial has to run the backward pass and the step itself.",
            "Write its training as Workload(build=..., train_step=...); AutotunePrecision then trains the module.",
        )


def _set_up_data(data: Any) -> tuple[LightningDataModule | None, Any]:
    """Set up a copy of a DataModule; return the copy and its train loader, or None and `data` if it is no DataModule.

    Raises `WorkloadError` if ``train_dataloader()`` returns several loaders.
    """
    if not isinstance(data, LightningDataModule):
        return None, data
    datamodule = copy.copy(data)
    _idle_trainer(datamodule)
    with isolate_rng():
        datamodule.prepare_data()
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
    datamodule.trainer = None  # a Trainer cannot be pickled for the trials
    if isinstance(loader, Mapping | list | tuple):
        raise WorkloadError(
            f"{type(data).__name__}.train_dataloader() returned several loaders, as a {type_name(loader)}.",
            "Give data=make_loader, a function of the batch size that returns one loader.",
        )
    return datamodule, loader


class _TrainerFunctions:
    """Functions of a `Workload` that act as ``Trainer.fit`` does. They are pickled; each trial makes its own Trainer.

    `arguments` are those of the user's Trainer that affect its steps.
    """

    def __init__(
        self,
        module: LightningModule | Callable[[], LightningModule],
        datamodule: LightningDataModule | None,
        data: Any,
        arguments: dict[str, Any],
    ) -> None:
        self.module, self.datamodule, self.data, self.arguments = module, datamodule, data, arguments
        self.batch_idx = 0
        self._optimizers: list[Optimizer] = []  # the latest optimizers, and their schedules by steps
        self._schedulers: list[Any] = []

    @functools.cached_property
    def trainer(self) -> Trainer:
        """Return a Trainer with loader and length set: to read the length, Lightning would start the workers."""
        trainer = _idle_trainer(self.datamodule)
        trainer.fit_loop._combined_loader = CombinedLoader(self.data)
        trainer.fit_loop.max_batches = (isinstance(self.data, DataLoader) and sized_len(self.data)) or math.inf
        return trainer

    def model(self) -> LightningModule:
        """Return the module, set up as by a Trainer before its first step."""
        module = self.module if isinstance(self.module, LightningModule) else self.module()
        _check_module(module)
        module.trainer = self.trainer
        module.setup("fit")
        module.configure_model()
        for part in _lightning_modules(module):
            vars(part).update(NO_LOGGING)
        return module

    def optimizers(self, module: LightningModule) -> list[Optimizer]:
        """Return the optimizers of the module's configure_optimizers, and keep its schedulers for `schedule`."""
        module.trainer = self.trainer
        configured: Any = module.configure_optimizers()
        self._optimizers, schedulers, monitor = _configure_optimizers(configured)
        configs = _configure_schedulers_automatic_opt(schedulers, monitor)
        per_step = (config for config in configs if config.interval == "step" and config.frequency == 1)
        self._schedulers = [
            hold_after_last_step(config.scheduler) for config in per_step if not config.reduce_on_plateau
        ]
        return self._optimizers

    def schedule(self, _: Optimizer) -> list[Any]:
        """Return the schedulers of configure_optimizers that step after each optimizer step and need no validation."""
        return self._schedulers

    def clip(self, module: LightningModule) -> None:
        """Clip the gradients as the user's Trainer does before a step."""
        value, algorithm = (self.arguments.get(f"gradient_clip_{name}") for name in ("val", "algorithm"))
        for optimizer in self._optimizers:
            module.configure_gradient_clipping(optimizer, value, algorithm)

    def _clips(self, module: LightningModule) -> bool:
        """Return whether the Trainer clips gradients, or the module has a hook in which it may."""
        hooks = ("configure_gradient_clipping", "on_before_optimizer_step", "optimizer_step")
        return bool(self.arguments.get("gradient_clip_val")) or any(is_overridden(hook, module) for hook in hooks)

    def loss(self, module: LightningModule, batch: Any) -> Tensor:
        """Return the loss of the module's training_step."""
        module.trainer = self.trainer  # copies of the module lack it
        with torch.autocast(module.device.type, enabled=False):
            for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
                is_of_data = self.datamodule is not None and is_overridden(name, self.datamodule)
                batch = getattr(self.datamodule if is_of_data else module, name)(batch, 0)
        self.batch_idx += 1  # never 0, for which a training_step may do extra work
        loss: Tensor = training_loss(module, module.training_step, batch, self.batch_idx)
        return loss

    def run(self, fitting: Fitting) -> None:
        """Run ``Trainer.fit`` on the module and the DataModule, whose setup is not repeated."""
        module: LightningModule = fitting.model
        callbacks = [copy.copy(callback) for callback in self.arguments["callbacks"]]
        logger = DummyLogger() if self.arguments["logger"] else False  # the copies of loggers in trials are empty
        device = next(module.parameters()).device
        trainer = _new_trainer(
            **self.arguments | {"callbacks": [*callbacks, _StepReporter(fitting)], "logger": logger},
            accelerator="gpu" if device.type == "cuda" else device.type,
            devices=1 if device.index is None else [device.index],
            accumulate_grad_batches=fitting.setting.accumulation_steps,
            plugins=[LightningEnvironment(), *_precision_plugins(fitting, device, clips=self._clips(module))],
            limit_val_batches=0,
            num_sanity_val_steps=0,
        )
        configure_callbacks = module.configure_callbacks
        with ExitStack() as stack:
            for part in _lightning_modules(module):
                stack.callback(vars(part).update, {name: vars(part).pop(name) for name in NO_LOGGING})
            replacements: dict[str, Any] = {
                "prepare_data": _do_nothing,
                "setup": _do_nothing,
                "configure_model": _do_nothing,
            }
            replacements |= {"configure_callbacks": lambda: _callbacks_in_steps(configure_callbacks())}
            stack.enter_context(replace_attributes(module, **replacements))
            data_arguments: dict[str, Any] = {"train_dataloaders": fitting.data}
            if self.datamodule is not None:
                replacements = {
                    "prepare_data": _do_nothing,
                    "setup": _do_nothing,
                    "teardown": _do_nothing,
                    "trainer": None,
                }
                stack.enter_context(
                    replace_attributes(self.datamodule, **replacements, train_dataloader=lambda: fitting.data)
                )
                data_arguments = {"datamodule": self.datamodule}
            stack.enter_context(_suppress_trainer_messages())
            trainer.fit(module, **data_arguments)


def _lightning_modules(module: LightningModule) -> list[LightningModule]:
    return [part for part in module.modules() if isinstance(part, LightningModule)]


def _precision_plugins(fitting: Fitting, device: torch.device, *, clips: bool) -> list[Precision]:
    """Return Lightning's precision plugin, or `AutotunePrecision` where Lightning's own does something else.

    Lightning runs fp16 on a CPU as bf16, and refuses to clip the gradients of a fused optimizer in mixed precision.
    """
    setting = fitting.setting
    if not MODES[setting.precision].uses_autocast:
        return []
    optimizers = users_optimizers(fitting.optimizer)
    is_fused = OPTIMIZER_IMPL.value_in(setting) == "fused" or any(
        getattr(optimizer, "_step_supports_amp_scaling", False) for optimizer in optimizers
    )
    if (clips and is_fused) or (setting.precision == "fp16" and device.type == "cpu"):
        config = AmpConfig.of(setting, loss_scale=fitting.loss_scale)
        return [AutotunePrecision(config, guard=setting.precision == "fp16")]  # Lightning checks no gradients of bf16
    if setting.precision == "fp16":
        return [MixedPrecision("16-mixed", device.type, fitting.scaler)]
    return [MixedPrecision("bf16-mixed", device.type)]


def _callbacks_in_steps(callbacks: Any) -> list[Callback]:
    """Return the callbacks of a module's configure_callbacks, without those of `_EXCLUDED_CALLBACKS`."""
    listed = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    return [callback for callback in listed if not isinstance(callback, _EXCLUDED_CALLBACKS)]


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


class _StepReporter(Callback):
    """Callback that calls ``fitting.stepped`` with the loss after each step.

    It gives the Trainer's optimizers the setting's implementation, and removes schedulers that need a validation.
    """

    def __init__(self, fitting: Fitting) -> None:
        self._fitting = fitting
        self._num_steps = self._num_batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 # a hook
        """Set the implementation of the optimizers, and keep only the schedulers that work without a validation."""
        if (implementation := OPTIMIZER_IMPL.value_in(self._fitting.setting)) is not None:
            live = LiveTraining([], trainer.optimizers, trainer.strategy.root_device)
            OPTIMIZER_IMPL.change_once(implementation, live)
        configs = [config for config in trainer.strategy.lr_scheduler_configs if not config.reduce_on_plateau]
        trainer.strategy.lr_scheduler_configs = configs
        for config in configs:
            hold_after_last_step(config.scheduler)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        """Call `stepped`. If it raises to end the run, keep only progress bars, which have threads to stop."""
        self._num_batches += 1
        if trainer.global_step == self._num_steps:  # no optimizer step: gradients accumulate
            return
        num_batches, self._num_batches, self._num_steps = self._num_batches, 0, trainer.global_step
        try:
            self._fitting.stepped(loss_of(outputs), num_batches)
        except BaseException:
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set without a type
            callbacks[:] = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
            raise


def _idle_trainer(datamodule: LightningDataModule | None) -> Trainer:
    """Return a Trainer in the state of fitting, for modules that read ``self.trainer``. It runs nothing."""
    trainer = _new_trainer(
        accelerator="cpu",
        devices=1,
        logger=DummyLogger(),
        plugins=[LightningEnvironment()],
        enable_progress_bar=False,
    )
    trainer.state.fn = TrainerFn.FITTING
    trainer.training = True
    trainer.datamodule = datamodule  # type: ignore[attr-defined] # set without a type
    if datamodule is not None:
        datamodule.trainer = trainer
    return trainer


def _new_trainer(**arguments: Any) -> Trainer:
    """Return a Trainer that writes no checkpoint."""
    with _suppress_trainer_messages():
        return Trainer(
            max_epochs=1000,  # Lightning's default, for schedules that read it
            max_steps=10_000,
            enable_checkpointing=False,
            enable_model_summary=False,
            **arguments,
        )


@contextmanager
def _suppress_trainer_messages() -> Iterator[None]:
    """Silence Lightning's messages about devices and loaders, which do not concern the user's own training run."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)

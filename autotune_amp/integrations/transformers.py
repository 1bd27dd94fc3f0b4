"""Transformers: a Trainer whose autocast and scaler are the PrecisionController's, and its callback.

`Workload.from_trainer` makes a workload of your Trainer. The recommended setting is confirmed by a short `train()`,
with your callbacks and logging but without evaluation, checkpoints, uploads and `report_to`. It is ended early, so that
no hook of the end of training runs.

`AutotuneTrainer` logs the precision's index in the fallbacks (`rung`), the loss scale, skipped steps and moves, and its
checkpoints hold the controller's state. It also skips bf16 and fp32 steps with infinite or NaN gradients, which a plain
Trainer takes. `config.to_training_arguments(like=today)` keeps the class of your arguments and the values that the
config does not set: learning rate, optimizer, schedule. So `class MyTrainer(AutotuneTrainer, Seq2SeqTrainer)` trains
with your `Seq2SeqTrainingArguments`. Pass the controller's options as `AutotuneTrainer(...,
controller_options={"run_log": "run.jsonl", "on_demotion": "checkpoint_and_stop"})`, and likewise to
`AutotuneAccelerator`. A fallback with another batch size or accumulation always ends `train()`, with a checkpoint and a
`DemotedError` that has the config to continue with.

```python
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from autotune_amp import Workload, recommend_config
from autotune_amp.integrations.transformers import AutotuneTrainer

rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (256, 16))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
today = TrainingArguments("out", per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True)
trainer = Trainer(model, today, train_dataset=rows)  # as you have it

config = recommend_config(Workload.from_trainer(trainer), budget=60).config
args = config.to_training_arguments(like=today, max_steps=10)
tuned = AutotuneTrainer(model, args, train_dataset=rows, amp_config=config)
tuned.train()
print(config.batch_size * config.accumulation_steps, tuned.controller.status().num_steps)
```
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from autotune_amp.core.config import AmpConfig, DemotedError, setting_beyond_training_arguments, training_arguments
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.dimensions.prepare import prepare
from autotune_amp.integrations.accelerate import unwrap_optimizers
from autotune_amp.integrations.bridge import config_and_options, raise_if_window_differs
from autotune_amp.precision.forward_wrapper import unwrap
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.status import metric_values

__all__ = ["AutotuneCallback", "AutotuneTrainer"]

_NEXT_TRAINER = (
    "a new AutotuneTrainer(amp_config=error.config, args=error.config.to_training_arguments(like=trainer.args))"
)


class AutotuneTrainer(Trainer):
    """Trainer that trains in the config's precision and steps it down when that fails.

    It is used like ``transformers.Trainer``. Adapt other trainers by inheriting from both, this one first: ``class
    MyTrainer(AutotuneTrainer, Seq2SeqTrainer)``. The forward pass runs under the controller's autocast, on a CPU too,
    where Accelerate's own fp16 has neither autocast nor scaler; bf16 and fp32 steps that are not finite are skipped.
    `controller` is the PrecisionController; the model is attached to it at the first step, and the latest batch is run
    again to diagnose a step that is not finite. Checkpoints hold its state in their ``scaler.pt``, and
    `resume_from_checkpoint` continues in the saved precision. A second ``train()`` continues with the controller's
    state, also after a stop or an interruption; a new model by ``model_init`` gets a new controller.

    If the run has to stop, ``train()`` saves a checkpoint, ends as usual, and then raises `NotPrecisionError` or
    `NoRungFitsError`, or `DemotedError` for a fallback with another batch size or accumulation, and for any fallback
    with ``{"on_demotion": "checkpoint_and_stop"}``.

    amp_config: precision, fallbacks, loss scale, batch size and accumulation, or the recommendation that holds them.
        `args` must agree with it; ``config.to_training_arguments(like=today)`` makes such arguments, of today's class.
    controller_options: more arguments for the `PrecisionController`: ``guard``, ``halt``, ``on_demotion``,
        ``run_log`` and so on.
    args, kwargs: the arguments of ``Trainer``.

    Raises `InvalidRequestError` for arguments that contradict the config, and under DeepSpeed or ``nn.DataParallel``,
    which cast themselves.
    """

    def __init__(
        self,
        *args: Any,
        amp_config: AmpConfig | Recommendation,
        controller_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._amp_config, options = config_and_options(amp_config)
        self._controller_options = options | dict(controller_options or {})
        self._attached_model: nn.Module | None = None
        self._prepared: Any = None  # the latest training step's inputs
        super().__init__(*args, **kwargs)
        raise_if_model_has_autocast(self, InvalidRequestError)
        # First, so that callbacks that report the logs get its metrics.
        self.callback_handler.callbacks.insert(0, AutotuneCallback(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator as in Trainer, with the controller as its scaler.

        Raises `InvalidRequestError` for arguments that contradict the config, and under DeepSpeed.
        """
        raise_if_arguments_differ(self.args, self._amp_config)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            raise InvalidRequestError(
                "AutotuneTrainer cannot train under DeepSpeed, which casts and scales itself.",
                "Use a Trainer with the JSON that `autotune-amp export --to deepspeed` writes.",
            )
        self._make_controller()
        self.accelerator.unscale_gradients = self._unscale_gradients

    def _make_controller(self) -> None:
        self.controller = _StopStoringController(self._amp_config, self.args.device, **self._controller_options)
        self.controller.close()  # until `train`: outside of it, SIGTERM is not the controller's
        self.controller.on_move(lambda _: self._raise_if_window_differs())
        self.accelerator.scaler = self.controller
        self._attached_model = None

    def _raise_if_window_differs(self) -> None:
        reason = "a running Trainer cannot change its batch size or accumulation"
        raise_if_window_differs(self.controller, self._amp_config, reason, f"Go on with {_NEXT_TRAINER}.")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer as in Trainer, and apply the config's settings that TrainingArguments lack."""
        optimizer = super().create_optimizer(*args, **kwargs)
        prepare(setting_beyond_training_arguments(self._amp_config), cast("nn.Module", self.model), optimizer)
        return optimizer

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Create a model as in Trainer. A second model gets a new controller, at the config's own precision."""
        if self._attached_model is not None:
            self.controller.detach()
            self._make_controller()
            if self.is_in_train:
                self.controller.open()
        return super().call_model_init(trial)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._raise_if_window_differs()
        return prepared

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Accelerate's own autocast would wrap the model's forward, in a fixed precision.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        """Replace ``accelerator.unscale_gradients``, which only unscales in Accelerate's own fp16."""
        for plain_optimizer in unwrap_optimizers(self.accelerator._optimizers if optimizer is None else optimizer):
            self.controller.unscale_(plain_optimizer)

    def autocast_smart_context_manager(
        self,
        cache_enabled: bool | None = True,  # noqa: ARG002 # the Trainer's signature
    ) -> AbstractContextManager[object]:
        """Return the autocast context of the current precision."""
        return self.controller.autocast() if torch.is_grad_enabled() else self.controller.validation()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run a training step as in Trainer. Its arguments are kept for the controller's diagnosis, and the tokens of
        its inputs are counted.
        """
        if self._attached_model is not model:
            self.controller.attach(model, self._rerun)
            self._attached_model = model
        self._latest = model, inputs, num_items_in_batch
        self.controller.count_tokens(inputs)
        return super().training_step(model, inputs, num_items_in_batch)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        is_training = cast("nn.Module", self.model).training
        prepared = super()._prepare_inputs(inputs)
        if is_training:
            self._prepared = copy.copy(prepared)  # some losses take keys out
        return prepared

    def _rerun(self) -> Tensor:
        """Run the latest training step again without its backward pass, and return its loss.

        Neither are its inputs prepared again, which a trainer may generate or take from a buffer, nor are the trainer's
        counters changed.
        """
        attributes, prepared = self.__dict__, self._prepared
        before = dict(attributes)
        attributes["_prepare_inputs"] = lambda _: copy.copy(prepared)
        try:
            with collect_losses_without_backward(self.accelerator) as losses:
                super().training_step(*self._latest)
        finally:
            attributes.clear()
            attributes.update(before)
        return torch.stack(losses).sum()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction step as in Trainer, in the current precision, with logits in fp32, as in Accelerate."""
        with self.controller.validation():  # generation has no autocast of the Trainer's
            loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, convert_to_fp32(logits), labels

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as in Trainer. If the controller stops the run, raise its `TrainingStoppedError` at the end."""
        self.controller.discard_window()  # gradients of an interrupted run, which the Trainer drops
        self.controller.stopped = None
        self.controller.open()
        try:
            output = super().train(*args, **kwargs)
        finally:
            self.controller.close()
        stopped = self.controller.stopped
        if stopped is None:
            return output
        checkpoint = Path(self._get_output_dir(self._trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        saved = f"{checkpoint} is its checkpoint." if checkpoint.is_dir() else "No checkpoint was saved."
        if not isinstance(stopped, DemotedError):
            raise type(stopped)(stopped.message, f"{stopped.next_step} {saved}") from stopped
        next_step = f"{saved} Go on with {_NEXT_TRAINER} and train(resume_from_checkpoint={str(checkpoint)!r})."
        raise DemotedError(stopped.message, next_step, stopped.config) from stopped


class _StopStoringController(PrecisionController):
    """Controller that stores a `TrainingStoppedError` instead of raising it, so that the Trainer saves a checkpoint."""

    stopped: TrainingStoppedError | None = None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update scale and precision as in PrecisionController; store a stop error in `stopped`."""
        self._store_stop_error(functools.partial(super().update, new_scale))

    def synchronize(self) -> None:
        """Synchronize as in PrecisionController; store a stop error in `stopped`."""
        self._store_stop_error(super().synchronize)

    def _store_stop_error(self, action: Callable[[], object]) -> None:
        try:
            action()
        except TrainingStoppedError as error:
            self.stopped = self.stopped or error  # the first tells the cause


class AutotuneCallback(TrainerCallback):
    """Callback that logs the controller's metrics, and ends training with a checkpoint when the controller stops it.

    It adds the numeric metrics (`autotune_amp.runtime.status.METRICS`) to each log entry, and to ``state.log_history``
    ``autotune_amp/precision`` too. An `AutotuneTrainer` adds this callback itself.
    """

    def __init__(self, trainer: AutotuneTrainer) -> None:
        self._trainer = trainer  # not its controller, which the trainer may replace

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the controller's metrics to the logs and to the last entry of the history."""
        metrics = metric_values(self._trainer.controller.status())
        kwargs["logs"].update({name: value for name, value in metrics.items() if not isinstance(value, str)})
        state.log_history[-1].update(metrics)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Request a checkpoint and the end of training if the controller has stopped the run."""
        if self._trainer.controller.stopped is not None:
            control.should_save = control.should_training_stop = True


@contextmanager
def collect_losses_without_backward(accelerator: Accelerator) -> Iterator[list[Tensor]]:
    """Replace ``accelerator.backward`` within the context: each loss passed to it is appended to the yielded list."""
    losses: list[Tensor] = []
    accelerator.backward = lambda loss, **_: losses.append(loss)
    try:
        yield losses
    finally:
        del accelerator.backward


def raise_if_model_has_autocast(trainer: Trainer, error: type[InvalidRequestError]) -> None:
    """Raise `error` if an Accelerator has wrapped the model's forward in its own autocast."""
    model = unwrap(cast("nn.Module", trainer.model))
    if hasattr(model, "_original_forward"):
        raise error(
            f"Accelerate has wrapped the forward of {type(model).__name__} in its own autocast, in an earlier training "
            "run in mixed precision.",
            "Load the model again, or remove the autocast with `accelerator.unwrap_model(model, "
            "keep_fp32_wrapper=False)`.",
        )


def raise_if_arguments_differ(args: Any, config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for TrainingArguments that differ from the config."""
    required = training_arguments(config)
    names = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if config.is_compiled:
        names.append("torch_compile")
    if args.tf32 is not None and "tf32" in required:  # a config that keeps the script's TF32 flags sets none
        names.append("tf32")
    arguments = [(name, getattr(args, name), required[name]) for name in names]
    if args.mixed_precision != "no":  # with "no" the controller sets the precision
        arguments.append(("mixed_precision", args.mixed_precision, config.autocast_precision))
    arguments.append(("auto_find_batch_size", args.auto_find_batch_size, False))
    wrong = [f"{name}={value!r}, not {needed!r}" for name, value, needed in arguments if value != needed]
    if wrong:
        raise InvalidRequestError(
            f"TrainingArguments, or `accelerate launch`, contradict the config: {'; '.join(wrong)}.",
            "Use amp_config.to_training_arguments(like=args), which keeps all other arguments, and omit "
            "--mixed_precision: the config sets the precision.",
        )
    if args.n_gpu > 1:
        raise InvalidRequestError(
            f"The Trainer sees {args.n_gpu} GPUs in one process: nn.DataParallel does not keep to a bf16 autocast.",
            "Start it with torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES=0).",
        )

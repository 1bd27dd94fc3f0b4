"""Transformers workload from a Trainer. Its confirmation is measured in the steps of the Trainer itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.optimization import GreedyLR
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from autotune_amp.core.config import AmpConfig, training_arguments
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.workload import Fitting, Workload, type_name
from autotune_amp.integrations.bridge import lasting, replaced
from autotune_amp.integrations.transformers import (
    AutotuneCallback,
    AutotuneTrainer,
    caught_losses,
    refuse_baked_autocast,
)
from autotune_amp.precision.modes import MODES

__all__ = ["workload"]

NUM_STEPS = 10_000  # assumed length of the training run, for schedules that ask; a trial is always its beginning

# Attributes that training_step does not use, and those that report, write or cannot leave this process.
_LEFT_BEHIND = (
    "accelerator",
    "gather_function",
    "eval_dataset",
    "compute_metrics",
    "lr_scheduler",
    "optimizer",
    "model_init",  # train() would make another model
)
_QUIET = {
    **{"report_to": [], "push_to_hub": False, "output_dir": "", "auto_find_batch_size": False, "debug": []},
    **{"eval_strategy": IntervalStrategy.NO, "eval_on_start": False, "save_strategy": SaveStrategy.NO},
    **{"load_best_model_at_end": False, "max_steps": NUM_STEPS},
}
# Methods disabled because the user's callbacks may still request them.
_LEFT_OUT = ("_save_checkpoint", "save_model", "evaluate", "push_to_hub", "create_model_card")
# Callbacks that report or upload, and those that rely on an evaluation.
_OUTSIDE = "transformers.integrations."
_WITHOUT_EVALUATION = (EarlyStoppingCallback, JITCheckpointCallback)


def workload(trainer: Trainer) -> Workload:
    """Return the `Workload` of a Trainer; see `Workload.from_trainer`."""
    _refuse(trainer)
    left = _travelling(trainer)
    return Workload(
        model=trainer.model,
        loss=_Step(left),
        data=_loader(trainer),
        optimizer=_optimizer(trainer),
        name=type(trainer.model).__name__,
        accumulation_steps=trainer.args.gradient_accumulation_steps,
        precision=_precision(trainer),
        weighs_passes=_weighs_passes(trainer),
        clip=functools.partial(_clip, trainer.args.max_grad_norm),
        schedule=_Schedule(left),
        fit=_Fit(trainer),
        trainer=type(trainer).__name__,
    )


def _refuse(trainer: Trainer) -> None:
    if isinstance(trainer, AutotuneTrainer):
        raise WorkloadError(
            f"{type_name(trainer)} is an AutotuneTrainer, which sets the precision that is to be searched.",
            "Give the Trainer that it is made from, with the same arguments.",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise WorkloadError(
            "The Trainer trains under DeepSpeed or FSDP, and a trial on one device alone.",
            "Give a Trainer without them whose model fits on one device.",
        )
    if trainer.train_dataset is None:
        raise WorkloadError(
            "The Trainer has no train_dataset.",
            "Give it the dataset that it trains on: Trainer(..., train_dataset=dataset).",
        )
    refuse_baked_autocast(trainer, WorkloadError)


def _precision(trainer: Trainer) -> Precision | None:
    """Return the precision of Accelerate's autocast; None without one (as fp16 on a CPU): torch's flags count."""
    mode = MODES.get(trainer.accelerator.mixed_precision)
    return mode.precision if trainer.accelerator.native_amp and mode is not None and mode.uses_autocast else None


def _weighs_passes(trainer: Trainer) -> bool:
    """Return whether ``training_step`` divides a loss by the number of items in all passes of its step.

    Items are counted only under "labels"; without them a mean loss is divided by the number of passes.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    counts_items = trainer.model_accepts_loss_kwargs and "labels" in trainer.label_names
    return counts_items or trainer.compute_loss_func is not None


def _loader(trainer: Trainer) -> DataLoader[Any]:
    """Return the trainer's own train loader, with its collator and sampler, at the batch size of one device."""
    maker = copy.copy(trainer)
    maker.accelerator = copy.copy(trainer.accelerator)
    maker.accelerator.prepare = lambda loader: loader  # it is needed unprepared
    maker._train_batch_size = trainer.args.per_device_train_batch_size
    if type(trainer)._remove_unused_columns is Trainer._remove_unused_columns:
        vars(maker)["_remove_unused_columns"] = functools.partial(_with_used_columns, maker)
    return maker.get_train_dataloader()


def _with_used_columns(trainer: Trainer, dataset: Any, description: str | None = None) -> Any:
    """Return the dataset without unused columns, removed in a fixed order.

    The Trainer removes them in the order of a set, which changes the dataset's own digest.
    """
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        unused = sorted(set(dataset.column_names) - set(trainer._signature_columns or ()))
        if len(unused) < len(dataset.column_names):  # otherwise the Trainer raises an error
            dataset = dataset.remove_columns(unused)
    return Trainer._remove_unused_columns(trainer, dataset, description)


def _optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """Return the trainer's own optimizer, or one made the same way; only its class and hyperparameters are used."""
    maker = copy.copy(trainer)
    optimizer = maker.create_optimizer()
    return getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it in training


def _travelling(trainer: Trainer) -> Trainer:
    """Return a copy of the trainer that can be sent to trials, sharing the model and the dataset."""
    left = copy.copy(trainer)
    left.__dict__.update(dict.fromkeys(_LEFT_BEHIND))
    left.args = copy.copy(trainer.args)
    left.args.__dict__.update(_QUIET, distributed_state=None, gradient_accumulation_steps=1)
    left.args.__dict__.pop("_setup_devices", None)  # recomputed where it runs
    flow = [DefaultFlowCallback()]
    left.callback_handler = CallbackHandler(flow, left.model, left.processing_class, None, None)  # type: ignore[no-untyped-call] # transformers does not type it
    left.state, left.control = TrainerState(), TrainerControl()
    return left


def _arrive(trainer: Trainer, device: torch.device, mixed_precision: str = "no") -> None:
    """Set the trainer up on `device`. Without a mixed precision of its own, the trial sets the precision.

    Raises `WorkloadError` if the Trainer would train on another device.
    """
    args = trainer.args
    args.__dict__.pop("_setup_devices", None)  # recomputed
    args.use_cpu = device.type == "cpu"
    found = args.device
    if found.type != device.type or (found.index or 0) != (device.index or 0):
        raise WorkloadError(
            f"The Trainer would train on {found}, the trial on {device}.",
            f"Search with device={str(found)!r}, and choose among several by CUDA_VISIBLE_DEVICES.",
        )
    args._n_gpu = min(1, args.n_gpu)
    args.mixed_precision = mixed_precision
    trainer.create_accelerator_and_postprocess()


class _Step:
    """Function ``loss(model, batch)`` that returns the loss on which the trainer's training_step runs backward."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._made_ready: WeakSet[nn.Module] | None = None  # models set up in this process
        self._prepared: tuple[nn.Module, nn.Module] | None = None  # the latest model, and its prepared wrapper

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of one pass over `batch`, as if it were the whole optimizer step."""
        trainer = self._trainer
        if self._made_ready is None:
            _arrive(trainer, next(model.parameters()).device)
            self._made_ready = WeakSet()
        if self._prepared is None or self._prepared[0] is not model:
            if model not in self._made_ready:
                self._made_ready.add(model)
                self._make_ready(model)
            self._prepared = model, trainer.accelerator.prepare_model(model)
        (inputs,), num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1
        with caught_losses(trainer.accelerator) as losses:
            trainer.training_step(self._prepared[1], inputs, num_items)
        if not losses:
            raise WorkloadError(
                f"{type_name(trainer)}.training_step did not call self.accelerator.backward(loss).",
                "Call it in place of loss.backward(), as the Trainer's own training_step does.",
            )
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _make_ready(self, model: nn.Module) -> None:
        """Apply all that ``train()`` does to a model before its loop: checkpointing, NEFTune, Liger kernels."""
        self._trainer.model = self._trainer.model_wrapped = model
        vars(self._trainer)["_inner_training_loop"] = lambda **_: None
        Trainer.train(self._trainer)


def _clip(max_norm: float, model: nn.Module) -> None:
    """Clip as the Trainer does before each step; without clipping the norm is still computed, as for its logs."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else torch.inf)


class _Schedule:
    """Function ``schedule(optimizer)`` that returns the trainer's own scheduler, unless an evaluation steps it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        maker = copy.copy(self._trainer)
        maker.optimizer, maker.lr_scheduler = optimizer, None
        scheduler: Any = maker.create_scheduler(NUM_STEPS, optimizer)
        return [] if isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)) else [lasting(scheduler)]


class _Fit:
    """Function ``fit(fitting)`` that runs the trainer's own ``train()`` without saving, evaluation and reports."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = left = _travelling(trainer)
        kept = [one for one in trainer.callback_handler.callbacks if not _is_left_out(one)]
        self._callbacks = [_told_of(one, trainer, left) for one in kept]

    def __call__(self, fitting: Fitting) -> None:
        trainer, model = self._trainer, fitting.model
        config = AmpConfig.of(fitting.setting, loss_scale=fitting.loss_scale)
        device = next(model.parameters()).device
        trainer.args.__dict__.update(training_arguments(config))
        trainer.model = trainer.model_wrapped = model
        callbacks = [copy.copy(callback) for callback in self._callbacks]
        if config.precision == "fp16" and device.type == "cpu":  # where Accelerate has no fp16
            callbacks.insert(0, _take_controller(trainer, config))
        mode = MODES[config.precision]
        _arrive(trainer, device, mode.precision if mode.uses_autocast else "no")
        trainer._train_batch_size = trainer.args.train_batch_size
        if fitting.scaler is not None and not isinstance(trainer, AutotuneTrainer):
            trainer.accelerator.scaler = fitting.scaler
        step = _LatestLoss(trainer.training_step)
        callbacks.append(_StepEnds(lambda: fitting.stepped(step.loss, trainer.current_gradient_accumulation_steps)))
        trainer.callback_handler = CallbackHandler(callbacks, model, trainer.processing_class, None, None)  # type: ignore[no-untyped-call] # transformers does not type it
        trainer.control = TrainerControl()
        trainer.optimizer, trainer.lr_scheduler = fitting.optimizer, None
        try:
            with replaced(trainer, training_step=step, **dict.fromkeys(_LEFT_OUT, _nothing)):
                trainer.train()
        finally:
            trainer.accelerator.free_memory()
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.callback_handler.callbacks.clear()


def _is_left_out(callback: TrainerCallback) -> bool:
    is_outside = any(kind.__module__.startswith(_OUTSIDE) for kind in type(callback).__mro__)
    return is_outside or isinstance(callback, _WITHOUT_EVALUATION)


def _told_of(callback: TrainerCallback, trainer: Trainer, left: Trainer) -> TrainerCallback:
    """Return a copy of a callback that refers to `left` instead of `trainer`."""
    own = copy.copy(callback)
    vars(own).update({name: left for name, value in vars(callback).items() if value is trainer})
    return own


def _take_controller(trainer: Trainer, config: AmpConfig) -> TrainerCallback:
    """Turn the trainer into an AutotuneTrainer in place, and return the callback that it needs."""
    tuned: Any = trainer
    if not isinstance(trainer, AutotuneTrainer):
        tuned.__class__ = type(type(trainer).__name__, (AutotuneTrainer, type(trainer)), {})
    tuned._amp_config, tuned._controller_options, tuned._attached = config, {}, None
    return AutotuneCallback(tuned)


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


class _LatestLoss:
    """Wrapper of a training_step that keeps the loss it returned last."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self._own = own
        self.loss: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.loss = self._own(*args, **kwargs)
        return self.loss


class _StepEnds(TrainerCallback):
    """Callback that calls `stepped` at the end of each optimizer step."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Call `stepped`."""
        self._stepped()

"""Workload made from a transformers Trainer. The recommended setting is confirmed in the steps of ``train()``."""

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
from autotune_amp.core.workload import Fitting, OptimizersOfModel, Workload, type_name
from autotune_amp.integrations.bridge import hold_after_last_step, replace_attributes
from autotune_amp.integrations.transformers import (
    AutotuneCallback,
    AutotuneTrainer,
    collect_losses_without_backward,
    raise_if_model_has_autocast,
)
from autotune_amp.precision.modes import MODES
from autotune_amp.trial.context import constructor_arguments

__all__ = ["workload"]

NUM_STEPS = 10_000  # assumed length of the training run, for its schedule

# Attributes that are set to None in trials: unused by training_step, reporting, writing, or not picklable.
_UNSENT_ATTRIBUTES = (
    "accelerator",
    "gather_function",
    "eval_dataset",
    "compute_metrics",
    "lr_scheduler",
    "optimizer",
    "model_init",  # train() would make another model
)
_TRIAL_ARGUMENTS = {
    **{"report_to": [], "push_to_hub": False, "output_dir": "", "auto_find_batch_size": False, "debug": []},
    **{"eval_strategy": IntervalStrategy.NO, "eval_on_start": False, "save_strategy": SaveStrategy.NO},
    **{"load_best_model_at_end": False, "max_steps": NUM_STEPS},
}
# Methods that do nothing in trials, since the user's callbacks may request them.
_DISABLED_METHODS = ("_save_checkpoint", "save_model", "evaluate", "push_to_hub", "create_model_card")
# Callbacks left out of trials: those that report or upload, and those that need an evaluation or write checkpoints.
_REPORTING_PACKAGE = "transformers.integrations."
_EVALUATION_CALLBACKS = (EarlyStoppingCallback, JITCheckpointCallback)


def workload(trainer: Trainer) -> Workload:
    """Return the `Workload` of a Trainer; see `Workload.from_trainer`."""
    _check_trainer(trainer)
    sendable = _sendable_copy(trainer)
    return Workload(
        model=trainer.model,
        loss=_StepLoss(sendable),
        data=_loader(trainer),
        optimizer=_optimizer(trainer, sendable),
        name=type(trainer.model).__name__,
        accumulation_steps=trainer.args.gradient_accumulation_steps,
        precision=_precision(trainer),
        weighs_passes=_weighs_passes(trainer),
        clip=functools.partial(_clip, trainer.args.max_grad_norm),
        schedule=_SchedulerFactory(sendable),
        fit=_TrainFunction(trainer),
        trainer=type(trainer).__name__,
        trainer_ranks=max(1, trainer.args.n_gpu),
    )


def _check_trainer(trainer: Trainer) -> None:
    if isinstance(trainer, AutotuneTrainer):
        raise WorkloadError(
            f"{type_name(trainer)} is an AutotuneTrainer, whose precision is already set by a config.",
            "Pass a plain Trainer with the same arguments.",
        )
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise WorkloadError(
            "The Trainer uses DeepSpeed or FSDP, but trials run without them, on one device.",
            "Pass a Trainer without them, with a model that fits on one device.",
        )
    if trainer.train_dataset is None:
        raise WorkloadError(
            "The Trainer has no train_dataset.",
            "Set the dataset that it trains on: Trainer(..., train_dataset=dataset).",
        )
    raise_if_model_has_autocast(trainer, WorkloadError)


def _precision(trainer: Trainer) -> Precision | None:
    """Return the precision of Accelerate's autocast, or None without autocast, as for fp16 on a CPU."""
    mode = MODES.get(trainer.accelerator.mixed_precision)
    return mode.precision if trainer.accelerator.native_amp and mode is not None and mode.uses_autocast else None


def _weighs_passes(trainer: Trainer) -> bool:
    """Whether ``training_step`` divides a loss by the number of items in all passes of its optimizer step.

    The Trainer counts items only in "labels"; without them it divides a mean loss by the number of passes.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    counts_items = trainer.model_accepts_loss_kwargs and "labels" in trainer.label_names
    return counts_items or trainer.compute_loss_func is not None


def _loader(trainer: Trainer) -> DataLoader[Any]:
    """Return the trainer's own train loader, with its collator and sampler, at the batch size of one device."""
    copied = copy.copy(trainer)
    copied.accelerator = copy.copy(trainer.accelerator)
    copied.accelerator.prepare = lambda loader: loader  # the search prepares it itself
    copied._train_batch_size = trainer.args.per_device_train_batch_size
    if type(trainer)._remove_unused_columns is Trainer._remove_unused_columns:
        vars(copied)["_remove_unused_columns"] = functools.partial(_remove_unused_columns, copied)
    return copied.get_train_dataloader()


def _remove_unused_columns(trainer: Trainer, dataset: Any, description: str | None = None) -> Any:
    """Return the dataset without unused columns, removed in a fixed order.

    The Trainer removes them in the order of a set, which differs between processes and changes the dataset's digest.
    """
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        unused = sorted(set(dataset.column_names) - set(trainer._signature_columns or ()))
        if len(unused) < len(dataset.column_names):  # otherwise the Trainer raises an error
            dataset = dataset.remove_columns(unused)
    return Trainer._remove_unused_columns(trainer, dataset, description)


def _optimizer(trainer: Trainer, sendable: Trainer) -> Any:
    """Return the optimizer that the user gave the trainer, or a function that makes one of a model as the trainer does.

    In training the trainer sets its own, which is known by its class, defaults and parameter groups.
    """
    given = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # Accelerate wraps it in training
    make = _OptimizerFactory(sendable)
    if given is not None:
        scheduler = getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)
        has_rates = not isinstance(scheduler, (ReduceLROnPlateau, GreedyLR))  # these keep no initial rate
        if _options_of(given, has_rates=has_rates) != _options_of(make(trainer.model), has_rates=has_rates):
            return given
    return OptimizersOfModel(make)


def _options_of(optimizer: torch.optim.Optimizer, *, has_rates: bool) -> tuple[Any, ...]:
    """Return the class and defaults of the optimizer, and the number of parameters and the options of each group.

    Options of a group are arguments of its class: in training some optimizers, as schedule-free ones, keep their state
    beside them. A learning rate is the one before the schedule; it is left out unless `has_rates`.
    """
    named = set(constructor_arguments(type(optimizer)))
    groups = [
        (
            len(group["params"]),
            group.get("initial_lr", group.get("lr")) if has_rates else None,
            {name: group[name] for name in named & group.keys() - {"lr"}},
        )
        for group in optimizer.param_groups
    ]
    defaults = {"differentiable": False, **optimizer.defaults}  # Accelerate's load_state_dict adds this one
    return type(optimizer), defaults, groups


class _OptimizerFactory:
    """Function ``make(model)``: returns the optimizer that the trainer makes for the model."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        copied = copy.copy(self._trainer)
        copied.model, copied.optimizer = model, None
        copied.create_optimizer()
        return getattr(copied.optimizer, "optimizer", copied.optimizer)


def _sendable_copy(trainer: Trainer) -> Trainer:
    """Return a copy of the trainer that can be pickled for trials and shares the model and the dataset."""
    copied = copy.copy(trainer)
    copied.__dict__.update(dict.fromkeys(_UNSENT_ATTRIBUTES))
    copied.args = copy.copy(trainer.args)
    copied.args.__dict__.update(_TRIAL_ARGUMENTS, distributed_state=None, gradient_accumulation_steps=1)
    copied.args.__dict__.pop("_setup_devices", None)  # recomputed in the trial
    flow = [DefaultFlowCallback()]
    copied.callback_handler = CallbackHandler(flow, copied.model, copied.processing_class, None, None)
    copied.state, copied.control = TrainerState(), TrainerControl()
    return copied


def _set_up_on_device(trainer: Trainer, device: torch.device, mixed_precision: str = "no") -> None:
    """Set the trainer up on `device`, with the `mixed_precision` of its accelerator: "no", "fp16" or "bf16".

    Raises `WorkloadError` if the Trainer would train on another device.
    """
    args = trainer.args
    args.__dict__.pop("_setup_devices", None)  # recomputed by `args.device`
    args.use_cpu = device.type == "cpu"
    trainer_device = args.device
    if trainer_device.type != device.type or (trainer_device.index or 0) != (device.index or 0):
        raise WorkloadError(
            f"The Trainer would train on {trainer_device}, but the trial runs on {device}.",
            f"Search with device={str(trainer_device)!r}, and choose among several by CUDA_VISIBLE_DEVICES.",
        )
    args._n_gpu = min(1, args.n_gpu)
    args.mixed_precision = mixed_precision
    trainer.create_accelerator_and_postprocess()


class _StepLoss:
    """Function ``loss(model, batch)``: returns the loss that the trainer's training_step would run backward from."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._ready_models: WeakSet[nn.Module] | None = None  # models set up in this process, if any
        self._prepared: tuple[nn.Module, nn.Module] | None = None  # the latest model, and its prepared wrapper

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of one pass over `batch`, as if it were the whole optimizer step."""
        trainer = self._trainer
        if self._ready_models is None:
            _set_up_on_device(trainer, next(model.parameters()).device)
            self._ready_models = WeakSet()
        if self._prepared is None or self._prepared[0] is not model:
            if model not in self._ready_models:
                self._ready_models.add(model)
                self._set_up_model(model)
            self._prepared = model, trainer.accelerator.prepare_model(model)
        (inputs,), num_items = trainer.get_batch_samples(iter([batch]), 1, trainer.args.device)
        trainer.current_gradient_accumulation_steps = 1
        with collect_losses_without_backward(trainer.accelerator) as losses:
            trainer.training_step(self._prepared[1], inputs, num_items)
        if not losses:
            raise WorkloadError(
                f"{type_name(trainer)}.training_step did not call self.accelerator.backward(loss).",
                "Call it in place of loss.backward(), as the Trainer's own training_step does.",
            )
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _set_up_model(self, model: nn.Module) -> None:
        """Run ``train()`` without its loop: it sets up activation checkpointing, NEFTune and Liger kernels."""
        self._trainer.model = self._trainer.model_wrapped = model
        vars(self._trainer)["_inner_training_loop"] = lambda **_: None
        Trainer.train(self._trainer)


def _clip(max_norm: float, model: nn.Module) -> None:
    """Clip gradients as the Trainer does; without clipping the norm is still computed, as for the Trainer's logs."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else torch.inf)


class _SchedulerFactory:
    """Function ``schedule(optimizer)``: returns the trainer's scheduler, or none if it steps after evaluations."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        copied = copy.copy(self._trainer)
        copied.optimizer, copied.lr_scheduler = optimizer, None
        scheduler: Any = copied.create_scheduler(NUM_STEPS, optimizer)
        return [] if isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)) else [hold_after_last_step(scheduler)]


class _TrainFunction:
    """Function ``fit(fitting)``: runs the trainer's ``train()`` without checkpoints, evaluation and reports."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = copied = _sendable_copy(trainer)
        callbacks = [callback for callback in trainer.callback_handler.callbacks if not _is_excluded(callback)]
        self._callbacks = [_redirect_callback(callback, trainer, copied) for callback in callbacks]

    def __call__(self, fitting: Fitting) -> None:
        trainer, model = self._trainer, fitting.model
        config = AmpConfig.of(fitting.setting, loss_scale=fitting.loss_scale)
        device = next(model.parameters()).device
        trainer.args.__dict__.update(training_arguments(config))
        trainer.model = trainer.model_wrapped = model
        callbacks = [copy.copy(callback) for callback in self._callbacks]
        if config.precision == "fp16" and device.type == "cpu":  # Accelerate has no fp16 there
            callbacks.insert(0, _convert_to_autotune_trainer(trainer, config))
        is_cast = MODES[config.precision].uses_autocast
        _set_up_on_device(trainer, device, config.autocast_precision if is_cast else "no")
        trainer._train_batch_size = trainer.args.train_batch_size
        if fitting.scaler is not None and not isinstance(trainer, AutotuneTrainer):
            trainer.accelerator.scaler = fitting.scaler
        step = _LossRecorder(trainer.training_step)
        callbacks.append(
            _StepEndCallback(lambda: fitting.stepped(step.loss, trainer.current_gradient_accumulation_steps))
        )
        trainer.callback_handler = CallbackHandler(callbacks, model, trainer.processing_class, None, None)
        trainer.control = TrainerControl()
        trainer.optimizer, trainer.lr_scheduler = fitting.optimizer, None
        try:
            with replace_attributes(trainer, training_step=step, **dict.fromkeys(_DISABLED_METHODS, _do_nothing)):
                trainer.train()
        finally:
            trainer.accelerator.free_memory()
            trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            trainer.optimizer = trainer.lr_scheduler = None
            trainer.callback_handler.callbacks.clear()


def _is_excluded(callback: TrainerCallback) -> bool:
    is_reporting = any(kind.__module__.startswith(_REPORTING_PACKAGE) for kind in type(callback).__mro__)
    return is_reporting or isinstance(callback, _EVALUATION_CALLBACKS)


def _redirect_callback(callback: TrainerCallback, trainer: Trainer, copied_trainer: Trainer) -> TrainerCallback:
    """Return a copy of a callback that refers to `copied_trainer` instead of `trainer`."""
    copied = copy.copy(callback)
    vars(copied).update({name: copied_trainer for name, value in vars(callback).items() if value is trainer})
    return copied


def _convert_to_autotune_trainer(trainer: Trainer, config: AmpConfig) -> TrainerCallback:
    """Turn the trainer into an AutotuneTrainer in place, and return the callback that it needs."""
    tuned: Any = trainer
    if not isinstance(trainer, AutotuneTrainer):
        tuned.__class__ = type(type(trainer).__name__, (AutotuneTrainer, type(trainer)), {})
    tuned._amp_config, tuned._controller_options, tuned._attached_model = config, {}, None
    return AutotuneCallback(tuned)


def _do_nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


class _LossRecorder:
    """Wrapper of a training_step that stores the loss of its latest call."""

    def __init__(self, training_step: Callable[..., Tensor]) -> None:
        self._training_step = training_step
        self.loss: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.loss = self._training_step(*args, **kwargs)
        return self.loss


class _StepEndCallback(TrainerCallback):
    """Callback that calls `stepped` at the end of each optimizer step."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Call `stepped`."""
        self._stepped()

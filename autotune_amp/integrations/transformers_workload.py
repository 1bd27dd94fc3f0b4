"""Transformers: a workload from a Trainer, whose promise is measured in the steps of the Trainer itself."""

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
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import WorkloadError
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

NUM_STEPS = (
    10_000  # of the training that a trial is the beginning of, for schedules that ask: it begins again and again
)

# What training_step has no part in, and what reports, writes or cannot leave this process.
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
# What a callback of the user's may ask for all the same.
_LEFT_OUT = ("_save_checkpoint", "save_model", "evaluate", "push_to_hub", "create_model_card")
# Those that report or upload, and what an evaluation would have to end.
_OUTSIDE = "transformers.integrations."
_WITHOUT_EVALUATION = (EarlyStoppingCallback, JITCheckpointCallback)


def workload(trainer: Trainer) -> Workload:
    """See `Workload.from_trainer`."""
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
    """That of Accelerate's autocast where it sets one (fp16 on a CPU does not); else torch's flags say it."""
    mode = MODES.get(trainer.accelerator.mixed_precision)
    return mode.precision if trainer.accelerator.native_amp and mode is not None and mode.uses_autocast else None


def _weighs_passes(trainer: Trainer) -> bool:
    """Whether a loss is divided by the items of all passes of its step, as ``training_step`` sees it.

    Items are counted under "labels" alone; without them a mean loss is divided by the number of passes.
    """
    if trainer.loss_is_scaled_for_ga is not None:
        return trainer.loss_is_scaled_for_ga
    counts_items = trainer.model_accepts_loss_kwargs and "labels" in trainer.label_names
    return counts_items or trainer.compute_loss_func is not None


def _loader(trainer: Trainer) -> DataLoader[Any]:
    """The trainer's own train loader, its collator and sampler, at the batch size of one device."""
    maker = copy.copy(trainer)
    maker.accelerator = copy.copy(trainer.accelerator)
    maker.accelerator.prepare = lambda loader: loader  # it is wanted as it is
    maker._train_batch_size = trainer.args.per_device_train_batch_size
    if type(trainer)._remove_unused_columns is Trainer._remove_unused_columns:
        vars(maker)["_remove_unused_columns"] = functools.partial(_with_used_columns, maker)
    return maker.get_train_dataloader()


def _with_used_columns(trainer: Trainer, dataset: Any, description: str | None = None) -> Any:
    """Without the unused columns, in one order: the Trainer's is a set's, and the dataset's own digest counts it."""
    if trainer.args.remove_unused_columns:
        trainer._set_signature_columns_if_needed()
        unused = sorted(set(dataset.column_names) - set(trainer._signature_columns or ()))
        if len(unused) < len(dataset.column_names):  # otherwise the Trainer raises
            dataset = dataset.remove_columns(unused)
    return Trainer._remove_unused_columns(trainer, dataset, description)


def _optimizer(trainer: Trainer) -> torch.optim.Optimizer:
    """The trainer's own, or one as it would make it; only its class and hyperparameters are taken."""
    maker = copy.copy(trainer)
    optimizer = maker.create_optimizer()
    return getattr(optimizer, "optimizer", optimizer)  # out of Accelerate's wrapper, after a training


def _travelling(trainer: Trainer) -> Trainer:
    """A copy, which shares the model and the dataset, without what only this process can have."""
    left = copy.copy(trainer)
    left.__dict__.update(dict.fromkeys(_LEFT_BEHIND))
    left.args = copy.copy(trainer.args)
    left.args.__dict__.update(_QUIET, distributed_state=None, gradient_accumulation_steps=1)
    left.args.__dict__.pop("_setup_devices", None)  # found again where it runs
    flow = [DefaultFlowCallback()]
    left.callback_handler = CallbackHandler(flow, left.model, left.processing_class, None, None)  # type: ignore[no-untyped-call] # transformers does not type it
    left.state, left.control = TrainerState(), TrainerControl()
    return left


def _arrive(trainer: Trainer, device: torch.device, mixed_precision: str = "no") -> None:
    """Have it be where the trials run, on `device`; without a precision of its own the trial sets that."""
    args = trainer.args
    args.__dict__.pop("_setup_devices", None)  # found again
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
    """``loss(model, batch)``: the loss that the trainer's training_step would go back from."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._made_ready: WeakSet[nn.Module] | None = None  # in the process that runs it
        self._prepared: tuple[nn.Module, nn.Module] | None = None  # the latest model, and as Accelerate has it

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """That of one pass over `batch`, as if it were all of an optimizer step."""
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
        """All that ``train()`` does to a model before its loop: activation checkpointing, NEFTune, Liger kernels."""
        self._trainer.model = self._trainer.model_wrapped = model
        vars(self._trainer)["_inner_training_loop"] = lambda **_: None
        Trainer.train(self._trainer)


def _clip(max_norm: float, model: nn.Module) -> None:
    """As the Trainer does before each step; where it does not clip, it takes the norm for its logs all the same."""
    nn.utils.clip_grad_norm_(model.parameters(), max_norm if max_norm > 0 else torch.inf)


class _Schedule:
    """``schedule(optimizer)``: the trainer's own, unless an evaluation steps it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        maker = copy.copy(self._trainer)
        maker.optimizer, maker.lr_scheduler = optimizer, None
        scheduler: Any = maker.create_scheduler(NUM_STEPS, optimizer)
        return [] if isinstance(scheduler, (ReduceLROnPlateau, GreedyLR)) else [lasting(scheduler)]


class _Fit:
    """``fit(fitting)``: the trainer's own ``train()``, which saves, evaluates, reports and uploads nothing."""

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
        if config.precision == "fp16" and device.type == "cpu":  # where Accelerate has none
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
    """A copy whose trainer, if it holds it, is `left`."""
    own = copy.copy(callback)
    vars(own).update({name: left for name, value in vars(callback).items() if value is trainer})
    return own


def _take_controller(trainer: Trainer, config: AmpConfig) -> TrainerCallback:
    """Make it an AutotuneTrainer in place; returns the callback that one has."""
    tuned: Any = trainer
    if not isinstance(trainer, AutotuneTrainer):
        tuned.__class__ = type(type(trainer).__name__, (AutotuneTrainer, type(trainer)), {})
    tuned._amp_config, tuned._controller_options, tuned._attached = config, {}, None
    return AutotuneCallback(tuned)


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


class _LatestLoss:
    """A training_step that keeps what it returned last."""

    def __init__(self, own: Callable[..., Tensor]) -> None:
        self._own = own
        self.loss: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        self.loss = self._own(*args, **kwargs)
        return self.loss


class _StepEnds(TrainerCallback):
    """Calls `stepped` at the end of each optimizer step."""

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Say so."""
        self._stepped()

"""Transformers: a Trainer whose scaler is the PrecisionController, its callback, and a workload from a Trainer."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import torch
from accelerate import Accelerator
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from autotune_amp.core.config import AmpConfig, DemotedError, training_arguments
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError, WorkloadError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.workload import Workload, type_name
from autotune_amp.integrations.accelerate import plain_optimizers
from autotune_amp.integrations.bridge import config_of, readings, refuse_other_window
from autotune_amp.precision.forward_wrapper import unwrap
from autotune_amp.precision.modes import MODES
from autotune_amp.runtime.controller import PrecisionController

__all__ = ["AutotuneCallback", "AutotuneTrainer", "workload"]

_NEXT_TRAINER = (
    "a new AutotuneTrainer(amp_config=error.config, args=error.config.to_training_arguments(like=trainer.args))"
)


class AutotuneTrainer(Trainer):
    """A ``transformers.Trainer`` that trains in the config's precision and steps it down when that fails.

    It is used as the original. Other trainers are made so by inheriting from both, this one first:
    ``class MyTrainer(AutotuneTrainer, Seq2SeqTrainer)``. The forward pass runs under the controller's autocast, on a
    CPU too, where Accelerate's own fp16 has neither autocast nor scaler; bf16 and fp32 steps that are not finite are
    skipped. `controller` is the PrecisionController; the model is attached to it at the first step, with a rerun of the
    latest batch. Checkpoints hold its state in their ``scaler.pt``, and `resume_from_checkpoint` goes on at the rung
    that was saved. A second ``train()`` goes on with the controller as the first left it, stopped and interrupted ones
    too; a model that ``model_init`` makes anew gets a controller of its own.

    Where the run has to stop, ``train()`` saves a checkpoint, ends as it always does, and then raises
    `NotPrecisionError` or `NoRungFitsError`, or `DemotedError` for a fallback in another batch size or accumulation,
    and for any with ``{"on_demotion": "checkpoint_and_stop"}``.

    amp_config: precision, fallbacks, loss scale, batch size and accumulation, or the recommendation that holds them.
        `args` is to say the same, as ``config.to_training_arguments(like=today)`` does, of today's class.
    controller_options: more arguments for the `PrecisionController`: ``guard``, ``halt``, ``on_demotion``,
        ``run_log`` and so on.
    The rest is the ``Trainer``'s.

    Raises `InvalidRequestError` for arguments that contradict the config, and where DeepSpeed or ``nn.DataParallel``
    would cast by themselves.
    """

    def __init__(
        self,
        *args: Any,
        amp_config: AmpConfig | Recommendation,
        controller_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._amp_config = config_of(amp_config)
        self._controller_options = dict(controller_options or {})
        self._attached: nn.Module | None = None
        super().__init__(*args, **kwargs)
        refuse_baked_autocast(self, InvalidRequestError)
        # First of all: what it adds to the logs is then there for the callbacks that report them.
        self.callback_handler.callbacks.insert(0, AutotuneCallback(self))

    def create_accelerator_and_postprocess(self) -> None:
        """As the original's, with the controller for its scaler."""
        refuse_contradictions(self.args, self._amp_config)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            raise InvalidRequestError(
                "AutotuneTrainer cannot train under DeepSpeed, which casts and scales itself.",
                "Use a Trainer with the JSON that `autotune-amp export --to deepspeed` writes.",
            )
        self._make_controller()
        self.accelerator.unscale_gradients = self._unscale_gradients

    def _make_controller(self) -> None:
        self.controller = _KeepingController(self._amp_config, self.args.device, **self._controller_options)
        self.controller.on_move(lambda _: self._refuse_other_window())
        self.accelerator.scaler = self.controller
        self._attached = None

    def _refuse_other_window(self) -> None:
        why = "the Trainer's loop keeps to one batch size and accumulation"
        refuse_other_window(self.controller, self._amp_config, why, f"Go on with {_NEXT_TRAINER}.")

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the original's; the rung of a model before says nothing of a new one."""
        if self._attached is not None:
            self.controller.detach()
            self._make_controller()
        return super().call_model_init(trial)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call] # transformers does not type it
        self._refuse_other_window()
        return prepared

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Accelerate's own would bake an autocast into the model's forward.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        """In the place of the accelerator's, which unscales in its own fp16 alone."""
        for one in plain_optimizers(self.accelerator._optimizers if optimizer is None else optimizer):
            self.controller.unscale_(one)

    def autocast_smart_context_manager(
        self,
        cache_enabled: bool | None = True,  # noqa: ARG002 # the Trainer's signature
    ) -> AbstractContextManager[object]:
        """The current rung's autocast."""
        return self.controller.autocast() if torch.is_grad_enabled() else self.controller.validation()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As the original's; its loss can be computed again."""
        if self._attached is not model:
            self.controller.attach(model, self._rerun)
            self._attached = model
        self._latest = model, inputs, num_items_in_batch
        return super().training_step(model, inputs, num_items_in_batch)

    def _rerun(self) -> Tensor:
        """The loss of the latest pass, for the controller's diagnosis."""
        with caught_losses(self.accelerator) as losses:
            super().training_step(*self._latest)
        return torch.stack(losses).sum()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's; what the model puts out is in fp32, as Accelerate has it."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, convert_to_fp32(logits), labels

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's. Raises the errors of `TrainingStoppedError` besides."""
        self.controller.discard_window()  # of a training that was interrupted: the Trainer drops its gradients
        self.controller.stopped = None
        output = super().train(*args, **kwargs)
        stopped = self.controller.stopped
        if stopped is None:
            return output
        checkpoint = Path(self._get_output_dir(self._trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        saved = f"{checkpoint} is its checkpoint." if checkpoint.is_dir() else "No checkpoint was saved."
        if not isinstance(stopped, DemotedError):
            raise type(stopped)(stopped.message, f"{stopped.next_step} {saved}") from stopped
        next_step = f"{saved} Go on with {_NEXT_TRAINER} and train(resume_from_checkpoint={str(checkpoint)!r})."
        raise DemotedError(stopped.message, next_step, stopped.config) from stopped


class _KeepingController(PrecisionController):
    """Keeps the error that it would raise: the Trainer has a checkpoint to save before it ends."""

    stopped: TrainingStoppedError | None = None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As the original's."""
        self._keeping(functools.partial(super().update, new_scale))

    def synchronize(self) -> None:
        """As the original's; what was on its way from the device may end the run, too."""
        self._keeping(super().synchronize)

    def _keeping(self, action: Callable[[], object]) -> None:
        try:
            action()
        except TrainingStoppedError as error:
            self.stopped = error


class AutotuneCallback(TrainerCallback):
    """Reports where the trainer's controller stands, and ends the training once that asks for it.

    Logs, and what is reported of them, get ``amp/rung`` (0 is the config's own precision, one past the last fallback
    means disabled), ``amp/scale``, ``amp/num_skips``, ``amp/num_steps`` and ``amp/num_moves``; ``state.log_history``
    also ``amp/precision``. An `AutotuneTrainer` brings its own.
    """

    def __init__(self, trainer: AutotuneTrainer) -> None:
        self._trainer = trainer  # which may get another controller

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the controller's state to the logs and to the last entry of the history."""
        status = self._trainer.controller.status()
        found = {f"amp/{name}": value for name, value in readings(self._trainer._amp_config, status).items()}
        kwargs["logs"].update(found)
        state.log_history[-1].update(found, **{"amp/precision": status.precision})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Have a checkpoint saved and the training ended."""
        if self._trainer.controller.stopped is not None:
            control.should_save = control.should_training_stop = True


@contextmanager
def caught_losses(accelerator: Accelerator) -> Iterator[list[Tensor]]:
    """The losses that a ``training_step`` hands to ``accelerator.backward``, which does not go back from them."""
    losses: list[Tensor] = []
    accelerator.backward = lambda loss, **_: losses.append(loss)
    try:
        yield losses
    finally:
        del accelerator.backward


def refuse_baked_autocast(trainer: Trainer, error: type[InvalidRequestError]) -> None:
    """Raise `error` for a model that an Accelerator has wrapped in an autocast of its own."""
    model = unwrap(cast("nn.Module", trainer.model))
    if hasattr(model, "_original_forward"):
        raise error(
            f"The {type(model).__name__} has Accelerate's autocast in its forward: it was trained in mixed precision "
            "before.",
            "Load the model anew, or take the autocast off with `accelerator.unwrap_model(model, "
            "keep_fp32_wrapper=False)`.",
        )


def refuse_contradictions(args: Any, config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for TrainingArguments that say something else than the config."""
    wanted = training_arguments(config)
    names = ["per_device_train_batch_size", "gradient_accumulation_steps"]
    if args.tf32 is not None and "tf32" in wanted:  # a config that keeps the flags as found decides none
        names.append("tf32")
    found = [(name, getattr(args, name), wanted[name]) for name in names]
    if args.mixed_precision != "no":  # none asked for is none: the controller sets it
        found.append(("mixed_precision", args.mixed_precision, config.precision))
    found.append(("auto_find_batch_size", args.auto_find_batch_size, False))
    wrong = [f"{name}={given!r}, not {asked!r}" for name, given, asked in found if given != asked]
    if wrong:
        raise InvalidRequestError(
            f"TrainingArguments, or `accelerate launch`, contradict the config: {'; '.join(wrong)}.",
            "Make them with amp_config.to_training_arguments(like=args), which keeps the others, and leave "
            "--mixed_precision out: the config names the precision.",
        )
    if args.n_gpu > 1:
        raise InvalidRequestError(
            f"The Trainer sees {args.n_gpu} GPUs in one process: nn.DataParallel does not keep to a bf16 autocast.",
            "Start it with torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES=0).",
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
_QUIET = {"report_to": [], "push_to_hub": False, "output_dir": "", "auto_find_batch_size": False, "debug": []}


def workload(trainer: Trainer) -> Workload:
    """See `Workload.from_trainer`."""
    _refuse(trainer)
    return Workload(
        model=trainer.model,
        loss=_Step(_travelling(trainer)),
        data=_loader(trainer),
        optimizer=_optimizer(trainer),
        name=type(trainer.model).__name__,
        accumulation_steps=trainer.args.gradient_accumulation_steps,
        precision=_precision(trainer),
        weighs_passes=_weighs_passes(trainer),
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
        raise WorkloadError("The Trainer has no train_dataset.", "Pass train_dataset= to it.")
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
            self._arrive(next(model.parameters()).device)
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

    def _arrive(self, device: torch.device) -> None:
        """Where the trials run, on `device`."""
        args = self._trainer.args
        args.use_cpu = device.type == "cpu"
        found = args.device
        if found.type != device.type or (found.index or 0) != (device.index or 0):
            raise WorkloadError(
                f"The Trainer would train on {found}, the trial on {device}.",
                f"Search with device={str(found)!r}, and choose among several by CUDA_VISIBLE_DEVICES.",
            )
        args._n_gpu = min(1, args.n_gpu)
        args.mixed_precision = "no"  # the precision is the trial's
        self._trainer.create_accelerator_and_postprocess()

    def _make_ready(self, model: nn.Module) -> None:
        """All that ``train()`` does to a model before its loop: activation checkpointing, NEFTune, Liger kernels."""
        self._trainer.model = self._trainer.model_wrapped = model
        vars(self._trainer)["_inner_training_loop"] = lambda **_: None
        Trainer.train(self._trainer)

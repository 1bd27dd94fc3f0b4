"""Transformers: a Trainer whose scaler is the PrecisionController, and the callback that reports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from autotune_amp.core.config import AmpConfig, DemotedError, training_arguments
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.bridge import KeepingController, config_of, other_window_error, readings
from autotune_amp.numerics import batches
from autotune_amp.numerics.modules import unwrap
from autotune_amp.runtime import windows
from autotune_amp.runtime.status import MoveRecord

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
    too; a model that ``model_init`` makes anew gets a controller of its own. A fallback with a smaller batch splits the
    loader's batches.

    Where the run has to stop, ``train()`` saves a checkpoint, ends as it always does, and then raises
    `NotPrecisionError` or `NoRungFitsError`, or with ``{"on_demotion": "checkpoint_and_stop"}`` `DemotedError`.

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
        if self._controller_options.get("on_demotion") != "checkpoint_and_stop":
            refuse_other_windows(self._amp_config)
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled:
            raise InvalidRequestError(
                "AutotuneTrainer cannot train under DeepSpeed, which casts and scales itself.",
                "Use a Trainer with the JSON that `autotune-amp export --to deepspeed` writes.",
            )
        self._make_controller()
        self.accelerator.unscale_gradients = self._unscale_gradients

    def _make_controller(self) -> None:
        self.controller = KeepingController(self._amp_config, self.args.device, **self._controller_options)
        self.accelerator.scaler = self.controller
        self._attached = None

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """As the original's; the rung of a model before says nothing of a new one."""
        if self._attached is not None:
            self.controller.detach()
            self._make_controller()
        return super().call_model_init(trial)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)  # type: ignore[no-untyped-call] # transformers does not type it
        plan = self.controller.config
        if not can_follow(self._amp_config, plan.batch_size, plan.accumulation_steps):
            raise other_window_error(
                plan,
                self._amp_config,
                f"The run is in {plan.precision} by now",
                "the Trainer's loop keeps to one window",
                f"Go on with {_NEXT_TRAINER}.",
            )
        return prepared

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        # Accelerate's own would bake an autocast into the model's forward.
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    def _unscale_gradients(self, optimizer: Any = None) -> None:
        """In the place of the accelerator's, which unscales in its own fp16 alone."""
        given = self.accelerator._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, tuple | list) else [given]:
            self.controller.unscale_(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def autocast_smart_context_manager(
        self,
        cache_enabled: bool | None = True,  # noqa: ARG002 # the Trainer's signature
    ) -> AbstractContextManager[object]:
        """The current rung's autocast."""
        return self.controller.autocast() if torch.is_grad_enabled() else self.controller.validation()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As the original's, in as many passes as the current rung needs; returns the loss, detached."""
        if self._attached is not model:
            self.controller.attach(model, self._rerun)
            self._attached = model
        pieces = self._pieces(inputs)
        losses = []
        for number, (piece, divisor) in enumerate(pieces, start=1):
            self._latest = (model, piece, num_items_in_batch), divisor
            sync = nullcontext() if number == len(pieces) else self.accelerator.no_sync(model)
            with self._dividing_by(divisor), sync:
                losses.append(super().training_step(model, piece, num_items_in_batch))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _pieces(self, inputs: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
        """The batch as the rung's passes take it, each with what its mean loss is to be divided by."""
        plan, num_passes = self.controller.config, self.current_gradient_accumulation_steps
        _, num_pieces = windows.shape(self._amp_config.batch_size, plan.batch_size, plan.accumulation_steps)
        if num_pieces == 1:
            return [(inputs, num_passes)]
        pieces = list(windows.split(inputs, num_pieces))
        sizes = [max(batches.first_dimensions(piece)) for piece in pieces]
        return [(piece, num_passes * sum(sizes) / size) for piece, size in zip(pieces, sizes, strict=True)]

    @contextmanager
    def _dividing_by(self, divisor: float) -> Iterator[None]:
        """What the Trainer divides a mean loss by; one that is normalised by the number of items stays as it is."""
        before = self.current_gradient_accumulation_steps
        self.current_gradient_accumulation_steps = divisor  # type: ignore[assignment] # a piece is less than a pass
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps = before

    def _rerun(self) -> Tensor:
        """The loss of the latest pass, for the controller's diagnosis."""
        given, divisor = self._latest
        with caught_losses(self.accelerator) as losses, self._dividing_by(divisor):
            super().training_step(*given)
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
        resumed = f"train(resume_from_checkpoint={str(checkpoint)!r})" if checkpoint.is_dir() else "train()"
        raise DemotedError(
            stopped.message,
            f"{saved} Go on with {_NEXT_TRAINER} and {resumed}.",
            stopped.config,
        ) from stopped


class AutotuneCallback(TrainerCallback):
    """Reports where the trainer's controller stands, and ends the training once that asks for it.

    Logs, and what is reported of them, get ``amp/rung`` (0 is the config's own precision, one past the last fallback
    means disabled), ``amp/scale``, ``amp/num_skips``, ``amp/num_steps`` and ``amp/num_moves``; ``state.log_history``
    also ``amp/precision`` and ``amp/moves``, those since the last entry. An `AutotuneTrainer` brings its own.
    """

    def __init__(self, trainer: AutotuneTrainer) -> None:
        self._trainer = trainer  # which may get another controller
        self._num_logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """What a checkpoint brought along was logged before."""
        self._num_logged = len(self._trainer.controller.status().history)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Add the controller's state to the logs and to the last entry of the history."""
        status = self._trainer.controller.status()
        found = {f"amp/{name}": value for name, value in readings(self._trainer._amp_config, status).items()}
        moves = [_line(record) for record in status.history[self._num_logged :]]
        self._num_logged = len(status.history)
        kwargs["logs"].update(found)
        state.log_history[-1].update(found, **{"amp/precision": status.precision, "amp/moves": moves})

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


def _line(record: MoveRecord) -> str:
    return f"{record.kind} at update {record.update}, {record.before} -> {record.after}: {record.reason}"


def refuse_contradictions(args: Any, config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for TrainingArguments that say something else than the config."""
    wanted = training_arguments(config)
    wrong = [
        name
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        if getattr(args, name) != wanted[name]
    ]
    if args.tf32 is not None and args.tf32 != wanted["tf32"]:
        wrong.append("tf32")
    if wrong:
        given, asked = (
            ", ".join(f"{name}={value(name)!r}" for name in wrong) for value in (vars(args).get, wanted.get)
        )
        raise InvalidRequestError(
            f"TrainingArguments has {given}; the config says {asked}.",
            "Make them with amp_config.to_training_arguments(like=args), which keeps the others.",
        )
    # None asked for is no contradiction: the controller sets the precision.
    if args.mixed_precision not in ("no", config.precision):
        raise InvalidRequestError(
            f"TrainingArguments, or `accelerate launch`, asks for {args.mixed_precision}; the config's precision is "
            f"{config.precision}.",
            "Make the arguments with amp_config.to_training_arguments(like=args), and leave --mixed_precision out: the "
            "config names the precision.",
        )
    if args.auto_find_batch_size:
        raise InvalidRequestError(
            f"auto_find_batch_size would leave the config's batch size of {config.batch_size}.",
            "Leave it out: the config's batch size was measured.",
        )
    if args.n_gpu > 1:
        raise InvalidRequestError(
            f"The Trainer sees {args.n_gpu} GPUs in one process: nn.DataParallel does not keep to a bf16 autocast.",
            "Start it with torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES=0).",
        )


def refuse_other_windows(config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for a fallback whose window is not that of the Trainer's loop, in a smaller batch."""
    for plan in config.plans:
        if not can_follow(config, plan.batch_size, plan.accumulation_steps):
            raise InvalidRequestError(
                f"The fallback {plan.precision} makes a step of {plan.batch_size} x {plan.accumulation_steps} samples, "
                f"the config of {config.batch_size} x {config.accumulation_steps}: the Trainer's loop keeps to one.",
                'Pass controller_options={"on_demotion": "checkpoint_and_stop"} and start again with the error\'s '
                "config.",
            )


def can_follow(config: AmpConfig, batch_size: int, accumulation_steps: int) -> bool:
    """Whether these passes are a window of the config's batches, each split or whole."""
    try:
        num_batches, _ = windows.shape(config.batch_size, batch_size, accumulation_steps)
    except InvalidRequestError:
        return False
    return num_batches == config.accumulation_steps

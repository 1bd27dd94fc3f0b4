"""Training run of a workload in a trial, one step at a time: model, optimizer and batches under the trial's setting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.workload import Workload, type_name
from autotune_amp.dimensions import DIMENSIONS
from autotune_amp.dimensions.dimension import Variant
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import forward_wrapper, torch_state
from autotune_amp.precision.forward_wrapper import modules_named
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import StepAmp, has_gradients
from autotune_amp.precision.torch_state import caller_autocast
from autotune_amp.trial import data
from autotune_amp.trial.context import LoopState, Optimizers, make_optimizer, users_optimizers
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.worst_batch import worst_batches


class BaseTraining(ABC):
    """Base class of a training run in a trial: a model, its optimizers and batches.

    `spec` describes the trial; its `candidate` is the setting (precision, batch size, ...) that is trained with.
    """

    scaler: torch.amp.GradScaler | None  # None if the loss is not scaled
    parts: tuple[Any, ...]  # arguments of the user's own functions: (model, optimizer) or (state,)
    is_update_apart = True  # whether `update` takes the optimizer step, so that it can be timed apart from the passes
    num_steps_taken = 0  # optimizer steps, or calls of `train_step`, counted by the caller
    has_stepped = True  # False until a loop that accumulates over several calls has taken its first optimizer step

    def __init__(self, workload: Workload, model: nn.Module, spec: Trial) -> None:
        self.spec = spec
        self.workload = workload
        self.device = torch.device(spec.device)
        self.model = model
        # Context for a pass after which ranks do not exchange gradients; replaced by the caller if there are several.
        self.no_sync: Callable[[], AbstractContextManager[object]] = nullcontext
        self.batches, self.loader = data.open_data(
            workload.data, spec.candidate.batch_size, spec.candidate.loader_arguments
        )
        self._prefetched: list[Any] = []
        self._last_batch: Any = None
        # Steps on the worst batch: the first, one after the warm-up, and in a confirmation the last.
        num_worst = 3 if spec.is_confirmation else 2
        self._worst = worst_batches(
            workload.worst_batch, self.loader, spec.worst_samples, spec.candidate.batch_size, num_worst
        )
        self._pinned: list[nn.Module] = []
        self._undo: list[Callable[[], None]] = []

    def set_precision(self, precision: Precision) -> None:
        """Set this process's TF32 flags for `precision`, unless the setting keeps the user's own flags."""
        if not self.spec.candidate.as_found:
            torch_state.set_flags(precision)

    def pin(self, names: Sequence[str]) -> None:
        """Run the modules with these names in fp32 under autocast until `close`; without autocast do nothing."""
        if MODES[self.spec.candidate.precision].uses_autocast:
            # Modules that the user has pinned are left out, so that `close` does not unpin them.
            self._pinned = [
                module for module in modules_named(self.model, names) if not forward_wrapper.is_pinned(module)
            ]
            for module in self._pinned:
                forward_wrapper.pin_fp32(module, self.device.type)

    @property
    @abstractmethod
    def live(self) -> LiveTraining:
        """Return the models, the optimizers and the device, for variants (see `apply_variant`) to change."""

    def apply_variant(self, variant: Variant, value: str) -> None:
        """Set a variant, such as compilation or the memory format, to `value`, unless it has that value already.

        Models and optimizers are changed in place for good. `close` undoes only changes of the whole process, such as
        the mode of the allocator.
        """
        if (undo := variant.change_once(value, self.live)) is not None:
            self._undo.append(undo)

    def start_loading(self) -> None:
        """Take the first batch, which starts the loader's workers, and keep it for `next_batch`."""
        self._prefetched.append(next(self.batches))

    def next_batch(self) -> Any:
        """Return the next batch of the data. The previous one is kept until it is loaded, as in any training loop."""
        self._last_batch = self._prefetched.pop() if self._prefetched else next(self.batches)
        return self._last_batch

    @property
    def num_loader_workers(self) -> int | None:
        """Return the loader's number of worker processes, or None without a loader."""
        return None if self.loader is None else self.loader.num_workers

    @property
    def num_loaded_ahead(self) -> int:
        """Return the number of batches that the loader's workers may hold ready."""
        return 0 if self.loader is None else self.loader.num_workers * (self.loader.prefetch_factor or 0)

    def worst_batch(self) -> Any | None:
        """Return the batch that takes the most memory, made anew each time.

        Return None if all batches are alike, if it is unknown, or after as many calls as a trial has steps on it.
        """
        return next(self._worst, None)

    def evaluate(self) -> None:
        """Run the workload's own evaluation in the trial's precision, and restore the modules' training mode."""
        assert self.workload.evaluate is not None
        before = {module: module.training for module in self.model.modules()}
        try:
            with self.autocast():
                self.workload.evaluate(self.parts[0])
        finally:
            for module, is_training in before.items():
                module.training = is_training

    def checkpoint(self, folder: Path) -> None:
        """Have the workload write its own checkpoint into `folder`."""
        assert self.workload.checkpoint is not None
        self.workload.checkpoint(*self.parts, folder)

    @abstractmethod
    def forward_backward(self, batch: Any, *, is_last: bool = True) -> Tensor:
        """Move the batch to the device, run the forward and backward pass, and return the loss, a detached scalar.

        Gradients are added to those of earlier passes. `is_last` says that the optimizer step comes after this pass:
        several ranks exchange their gradients only then.
        """

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients, step the optimizer and the learning rate schedule, and set the gradients to None."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new autocast context for a forward pass: the setting's, or the user's if the setting keeps it."""
        candidate = self.spec.candidate
        if candidate.as_found:
            return caller_autocast(self.spec.torch_state, self.device.type)
        return torch_state.autocast(candidate.precision, self.device.type)

    def loss_scale(self) -> float | None:
        """Return the current loss scale, or None without a scaler. Synchronizes with the device."""
        return None if self.scaler is None else float(self.scaler.get_scale())

    def close(self) -> None:
        """Stop the loader's workers, so that they remove their temporary files, and undo what lasts until `close`."""
        self.batches.close()
        self._worst.close()
        for module in self._pinned:
            forward_wrapper.unpin(module)
        for undo in self._undo:  # later jobs may run in the same process
            undo()

    def _on_device(self, batch: Any) -> Any:
        return batch if self.device.type == "cpu" else data.move_batch(batch, self.device)


class Training(BaseTraining):
    """Training run of a workload that consists of a model, a loss function and an optimizer or several."""

    def __init__(self, workload: Workload, model: nn.Module, spec: Trial) -> None:
        super().__init__(workload, model, spec)
        self.loss = loss_with_checks(workload.loss)
        self.optimizer = make_optimizer(workload, model)
        optimizers = list(users_optimizers(self.optimizer))
        self.parts = (model, optimizers if isinstance(self.optimizer, Optimizers) else self.optimizer)
        # A usual loop holds the last loss, with its graph, until the next one is computed. Freed blocks cannot be
        # merged across it: without it the CPU heap peaks up to 5 % lower than in a usual loop (studies/peak_memory).
        self._last_loss: Tensor | None = None
        self._schedulers = [] if workload.schedule is None else list(workload.schedule(self.optimizer))
        self.scaler = torch_state.grad_scaler(spec.loss_scale, self.device.type)

    @property
    def live(self) -> LiveTraining:  # noqa: D102 - see BaseTraining
        return LiveTraining([self.model], users_optimizers(self.optimizer), self.device)

    @property
    def is_in_own_loop(self) -> bool:
        """Whether steps are taken in the loop of a framework, by the workload's `fit`: only in a confirmation."""
        return self.spec.is_confirmation and self.workload.fit is not None

    def forward_backward(self, batch: Any, *, is_last: bool = True) -> Tensor:  # noqa: D102 - see BaseTraining
        batch = self._on_device(batch)
        with nullcontext() if is_last else self.no_sync():
            with self.autocast():
                loss = self.loss(self.model, batch)
            # A loss that is a sum over samples adds up over the passes; a mean is divided by their number.
            divisor = 1 if self.spec.is_loss_sum else self.spec.candidate.accumulation_steps
            scaled = loss / divisor if divisor > 1 else loss
            torch.autograd.backward(scaled if self.scaler is None else self.scaler.scale(scaled))
        self._last_loss = loss
        # Under CUDA graphs each pass of a compiled loss overwrites the output of the one before.
        return loss.detach().clone().reshape(())

    def update(self) -> None:  # noqa: D102 - see BaseTraining
        if self.scaler is None:
            self._clip()
            self.optimizer.step()
        else:
            # GradScaler refuses to step an optimizer without gradients.
            trained = list(filter(has_gradients, users_optimizers(self.optimizer)))
            if self.workload.clip is not None:
                for optimizer in trained:
                    self.scaler.unscale_(optimizer)
            self._clip()
            for optimizer in trained:
                self.scaler.step(optimizer)
            if trained:
                self.scaler.update()
        for scheduler in self._schedulers:
            scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self.workload.clip is not None:
            self.workload.clip(self.model)


class LoopTraining(BaseTraining):
    """Training run of a user's own loop: `forward_backward` calls its `train_step`, which also steps the optimizers."""

    is_update_apart = False
    has_stepped = False

    def __init__(self, workload: Workload, model: LoopState, spec: Trial) -> None:
        super().__init__(workload, model, spec)
        assert workload.train_step is not None
        self._train_step = workload.train_step
        self.state = model
        self.parts = (model.held,)
        candidate = spec.candidate
        loss_scale = (spec.loss_scale or LossScale()) if MODES[candidate.precision].takes_scaler else None
        self._amp = StepAmp(self.autocast, self.device.type, AmpConfig.of(candidate, loss_scale=loss_scale))
        self.scaler = self._amp if self._amp.is_enabled() else None

    @property
    def live(self) -> LiveTraining:  # noqa: D102 - see BaseTraining
        return self.state.live_training(self.device)

    def forward_backward(self, batch: Any, *, is_last: bool = True) -> Tensor:  # noqa: ARG002 - always a whole step
        """Move the batch to the device, call `train_step`, and return the sum of its losses, a detached scalar.

        The losses are those that `train_step` passes to the methods of its argument `amp`. Raises `WorkloadError` if
        it does not use them.
        """
        batch = self._on_device(batch)
        self._amp.begin()
        self._train_step(self.parts[0], batch, self._amp)
        candidate = self.spec.candidate
        needs_autocast = MODES[candidate.precision].uses_autocast and not candidate.as_found
        loss = self._amp.total_loss(needs_autocast=needs_autocast)
        self.has_stepped = self._amp.has_stepped
        return loss

    def update(self) -> None:
        """Do nothing: `train_step`, called by `forward_backward`, takes the optimizer steps."""


def make_training(workload: Workload, model: nn.Module, spec: Trial) -> BaseTraining:
    """Return the training run of `model` (made by `make_model`), with the setting of `spec` applied to it."""
    training: BaseTraining = (
        LoopTraining(workload, model, spec) if isinstance(model, LoopState) else Training(workload, model, spec)
    )
    with ExitStack() as stack:
        stack.callback(training.close)
        for dimension in DIMENSIONS:
            dimension.apply(training, getattr(spec.candidate, dimension.name))
        stack.pop_all()
    return training


def loss_with_checks(loss: Callable[[nn.Module, Any], Any] | None) -> Callable[[nn.Module, Any], Tensor]:
    """Return a function that calls `loss`, and raises `WorkloadError` unless it returns one element with a gradient."""
    assert loss is not None

    def loss_or_error(model: nn.Module, batch: Any) -> Tensor:
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            returned = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type_name(value)}"
            )
            raise WorkloadError(
                f"loss(model, batch) returned {returned}; it must return a tensor with one element.",
                "Reduce it, for example with .mean(), and return only the loss.",
            )
        if not value.requires_grad:
            raise WorkloadError(
                "loss(model, batch) returned a tensor without gradient.",
                "Compute it from the model's output without torch.no_grad() or .detach().",
            )
        return value

    return loss_or_error

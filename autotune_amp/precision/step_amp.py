"""StepAmp: the `amp` argument of a `train_step` in trials and checks, where no PrecisionController runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_leaves

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import autocast, scaler_arguments

MAX_CALLS_WITHOUT_STEP = 16  # calls of train_step, which may accumulate gradients over several before a step

# Fields of a controller's status that a trial's lacks: None, or zero.
_FIELDS_WITHOUT_VALUE = (
    *("growth_tracker", "epoch", "flushed_share", "flushed_entries", "elapsed_seconds", "step_seconds"),
    *("tokens_per_second", "mfu", "loss", "saved_memory_bytes", "forward_max"),
    *("temperature_celsius", "sm_clock_mhz", "power_watts", "throttling"),
)
_COUNTS_OF_ZERO = (
    *("rung", "num_skips", "num_overflows", "num_bad_batches", "num_moves", "num_scaler_updates", "num_growths"),
    *("num_backoffs", "skip_share", "peak_memory_bytes"),
)


class StepAmpResult:
    """Result of `StepAmp.train_step`, with the controller's interface: true if all optimizers stepped."""

    def __init__(self, steps: Sequence[bool | Tensor], loss: Tensor, grad_norm: Tensor | None) -> None:
        self._steps = steps
        self.value = None
        self.loss = loss
        self.grad_norm = grad_norm

    def __bool__(self) -> bool:
        return all(bool(step) for step in self._steps)


class StepAmp(torch.amp.GradScaler):
    """GradScaler with the part of `PrecisionController`'s interface that a training step uses.

    It records how train_step uses it: `losses` are those that the latest call scaled, detached, and `num_autocasts`,
    `num_scalings`, `num_steps` and `num_updates` count over all calls. `new_autocast` returns a new context for a
    forward pass. With `scales=False` it behaves like a disabled GradScaler, otherwise it uses the config's loss scale.
    An optimizer without gradients is not stepped.
    """

    window_size, window_share = 1, 1.0  # accumulation is up to the train_step

    def __init__(
        self,
        new_autocast: Callable[[], AbstractContextManager[object]],
        device_type: str,
        config: AmpConfig,
        *,
        scales: bool = True,
    ) -> None:
        super().__init__(device_type, **scaler_arguments(config.loss_scale if scales else None))
        self._new_autocast = new_autocast
        self._config = config
        self._last_total = torch.zeros(())
        self.num_calls = self.num_autocasts = self.num_scalings = self.num_steps = self.num_updates = 0
        self.losses: list[Tensor] = []
        self._has_scaled = False  # since the last update
        self._scale_was_read = False  # after a loss was scaled
        self._stepped: dict[int, Any] = {}  # by optimizer: whether it has stepped since the last update
        self._on_step: list[tuple[Callable[[], object], int | None]] = []

    @property
    def config(self) -> AmpConfig:
        """Return the config of the trial."""
        return self._config

    def begin(self) -> None:
        """Start recording a call of `train_step`."""
        self.num_calls += 1
        self.losses = []
        self._has_scaled = self._scale_was_read = False

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new autocast context for a forward pass."""
        self.num_autocasts += 1
        return self._new_autocast()

    @contextmanager
    def validation(self, precision: Precision | None = None) -> Iterator[None]:
        """Disable gradients and use autocast of `precision`, by default the config's, within the context."""
        validation_precision = precision or self.config.precision
        with (
            torch.no_grad(),
            self._new_autocast()
            if validation_precision == self.config.precision
            else autocast(validation_precision, self._device),
        ):
            yield

    def train_step(
        self,
        closure: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        clip_norm: float | None = None,
        num_tokens: int | Tensor | None = None,  # noqa: ARG002 - the trial counts the tokens of its batches itself
    ) -> StepAmpResult:
        """Run a training step: zero_grad, `closure` under autocast, backward, unscale_, clip, step and update.

        `closure` returns the loss; gradients are clipped to `clip_norm` unless it is None. `num_tokens` is not used.
        """
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for each in optimizers:
            each.zero_grad()
        with self.autocast():
            loss = closure()
        self.backward(loss)
        norm = None
        if clip_norm is not None:
            self.unscale_together(optimizers)
            parameters = [parameter for each in optimizers for parameter in parameters_of(each)]
            norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
        steps = [self.step(each) for each in optimizers]
        self.update()
        return StepAmpResult(steps, loss.detach(), norm)

    def scale(self, outputs: Any) -> Any:
        """Multiply `outputs` by the loss scale, and record the losses in them."""
        self.num_scalings += 1
        self._has_scaled = True
        if not self._scale_was_read:  # after it was read, the loss may be a gradient penalty, which may overflow itself
            losses = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            self.losses += [loss.detach().sum(dtype=torch.float32) for loss in losses]
        return super().scale(outputs)

    def get_scale(self) -> float:
        """Return the current loss scale, 1.0 if the loss is not scaled. Synchronizes with the device."""
        self._scale_was_read = self._has_scaled
        return super().get_scale()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``scale(loss).backward(**kwargs)``."""
        self.scale(loss).backward(**kwargs)

    @property
    def has_stepped(self) -> bool:
        """Return whether a call has completed an optimizer step."""
        return self.num_steps > 0 and self.num_updates > 0

    def total_loss(self, *, needs_autocast: bool) -> Tensor:
        """Return the sum of the latest call's losses, or of the previous call's if it had none.

        Raises `WorkloadError` if no call of train_step used amp's methods: backward and, with `needs_autocast`,
        autocast; after `MAX_CALLS_WITHOUT_STEP` calls step and update too.
        """
        required_counts = {"amp.backward(loss)": self.num_scalings}
        if needs_autocast:
            required_counts["amp.autocast()"] = self.num_autocasts
        if self.num_calls >= MAX_CALLS_WITHOUT_STEP:
            required_counts |= {"amp.step(optimizer)": self.num_steps, "amp.update()": self.num_updates}
        if missing := [call for call, count in required_counts.items() if count == 0]:
            raise WorkloadError(
                f"train_step(state, batch, amp) did not call {' or '.join(missing)} in {self.num_calls} call(s): "
                "whether it trains in the trial's precision is unknown.",
                "Run each forward pass in `with amp.autocast():` and call amp.backward(loss); in every call of "
                "train_step, or every few, call amp.step(optimizer) for each optimizer that it trains, then "
                "amp.update() once.",
            )
        if self.losses:
            self._last_total = torch.stack([loss.to(self.losses[0].device) for loss in self.losses]).sum()
        return self._last_total

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step(*args, **kwargs)`` unless a gradient is not finite. Return true if it stepped.

        For a fused optimizer the result is a tensor on its device, to avoid a synchronisation.
        """
        self.num_steps += 1
        stepped: bool | Tensor = True
        if not self._enabled:
            optimizer.step(*args, **kwargs)
        elif not has_gradients(optimizer):
            stepped = False
        else:
            super().step(optimizer, *args, **kwargs)
            stepped = sum(self._found_inf_per_device(optimizer).values()) == 0
        self._stepped[id(optimizer)] = stepped
        return stepped

    def unscale_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Unscale all gradients; if any is not finite, no optimizer will step. Synchronizes with the device."""
        active_optimizers = [optimizer for optimizer in optimizers if self._enabled and has_gradients(optimizer)]
        for optimizer in active_optimizers:
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
        infs = [inf for optimizer in active_optimizers for inf in self._found_inf_per_device(optimizer).values()]
        if len(active_optimizers) > 1 and any(infs):
            for inf in infs:
                inf.fill_(1.0)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the step: set the loss scale to `new_scale`, or adapt it by GradScaler's rule."""
        self.num_updates += 1
        self._has_scaled = self._scale_was_read = False
        states = self._per_optimizer_states if self._enabled else {}
        if self._enabled and new_scale is None and not any(state["found_inf_per_device"] for state in states.values()):
            states.clear()  # no optimizer had gradients: the scale is not adapted
        else:
            super().update(new_scale)
        for callback, key in self._on_step:
            if any(self._stepped.values()) if key is None else self._stepped.get(key):
                callback()
        self._stepped.clear()

    def on_step(self, callback: Callable[[], object], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Register `callback`, called in `update` after each step taken by `optimizer`, or by any optimizer if None."""
        self._on_step.append((callback, None if optimizer is None else id(optimizer)))

    def status(self) -> SimpleNamespace:
        """Return a status with the fields of `PrecisionController.status()`; skips and monitoring are not recorded."""
        config, num_steps = self.config, self.num_updates
        return SimpleNamespace(
            **dict.fromkeys(_FIELDS_WITHOUT_VALUE),
            **dict.fromkeys(_COUNTS_OF_ZERO, 0),
            precision=config.precision,
            is_enabled=True,
            is_advisory=False,
            pinned_modules=config.pinned_modules,
            excluded_attention=(),
            scale=None if config.loss_scale is None else self.get_scale(),
            update=num_steps,
            num_updates=num_steps,
            num_steps=num_steps,
            amp_share=float(MODES[config.precision].uses_autocast),
            steps_by_precision={config.precision: num_steps},
            seconds_by_precision={},
            throttling_reasons=(),
            capabilities={},
            history=(),
        )

    def epoch(self, number: int) -> None:
        """Do nothing: epochs are not recorded here."""

    def reset_stats(self) -> None:
        """Do nothing: no statistics are kept here."""

    def on_move(self, listener: Callable[[Any], object]) -> None:
        """Do nothing: the precision never changes here."""

    def attach(self, model: nn.Module, rerun: Callable[[], Tensor] | None = None) -> None:
        """Do nothing: the model is not monitored here."""

    def count_tokens(self, batch: Any) -> None:
        """Do nothing: the trial counts the tokens of its batches itself."""

    def synchronize(self) -> None:
        """Do nothing: no work is pending here."""


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any parameter of the optimizer has a gradient."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all parameter groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's `step` requires a closure that computes gradients, as LBFGS and SAM do."""
    return _needs_closure(type(optimizer))  # type: ignore[arg-type] # mypy does not know that classes are hashable


@functools.cache  # inspecting a signature takes longer than a small step
def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    if issubclass(kind, torch.optim.LBFGS) or hasattr(kind, "first_step"):
        return True
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty

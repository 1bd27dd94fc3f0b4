"""GradScaler's first half: scale the loss, examine the gradients, step or not. All ranks agree on the verdict."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autotune_amp.runtime import gradients
from autotune_amp.runtime.outputs import listed, tensors
from autotune_amp.runtime.ranks import Ranks
from autotune_amp.runtime.scale_rule import ScaleRule
from autotune_amp.runtime.verdicts import BAD_LOSS, CLEAN, NO_GRADIENTS, OVERFLOW, Stepped, makes_buffers_unread


@functools.cache
def _takes_a_scaler(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether its `step` wants the scaler itself, as custom optimizers once did."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def _of_rule(name: str) -> Any:
    return property(lambda self: getattr(self._rule, name), lambda self, value: setattr(self._rule, name, value))


class ExaminingScaler(torch.amp.GradScaler):
    """What the gradients and the loss of an accumulation window say. `rule` holds the scale on the host.

    A verdict is on the host at once where the gradients are, else a scalar on the device.
    """

    _growth_factor = _of_rule("growth_factor")
    _backoff_factor = _of_rule("backoff_factor")
    _growth_interval = _of_rule("growth_interval")

    def __init__(self, rule: ScaleRule, device: torch.device, ranks: Ranks) -> None:
        self._rule = rule
        backoff_factor = rule.backoff_factor
        super().__init__(device.type, rule.scale, rule.growth_factor, 0.5, rule.growth_interval)
        rule.backoff_factor = backoff_factor  # the constructor refuses 1.0, which never backs off
        self._main_device = device
        self._ranks = ranks
        self._scaling = True
        self._num_passes = 0  # backward passes in the current accumulation window
        self._probe: float | Tensor = 0.0  # 0 times every loss of the window: NaN if one was not finite
        self._loss: float | Tensor = 0.0  # the latest one
        self._verdicts: dict[int, int | Tensor] = {}
        self._lost_share: Tensor | None = None
        self._scale_on_device = rule.scale
        self._inv_scale: Tensor | None = None
        self._scale_was_read = False  # in the current window, after a backward pass
        self._positions: dict[int, int] = {}  # id of an optimizer -> which it is, in the order of first appearance
        self._inspected: set[int] = set()

    # What the controller adds.
    def _begin_window(self) -> None: ...
    def _inspect(self, optimizer: torch.optim.Optimizer) -> None: ...
    def _wants_sample(self) -> bool:
        return False

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._make_on_device(dev, self._target_scale, self._rule.growth_tracker)

    def _make_on_device(self, device: torch.device, scale: float, growth_tracker: int) -> None:
        self._scale_on_device = scale
        self._scale = torch.full((), scale, dtype=torch.float32, device=device)
        self._growth_tracker = torch.full((), growth_tracker, dtype=torch.int32, device=device)

    @property
    def _target_scale(self) -> float:
        return self._rule.scale if self._scaling else 1.0

    def scale(self, outputs: Any) -> Any:
        """The outputs times the loss scale, and a look at whether they are finite."""
        self._begin_window()
        self._num_passes += 1
        if not self._enabled:
            return outputs
        outputs = listed(outputs)
        for loss in (outputs,) if isinstance(outputs, Tensor) else tensors(outputs):
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(loss.device)
            if not self._scale_was_read:  # as a gradient penalty does: its loss holds gradients, which overflow too
                self._see(loss.detach())
        return super().scale(outputs) if self._scaling else outputs

    def _see(self, loss: Tensor) -> None:
        value = loss if loss.numel() == 1 else loss.sum(dtype=torch.float32)
        if self._is_at_hand(value):
            self._loss = value.item()
            if not math.isfinite(self._loss):
                self._probe = math.nan
            return
        self._loss = value.float().reshape(())
        nothing = self._loss * 0.0
        self._probe = nothing if isinstance(self._probe, float) else self._probe + nothing.to(self._probe.device)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``scale(loss).backward(**kwargs)``."""
        self.scale(loss).backward(**kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale and check them; at most once per optimizer and update."""
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._examine(optimizer, self._inverse(scale) if self._scaling else None)
        state["stage"] = OptState.UNSCALED

    def _inverse(self, scale: Tensor) -> Tensor:
        """1 / scale, kept until the scale changes."""
        if self._inv_scale is None:
            # In double precision as GradScaler; MPS and some XPU have none (pytorch#147731).
            has_double = scale.device.type not in ("mps", "xpu")
            self._inv_scale = scale.double().reciprocal().float() if has_double else scale.reciprocal()
        return self._inv_scale

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if id(optimizer) not in self._verdicts:
            self._examine(optimizer, None)
        return self._found_inf_per_device(optimizer)

    def _examine(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor | None) -> None:
        scale, _ = self._check_scale_growth_tracker("step")
        if id(optimizer) not in self._inspected:
            self._inspect(optimizer)
            self._inspected.add(id(optimizer))
            self._position(optimizer)
        if self._scaling and self._wants_sample():
            share = gradients.lost_share(optimizer, scale.device)
            share = torch.zeros_like(scale) if share is None else share  # for the ranks that have gradients
            self._lost_share = share if self._lost_share is None else torch.maximum(share, self._lost_share)
        found = gradients.check(optimizer, inv_scale)
        verdict, skipped = self._verdict(found, scale.device)
        self._verdicts[id(optimizer)] = verdict
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {} if skipped is None else {skipped.device: skipped}

    def _position(self, optimizer: torch.optim.Optimizer) -> int:
        return self._positions.setdefault(id(optimizer), len(self._positions))

    def _verdict(self, found: Tensor | None, device: torch.device) -> tuple[int | Tensor, Tensor | None]:
        """The verdict, on the host where the gradients are there, else a scalar on the device; 1.0 for skip, or 0.0."""
        are_many = self._ranks.are_many
        if found is None:
            if not are_many:
                return NO_GRADIENTS, None
            found = torch.full((), float(NO_GRADIENTS), device=device)
        if not self._is_at_hand(found):
            judged = torch.nan_to_num(found + self._probe, nan=float(BAD_LOSS))
            if are_many:
                loss = self._loss if isinstance(self._loss, Tensor) else torch.full_like(judged, self._loss)
                pair = torch.stack([judged, torch.nan_to_num(loss.to(judged.device), 0.0, 0.0, 0.0)])
                judged, self._loss = self._ranks.maximum_(pair).unbind()
            return judged, judged.clamp(CLEAN, OVERFLOW)
        verdict = BAD_LOSS if math.isnan(float(self._probe)) else int(found.item())
        if are_many:
            # The loss too: how it develops decides, and has to decide alike.
            mine = float(self._loss) if math.isfinite(self._loss) else 0.0
            pair = torch.tensor([verdict, mine], dtype=torch.float32, device=self._main_device)
            verdict, self._loss = self._ranks.maximum_(pair).tolist()
            verdict = int(verdict)
        if are_many or verdict != CLEAN:
            found.fill_(float(verdict > CLEAN))
        return verdict, found

    @staticmethod
    def _is_at_hand(tensor: Tensor) -> bool:
        """Whether the host can read it without waiting."""
        return tensor.device.type == "cpu"

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` unless a gradient or the loss was not finite; none without gradients."""
        if not self._enabled:
            if id(optimizer) not in self._inspected:
                self._inspect(optimizer)
                self._inspected.add(id(optimizer))
            value = optimizer.step(*args, **kwargs)
            self._position(optimizer)
            self._verdicts[id(optimizer)] = CLEAN
            return Stepped(CLEAN, value)
        if "closure" in kwargs:
            return super().step(optimizer, *args, **kwargs)  # which refuses it
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        verdict = self._verdicts.get(id(optimizer), NO_GRADIENTS)
        if makes_buffers_unread(optimizer):
            self._verdicts[id(optimizer)] = verdict = int(verdict)
        # A fused optimizer reads the verdict by itself, but it need not be called where the host knows.
        if state["stage"] is not OptState.STEPPED and isinstance(verdict, int) and verdict != CLEAN:
            state["stage"] = OptState.STEPPED
            return Stepped(verdict)
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if is_fused and not _takes_a_scaler(type(optimizer)):  # type: ignore[arg-type] # mypy and hashes of classes
            value = self._step_fused(optimizer, state, *args, **kwargs)
        else:
            value = super().step(optimizer, *args, **kwargs)
        return Stepped(self._verdicts[id(optimizer)], value)

    def _step_fused(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As GradScaler's own, which looks at the signature of ``optimizer.step`` anew each time."""
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        given = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            optimizer.grad_scale = self._scale if given is None else self._scale * given
        else:
            optimizer.grad_scale = given
        (optimizer.found_inf,) = state["found_inf_per_device"].values()
        value = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        del optimizer.grad_scale, optimizer.found_inf
        return value

    def step_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Step all of them or none: a non-finite gradient of one skips every one. Waits for the device."""
        given = list(optimizers)
        for optimizer in given:
            if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                self.unscale_(optimizer)
        worst = max((int(self._verdicts.get(id(optimizer), CLEAN)) for optimizer in given), default=CLEAN)
        for optimizer in given:
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] if self._enabled else {}
            if found and worst > CLEAN:
                self._verdicts[id(optimizer)] = worst
                for skipped in found.values():
                    skipped.fill_(1.0)
            self.step(optimizer)
        return worst == CLEAN

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],  # noqa: ARG002 # GradScaler's signature
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        verdict = self._verdicts[id(optimizer)]
        if isinstance(verdict, Tensor):  # the one wait that GradScaler has here too
            if isinstance(self._loss, Tensor):
                verdict, self._loss = torch.stack([verdict, self._loss.to(verdict.device)]).tolist()
            self._verdicts[id(optimizer)] = verdict = int(verdict)
        return optimizer.step(*args, **kwargs) if verdict == CLEAN else None

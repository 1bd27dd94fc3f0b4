"""GradScaler's second half: the scale that follows from the verdicts, on the host or on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.runtime.examining import ExaminingScaler
from autotune_amp.runtime.lag import LAG_UPDATES, LaggedReader, Waiting
from autotune_amp.runtime.ranks import Ranks
from autotune_amp.runtime.scale_rule import ScaleRule, check_scale
from autotune_amp.runtime.verdicts import CLEAN, NO_GRADIENTS, OVERFLOW


class JudgingScaler(ExaminingScaler):
    """Where the host knows each verdict at once it alone decides the scale. Behind a fused optimizer on an accelerator
    the device applies the same rule itself and the host follows, `LAG_UPDATES` updates later. Verdicts reach `_judged`
    in order, once each.
    """

    def __init__(self, rule: ScaleRule, device: torch.device, ranks: Ranks) -> None:
        super().__init__(rule, device, ranks)
        self._reader = LaggedReader()

    # What the controller adds.
    def _skipped(self, skipped: bool | Tensor) -> None: ...
    def _judged(self, verdicts: Mapping[int, int], loss: float, lost_share: float | None) -> None: ...
    def _settle(self) -> None: ...
    def _is_urgent(self) -> bool:
        return False

    def _resume(self, waiting: Waiting, scale: float, growth_tracker: int) -> None:
        """Go on where verdicts were on their way: the device, at `scale`, was that much ahead of the host."""
        self._reader.restore(waiting)
        if waiting:
            self._make_on_device(self._main_device, scale, growth_tracker)

    def get_scale(self) -> float:
        """The current loss scale, 1.0 where the loss is not scaled; waits for the device."""
        self._scale_was_read = self._num_passes > 0
        return self._current_scale()

    def _current_scale(self) -> float:
        return super().get_scale() if len(self._reader) and self._enabled else self._target_scale

    def _get_growth_tracker(self) -> int:
        return super()._get_growth_tracker() if len(self._reader) and self._enabled else self._rule.growth_tracker

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the accumulation window; the scale follows from what was found or is `new_scale`. The precision may move.

        Raises the errors of `TrainingStoppedError` when the run must not go on.
        """
        if self._enabled and new_scale is None:
            self._check_scale_growth_tracker("update")
            if not self._verdicts:
                raise InvalidRequestError(
                    "update() was called before step(): no gradients were checked since the last update().",
                    "Call step(optimizer), or unscale_(optimizer), for each optimizer first.",
                )
        if new_scale is None:
            self._end_window()
            return
        scale = check_scale(float(new_scale))
        growth_tracker = self._get_growth_tracker()
        self._end_window()
        self.synchronize()
        self._rule.set(scale)
        self._rule.growth_tracker = growth_tracker  # GradScaler, too, goes on counting from before this update
        self._write_scale(is_forced=True)

    def _end_window(self) -> None:
        verdicts, loss, lost_share = self._verdicts, self._loss, self._lost_share
        self._per_optimizer_states.clear()
        self._num_passes = 0
        self._loss = self._probe = 0.0
        self._scale_was_read = False
        self._verdicts, self._lost_share = {}, None
        if any(isinstance(verdict, Tensor) for verdict in verdicts.values()):
            self._advance_on_device(verdicts, loss, lost_share)
            return
        self.synchronize()
        known = {self._positions[key]: int(verdict) for key, verdict in verdicts.items() if verdict != NO_GRADIENTS}
        if not known:
            return
        self._skipped(max(known.values()) > CLEAN)
        share = None if lost_share is None else float(self._ranks.maximum_(lost_share).item())
        self._judged(known, float(loss), share)
        self._write_scale()

    def _advance_on_device(
        self, verdicts: Mapping[int, int | Tensor], loss: float | Tensor, lost_share: Tensor | None
    ) -> None:
        scale, tracker = self._check_scale_growth_tracker("update")
        rule = self._rule
        if not len(self._reader):
            self._write_scale(is_forced=True)  # the host may have counted on since
        values = [v if isinstance(v, Tensor) else torch.full_like(scale, float(v)) for v in verdicts.values()]
        worst = values[0] if len(values) == 1 else torch.stack(values).amax()
        self._skipped(worst.clamp(0, 1))
        if self._scaling:
            overflowed = worst.eq(OVERFLOW).float()
            torch._amp_update_scale_(
                scale, tracker, overflowed, rule.growth_factor, rule.backoff_factor, rule.growth_interval
            )
            scale.clamp_(rule.floor, rule.max_scale)
            self._inv_scale = None
        values.append(loss.to(scale.device) if isinstance(loss, Tensor) else torch.full_like(scale, loss))
        if lost_share is not None:
            values.append(self._ranks.maximum_(lost_share))
        self._reader.push(values, tuple(self._positions[key] for key in verdicts))
        # Hysteresis is counted on the host alone, which therefore has to keep up.
        self._resolve(0 if rule.hysteresis > 1 else LAG_UPDATES)

    def _resolve(self, lag_updates: int) -> None:
        while len(self._reader) > (0 if self._is_urgent() else lag_updates):
            values, keys = self._reader.pop()
            verdicts, (loss, *share) = values[: len(keys)], values[len(keys) :]
            known = {key: int(value) for key, value in zip(keys, verdicts, strict=True) if value != NO_GRADIENTS}
            if known:
                self._judged(known, loss, share[0] if share else None)
        if not len(self._reader):
            self._write_scale(is_forced=True)
        self._settle()

    def synchronize(self) -> None:
        """Wait for what is still on its way from the device: every verdict is acted on, every callback called.

        With several ranks, on all of them alike.
        """
        if len(self._reader):
            self._resolve(0)

    def _write_scale(self, *, is_forced: bool = False) -> None:
        if self._scale is None or self._growth_tracker is None:
            return
        if is_forced or self._scale_on_device != self._target_scale:
            self._scale_on_device = self._target_scale
            self._inv_scale = None
            self._scale.fill_(self._scale_on_device)
            self._growth_tracker.fill_(self._rule.growth_tracker)

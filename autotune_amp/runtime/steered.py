"""The scaler joined to the steering: what is judged goes to the policy, and a move changes how the scaler works."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from autotune_amp.core.config import Precision
from autotune_amp.precision import mode as precision
from autotune_amp.precision import torch_state
from autotune_amp.runtime.actions import Action, Signal
from autotune_amp.runtime.attachment import Attachment
from autotune_amp.runtime.checks import refuse_half_parameters
from autotune_amp.runtime.run_log import BeginLine, MoveLine, RunLog, SampleLine, new_run_id, now
from autotune_amp.runtime.scaler import JudgingScaler
from autotune_amp.runtime.status import MoveRecord
from autotune_amp.runtime.steering import Steering
from autotune_amp.runtime.verdicts import BAD_LOSS, CLEAN, OVERFLOW

log = logging.getLogger("autotune_amp.runtime")
SAMPLE_EVERY = 64  # updates between looks at the gradients' and activations' magnitudes
_SAMPLE_AT = 8  # early in the run, but after the loss scale has settled


class SteeredScaler(JudgingScaler):
    """A scaler whose verdicts move `steering`, and which follows its rung.

    A move waits until the accumulation window is empty, which would else hold gradients of two scales, and until an
    autocast of ours has ended, whose cached casts would break. One of the user's own may be on for ever; there the
    precision is changed by contexts inside it, which use no cache.
    """

    def __init__(self, steering: Steering, *, guard: bool, writer: Any, run_log: RunLog | None) -> None:
        super().__init__(steering.policy.scale, steering.device, steering.ranks)
        steering.applied = self._apply_rung
        self._steering = steering
        self._policy = steering.policy
        self._guard = guard
        self._writer = writer
        self._run_log = run_log
        self._run_id: str | None = None  # as in the log, and in every checkpoint from then on
        if run_log is not None:
            steering.listeners.append(self._log_move)
        self._is_off = False
        self._is_in_window = False  # from the first autocast() or scale() until update()
        self._autocast_is_ours = False
        self._is_rerunning = False  # a diagnosis may call the user's closure, in precisions of its own
        self._num_steps = self._num_amp_steps = 0
        self._action: Action | None = None
        self._pending: list[tuple[str, str]] = []  # what to do once idle, and with which precision
        self._on_step: list[tuple[Callable[[], object], int | None]] = []
        self._last_update: float | None = None
        self._seconds: deque[float] = deque(maxlen=101)
        self._precision: Precision = "fp32"
        self._is_verifying = False
        self._found = torch_state.capture() if steering.own_config.as_found else None
        self._apply_rung()

    def _apply_rung(self) -> None:
        """Bring everything in line with the policy's rung."""
        self._note_seconds()
        self._seconds.clear()
        self._last_update = None
        self._precision = "fp32" if self._is_off else self._policy.precision
        self._set_flags()
        torch.clear_autocast_cache()
        self._scaling = self._policy.is_scaling and not self._is_off
        self._enabled = not self._is_off and (self._guard or self._scaling)
        self._force_model()
        self._begin_verifying()
        self._write_scale(is_forced=True)

    def _set_flags(self) -> None:
        own = self._steering.own_config
        if self._found is not None and self._precision == own.precision and not self._is_off:
            torch_state.apply_fp32_flags(self._found)
        else:
            precision.set_flags(self._precision)

    def _force_model(self) -> None:
        """Against an autocast of the user's own; where the loop uses ours, that is all it takes."""
        if self._steering.attachment is not None:
            is_as_written = self._autocast_is_ours or self._precision == self._steering.own_config.precision
            self._steering.attachment.run_in(None if is_as_written else self._precision)

    def _begin_verifying(self) -> None:
        """In the next window, look at whether the model's layers run in the precision that they should."""
        attachment = self._steering.attachment
        self._is_verifying = attachment is not None and not (self._autocast_is_ours or self._steering.is_advisory)
        if attachment is not None and self._is_verifying:
            attachment.observer.precisions.clear()
            attachment.observer.is_sampling = True

    def _verify(self, attachment: Attachment) -> None:
        self._is_verifying = False
        wanted = {self._precision, "fp32"}  # a layer that the user or a pin keeps in fp32 does no harm
        if not self._ranks.any(not attachment.observer.precisions <= wanted):
            return
        if attachment.is_forced:
            self._pending.append(("give_up", ""))
        else:  # the loop is written in another precision than the config's
            attachment.run_in(self._precision)
            self._begin_verifying()

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return super().__getstate__()

    def _note_seconds(self) -> None:
        if self._seconds:
            self._steering.rung_seconds[self._precision] = median(self._seconds)

    def _when_idle(self, what: str, name: str = "") -> None:
        self._pending.append((what, name))
        self._settle()

    def _carry_out(self, what: str, name: str) -> None:
        if what == "act":
            self._act()
        elif what == "give_up":
            self._steering.give_up_moving()
        elif what == "set_precision":
            self._steering.move_by_hand(cast("Precision", name))
        else:
            self._is_off = what == "disable"
            self._apply_rung()

    @property
    def _is_in_own_autocast(self) -> bool:
        return self._autocast_is_ours and torch.is_autocast_enabled(self._main_device.type)

    def _settle(self) -> None:
        while self._pending and not self._is_in_window and not self._is_in_own_autocast:
            self._is_in_window = True  # a rerun may use autocast(): nothing else changes meanwhile
            try:
                self.synchronize()  # what is still on its way belongs to the rung that is about to be left
                self._carry_out(*self._pending.pop(0))
            finally:
                self._is_in_window = False

    def _end_window(self) -> None:
        if self._steering.attachment is not None:
            self._steering.attachment.num_window_passes = self._num_passes
        super()._end_window()
        self._is_in_window = False
        self._settle()

    def _begin_window(self) -> None:
        self._is_in_window = True
        if self._steering.attachment is not None and self._num_passes == 0:
            self._steering.attachment.begin_window()

    def _inspect(self, optimizer: torch.optim.Optimizer) -> None:
        refuse_half_parameters(optimizer, self._precision)
        if self._steering.pins_to_come and self._steering.attachment is None and not self._inspected:
            log.warning("Modules are to be pinned in fp32, which takes controller.attach(model): nothing is pinned.")
        if self._steering.is_advisory and not self._inspected and self._precision in ("fp16", "bf16"):
            log.warning(
                "The controller is advisory: the loop uses neither controller.autocast() nor controller.attach(model), "
                "so it scales and guards, but cannot step the precision down."
            )

    def _wants_sample(self) -> bool:
        return self._policy.num_updates % SAMPLE_EVERY == _SAMPLE_AT

    def _is_urgent(self) -> bool:
        return self._policy.is_watching

    def _skipped(self, skipped: bool | Tensor) -> None:
        attachment = self._steering.attachment
        if attachment is None:
            return
        if self._is_verifying:
            self._verify(attachment)
        attachment.end_window(skipped)
        if not self._autocast_is_ours:
            attachment.begin_window()
        attachment.observer.is_sampling = self._wants_sample() or self._is_verifying

    def _judged(self, verdicts: Mapping[int, int], loss: float, lost_share: float | None) -> None:
        self._begin_log()
        judged_at = time.perf_counter()
        if self._last_update is not None:
            self._seconds.append(judged_at - self._last_update)
        self._last_update = judged_at
        has_stepped = CLEAN in verdicts.values()
        self._num_steps += has_stepped
        self._num_amp_steps += has_stepped and self._precision in ("bf16", "fp16")
        if not self._is_off:
            worst = max(verdicts.values())
            known = None if worst == BAD_LOSS else loss
            action = self._policy.observe(Signal(worst == OVERFLOW, worst == BAD_LOSS, lost_share, known))
            if action is not None and self._action is None:  # one at a time, and before what the user asked for since
                self._action = action
                self._pending.insert(0, ("act", ""))
        for callback, key in self._on_step:  # last: they may save a checkpoint
            if has_stepped if key is None else verdicts.get(key) == CLEAN:
                callback()
        is_sampled = self._policy.num_updates % SAMPLE_EVERY == 0 and not self._is_off
        if self._writer is not None and is_sampled:
            self._write_scalars()
        if self._run_log is not None and (is_sampled or self._run_log.scale != self._scale_in_use):
            is_known = self._enabled and math.isfinite(loss)
            self._run_log.write(SampleLine(**self._stand(), loss=loss if is_known else None))

    def _act(self) -> None:
        action, self._action = self._action, None
        self._note_seconds()
        self._is_rerunning = True
        try:
            self._steering.act(action)
        finally:
            self._is_rerunning = False

    def _write_scalars(self) -> None:
        policy = self._policy
        for name, value in (
            ("scale", self._target_scale),
            ("skips", policy.num_skips),
            ("rung", policy.rung),
            ("steps", self._num_steps),
        ):
            self._writer.add_scalar(f"autotune_amp/{name}", value, policy.num_updates)

    @property
    def _scale_in_use(self) -> float | None:
        return self._rule.scale if self._scaling else None

    def _stand(self) -> dict[str, Any]:
        return {
            "update": self._policy.num_updates,
            "num_steps": self._num_steps,
            "num_skips": self._policy.num_skips,
            "precision": self._precision,
            "scale": self._scale_in_use,
        }

    def _begin_log(self) -> None:
        """Only now: by its first update a run knows its ranks and has loaded its checkpoint."""
        run_log, ranks = self._run_log, self._ranks
        if run_log is None or run_log.has_begun:
            return
        if ranks.rank != 0:
            run_log.begin(None)
            return
        self._run_id = self._run_id or new_run_id()
        begin = BeginLine(
            **self._stand(),
            run_id=self._run_id,
            is_resumed=self._policy.num_updates > 0,
            time=now(),
            device=str(self._main_device),
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
            config=self._steering.own_config,
        )
        run_log.begin(begin)

    def _log_move(self, record: MoveRecord) -> None:
        assert self._run_log is not None  # else nobody listens
        self._begin_log()
        self._run_log.write(
            MoveLine(
                **self._stand(),
                kind=record.kind,
                before=record.before,
                after=record.after,
                reason=record.reason,
                pinned_modules=record.config.pinned_modules,
            )
        )

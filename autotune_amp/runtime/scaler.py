"""The loss scale on the device, and numbers on their way from there: the host never waits for either."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from autotune_amp.runtime.device import Ranks
from autotune_amp.runtime.gradient_check import OVERFLOW, Window
from autotune_amp.runtime.policy import ScaleRule

LAG_UPDATES = 4
Waiting: TypeAlias = Sequence[tuple[Sequence[float], Sequence[int]]]  # (values, label)


class LaggedReader:
    """A queue of small groups of device scalars, each copied to pinned host memory as it is pushed, with its label."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, torch.Event | None, tuple[int, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Sequence[Tensor], label: tuple[int, ...]) -> None:
        """Send `values`, scalars of one device, on their way."""
        packed = values[0].reshape(1) if len(values) == 1 else torch.stack(list(values))
        if packed.device.type == "cpu":
            self._waiting.append((packed, None, label))
            return
        host = torch.empty(len(values), pin_memory=True)
        host.copy_(packed, non_blocking=True)
        # On the stream of the copy, which need not be the current device's.
        event = torch.accelerator.current_stream(packed.device).record_event()
        self._waiting.append((host, event, label))

    def waiting(self) -> list[tuple[list[float], tuple[int, ...]]]:
        """All groups and their labels, oldest first, which go on waiting; waits for the device."""
        for _, event, _ in self._waiting:
            if event is not None:
                event.synchronize()
        return [(host.tolist(), label) for host, _, label in self._waiting]

    def restore(self, waiting: Waiting) -> None:
        """Have these wait, and nothing else."""
        self._waiting.clear()
        self._waiting.extend((torch.tensor(values), None, tuple(label)) for values, label in waiting)

    def pop(self) -> tuple[list[float], tuple[int, ...]]:
        """The oldest group and its label; waits for the device where it is not there yet."""
        host, event, label = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        return host.tolist(), label


class LossScaler:
    """`scale` and `growth_tracker` are scalars on the device, none before the first loss.

    Where the host knows each verdict at once they follow `rule`, which holds them on the host. Behind a fused optimizer
    on an accelerator the device applies the same rule itself, and the host follows `LAG_UPDATES` later: what it will
    know then is in `reader`.
    """

    def __init__(self, rule: ScaleRule) -> None:
        self.rule = rule
        self.is_scaling = True
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.reader = LaggedReader()
        self._written = rule.scale
        self._inverse: Tensor | None = None

    @property
    def target(self) -> float:
        """The scale that the host counts on, 1.0 where the loss is not scaled."""
        return self.rule.scale if self.is_scaling else 1.0

    def current_scale(self) -> float:
        """The device's scale, which may be ahead of the host; waits for it then."""
        return float(self.scale.item()) if len(self.reader) and self.scale is not None else self.target

    def current_growth_tracker(self) -> int:
        """The device's growth tracker, as `current_scale`."""
        tracker = self.growth_tracker
        return int(tracker.item()) if len(self.reader) and tracker is not None else self.rule.growth_tracker

    def place(self, device: torch.device, scale: float, growth_tracker: int) -> None:
        """Have `scale` and `growth_tracker` on this device."""
        self._written = scale
        self._inverse = None
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.full((), growth_tracker, dtype=torch.int32, device=device)

    def inverse(self) -> Tensor:
        """1 / scale, kept until the scale changes."""
        assert self.scale is not None  # a loss was scaled
        if self._inverse is None:
            # In double precision as GradScaler; MPS and some XPU have none (pytorch#147731).
            has_double = self.scale.device.type not in ("mps", "xpu")
            self._inverse = self.scale.double().reciprocal().float() if has_double else self.scale.reciprocal()
        return self._inverse

    def send(self, window: Window, ranks: Ranks) -> Tensor:
        """Follow verdicts that are on the device, and send all that the window found on its way to the host.

        Gives 1.0 for a step that the device skips, else 0.0.
        """
        assert self.scale is not None  # a loss was scaled
        scale = self.scale
        if not len(self.reader):
            self.write(is_forced=True)  # the host may have counted on since
        verdicts, loss = window.verdicts.values(), window.loss
        values = [v if isinstance(v, Tensor) else torch.full_like(scale, float(v)) for v in verdicts]
        worst = values[0] if len(values) == 1 else torch.stack(values).amax()
        self._advance(worst)
        values.append(loss.to(scale.device) if isinstance(loss, Tensor) else torch.full_like(scale, loss))
        if window.lost_share is not None:
            values.append(ranks.maximum_(window.lost_share))
        self.reader.push(values, tuple(window.verdicts))
        return worst.clamp(0, 1)

    def _advance(self, verdict: Tensor) -> None:
        if not self.is_scaling:
            return
        assert self.scale is not None and self.growth_tracker is not None  # noqa: PT018 # a loss was scaled
        rule = self.rule
        overflowed = verdict.eq(OVERFLOW).float()
        torch._amp_update_scale_(
            self.scale, self.growth_tracker, overflowed, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        )
        self.scale.clamp_(rule.floor, rule.max_scale)
        self._inverse = None

    def write(self, *, is_forced: bool = False) -> None:
        """Bring the device in line with the host; `is_forced` where the device may have gone on by itself."""
        if self.scale is None or self.growth_tracker is None:
            return
        if is_forced or self._written != self.target:
            self._written = self.target
            self._inverse = None
            self.scale.fill_(self._written)
            self.growth_tracker.fill_(self.rule.growth_tracker)

"""What the policy is told and what it asks for. Plain data; a rung is an index, the config's own precision first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class Signal(NamedTuple):
    """What one `update()` saw: non-finite gradients, a non-finite loss, the loss where it is known, and now and then
    the share of the gradient that was lost.
    """

    overflow: bool = False
    loss_nonfinite: bool = False
    lost_share: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Diagnose:
    """Rerun the batch in fp32 and find out whose fault it is; answer with `Policy.judge`."""

    reason: str


@dataclass(frozen=True)
class Measure:
    """Measure in fp32 how much of the gradient fp16 flushes to zero; answer with `Policy.judge_underflow`."""

    reason: str


@dataclass(frozen=True)
class Demote:
    """Step down to `rung`. Tentative where no rerun could say that precision is at fault: the next steps decide."""

    rung: int
    reason: str
    is_tentative: bool


@dataclass(frozen=True)
class Revert:
    """Go back to `rung`: the tentative demotion did not help, so it was not precision."""

    rung: int
    reason: str


@dataclass(frozen=True)
class Pin:
    """Keep `modules` in fp32 and stay in this rung."""

    modules: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Rescale:
    """Set the loss scale to `scale`."""

    scale: float
    reason: str


@dataclass(frozen=True)
class Blame:
    """Not precision's fault: skip such steps and hold the loss scale, from before the burst, at `scale`.

    A tentative demotion made shortly before is taken back.
    """

    scale: float
    reason: str


@dataclass(frozen=True)
class Probe:
    """Try `rung` at `scale` on the current batch without stepping; answer with `Policy.probed`."""

    rung: int
    scale: float


@dataclass(frozen=True)
class Promote:
    """Go back up to `rung`."""

    rung: int
    reason: str


@dataclass(frozen=True)
class Stop:
    """End the run; `is_precision` says whose fault it was."""

    reason: str
    is_precision: bool


@dataclass(frozen=True)
class Warn:
    """Nothing can be done about it, but the user should know."""

    reason: str


Move: TypeAlias = Demote | Revert | Pin | Rescale | Blame | Promote
Action: TypeAlias = Move | Diagnose | Measure | Probe | Stop | Warn

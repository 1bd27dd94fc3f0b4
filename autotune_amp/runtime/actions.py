"""What the policy is told and what it asks for. Plain data; a rung is an index, the config's own precision first."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import msgspec


class Signal(NamedTuple):
    """What one `update()` saw: non-finite gradients, a non-finite loss, the loss where it is known, and now and then
    an estimate of the share of the gradient that fp16 lost. A loss of exactly 0, as a hinge's, has none to lose.
    """

    overflow: bool = False
    loss_nonfinite: bool = False
    lost_share: float | None = None
    loss: float | None = None


class Diagnose(msgspec.Struct, frozen=True):
    """Rerun the batch in fp32 and find out whose fault it is; answer with `Policy.judge`."""

    reason: str


class Demote(msgspec.Struct, frozen=True):
    """Step down to `rung`. Tentative where no rerun could say that precision is at fault: the next steps decide."""

    rung: int
    reason: str
    is_tentative: bool


class Revert(msgspec.Struct, frozen=True):
    """Go back to `rung`: the tentative demotion did not help, so it was not precision."""

    rung: int
    reason: str


class Pin(msgspec.Struct, frozen=True):
    """Keep `modules` in fp32 and stay in this rung."""

    modules: tuple[str, ...]
    reason: str


class Rescale(msgspec.Struct, frozen=True):
    """Set the loss scale to `scale`."""

    scale: float
    reason: str


class Blame(msgspec.Struct, frozen=True):
    """Not precision's fault: skip such steps and hold the loss scale, from before the burst, at `scale`.

    A tentative demotion made shortly before is taken back.
    """

    scale: float
    reason: str


class Probe(msgspec.Struct, frozen=True):
    """Try `rung` at `scale` on the current batch without stepping; answer with `Policy.probed`."""

    rung: int
    scale: float


class Promote(msgspec.Struct, frozen=True):
    """Go back up to `rung`."""

    rung: int
    reason: str


class Stop(msgspec.Struct, frozen=True):
    """End the run; `is_precision` says whose fault it was."""

    reason: str
    is_precision: bool


class Warn(msgspec.Struct, frozen=True):
    """Nothing can be done about it, but the user should know."""

    reason: str


Move: TypeAlias = Demote | Revert | Pin | Rescale | Blame | Promote
Action: TypeAlias = Move | Diagnose | Probe | Stop | Warn

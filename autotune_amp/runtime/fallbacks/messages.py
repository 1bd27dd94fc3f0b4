"""Longer messages of the controller to the user."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autotune_amp.core.dimensions import Precision
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.scaler import LossScaler
from autotune_amp.runtime.status import MoveRecord

MISSING_VARIABLES = (
    "The config was measured with variables that this process was started without, so it may be slower. "
    "Before Python starts: export %s"
)
NOTHING_PINNED = "Modules are to be pinned in fp32; without controller.attach(model) nothing is pinned."
ADVISORY = (
    "The controller is advisory: the loop uses neither controller.autocast() nor controller.attach(model), so it "
    "scales and guards, but cannot step the precision down; where steps fail for good it stops the run."
)
BAD_WEIGHTS = (
    "No step can fix them: load a checkpoint from before. They were loaded so, or a step was taken that the "
    "controller did not check (guard=False, disable(), an optimizer stepped without it)."
)


def introduction(
    policy: Policy, scaler: LossScaler, last: MoveRecord | None, device: torch.device, *, checks: bool
) -> str:
    """Return a line with the precision, the reason for it, and how failing steps are handled."""
    why = "as its config says" if last is None else f"since update {last.update}: {last.reason}"
    scale = f", loss scale {scaler.target:g}" if scaler.is_scaling else ""
    guarded = "steps that are not finite are skipped" if checks else "nothing is guarded"
    below = [name for name in policy.rungs[policy.rung + 1 :] if name not in policy.withdrawn]
    then = f"; where they repeat, down to {' or '.join(below)}" if below and checks else ""
    how = "rerunning the batch says why" if policy.can_rerun else "without a rerun, on trial"
    diagnosis = f" ({how})" if then else ""
    return f"Training in {policy.precision} on {device}, {why}{scale}; {guarded}{then}{diagnosis}."


def advice(
    policy: Policy, reason: str, culprit: str | None, below: Sequence[Precision], *, is_hidden: bool = False
) -> str:
    """Return the advice to use a lower precision that the controller cannot set, with the way to allow it.

    `is_hidden`: compiled code does not show whether the forward pass overflows.
    """
    where = f", first in {culprit}" if culprit and culprit not in reason else ""
    if is_hidden and not where:
        where = " (compiled code does not show where: overflows of its forward pass are counted as bad batches)"
    should = below[0] if below else "a fallback"
    told = f"{reason}{where}. The precision should be {should}, but the loop gives no way to change it from here."
    return f"{told} {way_out(policy)}"


def way_out(policy: Policy) -> str:
    """Return which lines to change so that the controller can change the precision."""
    has_fallback = len(policy.rungs) > policy.rung + 1
    fallback = "" if has_fallback else ' Name fallbacks, too: AmpConfig(..., fallback=["bf16", "fp32"]).'
    return (
        "Change two lines: `with controller.autocast():` in place of torch.autocast(...) around the forward pass, and "
        "controller.attach(model, rerun=lambda: ...) before the loop, with what computes the loss of the latest "
        f"batch, to have failures diagnosed.{fallback}"
    )


def shortened(names: Sequence[str]) -> str:
    """Return the first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

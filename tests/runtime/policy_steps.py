"""A policy brought to where a test begins. A rung is an index: 0 fp16, 1 bf16, 2 fp32 unless a test says."""

from __future__ import annotations

from typing import Any

from autotune_amp.core.config import LossScale
from autotune_amp.core.setting import Precision
from autotune_amp.runtime.actions import Action, Blame, Demote, Diagnose, Pin, Promote, Rescale, Revert, Signal
from autotune_amp.runtime.policy import Policy

CLEAN = Signal()
OVERFLOW = Signal(overflow=True)
BAD_LOSS = Signal(overflow=True, loss_nonfinite=True)  # the gradients of such a loss are not finite either
LOST = Signal(lost_share=0.02)
START = 65536.0


def policy_of(*rungs: Precision, is_settled: bool = True, loss_scale: LossScale | None = None, **more: Any) -> Policy:
    policy = Policy(rungs or ("fp16", "bf16", "fp32"), loss_scale, **more)
    if is_settled:
        assert after(policy, 4 * [CLEAN]) is None
        assert policy.phase == "STEADY"
    return policy


def after(policy: Policy, signals: list[Signal]) -> Action | None:
    """What the last of `signals` calls for; those before it call for nothing."""
    for signal in signals[:-1]:
        assert policy.observe(signal) is None
    return policy.observe(signals[-1])


def confirmed(policy: Policy, action: Action | None) -> Action | None:
    assert isinstance(action, Demote | Revert | Pin | Rescale | Blame | Promote)
    return policy.confirm(action)


def blamed(policy: Policy) -> Policy:
    """After two bad losses and a rerun that says that it is not precision."""
    diagnose = after(policy, 2 * [BAD_LOSS])
    assert isinstance(diagnose, Diagnose)
    assert confirmed(policy, policy.judge("NaN", reproduced=True, is_precision=False, finite_in=())) is None
    assert policy.phase == "BLAMED"
    return policy


def judged(policy: Policy, signals: list[Signal], **more: Any) -> Action | None:
    """What follows from `signals` and a rerun that puts the fault on precision."""
    diagnose = after(policy, signals)
    assert isinstance(diagnose, Diagnose)
    return policy.judge(diagnose.reason, **{"reproduced": True, "is_precision": True, "finite_in": ("fp32",), **more})

"""Which timeouts say that steps are slow."""

from __future__ import annotations

import msgspec
import pytest
from test_profile_rows import measured

from autotune_amp.core.outcome import Failure, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.profile.running import outcome_is_overdue
from autotune_amp.trial.jobs import Trial

TRIAL = Trial(
    candidate=Setting(precision="bf16", batch_size=8),
    device="cpu",
    step_deadline_seconds=10.0,
    first_step_deadline_seconds=16.0,
)
TIMEOUT = Failure(kind="timeout", message="a step took longer than 10.0 s")


@pytest.mark.parametrize(
    ("outcome", "waited_seconds", "expected"),
    [
        (TIMEOUT, 9.9, True),
        (TIMEOUT, None, False),  # the first step
        (TIMEOUT, 16.1, False),  # compiling again
        (TIMEOUT, 3.0, False),  # the whole trial's time was up
        (Failure(kind="crash", message="gone"), 9.9, False),
        (measured(1.0), 9.9, False),
    ],
)
def test_only_a_step_after_the_first_that_went_past_its_deadline(
    outcome: Outcome, waited_seconds: float | None, expected: bool
) -> None:
    assert outcome_is_overdue(outcome, TRIAL, waited_seconds) is expected


def test_fp32_has_no_deadline_to_go_past() -> None:
    free = msgspec.structs.replace(TRIAL, step_deadline_seconds=None, first_step_deadline_seconds=None)
    assert not outcome_is_overdue(TIMEOUT, free, 9.9)

"""What is said of a promise that a framework's own Trainer was to be measured for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import described
from scripted_backend import measurement as measured
from test_decide import BF16, FP32, HEAP, Log, decided

from autotune_amp.core.recommendation import Decision

TRAINER = "Seq2SeqTrainer"


def confirmed(**fields: Any) -> Decision:
    """Twice as slow in the confirmation as in the search's trials."""

    def at(speed: float) -> Any:
        return replace(measured(speed), **fields)

    log = Log().add(FP32, 200.0).add(BF16, measured(400.0, raw_step_seconds=(0.25,) * 8))
    log.confirm(BF16, at(201.0), at(200.0), at(199.0), environment=HEAP)
    log.confirm(FP32, at(101.0), at(100.0), at(99.0))
    return decided(log, environment=HEAP, description=described(trainer=TRAINER))


def test_a_trainer_that_is_slower_than_trials_is_no_sign_of_another_machine() -> None:
    own, others = confirmed(is_own_loop=True).evidence, confirmed().evidence
    assert others.search_samples_per_second == 400.0
    assert own.search_samples_per_second is None
    assert own.samples_per_second_interval[1] < 400.0 <= others.samples_per_second_interval[1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"is_own_loop": True}, None),
        ({}, "--budget"),
        ({"why_not_own_loop": "KeyError: 'no such callback'"}, "no such callback"),
    ],
)
def test_a_promise_of_trials_alone_says_so(fields: dict[str, Any], said: str | None) -> None:
    notes = [note for note in confirmed(**fields).notes if TRAINER in note]
    assert len(notes) == (0 if said is None else 1)
    assert all(said in note for note in notes if said is not None)

"""Rounds of processes, what is asked of which, that the intervals cover what is true; requests and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
from profile_samples import measured

from autotune_amp import profile_amp
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure, FailureKind, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.profile_amp import excluded_reasons, time_in_turns
from autotune_amp.search.progress import Progress
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Trial


def failure(kind: FailureKind = "oom") -> Failure:
    return Failure(kind=kind, message="too much")


class Children:
    """A backend that plays outcomes back, by precision and round; 1 s a step where nothing else is said."""

    def __init__(self, num_batches: int = 10, **outcomes: Sequence[Outcome]) -> None:
        self.left = {name: list(of_one) for name, of_one in outcomes.items()}
        self.trials: list[Trial] = []
        precisions: list[Precision] = ["fp32", "bf16"]
        trials = {p: Trial(candidate=Setting(precision=p, batch_size=8), device="cpu") for p in precisions}
        self.outcomes = time_in_turns(self.submit, trials, num_batches, Progress())

    def submit(self, job: Trial) -> Any:
        self.trials.append(job)
        left = self.left.get(job.candidate.precision)
        return Mock(result=Mock(return_value=left.pop(0) if left else measured(1.0)))

    @property
    def asked(self) -> list[tuple[str, int, int]]:
        """Precision, seed and steps of each process."""
        return [(t.candidate.precision, t.seed, t.num_steps[0]) for t in self.trials]


def test_the_batches_are_divided_among_three_rounds_and_another_one_is_first_in_each() -> None:
    children = Children()
    assert children.asked == [
        ("fp32", 0, 4),
        ("bf16", 0, 4),
        ("bf16", 1, 3),
        ("fp32", 1, 3),
        ("fp32", 2, 3),
        ("bf16", 2, 3),
    ]
    assert all(trial.num_steps[0] == trial.num_steps[1] for trial in children.trials)
    assert [steps for _, _, steps in Children(2).asked] == [1] * 4


def test_fp32_says_how_long_the_steps_of_the_others_may_take() -> None:
    for step_seconds, limits in ((4.0, (20.0, 40.0, 64.0)), (0.02, (1.0, 5.0, 30.0))):
        fp32, bf16 = Children(fp32=[measured(step_seconds)]).trials[:2]
        assert (fp32.cut_step_seconds, fp32.step_deadline_seconds, fp32.first_step_deadline_seconds) == (None,) * 3
        assert (bf16.cut_step_seconds, bf16.step_deadline_seconds, bf16.first_step_deadline_seconds) == limits


@pytest.mark.parametrize("last", [failure(), measured(0.9, was_cut=True), measured(5.1)])
def test_what_failed_or_is_hopelessly_slow_is_in_no_later_round(last: Outcome) -> None:
    children = Children(bf16=[measured(1.0), last])
    assert [name for name, _, _ in children.asked] == ["fp32", "bf16", "bf16", "fp32", "fp32"]
    assert children.outcomes["bf16"][-1] is last


def test_a_workload_that_does_not_run_in_fp32_either_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="too much"):
        Children(fp32=[failure("workload_error")])
    assert len(Children(bf16=[failure("workload_error")]).outcomes["fp32"]) == 3


def test_a_dataset_too_small_for_larger_batches_is_profiled_at_its_own() -> None:
    excluded: list[tuple[Precision, int | None]] = [("fp16", None), ("fp32", 128), ("bf16", 32)]
    space = Space(
        candidates=(Setting(precision="fp32", batch_size=32),),
        baseline=Setting(precision="fp32", batch_size=32),
        excluded=tuple(Exclusion(precision=p, batch_size=size, reason="too small") for p, size in excluded),
    )
    assert excluded_reasons(space).keys() == {"fp16", "bf16"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_batches": 0}, "num_batches is 0"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"precision": "half"}, "'half'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"trace": "no/such/folder/trace.json"}, "trace is 'no/such/folder/trace.json'"),
        ({"trace": "trace.json.gz"}, "uncompressed"),
        ({"trace": __file__}, "is not overwritten"),
        ({"workload": "nothing"}, "'nothing'"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        profile_amp(**arguments)

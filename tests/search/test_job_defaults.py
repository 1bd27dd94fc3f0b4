"""What is said of the batch that memory was measured on, and of a machine that is busy before the first trial."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from scripted_backend import candidate, described, hardware, ledger_of

from autotune_amp import recommend_config
from autotune_amp.core.outcome import Record, SampleSizes
from autotune_amp.core.recommendation import SearchInterruptedError
from autotune_amp.hardware import machine_load
from autotune_amp.processes.local import LocalBackend
from autotune_amp.search.answer.decide import memory_evidence
from autotune_amp.search.answer.explain import memory_warnings
from autotune_amp.search.planner import JobDefaults
from autotune_amp.search.progress import Progress
from autotune_amp.search.ranking import SettingRuns
from autotune_amp.search.space import Space

pytestmark = pytest.mark.usefixtures("forked_processes")

LARGEST = tuple(range(512))
SIZES = SampleSizes(
    num_seen=3120, num_samples=10_000, smallest_size=4, median_size=120, largest_size=512, largest=LARGEST
)
ALL_SEEN = SampleSizes(
    num_seen=10_000, num_samples=10_000, smallest_size=4, median_size=120, largest_size=512, largest=(7,)
)
ALL = "the 1 largest of 10,000 samples examined, of 10,000: 4 to 512 numbers each, median 120"


@pytest.mark.parametrize(
    ("fields", "worst_case", "doubt"),
    [
        ({}, None, None),
        (
            {"sample_sizes": SIZES},
            "the 64 largest of 3,120 samples examined, of 10,000: 4 to 512 numbers each, median 120",
            "the largest of only 3,120 of 10,000 samples",
        ),
        ({"sample_sizes": ALL_SEEN}, ALL, None),
        ({"batch_sizes_seen": (1024, 8192)}, None, "1,024 to 8,192 numbers"),
    ],
)
def test_the_worst_case_is_told(fields: dict[str, Any], worst_case: str | None, doubt: str | None) -> None:
    description = described(**fields)
    assert memory_evidence(SettingRuns(candidate=candidate("bf16", 64)), description).worst_case == worst_case
    said = memory_warnings(description)
    assert len(said) == (doubt is not None)
    assert all((doubt or "") in sentence and "worst_batch" in sentence for sentence in said)


def test_trials_are_given_as_many_of_the_largest_samples_as_their_batch_holds() -> None:
    ledger = ledger_of([], Space(candidates=(), baseline=candidate("fp32", 8)))
    ours = JobDefaults(
        hardware=hardware({"fp32": 1.0}), memory_limit_bytes=1, description=described(sample_sizes=SIZES)
    )
    assert ours.trial(ledger, candidate("fp32", 8)).worst_samples == LARGEST[:8]
    assert ours.trial(ledger, candidate("fp32", 64, 2), purpose="confirm").worst_samples == LARGEST[:64]


def test_where_others_processes_are_hidden_the_load_average_is_said_before_the_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Listening(Progress):
        def note(self, text: str) -> None:
            if "load average 1000.0" in text:
                raise KeyboardInterrupt  # it was said, and no trial is needed

    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(machine_load, "_processes", lambda _: None)  # as on macOS
    with pytest.raises(SearchInterruptedError, match=r"before the first trial\.\n"):
        recommend_config(device="cpu", budget=60.0, out=str(tmp_path), progress=Listening())


@pytest.mark.slow
def test_ctrl_c_once_more_while_processes_end_still_gives_the_best_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Progress):
        is_pressed = False

        def trial_ended(self, record: Record, best: Record | None) -> None:
            Impatient.is_pressed = True
            raise KeyboardInterrupt

    def close(backend: LocalBackend) -> None:
        end(backend)
        if Impatient.is_pressed:
            Impatient.is_pressed = False
            raise KeyboardInterrupt

    end = LocalBackend.close
    monkeypatch.setattr(LocalBackend, "close", close)
    with pytest.raises(SearchInterruptedError, match="after 1 trial; the best so far is in") as caught:
        recommend_config(device="cpu", budget=100.0, out=str(tmp_path), progress=Impatient())
    assert caught.value.best is not None

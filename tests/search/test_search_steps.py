"""A search from the opened workload to its recommendation, its stages apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from scripted_backend import ScriptedBackend, described, hardware, measurement
from test_load_warnings import load

from autotune_amp.core.outcome import Record
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchInterruptedError
from autotune_amp.fingerprint import file_digest
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.planner import Planner
from autotune_amp.search.progress import Progress
from autotune_amp.search.search import _Search, device_of_caller
from autotune_amp.search.source import OpenedWorkload, Source
from autotune_amp.search.storage import shared
from autotune_amp.search.storage.folder import StudyFolder


@pytest.mark.parametrize("is_first", [True, False])
def test_ctrl_c_saves_the_best_so_far_but_over_no_finished_recommendation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    def run_stages(_: Any, ledger: Ledger, planner: Planner) -> str:
        baseline = ledger.space.baseline
        ledger.append(
            Record(
                search_id="s-1", number=1, candidate=baseline, purpose="search", outcome=measurement(9.0), seconds=1.0
            )
        )
        return "Interrupted"

    opened = OpenedWorkload(hardware({"fp32": 1.0}), described(), {}, 0.0, None)
    with StudyFolder(str(tmp_path), "s") as folder:
        search = _Search(Source("t.py:workload"), SearchOptions(device="cpu"), Progress(), folder)
        monkeypatch.setattr(search, "_open", lambda _: (opened, load()))
        monkeypatch.setattr(search, "_run_stages", run_stages)
        backend: Any = ScriptedBackend(lambda _: measurement(9.0), search.budget)  # type: ignore[arg-type]
        with pytest.raises(SearchInterruptedError, match="so far" if is_first else "an earlier search") as caught:
            search.run(
                backend,
                Fingerprint(digest="d", parts={}),
                "s-1",
                uses_shared_setting=False,
                is_saved_if_interrupted=is_first,
            )
    assert isinstance(caught.value.best, Recommendation) is is_first
    assert folder.recommendation_path.exists() == is_first
    assert len(folder.records("s-1")) == 1


def test_a_program_that_was_edited_meanwhile_is_told_and_its_answer_is_for_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, stored, warnings = tmp_path / "t.py", Mock(), []
    monkeypatch.setattr(shared, "store_recommendation", stored)
    opened = OpenedWorkload(hardware({"fp32": 1.0}), described(), {}, 0.0, None)
    for edited in ("x = 1", "x = 2"):
        program.write_text("x = 1")
        fingerprint = Fingerprint(digest="d", parts={}, files={str(program): file_digest(program)})

        def run_stages(_: Any, ledger: Ledger, __: Planner, text: str = edited) -> None:
            ledger.append(
                Record(
                    search_id="s-1",
                    number=1,
                    candidate=ledger.space.baseline,
                    purpose="search",
                    outcome=measurement(9.0),
                    seconds=1.0,
                )
            )
            program.write_text(text)

        with StudyFolder(str(tmp_path), edited) as folder:
            options = SearchOptions(device="cpu", storage="sqlite://")
            search = _Search(Source("t.py:workload"), options, Progress(), folder)
            monkeypatch.setattr(search, "_open", lambda _: (opened, load()))
            monkeypatch.setattr(search, "_run_stages", run_stages)
            backend: Any = ScriptedBackend(lambda _: measurement(9.0), search.budget)  # type: ignore[arg-type]
            found = search.run(backend, fingerprint, "s-1", uses_shared_setting=False, is_saved_if_interrupted=True)
        warnings.append(found.search.warnings)
    assert stored.call_count == 1
    assert warnings[0] == ()
    assert "t.py" in warnings[1][0]
    assert found.fingerprint.files == {}, "no path is saved"


@pytest.mark.parametrize(
    ("devices", "device"), [(None, "cuda:0"), ("all", "cuda:0"), ((1, 2), "cuda:1")], ids=["one", "all", "listed"]
)
def test_memory_that_the_caller_holds_is_read_on_the_gpu_that_it_names(devices: Any, device: str) -> None:
    found = replace(hardware({"fp32": 1.0}), device="cuda:0")  # as each of several GPUs is called by its process
    assert device_of_caller(found, SearchOptions(devices=devices)) == device

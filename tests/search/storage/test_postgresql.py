"""Studies in a real PostgreSQL: what a connection that is cut, a server that restarts and others at work change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import postgresql
import pytest
from optuna.trial import FrozenTrial
from scripted_backend import ScriptedSearch, candidate, measured

from autotune_amp.core.errors import StudyError
from autotune_amp.core.outcome import Measurement
from autotune_amp.search.run import run_stages
from autotune_amp.search.space import Space
from autotune_amp.search.stages.explore import exploration_stages
from autotune_amp.search.storage import study as studies
from autotune_amp.search.storage.database import open_storage
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Trial

SPACE = Space(
    candidates=tuple(candidate(p, b) for p in ("fp32", "bf16") for b in (8, 16, 32, 64)), baseline=candidate("fp32", 32)
)


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    with postgresql.server() as started:
        yield started


@pytest.fixture
def wire(server: postgresql.Server) -> Iterator[postgresql.Wire]:
    wire = postgresql.Wire(server.port)
    yield wire
    wire.cut()


@pytest.fixture(autouse=True)
def _is_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "AWAY_SECONDS", 0.0)


def speed(trial: Trial) -> Measurement:
    setting = trial.candidate
    return measured(trial, (200.0 if setting.precision == "bf16" else 100.0) * setting.batch_size**0.3)


def told(url: str, name: str) -> list[FrozenTrial]:
    """What another reader sees of the trials that were run."""
    with open_storage(url) as storage:
        trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    return [trial for trial in trials if "record" in trial.user_attrs]


class Searching(ScriptedSearch):
    """A search whose study is `name` at `url`; `before` is called before each trial with its number from 0."""

    def __init__(self, url: str, name: str, before: Any = lambda _: None) -> None:
        self.num_run, self.notes = 0, list[str]()

        def answer(trial: Trial) -> Measurement:
            before(self.num_run)
            self.num_run += 1
            return speed(trial)

        super().__init__(SPACE, answer)
        self.url, self.name, self._before = url, name, before

    def search(self, owner: str = "") -> str:
        """Explore; returns the study's name in the storage."""
        with Study.open(self.url, self.name, self.ledger, owner=owner, note=self.notes.append) as study:
            for _ in run_stages(exploration_stages(), self.runner()):
                study.catch_up(self.ledger)
            self._before(-1)
            study.catch_up(self.ledger, is_over=True)
            return study._study.study_name

    def numbers(self) -> list[int]:
        return sorted(r.number for r in self.records if r.purpose == "search")


def test_a_search_is_told_as_in_a_file(server: postgresql.Server, tmp_path: Path) -> None:
    plain, ours = Searching(f"sqlite:///{tmp_path}/study.db", "plain"), Searching(server.url(), "plain")
    plain.search()
    ours.search()
    assert [r.candidate for r in ours.records] == [r.candidate for r in plain.records]
    assert sorted(t.user_attrs["record"] for t in told(server.url(), "plain")) == ours.numbers()
    assert ours.notes == []


@pytest.mark.parametrize("mended_at", [3, -1], ids=["for a trial", "to the end"])
def test_a_connection_that_is_cut_for_a_while_loses_nothing(
    server: postgresql.Server, wire: postgresql.Wire, mended_at: int
) -> None:
    def before(number: int) -> None:
        if number == 2:
            wire.cut()
        if number == mended_at:
            wire.mend()

    name = f"cut-{mended_at}"
    search, whole = Searching(server.url(wire.port), name, before), Searching(server.url(), f"whole{mended_at}")
    search.search()
    whole.search()
    assert [r.candidate for r in search.records] == [r.candidate for r in whole.records]
    found = told(server.url(), name)
    assert sorted(t.user_attrs["record"] for t in found) == search.numbers(), "nothing twice, nothing left out"
    first, last = search.notes
    assert postgresql.PASSWORD not in first
    assert "continues" in first
    assert "reached again" in last


def test_a_connection_that_stays_cut_does_not_end_the_search(server: postgresql.Server, wire: postgresql.Wire) -> None:
    search = Searching(server.url(wire.port), "gone", lambda number: wire.cut() if number == 2 else None)
    search.search()
    assert search.ledger.final_shortlist is not None
    assert len(search.notes) == 1
    wire.mend()
    again = Searching(server.url(wire.port), "gone")
    again.ledger.records = search.ledger.records
    again.search()
    assert sorted(t.user_attrs["record"] for t in told(server.url(), "gone")) == again.numbers()


def test_a_server_that_is_killed_and_started_again_loses_nothing(server: postgresql.Server) -> None:
    def before(number: int) -> None:
        if number == 2:
            server.stop()
            server.start()

    search = Searching(server.url(), "restarted", before)
    search.search()
    assert sorted(t.user_attrs["record"] for t in told(server.url(), "restarted")) == search.numbers()


def test_searches_that_start_together_have_studies_of_their_own(server: postgresql.Server) -> None:
    url = server.make_database("empty")  # whose tables all of them would make

    def searched(owner: str) -> None:
        search = Searching(url, "shared")
        results[owner] = search.search(owner), search.numbers()

    results: dict[str, tuple[str, list[int]]] = {}
    threads = [threading.Thread(target=searched, args=(owner,)) for owner in ("a:/studies", "b:/studies", "c:/studies")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({name for name, _ in results.values()}) == 3
    for name, numbers in results.values():
        assert sorted(t.user_attrs["record"] for t in told(url, name)) == numbers


@pytest.mark.slow
def test_what_is_away_is_tried_again_after_a_while(
    server: postgresql.Server, wire: postgresql.Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(studies, "AWAY_SECONDS", 10.0)
    monkeypatch.setattr(studies, "time", Mock(monotonic=clock))
    search = Searching(server.url(wire.port), "away")
    with Study.open(search.url, "away", search.ledger) as study:
        wire.cut()
        search.measure(SPACE.baseline)
        study.catch_up(search.ledger)
        wire.mend()
        for seconds, is_there in ((5.0, False), (9.9, False), (10.1, True)):
            clock.return_value = seconds
            study.catch_up(search.ledger)
            assert study.is_reachable == is_there
        wire.cut()
        search.measure(SPACE.baseline)
        study.catch_up(search.ledger)
        for seconds in (21.0, 30.0, 70.0):
            clock.return_value = seconds
            study.catch_up(search.ledger)
            assert not study.is_reachable
        wire.mend()
        clock.return_value = 81.0
        study.catch_up(search.ledger)
        assert study.is_reachable


def test_a_wrong_password_is_an_error_that_does_not_show_it(server: postgresql.Server) -> None:
    with pytest.raises(StudyError) as raised:
        Searching(server.url(password="sesame"), "refused").search()
    assert "sesame" not in str(raised.value)
    assert "amp" in raised.value.message
    assert "***" in raised.value.message


def test_without_its_driver_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StudyError) as raised:
        Searching("postgresql://amp@127.0.0.1:1/postgres", "none").search()
    assert "autotune_amp[postgresql]" in raised.value.next_step

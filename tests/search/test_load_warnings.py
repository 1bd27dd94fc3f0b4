"""What is said of a machine that others keep busy, and what it does to the promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import ScriptedSearch, candidate, measured

from autotune_amp.core.hardware import BusyProcess, GpuProcess, MachineLoad
from autotune_amp.core.outcome import Record
from autotune_amp.core.recommendation import Decision
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import machine_load
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.processes.local import CompletedHandle, Slot
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.planner import MIN_ROUNDS
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Trial

TODAY, FASTER = candidate("fp32", 32), candidate("fp32", 64)
SPACE = Space(candidates=(TODAY, FASTER), baseline=TODAY)
HELD = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}
HOG = BusyProcess(pid=4711, name="python3", num_cores=0.98)


def load(others: float | None = 0.0, own: float | None = 1.0, **fields: Any) -> MachineLoad:
    values: dict[str, Any] = {"seconds": 2.0, "num_cpus": 2, "others_num_cores": others, "own_num_cores": own}
    return MachineLoad(**(values | fields))


IDLE, HOGGED = load(0.05, 1.9, stolen_share=0.01), load(1.0, 1.0, busiest=(HOG,))


class ScriptedMeter:
    """Tells the loads of a script, the last of them again and again."""

    def __init__(self, loads: list[MachineLoad]) -> None:
        self._loads = loads

    def start(self) -> None:
        """Nothing to read."""

    def stop(self) -> MachineLoad:
        return self._loads.pop(0) if len(self._loads) > 1 else self._loads[0]


def searched(loads: list[MachineLoad]) -> tuple[Decision, Sequence[Record]]:
    """A search of two settings with its confirmation; these loads, one for each process."""
    speeds: dict[Setting, float] = {TODAY: 100.0, FASTER: 200.0}
    meter = cast("LoadMeter", ScriptedMeter(loads))
    found = ScriptedSearch(SPACE, lambda spec: measured(spec, speeds[spec.candidate]), 1000.0, meter=meter)
    found.explore(max_trials=2)
    found.confirm(Shortlist(FASTER, None, TODAY), HELD)
    return found.decide(HELD), found.records


def about_load(decision: Decision) -> list[str]:
    said = machine_load.load_warnings(decision.evidence.load)
    assert set(said[:1]) <= set(decision.warnings)
    assert set(said[1:]) <= set(decision.notes), "one warning of the machine is enough"
    return said


def test_an_idle_machine_gives_no_word_and_the_same_interval() -> None:
    idle, records = searched([IDLE])
    unread, _ = searched([load(None, None)])
    assert about_load(idle) == about_load(unread) == []
    assert idle.evidence.samples_per_second_interval == unread.evidence.samples_per_second_interval
    assert idle.evidence.load is not None
    assert (idle.evidence.load.others_num_cores, idle.evidence.load.stolen_share) == pytest.approx((0.05, 0.01))
    assert records[0].load == IDLE
    assert msgspec.json.decode(msgspec.json.encode(records[0]), type=Record) == records[0]


@pytest.mark.parametrize(("is_completed", "seconds"), [(True, 5.0), (False, 0.0)])
def test_the_load_of_a_trial_is_that_while_it_runs(
    is_completed: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command's trial has run once it is submitted; before another one the slot's previous process is ended."""
    now = 100.0
    monkeypatch.setattr(machine_load, "read_counters", lambda: machine_load.Reading(now, 2, None, None, None))

    def submit(job: Trial, slot: Slot) -> Any:
        nonlocal now
        now += 5.0
        searching.watcher.ending()
        now += 1.0  # until the processes are gone
        outcome = measured(job, 100.0)
        return CompletedHandle(outcome) if is_completed else Mock(result=lambda: outcome, start_seconds=None)

    searching = ScriptedSearch(SPACE, lambda spec: measured(spec, 100.0), meter=LoadMeter())
    monkeypatch.setattr(searching.backend, "submit", submit)
    monkeypatch.setattr(searching.backend, "wait", lambda handles: handles[0])
    searching.measure(TODAY)
    (record,) = searching.records
    assert record.load is not None
    assert record.load.seconds == seconds


def test_a_machine_busy_throughout_is_named_and_the_promise_reaches_up_to_an_idle_one() -> None:
    low, high = searched([IDLE])[0].evidence.samples_per_second_interval
    found, _ = searched([HOGGED])
    (said,) = about_load(found)
    assert "1.00 of 2 cores (python3, pid 4711: 0.98)" in said
    assert found.evidence.samples_per_second_interval == pytest.approx((low, 2 * high))
    theirs = found.evidence.baseline.samples_per_second_interval
    assert theirs is not None
    assert theirs[1] > 2 * (found.evidence.baseline.samples_per_second or 0.0)
    assert not any("disagree" in said for said in (*found.warnings, *found.notes)), "said once, and rightly"


def test_a_load_that_comes_and_goes_widens_the_lower_end() -> None:
    low, high = searched([IDLE])[0].evidence.samples_per_second_interval
    once = [IDLE, IDLE, HOGGED, IDLE]  # the winner's first process
    found, _ = searched(once)
    assert found.evidence.samples_per_second_interval == pytest.approx((low / 2, high))
    assert len(about_load(found)) == 1
    assert found.evidence.num_processes == MIN_ROUNDS


@pytest.mark.parametrize(
    ("seen", "word"),
    [
        (IDLE, None),
        (load(0.2), None),
        (load(0.7, num_cpus=16), None),
        (HOGGED, "1.00 of 2 cores (python3"),
        (load(1.0, num_cpus=16), "1.00 of 16 cores"),
        (msgspec.structs.replace(HOGGED, busiest=()), "hidden"),
        (load(stolen_share=0.05), "hypervisor gave 5 %"),
        (load(gpu_processes=(GpuProcess(pid=9, name="theirs", memory_bytes=None),)), "theirs, pid 9"),
        (load(gpu_slowdowns=("heat, limited by the card",)), "heat, limited by the card"),
    ],
)
def test_what_is_worth_a_word(seen: MachineLoad, word: str | None) -> None:
    said = machine_load.load_warnings(machine_load.evidence([seen]))
    assert len(said) == (word is not None)
    assert word is None or word in said[0]


@pytest.mark.parametrize(
    ("seen", "slowdown"),
    [
        (load(1.0, 1.0), 2.0),
        (load(0.25, 1.75), 1 / 0.75),
        (load(0.2, 1.8), 1.0),
        (load(5.0, 1.0, num_cpus=16), 1.0),  # cores were left for everybody
        (load(1.0, 31.0, num_cpus=32), 2.0),  # one process beside a thread on each core
        (load(15.0, 1.0, num_cpus=16, gpu_processes=()), 1.0),  # the thread that feeds the card had its core
        (load(15.5, 0.5, num_cpus=16, gpu_processes=()), 2.0),
    ],
)
def test_how_much_others_may_have_slowed_a_step(seen: MachineLoad, slowdown: float) -> None:
    assert machine_load.others_slowdown(seen) == pytest.approx(slowdown)


cores = st.none() | st.floats(0, 2)
loads = st.builds(load, cores, cores, stolen_share=st.none() | st.floats(0, 0.9))


@given(st.lists(loads, max_size=6))
def test_an_interval_is_only_ever_widened(seen: list[MachineLoad]) -> None:
    low, high = machine_load.interval_factors(seen)
    assert 0 < low <= 1 <= high
    if not machine_load.is_busy(seen) and not machine_load.is_stolen(seen):
        assert (low, high) == (1.0, 1.0)
    assert machine_load.interval_factors([load(stolen_share=0.2)]) == pytest.approx((1.0, 1.25))

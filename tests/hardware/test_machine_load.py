"""The reckoning is pure; one real process that is not ours keeps a core busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune_amp.core.hardware import GpuProcess
from autotune_amp.hardware import machine_load, nvml
from autotune_amp.hardware.machine_load import LoadMeter, ProcessTimes, Reading, load_between, read_counters

OURS, SERVER, TRIAL, OTHER = 100, 101, 102, 7


def reading(
    at: float, busy: float, processes: dict[int, ProcessTimes] | None, num_cpus: int = 2, stolen: float | None = 0.0
) -> Reading:
    return Reading(at_seconds=at, num_cpus=num_cpus, busy_seconds=busy, stolen_seconds=stolen, processes=processes)


def process(parent: int, own: float = 0.0, children: float = 0.0, name: str = "p") -> ProcessTimes:
    return ProcessTimes(parent, name, own, children)


def test_what_is_left_of_the_busy_time_is_others() -> None:
    before = {OURS: process(1, 5.0), SERVER: process(OURS, 2.0), TRIAL: process(SERVER, 1.0), OTHER: process(1, 50.0)}
    # The trial took 3 s more, ended, and was waited for by the server; its loader worker's 2 s went the same way.
    after = {
        OURS: process(1, 5.5),
        SERVER: process(OURS, 2.5, children=6.0),
        OTHER: process(1, 53.0, name="hog"),
        8: process(OTHER, 0.5, name="new"),
        9: process(OTHER, 0.01, name="quiet"),
    }
    found = load_between(reading(10.0, 200.0, before), reading(14.0, 209.6, after, stolen=0.4), OURS)
    assert (found.seconds, found.num_cpus) == (4.0, 2)
    assert found.own_num_cores == pytest.approx((0.5 + 0.5 + 6.0 - 1.0) / 4)
    assert found.others_num_cores == pytest.approx(3.6 / 4)
    assert [(p.name, p.pid, p.num_cores) for p in found.busiest] == [("hog", OTHER, 0.75), ("new", 8, 0.125)]
    assert found.stolen_share == pytest.approx(0.04)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what ended children used")
def test_names_with_blanks_and_brackets_are_read(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").touch()
    (tmp_path / "42").mkdir()
    fields = ["R", "7", *["0"] * 9, "300", "100", "20", "30", *["0"] * 25]
    (tmp_path / "42" / "stat").write_text(f"42 (a) b (c) {' '.join(fields)}\n")
    found = read_counters(tmp_path).processes
    assert found is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert found == {42: ProcessTimes(7, "a) b (c", 400 / ticks, 50 / ticks)}


def test_counters_that_are_hidden_or_stand_still_claim_no_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(percpu: bool) -> None:
        raise PermissionError("/proc/stat")

    before, after = {OURS: process(1, 1.0)}, {OURS: process(1, 3.0)}
    for busy, own_num_cores in (
        (0.0, None),
        (0.9, None),
        (1.1, 1.0),
    ):  # under half our own 2 s: not believed
        assert load_between(reading(0.0, 0.0, before), reading(2.0, busy, after), OURS).own_num_cores == own_num_cores
    monkeypatch.setattr(psutil, "cpu_times", hidden)
    found = read_counters()
    assert (found.busy_seconds, found.stolen_seconds) == (None, None)
    assert found.num_cpus >= 1
    assert load_between(found, reading(1e9, 5.0, after), OURS).others_num_cores is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what ended children used")
def test_a_busy_process_is_ours_or_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_NUM_BUSIEST", 100)  # other tests may be busier
    before = read_counters()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        deadline = time.monotonic() + 20
        while psutil.Process(child.pid).cpu_times().user < 0.3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        after = read_counters()
    finally:
        child.kill()
        child.wait()
    ours, anothers = load_between(before, after, os.getpid()), load_between(before, after, 2**22 + 1)
    assert {os.getpid(), child.pid}.isdisjoint(process.pid for process in ours.busiest)
    assert child.pid in [process.pid for process in anothers.busiest]
    assert (ours.own_num_cores or 0.0) > (anothers.own_num_cores or 0.0) == 0.0
    assert (anothers.others_num_cores or 0.0) > 0


# What a meter is told, each the seconds after the one before, and the seconds that count.
WARM_UPS = [
    # The second warm-up comes too soon for another look, the last after the measured steps.
    *((5.0, "warm_up"), (0.1, "warm_up"), (3.0, "step"), (3.0, "step"), (3.0, "warm_up")),
    *((0.0, "hold"), (5.0, "hold"), (5.0, "hold")),  # the first counts: a second process is killed after the first
]
REPEATED_RUN = [(5.0, "step"), (1.0, "hold"), (9.0, "warm_up"), (2.0, "step"), (1.0, "hold")]


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        pytest.param(
            WARM_UPS, 0.1 + 3 * 3.0, id="what comes before the last step to warm up does not, each later does"
        ),
        pytest.param(REPEATED_RUN, 2.0 + 1.0, id="a process that takes steps after the end of another does alone"),
    ],
)
def test_what_counts(monkeypatch: pytest.MonkeyPatch, told: list[tuple[float, str]], seconds: float) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(machine_load, "read_counters", lambda: reading(now, 0.0, {}))
    meter = LoadMeter()
    for seconds_since, what in told:
        now += seconds_since
        getattr(meter, what)()
    assert meter.stop().seconds == pytest.approx(seconds)


def test_on_the_card_others_are_those_seen_that_neither_descend_from_us_nor_wait_for_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, caller = 2**22 + 1, os.getppid()  # the first is a number of another namespace
    listed = ((hidden, 2**30), (os.getpid(), 1), (caller, 5), (OTHER, None))
    parents = {os.getpid(): process(caller), caller: process(1), OTHER: process(1, name="theirs")}
    names = ("heat, limited by the card",)
    monkeypatch.setattr(nvml, "processes", lambda uuid: listed)
    monkeypatch.setattr(nvml, "slowdown_names", lambda uuid: names)
    monkeypatch.setattr(machine_load, "_processes", lambda root: parents)
    meter = LoadMeter("GPU-a")
    assert meter.stop().gpu_slowdowns is None, "no measured step, no look"
    meter.step()
    found = meter.stop()
    assert found.gpu_slowdowns == names
    assert found.gpu_processes == (GpuProcess(pid=OTHER, name="theirs", memory_bytes=None),)

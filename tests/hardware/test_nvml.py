"""NVML is replaced by a made one: no card is needed."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest

from autotune_amp.hardware import nvml
from autotune_amp.hardware.device import identify

UUIDS = ("GPU-aaaa-1", "GPU-aabb-2", "GPU-cccc-3")
MIG = "MIG-dddd-4"  # an instance of the second card
OTHER_PID = 2**22 + 1  # above the kernel's largest


class NVMLError(Exception):
    """Stands for pynvml's."""


class MadeNvml:
    """The part of pynvml that is used, over two cards and a MIG instance; handles are UUIDs."""

    NVMLError = NVMLError
    names: ClassVar = {UUIDS[0]: "NVIDIA A", UUIDS[1]: "NVIDIA B"}

    def __init__(self) -> None:
        self.processes: list[tuple[int, int | None]] = []
        self.reasons = 0

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"pynvml has {name}, the made one does not")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return list(self.names)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in (*self.names, MIG):
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:  # noqa: N802
        if handle != MIG:
            raise NVMLError("invalid argument")
        return UUIDS[1]

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:  # noqa: N802
        assert sensor == 0
        return {UUIDS[0]: 61, UUIDS[1]: 88}[handle]

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:  # noqa: N802
        assert clock == 1
        return {UUIDS[0]: 1410, UUIDS[1]: 990}[handle]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        if handle != UUIDS[0]:
            raise NVMLError("not supported")
        return 251_500

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        return self.names[handle]

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        if handle == UUIDS[1]:
            raise NVMLError("not supported: the card shares the machine's memory")
        return SimpleNamespace(total=24 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        assert handle in self.names
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:  # noqa: N802
        assert handle in self.names
        return self.reasons


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> MadeNvml:
    library = MadeNvml()
    monkeypatch.setattr(nvml, "_library", lambda: library)
    monkeypatch.setattr("autotune_amp.hardware.device._torch_is_built_for", lambda toolkit: toolkit == "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return library


@pytest.mark.parametrize(
    ("visible", "cards"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("2,0", (2, 0)),
        ("0,7,1", (0,)),
        ("1,1", ()),
        ("+1,2a,x,1", (1, 2)),  # as torch reads them
        ("GPU-cc", (2,)),
        ("GPU-aa", ()),  # fits two cards
        ("GPU-cccc-3,GPU-dddd,GPU-aaaa-1", (2,)),
    ],
)
def test_cuda_visible_devices(visible: str | None, cards: tuple[int, ...]) -> None:
    assert nvml.select_visible(UUIDS, visible) == tuple(UUIDS[card] for card in cards)


def test_without_nvml_there_are_no_cards_and_nothing_to_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.visible_uuids() == ()
    assert nvml.identity(0, UUIDS[0]) is None
    assert nvml.process_notes(UUIDS[0]) == ()
    assert nvml.processes(UUIDS[0]) is None
    assert nvml.held_by_caller(UUIDS[0]) == 0
    assert nvml.slowdown_names(UUIDS[0]) is None
    assert nvml.read_sensors(UUIDS[0]) == nvml.GpuSensors(None, None, None, None)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(("card", "name", "memory"), [(0, "NVIDIA A", 24 * 2**30), (1, "NVIDIA B", 0)])
def test_a_card_is_found_by_the_uuid_that_torch_prints(card: int, name: str, memory: int) -> None:
    found = nvml.identity(card, UUIDS[card].removeprefix("GPU-"))
    assert found == identify(f"cuda:{card}")
    assert (found.name, found.driver, found.total_memory_bytes) == (name, "580.1", memory)
    assert (identify("cuda:7").name, identify("cuda:7").index, identify("cuda:7").uuid) == ("unknown", 7, None)


def test_others_on_the_card_are_noted_and_neither_this_process_nor_those_that_wait_for_it(
    made: MadeNvml,
) -> None:
    caller, launcher = os.getppid(), psutil.Process().parents()[-1].pid
    made.processes = [(os.getpid(), 2**30), (caller, 5), (launcher, None), (OTHER_PID, 3 * 2**29)]
    (note,) = nvml.process_notes(UUIDS[0])
    assert f"Process {OTHER_PID} holds 1.5 GiB" in note
    assert nvml.held_by_caller(UUIDS[0]) == 5


def test_clock_event_reasons_that_slow_a_card(made: MadeNvml) -> None:
    for made.reasons, num_names in ((0, 0), (0x1 | 0x4 | 0x100, 0), (0x20, 1), (0x40, 1), (0x88, 2)):
        assert len(nvml.slowdown_names(UUIDS[0]) or ()) == num_names


def test_the_sensors_of_a_card_and_of_the_card_that_a_mig_instance_is_on(made: MadeNvml) -> None:
    assert nvml.read_sensors(UUIDS[0].removeprefix("GPU-")) == (61, 1410, 251.5, ())
    made.reasons = 0x40
    assert nvml.read_sensors(MIG) == (88, 990, None, ("heat, limited by the GPU",))
    assert nvml.slowdown_names(MIG) == ("heat, limited by the GPU",)
    assert nvml.read_sensors("GPU-eeee") == nvml.GpuSensors()


@pytest.mark.usefixtures("made")
def test_auto_identifies_the_first_visible_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identify("auto").name == "NVIDIA A"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    first = identify("auto")
    assert (first.type, first.name, first.index, first.uuid, first.driver) == ("cuda", "NVIDIA B", 0, UUIDS[1], "580.1")
    assert identify("cuda") == identify("cuda:0") == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert identify("auto").type != "cuda"

"""Devices of this host that a search runs on: which there are, and which processes its jobs are given."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import nvml
from autotune_amp.processes import devices
from autotune_amp.processes.devices import Devices, GpuSlots, cpu_slots, find_gpus, rank_slots
from autotune_amp.processes.local import Slot
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.slots import WorkloadSlots
from autotune_amp.trial.jobs import Trial

CARDS = {"GPU-a": "NVIDIA A", "GPU-b": "NVIDIA A", "GPU-c": "NVIDIA B", "GPU-d": "NVIDIA A"}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Four cards, one of them of another model; what is said of other processes on each."""
    notes: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(nvml, "host_uuids", lambda: tuple(CARDS))
    monkeypatch.setattr(nvml, "process_notes", lambda uuid: notes.get(uuid, ()))
    monkeypatch.setattr(
        nvml,
        "identity",
        lambda index, uuid: DeviceIdentity(
            type="cuda", name=CARDS[uuid], num_cpus=8, total_memory_bytes=2 if CARDS[uuid] == "NVIDIA B" else 1
        ),
    )
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return notes


def test_unlike_cards_whose_numbers_in_cuda_are_unknown_are_not_chosen_by_number(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA counts the fastest first, NVML by the bus: the card for the screen is no card to search on."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    with pytest.raises(InvalidRequestError) as refused:
        find_gpus((0, 1))
    assert "by UUID" in refused.value.next_step
    assert [slot.uuid for slot in find_gpus("all").slots] == ["GPU-c"], "the one with the most memory"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert len(find_gpus((0, 1)).slots) == 2


@pytest.mark.parametrize("wanted", [(0,), "all"])
def test_a_card_that_cuda_is_told_by_number_may_be_another_one_of_the_host(
    wanted: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [slot.uuid for slot in find_gpus(wanted).slots] == ["GPU-a"]
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    with pytest.raises(InvalidRequestError, match="several models"):
        find_gpus(wanted)


def test_all_cards_are_those_like_the_first_that_nobody_uses(host: dict[str, tuple[str, ...]]) -> None:
    host["GPU-d"] = ("Process 7 holds 3.0 GiB on this card: its work slows what is measured.",)
    found = find_gpus("all")
    assert [(slot.name, slot.uuid) for slot in found.slots] == [("cuda:0", "GPU-a"), ("cuda:1", "GPU-b")]
    assert [note.partition(" ")[0] for note in found.notes] == ["cuda:2", "cuda:3"]
    assert "NVIDIA B" in found.notes[0]
    assert "Process 7" in found.notes[1]


def test_the_first_card_is_searched_on_though_a_desktop_computes_there(host: dict[str, tuple[str, ...]]) -> None:
    host["GPU-a"] = host["GPU-b"] = ("Process 7 computes.",)
    found = find_gpus("all")
    assert [slot.name for slot in found.slots] == ["cuda:0", "cuda:3"]
    assert found.notes[0] == "cuda:0: Process 7 computes."


def test_cards_by_number_are_taken_as_they_are(host: dict[str, tuple[str, ...]]) -> None:
    host["GPU-d"] = ("Process 7 computes.",)
    found = find_gpus((3, 1))
    assert [(slot.name, slot.environment) for slot in found.slots] == [
        ("cuda:3", {"CUDA_VISIBLE_DEVICES": "GPU-d"}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
    ]


@pytest.mark.parametrize(("devices", "said"), [((0, 2), "NVIDIA B"), ((0, 4), "GPU 4"), ((9,), "GPU 9")])
def test_a_card_that_cannot_be_compared_or_is_not_there_is_refused(
    host: Any, devices: tuple[int, ...], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        find_gpus(devices)


def test_more_ranks_than_cards_are_refused_with_the_number_of_cards(host: Any) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        rank_slots(5, "cuda")
    assert "--ranks 4" in refused.value.next_step


def test_ranks_name_cards_by_cudas_own_numbers_which_need_not_be_known(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two by the bus are of one model, and the first three are not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert [slot.device for slot in rank_slots(2, "cuda")] == ["cuda:0", "cuda:1"]
    with pytest.raises(InvalidRequestError, match="NVIDIA B"):
        rank_slots(3, "cuda")
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    assert [slot.device for slot in rank_slots(2, "cuda")] == ["cuda:0", "cuda:1"]


def test_without_cards_the_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "visible_uuids", tuple)
    with pytest.raises(InvalidRequestError, match="NVML"):
        find_gpus("all")
    with pytest.raises(InvalidRequestError, match="NVML"):
        rank_slots(2, "cuda")


@given(cpus=st.sets(st.integers(0, 200), min_size=1, max_size=64), num_slots=st.integers(1, 64))
def test_shares_of_the_cpu_are_equal_and_have_no_cpu_in_common(cpus: set[int], num_slots: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: cpus, raising=False)
        if num_slots > len(cpus):
            with pytest.raises(InvalidRequestError):
                cpu_slots(num_slots)
            return
        slots = cpu_slots(num_slots)
    taken = [cpu for slot in slots for cpu in slot.cpus]
    assert len(slots) == len({slot.name for slot in slots}) == num_slots
    assert len(taken) == len(set(taken)) == num_slots * (len(cpus) // num_slots)
    assert set(taken) <= cpus


# -- their processes ---------------------------------------------------------------------------------------------------

GPUS = tuple(Slot("cuda:0", f"cuda:{number}", uuid=f"GPU-{number}") for number in range(3))


def identified(monkeypatch: pytest.MonkeyPatch, device_type: Any) -> None:
    identity = DeviceIdentity(type=device_type, name="scripted", num_cpus=2, total_memory_bytes=2**30)
    monkeypatch.setattr(devices, "identify", lambda _: identity)


@pytest.mark.parametrize(("device_type", "isolation"), [("cpu", None), ("cuda", "kept"), ("mps", "kept")])
def test_a_card_has_one_process_that_is_kept_and_a_cpu_what_can_be_forked(
    device_type: Any, isolation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    identified(monkeypatch, device_type)
    start = Mock()
    with closing(Devices("auto", start, lambda _: Watcher())) as here:
        here.backend()
    (call,) = start.call_args_list
    assert call.args[1] == isolation


def test_trials_run_on_every_card_and_the_confirmation_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    identified(monkeypatch, "cuda")
    start = Mock()
    with closing(Devices("cuda:0", start, lambda _: Watcher(), GpuSlots(GPUS))) as here, here.backend() as backend:
        assert isinstance(backend, WorkloadSlots)
        assert (backend.slots, here.num_slots) == (GPUS, 3)
        start.reset_mock()
        confirming = here.confirmation_backend("cuda:0", shares_processes=True, num_rounds=3)
        assert confirming.slots == GPUS[:1]
        confirming.submit(Trial(candidate=Setting(precision="fp32", batch_size=8), device="cuda:0"), GPUS[0])
    (call,) = start.call_args_list
    assert call.args[3] == GPUS[0]


def test_a_single_card_is_searched_on_as_without_the_option_but_sees_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    identified(monkeypatch, "cuda")
    start = Mock()
    with closing(Devices("cuda:2", start, lambda _: Watcher(), GpuSlots(GPUS[2:]))) as here:
        here.backend()
        assert here.confirmation_backend("cuda:0", shares_processes=True, num_rounds=3).slots == (Slot("cuda:0"),)
    (call,) = start.call_args_list
    assert call.args[3] == GPUS[2]
    assert call.args[4] is not None, "a process may stand by"


def test_ranks_are_measured_on_the_kind_of_device_that_their_slots_are_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its own runtime sees an AMD GPU, so that the slots are of the CPU and the probe would find the GPU."""
    on_cpu = DeviceIdentity(type="cpu", name="made", num_cpus=8, total_memory_bytes=1)
    monkeypatch.setattr(devices, "identify", lambda _: on_cpu)
    found = Devices("auto", Mock(), Mock(), num_ranks=2)
    assert {slot.device for slot in found._ranks} == {found.device} == {"cpu"}
    assert Devices("auto", Mock(), Mock()).device == "auto"

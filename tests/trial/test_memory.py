"""What counts as a trial's memory: on scripted processes, and in a step."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial import memory
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.memory import BuildMemory, PeakMemory, build_with_memory
from autotune_amp.trial.training import make_training

CPU = torch.device("cpu")


class System:
    """What the kernel says of this process, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident = self.peak = self.anonymous = 1000
        self.files = 100
        self.resets_peak = True
        self.limits: list[int] = []
        monkeypatch.setattr(memory, "_trim_heap", lambda: None)
        monkeypatch.setattr(memory, "_reset_peak", self.reset)
        monkeypatch.setattr(memory, "_limit_data_segment", self.limits.append)
        monkeypatch.setattr(memory, "_peak_resident_bytes", lambda: self.peak)
        monkeypatch.setattr(memory, "_own_resident_bytes", lambda: self.anonymous)
        monkeypatch.setattr(memory, "file_bytes", lambda: self.files)
        info = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=self.resident))
        monkeypatch.setattr(psutil, "Process", lambda: info)

    def reset(self) -> bool:
        self.peak = self.resident if self.resets_peak else self.peak
        return self.resets_peak

    def take(self, num_bytes: int, *, freed: int = 0) -> None:
        self.peak = max(self.peak, self.resident + num_bytes)
        self.resident += num_bytes - freed
        self.anonymous += num_bytes - freed


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


def test_a_trial_is_charged_what_it_takes_beyond_what_its_process_held(system: System) -> None:
    system.take(5000, freed=5000)  # an earlier trial of a kept worker
    watched = PeakMemory(CPU, 600)
    system.take(500, freed=400)
    assert watched.peak_bytes() == (1500, 500)
    system.take(501)
    assert watched.peak_bytes() == (1601, 601)
    assert system.limits == [600]


def test_where_the_peak_cannot_be_reset_an_earlier_trial_is_not_charged_to_a_smaller_one(system: System) -> None:
    system.resets_peak = False
    system.take(5000, freed=5000)  # an earlier trial of a kept worker
    watched = PeakMemory(CPU, None)
    system.take(500, freed=100)
    watched.poll()
    system.take(0, freed=300)
    watched.poll()
    assert watched.peak_bytes() == (1400, 400)
    system.take(6000, freed=6000)
    assert watched.peak_bytes() == (7100, 6100), "the peak of the process's life is this trial's own"


def test_memory_is_measured_where_the_kernel_tells_little_of_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmRSS:\t    1000 kB\nThreads:\t3\n")  # as of gVisor
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(memory, "_CLEAR_REFS", tmp_path / "none/clear_refs")
    built, taken = build_with_memory(lambda: torch.ones(1 << 22))
    assert len(built) == 1 << 22
    assert taken.peak_bytes >= taken.resident_bytes >= 0
    watched = PeakMemory(CPU, 1 << 40)
    watched.poll()
    peak_bytes, taken_bytes = watched.peak_bytes()
    assert peak_bytes - taken_bytes > 0
    assert taken_bytes >= 0
    assert memory.file_bytes() == 0


def test_a_model_that_was_built_before_counts_as_the_trials_own(system: System) -> None:
    built, taken = build_with_memory(lambda: system.take(300, freed=100))
    assert built is None
    assert taken == BuildMemory(resident_bytes=200, peak_bytes=300)
    watched = PeakMemory(CPU, 600, taken)
    assert watched.peak_bytes() == (1000 + 300, 300), "building took more for a moment than the model is"
    system.take(250)
    assert watched.peak_bytes() == (1000 + 450, 450)
    assert system.limits == [400]


def test_a_fork_reports_the_mapped_files_that_a_process_of_its_own_would_have(system: System) -> None:
    watched = PeakMemory(CPU, 600, template_file_bytes=700)
    system.take(500)
    assert watched.peak_bytes() == (1500 + 600, 500), "which the limit is not for"
    system.files = 800
    assert watched.peak_bytes() == (1500, 500)


def test_a_step_leaves_its_batch_and_its_graph_to_the_next_as_a_loop_does() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        alive.append([there() is not None for there in made])
        result: torch.Tensor = model(batch).square().mean()
        made[:] = [weakref.ref(result)]
        return result

    model = nn.Linear(4, 1)
    spec = Trial(candidate=Setting(precision="fp32", batch_size=256), device="cpu", torch_state=torch_state.capture())
    training = make_training(Workload(model, loss, lambda n: torch.ones(n, 4)), model, spec)
    training.start_loading()
    for _ in range(2):
        training.forward_backward(training.next_batch())
        training.update()
    last = weakref.ref(training.next_batch())
    assert last() is not None
    training.next_batch()
    assert last() is None
    assert alive == [[], [True]]


@pytest.mark.parametrize(("settings", "is_limited"), [("", True), ("garbage_collection_threshold:0.6", False)])
def test_no_limit_makes_the_allocator_collect_garbage_as_no_training_does(
    monkeypatch: pytest.MonkeyPatch, settings: str, *, is_limited: bool
) -> None:
    """Of CUDA's allocator, which uses the threshold only where a process has a limit."""
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    memory.set_memory_share(torch.device("cuda"), 0.5)
    assert shares == ([0.5] if is_limited else [])

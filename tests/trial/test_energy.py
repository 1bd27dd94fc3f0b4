from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import nvml
from autotune_amp.precision import torch_state
from autotune_amp.trial import energy, worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.energy import EnergyMeter, find_counter, require_counter
from autotune_amp.trial.jobs import Trial

UUID = "GPU-aaaa-1"


def zone(folder: Path, zone_name: str, name: str, microjoules: int, maximum: int = 1_000_000) -> Path:
    made = folder / zone_name
    made.mkdir()
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    (made / "max_energy_range_uj").write_text(f"{maximum}\n")
    return made / "energy_uj"


def test_the_packages_of_a_cpu_are_added_up_across_their_turnover(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", "package-0", 900_000), zone(tmp_path, "intel-rapl:1", "package-1", 0)
    for other in ("intel-rapl:0:0", "intel-rapl-mmio:0"):
        zone(tmp_path, other, "package-0", 5)
    board = zone(tmp_path, "intel-rapl:2", "psys", 5)
    counter = find_counter("cpu", None, tmp_path)
    assert counter is not None
    assert counter() == 0.0
    first.write_text("99999")
    second.write_text("300000")
    board.write_text("700000")
    assert counter() == pytest.approx(0.2 + 0.3)
    second.write_text("400000")
    assert counter() == pytest.approx(0.2 + 0.4)


def test_a_device_without_a_counter_says_so(tmp_path: Path) -> None:
    for device_type in ("cpu", "mps"):
        assert find_counter(device_type, None, tmp_path) is None
        with pytest.raises(InvalidRequestError, match="no energy counter"):
            require_counter(device_type, None, tmp_path)
    zone(tmp_path, "intel-rapl:0", "package-0", 1).unlink()  # root reads everything: the file is taken away instead
    with pytest.raises(InvalidRequestError, match="no energy counter") as caught:
        require_counter("cpu", None, tmp_path)
    assert "chmod a+r" in caught.value.next_step


def test_a_card_is_asked_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"nvmlDeviceGetHandleByUUID": UUID, "nvmlDeviceGetTotalEnergyConsumption": 5000}  # millijoules
    monkeypatch.setattr(nvml, "_query", lambda function, *_: answers.get(function))
    counter = find_counter("cuda", UUID)
    assert counter is not None
    assert counter() == 5.0
    require_counter("cuda", UUID)
    del answers["nvmlDeviceGetTotalEnergyConsumption"]
    assert counter() is None
    assert find_counter("cuda", UUID) is None
    with pytest.raises(InvalidRequestError, match="no energy counter"):
        require_counter("cuda", UUID)


def test_only_measured_steps_count_and_none_that_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    joules, moments = 100.0, itertools.count(1.0)
    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    meter = EnergyMeter(lambda: joules)
    steps = [(0, 50, 1), (0, 50, 1), (2, 4, 1), (4, 400, 2), (6, 8, 2), (6, 400, 3), (8, 6, 3)]
    for number, drawn, num_compilations in steps:
        joules += drawn
        meter.step(number, num_compilations)
    assert meter.joules_per_sample(10) == pytest.approx((4 + 8 + 6) / (6 * 10))
    assert EnergyMeter(None).joules_per_sample(1) is None


def test_a_trial_divides_by_the_samples_that_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10_000))
    monkeypatch.setattr(worker, "find_counter", lambda *_: lambda: float(next(ticks)))  # a joule from step to step
    monkeypatch.setattr(energy, "MIN_SECONDS", 0.0)
    workload = Workload(lambda: nn.Linear(2, 1), lambda m, b: m(b).square().mean(), lambda n: torch.randn(n, 2))
    candidate = Setting(precision="fp32", batch_size=4, accumulation_steps=8)
    spec = Trial(candidate=candidate, device="cpu", torch_state=torch_state.capture())
    found = worker.run(Context(workload, is_kept=False), spec, lambda _: None)
    assert isinstance(found, Measurement)
    per_pass, update = found.step_seconds / 8, found.update_seconds or 0.0
    assert found.joules_per_sample == pytest.approx(1 / (4 * 4), rel=update / per_pass)


@pytest.mark.parametrize(("size", "window", "seconds"), [(1, 64, 1.0), (8, 8, 5.0)])
def test_an_update_counts_once_a_window_of_which_a_few_passes_are_timed(size: int, window: int, seconds: float) -> None:
    """A pass draws a joule a second, and so does the update, of two seconds."""
    spec = Trial(
        candidate=Setting(precision="fp32", batch_size=size, accumulation_steps=window), device="cpu", torch_state={}
    )
    timing = Mock(raw_step_seconds=(window * seconds + 2.0,), update_seconds=2.0)
    meter = EnergyMeter(None)
    meter._joules, meter._num_steps = 4 * seconds + 2.0, 1
    assert worker.joules_per_sample(spec, timing, meter) == pytest.approx((window * seconds + 2.0) / (window * size))

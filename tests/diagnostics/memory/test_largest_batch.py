"""Which batch fits, on memory that follows a curve: what is measured for it, what is said, and with which error."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import MIB, breakdown

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.memory.profile_memory import (
    MAX_MEASURED,
    MemoryResult,
    SettingMemory,
    largest_batch,
    largest_fitting_size,
    measure_setting,
    next_batch_size,
)
from autotune_amp.diagnostics.memory.results import LargestBatch

Curve = Callable[[int], int]


def line(fixed_mib: float = 100, per_sample_mib: float = 2, plateau_mib: float = 0) -> Curve:
    return lambda size: int(MIB * max(plateau_mib, fixed_mib + per_sample_mib * size))


class Measured:
    """What is measured of a training on a device of `device_mib`, to fit into `limit_mib`."""

    def __init__(
        self,
        curve: Curve,
        limit_mib: int = 1000,
        first: int = 32,
        device_mib: int = 10**5,
        num_samples: int | None = None,
    ) -> None:
        self.sizes: list[int] = []
        self.files: list[Path | None] = []
        self._curve, self._device_mib = curve, device_mib
        self.runs: SettingMemory = measure_setting(
            Setting(precision="fp32", batch_size=first),
            self._measure,
            limit_mib * MIB,
            available_bytes=device_mib * MIB,
            num_samples=num_samples,
            snapshot_file=Path("snapshot"),
        )
        self.largest = largest_batch(self.runs.bytes_by_size, limit_mib * MIB, device_mib * MIB, num_samples)

    def _measure(self, setting: Setting, snapshot_file: Path | None) -> MemoryResult:
        self.sizes.append(setting.batch_size)
        self.files.append(snapshot_file)
        taken = self._curve(setting.batch_size)
        return breakdown(taken) if taken <= self._device_mib * MIB else Failure(kind="oom", message="too much")

    @property
    def found(self) -> LargestBatch:
        assert self.largest is not None
        return self.largest


def test_the_given_size_its_double_and_a_third_to_hold_the_model_against() -> None:
    measured = Measured(line(), 900, device_mib=500)
    assert measured.sizes == [32, 64, 200]
    assert measured.files == [Path("snapshot"), None, None], "the step that was asked for is the one recorded"
    assert measured.found.batch_size == measured.found.cautious_batch_size == 400
    assert measured.found.model_error == pytest.approx(0)
    assert measured.found.checked_batch_size == 200
    assert measured.found.bytes_per_sample == pytest.approx(2 * MIB)


def test_what_is_far_from_the_limit_is_approached_until_a_size_near_it_was_measured() -> None:
    measured = Measured(line(), 10_000)
    assert measured.sizes == [32, 64, 256, 1024, 4096, 4950]
    assert measured.found.batch_size == 4950


def creeping(size: int) -> int:
    """On the optimizer's plateau a few MiB of the process's own decide how steep a line through two sizes is."""
    return int(MIB * max(100 + 0.02 * size, 40 + 0.1 * size))


def bent(size: int) -> int:
    return int(MIB * (100 + 2 * size + size**2 / 2000))


@pytest.mark.parametrize(("curve", "limit", "true"), [(creeping, 256, 2160), (bent, 10_000, 2878)])
def test_a_line_that_does_not_hold_farther_up_is_found_out(curve: Curve, limit: int, true: int) -> None:
    found = Measured(curve, limit, first=64).found
    assert found.batch_size == pytest.approx(true, rel=0.03)
    assert found.batch_size is not None
    assert found.cautious_batch_size is not None
    assert 0.9 * found.batch_size <= found.cautious_batch_size <= found.batch_size


@pytest.mark.parametrize(
    ("measured", "size"),
    [
        ({8: None, 4: 100}, 2),  # what ran out of memory is not measured again
        ({4: 100, 8: 180, 64: 1600}, 40),  # what is over the limit is not near it
        ({4: 100, 8: 180, 44: 950}, None),
    ],
)
def test_what_is_measured_next(measured: dict[int, int | None], size: int | None) -> None:
    assert next_batch_size(measured, 8, 1000, 5000, None) == size


def test_below_the_plateau_of_the_optimizer_nothing_fits() -> None:
    assert Measured(line(plateau_mib=400), 390).found.batch_size == 0


def test_what_runs_out_of_memory_is_halved_until_it_runs() -> None:
    measured = Measured(line(), 150, first=256, device_mib=250)
    assert measured.sizes == [256, 128, 64, 32, 16]
    assert isinstance(measured.runs.first, Failure)
    assert measured.found.batch_size == 25


def test_the_answer_is_below_what_ran_out_of_memory() -> None:
    measured = Measured(lambda size: MIB * (100 + 2 * size + 900 * (size >= 100)), 800, device_mib=1000)
    assert 128 in measured.sizes
    assert measured.found.batch_size == measured.found.cautious_batch_size == 127


def test_a_limit_above_the_device_is_answered_from_what_runs_here() -> None:
    measured = Measured(line(), 10_000, device_mib=400)
    assert max(map(line(), measured.sizes)) <= 400 * MIB
    assert measured.found.batch_size == 4950


def test_the_dataset_may_have_no_more() -> None:
    measured = Measured(line(), 10_000, first=8, num_samples=50)
    assert max(measured.sizes) <= 50
    assert (measured.found.batch_size, measured.found.is_all_data) == (50, True)


def test_what_does_not_grow_has_no_largest() -> None:
    assert Measured(line(per_sample_mib=0), 200).found.batch_size is None


def test_where_one_size_alone_runs_nothing_is_said() -> None:
    assert Measured(line(per_sample_mib=100), first=1, device_mib=210).largest is None
    assert Measured(line(), first=4, device_mib=50).largest is None


def test_only_a_failure_for_want_of_memory_goes_on_and_a_workload_that_does_not_run_in_fp32_is_an_error() -> None:
    setting, runs = Setting(precision="fp16", batch_size=8), []

    def fails(setting: Setting, snapshot_file: Path | None) -> MemoryResult:
        runs.append(setting)
        return Failure(kind="workload_error", message="mine")

    def measured(setting: Setting) -> SettingMemory:
        return measure_setting(setting, fails, MIB, available_bytes=MIB, num_samples=None, snapshot_file=None)

    assert measured(setting).bytes_by_size == {}
    assert len(runs) == 1
    with pytest.raises(WorkloadError, match="mine"):
        measured(Setting(precision="fp32", batch_size=8))
    refused = Setting(precision="fp32", batch_size=8, arguments=(("seq", "banana"),))
    assert isinstance(measured(refused).first, Failure)  # only this value is wrong


@given(
    st.integers(1, 10**4),
    st.integers(1, 200),
    st.integers(0, 4000),
    st.integers(1, 10**5),
    st.integers(1, 512),
    st.one_of(st.none(), st.integers(1, 4096)),
)
def test_on_a_straight_line_the_answer_is_exact(
    fixed: int, per_sample: int, plateau: int, limit: int, first: int, num_samples: int | None
) -> None:
    """Where what was measured lies above the plateau; and nothing is measured twice, without end or beyond the data."""
    curve = line(fixed, per_sample, plateau)
    first = min(first, num_samples or first)
    measured = Measured(curve, limit, first, device_mib=10**6, num_samples=num_samples)
    assert len(set(measured.sizes)) == len(measured.sizes) <= MAX_MEASURED + math.ceil(math.log2(first) + 1)
    assert max(measured.sizes) <= (num_samples or math.inf)
    above = [size for size in measured.sizes if fixed + per_sample * size > plateau]
    if measured.largest is not None and len(above) == len(measured.sizes):
        true = 0 if plateau > limit else min(max(0, (limit - fixed) // per_sample), num_samples or 2**40)
        size = measured.largest.batch_size
        assert size is not None
        assert abs(size - true) <= 1 + 1e-6 * true  # whole bytes


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_the_largest_within_a_limit_is_the_last_that_a_rising_model_puts_there(limit: int, num_samples: int) -> None:
    assert largest_fitting_size(lambda size: 3 * size, limit, num_samples) == min(limit // 3, num_samples)

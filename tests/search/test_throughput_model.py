"""What the model of the curves expects, and what one more trial is worth by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_backend import candidate

from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.planner import MIN_JOB_GAIN
from autotune_amp.search.stages.throughput_model import ThroughputModel

SIZES = tuple(2**k for k in range(3, 11))
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
CELLS = [candidate(precision, size) for precision in PRECISIONS for size in SIZES]
OBSERVED = st.dictionaries(
    st.sampled_from(CELLS), st.lists(st.floats(1.0, 1e6), min_size=1, max_size=3), min_size=1, max_size=8
)


def saturating(setting: Setting, fp32: float = 1.0, bf16: float = 1.0) -> float:
    """Samples per second of steps of 5 + 0.1 * b milliseconds, by a factor of its precision."""
    return {"fp32": fp32, "bf16": bf16}[setting.precision] * setting.batch_size / (0.005 + 1e-4 * setting.batch_size)


def of(*cells: Setting, **factors: float) -> dict[Setting, list[float]]:
    return {cell: [saturating(cell, **factors)] for cell in cells}


@given(observed=OBSERVED, scale=st.floats(1e-3, 1e3))
def test_no_trial_does_harm_and_the_unit_does_not_matter(observed: dict[Setting, list[float]], scale: float) -> None:
    gains = ThroughputModel(observed, CELLS).gains(CELLS)
    assert gains.keys() == set(CELLS)
    assert min(gains.values()) > -1e-6
    scaled = {cell: [scale * value for value in values] for cell, values in observed.items()}
    assert ThroughputModel(scaled, CELLS).gains(CELLS) == pytest.approx(gains, rel=1e-3, abs=1e-6)
    some = CELLS[::3]
    assert ThroughputModel(observed, CELLS).gains(some).keys() == set(some)


@given(fp32=st.floats(0.5, 2.0), left_out=st.sampled_from(SIZES[1:-1]))
def test_what_lies_between_is_expected_between(fp32: float, left_out: int) -> None:
    cells = [candidate("fp32", size) for size in SIZES]
    untried = candidate("fp32", left_out)
    model = ThroughputModel(of(*(c for c in cells if c != untried), fp32=fp32), [untried])
    assert model.throughput(untried) == pytest.approx(saturating(untried, fp32), rel=0.15)
    for cell in cells:
        assert model.throughput(cell) == pytest.approx(saturating(cell, fp32), rel=0.15)


def test_a_precision_is_given_up_where_its_whole_curve_lies_low_and_not_before() -> None:
    fp32 = [candidate("fp32", size) for size in SIZES]
    at_one, at_three = ([candidate("bf16", size) for size in sizes] for sizes in ((32,), (8, 64, 512)))

    def worth(factor: float, measured: list[Setting]) -> float:
        gains = ThroughputModel(of(*fp32, *measured, bf16=factor), CELLS).gains(CELLS)
        return max(gain for cell, gain in gains.items() if cell.precision == "bf16")

    assert worth(0.3, at_three) < MIN_JOB_GAIN
    assert worth(0.85, at_one) > MIN_JOB_GAIN, "one batch size does not tell of the others"
    assert worth(1.2, at_three) > MIN_JOB_GAIN


def test_behind_a_cliff_it_looks_for_the_peak() -> None:
    """fp32 was measured on both sides of its peak: the case in which it was given up for the batches looked at."""
    known = {candidate("fp32", 16): [600.0], candidate("fp32", 512): [640.0]}
    known |= {candidate("bf16", size): [rate] for size, rate in ((16, 620.0), (64, 830.0), (512, 840.0))}
    gains = ThroughputModel(known, CELLS).gains(CELLS)
    assert max(gains[candidate("fp32", size)] for size in (32, 64, 128, 256)) > MIN_JOB_GAIN


def test_every_further_process_of_a_setting_is_worth_less() -> None:
    rivals = {candidate("fp32", 32): [100.0, 112.0], candidate("bf16", 32): [104.0]}
    bf16 = candidate("bf16", 32)
    worth = [ThroughputModel(rivals | {bf16: [104.0] * num}, ()).gains(rivals)[bf16] for num in (1, 2, 4, 8)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > MIN_JOB_GAIN > worth[-1]


def test_values_of_further_dimensions_tell_of_one_another() -> None:
    plain = candidate("fp32", 32)
    compiled, both = replace(plain, compile="default"), replace(plain, compile="default", memory_format="channels_last")
    known = {plain: [100.0] * 3, compiled: [130.0] * 3}
    expected = ThroughputModel(known, [both, replace(plain, memory_format="channels_last")])
    assert 115 < expected.throughput(both) < 145
    assert 90 < expected.throughput(replace(plain, memory_format="channels_last")) < 110


def test_what_is_expected_to_be_the_best_is_worth_measuring_however_sure_that_is() -> None:
    """Bound by launches, throughput doubles with every doubling: nothing is left to learn, and all is to gain."""
    rising = {candidate("fp32", size): [32.0 * size] for size in SIZES[:-2]}
    gains = ThroughputModel(rising, CELLS).gains(CELLS)
    assert max(gains, key=lambda cell: gains[cell]) == candidate("fp32", SIZES[-1])
    assert gains[candidate("fp32", SIZES[-1])] > 0.5
    only_untried = [cell for cell in CELLS if cell not in rising]
    assert max(ThroughputModel(rising, CELLS).gains(only_untried).values()) > MIN_JOB_GAIN, (
        "what cannot be chosen is no choice"
    )

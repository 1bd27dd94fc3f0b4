"""What is tried first and where that leads; the course of whole searches is in tests/golden."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_backend import hardware as scripted_hardware
from scripted_backend import measurement as measured
from test_decide import at

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.hardware import Hardware, Level
from autotune_amp.core.outcome import Failure, FailureKind, Outcome
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.search.space import Space, excluded_by_outcomes, without
from autotune_amp.search.stages.explore import fit_memory, fit_step_time, next_look, next_seed

SIZES = (4, 8, 16, 32, 64, 128, 256, 512)
RATES: dict[Precision, float | None] = {"fp32": 1.0, "tf32": 3.0, "bf16": 5.0, "fp16": 4.0}


def hardware(**levels: Level) -> Hardware:
    made = scripted_hardware(RATES)
    precisions = {p: replace(known, level=levels.get(p, "native")) for p, known in made.precisions.items()}
    return replace(made, precisions=precisions)


def space(precisions: Iterable[Precision] = RATES) -> Space:
    return Space(candidates=tuple(at(p, b) for p in precisions for b in SIZES), baseline=at("fp32", 32))


def failed(kind: FailureKind = "oom") -> Failure:
    return Failure(kind=kind, message=f"it was {kind}")


def run(
    measure: Callable[[Setting], Outcome], found: Space | None = None, limit: int | None = None
) -> dict[Setting, Outcome]:
    """Seeding played to its end; fails where it repeats itself or tries what it may not."""
    found, device = found or space(), hardware()
    outcomes: dict[Setting, Outcome] = {}
    while (seed := next_seed(device, found, outcomes, limit)) is not None:
        assert seed not in outcomes
        assert seed in (found.baseline, *without(found.candidates, excluded_by_outcomes(found, outcomes)))
        outcomes[seed] = measure(seed)
    return outcomes


def test_what_the_device_does_itself_climbs_before_what_it_emulates() -> None:
    """Emulated fp16 leads at the small batch, and would use up a short budget on its way up."""
    outcomes: dict[Setting, Outcome] = {at("fp32", 32): measured(3000.0), at("fp16", 32): measured(3500.0)}
    found = space(("fp32", "fp16"))
    for device, first in ((hardware(fp16="emulated"), "fp32"), (hardware(), "fp16")):
        seed = next_seed(device, found, outcomes, None)
        assert seed is not None
        assert (seed.precision, seed.batch_size) == (first, 64)


@given(a=st.floats(0.0, 1.0), c=st.floats(1e-5, 1.0), sizes=st.sets(st.sampled_from(SIZES), min_size=2))
def test_the_step_time_model_finds_what_made_the_points(a: float, c: float, sizes: set[int]) -> None:
    model = fit_step_time([(b, b / (a + c * b)) for b in sizes])
    assert model is not None
    for size in SIZES:
        assert model(size) == pytest.approx(size / (a + c * size), rel=1e-3)


@pytest.mark.parametrize(
    ("points", "size", "expected"),
    [
        ([(32, 320), (64, 640)], 128, 1280),
        ([(4, 1000), (32, 1000), (64, 1640)], 128, 2920),  # the plateau of the optimizer's step
        ([(64, 1640), (4, 1000), (32, 1000)], 1, 1000),
        ([(32, 640), (64, 600)], 512, 600),  # noise is no negative slope
    ],
)
def test_the_memory_model(points: list[tuple[int, int]], size: int, expected: float) -> None:
    model = fit_memory(points)
    assert model is not None
    assert model(size) == pytest.approx(expected)


@pytest.mark.parametrize(("over_limit", "is_tried"), [(1.05, True), (1.2, False)])
def test_what_the_memory_model_puts_a_tenth_over_the_limit_is_skipped(over_limit: float, is_tried: bool) -> None:
    outcomes: dict[Setting, Outcome] = {at("fp32", size): measured(size * 1.0, memory=size) for size in (16, 32, 64)}
    seed = next_seed(hardware(), space(("fp32",)), outcomes, int(128 / over_limit))
    assert (seed is not None and seed.batch_size == 128) == is_tried


def test_what_is_ruled_out_takes_no_place_among_the_fastest() -> None:
    speeds: dict[Precision, float] = {"fp32": 100.0, "bf16": 300.0, "fp16": 200.0, "tf32": 50.0}
    outcomes: dict[Setting, Outcome] = {at(p, 32): measured(speed) for p, speed in speeds.items()}
    seeds = {}
    both: tuple[Precision, ...] = ("bf16", "fp16")
    for precisions in (both[:0], both):
        out = [Exclusion(precision=p, batch_size=None, reason="it harms") for p in precisions]
        seed = next_seed(hardware(), space(), outcomes, None, out)
        assert seed is not None
        seeds[precisions] = seed.precision
    assert list(seeds.values()) == ["bf16", "fp32"]


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from([at(p, b) for p in RATES for b in SIZES]),
        st.sampled_from(["oom", "timeout", "crash", "unsupported"]) | st.floats(1.0, 1e4),
    ),
    st.none() | st.integers(1, 1000),
)
def test_seeding_ends_and_never_repeats_on_any_landscape(
    landscape: dict[Setting, FailureKind | float], limit: int | None
) -> None:
    def measure(candidate: Setting) -> Outcome:
        given_outcome = landscape.get(candidate, 100.0)
        memory = candidate.batch_size
        return measured(given_outcome, memory) if isinstance(given_outcome, float) else failed(given_outcome)

    outcomes = run(measure, limit=limit)
    assert next(iter(outcomes)) == at("fp32", 32)


def test_looking_ends_on_a_side_where_two_in_a_row_are_far_behind() -> None:
    speeds = {4: 10.0, 8: 10.0, 16: 10.0, 32: 60.0, 64: 100.0, 128: 79.0, 256: 79.0, 512: 1000.0}
    outcomes: dict[Setting, Outcome] = {at("fp32", 64): measured(100.0)}
    while (candidate := next_look(space(("fp32",)), outcomes, None)) is not None:
        assert candidate not in outcomes
        outcomes[candidate] = measured(speeds[candidate.batch_size])
    assert [c.batch_size for c in outcomes] == [64, 128, 256, 32, 16]


@pytest.mark.parametrize("kind", ["oom", "timeout", "unsupported", "crash"])
def test_what_runs_at_no_size_gets_one_try_and_smaller_ones_where_memory_was_short(kind: FailureKind) -> None:
    tried = run(lambda c: failed(kind) if c.precision == "fp16" else measured(c.batch_size / (0.01 + c.batch_size)))
    fp16 = [c.batch_size for c in tried if c.precision == "fp16"]
    assert fp16 == ([32, 16, 8, 4] if kind == "oom" else [32])


@pytest.mark.parametrize(("gain", "largest"), [(0.0, 64), (0.005, 64), (0.05, 512)])
def test_the_climb_ends_where_doubling_gains_next_to_nothing(gain: float, largest: int) -> None:
    def speed(size: int) -> float:
        return 50.0 if size < 32 else 100.0 * (1 + gain) ** (SIZES.index(size) - 3)

    outcomes = run(lambda c: measured(speed(c.batch_size)), space(("fp32",)))
    assert max(c.batch_size for c in outcomes) == largest
    assert at("fp32", 16) in outcomes or largest == 512, "the plateau's lower edge was looked for"

"""What is tried first and where that leads; the course of whole searches is in tests/golden."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_backend import described, ledger_of
from scripted_backend import hardware as scripted_hardware
from scripted_backend import measurement as measured
from test_decide import at
from test_explore import record

from autotune_amp.core.hardware import Hardware, Level
from autotune_amp.core.intervals import fit_memory
from autotune_amp.core.outcome import Failure, FailureKind, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.planner import JobDefaults
from autotune_amp.search.space import Space, excluded_by_outcomes, without_excluded
from autotune_amp.search.stages.explore import untried_seed, untried_settings

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


def conditions(limit: int | None = None, similar_best: Setting | None = None) -> JobDefaults:
    return JobDefaults(
        hardware=hardware(),
        memory_limit_bytes=2**40 if limit is None else limit,
        description=described(),
        similar_best=similar_best,
    )


def run(measure: Callable[[Setting], Outcome], limit: int | None = None) -> list[Setting]:
    """Seeding played to its end; fails where it repeats itself or tries what it may not."""
    ledger = ledger_of([], space())
    while (seed := untried_seed(ledger, conditions(limit))) is not None:
        outcomes = ledger.ordinary_outcomes
        assert seed not in outcomes
        assert seed in (
            space().baseline,
            *without_excluded(space().candidates, excluded_by_outcomes(space(), outcomes)),
        )
        ledger.append(record(len(ledger.records), seed, measure(seed)))
    return list(dict.fromkeys(r.candidate for r in ledger.records))


@pytest.mark.parametrize(
    ("points", "size", "expected"),
    [
        ([(32, 320), (64, 640)], 128, 1280),
        ([(4, 1000), (32, 1000), (64, 1640)], 128, 2920),  # the plateau of the optimizer's step
        ([(64, 1640), (4, 1000), (32, 1000)], 1, 1000),
        ([(32, 640), (64, 600)], 512, 600),  # noise is no negative slope
        ([(32, 640), (64, 600)], 8, 600),
    ],
)
def test_the_memory_model(points: list[tuple[int, int]], size: int, expected: float) -> None:
    model = fit_memory(points)
    assert model is not None
    assert model(size) == pytest.approx(expected)


@pytest.mark.parametrize(("over_limit", "is_tried"), [(1.05, True), (1.2, False)])
def test_what_the_memory_model_puts_a_tenth_over_the_limit_is_skipped(over_limit: float, is_tried: bool) -> None:
    records = [
        record(number, at("fp32", size), measured(size * 1.0, memory=size)) for number, size in enumerate((16, 32, 64))
    ]
    untried = untried_settings(ledger_of(records, space(("fp32",))), int(128 / over_limit))
    assert (at("fp32", 128) in untried) == is_tried
    assert at("fp32", 8) in untried


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

    assert run(measure, limit=limit)[0] == at("fp32", 32)


@pytest.mark.parametrize("kind", ["oom", "timeout", "unsupported", "crash"])
def test_what_runs_at_no_size_gets_one_try_and_smaller_ones_where_memory_was_short(kind: FailureKind) -> None:
    tried = run(lambda c: failed(kind) if c.precision == "fp16" else measured(c.batch_size / (0.01 + c.batch_size)))
    fp16 = [c.batch_size for c in tried if c.precision == "fp16"]
    assert fp16 == ([32, 16, 8, 4] if kind == "oom" else [32])


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        (at("bf16", 300), at("bf16", 256)),
        (at("fp32", 32), at("bf16", 32)),  # today's, which was tried: the fastest matrix products are next
        (at("fp8", 64), at("bf16", 64)),  # on which it is tried
        (at("fp16", 1024), at("bf16", 32)),  # what is nearest is ruled out
    ],
)
def test_what_was_best_for_the_same_code_is_tried_after_today_s(like: Setting, expected: Setting) -> None:
    today, too_large = record(1, at("fp32", 32), measured(100.0)), record(2, at("fp16", 512), failed())
    assert untried_seed(ledger_of([], space()), conditions(similar_best=like)) == at("fp32", 32)
    ledger = ledger_of([today, too_large] if like.precision == "fp16" else [today], space())
    assert untried_seed(ledger, conditions(similar_best=like)) == expected

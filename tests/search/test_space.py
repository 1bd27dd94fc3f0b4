from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import described, hardware, measurement
from test_decide import at

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import Level
from autotune_amp.core.outcome import Failure, Outcome
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.setting import Setting
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import MAX_BATCH_SIZES, Space, build_space, divisors, excluded_by_outcomes

FREE = {"effective_batch_size": "free"}
LOOP = {"accumulation_steps": "train_step takes its own optimizer steps"}
RATES: dict[Level, float | None] = {"native": 1.0, "emulated": 0.1, "unsupported": None}


def space(*, levels: dict[str, Level] | None = None, about: dict[str, Any] | None = None, **options: Any) -> Space:
    rates = {p: RATES[(levels or {}).get(p, "native")] for p in PRECISIONS}
    return build_space(hardware(rates), described(**about or {}), SearchOptions.from_user(**options))


def sizes(found: Space, precision: str = "fp32") -> list[int]:
    return [c.batch_size for c in found.candidates if c.precision == precision]


TOTAL = {"batch_size": 16, "accumulation_steps": 4, "keeps_effective_batch_size": True}
FP8 = {"fp8_recipe": {"rowwise": None, "tensorwise": None}}


@pytest.mark.parametrize(
    ("about", "options", "expected"),
    [
        ({}, FREE, [4, 8, 16, 32, 64, 128, 256, 512]),
        ({"batch_size": 10}, FREE, [1, 2, 5, 10, 20, 40, 80, 160]),
        ({"num_samples": 100}, FREE, [4, 8, 16, 32, 64]),
        ({}, {"batch_size": "10:50"} | FREE, [10, 16, 32, 50]),
        # Nothing to keep: the data has no batch size, and nobody says what runs today.
        ({"batch_size": None}, {}, [4, 8, 16, 32, 64, 128, 256, 512]),
        # Kept: the loader's own, what --baseline says runs today, or the number that was asked for.
        ({}, {}, [4, 8, 16, 32]),
        ({"batch_size": 4, "accumulation_steps": 8}, {}, [1, 2, 4, 8, 16, 32]),
        ({}, {"batch_size": "10:50"}, [16, 32]),
        ({}, {"baseline": "fp32:24"}, [3, 4, 6, 8, 12, 24]),
        ({}, {"effective_batch_size": 64, "num_ranks": 4}, [2, 4, 8, 16]),
        ({}, {"effective_batch_size": 96, "baseline": "fp32:8"}, [1, 2, 3, 6, 8, 16, 32, 48, 96]),
        ({}, {"effective_batch_size": 96, "batch_size": "5:50"}, [6, 8, 12, 16, 24, 32, 48]),
        # A command that accumulates to a total of its own keeps it, whatever is asked for.
        (TOTAL, {}, [2, 4, 8, 16, 32, 64]),
        (TOTAL, FREE, [2, 4, 8, 16, 32, 64]),
        (TOTAL, {"effective_batch_size": 32}, [2, 4, 8, 16, 32, 64]),
        (TOTAL, {"baseline": "fp32:8"}, [1, 2, 4, 8, 16, 32, 64]),
        # A command whose ranks each take a batch shares the total among them; ranks that divide a batch have it all.
        ({"num_ranks": 2}, {"effective_batch_size": 64}, [4, 8, 16, 32]),
        ({"num_ranks": 2, "num_sharing": 2}, {"effective_batch_size": 64}, [4, 8, 16, 32, 64]),
        ({"num_ranks": 8, "num_sharing": 8, "batch_size": 24}, FREE, [24, 48, 96, 192, 384]),
        # A loop steps its optimizers itself, so that a batch is the effective batch.
        ({"unsettable": LOOP}, {}, [32]),
    ],
)
def test_batch_sizes(about: dict[str, Any], options: dict[str, Any], expected: list[int]) -> None:
    assert sizes(space(about=about, **options)) == expected


@pytest.mark.parametrize(
    ("about", "options", "expected"),
    [
        ({"as_found_precision": "bf16", "is_as_found_strict": False}, {}, at("bf16", 32, as_found=True)),
        ({"is_as_found_strict": False}, {"baseline": "tf32:48"}, at("tf32", 48)),
        ({"batch_size": None, "num_samples": 10}, {}, at("fp32", 10)),
        ({}, {"effective_batch_size": 90}, at("fp32", 30, accumulation_steps=3)),
        ({}, {"effective_batch_size": 128, "num_ranks": 4}, at("fp32", 32)),
        ({"num_samples": 10}, {"effective_batch_size": 16}, at("fp32", 8, accumulation_steps=2)),
        ({"unsettable": LOOP}, {"effective_batch_size": 64}, at("fp32", 64)),
        ({"accumulation_steps": 3}, FREE, at("fp32", 32, accumulation_steps=3)),
        ({"accumulation_steps": 3}, {"effective_batch_size": 32}, at("fp32", 32)),
    ],
)
def test_baseline(about: dict[str, Any], options: dict[str, Any], expected: Setting) -> None:
    assert space(about=about, **options).baseline == expected


@pytest.mark.parametrize(
    ("about", "options", "note"),
    [
        ({"batch_size": None}, {}, "--baseline PRECISION:BATCH"),
        ({"num_samples": 10}, {}, "10 instead of 32"),
        ({}, {"effective_batch_size": 90}, "32 does not divide the effective batch size 90"),
        ({}, {"effective_batch_size": 180, "num_ranks": 2}, "effective batch size 180 (90 on each of 2 ranks)"),
        ({"num_ranks": 2, "is_ranked": True}, {}, "64 (32 on each of 2 ranks)"),
        (TOTAL, FREE, "free is ignored: the command itself accumulates to 64"),
        ({"weights": "bf16"}, {}, "kept in bf16"),
        ({"weights": "frozen_low"}, {}, "kept in low precision"),
    ],
)
def test_what_is_assumed_is_said(about: dict[str, Any], options: dict[str, Any], note: str) -> None:
    (said,) = space(about=about, **options).notes
    assert note in said


@pytest.mark.parametrize(
    ("levels", "about", "options", "legal", "excluded"),
    [
        ({}, {}, {}, ["fp32", "tf32", "bf16", "fp16"], ["fp8"]),
        ({}, {"variants": FP8}, {}, ["fp32", "tf32", "bf16", "fp16"], []),
        ({}, {"variants": FP8}, {"try_": "compile"}, ["fp32", "tf32", "bf16", "fp16"], ["fp8"]),
        ({"fp8": "unsupported"}, {"variants": FP8}, {"try_": "fp8_recipe"}, ["fp32", "tf32", "bf16", "fp16"], []),
        ({}, {}, {"try_": "none"}, ["fp32", "tf32", "bf16", "fp16"], ["fp8"]),
        ({"fp8": "unsupported"}, {}, {}, ["fp32", "tf32", "bf16", "fp16"], ["fp8"]),
        ({"bf16": "emulated"}, {}, {"precision": ["bf16"]}, ["bf16"], []),
        ({"tf32": "unsupported"}, {}, {}, ["fp32", "bf16", "fp16"], ["tf32", "fp8"]),
        ({}, {"weights": "bf16"}, {}, ["fp32", "bf16"], ["tf32", "fp16", "fp8"]),
        ({}, {"weights": "fp16"}, {}, ["fp32"], ["tf32", "bf16", "fp16", "fp8"]),
        ({}, {}, {"precision": ["bf16", "fp8"]}, ["bf16"], ["fp8"]),
        ({}, {"variants": FP8}, {"precision": ["bf16", "fp8"]}, ["bf16"], []),
    ],
)
def test_precisions(
    levels: dict[str, Level], about: dict[str, Any], options: dict[str, Any], legal: list[str], excluded: list[str]
) -> None:
    found = space(levels=levels, about=about, **options)
    assert list(dict.fromkeys(c.precision for c in found.candidates)) == legal
    assert [e.precision for e in found.excluded] == excluded
    assert all(e.batch_size is None for e in found.excluded)
    assert all(e.reason == "scripted" for e in found.excluded if levels.get(e.precision) == "unsupported")


@pytest.mark.parametrize(
    ("levels", "about", "options", "message", "next_step"),
    [
        ({"tf32": "unsupported"}, {}, {"precision": "tf32"}, "tf32: scripted", "fp32 or bf16"),
        ({}, {}, {"precision": "fp8"}, "with --try fp8_recipe", "fp32 or tf32"),
        (dict.fromkeys(PRECISIONS, "unsupported"), {}, {}, "; fp16: scripted; fp8", "--device"),
        ({}, {"num_samples": 20}, {"batch_size": "32:64"}, "only 20 samples", "20 or less"),
        ({}, {}, {"batch_size": "33:64"}, "effective batch size 32, which is kept", "--effective-batch-size free"),
        (
            {},
            {"unsettable": LOOP},
            {"batch_size": "8:16"},
            "accumulation cannot be used",
            "--effective-batch-size free",
        ),
        ({}, {"num_ranks": 3}, {"effective_batch_size": 100}, "cannot be shared by the 3 ranks", "such as 99"),
        ({}, {"num_ranks": 3}, {"effective_batch_size": 1}, "cannot be shared by the 3 ranks", "such as 3"),
        ({}, {}, {"batch_size": "33:47", "effective_batch_size": 96}, "No batch size from 33 to 47", "1, 2, 3"),
        ({}, {}, {"baseline": "fp8:32"}, "with --try fp8_recipe", "Give a baseline in fp32"),
    ],
)
def test_a_request_that_leaves_nothing_is_an_error(
    levels: dict[str, Level], about: dict[str, Any], options: dict[str, Any], message: str, next_step: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        space(levels=levels, about=about, **options)
    assert message in raised.value.message
    assert next_step in raised.value.next_step


def test_sizes_above_the_dataset_are_excluded_with_the_reason() -> None:
    found = space(about={"num_samples": 100}, precision=["fp32", "bf16"], effective_batch_size="free")
    assert [(e.precision, e.batch_size) for e in found.excluded] == [("fp32", 128), ("bf16", 128)]
    assert "100 samples" in found.excluded[0].reason


@given(
    base=st.none() | st.integers(1, 300),
    num_samples=st.none() | st.integers(1, 5000),
    batch_range=st.none() | st.tuples(st.integers(1, 4000), st.integers(1, 4000)).map(lambda p: (min(p), max(p))),
    effective=st.none() | st.just("free") | st.integers(1, 3000),
    num_ranks=st.integers(1, 8),
    baseline=st.none() | st.tuples(st.sampled_from(["fp32", "bf16"]), st.integers(1, 300)),
    fixed=st.none() | st.integers(1, 4),
)
def test_every_candidate_is_legal(
    base: int | None,
    num_samples: int | None,
    batch_range: tuple[int, int] | None,
    effective: int | str | None,
    num_ranks: int,
    baseline: tuple[str, int] | None,
    fixed: int | None,
) -> None:
    about = {"batch_size": base, "num_samples": num_samples, "unsettable": LOOP if fixed else {}}
    about |= {"accumulation_steps": fixed or 1}
    asked = effective * num_ranks if isinstance(effective, int) else effective
    today = baseline[1] if baseline else base
    kept = effective if isinstance(effective, int) else None
    if effective is None and today is not None:
        kept = min(today, num_samples or today) * (fixed or 1)
    try:
        found = space(
            about=about, batch_size=batch_range, effective_batch_size=asked, num_ranks=num_ranks, baseline=baseline
        )
    except InvalidRequestError:
        low, high = batch_range or (1, 10**9)
        is_out = num_samples is not None and low > num_samples
        fitting = [d for d in divisors(kept or 1) if low <= d <= min(high, num_samples or high)]
        assert is_out or (kept is not None and (not fitting or (fixed and kept / fixed not in fitting)))
        return
    assert found.effective_batch_size == kept
    assert len(found.candidates) == len(set(found.candidates)) == 4 * len(sizes(found))
    assert 1 <= len(sizes(found)) <= MAX_BATCH_SIZES
    assert sizes(found) == sorted(sizes(found))
    for candidate in (*found.candidates, found.baseline):
        assert 1 <= candidate.batch_size <= (num_samples or 10**9)
        assert candidate.effective_batch_size == (kept or candidate.batch_size * (fixed or 1))
    assert {c.accumulation_steps for c in found.candidates} == {fixed} or not fixed
    low, high = batch_range or (1, 10**9)
    assert all(low <= size <= high for size in sizes(found))
    assert (found.baseline in found.candidates) == (low <= found.baseline.batch_size <= high)
    if batch_range and kept is None:
        assert {low, min(high, num_samples or high)} <= set(sizes(found))


def test_a_loop_says_why_nothing_accumulates() -> None:
    found = space(about={"unsettable": LOOP}, precision=["fp32", "bf16"])
    assert [(e.precision, e.batch_size) for e in found.excluded] == [("fp32", 16), ("bf16", 16)]
    assert all("train_step takes its own optimizer steps" in e.reason for e in found.excluded)
    assert ["--effective-batch-size free" in note for note in found.notes] == [True]
    assert space(about={"unsettable": LOOP}, effective_batch_size="free").notes == ()


OOM, SLOW, MISSING = (Failure(kind=kind, message="the device says so") for kind in ("oom", "timeout", "unsupported"))


def outcomes_of(**by_size: dict[int, int | Failure]) -> dict[Setting, Outcome]:
    """What became of each precision at each batch size: a peak in bytes, or a failure."""
    found = {at(p, b): o for p, sizes in by_size.items() for b, o in sizes.items()}  # type: ignore[arg-type]
    return {c: o if isinstance(o, Failure) else measurement(100.0, o) for c, o in found.items()}


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        # Nothing else measured: only the same precision's larger batches.
        ({"fp32": {128: OOM}}, {("fp32", 256), ("fp32", 512)}),
        # bf16 needs less than fp32: what fp32 could not do says nothing of bf16.
        ({"fp32": {32: 100, 256: OOM}, "bf16": {32: 60}}, {("fp32", 512)}),
        # fp32 needs as much as bf16: the same batch is out too.
        ({"fp32": {32: 100}, "bf16": {32: 60, 256: OOM}}, {("bf16", 512), ("fp32", 256), ("fp32", 512)}),
        # One shared size at which it needs less is enough to keep it.
        ({"fp32": {32: 100, 64: 90}, "bf16": {32: 100, 64: 100, 256: OOM}}, {("bf16", 512)}),
        # No shared size: unknown, so kept.
        ({"fp32": {32: 100}, "bf16": {64: 60, 256: OOM}}, {("bf16", 512)}),
        # Two percent less is the same, three are not.
        ({"fp32": {32: 98}, "bf16": {32: 100, 512: OOM}}, {("fp32", 512)}),
        ({"fp32": {32: 97}, "bf16": {32: 100, 512: OOM}}, set()),
        # What ran is never excluded, whatever failed below it.
        ({"fp32": {128: SLOW, 512: 100}}, {("fp32", 256)}),
        ({"bf16": {256: SLOW}}, {("bf16", 512)}),
        # What is not supported at one size only says nothing of the others.
        ({"bf16": {256: MISSING}}, {("bf16", None)}),
        ({"bf16": {32: 100, 256: MISSING}}, set()),
        ({"bf16": {32: Failure(kind="crash", message="it died")}}, set()),
    ],
)
def test_what_a_failure_rules_out(
    outcomes: dict[str, dict[int, int | Failure]], expected: set[tuple[str, int]]
) -> None:
    where = space(precision=["fp32", "bf16"], effective_batch_size="free")
    assert {(e.precision, e.batch_size) for e in excluded_by_outcomes(where, outcomes_of(**outcomes))} == expected


def test_unsupported_as_found_leaves_the_strict_one() -> None:
    assert excluded_by_outcomes(space(), {at("bf16", 32, as_found=True): MISSING}) == ()


@pytest.mark.parametrize(("rate", "is_hopeless"), [(19.9, True), (20.1, False)])
def test_five_times_slower_at_the_same_batch_is_hopeless(rate: float, is_hopeless: bool) -> None:
    fast = {at("fp32", b): measurement(100.0 * b / 32) for b in (32, 64)}
    excluded = excluded_by_outcomes(space(), {**fast, at("bf16", 32): measurement(rate)})
    assert [(e.precision, e.batch_size) for e in excluded] == [("bf16", None)] * is_hopeless


def test_a_device_without_fp8_has_one_reason_for_whatever_is_trained_on_it() -> None:
    lacking = {"fp8_recipe": dict.fromkeys(FP8["fp8_recipe"], "the model has no layer for it")}
    for about in ({"variants": FP8}, {"variants": lacking}, {"unsettable": {"fp8": "the command has no {precision}"}}):
        found = space(levels={"fp8": "unsupported"}, about=about)
        (excluded,) = [e.reason for e in found.excluded if e.precision == "fp8"]
        assert excluded.removesuffix(" --try fp8_recipe emulates it") == "scripted"
        assert set(found.variants_left_out.get("fp8_recipe", {}).values()) <= {excluded}

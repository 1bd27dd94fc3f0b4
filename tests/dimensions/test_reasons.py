"""What dimensions say against a trial on the setting that leads, and what they count as a trial of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import measured

from autotune_amp.core.outcome import Failure, FailureKind, Measurement, Record
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import ALLOCATOR, COMPILE, FP8_RECIPE, OPTIMIZER_IMPL, VARIANTS, fallback_setting
from autotune_amp.dimensions.dimension import Leader
from autotune_amp.trial.jobs import Trial

LEADING = Setting(precision="bf16", batch_size=64)


def step(rate: float, setting: Setting = LEADING) -> Measurement:
    return measured(Trial(candidate=setting, device="cpu"), rate)


def leader(*, trials: Sequence[Record] = (), **others: Any) -> Leader:
    """A leader whose step takes 0.1 s, in a training run of 1000 s."""
    told: dict[str, Any] = {
        "setting": LEADING,
        "objective": "speed",
        "measurements": {LEADING: [step(640.0)]},
        "values": {"compile": ("default", "reduce-overhead")},
        "are_values_named": False,
        "num_steps": 10_000,
    }
    return Leader(trials=trials, **told | others)


def failed(kind: FailureKind, **dimensions: Any) -> Record:
    failure = Failure(kind=kind, message="no")
    setting = replace(LEADING, **dimensions)
    return Record(search_id="", number=1, candidate=setting, purpose="search", outcome=failure, seconds=1.0)


@pytest.mark.parametrize(
    ("record", "modes"),
    [
        (failed("crash", compile="default"), {"default", "reduce-overhead"}),
        (failed("crash", compile="reduce-overhead"), {"reduce-overhead"}),
        (failed("oom", compile="default"), set()),
        (failed("timeout", compile="default"), set()),
        (failed("nonfinite", compile="default"), set()),
        (failed("crash", memory_format="channels_last"), set()),
    ],
)
def test_a_failure_of_the_compiler_counts_for_its_mode_and_that_of_the_default_for_all(
    record: Record, modes: set[str]
) -> None:
    leading = leader(trials=[record])
    settings = {mode: replace(LEADING, compile=mode) for mode in ("default", "reduce-overhead")}
    reasons = {mode: COMPILE.reason_against_setting(setting, leading) for mode, setting in settings.items()}
    assert {mode for mode, reason in reasons.items() if reason is not None} == modes
    assert all(str(record.candidate) in reason for reason in reasons.values() if reason is not None)


def test_compiling_for_a_short_run_does_not_pay_unless_the_leader_is_compiled_already() -> None:
    compiled = replace(LEADING, compile="default")
    assert COMPILE.reason_against_setting(compiled, leader(num_steps=101)) is None
    assert "99 steps" in str(COMPILE.reason_against_setting(compiled, leader(num_steps=99)))
    already = leader(num_steps=99, setting=compiled, measurements={compiled: [step(640.0, compiled)]})
    assert COMPILE.reason_against_setting(compiled, already) is None
    assert COMPILE.reason_against_setting(compiled, leader(num_steps=99, objective="memory")) is None


def test_compiled_fp8_is_a_trial_of_the_recipe_and_none_of_compiling() -> None:
    setting = FP8_RECIPE.on(LEADING, "tensorwise")
    assert (setting.precision, setting.compile) == ("fp8", "default")
    assert FP8_RECIPE.is_tried_in(setting, "tensorwise")
    assert not COMPILE.is_tried_in(setting, "default")
    assert COMPILE.is_tried_in(replace(LEADING, compile="default"), "default")
    assert FP8_RECIPE.is_without(LEADING, setting)
    assert not FP8_RECIPE.is_without(replace(setting, fp8_recipe="rowwise"), setting)


def test_another_implementation_is_not_tried_where_the_optimizer_takes_less_than_3_percent_of_a_step() -> None:
    for shares, reason in (((0.02,), "2.0 % of a step"), ((0.04,), None), ((0.02, 0.04), None)):
        timed = [replace(step(640.0), update_seconds=share * step(640.0).step_seconds) for share in shares]
        found = OPTIMIZER_IMPL.reason_against("fused", leader(measurements={LEADING: timed}))
        assert (found is None) if reason is None else (reason in str(found))
    slow = replace(step(640.0), update_seconds=1e-6)
    assert OPTIMIZER_IMPL.reason_against("fused", leader(objective="memory", measurements={LEADING: [slow]})) is None


def test_the_allocator_changes_no_peak_and_so_is_nothing_for_memory() -> None:
    assert ALLOCATOR.reason_against("expandable_segments", leader(objective="memory")) is not None
    assert ALLOCATOR.reason_against("expandable_segments", leader()) is None


def test_a_fallback_keeps_all_variants_but_compiling() -> None:
    kept = {"memory_format": "channels_last", "optimizer_impl": "fused"}
    assert fallback_setting(replace(LEADING, compile="default", **kept)).active_variants == kept


def test_variants_are_set_up_with_the_allocator_first_and_compiled_last() -> None:
    loader_arguments = ("pin_memory", "prefetch_factor")  # which change nothing of a training that is set up
    names = [name for name in VARIANTS if name not in loader_arguments]
    assert (names[0], names[-1]) == ("allocator", "compile")
    assert names.index("weights") < names.index("memory_format") < names.index("optimizer_impl")

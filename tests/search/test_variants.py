"""Which further values are tried on the setting that would win, in which order, and what is said of each."""

from __future__ import annotations

import re
from typing import Any

import pytest
from profile_samples import host_step, profiled
from scripted_backend import (
    ScriptedSearch,
    all_well,
    described,
    fidelity,
    hardware,
    ledger_of,
    measurement,
    out_of_memory,
)

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Failure, Measurement, Outcome, Profiled, Record
from autotune_amp.core.recommendation import VariantRow
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import COMPILE
from autotune_amp.search import planner
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import Space, build_space
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.variants import Variants, reason_not_to_try, variant_rows
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

VALUES: dict[str, dict[str, str | None]] = {
    "weights": {"bf16": None},
    "memory_format": {"channels_last": None, "channels_last_3d": "no convolution over 3 dimensions"},
    "activation_checkpointing": {"blocks": None},
    "optimizer_impl": {"foreach": None, "fused": None},
    "compile": {"default": None, "max-autotune-no-cudagraphs": None, "reduce-overhead": None},
}
# What each value multiplies the speed by, and the seconds of its first step.
FP8: dict[str, dict[str, str | None]] = {
    "fp8_recipe": {"rowwise": None, "tensorwise": None},
    "compile": {"default": None, "reduce-overhead": None},
}
FP8_FAILED = Failure(kind="unsupported", message="no kernel of fp8")
ALL_PRECISIONS = {"precision": ["fp32", "bf16", "fp8"], "steps": 100_000}
GAINS = {"channels_last": 1.2, "foreach": 1.0, "fused": 1.1, "default": 1.5, "bf16": 1.0, "blocks": 0.8}


def speed(setting: Setting, gains: dict[str, float]) -> float:
    found = (
        {"fp32": 100.0, "bf16": 200.0, "fp8": 200.0}[setting.precision] * setting.batch_size / (setting.batch_size + 8)
    )
    for value in setting.active_variants.values():
        found *= gains.get(value, 1.0)
    return found


def measured(
    setting: Setting, gains: dict[str, float], update_share: float = 0.2, compiling: float = 20.0
) -> Measurement:
    step = setting.effective_batch_size / speed(setting, gains)
    first = 2 * step + (compiling if setting.compile != "off" else 0.0)
    fields: dict[str, Any] = {"first_step_seconds": first, "update_seconds": update_share * step}
    fields["step_seconds_interval"] = (-0.1 * step, 3 * step)  # as of steps far apart
    return measurement(speed(setting, gains), 2**28, step_seconds=step, **fields)


def searched(
    gains: dict[str, float] | None = None,
    *,
    options: dict[str, Any] | None = None,
    wall: int = 1000,
    update_share: float = 0.2,
    budget: float = 1000.0,
    failing: dict[str, Failure] | None = None,
    unfaithful: str | None = None,
    profile: Profiled | Failure | None = None,
    values: dict[str, dict[str, str | None]] = VALUES,
    fp8_rate: float | None = None,
    is_budget_spent: bool = False,
) -> tuple[list[Setting], dict[tuple[str, str], VariantRow], Setting]:
    """What was tried beside precision and batch, what is said of each value, and what would win."""
    gains = GAINS if gains is None else gains

    def answer(spec: Trial) -> Outcome:
        setting = spec.candidate
        for value in setting.active_variants.values():
            if failing and value in failing:
                return failing[value]
        if setting.batch_size > wall and (setting.activation_checkpointing, setting.allocator) == ("off", "as_found"):
            return out_of_memory()
        return measured(setting, gains, update_share)

    device = hardware({"fp32": 1.0, "bf16": 2.0, "fp8": fp8_rate})
    checks = ("fidelity", *(() if profile is None else ("profile",)))
    about = described(batch_size=32, variants=values, checks=checks)
    asked = SearchOptions.from_user(
        **{"precision": ["fp32", "bf16"], "try_": "auto", "steps": 10_000, **(options or {})}
    )

    def check_answer(spec: Check | ProfileJob) -> Any:
        if isinstance(spec, ProfileJob):
            assert not spec.candidate.active_variants
            return profile
        is_bad = spec.what == "fidelity" and spec.candidate.precision == unfaithful
        return fidelity(spec.candidate.precision, "unfaithful") if is_bad else all_well(spec)

    search = ScriptedSearch(
        build_space(device, about, asked),
        answer,
        budget,
        check_answer=check_answer,
        device=device,
        description=about,
        objective=asked.objective,
    )
    search.ledger.num_steps = asked.horizon_steps(32)
    search.explore()
    judge = Checks()
    for stage in (judge, Variants(judge)):
        search.run(stage)
    assert search.ledger.shortlist is not None
    winner = search.ledger.shortlist.winner
    tried = [r.candidate for r in search.ledger.trials if r.candidate.active_variants]
    found = {(row.name, row.value): row for row in variant_rows(search.ledger, winner, is_budget_spent=is_budget_spent)}
    return tried, found, winner


def test_each_value_is_tried_on_what_leads_and_kept_where_it_wins() -> None:
    """Some once more, since nobody knows that these processes do not differ."""
    tried, found, winner = searched(options={"steps": 100_000})
    in_order = list(dict.fromkeys(tuple(setting.active_variants.values()) for setting in tried))
    assert in_order[:4] == [
        ("channels_last",),
        ("channels_last", "foreach"),
        ("channels_last", "fused"),
        ("channels_last", "fused", "default"),
    ]
    assert "--try max-autotune" in str(found["compile", "max-autotune-no-cudagraphs"].reason)
    assert winner.active_variants == {"memory_format": "channels_last", "optimizer_impl": "fused", "compile": "default"}
    assert {(row.value, row.status) for row in found.values() if row.status == "chosen"} == {
        (value, "chosen") for value in ("channels_last", "fused", "default")
    }
    row = found["memory_format", "channels_last"]
    assert row.speedup == pytest.approx(1.2)
    assert row.beside == "bf16 batch 32"
    assert row.speedup_interval == pytest.approx((1.2 / 3, 1.2 * 3))
    assert found["optimizer_impl", "foreach"].status == "tried"
    assert found["memory_format", "channels_last_3d"].reason == "no convolution over 3 dimensions"
    assert "--try weights" in str(found["weights", "bf16"].reason)
    assert "larger batch" in str(found["activation_checkpointing", "blocks"].reason)


def test_a_compilation_that_does_not_pay_is_excluded_and_says_from_when_on_it_does() -> None:
    quick = searched(options={"steps": 100_000})[1]["compile", "default"]
    assert quick.break_even_steps is not None
    # 20 s more once, and a step of 32 / (200 * 0.8 * 1.2 * 1.1) s a third faster.
    step = 32 / (200 * 0.8 * 1.2 * 1.1)
    assert quick.break_even_steps == pytest.approx(20 / (step - step / 1.5), rel=0.05)
    short = int(quick.break_even_steps) - 50
    _, found, winner = searched(options={"steps": short})
    assert winner.compile == "off"
    assert found["compile", "default"].status == "excluded"
    assert f"{short:,}" in str(found["compile", "default"].reason)
    tried, found, _ = searched(options={"steps": 30})
    assert not any(setting.compile != "off" for setting in tried), "the whole training is shorter than compiling"
    assert "--steps" in str(found["compile", "default"].reason)


def test_a_profile_of_the_winner_says_what_comes_first_and_is_shown_beside_what_it_gained() -> None:
    long = {"steps": 100_000}
    tried, found, _ = searched(profile=profiled(host_step(matrix_products=0.4, optimizer=0.2, casts=0.1)), options=long)
    in_order = list(dict.fromkeys(tuple(setting.active_variants.values()) for setting in tried))
    assert in_order[:3] == [("foreach",), ("fused",), ("fused", "default")]
    assert found["memory_format", "channels_last"].max_speedup == 1.0, "there are no convolutions"
    assert found["optimizer_impl", "fused"].max_speedup == pytest.approx(1 / 0.8)
    assert found["compile", "default"].max_speedup == pytest.approx(1 / 0.6)
    assert found["activation_checkpointing", "blocks"].max_speedup is None
    launching = profiled(host_step(matrix_products=0.1, optimizer=0.1, convolution_seconds=0.1))
    tried, _, _ = searched(profile=launching, options=long)
    assert tried[0].active_variants == {"compile": "default"}, "most of the step is what compiling may take away"


@pytest.mark.parametrize(
    "nothing",
    [
        Failure(kind="crash", message="the profiler crashed"),
        Profiled(device_type="cpu", split_problem="the disk is full"),
        profiled(host_step(matrix_products=1.0), device_type="mps"),
    ],
)
def test_where_a_profile_says_nothing_the_usual_order_stands(nothing: Profiled | Failure) -> None:
    tried, found, _ = searched(profile=nothing, options={"steps": 100_000})
    assert tried[0].active_variants == {"memory_format": "channels_last"}
    assert {row.max_speedup for row in found.values()} == {None}


def test_a_profile_is_not_taken_where_it_would_cost_too_much_or_decides_nothing() -> None:
    never = profiled(host_step(matrix_products=1.0))
    for options in ({"try_": "none"}, {"try_": "activation_checkpointing"}, {"objective": "memory"}):
        _, found, _ = searched(profile=never, options={"steps": 100_000, **options})
        assert {row.max_speedup for row in found.values()} <= {None}
    _, found, _ = searched(profile=never, options={"steps": 100_000}, budget=60.0)
    assert {row.max_speedup for row in found.values()} == {None}


def test_where_nothing_can_be_gained_nothing_is_tried() -> None:
    tried, found, winner = searched(update_share=0.01, options={"steps": 30, "try_": "optimizer_impl,compile"})
    assert not tried
    assert not winner.active_variants
    assert "1.0 % of a step" in str(found["optimizer_impl", "fused"].reason)
    assert searched(options={"try_": "none"})[:2] == ([], {})


def test_a_mode_that_alone_is_asked_for_is_tried_and_memory_does_not_count_seconds() -> None:
    tried, _, _ = searched(options={"try_": "reduce-overhead"})
    assert [setting.compile for setting in tried[:1]] == ["reduce-overhead"]
    tried, found, _ = searched({"default": 0.999}, options={"try_": "compile", "objective": "memory", "steps": 30})
    assert tried
    assert found["compile", "default"].status != "excluded"


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_longest_compilation_has_to_be_paid_back_on_any_number_of_ranks(num_ranks: int) -> None:
    eager = Setting(precision="bf16", batch_size=32)
    compiled = COMPILE.on(eager, "default")
    outcomes = [
        (eager, measurement(num_ranks * 100.0, step_seconds=0.32)),
        (compiled, measurement(num_ranks * 200.0, step_seconds=0.16, first_step_seconds=20.0)),
        # The compiler's cache is warm by then.
        (compiled, measurement(num_ranks * 200.0, step_seconds=0.16, first_step_seconds=4.0)),
    ]
    records = [
        Record(search_id="s", number=number, candidate=setting, purpose="search", outcome=outcome, seconds=30.0)
        for number, (setting, outcome) in enumerate(outcomes, 1)
    ]
    ledger = ledger_of(records, Space(candidates=(eager,), baseline=eager))
    assert ledger.break_even_steps(compiled) == pytest.approx(20.0 / (0.32 - 0.16))


@pytest.mark.parametrize(("has_fixed_samples", "is_worth"), [(False, True), (True, False)])
def test_a_larger_batch_has_fewer_steps_to_pay_back_where_samples_are_given(
    *, has_fixed_samples: bool, is_worth: bool
) -> None:
    """Of 10,000 steps of 8 samples, 625 of 128 are left."""
    eager = Setting(precision="bf16", batch_size=128)
    compiled = COMPILE.on(eager, "default")
    times = {
        eager: measurement(100.0, step_seconds=0.1),
        compiled: measurement(120.0, step_seconds=0.08, first_step_seconds=60.0),
    }
    records = [
        Record(search_id="s", number=number, candidate=setting, purpose="search", outcome=outcome, seconds=30.0)
        for number, (setting, outcome) in enumerate(times.items(), 1)
    ]
    baseline = Setting(precision="fp32", batch_size=8)
    space = Space(candidates=(eager, baseline), baseline=baseline)
    ledger = Ledger(space, records, num_steps=10_000, has_fixed_samples=has_fixed_samples)
    assert (compiled in ledger.merits) == is_worth


def test_what_is_ruled_out_is_nothing_to_pay_back_against() -> None:
    _, found, winner = searched(options={"steps": 100_000}, unfaithful="bf16")
    assert (winner.precision, winner.compile) == ("fp32", "default"), found["compile", "default"].reason


def test_a_command_has_its_placeholders_alone() -> None:
    options = SearchOptions.from_user(try_="compile")
    space = build_space(hardware({"fp32": 1.0}), described(), options)
    assert not any(space.variants.values())
    assert "placeholders" in space.variants_left_out["compile"]["default"]
    assert not any(space.variants_left_out["memory_format"])


@pytest.mark.parametrize("varying", [{}, {"batch_sizes_seen": (3, 8)}, {"has_worst_batch": True}])
def test_cudnn_times_its_algorithms_where_batches_have_one_shape_or_the_user_asks(varying: dict[str, Any]) -> None:
    known = described(variants={"cudnn_benchmark": {"on": None}}, **varying)
    for asked, expected in (("auto", not varying), ("cudnn_benchmark", True)):
        space = build_space(hardware({"fp32": 1.0}), known, SearchOptions.from_user(try_=asked))
        assert space.variants.get("cudnn_benchmark", ()) == (("on",) if expected else ())
        assert expected or "several shapes" in space.variants_left_out["cudnn_benchmark"]["on"]


def test_checkpointing_is_tried_at_the_batch_that_lacks_memory() -> None:
    options = {"effective_batch_size": "free", "batch_size": "8:128", "try_": "activation_checkpointing"}
    tried, found, winner = searched({"blocks": 0.99}, wall=32, options=options)
    assert [(setting.batch_size, setting.activation_checkpointing) for setting in tried] == [
        (64, "blocks"),
        (128, "blocks"),
    ]
    assert (winner.batch_size, winner.activation_checkpointing) == (128, "blocks"), "and then beside it"
    assert found["activation_checkpointing", "blocks"].beside == "bf16 batch 32"
    tried, _, winner = searched({"blocks": 0.5}, wall=32, options=options)
    assert (len(tried), winner.activation_checkpointing) == (1, "off")


def test_the_allocator_s_setting_is_tried_at_the_batch_that_lacks_memory() -> None:
    values: dict[str, dict[str, str | None]] = {"allocator": {"expandable_segments": None}}
    options = {"effective_batch_size": "free", "batch_size": "8:64", "try_": "auto"}
    tried, found, winner = searched({"expandable_segments": 1.0}, wall=32, options=options, values=values)
    assert (tried[0].batch_size, tried[0].allocator) == (64, "expandable_segments")
    assert (winner.batch_size, winner.allocator) == (64, "expandable_segments")
    assert found["allocator", "expandable_segments"].status == "chosen"
    tried, found, _ = searched(options=options, values=values)
    assert (tried, found["allocator", "expandable_segments"].status) == ([], "untried")
    assert "no larger batch" in str(found["allocator", "expandable_segments"].reason)
    in_memory = searched(options={**options, "objective": "memory"}, wall=32, values=values)[1]
    assert "allocated" in str(in_memory["allocator", "expandable_segments"].reason)


def test_fp8_is_tried_compiled_on_what_leads_and_takes_the_lead_by_its_better_recipe() -> None:
    gains = {"default": 1.0, "rowwise": 1.2, "tensorwise": 1.4}
    tried, found, winner = searched(gains, options=ALL_PRECISIONS, values=FP8, fp8_rate=4.0)
    in_fp8 = [setting for setting in tried if setting.precision == "fp8"]
    assert {setting.fp8_recipe for setting in in_fp8} == {"rowwise", "tensorwise"}
    assert all(setting.is_compiled for setting in in_fp8), "whatever bf16 gains by it"
    assert (winner.precision, winner.compile, winner.fp8_recipe) == ("fp8", "default", "tensorwise")
    assert str(winner) == "fp8 batch 32 tensorwise compiled (default)"
    row = found["fp8_recipe", "tensorwise"]
    assert (row.status, row.beside) == ("chosen", "bf16 batch 32")
    assert row.speedup == pytest.approx(1.4)
    assert found["fp8_recipe", "rowwise"].status == "tried"
    slower = searched(
        {"default": 1.0, "rowwise": 0.9, "tensorwise": 0.9}, options=ALL_PRECISIONS, values=FP8, fp8_rate=4.0
    )
    assert slower[2].precision == "bf16"


@pytest.mark.parametrize("is_bad", [True, False])
def test_compiling_alone_is_tried_before_fp8_whatever_a_profile_leaves_it(is_bad: bool) -> None:
    gains = {"default": 1.5, "rowwise": 0.8, "tensorwise": 0.8}
    mostly_products = profiled(host_step(matrix_products=0.6, optimizer=0.1, casts=0.1))
    failing = {"rowwise": FP8_FAILED, "tensorwise": FP8_FAILED} if is_bad else None
    tried, found, winner = searched(
        gains, options=ALL_PRECISIONS, values=FP8, fp8_rate=4.0, profile=mostly_products, failing=failing
    )
    assert (tried[0].precision, tried[0].compile) == ("bf16", "default")
    assert (winner.precision, winner.compile) == ("bf16", "default")
    assert found["compile", "default"].status == "chosen"
    assert found["fp8_recipe", "rowwise"].max_speedup is not None


def test_fp8_that_learns_something_else_is_excluded_with_what_the_check_says() -> None:
    gains = {"default": 1.0, "rowwise": 1.4, "tensorwise": 1.4}
    _, found, winner = searched(gains, options=ALL_PRECISIONS, values=FP8, fp8_rate=4.0, unfaithful="fp8")
    assert winner.precision == "bf16"
    assert {found["fp8_recipe", recipe].status for recipe in ("rowwise", "tensorwise")} <= {"excluded", "untried"}
    assert found["fp8_recipe", "rowwise"].status == "excluded"


def test_fp8_steps_down_to_what_is_around_its_layers() -> None:
    from autotune_amp.search.stages.fallbacks import missing_plans

    chosen = Setting(precision="fp8", batch_size=32, fp8_recipe="tensorwise", compile="default")
    ledger = Ledger(build_space(hardware({"fp32": 1.0, "bf16": 2.0}), described(), SearchOptions()), [])
    assert missing_plans(ledger, chosen) == [Setting(precision=name, batch_size=32) for name in ("bf16", "fp32")]


@pytest.mark.parametrize(
    ("options", "about", "rate", "word"),
    [
        ({}, {}, None, "--try fp8_recipe emulates it"),
        ({"precision": ["fp32", "bf16"]}, {}, 4.0, "--precision leaves fp8 out"),
        ({}, {"weights": "bf16"}, 4.0, "kept in bf16"),
        ({}, {"compile": {"default": "there is no C++ compiler"}}, 4.0, "there is no C++ compiler"),
        ({}, {"fp8_recipe": dict.fromkeys(("rowwise", "tensorwise"), "torchao is not installed")}, 4.0, "torchao"),
        ({}, {"compile": {"default": "it is so already"}}, 4.0, None),
        ({"try_": "fp8_recipe"}, {}, None, None),
        ({"try_": "tensorwise"}, {}, None, None),
    ],
)
def test_where_fp8_is_not_tried_the_reason_is_said(
    options: dict[str, Any], about: dict[str, Any], rate: float | None, word: str | None
) -> None:
    weights = about.get("weights", "fp32")
    values = FP8 | {name: found for name, found in about.items() if name != "weights"}
    device = hardware({"fp32": 1.0, "bf16": 2.0, "fp8": rate})
    space = build_space(device, described(variants=values, weights=weights), SearchOptions.from_user(**options))
    tried, why = space.variants["fp8_recipe"], space.variants_left_out["fp8_recipe"]
    if word is None:
        assert tried == (("tensorwise",) if options.get("try_") == "tensorwise" else ("rowwise", "tensorwise"))
    else:
        assert tried == ()
        assert all(word in reason for reason in why.values())
        assert set(why) == {"rowwise", "tensorwise"}


def test_what_goes_wrong_is_a_row_with_the_reason_and_the_rest_goes_on() -> None:
    crash = Failure(kind="crash", message="the compiler crashed")
    _, found, winner = searched(failing={"default": crash, "channels_last": crash}, options={"steps": 100_000})
    assert (found["compile", "default"].status, found["compile", "default"].reason) == ("crash", "the compiler crashed")
    assert winner.active_variants == {"optimizer_impl": "fused"}
    assert "the compiler failed" in (found["compile", "reduce-overhead"].reason or "")


def test_what_has_no_time_says_what_a_trial_takes() -> None:
    slow = Failure(kind="timeout", message="it was still compiling when its time was up")
    spent: dict[str, Any] = {"budget": 100.0, "options": {"steps": 100_000}, "is_budget_spent": True}
    tried, found, _ = searched(failing={"channels_last": slow}, **spent)
    assert tried[0].memory_format == "channels_last"
    assert len(tried) == 1, "the first used all of the time"
    assert found["compile", "default"].status == "untried"
    assert re.search(r"a trial takes \d+ s or more", str(found["compile", "default"].reason))


@pytest.mark.parametrize(
    ("given", "expected"),
    [("auto", None), ("none", ()), ("compile,channels_last", ("compile", "channels_last")), (["fused"], ("fused",))],
)
def test_try_names_dimensions_or_values(given: Any, expected: Any) -> None:
    options = SearchOptions.from_user(try_=given)
    assert options.variants == expected
    space = build_space(hardware({"fp32": 1.0}), described(variants=VALUES), options)
    named = {name: values for name, values in space.variants.items() if values}
    if expected == ("fused",):
        assert named == {"optimizer_impl": ("fused",)}
    assert ("weights" in named) is False


@pytest.mark.parametrize("given", ["speed", "compile,none", 3, ["compile", 1]])
def test_try_refuses_what_it_does_not_know(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="try_ is"):
        SearchOptions.from_user(try_=given)


def test_what_would_take_longer_than_it_may_gain_is_left_and_says_how_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "MIN_GAIN_PER_SECOND", 1.0)
    tried, found, _ = searched()
    assert tried == []
    assert found["compile", "default"].reason is not None
    assert "--try compile" in found["compile", "default"].reason
    tried, _, _ = searched(options={"try_": "compile"})
    assert {setting.compile for setting in tried} >= {"default"}, "what the user names is tried"


def test_one_failure_of_the_compiler_is_enough() -> None:
    broken = Failure(kind="workload_error", message="InductorError: no C++ compiler was found")
    tried, found, _ = searched(failing={"default": broken}, options={"steps": 100_000}, values=VALUES)
    assert sum(setting.is_compiled for setting in tried) == 1
    assert "the compiler failed" in (found["compile", "reduce-overhead"].reason or "")
    memory = Failure(kind="oom", message="it took more than its limit")
    _, found, _ = searched(failing={"default": memory}, options={"steps": 100_000})
    assert "the compiler failed" not in (found["compile", "reduce-overhead"].reason or "")


@pytest.mark.parametrize(("is_bound", "modes"), [(True, ["reduce-overhead"]), (False, ["default"])])
def test_where_launches_bound_the_step_cuda_graphs_are_tried_at_once(is_bound: bool, modes: list[str]) -> None:
    sizes = {16: 0.9 if is_bound else 0.5, 32: 1.0}
    space = build_space(
        hardware({"fp32": 1.0, "bf16": 2.0}),
        described(batch_size=32, variants={"compile": {"default": None, "reduce-overhead": None}}),
        SearchOptions.from_user(precision=["fp32", "bf16"], steps=100_000),
    )
    records = [
        Record(
            search_id="s",
            number=number,
            candidate=Setting(precision="bf16", batch_size=size),
            purpose="search",
            outcome=measurement(size / step_seconds, 2**28, step_seconds=step_seconds),
            seconds=1.0,
        )
        for number, (size, step_seconds) in enumerate(sizes.items())
    ]
    ledger = Ledger(space, records, num_steps=100_000)
    assert [
        mode for mode in ("default", "reduce-overhead") if reason_not_to_try(ledger, COMPILE, mode) is None
    ] == modes

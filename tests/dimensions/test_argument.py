"""Arguments of a command that the user made dimensions: what becomes of each value in a search, and in its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from scripted_backend import ScriptedSearch, all_well, described, fidelity, hardware, measured, out_of_memory

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import CheckOutcome, Failure, GradientDamage, Measurement, Outcome
from autotune_amp.core.recommendation import VariantRow
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import numerics_of
from autotune_amp.dimensions.argument import Argument
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.ranking import check_key
from autotune_amp.search.space import build_space
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.variants import NO_DIFFERENCE, Variants, is_worth_trying, variant_rows
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Check, Trial

VALUES = {"attn": ("sdpa", "eager", "flash"), "!ckpt": ("off", "on"), "compile": ("no", "yes")}
FP32 = Setting(precision="fp32", batch_size=32)


def value_of(setting: Setting, name: str) -> str:
    return Argument(name, VALUES[name]).read(setting)


def searched(
    answer: Callable[[Setting, Measurement], Outcome],
    *,
    check_answer: Callable[[Check], CheckOutcome] = all_well,
    values: Mapping[str, tuple[str, ...]] = VALUES,
    wall: int = 1000,
    folder: Path | None = None,
    **options: Any,
) -> tuple[ScriptedSearch, dict[tuple[str, str], VariantRow], Setting]:
    """The search of a command with these placeholders; a row for each value, and what would win."""

    def run(spec: Trial) -> Outcome:
        setting = spec.candidate
        if setting.batch_size > wall and value_of(setting, "!ckpt") == "off":
            return out_of_memory()
        rate = {"fp32": 100.0, "bf16": 200.0}[setting.precision] * setting.batch_size / (setting.batch_size + 8)
        losses = tuple(1 / (number + setting.batch_size) for number in range(4))
        return answer(setting, replace(measured(spec, rate), first_losses=losses))

    device = hardware({"fp32": 1.0, "bf16": 2.0})
    about = described(batch_size=32, argument_values=dict(values), checks=("fidelity",))
    asked = SearchOptions.from_user(**{"precision": ["fp32", "bf16"], "try_": "auto", "steps": 10_000, **options})
    space = build_space(device, about, asked)
    search = ScriptedSearch(
        space, run, 1000.0, check_answer=check_answer, device=device, description=about, folder=folder
    )
    search.explore(is_checked=True)
    search.run(Variants(Checks()))
    shortlist = search.ledger.final_shortlist
    assert shortlist is not None
    with Study.open(search.storage, "scripted", search.ledger) as study:
        study.catch_up(search.ledger, is_over=True)
        parameters = [trial.params for trial in study._study.trials]
    tried = {r.candidate for r in search.ledger.trials}
    for name in values:
        seen = {each[name.lstrip("!")] for each in parameters if name.lstrip("!") in each}
        assert seen >= {value_of(setting, name) for setting in tried if setting.has_variants}
    rows = variant_rows(search.ledger, shortlist.winner, is_budget_spent=False)
    return search, {(row.name, row.value): row for row in rows}, shortlist.winner


def faster(measurement: Measurement, factor: float, **fields: object) -> Measurement:
    step = measurement.step_seconds / factor
    times = {"step_seconds": step, "step_seconds_interval": (step, step), "raw_step_seconds": (step,) * 8}
    return replace(measurement, samples_per_second=measurement.samples_per_second * factor, **{**times, **fields})


def test_each_value_is_tried_on_the_winner_and_what_wins_is_kept_together() -> None:
    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        if value_of(setting, "attn") == "flash":
            return Failure(kind="workload_error", message="ImportError: no flash here")
        gain = {"sdpa": 1.0, "eager": 1.2}[value_of(setting, "attn")] * (
            1.0 if value_of(setting, "compile") == "no" else 1.1
        )
        losses = tuple(loss * gain for loss in measurement.first_losses)
        return faster(measurement, gain, first_losses=losses)

    search, rows, winner = searched(answer)
    assert winner.arguments == (("attn", "eager"), ("compile", "yes"))
    assert str(winner) == f"bf16 batch {winner.batch_size} attn=eager compile=yes"
    fates = {key: row.status for key, row in rows.items()}
    assert fates == {
        ("attn", "eager"): "chosen",
        ("attn", "flash"): "workload_error",
        ("ckpt", "on"): "tried",
        ("compile", "yes"): "chosen",
    }
    assert "no flash" in (rows["attn", "flash"].reason or "")
    assert rows["attn", "eager"].speedup == pytest.approx(1.2)
    checked = [check.candidate.arguments for check in search.backend.checks if check.candidate.arguments]
    assert (("attn", "eager"), ("compile", "yes")) in checked


def test_an_unfaithful_value_is_not_kept_and_one_that_affects_no_numerics_is_not_checked() -> None:
    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        return faster(measurement, 1.0 + 0.5 * len(setting.arguments))

    def check_answer(check: Check) -> CheckOutcome:
        is_bad = any(name in ("attn", "compile") for name, _ in check.candidate.arguments)
        return fidelity(check.candidate.precision, "unfaithful") if is_bad else all_well(check)

    search, rows, winner = searched(answer, check_answer=check_answer)
    assert winner.arguments == (("!ckpt", "on"),)
    assert rows["attn", "eager"].status == "excluded"
    assert all("!ckpt" not in dict(check.candidate.arguments) for check in search.backend.checks)


def test_a_value_that_changes_nothing_is_said_to_and_not_kept() -> None:
    _, rows, winner = searched(lambda _, measurement: measurement)
    assert winner.arguments == ()
    assert rows["attn", "eager"].reason == NO_DIFFERENCE
    assert rows["ckpt", "on"].reason == NO_DIFFERENCE


def test_a_value_that_frees_memory_has_an_effect() -> None:
    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        is_on = value_of(setting, "!ckpt") == "on"
        return replace(measurement, peak_memory_bytes=measurement.peak_memory_bytes // (2 if is_on else 1))

    assert searched(answer)[1]["ckpt", "on"].reason is None


@pytest.mark.parametrize("error", [0.0, 1e-7])
def test_without_losses_equal_gradients_tell_that_a_value_changes_nothing(error: float) -> None:
    def check_answer(check: Check) -> CheckOutcome:
        worst = GradientDamage(name="a", noise_ratio=error, cosine=1.0, norm_ratio=1.0, flushed_share=0.0)
        found = fidelity(check.candidate.precision)
        return replace(found, noise_ratio=error, loss_error=0.0, worst_parameters=(worst,))

    _, rows, _ = searched(
        lambda _, measurement: replace(measurement, first_losses=()), check_answer=check_answer, precision=["fp32"]
    )
    assert (rows["attn", "eager"].reason == NO_DIFFERENCE) is (error == 0.0)


def test_memory_that_a_value_frees_goes_into_a_larger_batch_also_beside_a_later_leader() -> None:
    values = {"!ckpt": ("off", "on"), "compile": ("no", "yes")}

    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        is_on, is_compiled = (("!ckpt", "on") in setting.arguments, ("compile", "yes") in setting.arguments)
        gain = (0.98 if is_on else 1.0) * (1.2 if is_compiled else 1.0)
        losses = tuple(loss * gain for loss in measurement.first_losses)
        peak = measurement.peak_memory_bytes // (2 if is_on else 1)
        return faster(measurement, gain, first_losses=losses, peak_memory_bytes=peak)

    _, rows, winner = searched(answer, values=values, wall=16, effective_batch_size="free", baseline="fp32:16")
    assert winner.batch_size > 16
    assert winner.arguments == (("!ckpt", "on"), ("compile", "yes"))
    assert rows["ckpt", "on"].status == "chosen"


def test_memory_that_a_value_frees_goes_into_a_larger_batch() -> None:
    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        is_on = value_of(setting, "!ckpt") == "on"
        gain = 0.98 if is_on else 1.0
        return faster(measurement, gain, peak_memory_bytes=measurement.peak_memory_bytes // (2 if is_on else 1))

    _, rows, winner = searched(answer, wall=16, effective_batch_size="free", baseline="fp32:16")
    assert winner.batch_size > 16
    assert winner.arguments == (("!ckpt", "on"),)
    assert rows["ckpt", "on"].status == "chosen"


def test_samples_of_another_length_are_compared_by_their_tokens() -> None:
    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        is_short = value_of(setting, "attn") == "eager"  # half as long, in more than half of the time
        gain = 1.6 if is_short else 1.0
        length = 64 if is_short else 128
        tokens = measurement.samples_per_second * gain * length
        num_first = 8 * setting.effective_batch_size * length
        return faster(measurement, gain, tokens_per_second=tokens, num_first_tokens=num_first)

    search, rows, winner = searched(answer)
    assert (search.ledger.requested_objective, search.ledger.objective) == ("speed", "tokens")
    assert winner.arguments == ()
    assert rows["attn", "eager"].speedup == pytest.approx(0.8)


def test_padding_that_differs_from_run_to_run_is_no_other_length() -> None:
    lengths = iter(range(60, 1000))

    def answer(setting: Setting, measurement: Measurement) -> Outcome:
        tokens = measurement.samples_per_second * next(lengths)
        return faster(measurement, 1.0, tokens_per_second=tokens, num_first_tokens=64 * setting.effective_batch_size)

    search, _, _ = searched(answer)
    assert search.ledger.objective == "speed"


def test_a_value_that_the_user_wrote_down_is_worth_any_start() -> None:
    search, _, winner = searched(lambda _, measurement: measurement)
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=True, ready_seconds=600.0)
    asked, unasked = replace(winner, arguments=(("attn", "flash"),)), replace(winner, memory_format="channels_last")
    assert is_worth_trying(search.ledger, search.planner, asked)
    assert not is_worth_trying(search.ledger, search.planner, unasked)


def test_no_value_is_tried_on_request() -> None:
    search, rows, _ = searched(lambda _, measurement: measurement, try_="none")
    assert not any(record.candidate.arguments for record in search.ledger.trials)
    assert {row.status for row in rows.values()} == {"untried"}


def test_a_setting_is_read_back_and_its_numerics_leave_out_what_affects_none() -> None:
    config = AmpConfig(precision="fp32", batch_size=8, arguments=(("attn", "eager"), ("!ckpt", "on")))
    assert config.arguments == (("!ckpt", "on"), ("attn", "eager"))
    assert AmpConfig.from_json(config.to_json()) == config
    assert numerics_of(config).arguments == (("attn", "eager"),)
    assert check_key(Setting.of(config)) != check_key(replace(Setting.of(config), arguments=()))
    with pytest.raises(InvalidRequestError, match="arguments"):
        AmpConfig(precision="fp32", batch_size=8, arguments=(("attn",),))  # type: ignore[arg-type]
    assert msgspec.json.decode(msgspec.json.encode(config), type=AmpConfig) == config

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune_amp.command import messages
from autotune_amp.command.measure import samples_per_step
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.settable import (
    batches_in,
    deviation,
    keeps_effective_batch_size,
    missing_placeholders,
    probing_setting,
    raise_if_data_parallel,
    unsettable,
)
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting

TODAY = Setting(precision="fp32", batch_size=8)
OF_RANK: dict[str, Any] = {"pid": 1, "time": 0.0, "rank": 0, "world": 1}


def seen(
    *,
    samples: int = 8,
    loader_size: int | None = 8,
    has_loader: bool = True,
    region: str | None = None,
    has_scaler: bool = False,
    in_framework: tuple[str, ...] = (),
    batches: Sequence[int] = (1,) * 10,
) -> Rank:
    """A rank that took ten steps, one a second, each of so many `batches` of `samples` each."""
    rank = Rank(1)
    rank.optimizers[0] = messages.Optimizer(
        **OF_RANK, index=0, name="SGD", num_parameters={"float32": 9}, devices=("cpu",),
        uses_tf32=False, line="t.py:1",
    )  # fmt: skip
    if has_loader:
        rank.loaders["0"] = messages.Loader(
            pid=1, time=0.0, index="0", maker="t.py:f:1", line="t.py:1", batch_size=loader_size, num_workers=0,
            prefetch_factor=None, shuffles=True, num_samples=100,
        )  # fmt: skip
    if has_scaler:
        rank.scalers.append(messages.Scaler(pid=1, time=0.0))
    if in_framework:
        names = dict.fromkeys(in_framework, "argument")
        rank.switches.append(
            messages.Switch(pid=1, time=0.0, owner="Trainer", arguments=names, today={}, parser="", script="t")
        )
    rank.steps = [
        messages.Step(
            pid=1, time=float(number), optimizer=0, is_skipped=False, losses=(1.0,),
            num_backward=sum(batches[: number + 1]),
            forwards=(("Linear", samples, "float32"),) * batches[number] if number < 3 else (),
            regions=() if region is None else (region,),
            num_samples={"0": samples * sum(batches[: number + 1])} if has_loader else {},
            num_batches=sum(batches[: number + 1]) if has_loader else 0,
            wait_seconds=0.0, num_compilations=0, is_settled=True,
        )
        for number in range(10)
    ]  # fmt: skip
    return rank


@pytest.mark.parametrize(("num_gpus", "is_refused"), [(0, False), (1, False), (2, True)])
def test_a_trainer_that_multiplies_its_batch_by_the_gpus_is_refused(num_gpus: int, is_refused: bool) -> None:
    rank = seen(in_framework=("batch_size",))
    rank.switches[0] = replace(rank.switches[0], today={"n_gpu": num_gpus})
    with pytest.raises(WorkloadError, match="torchrun") if is_refused else nullcontext():
        raise_if_data_parallel(rank)


@pytest.mark.parametrize(
    ("command", "about", "expected"),
    [
        ("t {batch_size=8} {precision=fp32} {accumulation_steps=1}", {}, set()),
        ("t {batch_size=8} {precision=fp32}", {}, {"accumulation_steps"}),
        ("t", {}, {"fp16", "fp8", "accumulation_steps"}),
        ("t", {"has_scaler": True}, {"fp8", "accumulation_steps"}),
        ("t", {"in_framework": ("precision", "batch_size", "accumulation_steps"), "has_loader": False}, {"fp8"}),
        ("t {precision:bf16=--bf16|fp32=}", {}, {"tf32", "fp16", "fp8", "accumulation_steps"}),
        ("t {precision=fp32}", {"has_loader": False}, {"batch_size", "accumulation_steps"}),
        ("t {precision=fp32}", {"loader_size": None}, {"batch_size", "accumulation_steps"}),
        ("t {batch_size=8} {precision=fp32}", {"has_loader": False}, {"accumulation_steps"}),
    ],
)
def test_what_cannot_be_set(command: str, about: dict[str, Any], expected: set[str]) -> None:
    found = unsettable(CommandTemplate.of(command), seen(**about))
    assert set(found) == expected
    assert all(found.values())


@pytest.mark.parametrize(
    ("command", "owner", "is_settable"),
    [
        ("t --gradient_accumulation_steps 4", "Accelerator.accumulate", False),
        ("t --gradient_accumulation_steps {accumulation_steps=4}", "Accelerator.accumulate", True),
        ("t --steps 4", "Accelerator.accumulate", True),
        ("accelerate launch --gradient_accumulation_steps 4 t.py --lr 1", "Accelerator.accumulate", True),
        ("accelerate launch --gradient_accumulation_steps 4 -m pkg.t", "Accelerator.accumulate", True),
        ("accelerate launch --cpu t.py --gradient_accumulation_steps=4", "Accelerator.accumulate", False),
        ("t --gradient_accumulation_steps 4", "TrainingArguments", True),
    ],
)
def test_an_accumulation_that_the_script_reads_beside_accelerate_is_not_set(
    command: str, owner: str, is_settable: bool
) -> None:
    """The script derives its number of steps from the argument."""
    rank = seen(in_framework=("accumulation_steps",))
    rank.switches[0] = replace(rank.switches[0], owner=owner)
    assert ("accumulation_steps" not in unsettable(CommandTemplate.of(command), rank)) is is_settable


@pytest.mark.parametrize(
    ("command", "cannot", "num_workers", "expected"),
    [
        (
            "t",
            {"accumulation_steps", "fp16", "fp8"},
            2,
            {"{precision=fp32}", "{num_workers=2}", "{accumulation_steps=1}"},
        ),
        ("t", {"batch_size", "fp8"}, None, {"{batch_size=8}"}),
        ("t {num_workers=2} {precision:bf16=--bf16|fp32=}", {"fp16", "tf32"}, 2, set()),
    ],
)
def test_placeholders_that_would_let_it_try_more_have_todays_values(
    command: str, cannot: set[str], num_workers: int | None, expected: set[str]
) -> None:
    line = CommandTemplate.of(command)
    assert set(missing_placeholders(line, TODAY, num_workers, dict.fromkeys(cannot, "no"))) == expected


@pytest.mark.parametrize(
    ("cannot", "expected"),
    [
        ({}, ("bf16", 4)),
        ({"bf16": "no"}, ("fp32", 4)),
        ({"batch_size": "no"}, ("bf16", 8)),
        ({"batch_size": "no", "bf16": "no"}, None),
        ({"accumulation_steps": "no"}, ("bf16", 4)),  # then another total is tried too
    ],
)
def test_a_probe_changes_all_that_can_be_changed(cannot: dict[str, str], expected: tuple[str, int] | None) -> None:
    found = probing_setting(TODAY, cannot)
    assert (found and (found.precision, found.batch_size)) == expected


@pytest.mark.parametrize(("batch", "expected"), [(8, 16), (24, 8), (64, 32)])
def test_a_probe_of_ranks_that_divide_a_batch_gives_each_of_them_the_same(batch: int, expected: int) -> None:
    found = probing_setting(Setting(precision="fp32", batch_size=batch), {}, num_sharing=8)
    assert found is not None
    assert found.batch_size == expected


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_probe_makes_another_number_of_samples_than_today_whatever_is_ignored(batch: int, steps: int) -> None:
    today = Setting(precision="fp32", batch_size=batch, accumulation_steps=steps)
    found = probing_setting(today, {})
    assert found is not None
    ignored = {batch * steps, batch * found.accumulation_steps, found.batch_size * steps}
    assert found.effective_batch_size not in ignored


def test_a_probe_of_a_script_that_accumulates_makes_up_its_total() -> None:
    cannot = {"accumulation_steps": "it has no placeholder"}
    for batch, steps, expected in ((16, 4, 8), (7, 4, 2), (1, 4, 2), (5, 3, 1), (16, 1, None)):
        today = Setting(precision="bf16", batch_size=batch, accumulation_steps=steps)
        found = probing_setting(today, cannot, is_batch_free=False)
        assert found is not None
        assert (found.batch_size, found.accumulation_steps) == (expected or batch, steps)


RAMP = (1, 1, 1, 1, 2, 2, 2, 3, 3, 3)
FOURS = (4,) * 10
ALONE = {"is_accumulation_own": True}


@pytest.mark.parametrize("has_loader", [True, False])
@pytest.mark.parametrize(
    ("asked", "batches", "how", "named"),
    [
        ((8, 4), FOURS, {}, ()),
        ((8, 2), FOURS, {}, ("32 samples", "4 batches of 8", "16 (8 x 2)", "{accumulation_steps}")),
        ((4, 4), FOURS, {}, ("32 samples", "batches of 8", "16 (4 x 4)", "{batch_size}")),
        # The script decides how many passes a step has: only their size is asked for.
        ((8, 1), FOURS, ALONE, ()),
        ((8, 1), RAMP, ALONE, ()),
        ((4, 4), FOURS, ALONE, ("batches of 8", "{batch_size}")),
        ((4, 1), RAMP, ALONE, ("batches of 8", "{batch_size}")),
    ],
)
def test_batches_and_their_number_are_held_against_what_was_asked_for(
    asked: tuple[int, int], batches: Sequence[int], how: dict[str, bool], named: tuple[str, ...], has_loader: bool
) -> None:
    line = CommandTemplate.of("t {batch_size=8} {accumulation_steps=1}")
    setting = Setting(precision="fp32", batch_size=asked[0], accumulation_steps=asked[1])
    found = deviation(line, setting, seen(batches=batches, has_loader=has_loader), **how)
    assert (found is None) is (not named)
    assert found is None or all(word in found.message for word in named), found


def test_a_script_that_keeps_its_total_is_held_to_it_and_to_the_size_of_its_batches() -> None:
    line = replace(CommandTemplate.of("t {batch_size=8}"), keeps_effective_batch_size=True)
    for batch, steps, batches, is_right in (
        (8, 4, FOURS, True),
        (4, 8, FOURS, False),
        (8, 2, FOURS, False),
        (8, 1, RAMP, True),
    ):
        setting = Setting(precision="fp32", batch_size=batch, accumulation_steps=steps)
        assert (deviation(line, setting, seen(batches=batches)) is None) is is_right


@pytest.mark.parametrize(
    ("batches", "other_size", "other_batches", "expected"),
    [
        (FOURS, 4, (8,) * 10, True),
        (FOURS, 4, FOURS, False),
        (FOURS, 8, FOURS, False),
        (RAMP, 4, (8,) * 10, False),
        (FOURS, 4, (6, 8, 10, 8, 6, 8, 10, 8, 6, 8), False),
        ((4, 4, 4, 4, 4, 6, 4, 4, 4, 4), 4, (8,) * 10, True),  # an epoch ended
    ],
)
def test_which_script_keeps_its_total(
    batches: Sequence[int], other_size: int, other_batches: Sequence[int], expected: bool
) -> None:
    today = Setting(precision="fp32", batch_size=8, accumulation_steps=4)
    other = replace(today, batch_size=other_size)
    ranks = seen(batches=batches), seen(samples=other_size, loader_size=other_size, batches=other_batches)
    assert keeps_effective_batch_size(today, ranks[0], other, ranks[1]) is expected


def test_a_script_that_changes_its_accumulation_says_so() -> None:
    reason = unsettable(CommandTemplate.of("t {batch_size=8}"), seen(batches=RAMP))["accumulation_steps"]
    assert "changes" in reason
    assert "3 were seen" in reason


def test_the_last_batch_of_an_epoch_is_no_deviation() -> None:
    rank = seen()
    for number in range(4, 10):
        step = rank.steps[number]
        values = {name: getattr(step, name) for name in step.__struct_fields__}
        rank.steps[number] = messages.Step(**{**values, "num_samples": {"0": 8 * (number + 1) - 5}})  # one of three
    assert samples_per_step(rank) == 8
    assert deviation(BOTH, TODAY, rank) is None


def test_loader_workers_that_were_not_started() -> None:
    asked = Setting(precision="fp32", batch_size=8, num_workers=2)
    found = deviation(CommandTemplate.of("t {num_workers=0}"), asked, seen())
    assert found is not None
    assert "0 workers, but 2" in found.message


def test_a_batch_of_one_is_doubled() -> None:
    found = probing_setting(Setting(precision="fp32", batch_size=1), {})
    assert found is not None
    assert found.batch_size == 2


BOTH = CommandTemplate.of("t {batch_size=8} {precision=fp32}")


@pytest.mark.parametrize(
    ("asked", "about", "kind", "named"),
    [
        (("fp32", 8), {}, None, ()),
        (("bf16", 8), {"region": "cpu:bfloat16"}, None, ()),
        (("tf32", 8), {}, None, ()),
        (("fp32", 4), {}, "workload_error", ("8", "4", "{batch_size}")),
        (("bf16", 8), {}, "unsupported", ("fp32", "bf16", "{precision}")),
        (("fp32", 8), {"region": "cpu:bfloat16"}, "unsupported", ("bf16", "fp32")),
        (("fp16", 8), {"region": "cpu:bfloat16"}, "unsupported", ("bf16", "fp16")),
        # Of another device: it is no evidence.
        (("bf16", 8), {"region": "cuda:bfloat16"}, "unsupported", ("fp32", "bf16")),
        (("fp32", 4), {"has_loader": False}, "workload_error", ("8", "4")),
    ],
)
def test_what_ran_is_held_against_what_was_asked_for(
    asked: tuple[Precision, int], about: dict[str, Any], kind: str | None, named: tuple[str, ...]
) -> None:
    found = deviation(BOTH, Setting(precision=asked[0], batch_size=asked[1]), seen(**about))
    assert (found and found.kind) == kind
    assert found is None or (isinstance(found, Failure) and all(word in found.message for word in named))


def test_batches_that_the_scripts_own_sampler_makes_may_vary() -> None:
    line, own = CommandTemplate.of("t {accumulation_steps=4}"), {"is_batch_size_own": True}
    asked = Setting(precision="fp32", batch_size=3, accumulation_steps=4)
    assert deviation(line, asked, seen(batches=FOURS), **own) is None
    found = deviation(line, replace(asked, accumulation_steps=2), seen(batches=FOURS), **own)
    assert found is not None
    assert "{accumulation_steps}" in found.message
    assert deviation(CommandTemplate.of("t"), asked, seen(), **own, **ALONE) is None


def test_ranks_may_divide_a_batch_among_them() -> None:
    asked = Setting(precision="fp32", batch_size=16)
    assert deviation(BOTH, asked, seen()) is not None
    assert deviation(BOTH, asked, seen(), num_sharing=2) is None
    assert deviation(BOTH, TODAY, seen(), num_sharing=2) is not None


def test_without_a_loader_it_is_said_what_was_counted() -> None:
    asked = Setting(precision="fp32", batch_size=4)
    counted = [deviation(BOTH, asked, seen(has_loader=has_loader)) for has_loader in (True, False)]
    assert [each is not None and "leading dimension" in each.message for each in counted] == [False, True]


@pytest.mark.parametrize(
    ("num_samples", "batch_size", "expected"), [(8, 8, 1), (32, 8, 4), (31.7, 8, 4), (35, 20, 1), (4, 8, 1)]
)
def test_samples_that_are_no_number_of_batches_are_not_accumulated(
    num_samples: float, batch_size: int, expected: int
) -> None:
    assert batches_in(num_samples, batch_size) == expected


def test_where_nothing_shows_the_precision_nothing_is_said() -> None:
    rank = seen()
    for number, step in enumerate(rank.steps):
        values = {name: getattr(step, name) for name in step.__struct_fields__}
        rank.steps[number] = messages.Step(**{**values, "forwards": (), "num_compilations": 1})
    assert deviation(BOTH, Setting(precision="bf16", batch_size=8), rank) is None

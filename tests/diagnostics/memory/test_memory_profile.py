"""What is said of what was measured: rows, what would free memory, and the words and tables that people read."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import MIB, breakdown
from msgspec.structs import replace
from rich.console import Console

from autotune_amp import profile_memory
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.memory.profile_memory import SettingMemory, largest_batch, make_rows, savings
from autotune_amp.diagnostics.memory.results import (
    MemoryBreakdown,
    MemoryProfile,
    activations_by_group,
    facts,
    largest_line,
    parts,
)
from autotune_amp.report.diagnostics import print_memory

GIB = 2**30


def setting(precision: Precision, batch_size: int = 32, **arguments: str) -> Setting:
    return Setting(precision=precision, batch_size=batch_size, arguments=tuple(arguments.items()))


FP32 = breakdown(100 * MIB)
BF16 = breakdown(70 * MIB, {"blocks.0.mlp": 4, "blocks.1.mlp": 4}, cast_weights_bytes=5 * MIB)
TAKEN: dict[int, int | None] = {32: 100 * MIB, 64: 150 * MIB, 128: 260 * MIB}
ROWS = make_rows(
    ("fp32", "bf16", "fp16", "tf32"),
    {"tf32": "the [red]device[/red] has none"},
    {
        setting("fp32"): SettingMemory(FP32, TAKEN),
        setting("bf16"): SettingMemory(BF16, {32: 70 * MIB}, "the loader has one size"),
        setting("fp16"): SettingMemory(Failure(kind="oom", message="it took all"), {32: None}),
    },
    500 * MIB,
    GIB,
    None,
)
PROFILE = MemoryProfile(
    workload="train.py:workload",
    device="cuda:0",
    device_name="A card",
    batch_size=32,
    accumulation_steps=2,
    rows=ROWS,
    limit_bytes=500 * MIB,
    notes=("Something was assumed.",),
    snapshot="/tmp/memory.pickle",
)


# --- what would free memory ------------------------------------------------------------------------------------------


def freed(found: MemoryBreakdown = FP32, batch_size: int = 32) -> dict[str, int]:
    breakdowns = {setting("fp32", batch_size): found, setting("bf16", batch_size): BF16}
    told = savings(setting("fp32", batch_size), breakdowns, None)
    return {saving.kind: saving.num_bytes // MIB for saving in told}


def test_each_saving_is_what_the_numbers_have_of_it_and_the_most_is_first() -> None:
    assert list(freed().items()) == [
        ("precision", 30),  # as measured
        ("optimizer_state", 20),
        ("batch_size", 11),  # half of the activations and of the batch
        ("activation_checkpointing", 8),  # 8 and 12 of two blocks, of which one at a time is computed again
    ]


def test_what_frees_nothing_is_not_named() -> None:
    nothing = breakdown(60 * MIB, {}, optimizer_state_bytes=0, checkpointable_modules=(), batch_bytes=0)
    assert freed(nothing) == {}
    assert "batch_size" not in freed(batch_size=1)


def test_half_the_batch_is_by_the_slope_where_that_was_measured() -> None:
    largest = largest_batch({32: 100 * MIB, 64: 132 * MIB}, GIB, GIB, None)
    (half,) = [s for s in savings(setting("fp32"), {setting("fp32"): FP32}, largest) if s.kind == "batch_size"]
    assert half.num_bytes == 16 * MIB
    assert "batch 16 with twice" in half.what


# --- rows and words --------------------------------------------------------------------------------------------------


def test_a_row_for_each_precision_and_its_reason() -> None:
    fp32, bf16, fp16, tf32 = PROFILE.rows
    assert fp32.largest is not None
    assert fp32.largest.model_error == pytest.approx(250 / 260 - 1)
    assert (bf16.largest, bf16.reason) == (
        None,
        "the largest batch is unknown: the loader has one size",
    )
    assert (fp16.breakdown, fp16.failure, fp16.reason) == (None, "oom", "it took all")
    assert (tf32.breakdown, tf32.failure, tf32.reason) == (None, None, "the [red]device[/red] has none")
    assert PROFILE.row("bf16") is bf16
    with pytest.raises(KeyError):
        PROFILE.row("fp8")


def test_what_fits_is_told_where_todays_batch_does_not() -> None:
    ran_out = SettingMemory(Failure(kind="oom", message="it took all"), {64: None, 32: 100 * MIB, 48: 150 * MIB})
    rows = make_rows(("fp32",), {}, {setting("fp32", 64): ran_out}, 200 * MIB, GIB, None)
    found = dict(facts(replace(PROFILE, rows=rows, limit_bytes=200 * MIB)))
    assert "fp32: batch 6" in found["fits"]
    assert "out of memory" in found["fp32"]
    assert "batch 6" in printed(replace(PROFILE, rows=rows, limit_bytes=200 * MIB), 80)


def test_another_value_of_an_argument_has_a_row_and_what_it_frees_is_told() -> None:
    shorter, refused = setting("fp32", seq="16"), setting("fp32", seq="banana")
    runs = {
        setting("fp32"): SettingMemory(FP32, TAKEN),
        setting("bf16"): SettingMemory(BF16, TAKEN),
        shorter: SettingMemory(breakdown(60 * MIB), {32: 60 * MIB, 64: 70 * MIB, 128: 90 * MIB}),
        refused: SettingMemory(Failure(kind="workload_error", message="no number"), {}),
    }
    rows = make_rows(("fp32", "bf16"), {}, runs, 500 * MIB, GIB, None)
    profile = replace(PROFILE, rows=rows)
    assert [row.label for row in rows] == ["fp32", "bf16", "fp32 seq=16", "fp32 seq=banana"]
    assert profile.row("fp32") is rows[0]
    fp32, bf16, short, failed = rows
    assert [(s.num_bytes // MIB, s.what) for s in fp32.savings if s.kind == "argument"] == [(40, "seq=16, as measured")]
    assert not [s for s in bf16.savings if s.kind == "argument"]  # measured in fp32 only
    assert fp32.largest is not None
    assert short.largest is not None
    assert (short.largest.batch_size or 0) > (fp32.largest.batch_size or 0)
    assert failed.reason == "no number"
    text = printed(profile)
    assert "fp32 seq=16" in text
    assert "fp32 seq=banana" in text


def test_modules_that_differ_in_an_index_alone_are_one() -> None:
    names = {"layers.0.norm": 1, "layers.11.norm": 2, "head": 3, "": 4, "conv2d.0": 5, "0": 6}
    found = activations_by_group(breakdown(modules=names))
    assert {name: num // MIB for name, num in found.items()} == {
        "layers.*.norm (2)": 3,
        "head": 3,
        "outside of modules, e.g. the loss": 4,
        "conv2d.* (1)": 5,
        "* (1)": 6,
    }


@given(
    st.dictionaries(
        st.from_regex(r"([a-z]{1,3}|[0-9]{1,2})(\.([a-z]{1,3}|[0-9]{1,2})){0,3}", fullmatch=True), st.integers(0, 9)
    )
)
def test_the_groups_hold_all_activations(names: dict[str, int]) -> None:
    found = breakdown(modules=names)
    assert activations_by_group(found).total() == found.activations_bytes


def test_the_parts_of_a_precision_are_its_peak() -> None:
    table = {label: cells for label, *cells in parts(PROFILE)}
    assert "buffers" not in table
    assert table["peak"] == ["100 MiB", "70.0 MiB"]
    assert table["not held at once"] == ["-6.00 MiB"] * 2
    assert table["weights cast by autocast"] == ["0 B", "5.00 MiB"]


def printed(profile: MemoryProfile, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        print_memory(profile, console)
    return capture.get()


def test_the_brackets_of_an_arguments_value_are_in_the_heading_of_its_column() -> None:
    row = replace(PROFILE.row("fp32"), arguments=(("data", "[/mnt/a]"),))
    assert "fp32 data=[/mnt/a]" in printed(replace(PROFILE, rows=(*PROFILE.rows, row)))


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("train.py:workload: ", ["2 batches of 32 samples", "cuda:0 (A card)"]),
        ("optimizer state: ", ["20.0 MiB, 20.0 MiB"]),
        ("blocks.*.mlp (2): ", ["16.0 MiB, 8.00 MiB"]),
        ("fp16: ", ["out of memory: it took all"]),
        ("tf32: ", ["[red]device[/red]"]),
        ("fits: fp32: ", ["batch 267 in 500 MiB", "4 % too low at batch 128", "256"]),
        ("frees: fp32: up to 30.0 MiB", ["bf16"]),
        ("frees: fp32: up to 20.0 MiB", ["AdamW"]),
        ("snapshot: ", ["/tmp/memory.pickle", "memory_viz"]),
        ("note: ", ["Something was assumed."]),
    ],
)
def test_in_words_and_on_a_terminal_of_80_columns(start: str, words: list[str]) -> None:
    (line,) = [line for line in PROFILE.explain().splitlines() if line.startswith(start)]
    assert [word for word in words if word not in line] == []
    shown = printed(PROFILE)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert words[-1].split()[0].rstrip(",") in shown


def test_what_the_allocator_holds_is_said_of_a_card() -> None:
    (row, *_) = ROWS
    card = replace(PROFILE, rows=(replace(row, breakdown=breakdown(100 * MIB, allocated_bytes=75 * MIB)),))
    assert "25.0 MiB" in card.explain()


@pytest.mark.parametrize(
    ("taken", "most", "words"),
    [
        ({1: 600, 2: 700}, None, "not even one sample"),
        ({8: 100, 16: 100}, None, "any batch"),
        ({8: 100, 16: 150}, None, "predicted from two batch sizes"),
        ({8: 100, 16: 150}, 20, "the whole dataset"),
        ({8: 100, 16: 200, 40: 500}, None, "which was measured"),
    ],
)
def test_what_fits_in_words(taken: dict[int, int], most: int | None, words: str) -> None:
    found = largest_batch({size: num * MIB for size, num in taken.items()}, 500 * MIB, GIB, most)
    assert found is not None
    assert words in largest_line(found, 500 * MIB)


def test_the_document_has_null_for_what_is_missing() -> None:
    document: Any = json.loads(PROFILE.to_json())
    assert document["format"] == 1
    assert document["rows"][1]["largest"] is None
    assert document["rows"][0]["breakdown"]["modules"][0] == {"name": "blocks.0.mlp", "num_bytes": 8 * MIB}


# --- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"precision": "half"}, "'half'"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"fit": "16 gigs"}, "fit is '16 gigs'.*16GiB"),
        ({"fit": 0}, "fit is 0"),
        ({"snapshot": "memory.pickle", "device": "cpu"}, "snapshot needs a CUDA device.*cpu"),
        ({"workload": "nothing"}, "'nothing'"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as raised:
        profile_memory(**arguments)
    assert raised.value.next_step

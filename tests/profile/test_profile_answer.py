"""The answer that rows make: which precision it is about, what to try, what is said beside the numbers."""

from __future__ import annotations

from autotune_amp.core.hardware import (
    BusyProcess,
    Capability,
    CardProcess,
    DeviceIdentity,
    DeviceMemory,
    Hardware,
    MachineLoad,
)
from autotune_amp.profile.answer import answer, load_notes
from autotune_amp.profile.results import AmpProfile, Gap, Part, PrecisionRow
from autotune_amp.profile.spec import Profiled

HARDWARE = Hardware(
    device="cpu",
    identity=DeviceIdentity(type="cpu", name="test", num_cpus=2, total_memory_bytes=1 << 30),
    memory=DeviceMemory(total=1 << 30, free=1 << 30, available=1000),
    precisions={
        "fp32": Capability(level="native", reason="Every CPU."),
        "bf16": Capability(level="native", reason="amx_bf16."),
        "fp16": Capability(level="emulated", reason="No fp16 arithmetic."),
    },
)


def gap(optimizer: float) -> Gap:
    parts = (
        Part(name="matrix_products", seconds=1 - optimizer, share=1 - optimizer, share_range=(0.1, 0.9)),
        Part(name="optimizer", seconds=optimizer, share=optimizer, share_range=(optimizer, optimizer)),
    )
    return Gap(machine_flops_per_second=None, attained_flops_per_second=None, flops_per_step=None, parts=parts)


FP32 = PrecisionRow(precision="fp32", step_seconds=1.0, gap=gap(0.2))


def answered(*rows: PrecisionRow) -> AmpProfile:
    return answer(
        (FP32, *rows),
        Profiled(),
        workload="made",
        hardware=HARDWARE,
        batch_size=8,
        accumulation_steps=1,
        num_batches=10,
        trace=None,
        notes=("First.",),
    )


def test_the_faster_of_bf16_and_fp16_is_the_answer_and_its_step_is_what_to_mend() -> None:
    bf16 = PrecisionRow(precision="bf16", speedup=1.3, verdict="significant", gap=gap(0.5))
    fp16 = PrecisionRow(precision="fp16", speedup=1.2, verdict="significant", gap=gap(0.9))
    tf32 = PrecisionRow(precision="tf32", speedup=2.0, verdict="excellent", gap=gap(0.9))
    found = answered(tf32, bf16, fp16)
    assert (found.best_precision, found.speedup, found.verdict) == ("bf16", 1.3, "significant")
    assert found.gap == gap(0.5)
    assert [(step.precision, step.part, step.max_speedup) for step in found.next_steps] == [("bf16", "optimizer", 2.0)]
    assert found.notes == ("First.", "fp16 is emulated: No fp16 arithmetic.")


def test_where_mixed_precision_does_not_pay_it_is_fp32s_step_that_is_to_be_mended() -> None:
    found = answered(PrecisionRow(precision="bf16", speedup=0.9, verdict="slower", gap=gap(0.5)))
    assert found.speedup == 0.9
    assert (found.gap_precision, found.gap) == ("fp32", FP32.gap)
    assert [(step.precision, step.max_speedup) for step in found.next_steps] == [("fp32", 1.25)]
    gaps = [line for line in found.explain().splitlines() if line.startswith(("gap", "next step"))]
    assert [line.partition(": ")[2] for line in gaps] == [
        "fp32: 20 % optimizer",
        "bf16: 50 % optimizer",  # why it does not
        "optimizer, 20 % of a step in fp32: fewer updates: a larger batch; at most 1.25x if it vanished",
    ]


def test_of_the_faster_one_that_could_not_be_taken_apart_there_is_no_gap_and_no_advice() -> None:
    found = answered(PrecisionRow(precision="bf16", speedup=1.3, verdict="significant"))
    assert (found.gap_precision, found.gap, found.next_steps) == ("bf16", None, ())


def test_of_one_that_was_cut_there_is_no_gap_to_show() -> None:
    found = answered(PrecisionRow(precision="bf16", speedup=0.1, verdict="slower", was_cut=True))
    assert (found.speedup, found.gap_precision) == (0.1, "fp32")
    assert found.gap == FP32.gap


def test_with_fp32_alone_there_is_no_speedup() -> None:
    found = answered(PrecisionRow(precision="bf16", reason="it has none"))
    assert (found.best_precision, found.speedup, found.verdict) == (None, None, None)


def test_what_failed_is_never_the_answer_whatever_it_reached_before() -> None:
    failed = PrecisionRow(precision="fp16", speedup=3.0, verdict="excellent", failure="nonfinite", reason="NaN")
    assert answered(failed).best_precision is None
    found = answered(PrecisionRow(precision="bf16", speedup=0.9, verdict="slower"), failed)
    assert (found.best_precision, found.speedup, found.verdict) == ("bf16", 0.9, "slower")


def test_what_others_did_is_said_where_it_is_worth_a_word() -> None:
    quiet = MachineLoad(seconds=5.0, num_cpus=2, others_num_cores=0.05, stolen_share=0.01)
    assert load_notes(quiet) == []
    loaded = MachineLoad(
        seconds=5.0,
        num_cpus=2,
        others_num_cores=1.0,
        busiest=(BusyProcess(pid=7, name="ffmpeg", num_cores=0.9),),
        stolen_share=0.1,
        card_processes=(CardProcess(pid=8, name="python", memory_bytes=2**30),),
        card_slowdowns=("power cap",),
    )
    busy, stolen, card, clocks = load_notes(loaded)
    assert busy.startswith("The machine was busy: other processes used 1.0 of 2 cores (ffmpeg, pid 7: 0.90).")
    assert stolen.startswith("The hypervisor gave 10 % of the CPU time")
    assert card.startswith("The card was not ours alone (python, pid 8: 1.0 GiB)")
    assert clocks == "The card lowered its clocks meanwhile: power cap."

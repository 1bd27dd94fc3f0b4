from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import msgspec
import pytest
from report_samples import MIB, evidence, hardware, loop, recommendation, row
from rich.console import Console

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.evidence import Job, LoaderEvidence, MemoryEvidence, PlainEnvironment, ProcessPeak, WorkersTried
from autotune_amp.core.hardware import DeviceMemory, LoadEvidence
from autotune_amp.core.recommendation import Exclusion, Recommendation, SearchSummary
from autotune_amp.report.rows import recommended_row
from autotune_amp.report.terminal import hardware_table, print_recommendation
from autotune_amp.report.usage import python_lines


@pytest.fixture(autouse=True)
def terminal_without_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def printed(shown: Recommendation, **console: Any) -> str:
    stream = io.StringIO()
    print_recommendation(shown, Console(file=stream, width=80, **console))
    return stream.getvalue()


def flowing(text: str) -> str:
    """`text` without box, wrapping and runs of blanks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


# --- a finished search ---------------------------------------------------------------------------------------------


def test_table_holds_every_candidate_with_its_outcome() -> None:
    text = printed(
        recommendation(
            candidates=(
                row("fp32", 32, 307.1),
                row("bf16", 64, 412.3),
                row("fp32", 256, None, reason="out of memory at 6.2 GiB"),
                row("bf16", 8, 114.0, status="cut", reason="cut after 5 steps"),
            )
        )
    )
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "fp32 32 307 104 ms 612 MiB baseline, measured" in lines
    assert "bf16 64 412 155 ms 612 MiB recommended, measured" in lines
    assert "bf16 8 114 70.2 ms 612 MiB cut after 5 steps" in lines
    assert "failed: out of memory at 6.2 GiB" in flowing(text)
    assert "accum" not in text


def test_what_runs_today_and_the_same_with_the_variables_are_told_apart() -> None:
    shown = recommendation(
        config=AmpConfig(precision="fp32", batch_size=32, environment={"MALLOC_TRIM_THRESHOLD_": "1"}),
        candidates=(row("fp32", 32, 307.1), row("fp32", 32, 398.2, has_environment=True)),
    )
    lines = [" ".join(line.split()) for line in printed(shown).splitlines()]
    assert "fp32 32 307 104 ms 612 MiB baseline, measured" in lines
    start = lines.index("fp32 32 398 80.4 ms 612 MiB recommended, measured, with")
    assert lines[start + 1] == "the variables"


def test_neighbours_with_one_fate_share_a_row() -> None:
    reason = "not tried: the budget ended"
    rows = [row("fp32", batch_size, None, status="untried", reason=reason) for batch_size in (2, 4, 8)]
    rows.append(row("fp32", 16, None, status="oom", reason="too large"))
    rows += [row("bf16", batch_size, None, status="untried", reason=reason) for batch_size in (2,)]
    rows += [row("bf16", batch_size, 100.0) for batch_size in (4, 8)]
    lines = [" ".join(line.split()) for line in printed(recommendation(candidates=tuple(rows))).splitlines()]
    start = lines.index("fp32 2-8 - - - not tried: the budget ended")
    assert lines[start + 1 : start + 5] == [
        "fp32 16 - - - out of memory: too large",
        "bf16 2 - - - not tried: the budget ended",
        "bf16 4 100 40.0 ms 612 MiB measured",
        "bf16 8 100 80.0 ms 612 MiB measured",
    ]


def test_excluded_batch_sizes_of_one_reason_share_a_row() -> None:
    excluded = (
        Exclusion(precision="bf16", batch_size=128, reason="needs more"),
        Exclusion(precision="bf16", batch_size=512, reason="needs more"),
        Exclusion(precision="tf32", batch_size=16, reason="withheld"),
        Exclusion(precision="fp16", batch_size=16, reason="withheld"),
        Exclusion(precision="fp8", batch_size=None, reason="no autocast"),
        Exclusion(precision="fp32", batch_size=32, reason="told in its own row"),
    )
    text = flowing(printed(recommendation(excluded=excluded)))
    assert "bf16 128-512 - - - excluded: needs more" in text
    assert "fp8 any - - - excluded: no autocast" in text
    assert "tf32 16 - - - excluded: withheld fp16" in text
    assert "told in its own row" not in text


def test_accumulation_has_a_column_where_there_is_any() -> None:
    config = AmpConfig(precision="bf16", batch_size=64, accumulation_steps=2)
    text = printed(recommendation(config=config, candidates=(row("bf16", 64, 412.3, accumulation_steps=2),)))
    assert "accum" in text
    assert "2 accumulation steps (effective batch size 128)" in flowing(text)
    assert "for batch, is_last in controller.windows(loader):" in text


def test_only_the_strict_row_is_recommended_and_only_the_one_as_found_is_the_baseline() -> None:
    config = AmpConfig(precision="fp32", batch_size=32)
    rows = (row("fp32", 32, 307.1, as_found=True), row("fp32", 32, 300.0))
    lines = printed(recommendation(config=config, candidates=rows)).splitlines()
    assert [line.split()[-2:] for line in lines if "fp32 as found" in line] == [["baseline,", "measured"]]
    assert [line.split()[-2:] for line in lines if "recommended," in line] == [["recommended,", "measured"]]


def test_panel_says_what_was_measured_and_why() -> None:
    text = flowing(printed(recommendation(warnings=("fp16 was left out.",))))
    assert "bf16, batch size 64" in text
    assert "412 samples/s (a new run: 398 to 426), 155 ms a step" in text
    assert "1.34x (1.28x to 1.41x) over the baseline, fp32 batch 32 at 307 samples/s" in text
    assert "702 MiB" in text
    assert "bf16 at batch 64 is the smallest batch on the plateau." in text
    assert "warning fp16 was left out." in text
    assert "unconfirmed" not in text


def test_unknown_speedup_says_why() -> None:
    baseline = msgspec.structs.replace(evidence().baseline, samples_per_second=None, reason="out of memory")
    shown = recommendation(evidence=evidence(speedup=None, speedup_interval=None, baseline=baseline))
    assert "unknown; the baseline is fp32 batch 32: out of memory" in flowing(printed(shown))


def test_what_weakens_the_numbers_is_said_beside_them() -> None:
    plain = PlainEnvironment(samples_per_second=371.0, speedup=1.21)
    weak = evidence(is_confirmed=False, num_processes=1, data_share=0.3, plain_environment=plain)
    text = flowing(printed(recommendation(evidence=weak)))
    assert "30 % of it waiting for data" in text
    assert "unconfirmed, measured in 1 process only" in text
    assert "measured the baseline" not in text
    assert "371 samples/s (1.21x) without the environment variables" in text


def test_a_confirmed_speed_is_not_called_unconfirmed_for_a_baseline_that_is_not() -> None:
    said = dict(recommendation(evidence=evidence(is_confirmed=False, num_processes=3)).facts())
    assert "unconfirmed" not in said["speed"]
    assert said["speed-up"].endswith("; unconfirmed, fewer than 3 processes measured the baseline")


@pytest.mark.parametrize(
    ("data_share", "update_share", "said"),
    [
        (0.3, 0.05, "155 ms a step, 30 % of it waiting for data, 5 % in the optimizer"),
        (0.0, 0.05, "155 ms a step, 5 % of it in the optimizer"),
        (0.3, 0.004, "155 ms a step, 30 % of it waiting for data"),
        (0.0, None, "155 ms a step"),
    ],
)
def test_where_a_steps_time_goes(data_share: float, update_share: float | None, said: str) -> None:
    shown = recommendation(evidence=evidence(data_share=data_share, update_share=update_share))
    assert dict(shown.facts())["speed"].endswith(said)


def test_an_accelerators_memory_is_that_of_a_long_run_too() -> None:
    device = hardware()
    card = msgspec.structs.replace(device, identity=msgspec.structs.replace(device.identity, type="cuda"))
    assert dict(recommendation(hardware=card).facts())["memory"] == "702 MiB at the peak"


def test_a_shared_build_is_said_beside_the_interval() -> None:
    text = recommendation(evidence=evidence(is_build_shared=True)).explain()
    assert "; its processes shared one built model" in text


def test_shared_processes_are_said_beside_the_interval() -> None:
    shown = evidence(are_processes_shared=True)
    assert (
        f"from {shown.num_processes} fresh processes that ran all in turn" in recommendation(evidence=shown).explain()
    )


def test_loss_scale_and_fallbacks_are_part_of_the_config() -> None:
    config = AmpConfig(
        precision="fp16",
        batch_size=64,
        loss_scale=LossScale(init_scale=1024.0, growth_interval=500),
        fallback=(
            "bf16",
            FallbackPlan(precision="fp32", batch_size=16, peak_memory_bytes=MIB, samples_per_second=99.5),
        ),
    )
    text = flowing(printed(recommendation(config=config)))
    assert "starts at 1024, growth interval 500" in text
    assert "fallback bf16 batch 64" in text
    assert "fallback fp32 batch 16, 99.5 samples/s, 1.00 MiB" in text
    assert 'PrecisionController.load("studies/quiet-otter/recommendation.json", "cpu")' in text
    assert "controller.step(optimizer)" in text


def test_export_line_is_whole_and_quoted() -> None:
    config = AmpConfig(precision="fp32", batch_size=32, environment={"A": "1", "LONG": "x y" * 40})
    lines = printed(recommendation(config=config)).splitlines()
    assert f"  export A=1 LONG='{'x y' * 40}'" in lines


def test_without_environment_there_is_nothing_to_export() -> None:
    assert "before Python starts" not in printed(recommendation())


@pytest.mark.parametrize(("precision", "high", "allowed"), [("tf32", "high", "True"), ("fp32", "highest", "False")])
def test_python_on_cuda_sets_the_tf32_flags(precision: Any, high: str, allowed: str) -> None:
    identity = msgspec.structs.replace(hardware().identity, type="cuda")
    config = AmpConfig(precision=precision, batch_size=64)
    shown = recommendation(config=config, hardware=msgspec.structs.replace(hardware(), identity=identity))
    text = printed(shown)
    assert f'torch.set_float32_matmul_precision("{high}")' in text
    assert f"torch.backends.cudnn.allow_tf32 = {allowed}" in text
    assert "torch.autocast" not in text


@pytest.mark.parametrize("as_found", [True, False])
def test_what_is_kept_as_found_keeps_its_flags_and_its_row(as_found: bool) -> None:
    identity = msgspec.structs.replace(hardware().identity, type="cuda")
    found, strict = row("fp32", 32, 300.0, as_found=True), row("fp32", 32, 200.0)
    shown = recommendation(
        config=AmpConfig(precision="fp32", batch_size=32, as_found=as_found),
        hardware=msgspec.structs.replace(hardware(), identity=identity),
        candidates=(strict, found),
    )
    assert recommended_row(shown) is (found if as_found else strict)
    lines = python_lines(shown)
    assert any("stay as they are" in line and line.startswith("#") for line in lines) == as_found
    assert any("tf32" in line and not line.startswith("#") for line in lines) != as_found
    compile("\n".join(lines), "shown", "exec")


def test_what_memory_and_loader_were_measured_under_is_said() -> None:
    worst_case = "the 64 largest of 10,000 samples, 4 to 512 numbers each, median 120"
    tried = (
        WorkersTried(candidate="bf16 batch 64", num_workers=1, samples_per_second=207.0, data_share=0.5),
        WorkersTried(candidate="bf16 batch 64", num_workers=2, samples_per_second=None, data_share=None),
    )
    slow, fast = row("bf16", 64, 100.0), row("bf16", 64, 412.3, num_workers=2)
    shown = recommendation(
        config=AmpConfig(precision="bf16", batch_size=64, num_workers=2),
        evidence=evidence(
            memory=MemoryEvidence(
                worst_case=worst_case,
                has_evaluation=True,
                has_checkpoint=True,
                processes=(ProcessPeak(num_steps=14, peak_memory_bytes=2**29),) * 3,
            ),
            loader=LoaderEvidence(num_workers=0, data_share=0.63, step_samples_per_second=420.0, tried=tried),
            evaluation_seconds=3.1,
        ),
        candidates=(row("fp32", 32, 90.0), slow, fast),
    )
    text = flowing(printed(shown))
    assert "bf16, batch size 64, 2 loader workers" in text
    beyond = "the highest of 3 processes"
    assert f"702 MiB at the peak, with an evaluation and a checkpoint, on {worst_case}; {beyond}" in text
    assert "63 % of a step waits for data with 0 workers; 420 samples/s without that wait" in text
    assert "bf16 batch 64 with 1 worker: 207 samples/s; bf16 batch 64 with 2 workers: failed" in text
    assert "an evaluation takes 3.1 s" in text
    assert "bf16 64 2 412 155 ms 612 MiB recommended, measured" in text
    assert recommended_row(shown) is fast
    assert "DataLoader(dataset, batch_size=64, num_workers=2)" in "\n".join(python_lines(shown))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"is_busy": True}, "others used 1 of 2 cores"),
        (
            {"is_busy": True, "is_stolen": True, "interval_factors": (0.5, 2.0)},
            "others used 1 of 2 cores; the hypervisor gave 7 % of the CPU time away; "
            "interval multiplied at its lower end by 0.50 and its upper end by 2.00",
        ),
    ],
)
def test_what_others_did_on_the_machine_is_said_where_it_is_worth_a_word(changes: Any, said: str | None) -> None:
    load = LoadEvidence(num_cpus=2, others_num_cores=1.0, stolen_share=0.07, **changes)
    assert dict(recommendation(evidence=evidence(load=load)).facts()).get("machine") == said


def test_python_lines_are_python() -> None:
    text = printed(recommendation())
    python, framework = text.split("In Python:\n")[1].split("In the words of a framework, ")
    compile(textwrap.dedent(python), "shown", "exec")
    targets, command = framework.split(":\n")
    assert " ".join(targets.split()) == "--to lightning, transformers, accelerate, deepspeed, torch, env"
    assert command.strip() == "autotune-amp export studies/quiet-otter --to torch"
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in text


def test_a_loop_is_given_a_controller() -> None:
    shown = recommendation(workload=loop())
    lines = python_lines(shown)
    compile("\n".join(lines), "shown", "exec")
    told = "\n".join([*lines, *python_lines(shown, "else/where.json")])
    for path in ("studies/quiet-otter/recommendation.json", "else/where.json"):
        assert f'PrecisionController.load("{path}", "cpu")' in told
    assert lines[-1].startswith("train_step(state, batch, amp)")
    assert not any("compute_loss" in line for line in lines)


def test_interrupted_search_is_headed_so() -> None:
    search = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=3.0, was_interrupted=True)
    text = printed(recommendation(search=search))
    assert "Best so far: the search was interrupted" in text
    assert "Recommended" not in text


def test_foreign_text_is_neither_markup_nor_control() -> None:
    reason = "[bold]loud[/nope]\x1b[31m\nnext"
    rows = (row("fp32", 32, None, reason=reason),)
    text = printed(recommendation(reason=reason, candidates=rows), force_terminal=True)
    assert "[bold]loud[/nope] [31m next" in text
    assert "\x1b[31m" not in text


def test_table_fits_80_columns_and_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    print_recommendation(recommendation(warnings=("w" * 200,)), Console(file=stream, width=80))
    hardware_table(hardware(), Console(file=stream, width=80))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= 80


def test_colors_on_a_terminal_unless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    colored = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colored.search(printed(recommendation(), force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colored.search(printed(recommendation(), force_terminal=True))


def test_the_objective_its_energy_and_the_job_are_facts() -> None:
    plain = dict(recommendation().facts())
    assert not {"objective", "energy", "job"} & plain.keys()
    job = Job(
        num_steps=10_000,
        num_samples=640_000,
        hours=0.8372,
        hours_interval=(0.7, 1.1),
        baseline_hours=12.345,
        price_per_hour=3.0,
        price=2.4,
        price_interval=(2.1, 3.3),
    )
    rows = (row("fp32", 32, 307.1, joules_per_sample=0.3512), row("bf16", 64, 412.3))
    shown = recommendation(objective="energy", job=job, evidence=evidence(joules_per_sample=0.3512), candidates=rows)
    found = dict(shown.facts())
    assert (found["objective"], found["energy"]) == ("energy", "0.351 J a sample")
    assert found["job"] == (
        "0.84 h (0.7 to 1.1) for 10,000 steps, 2.40 (2.10 to 3.30) at 3 an hour; 12.3 h as it runs today"
    )
    assert "J/sample" in printed(shown)
    assert "J/sample" not in printed(recommendation())


def test_explain_is_plain_text_with_the_same_facts() -> None:
    config = AmpConfig(precision="bf16", batch_size=64, environment={"A": "1"})
    shown = recommendation(config=config, warnings=("mind the gap",))
    assert shown.explain() == shown.explain()
    assert shown.explain().splitlines() == [
        "config: bf16, batch size 64",
        "speed: 412 samples/s (a new run: 398 to 426), 155 ms a step",
        "speed-up: 1.34x (1.28x to 1.41x) over the baseline, fp32 batch 32 at 307 samples/s",
        "memory: 702 MiB at the peak",
        "reason: bf16 at batch 64 is the smallest batch on the plateau.",
        "warning: mind the gap",
        "before Python starts: export A=1",
    ]


# --- a probe -------------------------------------------------------------------------------------------------------


def test_hardware_table_gives_each_precision_its_reason() -> None:
    stream = io.StringIO()
    hardware_table(hardware(), Console(file=stream, width=80))
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert "device cpu: Some Processor" in lines
    assert "memory 6.00 GiB available: 7.00 GiB free of 8.00 GiB, container limit 5.00 GiB" in lines
    assert "warning another process holds 3 GiB" in lines
    assert "fp32 native 121 GFLOP/s any CPU has it" in lines
    assert "bf16 native 1.31 TFLOP/s amx_bf16" in lines
    assert "fp16 emulated - no avx512_fp16 [here]" in lines
    assert "fp8 unsupported - no kernels" in lines


def test_hardware_table_of_an_accelerator() -> None:
    card = msgspec.structs.replace(
        hardware(),
        identity=msgspec.structs.replace(hardware().identity, driver="580.1"),
        compute_capability="9.0",
        memory=DeviceMemory(total=80 << 30, free=70 << 30, available=70 << 30, held_by_caller=3 << 30),
    )
    stream = io.StringIO()
    hardware_table(card, Console(file=stream, width=80))
    text = flowing(stream.getvalue())
    assert "compute 9.0 driver 580.1" in text
    assert "no container limit" in text
    assert "held 3.00 GiB by the calling process itself" in text

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from autotune_amp.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.hardware.types import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.recommendation import (
    BaselineEvidence,
    CandidateRow,
    Evidence,
    Exclusion,
    Fingerprint,
    PlainEnvironment,
    Recommendation,
    SearchSummary,
)
from autotune_amp.report.format import clock, count, duration, flops, number, one_line, printable, rate, size
from autotune_amp.report.terminal import TerminalProgress, explain, hardware_table, print_recommendation
from autotune_amp.trial.outcome import Failure, Measurement, Record
from autotune_amp.trial.spec import Candidate

MIB = 2**20


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


class FakeTerminal(io.StringIO):
    encoding = "utf-8"
    num_writes = 0

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.num_writes += 1
        return super().write(text)


def hardware() -> Hardware:
    return Hardware(
        device="cpu",
        identity=DeviceIdentity(type="cpu", name="Some Processor", num_cpus=2, total_memory_bytes=8 << 30),
        memory=DeviceMemory(total=8 << 30, free=7 << 30, available=6 << 30, container_limit=5 << 30),
        precisions={
            "fp32": Capability(level="native", reason="any CPU has it", matmul_flops_per_second=121e9),
            "bf16": Capability(level="native", reason="amx_bf16", matmul_flops_per_second=1.31e12),
            "fp16": Capability(level="emulated", reason="no avx512_fp16 [here]"),
            "fp8": Capability(level="unsupported", reason="no kernels"),
        },
        notes=("another process holds 3 GiB",),
    )


def row(precision: Any, batch_size: int, samples_per_second: float | None, **changes: Any) -> CandidateRow:
    values: dict[str, Any] = {
        "precision": precision,
        "batch_size": batch_size,
        "accumulation_steps": 1,
        "as_found": False,
        "status": "measured" if samples_per_second else "failed",
        "samples_per_second": samples_per_second,
        "step_seconds": batch_size / samples_per_second if samples_per_second else None,
        "peak_memory_bytes": 612 * MIB if samples_per_second else None,
        "reason": None,
    }
    return CandidateRow(**(values | changes))


def evidence(**changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "samples_per_second": 412.3,
        "samples_per_second_interval": (398.0, 426.0),
        "step_seconds": 0.155,
        "peak_memory_bytes": 702 * MIB,
        "baseline": BaselineEvidence(
            config=AmpConfig(precision="fp32", batch_size=32),
            samples_per_second=307.1,
            samples_per_second_interval=(300.0, 312.0),
            step_seconds=0.104,
            peak_memory_bytes=612 * MIB,
        ),
        "speedup": 1.343,
        "speedup_interval": (1.28, 1.41),
        "num_processes": 4,
        "is_confirmed": True,
        "data_share": 0.0,
    }
    return Evidence(**(values | changes))


def recommendation(**changes: Any) -> Recommendation:
    values: dict[str, Any] = {
        "config": AmpConfig(precision="bf16", batch_size=64),
        "evidence": evidence(),
        "reason": "bf16 at batch 64 is the smallest batch on the plateau.",
        "warnings": (),
        "excluded": (),
        "candidates": (row("fp32", 32, 307.1), row("bf16", 64, 412.3)),
        "search": SearchSummary(study="quiet-otter", num_trials=17, num_failures=2, seconds=84.2),
        "hardware": hardware(),
        "versions": {},
        "fingerprint": Fingerprint(digest="", parts={}),
    }
    return Recommendation(**(values | changes))


def printed(shown: Recommendation, **console: Any) -> str:
    stream = io.StringIO()
    print_recommendation(shown, Console(file=stream, width=80, **console))
    return stream.getvalue()


def flowing(text: str) -> str:
    """`text` without box, wrapping and runs of blanks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def measurement(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "step_seconds": 0.0776,
        "step_seconds_interval": (0.077, 0.079),
        "samples_per_second": 412.3,
        "data_seconds": 0.0,
        "peak_memory_bytes": 612 * MIB,
        "reserved_memory_bytes": 612 * MIB,
        "raw_step_seconds": (0.0776,),
        "build_seconds": 0.1,
        "context_seconds": 0.0,
        "first_step_seconds": 0.2,
    }
    return Measurement(**(values | changes))


def record(outcome: Measurement | Failure, number: int = 0, precision: Any = "fp32", **changes: Any) -> Record:
    values: dict[str, Any] = {
        "search_id": "s",
        "number": number,
        "candidate": Candidate(precision=precision, batch_size=32),
        "purpose": "search",
        "outcome": outcome,
        "seconds": 3.1,
    }
    return Record(**(values | changes))


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


def test_excluded_batch_sizes_of_one_reason_share_a_row() -> None:
    excluded = (
        Exclusion(precision="bf16", batch_size=128, reason="needs more"),
        Exclusion(precision="bf16", batch_size=512, reason="needs more"),
        Exclusion(precision="fp8", batch_size=None, reason="no autocast"),
        Exclusion(precision="fp32", batch_size=32, reason="told in its own row"),
    )
    text = flowing(printed(recommendation(excluded=excluded)))
    assert "bf16 128-512 - - - excluded: needs more" in text
    assert "fp8 any - - - excluded: no autocast" in text
    assert "told in its own row" not in text


def test_accumulation_has_a_column_where_there_is_any() -> None:
    config = AmpConfig(precision="bf16", batch_size=64, accumulation_steps=2)
    text = printed(recommendation(config=config, candidates=(row("bf16", 64, 412.3, accumulation_steps=2),)))
    assert "accum" in text
    assert "2 accumulation steps (effective batch size 128)" in flowing(text)
    assert "# 2 batches to one optimizer step" in text


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
    assert "371 samples/s (1.21x) without the environment variables below" in text


def test_loss_scale_and_fallbacks_are_part_of_the_config() -> None:
    config = AmpConfig(
        precision="fp16",
        batch_size=64,
        loss_scale=LossScale(init_scale=1024.0, growth_interval=500),
        fallback=(FallbackPlan(precision="fp32", batch_size=16, peak_memory_bytes=MIB, samples_per_second=99.5),),
    )
    text = flowing(printed(recommendation(config=config)))
    assert "starts at 1024, growth interval 500" in text
    assert "fallback fp32 batch 16, 99.5 samples/s, 1.00 MiB" in text
    assert 'torch.amp.GradScaler("cpu", init_scale=1024, growth_interval=500)' in text
    assert "dtype=torch.float16" in text


def test_export_line_is_whole_and_quoted() -> None:
    config = AmpConfig(precision="fp32", batch_size=32, environment={"A": "1", "LONG": "x y" * 40})
    lines = printed(recommendation(config=config)).splitlines()
    assert f"  export A=1 LONG='{'x y' * 40}'" in lines


def test_without_environment_there_is_nothing_to_export() -> None:
    assert "export" not in printed(recommendation())


@pytest.mark.parametrize(("precision", "high", "allowed"), [("tf32", "high", "True"), ("fp32", "highest", "False")])
def test_python_on_cuda_sets_the_tf32_flags(precision: Any, high: str, allowed: str) -> None:
    identity = msgspec.structs.replace(hardware().identity, type="cuda")
    config = AmpConfig(precision=precision, batch_size=64)
    shown = recommendation(config=config, hardware=msgspec.structs.replace(hardware(), identity=identity))
    text = printed(shown)
    assert f'torch.set_float32_matmul_precision("{high}")' in text
    assert f"torch.backends.cudnn.allow_tf32 = {allowed}" in text
    assert "torch.autocast" not in text


def test_python_lines_are_python() -> None:
    text = printed(recommendation())
    compile("\n".join(line[2:] for line in text.split("In Python:\n")[1].splitlines()), "shown", "exec")
    assert 'torch.autocast("cpu", dtype=torch.bfloat16)' in text


def test_interrupted_search_is_headed_so() -> None:
    search = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=3.0, was_interrupted=True)
    text = printed(recommendation(search=search))
    assert "Best so far: the search was interrupted" in text
    assert "Recommended" not in text


def test_foreign_text_is_neither_markup_nor_control() -> None:
    reason = "[bold]loud[/nope]\x1b[31m\nnext"
    text = printed(
        recommendation(reason=reason, candidates=(row("fp32", 32, None, reason=reason),)), force_terminal=True
    )
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


def test_explain_is_plain_text_with_the_same_facts() -> None:
    config = AmpConfig(precision="bf16", batch_size=64, environment={"A": "1"})
    shown = recommendation(config=config, warnings=("mind the gap",))
    assert explain(shown) == shown.explain()
    assert explain(shown).splitlines() == [
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
    assert "driver 580.1, compute capability 9.0" in text
    assert "no container limit" in text
    assert "held 3.00 GiB by the calling process itself" in text


# --- progress ------------------------------------------------------------------------------------------------------


def run_a_search(progress: TerminalProgress) -> None:
    best = record(measurement(), number=0, precision="bf16")
    progress.started("quiet-otter", "studies/quiet-otter", 90.0)
    progress.phase("searching")
    progress.found_hardware(hardware())
    progress.trial_started(0, best.candidate, "search")
    progress.step(3, 0.0776)
    progress.output("epoch [red]1[/red]\n")
    progress.trial_ended(best, best)
    progress.trial_ended(record(Failure(kind="oom", message="too\nlarge"), number=1), best)
    progress.tick(25.0)
    progress.note("resumed 3 trials")
    progress.ended()


def test_without_a_terminal_every_event_is_a_plain_line() -> None:
    stream = io.StringIO()
    run_a_search(TerminalProgress(stream))
    assert stream.getvalue().splitlines() == [
        "Study quiet-otter in studies/quiet-otter: 1 min 30 s. Ctrl-C keeps the best so far.",
        "Searching",
        "  cpu: Some Processor, 6.00 GiB available, fp32, bf16, fp16",
        "epoch [red]1[/red]",
        "  0  bf16 batch 32           412 samples/s   77.6 ms   612 MiB   3.1 s",
        "  1  fp32 batch 32       out of memory after 3.1 s: too large",
        "  resumed 3 trials",
    ]


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = FakeTerminal()
    run_a_search(TerminalProgress(stream))
    assert "412 samples/s" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_live_display_follows_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.report.live._DRAW_SECONDS", 0.0)
    stream = FakeTerminal()
    progress = TerminalProgress(stream)
    best = record(measurement(), precision="bf16")

    def drawn() -> str:
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
        stream.seek(stream.truncate(0))
        return " ".join(text.split())

    progress.started("s", "studies/s", 90.0)
    progress.phase("searching")
    assert drawn().endswith("1:30 left of 1:30 now - best -")
    progress.trial_started(4, Candidate(precision="fp32", batch_size=8), "search")
    assert drawn().endswith("now fp32 batch 8 trial 4: setting up best -")
    progress.step(7, 0.0123)
    assert drawn().endswith("now fp32 batch 8 trial 4: step 7, 12.3 ms each best -")
    progress.trial_ended(best, best)
    assert drawn().endswith("now - best bf16 batch 32 412 samples/s 77.6 ms 612 MiB")
    progress.tick(25.0)
    assert "1:05 left of 1:30" in drawn()
    progress.tick(91.0)
    assert "time is up, finishing" in drawn()
    progress.ended()


def test_confirmations_and_cut_trials_are_marked() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    progress.trial_ended(record(measurement(was_cut=True)), None)
    progress.trial_ended(record(measurement(), purpose="confirm"), None)
    cut, confirmed = stream.getvalue().splitlines()
    assert cut.endswith("3.1 s  cut")
    assert confirmed.endswith("3.1 s  confirm")
    assert len(confirmed) <= 80


def test_traceback_of_the_users_code_is_shown_once() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    failure = Failure(
        kind="workload_error", message="ValueError: no", details='  File "train.py"\nValueError: no\x1b[31m'
    )
    for number_ in range(3):
        progress.trial_ended(record(failure, number=number_), None)
    text = stream.getvalue()
    assert text.count("workload error after 3.1 s: ValueError: no") == 3
    assert text.count('File "train.py"') == 1
    assert "\x1b" not in text


def test_our_lines_never_join_an_unfinished_line_of_the_users() -> None:
    for stream in (io.StringIO(), FakeTerminal()):
        progress = TerminalProgress(stream)
        progress.started("s", "studies/s", 90.0)
        progress.output("loss 0.1")
        progress.output(" and falling")
        progress.note("resumed")
        progress.ended()
        assert "loss 0.1 and falling\n" in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_bytes_that_are_no_characters_survive(is_terminal: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8")
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    progress = TerminalProgress(stream)
    progress.started("s", "studies/s", 90.0)
    progress.output("caf\u00e9 \udcff[/red]\x1b]0;title\x07\n")
    progress.output("lone \ud800\n")
    progress.ended()
    assert b"caf\xc3\xa9 \xff[/red]\x1b]0;title\x07\n" in raw.getvalue()
    assert b"lone \\ud800\n" in raw.getvalue()


def test_many_small_prints_are_few_writes() -> None:
    stream = FakeTerminal()
    progress = TerminalProgress(stream)
    progress.started("s", "studies/s", 90.0)
    lines = [f"line {i} [bold\n" for i in range(20_000)]
    for line in lines:
        progress.output(line)
    progress.ended()
    assert stream.num_writes < 200
    assert re.findall(r"line \d+ \[bold\n", stream.getvalue()) == lines


def test_a_line_without_end_is_passed_on_before_the_end() -> None:
    stream = FakeTerminal()
    progress = TerminalProgress(stream)
    progress.started("s", "studies/s", 90.0)
    progress.output("short")
    assert "short" not in stream.getvalue()
    progress.output("z" * 100_000)
    assert "short" + "z" * 100_000 in stream.getvalue()
    progress.ended()


class Broken(io.StringIO):
    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return self.is_terminal

    is_terminal = False


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_that_goes_away_does_not_end_the_search(is_terminal: bool) -> None:
    stream = Broken()
    stream.is_terminal = is_terminal
    run_a_search(TerminalProgress(stream))


def test_ending_twice_is_safe_and_what_follows_is_plain() -> None:
    stream = FakeTerminal()
    progress = TerminalProgress(stream)
    threads = threading.enumerate()
    progress.started("s", "studies/s", 90.0)
    progress.tick(1.0)
    assert threading.enumerate() == threads
    progress.ended()
    progress.ended()
    end = len(stream.getvalue())
    progress.tick(2.0)
    progress.note("late")
    assert stream.getvalue()[end:] == "  late\n"


def test_live_display_has_no_color_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    colored = re.compile(r"\x1b\[[0-9;]*3[0-8]")
    with_color, without = FakeTerminal(), FakeTerminal()
    run_a_search(TerminalProgress(with_color))
    monkeypatch.setenv("NO_COLOR", "1")
    run_a_search(TerminalProgress(without))
    assert colored.search(with_color.getvalue())
    assert not colored.search(without.getvalue())


CHILD = """
import sys, time
sys.path[:0] = [{tests!r}]
from test_terminal import Candidate, TerminalProgress, measurement, record
progress = TerminalProgress(sys.stderr)
try:
    progress.started("quiet-otter", "studies/quiet-otter", 90.0)
    progress.phase("searching")
    best = record(measurement(), precision="bf16")
    progress.trial_ended(best, best)
    progress.trial_started(1, Candidate(precision="fp32", batch_size=64), "search")
    progress.step(7, 0.0123)
    progress.output("the user's print\\n")
    time.sleep(0.15)
    progress.tick(45.0)
    print("a stray warning", file=sys.stderr)
    {end}
finally:
    progress.ended()
print("result")
"""


def in_a_terminal(end: str) -> str:
    """What a child writes to a real pseudo-terminal of 80 columns; the terminal's settings must outlive it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(leader)
    code = CHILD.format(tests=str(Path(__file__).parent), end=end)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=environment
    ):
        os.close(follower)
        written = b""
        # Linux reports the end of a pseudo-terminal as an input/output error.
        with suppress(OSError):
            while chunk := os.read(leader, 65536):
                written += chunk
    assert termios.tcgetattr(leader) == before
    os.close(leader)
    return written.decode()


def test_live_display_on_a_real_terminal() -> None:
    written = in_a_terminal("pass")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written)
    assert "\u2501" * 10 in text
    assert "0:45 left of 1:30" in text
    assert "fp32 batch 64       trial 1: step 7, 12.3 ms each" in text
    assert "best bf16 batch 32            412 samples/s" in text
    assert "the user's print\r\n" in text
    assert "a stray warning\r\n" in text


@pytest.mark.parametrize(("end", "last"), [("pass", "result"), ("raise ValueError('ours')", "ValueError: ours")])
def test_terminal_is_restored_however_the_search_ends(end: str, last: str) -> None:
    written = in_a_terminal(end)
    hidden, shown = written.rindex("\x1b[?25l"), written.rindex("\x1b[?25h")
    assert hidden < shown
    # The display is erased, line by line, and what follows is ordinary text.
    erased, _, after = written[shown:].rpartition("\x1b[1A\x1b[2K")
    assert erased
    assert last in after
    assert "\x1b" not in after.replace("\x1b[0m", "")


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(12345.6), "12,346"),
        (number(41.52), "41.5"),
        (number(1.0), "1.00"),
        (number(0.08523), "0.0852"),
        (number(0.0), "0"),
        (rate(412.3), "412 samples/s"),
        (size(0), "0 B"),
        (size(1023), "1,023 B"),
        (size(612 * MIB), "612 MiB"),
        (size(1.52 * 1024 * MIB), "1.52 GiB"),
        (size(3000 * 1024 * 1024 * MIB), "3,000 TiB"),
        (duration(0.0776), "77.6 ms"),
        (duration(3.14), "3.1 s"),
        (duration(9.96), "10 s"),
        (duration(59.6), "1 min 00 s"),
        (duration(90), "1 min 30 s"),
        (duration(7500), "2 h 05 min"),
        (clock(65.9), "1:05"),
        (flops(1.24e12), "1.24 TFLOP/s"),
        (flops(41.5e9), "41.5 GFLOP/s"),
        (flops(8e5), "0.8 MFLOP/s"),
        (count(1, "trial"), "1 trial"),
        (count(2, "process", "processes"), "2 processes"),
        (one_line(" a\n\tb\x1b[0m\udcff "), "a b [0m"),
        (printable("a\n\tb\x1b[0m\udcff"), "a\n\tb\\x1b[0m\\udcff"),
    ],
)
def test_numbers_and_foreign_text_are_legible(shown: str, text: str) -> None:
    assert shown == text

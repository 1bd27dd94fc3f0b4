"""A running search on a terminal, on a pseudo-terminal, and as plain lines where there is none."""

from __future__ import annotations

import io
import re
from unittest.mock import Mock

import pytest
from report_samples import hardware, measurement, record

from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.report.progress import TerminalProgress


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

    def seen(self) -> str:
        """What was written since the last call, without escape sequences."""
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", self.getvalue())
        self.seek(self.truncate(0))
        return text


def started(stream: io.TextIOBase) -> TerminalProgress:
    progress = TerminalProgress(stream)  # type: ignore[arg-type]
    progress.started("s", "studies/s", 90.0)
    return progress


BEST = record(measurement(), number=0, precision="bf16")


def run_a_search(progress: TerminalProgress) -> None:
    progress.started("quiet-otter", "studies/quiet-otter", 90.0)
    progress.phase("searching")
    progress.found_hardware(hardware())
    progress.trial_started(0, BEST.candidate, "search")
    progress.step(3, 0.0776)
    progress.output("epoch [red]1[/red]\n")
    progress.trial_ended(BEST, BEST)
    progress.trial_ended(record(Failure(kind="oom", message="too\nlarge"), number=1), BEST)
    progress.tick(25.0)
    progress.note("resumed 3 trials")
    progress.ended()


def test_what_a_long_job_does_is_a_line_now_and_then_where_nothing_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Mock(return_value=0.0)
    monkeypatch.setattr("autotune_amp.report.progress.time.monotonic", clock)
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    progress.work_started(None)
    progress.phase("recording one fp32 step for cuda")
    for second in range(25):
        clock.return_value = float(second)
        progress.activity(f"{100 * second} calls recorded, now in layers.3")
    progress.ended()
    assert stream.getvalue().splitlines()[1:] == [
        "  1000 calls recorded, now in layers.3",
        "  2000 calls recorded, now in layers.3",
    ]


def test_what_a_job_does_is_shown_on_a_terminal() -> None:
    terminal = FakeTerminal()
    progress = TerminalProgress(terminal)
    progress.work_started(None)
    progress.activity("1,240 calls recorded, now in layers.3")
    assert "1,240 calls recorded, now in layers.3" in terminal.seen()
    progress.ended()


def test_without_a_terminal_or_on_a_dumb_one_every_event_is_a_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    for stream in (io.StringIO(), FakeTerminal()):
        run_a_search(TerminalProgress(stream))
        first, *lines = stream.getvalue().splitlines()
        assert "studies/quiet-otter: 1 min 30 s" in first
        assert lines == [
            "Searching",
            "  cpu: Some Processor, 6.00 GiB available, fp32, bf16, fp16",
            "epoch [red]1[/red]",
            "  0  bf16 batch 32           412 samples/s   77.6 ms   612 MiB   3.1 s",
            "  1  fp32 batch 32       out of memory: too large   3.1 s",
            "  resumed 3 trials",
        ]


def test_a_notebook_has_a_stop_button_and_a_terminal_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autotune_amp.report.progress._is_in_notebook", lambda: True)
    TerminalProgress(io.StringIO()).started("train", "studies/train", None)
    in_cell = capsys.readouterr().out
    assert "The stop button keeps the best so far" in in_cell
    assert "Ctrl-C" not in in_cell
    monkeypatch.undo()
    stream = io.StringIO()
    TerminalProgress(stream).started("train", "studies/train", None)
    assert "Ctrl-C keeps the best so far" in stream.getvalue()


def test_live_display_follows_every_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.report.progress._DRAW_SECONDS", 0.0)
    stream = FakeTerminal()
    progress = started(stream)

    def drawn() -> str:
        return " ".join(stream.seen().split())

    progress.phase("searching")
    assert drawn().endswith("1:30 left of 1:30 now - best -")
    progress.trial_started(4, Setting(precision="fp32", batch_size=8), "search")
    assert drawn().endswith("now fp32 batch 8 trial 4: setting up best -")
    progress.step(7, 0.0123)
    assert drawn().endswith("now fp32 batch 8 trial 4: step 7, 12.3 ms each best -")
    progress.trial_ended(BEST, BEST)
    assert drawn().endswith("now - best bf16 batch 32 412 samples/s 77.6 ms 612 MiB")
    progress.tick(25.0)
    assert "1:05 left of 1:30" in drawn()
    progress.tick(91.0)
    assert "time is up" in drawn()
    progress.ended()
    shown = stream.getvalue().split("\x1b[?25h")[-1]
    assert re.fullmatch(r"(\r|\x1b\[(1A|2K))+", shown), "the cursor is back and the display erased"


def test_live_display_has_a_line_for_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.report.progress._DRAW_SECONDS", 0.0)
    stream = FakeTerminal()
    progress = started(stream)
    for number, slot in ((1, "cuda:1"), (2, "cuda:0")):
        progress.trial_started(number, Setting(precision="fp32", batch_size=8), "search", slot)
    stream.seen()
    progress.step(7, 0.0123, "cuda:1")
    shown = " ".join(stream.seen().split())
    assert shown.endswith(
        "cuda:0 fp32 batch 8 trial 2: setting up cuda:1 fp32 batch 8 trial 1: step 7, 12.3 ms each best -"
    )
    progress.trial_ended(record(measurement(), number=1, slot="cuda:1"), BEST)
    shown = " ".join(stream.seen().split())
    assert "on cuda:1" in shown
    assert "trial 2: setting up best" in shown, "the line of a slot without a trial is gone"


def test_traceback_of_the_users_code_is_shown_once() -> None:
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    details = '  File "train.py"\nValueError: no\x1b[31m'
    for number in range(3):
        failure = Failure(kind="workload_error", message="ValueError: no", details=details)
        progress.trial_ended(record(failure, number=number), None)
    text = stream.getvalue()
    assert text.count("workload error: ValueError: no") == 3
    assert text.count('File "train.py"') == 1
    assert "\x1b" not in text


def test_our_lines_never_join_an_unfinished_line_of_the_users() -> None:
    for stream in (io.StringIO(), FakeTerminal()):
        progress = started(stream)
        progress.output("loss 0.1")
        progress.output(" and falling")
        progress.note("resumed")
        progress.ended()
        assert "loss 0.1 and falling\n" in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_no_character_is_escaped(is_terminal: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "utf-8")
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    progress = started(stream)
    progress.output("caf\u00e9 \udcff[/red]\x1b]0;title\x07\n")
    progress.note("then")
    progress.output("lone \ud800\n")
    progress.ended()
    assert b"caf\xc3\xa9 \\udcff[/red]\x1b]0;title\x07\n" in raw.getvalue()
    assert b"lone \\ud800\n" in raw.getvalue()


def test_a_stream_that_can_only_write_is_enough() -> None:
    lines: list[str] = []
    progress = TerminalProgress(Mock(spec=["write", "flush", "isatty"], write=lines.append, isatty=lambda: False))
    run_a_search(progress)
    assert any("resumed 3 trials" in line for line in lines)


def test_many_small_prints_are_few_writes_and_a_line_without_end_is_passed_on() -> None:
    stream = FakeTerminal()
    progress = started(stream)
    lines = [f"line {i} [bold\n" for i in range(20_000)]
    for line in lines:
        progress.output(line)
    progress.note("a line of ours")
    assert stream.num_writes < 200
    assert re.findall(r"line \d+ \[bold\n", stream.getvalue()) == lines
    progress.output("short")
    assert "short" not in stream.getvalue()
    progress.output("z" * 100_000)
    assert "short" + "z" * 100_000 in stream.getvalue()
    progress.ended()


class Broken(FakeTerminal):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_goes_away_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in ("dumb", "xterm-256color"):
        monkeypatch.setenv("TERM", terminal)
        run_a_search(TerminalProgress(Broken()))

"""How long a process may take for what, and what its end means: on scripted messages and a clock of their own."""

from __future__ import annotations

import queue
import signal
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from scripted_process import DEADLINES, FIRST, Script

from autotune_amp.core.job import ChildExit, Compilation, EndOfEvents, PartialResult, Phase, Ready, Result, StepDone
from autotune_amp.processes import process

DONE, STEP, COMPILING, SO_FAR, READY = Result(5), StepDone(1, 0.1), Compilation(), PartialResult(3), Ready()


def test_lines_that_are_no_message_end_nothing() -> None:
    """They are the remains of a killed writer's."""
    heard: Any = process.Process.__new__(process.Process)
    lines = [b"\xff\n", b"[" * 100_000 + b"\n", b'{"event"\n', b"3\n", b"[]\n", b"{}\n", b'{"event": 3}\n', b"\n"]
    heard._popen = SimpleNamespace(stdout=[*lines, b'{"event": "ready"}\n'])
    heard._events = queue.Queue()
    heard._read_events()
    assert [heard._events.get(), heard._events.get()] == [READY, EndOfEvents()]


@pytest.mark.parametrize(
    ("messages", "until", "ends_at"),
    [
        ([(30.0, FIRST), (9.0, STEP), (1.5, STEP), (1.5, DONE)], 100.0, None),  # building has no deadline of its own
        ([(1.0, FIRST), (12.0, STEP)], 100.0, 11.0),
        ([(1.0, FIRST), (1.0, STEP), (5.0, STEP)], 100.0, 4.0),
        ([(1.0, FIRST), (1.0, STEP), (1.5, SO_FAR), (1.5, STEP)], 100.0, 4.0),  # which is no sign of a step
        ([(30.0, FIRST)], 20.0, 20.0),
        ([(90.0, READY), (0.0, FIRST), (9.0, STEP), (1.5, STEP), (1.5, STEP), (1.5, DONE)], 100.0, None),
        ([(5.0, READY), (200.0, DONE)], 100.0, 45.0),  # the whole of it counts from there
        ([(1.0, FIRST), (1.0, COMPILING), (48.0, STEP), (1.0, DONE)], 100.0, None),  # half of what is left
        ([(1.0, FIRST), (1.0, COMPILING), (60.0, STEP)], 100.0, 51.0),
        ([(1.0, FIRST), (1.0, COMPILING), (60.0, STEP)], 8.0, 8.0),
        ([(1.0, FIRST), (1.0, STEP), (1.0, Phase("evaluating", 7.0))], 100.0, 10.0),
        ([(1.0, FIRST), (1.0, STEP), (1.0, Phase("a step on the worst batch"))], 40.0, 40.0),
    ],
)
def test_what_each_part_of_a_job_may_take(
    messages: Any, until: float, ends_at: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(*messages)
    if ends_at is None:
        assert script.waited(until, monkeypatch) == 5
        return
    assert script.failure(until, monkeypatch).kind == "timeout"
    assert ends_at < script.now <= ends_at + 0.5


def test_time_that_is_up_before_the_process_is_ready_is_nobodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Script((30.0, READY)).failure(20.0, monkeypatch).is_loading
    assert not Script((5.0, READY), (90.0, DONE)).failure(20.0, monkeypatch).is_loading


def test_a_template_kills_a_child_that_is_late_and_one_that_answered_and_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = Script((1.0, FIRST))
    assert late.failure(5.0, monkeypatch, ends_with_exit=True).kind == "timeout"
    answered = Script((1.0, DONE))
    assert answered.waited(100.0, monkeypatch, ends_with_exit=True) == 5
    ended = Script((1.0, DONE), (1.0, ChildExit(0)))
    assert ended.waited(100.0, monkeypatch, ends_with_exit=True) == 5
    assert (late.sent, answered.sent, ended.sent) == (["kill"], ["kill"], [])


@pytest.mark.parametrize(
    ("status", "num_oom_kills", "kind", "word"),
    [
        (-signal.SIGKILL, (3, 4), "oom", "memory"),
        (-signal.SIGKILL, (3, 3), "crash", "SIGKILL"),
        (-signal.SIGSEGV, (3, 4), "crash", "segmentation fault"),  # another process was out of memory meanwhile
        (7, (3, 3), "crash", "status 7"),
        (0, (3, 3), "crash", "before it reported"),
    ],
)
@pytest.mark.parametrize("is_forked", [True, False])
def test_how_a_process_ended_says_why(
    status: int, num_oom_kills: tuple[int, int], kind: str, word: str, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter(num_oom_kills)
    monkeypatch.setattr(process, "num_oom_kills", lambda: next(counted))
    script = Script((1.0, ChildExit(status) if is_forked else EndOfEvents()))
    script.status = status
    found = script.failure(100.0, monkeypatch, ends_with_exit=is_forked)
    assert found.kind == kind
    assert word in found.message


def test_what_sigterm_ended_is_no_failure_where_the_same_signal_is_on_its_way_to_us(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script((0.1, FIRST), (0.1, EndOfEvents()))
    script.status = -signal.SIGTERM
    arrives = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: script.now, sleep=arrives))
    with pytest.raises(KeyboardInterrupt):
        script.wait(None, DEADLINES)
    arrives.assert_called_once()


class Terminal(process.Watcher):
    """A terminal that takes a second for each text, on a clock of its own, while the next one is printed."""

    def __init__(self, chunks: queue.Queue[str]) -> None:
        self.now = 0.0
        self.chunks = chunks

    def output(self, text: str) -> None:
        self.now += 1.0
        if self.now < 1000.0:
            self.chunks.put(text)


def test_a_process_that_prints_without_end_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    flooding: Any = process.Process.__new__(process.Process)
    flooding._output_chunks, flooding._events, flooding._tail = queue.Queue(), queue.Queue(), deque()
    flooding.watcher = terminal = Terminal(flooding._output_chunks)
    flooding._output_chunks.put("waiting for data")
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: terminal.now))
    with pytest.raises(process.ProcessEndedError):
        flooding.wait(10.0)
    assert terminal.now < 20.0


def test_printed_text_waits_for_the_terminal_until_the_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    printing: Any = process.Process.__new__(process.Process)
    printing._output_chunks, printing._is_ending, printing._tail = queue.Queue(2), False, deque()
    printing._popen = SimpleNamespace(stderr=Mock())
    chunks = iter([b"1", b"2", b"3", b"4", b"5", b""])
    monkeypatch.setattr(process, "os", SimpleNamespace(read=lambda *_: next(chunks)))
    reader = threading.Thread(target=printing._read_output, daemon=True)
    reader.start()
    assert [printing._output_chunks.get() for _ in range(2)] == ["1", "2"]
    reader.join(0.3)
    assert reader.is_alive()
    printing._is_ending = True
    reader.join(20)
    assert not reader.is_alive()
    assert [printing._output_chunks.get() for _ in range(2)] == ["3", "4"]
    assert printing._output_chunks.empty()


def test_ctrl_c_while_its_compilers_end_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ending: Any = process.Process.__new__(process.Process)
    ending.watcher, ending._program = process.Watcher(), Mock()
    monkeypatch.setattr(process, "terminate_programs", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ending.end()
    ending._program.close.assert_called_once_with()
    assert ending._is_ending

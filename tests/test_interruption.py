"""Signals inside `interruptible`: what is going on is interrupted and may still save; SIGTERM ends the process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import CommandLine

from autotune_amp.interruption import EXIT_CODE, heed, interruptible

DROPPED = """
import signal
from autotune_amp import cli
from autotune_amp.processes import process

class Drops:
    def __del__(self):
        signal.raise_signal(signal.NUMBER)

once = [Drops()]
hear = process.Process._next_event

def hears(self):
    once.clear()
    return hear(self)

process.Process._next_event = hears
cli.main()
"""
SCRIPT = """
import os, signal, threading, time
import torch
from autotune_amp import Workload, recommend_config

def workload():
    def loss(model, batch):
        time.sleep(0.02)
        return model(batch).pow(2).mean()
    return Workload(lambda: torch.nn.Linear(4, 1), loss, lambda n: torch.randn(n, 4), torch.optim.SGD)

def end_once_measured():
    path = "studies/workload/outcomes.jsonl"
    while not (os.path.exists(path) and open(path).read().count("\\n") > 1):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_once_measured, daemon=True).start()
try:
    recommend_config(workload, device="cpu", precision="fp32", batch_size="1:64", budget=110, quiet=True)
finally:
    print("cleaned up", flush=True)
print("training")
"""


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """That of a process nobody has set one for, whatever runs the tests."""
    defaults: dict[signal.Signals, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, default) for number, default in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_it_interrupts_and_then_ends_the_process() -> None:
    saved = []

    @interruptible()
    def search() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)  # as a launcher forwards it
            saved.append("best so far")

    with pytest.raises(SystemExit) as ended:
        search()
    assert (ended.value.code, saved) == (EXIT_CODE, ["best so far"])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_raised_on_the_way_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    @interruptible()
    def search() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("the best is in studies/train") from None

    with pytest.raises(SystemExit) as ended:
        search()
    assert (ended.value.code, capsys.readouterr().err) == (EXIT_CODE, "the best is in studies/train\n")


def test_what_nobody_has_answered_is_heard_again_and_only_inside() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(SystemExit), interruptible():
            heed()
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(number)
            with pytest.raises(KeyboardInterrupt):
                heed()
        heed()


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGTERM", EXIT_CODE)])
def test_a_signal_that_falls_into_a_finalizer_ends_a_command(cli: CommandLine, number: str, code: int) -> None:
    cli.write("dropped.py", DROPPED.replace("NUMBER", number))
    done = cli.python("dropped.py", "search", "--device", "cpu")
    assert done.code == code, done.err
    assert "Interrupted" in done.err
    assert cli.leftovers() == []


def test_without_a_signal_nothing_is_changed() -> None:
    with pytest.raises(ValueError, match="my own"), interruptible():
        raise ValueError("my own")
    with interruptible():
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_own_is_left_to_it() -> None:
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    with interruptible():
        signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_in_another_thread_it_changes_nothing() -> None:
    seen = []

    def look() -> None:
        with interruptible():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


@pytest.mark.slow
def test_a_script_that_searches_saves_the_best_so_far_and_does_not_train(cli: CommandLine) -> None:
    cli.write("train.py", SCRIPT)
    done = cli.python("train.py")
    assert done.code == EXIT_CODE, done.err
    assert done.out == "cleaned up\n"
    assert "recommendation.json" in done.err
    assert (cli.folder / "studies/workload/recommendation.json").exists()
    assert cli.leftovers() == []

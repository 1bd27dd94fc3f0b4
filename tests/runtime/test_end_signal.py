"""SIGTERM in a training: `on_signal` is called between windows, and a run saved there goes on."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CommandLine

from autotune_amp import AmpConfig, PrecisionController
from autotune_amp.core.errors import InvalidRequestError

CONFIG = AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2)


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """What a handler heard that was there before the controller's."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


class Run:
    """A training whose `on_signal` saves it; `step` is one window."""

    def __init__(self, saved: dict[str, Any] | None = None, *, on_signal: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.controller = PrecisionController(CONFIG, "cpu", on_signal=self.save if on_signal else None)
        self.num_steps = 0
        self.saved: list[dict[str, Any]] = []
        if saved is not None:
            self.num_steps = saved["num_steps"]
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.controller.load_state_dict(saved["controller"])

    def save(self) -> None:
        states = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "controller")}
        self.saved.append(copy.deepcopy({"num_steps": self.num_steps, **states}))

    def step(self, signal_after: int | None = None) -> None:
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps)
        for number in range(CONFIG.accumulation_steps):
            with self.controller.autocast():
                loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
            self.controller.backward(loss / CONFIG.accumulation_steps)
            if number == signal_after:
                signal.raise_signal(signal.SIGTERM)
                assert self.saved == [], "in the middle of a window there is nothing to save"
        self.controller.step(self.optimizer)
        self.controller.update()
        self.optimizer.zero_grad()


def test_it_is_called_between_windows_and_what_it_saves_goes_on(heard: list[int]) -> None:
    first = Run()
    first.step()
    first.step(signal_after=0)
    assert [saved["num_steps"] for saved in first.saved] == [2]
    second = Run(first.saved[0])
    for run in (first, second):
        run.step()
        run.step()
    assert torch.equal(first.model.weight, second.model.weight)
    assert len(first.saved) == 1
    assert heard == []
    second.controller.detach()


def test_the_handler_of_before_is_back_once_it_was_called_and_after_detach(heard: list[int]) -> None:
    run = Run()
    run.step(signal_after=1)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    other = Run()
    other.controller.detach()
    other.step(signal_after=1)
    assert (heard, other.saved) == ([signal.SIGTERM] * 2, [])


def test_a_signal_after_the_last_window_goes_to_the_handler_of_before(heard: list[int]) -> None:
    run = Run()
    run.step()
    signal.raise_signal(signal.SIGTERM)
    assert heard == []
    run.controller.detach()
    run.controller.detach()
    assert (heard, run.saved) == ([signal.SIGTERM], [])


def test_a_closed_handler_that_a_framework_puts_back_is_passed_through(heard: list[int]) -> None:
    run = Run()
    ours = signal.getsignal(signal.SIGTERM)
    run.controller.detach()
    signal.signal(signal.SIGTERM, ours)
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_constructor_that_fails_leaves_the_handler_of_before(heard: list[int], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        PrecisionController(CONFIG, "cpu", on_signal=print, run_log=tmp_path / "missing" / "run.jsonl")
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_second_signal_ends_neither_the_window_nor_what_saves(heard: list[int]) -> None:
    run = Run(on_signal=False)

    def save() -> None:
        signal.raise_signal(signal.SIGTERM)
        run.save()

    run.controller = PrecisionController(CONFIG, "cpu", on_signal=save)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    run.step()
    assert (len(run.saved), heard) == (1, [])
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_an_exit_in_the_callback_comes_out_of_update(heard: list[int]) -> None:
    run = Run(on_signal=False)

    def stop() -> None:
        sys.exit(143)

    run.controller = PrecisionController(CONFIG, "cpu", on_signal=stop)
    with pytest.raises(SystemExit):
        run.step(signal_after=1)
    assert heard == []


def test_in_another_thread_it_cannot_be_had(heard: list[int]) -> None:
    errors = []

    def make() -> None:
        try:
            Run()
        except InvalidRequestError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in errors[0].message
    signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


FORKING = """
import multiprocessing, time
from autotune_amp import AmpConfig, PrecisionController

def work(is_up):
    is_up.set()
    time.sleep(600)

controller = PrecisionController(AmpConfig(precision="bf16", batch_size=4), "cpu", on_signal=print)
forking = multiprocessing.get_context("fork")
is_up = forking.Event()
process = forking.Process(target=work, args=(is_up,), daemon=True)
process.start()
is_up.wait()
process.terminate()
process.join(60)
print(process.exitcode)
"""


def test_a_process_forked_from_the_training_ends_when_it_is_told_to(cli: CommandLine) -> None:
    cli.write("train.py", FORKING)
    assert cli.python("train.py").out == "-15\n"


LOADING = """
import signal, sys
import torch
from autotune_amp import AmpConfig, PrecisionController

def stay(worker):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def save():
    print("saved", flush=True)
    sys.exit(143)

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
controller = PrecisionController(AmpConfig(precision="bf16", batch_size=4), "cpu", on_signal=save)
loader = torch.utils.data.DataLoader(torch.randn(10**6, 8), batch_size=4, num_workers=1, worker_init_fn=stay)
for number, batch in enumerate(loader):
    with controller.autocast():
        loss = model(batch).square().mean()
    controller.backward(loss)
    controller.step(optimizer)
    controller.update()
    optimizer.zero_grad()
    if number == 2:
        print("training", flush=True)
"""


@pytest.mark.slow
def test_a_signal_to_the_loader_workers_too_ends_in_a_checkpoint(cli: CommandLine) -> None:
    cli.write("train.py", LOADING)
    process = cli.start_python("train.py")
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"
    cli.terminate_all(process)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "saved\n"), err

"""Sinks: what they are told, and that whatever one does the training goes on as if it were not there."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import batches, fp16, same

from autotune_amp.runtime import run_log, sinks
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.run_log import MoveLine, SampleLine
from autotune_amp.runtime.sinks import MetricValues, Sink, SinkThread
from autotune_amp.runtime.status import METRICS, PREFIX, metric_values


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 30
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= before


def train(*given: Sink, num_updates: int = 130, **options: Any) -> tuple[nn.Module, PrecisionController]:
    """An overflow at update 30, a move by hand at 100."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller = PrecisionController(fp16(), device="cpu", sinks=given, **options)
    for place, (inputs, targets) in enumerate(batches(num_updates)):
        if place == 100:
            controller.set_precision("bf16")
        scale = 1e4 if place == 30 else 1.0
        controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets) * scale, optimizer)  # noqa: B023
    return model, controller


def test_a_sink_hears_what_the_run_log_holds_under_the_same_names(tmp_path: Path) -> None:
    told: list[MetricValues] = []
    _, controller = train(told.append, run_log=tmp_path / "run.jsonl")
    controller.detach()
    lines = run_log.read(tmp_path / "run.jsonl").lines[1:]
    assert [line.update for line in lines] == [31, 64, 100, 128, 130], "the end, too"
    for values, line in zip(told, lines, strict=True):
        of_move = {PREFIX + name for name in ("move", "before", "reason", "pinned_modules")}
        assert {name: value for name, value in values.items() if name not in of_move} == metric_values(line)
        assert (of_move <= set(values)) == isinstance(line, MoveLine)
    assert told[0][PREFIX + "overflows"] == 1
    assert (told[2][PREFIX + "move"], told[2][PREFIX + "before"], told[2][PREFIX + "precision"]) == (
        "by_hand",
        "fp16",
        "bf16",
    )
    document = (tmp_path / "run.jsonl").read_text().splitlines()[1]
    assert all(f'"{metric.name.removeprefix(PREFIX)}":' in document for metric in METRICS.values())


def test_an_end_that_was_told_already_is_not_told_twice() -> None:
    told: list[MetricValues] = []
    _, controller = train(told.append, num_updates=128)
    controller.detach()
    assert len(told) == 4


def test_every_metric_says_what_it_is() -> None:
    assert {metric.name for metric in METRICS.values()} >= {
        PREFIX + name
        for name in ("scale", "precision", "skips", "overflows", "bad_batches", "step_seconds", "flushed_share", "loss")
    }
    assert all(metric.description.endswith(".") and metric.unit for metric in METRICS.values())
    assert set(METRICS) <= set(SampleLine.__struct_fields__)


def raises(values: MetricValues) -> None:
    raise ConnectionError("the server is away")


def test_sinks_know_nothing_of_one_another_whatever_they_raise() -> None:
    told: list[MetricValues] = []

    def sink(values: MetricValues) -> None:
        values.clear()  # type: ignore[attr-defined] # what it should not
        raise SystemExit

    _, controller = train(sink, told.append, sink)
    controller.detach()
    assert [len(values) > 8 for values in told] == [True] * 5


def test_a_forked_child_has_a_thread_of_its_own(tmp_path: Path) -> None:
    sink_thread = SinkThread(lambda values: (tmp_path / str(values["number"])).touch())
    sink_thread.send({"number": 1})
    child = os.fork()
    if child == 0:
        sink_thread.send({"number": 2})
        sink_thread.close()
        os._exit(0)
    os.waitpid(child, 0)
    sink_thread.close()
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


def test_a_sink_that_raises_is_warned_of_once_and_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="autotune_amp.runtime")
    calls: list[MetricValues] = []

    def sink(values: MetricValues) -> None:
        calls.append(values)
        raises(values)

    model, controller = train(sink)
    controller.detach()
    assert len(calls) == 5
    assert caplog.text.count("ConnectionError: the server is away") == 1
    alone, _ = train()
    assert same(model, alone)


def test_a_sink_that_hangs_holds_nobody_up_and_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="autotune_amp.runtime")
    monkeypatch.setattr(sinks, "MAX_WAITING", 2)
    monkeypatch.setattr(sinks, "_END_SECONDS", 0.1)
    goes_on, told = threading.Event(), []

    def sink(values: MetricValues) -> None:
        goes_on.wait()
        told.append(values)

    model, controller = train(sink, num_updates=400)
    assert caplog.text.count("metrics are dropped") == 1
    controller.detach()
    goes_on.set()
    alone, _ = train(num_updates=400)
    assert same(model, alone)
    assert len(told) <= 3


def test_what_is_left_behind_ends_with_its_controller() -> None:
    told: list[MetricValues] = []

    def forgotten() -> None:
        _, controller = train(told.append)
        copied = copy.deepcopy(controller)
        assert copied.status().num_updates == 130

    forgotten()  # and `no_thread_is_left`


def test_an_outlet_begins_anew_after_it_was_closed() -> None:
    told: list[MetricValues] = []
    sink_thread = SinkThread(told.append)
    sink_thread.close()
    for number in range(3):
        sink_thread.send({"number": number})
        sink_thread.close()
    assert told == [{"number": 0}, {"number": 1}, {"number": 2}]


def test_a_controller_that_tells_nothing_starts_no_thread() -> None:
    before = threading.active_count()
    PrecisionController(fp16(), device="cpu", sinks=[raises])
    assert threading.active_count() == before

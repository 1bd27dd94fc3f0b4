"""How updates are counted, apart from any training."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.evidence import MeasuredFlops
from autotune_amp.runtime import metrics, scaler
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.metrics import MetricsRecorder
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.scaler import BAD_LOSS, CLEAN, GradientCheck, LaggedReader, LossScaler, Ranks, UpdateResult


def test_only_the_bad_batches_of_the_same_burst_are_explained_by_an_overflow() -> None:
    policy = Policy(["fp16"])
    config = AmpConfig(precision="fp16", batch_size=1, loss_scale=LossScale())
    ranks = Ranks(torch.device("cpu"))
    recorder = MetricsRecorder(config, policy, LossScaler(policy.scale), ranks, sinks=(), run_log=None)
    for verdict, is_overflow in [(BAD_LOSS, False), (CLEAN, False), (BAD_LOSS, False), (BAD_LOSS, True)]:
        recorder.begin_update(UpdateResult({0: verdict}, math.nan), is_overflow=is_overflow)
    assert (recorder.totals.num_bad_batches, recorder.totals.num_overflows) == (1, 2)


def test_tokens_per_second_and_mfu_reach_status_run_log_and_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 0.5)  # an update takes half a second
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    config = AmpConfig(precision="fp32", batch_size=4, accumulation_steps=2)
    flops = MeasuredFlops(flops_per_sample=30.0, machine_flops_per_second={"fp32": 960.0})
    told: list[Mapping[str, Any]] = []
    log = tmp_path / "run.jsonl"
    controller = PrecisionController(config, "cpu", run_log=log, sinks=[told.append], measured_flops=flops)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(4, 2)
    for number, _ in enumerate(controller.windows([batch] * 2 * 64)):
        num_tokens: Any = torch.tensor(7) if number % 2 else np.int64(3)  # ten in an update
        controller.train_step(lambda: model(batch).mean(), optimizer, num_tokens=num_tokens)
    status = controller.status()
    assert status.tokens_per_second == pytest.approx(20)
    assert status.mfu == pytest.approx(8 * 30 / 0.5 / 960)
    controller.detach()
    *_, last = map(json.loads, log.read_text().splitlines())
    assert (last["tokens_per_second"], last["mfu"]) == (status.tokens_per_second, status.mfu)
    assert told[-1]["autotune_amp/tokens_per_second"] == status.tokens_per_second
    assert told[-1]["autotune_amp/mfu"] == status.mfu


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_step_takes_as_long_however_often_its_late_verdict_is_asked_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update takes half a second of a clock that the host and the events of a device share."""
    now = [0.0]

    class Event:
        device = torch.device(kind)

        def __init__(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * float(other.at - self.at)  # milliseconds

    push_on_host = LaggedReader.push

    def push(reader: Any, values: Any, label: Any) -> None:
        push_on_host(reader, values, label)
        host, _, *others = reader._waiting.pop()
        reader._waiting.append((host, Event(), *others))

    for module in (metrics, scaler):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
    monkeypatch.setattr(LaggedReader, "push", push)
    controller = PrecisionController(AmpConfig(precision="fp32", batch_size=4), "cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for number in range(1, 21):
        controller.train_step(lambda: model(torch.ones(4, 2)).mean(), optimizer)
        now[0] += 0.5
        if number % 5 == 0:
            assert controller.status().step_seconds == pytest.approx(0.5)


def test_tokens_of_a_discarded_window_do_not_count_and_a_batch_without_ids_has_none() -> None:
    controller = PrecisionController(AmpConfig(precision="fp32", batch_size=4), "cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller.count_tokens({"input_ids": torch.ones(1000, dtype=torch.long)})
    controller.discard_window()
    for _ in range(3):
        controller.count_tokens((torch.ones(1000, dtype=torch.long),))
        controller.train_step(lambda: model(torch.ones(4, 2)).mean(), optimizer)
    assert controller.status().tokens_per_second is None


def test_one_of_several_runs_that_srun_starts_side_by_side_has_its_log_and_sinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    told: list[Mapping[str, Any]] = []
    log = tmp_path / "run.jsonl"
    config = AmpConfig(precision="fp32", batch_size=4)
    controller = PrecisionController(config, "cpu", run_log=log, sinks=[told.append])
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    controller.train_step(lambda: model(torch.ones(4, 2)).mean(), optimizer)
    controller.detach()
    begin, _ = map(json.loads, log.read_text().splitlines())
    assert (begin["rank"], len(told)) == (0, 1)

"""A model built once in the process that trials are forked from: what its children train, count and inherit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from listening import Listener

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.trial.jobs import Trial

pytestmark = pytest.mark.usefixtures("forked_processes")

WORKLOAD = """
import os
import torch
from torch import nn
from autotune_amp import Workload

TEMPLATE = os.getpid()

def model():
    print("built-in", os.getpid())
    torch.set_num_threads(3)
    torch.backends.cudnn.benchmark = True
    EXTRA
    model = nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Linear(512, 1))
    model.register_buffer("table", torch.ones(1 << 25))
    return model

def loss(model, batch):
    loss = model(batch).square().mean()
    print("loss", float(loss).hex(), "flags", f"{torch.get_num_threads()}-{torch.backends.cudnn.benchmark}")
    return loss

def workload():
    return Workload(model, loss, lambda n: torch.ones(n, 4), lambda p: torch.optim.SGD(p, lr=1e-6, momentum=0.9))
"""


def payload(folder: Path, extra: str = "pass") -> Payload:
    (folder / "train.py").write_text(WORKLOAD.replace("EXTRA", extra))
    return Payload(target="train:workload", path=(str(folder), *sys.path))


def opened(runner: LocalBackend, **fields: Any) -> Trial:
    runner.load(60)
    state, reason, _ = runner.open("cpu", None, 60)
    assert reason is None
    candidate = Setting(precision="fp32", batch_size=4)
    steps: Any = {"num_warmup_steps": (3, 3), "num_steps": (1, 1)}
    return Trial(candidate=candidate, device="cpu", torch_state=state, seed=5, **steps, **fields)


def test_children_of_a_template_that_built_train_as_those_that_build_their_own(tmp_path: Path) -> None:
    listener = Listener()
    with LocalBackend(payload(tmp_path), "forked", listener) as runner:
        spec = opened(runner, memory_limit_bytes=2**30)
        own = runner.submit(spec).result()
        assert runner.share_build(spec, 60) is None
        shared = [runner.submit(spec).result() for _ in range(2)]
        assert len(set(listener.words("built-in"))) == 2
        template = max(psutil.Process().children(recursive=True), key=psutil.Process.create_time)
        template.kill()
        assert runner._process is not None
        runner._process._program.wait(60)  # the status of a fork comes after its end
        shared.append(runner.submit(spec).result())
    assert len(listener.words("built-in")) == 3
    assert isinstance(own, Measurement)
    assert not own.is_build_shared
    losses = listener.words("loss")
    assert losses[:4] == losses[4:8] == losses[8:12] == losses[-4:]
    assert set(listener.words("flags")[:12]) == {"3-True"}
    assert own.reserved_memory_bytes > 2**27, "the table is 128 MiB"
    for outcome in shared:
        assert isinstance(outcome, Measurement)
        assert outcome.is_build_shared
        assert outcome.reserved_memory_bytes == pytest.approx(own.reserved_memory_bytes, rel=0.06)
        assert outcome.peak_memory_bytes == pytest.approx(own.peak_memory_bytes, rel=0.06)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        pytest.param("torch._C.set_num_threads(2); torch.ones(1 << 22).add_(1).sum()", "hung", marks=pytest.mark.slow),
        pytest.param("os.getpid() == TEMPLATE and 1 / 0", "ZeroDivisionError", id="raises in the template"),
    ],
)
def test_what_cannot_be_built_in_a_template_is_said(tmp_path: Path, extra: str, reason: str) -> None:
    with LocalBackend(payload(tmp_path, extra), "forked", Listener()) as runner:
        spec = opened(runner)
        assert reason in (runner.share_build(spec, 60) or "")
        assert not runner.is_build_shared
        runner.keep()
        assert isinstance(runner.submit(spec).result(), Measurement) == ("1 / 0" not in extra)

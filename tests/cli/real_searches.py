"""A workload for real searches through the command line, and a search with what it left."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import CommandLine, Finished, command_line
from forked_python import ForkServer

# A step takes as long for any batch, so that the largest is the fastest on any machine; 32 samples fail.
WORKLOADS = """
import os, signal, subprocess, sys, time
import torch
from torch import nn
from autotune_amp import Workload

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)

def make_batch(size):
    return torch.randn(size, 8), torch.randn(size, 1)

def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def workload():
    def loss(model, batch):
        time.sleep(0.02)
        assert len(batch[0]) != 32, "not thirty-two"
        return squares(model, batch)
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, sgd)

def plain():
    def loss(model, batch):
        time.sleep(0.02)
        return squares(model, batch)
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, sgd)

def failing():
    def loss(model, batch):
        print("x" * 2_000_000)
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        if len(batch[0]) == 4:
            raise ValueError("the moon is full")
        if len(batch[0]) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(batch[0]) == 16:
            sys.exit(0)
        return squares(model, batch) * float("nan")
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, sgd)
"""
FP32 = ("--precision", "fp32", "--device", "cpu", "--effective-batch-size", "free")
FOUND = ("train.py:workload", *FP32, "--budget", "60", "--baseline", "fp32:4", "--batch-size", "4:32")
CHECKS = {"fidelity", "calibration", "accumulation", "profile"}  # purposes of records that are no trials
TRAINING_TO_COME = ("--steps", "1000", "--price-per-hour", "3")


@dataclass
class Searched:
    """A search that ended, in a folder that the tests which read it leave as it is."""

    folder: Path
    study: Path
    done: Finished

    @property
    def document(self) -> dict[str, Any]:
        return self.done.document

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.study / "outcomes.jsonl").read_text().splitlines()]


def searched(server: ForkServer | None, folder: Path, text: str, *arguments: str) -> Searched:
    """A real search in `folder`; it must leave no process and no temporary file behind."""
    (folder / "train.py").write_text(text)
    with command_line(folder, server) as cli:
        done = cli.search(*arguments)
    (study,) = (folder / "studies").iterdir()
    return Searched(folder, study, done)


def lines(cli: CommandLine) -> list[dict[str, Any]]:
    """The records so far of a search of `plain`."""
    path = cli.folder / "studies/train-plain/outcomes.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def end_by(cli: CommandLine, process: subprocess.Popen[str], way: signal.Signals) -> None:
    """End a search so: by SIGTERM all its processes, as Slurm does; nothing of it may be left."""
    if way == signal.SIGTERM:
        cli.terminate_all(process)
    else:
        process.send_signal(way)
    _, err = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[way], err
    assert cli.wait_until_alone() == []


def wait_for_lines(cli: CommandLine, process: subprocess.Popen[str], count: int) -> None:
    deadline = time.monotonic() + 150
    while len(lines(cli)) < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)

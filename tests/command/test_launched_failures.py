"""Commands whose ranks fail, and commands that cannot be seen into, in real processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import TORCHRUN
from running_commands import run_command

from autotune_amp.command.measure import slowest_rank
from autotune_amp.command.running import CompletedRun
from autotune_amp.core.outcome import Failure

pytestmark = pytest.mark.usefixtures("forked_processes")

RANKS = """
import os, signal, sys, time, torch, torch.distributed
from torch import nn
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
if sys.argv[1] == "fsdp":
    from torch.distributed.fsdp import fully_shard as wrap
else:
    from torch.nn.parallel import DistributedDataParallel as wrap
model = wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = torch.utils.data.DistributedSampler(data)
workers = {{"num_workers": 2}} if "workers" in sys.argv else {{}}
for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler, **workers)):
    if torch.distributed.get_rank() == 1 and number == {number}:
        {fault}
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""


def ran(command: list[str], **how: Any) -> CompletedRun:
    """To its end, however many steps it takes."""
    return run_command(command, is_enough=lambda _: False, **how)


def failure(found: CompletedRun) -> Failure:
    assert isinstance(found.verdict, Failure)
    return found.verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "fault", "kind", "says"),
    [
        (5, "torch.empty(1 << 50)", "oom", "rank 1: RuntimeError"),
        (0, "os.kill(os.getpid(), signal.SIGKILL)", "crash", "rank 1 died of SIGKILL"),
        (5, "raise ValueError('a fault of the script')", "workload_error", "rank 1: ValueError: a fault of the script"),
    ],
)
def test_the_rank_that_fails_is_named(tmp_path: Path, number: int, fault: str, kind: str, says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS.format(number=number, fault=fault))
    found = failure(ran([*TORCHRUN, str(script), "ddp"]))
    assert found.kind == kind
    assert says in found.message


@pytest.mark.slow
def test_ranks_that_end_by_an_argument_are_quoted(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import argparse, torch\nargparse.ArgumentParser().parse_args()\n")
    found = failure(ran([*TORCHRUN, str(script), "--wrong"]))
    assert found.kind == "crash"
    assert "unrecognized arguments: --wrong" in found.message


@pytest.mark.slow
def test_the_rank_that_is_killed_is_named_while_its_workers_live(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS.format(number=5, fault="os.kill(os.getpid(), signal.SIGKILL)"))
    found = failure(ran([*TORCHRUN, str(script), "ddp", "workers"]))
    assert "rank 1 died of SIGKILL" in found.message


class HangDeadlines(SimpleNamespace):
    """Deadlines that are over five seconds after a file was written, however long a busy machine took until then."""

    def __init__(self, file: Path) -> None:
        super().__init__(whole_seconds=250.0)
        self._file = file

    def _of(self) -> float:
        return 0.0 if self._file.exists() and time.time() - self._file.stat().st_mtime > 5.0 else 250.0

    first_step_seconds = step_seconds = property(_of)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "number"), [("ddp", 0), ("fsdp", 5)])
def test_the_rank_that_hangs_is_named_with_its_stack(tmp_path: Path, model: str, number: int) -> None:
    script, hangs = tmp_path / "train.py", tmp_path / "hangs"
    script.write_text(RANKS.format(number=number, fault=f"open({str(hangs)!r}, 'w').close(); time.sleep(1000)"))
    found = failure(ran([*TORCHRUN, str(script), model], deadlines=HangDeadlines(hangs)))
    assert found.kind == "timeout"
    assert "rank 1 hangs" in found.message
    assert "time.sleep(1000)" in (found.details or "").split("rank 0")[0]


@pytest.mark.slow
def test_fsdp_is_heard_whole_with_values_set_from_outside_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS.format(number=-1, fault="pass"))
    for agent in ({}, {"outside": {"precision": "bf16", "batch_size": 4}}):
        found = ran([*TORCHRUN, str(script), "fsdp"], agent=agent)
        assert found.verdict == "measured"
        assert [len(rank.primary_steps) for rank in found.events.ranks.values()] == [32 if agent else 16] * 2
        assert slowest_rank(found.events) is not None


@pytest.mark.parametrize(
    ("arguments", "about"),
    [(["-E", "-c", "pass"], "env -i"), (["-c", "pass"], "imported torch"), (["-c", "import torch"], "checkpoint")],
)
def test_a_command_without_steps(arguments: list[str], about: str) -> None:
    found = failure(ran([sys.executable, *arguments]))
    assert found.kind == "workload_error"
    assert about in found.message

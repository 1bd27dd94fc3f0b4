"""Messages of ranks that no process has sent: what `ranks`, `verdict` and `measure` decide from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from autotune_amp.command import messages
from autotune_amp.command.ranks import RunEvents

STEP_SECONDS = 0.5


def optimizer(pid: int, rank: int = 0, world: int = 1, index: int = 0, **more: Any) -> messages.Optimizer:
    fields = {
        "name": "torch.optim.sgd.SGD",
        "num_parameters": {"float32": 10},
        "devices": ("cpu",),
        "uses_tf32": False,
        "line": "train.py:1",
    }
    return messages.Optimizer(pid=pid, time=0.0, rank=rank, world=world, index=index, **{**fields, **more})


def loader(pid: int, index: str = "0", **more: Any) -> messages.Loader:
    fields = {
        "maker": "train.py:1",
        "line": "train.py:1",
        "batch_size": 8,
        "num_workers": 0,
        "prefetch_factor": None,
        "shuffles": True,
        "num_samples": 64,
    }
    return messages.Loader(pid=pid, time=0.0, index=index, **{**fields, **more})


def step(pid: int, number: int, **more: Any) -> messages.Step:
    """The step `number` from 1 on, 8 samples and a backward pass more than the one before."""
    fields: dict[str, Any] = {
        "time": STEP_SECONDS * number,
        "optimizer": 0,
        "is_skipped": False,
        "losses": (1.0,),
        "num_backward": number,
        "forwards": (),
        "regions": (),
        "num_samples": {"0": 8 * number},
        "num_batches": number,
        "wait_seconds": 0.0,
        "num_compilations": 0,
        "is_settled": True,
        "peak_memory_bytes": 1000,
    }
    return messages.Step(pid=pid, **{**fields, **more})


def torch(pid: int, rank: int = 0, world: int = 1, parent: int = 1, worker: str | None = None) -> messages.Torch:
    return messages.Torch(
        pid=pid,
        time=0.0,
        rank=rank,
        world=world,
        arguments=("train.py",),
        parent_pid=parent,
        folder="/",
        worker=worker,
    )


def hello(pid: int) -> messages.Hello:
    return messages.Hello(pid=pid, time=0.0)


def error(pid: int, name: str, message: str, rank: int = 0, world: int = 1, **more: Any) -> messages.Error:
    fields = {"types": (name, "Exception"), "message": message, "traceback": f"Traceback\n{message}"}
    return messages.Error(pid=pid, time=0.0, rank=rank, world=world, **{**fields, **more})


def closed(pid: int) -> messages.ConnectionClosed:
    return messages.ConnectionClosed(pid=pid, time=0.0)


def heard(said: Iterable[messages.Message]) -> RunEvents:
    """What was heard of messages in their order."""
    found = RunEvents()
    for message in said:
        found.add(message)
    return found


def trained(num_steps: Sequence[int], **more: Any) -> RunEvents:
    """Ranks of one training, pids from 100 on, each with so many steps."""
    world = len(num_steps)
    found = heard([hello(1), torch(1)])
    for rank, num in enumerate(num_steps):
        pid = 100 + rank
        for message in (hello(pid), torch(pid, rank, world), loader(pid)):
            found.add(message)
        for number in range(1, num + 1):
            if number == 1:
                found.add(optimizer(pid, rank, world))
            found.add(step(pid, number, **more))
    return found

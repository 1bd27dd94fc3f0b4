"""A trial that several processes train together under DistributedDataParallel: rank 0 measures, the others follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.trial.training import BaseTraining


class Exchanging(DistributedDataParallel):
    """The model as its ranks call it; what the user's loss asks of it beside its output is the model's own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def joined(training: BaseTraining) -> Iterator[None]:
    """Meet the other ranks, and exchange gradients with them inside; does nothing for one rank alone."""
    spec = training.spec
    if spec.num_ranks == 1:
        yield
        return
    kind = "gloo" if training.device.type == "cpu" else dist.get_default_backend_for_device(training.device)
    dist.init_process_group(kind, init_method=f"tcp://{spec.meeting}", rank=spec.rank, world_size=spec.num_ranks)
    training.called = exchanging(training.model)
    training.no_sync = training.called.no_sync
    yield
    # After an error it may wait for peers that do not come: then the process ends, which they hear of.
    training.called, training.no_sync = training.model, nullcontext
    dist.destroy_process_group()


def exchanging(model: nn.Module) -> Exchanging:
    """The model under DistributedDataParallel, on the device where it lies."""
    device = next(model.parameters()).device
    return Exchanging(model, device_ids=None if device.type == "cpu" else [device])


def follow(training: BaseTraining) -> NoReturn:
    """Take steps beside rank 0 for as long as there is one: each waits for its gradients."""
    num_passes = training.spec.num_timed_micro_batches
    while True:
        for number in range(num_passes):
            training.forward_backward(training.next_batch(), is_last=number == num_passes - 1)
        training.update()
        if training.device.type != "cpu":
            torch.accelerator.synchronize(training.device)

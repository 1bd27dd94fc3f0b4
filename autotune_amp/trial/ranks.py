"""A trial that several processes train together under DistributedDataParallel: rank 0 measures, the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs leave it out
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.hardware.measuring import synchronize
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import BaseTraining, Training

_MEETING_SECONDS = 300.0  # torch's own
_COMPILATIONS, _NUM_STEPS = "compilations", "steps"


class _WithLoss(nn.Module):
    """A model with its loss: whichever of the model's methods the loss calls, gradients are exchanged after it."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


class Peers:
    """The other ranks of a trial, and what is said to them beside gradients."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def note_compiling(self) -> None:
        """Say that a compiler ran here: rank 0 waits for it."""
        self._store.add(_COMPILATIONS, 1)

    def num_compilations(self) -> int:
        """Those of the ranks that follow."""
        return int(self._store.add(_COMPILATIONS, 0))

    @contextmanager
    def led(self, training: BaseTraining) -> Iterator[None]:
        """Have the others take every step that is taken inside. After an error they are left waiting: the process is to
        end, which they hear of."""
        with _exchanging(training):
            yield
            self._store.add(_NUM_STEPS, training.num_steps_taken + 1)
            _pass_on_gradients(training)  # the last one, which they may have begun

    def follow(self, training: BaseTraining, poll: Callable[[], None]) -> None:
        """Take steps beside rank 0 until they are as many as it says at its end; `poll` is called after each."""
        num_steps = 0
        with _exchanging(training):
            while not (whole := self._store.add(_NUM_STEPS, 0)) or num_steps < whole:
                num_steps += 1
                _pass_on_gradients(training)
                training.update()
                synchronize(training.device)
                poll()


@contextmanager
def met(spec: Trial) -> Iterator[Peers | None]:
    """The other ranks of a trial, in the default process group with them; None for one that trains alone."""
    if spec.num_ranks == 1:
        yield None
        return
    host, _, port = spec.meeting.rpartition(":")
    kind = "gloo" if spec.device == "cpu" else dist.get_default_backend_for_device(torch.device(spec.device))
    limit = timedelta(seconds=spec.deadline_seconds or _MEETING_SECONDS)
    store = TCPStore(host, int(port), spec.num_ranks, spec.rank == 0, timeout=limit)
    dist.init_process_group(kind, store=store, rank=spec.rank, world_size=spec.num_ranks)
    yield Peers(store)
    dist.destroy_process_group()  # not after an error: it may wait for peers that do not come


@contextmanager
def _exchanging(training: BaseTraining) -> Iterator[None]:
    """Have the training exchange gradients in the last pass of each window."""
    assert isinstance(training, Training)  # a loop of its own was refused
    alone = training.loss
    together = DistributedDataParallel(
        _WithLoss(training.model, training.loss), find_unused_parameters=training.spec.has_unused_parameters
    )
    training.loss, training.no_sync = lambda _, batch: together(batch), together.no_sync
    yield
    # Before the group is destroyed: with gloo, whatever holds it after that may wait for ever for its threads.
    training.loss, training.no_sync = alone, nullcontext


def _pass_on_gradients(training: BaseTraining) -> None:
    num_passes = training.spec.num_timed_micro_batches
    for number in range(num_passes):
        training.forward_backward(training.next_batch(), is_last=number == num_passes - 1)

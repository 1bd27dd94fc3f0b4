"""Trial on several ranks under DistributedDataParallel: rank 0 measures, and the others take the same steps."""

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

_MEETING_SECONDS = 300.0  # torch's default timeout of a store
_COMPILATIONS, _NUM_STEPS = "compilations", "steps"  # keys of the store


class _WithLoss(nn.Module):
    """Module of a model and its loss, so that gradients are exchanged whichever model methods the loss calls."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


class Peers:
    """Other ranks of a trial, which share gradients and, in a store, the counters of compilations and steps."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def count_compilation(self) -> None:
        """Count a compilation on this rank, since rank 0 waits for it."""
        self._store.add(_COMPILATIONS, 1)

    def num_compilations(self) -> int:
        """Return the number of compilations on the other ranks."""
        return int(self._store.add(_COMPILATIONS, 0))

    @contextmanager
    def lead_steps(self, training: BaseTraining) -> Iterator[None]:
        """Have the other ranks take every step that rank 0 takes in this context, and end them afterwards.

        After an error they keep waiting, until this process exits.
        """
        with _data_parallel(training):
            yield
            self._store.add(_NUM_STEPS, training.num_steps_taken + 1)
            _accumulate_window(training)  # the others may have begun one step more
            _wait_for_all_ranks(training)  # they still read from the store, which ends with this process

    def follow(self, training: BaseTraining, poll: Callable[[], None]) -> None:
        """Take steps together with rank 0 until it sets their total number in the store. Call `poll` after each."""
        num_steps = 0
        with _data_parallel(training):
            while not (total := self._store.add(_NUM_STEPS, 0)) or num_steps < total:
                num_steps += 1
                _accumulate_window(training)
                training.update()
                synchronize(training.device)
                poll()
            _wait_for_all_ranks(training)


@contextmanager
def join_process_group(spec: Trial) -> Iterator[Peers | None]:
    """Join the process group of a trial and yield its other ranks; None for a trial with a single rank."""
    if spec.num_ranks == 1:
        yield None
        return
    host, _, port = spec.meeting.rpartition(":")
    kind = "gloo" if spec.device == "cpu" else dist.get_default_backend_for_device(torch.device(spec.device))
    limit = timedelta(seconds=spec.deadline_seconds or _MEETING_SECONDS)
    store = TCPStore(host, int(port), spec.num_ranks, spec.rank == 0, timeout=limit)
    dist.init_process_group(kind, store=store, rank=spec.rank, world_size=spec.num_ranks)
    yield Peers(store)
    dist.destroy_process_group()  # not after an error: it may wait for ranks that never come


@contextmanager
def _data_parallel(training: BaseTraining) -> Iterator[None]:
    """Context in which the ranks average their gradients in the last pass of each accumulation window."""
    assert isinstance(training, Training)  # a user's own loop is not accepted with --ranks
    loss_of_one_rank = training.loss
    parallel_loss = DistributedDataParallel(
        _WithLoss(training.model, training.loss), find_unused_parameters=training.spec.has_unused_parameters
    )
    training.loss, training.no_sync = lambda _, batch: parallel_loss(batch), parallel_loss.no_sync
    yield
    # Before the group is destroyed: with gloo, an object that still holds the group may wait for its threads for ever.
    training.loss, training.no_sync = loss_of_one_rank, nullcontext


def _accumulate_window(training: BaseTraining) -> None:
    """Take all forward and backward passes of one optimizer step."""
    num_passes = training.spec.num_timed_micro_batches
    for number in range(num_passes):
        training.forward_backward(training.next_batch(), is_last=number == num_passes - 1)


def _wait_for_all_ranks(training: BaseTraining) -> None:
    """Wait until every rank of the trial has called this function."""
    dist.all_reduce(torch.zeros(1, device=training.device))
    synchronize(training.device)

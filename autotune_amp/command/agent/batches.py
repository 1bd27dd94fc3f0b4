"""Counts of batches that DataLoaders hand out: samples by loader, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch.utils.data import dataloader

from . import where
from .channel import Channel

MAX_DEPTH = 4  # levels of containers in a batch
_FETCHES_AHEAD = "accelerate.data_loader"  # its loader hands a batch on once it has fetched the next


class Loaders:
    """Observer of the DataLoaders of this process. `num_samples` are the samples handed out, by the index of the
    loader.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.num_samples: dict[str, int] = {}
        self.num_batches = 0
        self.wait_seconds = 0.0
        self.overhead_seconds = 0.0
        self.latest: Any = None  # the batch, where `keeps_latest`
        self.keeps_latest = False
        self._num_loaders = 0
        self._makers: dict[int, tuple[str, str]] = {}  # by the identity of the dataset
        # Samples handed out and not yet in use, of loaders that are fetched from ahead.
        self._ahead: dict[str, int] = {}

    def watch(self) -> None:
        """Hook into DataLoader."""
        self._channel.after_init(dataloader.DataLoader, self._made)
        self._watch_iterating()

    def _made(self, loader: Any) -> None:
        if "_autotune_amp_index" in loader.__dict__:
            return
        object.__setattr__(loader, "_autotune_amp_index", str(self._num_loaders))
        if where.maker_module() == _FETCHES_AHEAD:
            self._ahead[str(self._num_loaders)] = 0
        self._num_loaders += 1
        dataset = id(loader.dataset)
        if dataset not in self._makers or where.is_called_by_user():
            self._makers[dataset] = where.maker(), where.user_line()
        maker, line = self._makers[dataset]  # Accelerate makes another loader from the user's
        self._channel.add(
            "loader",
            index=loader._autotune_amp_index,
            maker=maker,
            line=line,
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            shuffles=type(_sampler(loader)).__name__ not in ("SequentialSampler", "_InfiniteConstantSampler"),
            num_samples=_length(loader.dataset),
        )

    def _watch_iterating(self) -> None:
        base: Any = dataloader._BaseDataLoaderIter
        begin, reset, draw, fetch = base.__init__, base._reset, base._next_index, base.__next__
        shield = self._channel.shield
        drew, handed_out, ended = shield(self._drew), shield(self._handed_out), shield(self._ended)

        def __init__(iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            iterator._autotune_amp_index = getattr(loader, "_autotune_amp_index", "?")
            iterator._autotune_amp_drawn = deque()

        def _reset(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            iterator._autotune_amp_drawn = deque()  # an epoch that was left early has drawn indices ahead
            reset(iterator, loader, *args, **kwargs)

        def _next_index(iterator: Any) -> Any:
            indices = draw(iterator)
            drew(iterator, indices)
            return indices

        def __next__(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:
                ended(iterator)
                raise
            handed_out(iterator, batch, began)
            return batch

        base.__init__, base._reset, base._next_index, base.__next__ = __init__, _reset, _next_index, __next__

    def _drew(self, iterator: Any, indices: Any) -> None:
        is_batch = isinstance(indices, (list, tuple)) and iterator._dataset_kind == dataloader._DatasetKind.Map
        iterator._autotune_amp_drawn.append(len(indices) if is_batch else None)

    def _handed_out(self, iterator: Any, batch: Any, began: float) -> None:
        fetched = time.perf_counter()
        drawn = iterator._autotune_amp_drawn
        num = drawn.popleft() if drawn else None
        num = size_of(batch) if num is None else num
        self._use(iterator._autotune_amp_index, num or 0)
        self.num_batches += 1
        if self.keeps_latest:
            self.latest = batch
        self.wait_seconds += fetched - began
        self.overhead_seconds += time.perf_counter() - fetched

    def _ended(self, iterator: Any) -> None:
        self._use(iterator._autotune_amp_index, 0)

    def _use(self, index: str, num: int) -> None:
        """Count samples as used once they are handed out; those of a loader that fetches ahead, with its next batch."""
        if index in self._ahead:
            num, self._ahead[index] = self._ahead[index], num
        self.num_samples[index] = self.num_samples.get(index, 0) + num


def size_of(batch: Any, dim: int = 0) -> int | None:
    """Return the size along `dim` of the first tensor in a batch, None if there is no tensor with that dimension."""
    tensor = first_tensor(batch)
    return None if tensor is None or tensor.dim() <= dim else int(tensor.shape[dim])


def first_tensor(batch: Any, depth: int = 0) -> Any:
    """Return the first tensor in a batch, None if there is none within `MAX_DEPTH` containers."""
    if isinstance(batch, torch.Tensor):
        return batch
    if depth > MAX_DEPTH or isinstance(batch, (str, bytes)):
        return None
    values = batch.values() if hasattr(batch, "values") and hasattr(batch, "keys") else batch
    if not isinstance(values, (list, tuple)) and not hasattr(batch, "keys"):
        return None
    for value in values:
        tensor = first_tensor(value, depth + 1)
        if tensor is not None:
            return tensor
    return None


def _sampler(loader: Any) -> Any:
    """Return the sampler that draws the samples, inside any samplers that group them into batches."""
    sampler = loader.batch_sampler or loader.sampler
    while hasattr(sampler, "batch_sampler") or hasattr(sampler, "sampler"):
        sampler = getattr(sampler, "batch_sampler", None) or sampler.sampler
    return sampler


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # the user's own code
        return None

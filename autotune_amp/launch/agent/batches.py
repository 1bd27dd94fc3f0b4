"""The batches that DataLoaders hand out, by loader: samples, and the wait for them."""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import Any

import torch
from torch.utils.data import dataloader

from . import where
from .channel import Channel

MAX_DEPTH = 4  # of containers in a batch


class Loaders:
    """Samples handed out by each loader of this process, by the number of the loader."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.num_samples: dict[str, int] = {}
        self.num_batches = 0
        self.wait_seconds = 0.0
        self.overhead_seconds = 0.0
        self.latest: Any = None  # the batch, where `keeps_latest`
        self.keeps_latest = False
        self._num_loaders = 0

    def watch(self) -> None:
        """Hook into DataLoader."""
        self._watch_making()
        self._watch_iterating()

    def _watch_making(self) -> None:
        original = dataloader.DataLoader.__init__

        @functools.wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            if "_autotune_amp_index" in loader.__dict__:
                return
            object.__setattr__(loader, "_autotune_amp_index", str(self._num_loaders))
            self._num_loaders += 1
            self._channel.add(
                "loader",
                index=loader._autotune_amp_index,
                maker=where.maker(),
                line=where.user_line(),
                batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
                num_workers=loader.num_workers,
                prefetch_factor=loader.prefetch_factor,
                shuffles=type(loader.sampler).__name__ not in ("SequentialSampler", "_InfiniteConstantSampler"),
                num_samples=_length(loader.dataset),
            )

        dataloader.DataLoader.__init__ = __init__  # type: ignore[method-assign]

    def _watch_iterating(self) -> None:
        base: Any = dataloader._BaseDataLoaderIter
        begin, reset, draw, fetch = base.__init__, base._reset, base._next_index, base.__next__

        def __init__(self_: Any, loader: Any) -> None:
            begin(self_, loader)
            self_._autotune_amp_index = getattr(loader, "_autotune_amp_index", "?")
            self_._autotune_amp_drawn = deque()

        def _reset(self_: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            self_._autotune_amp_drawn = deque()  # an epoch that was left early had drawn ahead
            reset(self_, loader, *args, **kwargs)

        def _next_index(self_: Any) -> Any:
            drawn = draw(self_)
            is_batch = isinstance(drawn, (list, tuple)) and self_._dataset_kind == dataloader._DatasetKind.Map
            self_._autotune_amp_drawn.append(len(drawn) if is_batch else None)
            return drawn

        def __next__(self_: Any) -> Any:
            began = time.perf_counter()
            batch = fetch(self_)
            fetched = time.perf_counter()
            drawn = self_._autotune_amp_drawn
            num = drawn.popleft() if drawn else None
            num = leading(batch) if num is None else num
            index = self_._autotune_amp_index
            self.num_samples[index] = self.num_samples.get(index, 0) + (num or 0)
            self.num_batches += 1
            if self.keeps_latest:
                self.latest = batch
            self.wait_seconds += fetched - began
            self.overhead_seconds += time.perf_counter() - fetched
            return batch

        base.__init__, base._reset, base._next_index, base.__next__ = __init__, _reset, _next_index, __next__


def leading(batch: Any, depth: int = 0) -> int | None:
    """The leading dimension of the first tensor in a batch."""
    tensor = first_tensor(batch, depth)
    return None if tensor is None or not tensor.dim() else int(tensor.shape[0])


def first_tensor(batch: Any, depth: int = 0) -> Any:
    """The first tensor in a batch, None where there is none within `MAX_DEPTH` containers."""
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


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None

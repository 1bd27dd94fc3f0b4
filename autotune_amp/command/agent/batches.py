"""Observer of DataLoaders: counts the samples, tokens and batches that they yield, and the seconds spent waiting for
them.
"""

from __future__ import annotations

import functools
import operator
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import dataloader

from . import where
from .channel import Channel
from .imports import after_import
from .tokens import MAX_DEPTH, TokenCount, count_tokens, is_padding_free

_ACCELERATE_LOADERS = "accelerate.data_loader"  # module whose loaders yield a batch only after fetching the next one


class LoaderObserver:
    """Observer of the DataLoaders of this process. `num_samples` is the number of samples yielded by each loader, by
    the loader's index in the order of creation, and `tokens` that of tokens, for loaders of token ids.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.num_samples: dict[str, int] = {}
        self.tokens: dict[str, TokenCount] = {}
        self.num_batches = 0
        self.wait_seconds = 0.0
        self.overhead_seconds = 0.0
        self.latest: Any = None  # the latest batch, if `keeps_latest` is set
        self.keeps_latest = False
        self._num_loaders = 0
        self._calls_by_dataset: dict[int, tuple[str, str]] = {}  # (maker, line) by id of the dataset
        # Samples and tokens of the batch that an Accelerate loader has fetched but not yet yielded, by loader index.
        self._not_yet_used: dict[str, tuple[int, TokenCount | None]] = {}
        self._dispatched: set[str] = set()  # indices of loaders from which rank 0 draws the batches of all ranks

    def watch(self) -> None:
        """Patch DataLoader and its iterators to report each new loader and count the batches that it yields."""
        self._channel.after_init(dataloader.DataLoader, self._report_loader)
        self._watch_iterating()
        after_import(_ACCELERATE_LOADERS, self._channel.shield(self._watch_dispatching))

    def _report_loader(self, loader: Any) -> None:
        if "_autotune_amp_index" in loader.__dict__:
            return
        object.__setattr__(loader, "_autotune_amp_index", str(self._num_loaders))
        if where.maker_module() == _ACCELERATE_LOADERS:
            self._not_yet_used[str(self._num_loaders)] = 0, None
        self._num_loaders += 1
        dataset = id(loader.dataset)
        if dataset not in self._calls_by_dataset or where.is_called_by_user():
            self._calls_by_dataset[dataset] = where.maker(), where.user_line()
        maker, line = self._calls_by_dataset[dataset]  # Accelerate rebuilds the user's loader: report the user's call
        self._channel.add(
            "loader",
            index=loader._autotune_amp_index,
            maker=maker,
            line=line,
            batch_size=batch_size_of(loader),
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            shuffles=type(_sample_sampler(loader)).__name__ not in ("SequentialSampler", "_InfiniteConstantSampler"),
            num_samples=_num_samples(loader.dataset),
        )

    def _watch_iterating(self) -> None:
        base: Any = dataloader._BaseDataLoaderIter
        begin, reset, draw, fetch = base.__init__, base._reset, base._next_index, base.__next__
        shield = self._channel.shield
        record_drawn, record_batch = shield(self._record_drawn), shield(self._record_batch)
        record_end = shield(self._record_end)

        def __init__(iterator: Any, loader: Any) -> None:
            begin(iterator, loader)
            iterator._autotune_amp_index = getattr(loader, "_autotune_amp_index", "?")
            iterator._autotune_amp_drawn = deque()

        def _reset(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            iterator._autotune_amp_drawn = deque()  # an epoch that was left early may have prefetched batches
            reset(iterator, loader, *args, **kwargs)

        def _next_index(iterator: Any) -> Any:
            indices = draw(iterator)
            record_drawn(iterator, indices)
            return indices

        def __next__(iterator: Any) -> Any:
            began = time.perf_counter()
            try:
                batch = fetch(iterator)
            except StopIteration:
                record_end(iterator)
                raise
            record_batch(iterator, batch, began)
            return batch

        base.__init__, base._reset, base._next_index, base.__next__ = __init__, _reset, _next_index, __next__

    def _watch_dispatching(self, module: Any) -> None:
        """Count on each rank what an Accelerate loader yields there of the batches that rank 0 draws and sends, in
        place of the batches that rank 0 draws.
        """
        owner = module.DataLoaderDispatcher
        iterate, add_batch = owner.__iter__, self._channel.shield(self._add_batch)

        @functools.wraps(iterate)
        def __iter__(loader: Any) -> Iterator[Any]:
            index = getattr(loader, "_autotune_amp_index", "?")
            self._dispatched.add(index)
            self._not_yet_used.pop(index, None)
            began = time.perf_counter()
            for batch in iterate(loader):
                add_batch(index, batch, began, batch_size_of(loader))
                yield batch
                began = time.perf_counter()

        owner.__iter__ = __iter__

    def _record_drawn(self, iterator: Any, indices: Any) -> None:
        iterator._autotune_amp_drawn.append(len(indices) if isinstance(indices, (list, tuple)) else None)

    def _record_batch(self, iterator: Any, batch: Any, began: float) -> None:
        drawn = iterator._autotune_amp_drawn
        num = drawn.popleft() if drawn else None
        if iterator._autotune_amp_index not in self._dispatched:
            is_map = iterator._dataset_kind == dataloader._DatasetKind.Map
            self._add_batch(iterator._autotune_amp_index, batch, began, num, is_map=is_map)

    def _add_batch(self, index: str, batch: Any, began: float, num_drawn: int | None, *, is_map: bool = False) -> None:
        """Count a batch, for which `num_drawn` samples were asked of the dataset: one that `is_map` has returned as
        many, a stream may have ended before.
        """
        fetched = time.perf_counter()
        num_samples = num_drawn if is_map or is_padding_free(batch) else None
        num_samples = size_of(batch) if num_samples is None else num_samples
        self._count(index, num_samples or 0, count_tokens(batch))
        self.num_batches += 1
        if self.keeps_latest:
            self.latest = batch
        self.wait_seconds += fetched - began
        self.overhead_seconds += time.perf_counter() - fetched

    def _record_end(self, iterator: Any) -> None:
        self._count(iterator._autotune_amp_index, 0, None)

    def _count(self, index: str, num_samples: int, tokens: TokenCount | None) -> None:
        """Add a batch to a loader's counts. An Accelerate loader is one batch ahead: count its previous batch."""
        if index in self._not_yet_used:
            (num_samples, tokens), self._not_yet_used[index] = self._not_yet_used[index], (num_samples, tokens)
        self.num_samples[index] = self.num_samples.get(index, 0) + num_samples
        if tokens is not None:
            self.tokens[index] = tokens.plus(self.tokens[index]) if index in self.tokens else tokens


def batch_size_of(loader: Any) -> int | None:
    """Return the number of samples in a loader's batches, None if its own batch sampler does not say a whole number."""
    try:
        return operator.index(loader.batch_size or loader.batch_sampler.batch_size)
    except (AttributeError, TypeError):
        return None


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


def _sample_sampler(loader: Any) -> Any:
    """Return the sampler that draws single samples, inside any batch samplers around it."""
    # Compared with None: the batch sampler of an IterableDataset has no length, and hence no truth value.
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while hasattr(sampler, "batch_sampler") or hasattr(sampler, "sampler"):
        inner = getattr(sampler, "batch_sampler", None)
        sampler = sampler.sampler if inner is None else inner
    return sampler


def _num_samples(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # the user's own code
        return None

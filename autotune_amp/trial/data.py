"""Endless stream of batches of one size from the user's data, at positions spread over an epoch."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_amp.core.errors import WorkloadError
from autotune_amp.numerics.accumulation import batch_tensors

Stream: TypeAlias = Generator[Any, None, None]

# With these samplers the first batches are a random sample of the epoch already.
_SHUFFLING_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# An epoch is divided into this many parts, and so many consecutive batches come from different parts.
_NUM_PARTS = 8
_FRAMEWORKS = ("accelerate", "lightning", "pytorch_lightning", "torchdata", "transformers")
_MAX_LISTED = 1_000_000  # samples of an epoch; listing more takes too long
_MAX_POSITIONS = 100_000  # batches or samples that are drawn from an epoch


class OpenedData(NamedTuple):
    """Data opened for batches of one size: an endless stream, and the DataLoader behind it, None without one."""

    stream: Stream
    loader: DataLoader[Any] | None


def describe(data: Any) -> tuple[str, int | None, int | None]:
    """Return the kind of the data, its own batch size, and its number of samples in an epoch; None for an unknown one.

    Raises `WorkloadError` for a DataLoader without batch size.
    """
    if isinstance(data, DataLoader):
        if data.batch_size is None:
            raise WorkloadError(
                "The DataLoader has no batch_size (it uses a batch sampler, or yields ready batches).",
                "Pass data=make_loader, a function of the batch size that returns such a loader.",
            )
        # A sampler may draw a part of the dataset, such as a rank's share, or draw samples twice.
        num_drawn = None if isinstance(data.dataset, IterableDataset) else length_or_none(data.sampler)
        num_samples = length_or_none(data.dataset) if num_drawn is None else num_drawn
        return f"DataLoader, {data.num_workers} workers", data.batch_size, num_samples
    if _is_dataset(data):
        return "Dataset", None, length_or_none(data)
    return "function of the batch size", None, None


def stream(data: Any, batch_size: int) -> Stream:
    """Yield batches of exactly `batch_size` samples without end. An exhausted loader starts again.

    Batches come from all over an epoch if its order can be listed, from positions that are the same for every batch
    size. Raises `WorkloadError` if the data yields no batch, or none with `batch_size` samples.
    """
    return open_data(data, batch_size).stream


def open_data(data: Any, batch_size: int, arguments: Mapping[str, Any] | None = None) -> OpenedData:
    """Open the data for batches of `batch_size`, with these `arguments` of a DataLoader in place of the user's own."""
    arguments = arguments or {}
    if isinstance(data, DataLoader):
        # Incomplete batches are dropped, all else is kept.
        order: dict[str, Any] = {} if isinstance(data.dataset, IterableDataset) else {"sampler": data.sampler}
        resized = rebuild_loader(data, batch_size=batch_size, drop_last=True, **order)
        loader = _spread_over_epoch(resized, arguments, _random_positions())
    elif _is_dataset(data):
        shuffle = None if isinstance(data, IterableDataset) else True
        plain = DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=True)
        loader = rebuild_loader(plain, batch_size=batch_size, shuffle=shuffle, drop_last=True, **arguments)
    else:
        return _from_function(data, batch_size, arguments)
    return OpenedData(_endless_batches(lambda: loader, batch_size), loader)


def draws_full_batches(batches: Any, batch_size: int) -> bool:
    """Whether a DataLoader's batch sampler always draws exactly `batch_size` samples.

    Otherwise the samples are counted by the shapes of tensors, which can mistake other dimensions for the batch.
    """
    batch_sampler = batches.sampler if isinstance(batches, Spread) else batches
    return type(batch_sampler) is BatchSampler and batch_sampler.drop_last and batch_sampler.batch_size == batch_size


def has_batched_dataset(loader: DataLoader[Any]) -> bool:
    """Whether the loader's dataset returns a whole batch for several indices, instead of samples to collate."""
    make = getattr(loader.dataset, "__getitems__", None)
    return make is not None and not isinstance(make([0]), list)


def num_samples(batch: Any, batch_size: int) -> int | None:
    """Estimate the number of samples in a batch that was requested with `batch_size` samples.

    It is `batch_size` if the first dimension of any tensor or the length of any list equals it, or the second dimension
    of all tensors that have one (time first). Otherwise it is the largest first dimension or list length, or None
    without a tensor.
    """
    shapes = [tuple(tensor.shape) for _, tensor in batch_tensors(batch) if tensor.dim() > 0]
    if not shapes:
        return batch_size if batch_size in _lengths(batch) else None
    matrices = [shape for shape in shapes if len(shape) > 1]
    sizes = {shape[0] for shape in shapes}.union(*map(_lengths, _members(batch)))
    if batch_size in sizes | _lengths(batch) or (matrices and all(shape[1] == batch_size for shape in matrices)):
        return batch_size
    return max(sizes)


def _lengths(value: Any) -> set[int]:
    """Return the lengths of the lists and tuples in a batch."""
    own = {len(value)} if isinstance(value, (list, tuple)) else set()
    return own.union(*map(_lengths, _members(value)))


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return () if value and isinstance(value[0], (int, float, str)) else value
    is_plain = isinstance(value, torch.Tensor) or callable(value) or not hasattr(value, "__dict__")
    return () if is_plain else vars(value).values()


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch moved to the device: tensors, objects with a `to` method, containers and dataclasses of them."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")  # the host would read a copy that has not arrived
    if hasattr(type(batch), "to"):
        return batch.to(device)
    if type(batch) is dict:
        return {key: move_batch(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_batch(value, device) for value in batch)
    if isinstance(batch, MutableMapping):
        moved: Any = copy.copy(batch)
        for key, value in batch.items():
            moved[key] = move_batch(value, device)
        return moved
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):  # it may be frozen, or have slots
                object.__setattr__(moved, field.name, move_batch(getattr(batch, field.name), device))
        return moved
    return batch


def copy_sample(sample: Any) -> Any:
    """Return a deep copy of a sample, for a collate function that modifies its arguments.

    Tensors are cloned: deepcopy, and a worker's queue, would take the whole storage of a tensor that is one row of it.
    """
    return copy.deepcopy(sample, {id(tensor): tensor.clone() for _, tensor in batch_tensors(sample)})


def rebuild_loader(loader: DataLoader[Any], num_workers: int | None = None, **settings: Any) -> DataLoader[Any]:
    """Return the user's loader with these `settings` changed and, unless None, another number of worker processes.

    A user's class with an `__iter__` of its own, which may change the batches, stays the class. Left out is the
    `__iter__` of a framework's loaders, which shares batches among ranks or keeps their place; of a loader that keeps
    its iterator, which has the old settings; and where `settings` have a `collate_fn`, which makes something else than
    batches.
    """
    num_workers = loader.num_workers if num_workers is None else num_workers
    if num_workers == 0:
        settings.pop("prefetch_factor", None)
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if num_workers > 0:  # without workers a DataLoader refuses any but the defaults
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order"]
    kept = {name: getattr(loader, name) for name in names}
    rebuilt = DataLoader(loader.dataset, **{**kept, "num_workers": num_workers, **settings})
    own = {name: value for name, value in vars(loader).items() if name not in vars(rebuilt)}
    keeps_iterator = any(isinstance(value, _BaseDataLoaderIter) for value in own.values())
    is_of_framework = type(loader).__module__.partition(".")[0] in _FRAMEWORKS
    if not (_is_standard_loader(loader) or is_of_framework or keeps_iterator or "collate_fn" in settings):
        rebuilt.__class__ = type(loader)
        vars(rebuilt).update(own)
    return rebuilt


def _is_standard_loader(loader: Any) -> bool:
    """Whether `loader` is a DataLoader that yields the batches of its sampler: it has no `__iter__` of its own."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "__getitem__") or isinstance(data, IterableDataset)


def length_or_none(dataset: Any) -> int | None:
    """Return the dataset's length, or None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _from_function(function: Callable[[int], Any], batch_size: int, arguments: Mapping[str, Any]) -> OpenedData:
    positions = _random_positions()

    def make_loader() -> Any:
        loader = function(batch_size)
        if not isinstance(loader, DataLoader):
            return loader
        # A loader of batch size 1 may hold ready batches, whose size the stream checks.
        if loader.batch_size not in (None, 1, batch_size):
            raise WorkloadError(
                f"The data function was asked for batches of {batch_size} samples and returned a DataLoader with "
                f"batch_size={loader.batch_size}.",
                "Make it pass its argument on: DataLoader(dataset, batch_size=batch_size, ...).",
            )
        return _spread_over_epoch(loader, arguments, positions)

    first_loader = make_loader()
    loaders = chain([first_loader], (make_loader() for _ in count()))
    if isinstance(first_loader, DataLoader | Iterator):
        batches = _endless_batches(loaders.__next__, batch_size)
        return OpenedData(batches, first_loader if isinstance(first_loader, DataLoader) else None)
    return OpenedData(_endless_batches(lambda: [next(loaders)], batch_size), None)


def _spread_over_epoch(
    loader: DataLoader[Any], arguments: Mapping[str, Any], positions: Iterator[float]
) -> DataLoader[Any]:
    """Return the loader with its batches drawn at these `positions` of an epoch, if it is in a listable order.

    Incomplete batches are dropped if possible. It has `arguments` in place of its own.
    """
    is_spread = _is_standard_loader(loader) and _is_ordered(loader)
    # An incomplete last batch is dropped by its number of indices, not by the shapes of collated tensors.
    has_rest = (
        _is_standard_loader(loader)
        and type(loader.batch_sampler) is BatchSampler
        and not loader.batch_sampler.drop_last
    )
    if not (arguments or is_spread or has_rest):
        return loader
    batches, samples = loader.batch_sampler, loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return rebuild_loader(loader, batch_size=loader.batch_size, drop_last=loader.drop_last or has_rest, **arguments)
    if type(batches) is BatchSampler:
        batches = BatchSampler(batches.sampler, batches.batch_size, drop_last=True)
    if batches is None:
        return rebuild_loader(
            loader, batch_size=None, sampler=Spread(samples, positions) if is_spread else samples, **arguments
        )
    return rebuild_loader(loader, batch_sampler=Spread(batches, positions) if is_spread else batches, **arguments)


def _endless_batches(make_loader: Callable[[], Any], batch_size: int) -> Stream:
    """Yield the full batches of one loader after another. Raises `WorkloadError` after a loader without any."""
    while True:
        largest, num_batches = 0, 0
        loader = make_loader()
        is_counted = _is_standard_loader(loader) and draws_full_batches(loader.batch_sampler, batch_size)
        for batch in loader:
            num_found = batch_size if is_counted else num_samples(batch, batch_size)
            if num_found is not None and num_found < batch_size:  # the incomplete last batch of an epoch
                largest = max(largest, num_found)
                continue
            num_batches += 1
            yield batch
        if num_batches == 0:
            num_drawn = length_or_none(loader.dataset) if is_counted else None
            shortage = f"its largest batch held {largest}" if largest else "it yielded no batch"
            if num_drawn is not None and num_drawn < batch_size:
                shortage = f"an epoch of it holds {num_drawn}"
            raise WorkloadError(
                f"The data was asked for batches of {batch_size} samples, but {shortage}.",
                "Give it more samples, have a function of the batch size return as many as it is asked for, or limit "
                "--batch-size.",
            )


# -- positions in an epoch ---------------------------------------------------------------------------------------------


def _is_ordered(loader: DataLoader[Any]) -> bool:
    """Whether the loader's batches come in an order that can be listed and is not shuffled."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    own: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(own.sampler if type(own) is BatchSampler else own) not in _SHUFFLING_SAMPLERS


def _random_positions() -> Iterator[float]:
    """Yield positions, as shares of what is left of an epoch: random, but the same in every call."""
    generator = random.Random(0)  # noqa: S311 - no secret
    while True:
        for part in generator.sample(range(_NUM_PARTS), _NUM_PARTS):
            yield (part + generator.random()) / _NUM_PARTS


def _listed(sampler: Iterable[Any]) -> Sequence[Any]:
    """Return what a sampler draws in an epoch, single samples or lists of them, up to `_MAX_LISTED` samples."""
    drawn, num_drawn = [], 0
    for each in sampler:
        drawn.append(each)
        num_drawn += len(each) if isinstance(each, list | tuple) else 1
        if num_drawn >= _MAX_LISTED:
            break
    return drawn


class Spread(Sampler[Any]):
    """Sampler that draws each element of `sampler` once, in the order of `positions`, which are shares of what is left.

    With the same positions, settings of different batch sizes get similar batches. Only a part of a very long epoch is
    drawn.
    """

    def __init__(self, sampler: Iterable[Any], positions: Iterator[float]) -> None:
        self.sampler = sampler
        self._positions = positions

    def __iter__(self) -> Iterator[Any]:
        source: Any = self.sampler
        is_batched = type(source) is BatchSampler  # list its indices, which is cheaper than its batches
        sampler = source.sampler if is_batched else source
        indices = range(len(sampler)) if type(sampler) is SequentialSampler else _listed(sampler)
        num_elements = len(indices)
        if is_batched:
            num_elements = (
                num_elements // source.batch_size if source.drop_last else -(-num_elements // source.batch_size)
            )
        left = list(range(min(num_elements, _MAX_POSITIONS)))
        num_positions = len(left)
        while left:
            position = left.pop(int(next(self._positions) * len(left))) * num_elements // num_positions
            if is_batched:
                yield list(indices[position * source.batch_size : (position + 1) * source.batch_size])
            else:
                yield indices[position]

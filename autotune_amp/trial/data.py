"""User's data as an endless stream of batches of one size, drawn from all over an epoch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain, count, islice
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

from autotune_amp.core.errors import WorkloadError
from autotune_amp.numerics.accumulation import batch_tensors

Stream: TypeAlias = Generator[Any, None, None]

# With these samplers the first batches are already a random sample.
_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Each few consecutive batches come from all over an epoch: one from each of this many parts.
_NUM_PARTS = 8
_MAX_LISTED = 1_000_000  # samples of an epoch
_MAX_POSITIONS = 100_000


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
        num_drawn = None if isinstance(data.dataset, IterableDataset) else length(data.sampler)
        num_samples = length(data.dataset) if num_drawn is None else num_drawn
        return f"DataLoader, {data.num_workers} workers", data.batch_size, num_samples
    if _is_dataset(data):
        return "Dataset", None, length(data)
    return "function of the batch size", None, None


def stream(data: Any, batch_size: int) -> Stream:
    """Yield batches of exactly `batch_size` samples without end. An exhausted loader starts again.

    Batches come from all over an epoch if its order can be listed, from positions that are the same for every batch
    size. Raises `WorkloadError` if the data yields no batch, or none with `batch_size` samples.
    """
    return opened(data, batch_size).stream


def opened(data: Any, batch_size: int, num_workers: int | None = None) -> OpenedData:
    """Return the stream and its loader with `num_workers` worker processes, None for the user's number."""
    if isinstance(data, DataLoader):
        # Incomplete batches are dropped, all else is kept.
        order: dict[str, Any] = {} if isinstance(data.dataset, IterableDataset) else {"sampler": data.sampler}
        resized = rebuilt(data, batch_size=batch_size, drop_last=True, **order)
        loader = _rearranged(resized, num_workers, _shares())
    elif _is_dataset(data):
        shuffle = None if isinstance(data, IterableDataset) else True
        loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=True, num_workers=num_workers or 0)
    else:
        return _from_function(data, batch_size, num_workers)
    return OpenedData(_cycle(lambda: loader, batch_size), loader)


def draws_full_batches(batches: Any, batch_size: int) -> bool:
    """Whether this batch sampler of a DataLoader always draws exactly `batch_size` samples.

    Then the samples in a batch need not be counted, which could misread images of 3 channels or a camera matrix.
    """
    own = batches.sampler if isinstance(batches, Spread) else batches
    return type(own) is BatchSampler and own.drop_last and own.batch_size == batch_size


def gives_batches(loader: DataLoader[Any]) -> bool:
    """Whether the loader's dataset returns whole batches for several indices, without samples to collate."""
    make = getattr(loader.dataset, "__getitems__", None)
    return make is not None and not isinstance(make([0]), list)


def num_samples(batch: Any, asked: int) -> int | None:
    """Estimate the number of samples in a batch that does not come from a DataLoader of known batch size.

    It is `asked` if the first dimension of any tensor or the length of any list equals it, or the second dimension of
    all tensors that have one (time first). Otherwise it is the largest first dimension or list length, or None without
    a tensor.
    """
    shapes = [tuple(tensor.shape) for _, tensor in batch_tensors(batch) if tensor.dim() > 0]
    if not shapes:
        return asked if asked in _lengths(batch) else None
    matrices = [shape for shape in shapes if len(shape) > 1]
    sizes = {shape[0] for shape in shapes}.union(*map(_lengths, _children(batch)))
    if asked in sizes | _lengths(batch) or (matrices and all(shape[1] == asked for shape in matrices)):
        return asked
    return max(sizes)


def _lengths(value: Any) -> set[int]:
    """Return the lengths of the lists and tuples in a batch."""
    own = {len(value)} if isinstance(value, (list, tuple)) else set()
    return own.union(*map(_lengths, _children(value)))


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return () if value and isinstance(value[0], (int, float, str)) else value
    is_plain = isinstance(value, torch.Tensor) or callable(value) or not hasattr(value, "__dict__")
    return () if is_plain else vars(value).values()


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch moved to the device: tensors, objects with a `to` method, and containers of them."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch.to(device)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch


def copied(sample: Any) -> Any:
    """Return a deep copy of a sample, for a collate function that modifies its arguments.

    Tensors are cloned: deepcopy, and a worker's queue, would take the whole storage of a tensor that is one row of it.
    """
    return copy.deepcopy(sample, {id(tensor): tensor.clone() for _, tensor in batch_tensors(sample)})


def rebuilt(loader: DataLoader[Any], num_workers: int | None = None, **settings: Any) -> DataLoader[Any]:
    """Return the user's loader with these `settings` changed and, unless None, another number of worker processes."""
    num_workers = loader.num_workers if num_workers is None else num_workers
    names = ["collate_fn", "pin_memory", "worker_init_fn", "generator"]
    if num_workers > 0:  # without workers a DataLoader refuses any but the defaults
        names += ["timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers", "in_order"]
    kept = {name: getattr(loader, name) for name in names}
    return DataLoader(loader.dataset, **{**kept, "num_workers": num_workers, **settings})


def _is_plain(loader: Any) -> bool:
    """Whether `loader` is a DataLoader whose batches are those of its sampler."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "__getitem__") or isinstance(data, IterableDataset)


def length(dataset: Any) -> int | None:
    """Return the dataset's length, or None if it has none."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _from_function(make: Callable[[int], Any], batch_size: int, num_workers: int | None) -> OpenedData:
    shares = _shares()

    def remake() -> Any:
        made = make(batch_size)
        if not isinstance(made, DataLoader):
            return made
        # A loader of batch size 1 may hold ready batches, whose size the stream checks.
        if made.batch_size not in (None, 1, batch_size):
            raise WorkloadError(
                f"The data function was asked for batches of {batch_size} samples and returned a DataLoader with "
                f"batch_size={made.batch_size}.",
                "Make it pass its argument on: DataLoader(dataset, batch_size=batch_size, ...).",
            )
        return _rearranged(made, num_workers, shares)

    first = remake()
    made = chain([first], (remake() for _ in count()))
    if isinstance(first, DataLoader | Iterator):
        return OpenedData(_cycle(made.__next__, batch_size), first if isinstance(first, DataLoader) else None)
    return OpenedData(_cycle(lambda: [next(made)], batch_size), None)


def _rearranged(loader: DataLoader[Any], num_workers: int | None, shares: Iterator[float]) -> DataLoader[Any]:
    """Return a loader of the right batch size with batches from all over the epoch, if its order can be listed."""
    is_spread = _is_plain(loader) and _is_ordered(loader)
    # An incomplete last batch is dropped by its number of indices, not by the shapes of collated tensors.
    has_rest = _is_plain(loader) and type(loader.batch_sampler) is BatchSampler and not loader.batch_sampler.drop_last
    if num_workers is None and not is_spread and not has_rest:
        return loader
    batches, samples = loader.batch_sampler, loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return rebuilt(loader, num_workers, batch_size=loader.batch_size, drop_last=loader.drop_last or has_rest)
    if type(batches) is BatchSampler:
        batches = BatchSampler(batches.sampler, batches.batch_size, drop_last=True)
    if batches is None:
        return rebuilt(loader, num_workers, batch_size=None, sampler=Spread(samples, shares) if is_spread else samples)
    return rebuilt(loader, num_workers, batch_sampler=Spread(batches, shares) if is_spread else batches)


def _cycle(make_loader: Callable[[], Any], batch_size: int) -> Stream:
    while True:
        largest, num_batches = 0, 0
        loader = make_loader()
        is_counted = _is_plain(loader) and draws_full_batches(loader.batch_sampler, batch_size)
        for batch in loader:
            found = batch_size if is_counted else num_samples(batch, batch_size)
            if found is not None and found < batch_size:  # the incomplete last batch of an epoch
                largest = max(largest, found)
                continue
            num_batches += 1
            yield batch
        if num_batches == 0:
            num_drawn = length(loader.dataset) if is_counted else None
            given = f"its largest batch held {largest}" if largest else "it yielded no batch"
            given = f"an epoch of it holds {num_drawn}" if num_drawn is not None and num_drawn < batch_size else given
            raise WorkloadError(
                f"The data was asked for batches of {batch_size} samples, but {given}.",
                "Give it more samples, have a function of the batch size return as many as it is asked for, or limit "
                "--batch-size.",
            )


# -- places all over an epoch ------------------------------------------------------------------------------------------


def _is_ordered(loader: DataLoader[Any]) -> bool:
    """Whether the loader's batches come in an order that can be listed and is not shuffled."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    own: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(own.sampler if type(own) is BatchSampler else own) not in _SHUFFLED


def _shares() -> Iterator[float]:
    """Yield random positions as shares of an epoch, always the same."""
    chance = random.Random(0)  # noqa: S311 - no secret
    while True:
        for part in chance.sample(range(_NUM_PARTS), _NUM_PARTS):
            yield (part + chance.random()) / _NUM_PARTS


class Spread(Sampler[Any]):
    """Sampler that draws the elements of `sampler` once each, at the positions given by `shares` of the epoch.

    The same shares give settings with different batch sizes similar batches. Only a part of a very long epoch is drawn.
    """

    def __init__(self, sampler: Iterable[Any], shares: Iterator[float]) -> None:
        self.sampler = sampler
        self._shares = shares

    def __iter__(self) -> Iterator[Any]:
        own: Any = self.sampler
        is_cut = type(own) is BatchSampler  # list its indices, which is cheaper than its batches
        sampler = own.sampler if is_cut else own
        drawn = range(len(sampler)) if type(sampler) is SequentialSampler else list(islice(sampler, _MAX_LISTED))
        num = len(drawn)
        if is_cut:
            num = num // own.batch_size if own.drop_last else -(-num // own.batch_size)
        left = list(range(min(num, _MAX_POSITIONS)))
        num_positions = len(left)
        while left:
            position = left.pop(int(next(self._shares) * len(left))) * num // num_positions
            yield (
                list(drawn[position * own.batch_size : (position + 1) * own.batch_size]) if is_cut else drawn[position]
            )

"""The user's data as an endless stream of batches of one size, from places all over an epoch, and its worst batch."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, cycle, islice, repeat
from typing import Any, NamedTuple

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
from autotune_amp.numerics.batches import tensors

# In these orders the first batches are as good as any.
_SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
# Any few batches in a row come from all over an epoch: one from each of so many parts of it.
_NUM_PARTS = 8
# An epoch is listed as far as that, and not at all where its sampler takes long over it, as one that opens files does.
_MAX_LISTED_INDICES, _LISTING_SECONDS, _NUM_LISTED_AT_ONCE = 1_000_000, 1.0, 64
_MAX_PLACES = 100_000


def is_ordered(loader: DataLoader[Any]) -> bool:
    """Whether its batches come in an order that can be listed and that does not shuffle them."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    own: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return type(own.sampler if type(own) is BatchSampler else own) not in _SHUFFLED


def shares() -> Iterator[float]:
    """Random places as shares of an epoch, always the same ones."""
    chance = random.Random(0)  # noqa: S311 - no secret
    while True:
        for part in chance.sample(range(_NUM_PARTS), _NUM_PARTS):
            yield (part + chance.random()) / _NUM_PARTS


class Spread(Sampler[Any]):
    """What `sampler` draws in an epoch, each once, from the places that `shares` says.

    The same shares give candidates alike batches, whatever their batch sizes. Of a very long epoch only some are drawn.
    Where listing it takes long, the order is the sampler's own.
    """

    def __init__(self, sampler: Iterable[Any], shares: Iterator[float]) -> None:
        self.sampler = sampler
        self._shares = shares

    def __iter__(self) -> Iterator[Any]:
        order = _order(self.sampler)
        if not isinstance(order, _Order):
            yield from order
            return
        num_places = min(order.num, _MAX_PLACES)
        left = list(range(num_places))
        while left:
            place = left.pop(int(next(self._shares) * len(left)))
            yield order.at(place * order.num // num_places)


class _Order(NamedTuple):
    """What a sampler draws, listed: how many there are, and each by its place."""

    num: int
    at: Callable[[int], Any]


def _order(sampler: Iterable[Any]) -> _Order | Iterator[Any]:
    if type(sampler) is not BatchSampler:
        listed = _listed(sampler)
        return _Order(len(listed), listed.__getitem__) if isinstance(listed, Sequence) else listed
    size, indices = sampler.batch_size, _listed(sampler.sampler)
    if not isinstance(indices, Sequence):
        return iter(BatchSampler(indices, size, sampler.drop_last))
    known = indices
    num = len(known) // size if sampler.drop_last else -(-len(known) // size)
    return _Order(num, lambda place: list(known[place * size : (place + 1) * size]))


def _listed(sampler: Iterable[Any]) -> Sequence[Any] | Iterator[Any]:
    """All it draws, or the drawing itself where that takes long."""
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    began = time.monotonic()
    drawing = iter(sampler)
    listed: list[Any] = []
    num_indices = 0
    while num_indices < _MAX_LISTED_INDICES:
        more = list(islice(drawing, _NUM_LISTED_AT_ONCE))
        if not more:
            break
        listed += more
        num_indices += sum(len(item) if isinstance(item, list) else 1 for item in more)
        if time.monotonic() - began > _LISTING_SECONDS:
            return chain(listed, drawing)
    return listed


Stream = Generator[Any, None, None]


def describe(data: Any) -> tuple[str, int | None, int | None]:
    """What the data is, the batch size it comes with, and its number of samples in an epoch, None where unknown."""
    if isinstance(data, DataLoader):
        if data.batch_size is None:
            raise WorkloadError(
                "The DataLoader has no batch_size (it uses a batch sampler, or yields ready batches).",
                "Pass data=make_loader, a function of the batch size that returns such a loader.",
            )
        return f"DataLoader, {data.num_workers} workers", data.batch_size, _num_drawn(data)
    if _is_dataset(data):
        return "Dataset", None, length(data)
    return "function of the batch size", None, None


class Opened(NamedTuple):
    """The data opened for batches of one size: their endless stream, and the DataLoader behind it, None without one."""

    stream: Stream
    loader: DataLoader[Any] | None


def stream(data: Any, batch_size: int) -> Stream:
    """Batches of exactly `batch_size` samples, without end; the loader starts again when it is exhausted.

    From all over an epoch where its order can be listed, at places that are the same for every batch size. Raises
    `WorkloadError` where the data yields no batch, or none with as many samples as asked.
    """
    return opened(data, batch_size).stream


def opened(data: Any, batch_size: int, num_workers: int | None = None) -> Opened:
    """The stream with the loader behind it, whose worker processes are `num_workers`, None for the user's number."""
    if isinstance(data, DataLoader):
        loader = _resized(data, batch_size, num_workers)
    elif _is_dataset(data):
        shuffle = None if isinstance(data, IterableDataset) else True
        loader = DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=True, num_workers=num_workers or 0)
    else:
        return _from_function(data, batch_size, num_workers)
    return Opened(_cycle(lambda: loader, batch_size), loader)


def worst_batches(
    named: Callable[[int], Any] | None,
    loader: DataLoader[Any] | None,
    samples: Sequence[int],
    batch_size: int,
    num_batches: int,
    *,
    is_exact: bool,
) -> Stream:
    """What `named` gives for the batch size, else the `samples` collated by the loader, again and again if too few.

    The same batch anew, `num_batches` times; none where there is neither. `WorkloadError` where it has too few
    samples, or `named` gives too many and the data `is_exact`: its batches have as many samples as asked.
    """
    if named is not None:
        origin = "Workload(worst_batch=...)"
        made: Iterator[Any] = map(named, repeat(batch_size, num_batches))
    elif samples and loader is not None:
        origin = "The data's own collate_fn"
        made = collated(loader, [list(islice(cycle(samples), batch_size))] * num_batches)
    else:
        return
    for batch in made:
        found = 0 if batch is None else num_samples(batch, batch_size)
        is_more = named is not None and is_exact
        if found is not None and (found < batch_size or (is_more and found > batch_size)):
            raise WorkloadError(
                f"{origin} was asked for the worst batch of {batch_size} samples and gave {found}.",
                "Give Workload(worst_batch=...) a function of the batch size that returns a batch of so many samples.",
            )
        yield batch
        del batch


def num_samples(batch: Any, asked: int) -> int | None:
    """How many samples a batch holds; None for a batch without tensors or length.

    It is `asked` where the first dimension of any tensor says so, or the second of all that have one (time first);
    else the first dimension of its first tensor.
    """
    shapes = [tuple(tensor.shape) for _, tensor in tensors(batch) if tensor.dim() > 0]
    matrices = [shape for shape in shapes if len(shape) > 1]
    if any(shape[0] == asked for shape in shapes) or (matrices and all(shape[1] == asked for shape in matrices)):
        return asked
    if isinstance(batch, (list, tuple)) and len(batch) == asked:
        return asked
    return shapes[0][0] if shapes else None


def move(batch: Any, device: torch.device) -> Any:
    """The batch on the device: tensors, whatever has a `to`, and containers of them."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, torch.Tensor) else batch.to(device)
    if isinstance(batch, dict):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move(value, device) for value in batch)
    return batch


def _is_dataset(data: Any) -> bool:
    return hasattr(data, "__getitem__") or isinstance(data, IterableDataset)


def length(dataset: Any) -> int | None:
    """Its number of samples, None where it has none, as a stream."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _num_drawn(loader: DataLoader[Any]) -> int | None:
    """How many samples an epoch draws: a sampler may draw some of the dataset, as a rank's share, or some twice."""
    num_drawn = None if isinstance(loader.dataset, IterableDataset) else length(loader.sampler)
    return length(loader.dataset) if num_drawn is None else num_drawn


def _resized(loader: DataLoader[Any], batch_size: int, num_workers: int | None) -> DataLoader[Any]:
    """The user's loader with another batch size; incomplete batches are dropped, everything else is kept."""
    if isinstance(loader.dataset, IterableDataset):
        return rebuilt(loader, num_workers, batch_size=batch_size, drop_last=True)
    if not is_ordered(loader):
        return rebuilt(loader, num_workers, batch_size=batch_size, drop_last=True, sampler=loader.sampler)
    resized = BatchSampler(loader.sampler, batch_size, drop_last=True)
    return rebuilt(loader, num_workers, batch_sampler=Spread(resized, shares()))


def _with_workers(loader: DataLoader[Any], num_workers: int) -> DataLoader[Any]:
    """The user's loader with another number of worker processes; it draws what it drew before."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return rebuilt(loader, num_workers, batch_sampler=loader.batch_sampler)
    sampling = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return rebuilt(loader, num_workers, batch_size=loader.batch_size, drop_last=loader.drop_last, **sampling)


def _spread(loader: DataLoader[Any], num_workers: int | None, at: Iterator[float]) -> DataLoader[Any]:
    """A loader that draws its batches in an order, drawing them from all over the epoch."""
    if loader.batch_sampler is None:
        return rebuilt(loader, num_workers, batch_size=None, sampler=Spread(loader.sampler, at))
    return rebuilt(loader, num_workers, batch_sampler=Spread(loader.batch_sampler, at))


def collated(loader: DataLoader[Any], batches: Sequence[Sequence[int]]) -> Iterator[Any]:
    """The batches of these samples; from one worker process if the loader has them, since a dataset opened here may
    not survive their start. What the loader draws next stays the same."""
    return iter(rebuilt(loader, min(loader.num_workers, 1), batch_sampler=batches, generator=torch.Generator()))


def rebuilt(loader: DataLoader[Any], num_workers: int | None = None, **settings: Any) -> DataLoader[Any]:
    """The user's loader with these `settings` and, unless None, another number of worker processes."""
    kept: dict[str, Any] = {
        "num_workers": loader.num_workers if num_workers is None else num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if kept["num_workers"] > 0:  # without workers, anything but the default is refused
        kept |= {
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "in_order": loader.in_order,
        }
    return DataLoader(loader.dataset, **(kept | settings))


def _from_function(make: Callable[[int], Any], batch_size: int, num_workers: int | None) -> Opened:
    places = shares()

    def remake() -> Any:
        made = make(batch_size)
        # One of 1 may hold ready batches; what those hold is seen in the stream.
        if isinstance(made, DataLoader) and made.batch_size not in (None, 1, batch_size):
            raise WorkloadError(
                f"The data function was asked for batches of {batch_size} samples and returned a DataLoader with "
                f"batch_size={made.batch_size}.",
                "Make it pass its argument on: DataLoader(dataset, batch_size=batch_size, ...).",
            )
        if isinstance(made, DataLoader) and type(made).__iter__ is DataLoader.__iter__ and is_ordered(made):
            return _spread(made, num_workers, places)
        return made if num_workers is None or not isinstance(made, DataLoader) else _with_workers(made, num_workers)

    first = remake()
    loader = first if isinstance(first, DataLoader) else None
    if loader is None and not isinstance(first, Iterator):
        return Opened(_single_batches(make, first, batch_size), None)
    return Opened(_cycle(_first_then(first, remake), batch_size), loader)


def _first_then(first: Any, make: Callable[[], Any]) -> Callable[[], Any]:
    """Hand out what was made already before making another."""
    waiting = [first]
    return lambda: waiting.pop() if waiting else make()


def _single_batches(make: Callable[[int], Any], first: Any, batch_size: int) -> Stream:
    batch = first
    while True:
        found = num_samples(batch, batch_size)
        if found is not None and found < batch_size:
            raise WorkloadError(
                f"The data function was asked for {batch_size} samples and gave {found}.",
                "Make it return as many samples as its argument says.",
            )
        yield batch
        batch = make(batch_size)


def _cycle(make_loader: Callable[[], Any], batch_size: int) -> Stream:
    while True:
        largest, num_batches = 0, 0
        for batch in make_loader():
            found = num_samples(batch, batch_size)
            if found is not None and found < batch_size:  # the rest at the end of an epoch
                largest = max(largest, found)
                continue
            num_batches += 1
            yield batch
        if num_batches == 0:
            given = f"its largest batch held {largest}" if largest else "it yielded no batch"
            raise WorkloadError(
                f"The data was asked for batches of {batch_size} samples, but {given}.",
                "Give it more samples, or limit --batch-size to what it can yield.",
            )

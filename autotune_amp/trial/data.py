"""The user's data as an endless stream of batches of one size; one with too few samples is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from autotune_amp.errors import WorkloadError

Stream = Generator[Any, None, None]


def describe(data: Any) -> tuple[str, int | None, int | None]:
    """What the data is, the batch size it comes with, and the number of samples, None where unknown."""
    if isinstance(data, DataLoader):
        if data.batch_size is None:
            raise WorkloadError(
                "The DataLoader has no batch_size (it uses a batch sampler, or yields ready batches).",
                "Pass data=make_loader, a function of the batch size that returns such a loader.",
            )
        return f"DataLoader, {data.num_workers} workers", data.batch_size, _length(data.dataset)
    if _is_dataset(data):
        return "Dataset", None, _length(data)
    return "function of the batch size", None, None


def stream(data: Any, batch_size: int) -> Stream:
    """Batches of exactly `batch_size` samples, without end; the loader starts again when it is exhausted.

    Raises `WorkloadError` where the data yields no batch, or none with as many samples as asked.
    """
    if isinstance(data, DataLoader):
        return _cycle(lambda: _resized(data, batch_size), batch_size)
    if _is_dataset(data):
        is_stream = isinstance(data, IterableDataset)
        loader: DataLoader[Any] = DataLoader(
            data, batch_size=batch_size, shuffle=None if is_stream else True, drop_last=True
        )
        return _cycle(lambda: loader, batch_size)
    return _from_function(data, batch_size)


def num_samples(batch: Any, asked: int) -> int | None:
    """How many samples a batch holds; None for a batch without tensors or length.

    It is `asked` where the first dimension of any tensor says so, or the second of all that have one (time first);
    else the first dimension of its first tensor.
    """
    shapes = [tuple(tensor.shape) for tensor in _tensors(batch) if tensor.dim() > 0]
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


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:  # a stream
        return None


def _resized(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    """The user's loader with another batch size; incomplete batches are dropped, everything else is kept."""
    sampling: dict[str, Any] = {}
    if not isinstance(loader.dataset, IterableDataset):
        if isinstance(loader.sampler, (RandomSampler, SequentialSampler)) and loader.generator is None:
            sampling["shuffle"] = isinstance(loader.sampler, RandomSampler)
        else:
            sampling["sampler"] = loader.sampler
    return DataLoader(
        loader.dataset,
        batch_size=batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=True,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **sampling,
    )


def _from_function(make: Callable[[int], Any], batch_size: int) -> Stream:
    made = make(batch_size)
    if isinstance(made, (DataLoader, Iterator)):
        return _cycle(_first_then(made, lambda: make(batch_size)), batch_size)
    return _single_batches(make, made, batch_size)


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


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)
    elif hasattr(batch, "__dict__") and not callable(batch):
        for value in vars(batch).values():
            yield from _tensors(value)

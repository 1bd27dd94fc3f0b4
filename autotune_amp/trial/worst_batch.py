"""Worst batch of a setting: the one with the largest samples of the data. Memory is measured on it, and it is the
slowest.

It is the workload's own `worst_batch`, else made of the largest samples that `scan` found (`Trial.worst_samples`). A
trial takes its first step on it, and one after the warm-up. If samples are alike or cannot be read one by one, there is
none, and memory is measured on the batches of the other steps.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice, repeat
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import SampleSizes
from autotune_amp.core.workload import Workload
from autotune_amp.numerics.accumulation import batch_tensors
from autotune_amp.precision.torch_state import save_generators
from autotune_amp.trial.data import (
    Spread,
    Stream,
    copy_sample,
    has_batched_dataset,
    length_or_none,
    num_samples,
    open_data,
    rebuild_loader,
)

SCAN_SECONDS, DRAW_SECONDS = 1.5, 1.0  # time limits for reading samples, and for drawing batches if that fails
SAMPLES_AT_ONCE = 4  # a worker's message costs as much as a small sample, and the clock is read between messages
MAX_SCANNED_SAMPLES, MAX_DRAWN_BATCHES = 200_000, 32
# As many of the largest samples as 16 baseline batches hold: the search goes up to that batch size.
NUM_LARGEST_BATCHES, MIN_NUM_LARGEST = 16, 512
NUM_SMALLEST = 64
# Samples are alike if their sizes differ by at most this share: a label or a file name differs, but not the tensors.
ALIKE_SHARE = 0.01
MAX_PROBLEM_LENGTH = 200


class Scan(NamedTuple):
    """Sizes found in the data: of samples, or if those cannot be read one by one the least and the largest of batches.

    Both are None if all sizes are alike. `num_workers` is the loader's number of processes, None if it cannot be
    changed; `pins_memory` and `prefetch_factor` are of the loader too. `scan_problem` is the error that ended the scan
    early, or None.
    """

    num_workers: int | None = None
    pins_memory: bool | None = None
    prefetch_factor: int | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[int, int] | None = None
    scan_problem: str | None = None


def scan(workload: Workload, batch_size: int) -> Scan:
    """Read samples or batches of the data, opened for `batch_size`, and return their sizes.

    Sizes are skipped if the workload names its worst batch. An error in the user's code ends the scan. Random
    generators keep their state.
    """
    restore_generators = save_generators()
    result, is_stream = Scan(), False
    try:
        batches, loader = open_data(workload.data, batch_size)
        with closing(batches):
            if loader is not None:
                # A stream with at most one worker may not be written for several, each of which would then yield all of
                # it.
                is_stream = isinstance(loader.dataset, IterableDataset)
                num_workers = None if is_stream and loader.num_workers <= 1 else loader.num_workers
                result = Scan(num_workers, bool(loader.pin_memory), loader.prefetch_factor)
            if workload.worst_batch is not None:
                return result
            has_samples = loader is not None and loader.batch_sampler is not None and not is_stream
            if (
                loader is not None
                and has_samples
                and length_or_none(loader.dataset)
                and not has_batched_dataset(loader)
            ):
                indices = _loader_indices(loader)
                order = random.Random(0).sample(indices, min(len(indices), MAX_SCANNED_SAMPLES))  # noqa: S311 - no secret
                sizes, problem = scan_samples(loader, order, size, SCAN_SECONDS)
                if sizes:
                    if _are_sizes_alike(sizes):
                        return result._replace(scan_problem=problem)
                    indexed = list(zip(sizes, order, strict=False))
                    num_largest = max(MIN_NUM_LARGEST, NUM_LARGEST_BATCHES * batch_size)
                    summary = SampleSizes(
                        num_seen=len(sizes),
                        num_samples=len(indices),
                        smallest_size=min(sizes),
                        median_size=statistics.median_low(sizes),
                        largest_size=max(sizes),
                        largest=tuple(index for _, index in heapq.nlargest(num_largest, indexed)),
                        smallest=tuple(index for _, index in heapq.nsmallest(NUM_SMALLEST, indexed)),
                    )
                    return result._replace(sample_sizes=summary, scan_problem=problem)
            batch_sizes: list[int] = []
            until = time.monotonic() + DRAW_SECONDS
            for batch in islice(batches, MAX_DRAWN_BATCHES):
                batch_sizes.append(size(batch))
                if time.monotonic() > until:
                    break
            return result._replace(
                batch_sizes_seen=None if _are_sizes_alike(batch_sizes) else (min(batch_sizes), max(batch_sizes))
            )
    except Exception as error:  # the user's code may raise anything
        return result._replace(scan_problem=_one_line(error))
    finally:
        restore_generators()


def scan_samples(
    loader: DataLoader[Any], order: Sequence[Any], measure: Callable[[Any], int], seconds: float
) -> tuple[list[int], str | None]:
    """Return `measure(sample)` of each sample in `order` until `seconds` have passed, and the error that ended it early
    as one line, or None.

    Samples pass through worker processes if the loader has them: a dataset opened here may not survive their start.
    """
    sizes: list[int] = []
    deadline = None
    settings: dict[str, Any] = {"generator": torch.Generator(), "pin_memory": False}
    measure_all = partial(_measure_samples, measure, loader.collate_fn)
    size_loader = rebuild_loader(loader, batch_size=SAMPLES_AT_ONCE, sampler=order, collate_fn=measure_all, **settings)
    try:
        for sizes_of_some in size_loader:
            sizes += sizes_of_some
            # The clock starts at the first sample: starting the workers takes time of its own.
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                break
    except Exception as error:  # the user's code may raise anything
        return sizes, _one_line(error)
    return sizes, None


def _measure_samples(
    measure: Callable[[Any], int], collate: Callable[[list[Any]], Any], samples: list[Any]
) -> list[int]:
    """Return `measure` of each sample after collating it alone: collating may load the data, as from a file's name."""
    return [measure(collate([copy_sample(sample)])) for sample in samples]


def _loader_indices(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the indices that the loader draws, if its sampler lists them, else all indices of the dataset."""
    sampler: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    sampler = sampler.sampler if isinstance(sampler, Spread) else sampler
    sampler = getattr(sampler, "sampler", sampler)
    indices = getattr(sampler, "indices", sampler if isinstance(sampler, Sequence) else None)
    return range(len(loader.dataset)) if indices is None else [int(index) for index in indices]  # type: ignore[arg-type]


def _are_sizes_alike(sizes: list[int]) -> bool:
    return max(sizes) - min(sizes) <= ALIKE_SHARE * max(sizes)


def size(value: Any) -> int:
    """Return the number of elements of tensors and arrays and of characters of text in `value`."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    array_size = getattr(value, "size", None)
    return array_size if isinstance(array_size, int) else sum(tensor.numel() for _, tensor in batch_tensors(value)) or 1


def _one_line(error: Exception) -> str:
    """Return an error's type and the last line of its message: a loader worker's message ends with the user's own."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"[:MAX_PROBLEM_LENGTH]


def worst_batches(
    make_worst_batch: Callable[[int], Any] | None,
    loader: DataLoader[Any] | None,
    samples: Sequence[int],
    batch_size: int,
    num_batches: int,
) -> Stream:
    """Yield the worst batch `num_batches` times, made anew each time; nothing if there is none.

    It is `named(batch_size)`, else the `samples` collated by the loader, repeated if they are too few. Raises
    `WorkloadError` if `make_worst_batch` returns too few samples.
    """
    if make_worst_batch is not None:
        batches: Iterator[Any] = map(make_worst_batch, repeat(batch_size, num_batches))
    elif samples and loader is not None:
        # From a worker process if the loader has them, since a dataset opened here may not survive their start. A
        # generator of its own leaves the loader's next draws as they are.
        settings = {"batch_sampler": [list(islice(cycle(samples), batch_size))] * num_batches}
        batches = iter(rebuild_loader(loader, min(loader.num_workers, 1), generator=torch.Generator(), **settings))
    else:
        return
    for batch in batches:
        num_found = 0 if batch is None else num_samples(batch, batch_size)
        if make_worst_batch is not None and num_found is not None and num_found < batch_size:
            raise WorkloadError(
                f"Workload(worst_batch=...) was called with batch size {batch_size} and returned {num_found} samples.",
                "Return a batch with as many samples as the function's argument.",
            )
        yield batch
        del batch

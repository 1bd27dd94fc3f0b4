"""Worst batch of a setting: the one with the largest samples of the data. Memory is measured on it, and it is the
slowest.

It is the batch that the workload names, else the largest samples found by `scan`, as many as the setting's batch size
(`Trial.worst_samples`). `timing` takes the first step on it, and one after the warm-up. If samples are alike or cannot
be read one by one, memory is measured on the batches of the other steps.
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
from autotune_amp.trial.data import Spread, Stream, copied, gives_batches, length, num_samples, opened, rebuilt

SCAN_SECONDS, DRAW_SECONDS = 1.5, 1.0
SAMPLES_AT_ONCE = 4  # a worker's message costs as much as a small sample, and the clock is read between messages
MAX_SCANNED_SAMPLES, MAX_DRAWN_BATCHES = 200_000, 32
# The batch sizes searched go up to sixteen times the baseline's.
NUM_LARGEST_BATCHES, MIN_NUM_LARGEST = 16, 512
NUM_SMALLEST = 64
# Samples count as alike if their sizes differ by no more, as the length of an image's file name does.
ALIKE_SHARE = 0.01
MAX_PROBLEM_LENGTH = 200


class Scan(NamedTuple):
    """Sizes found in the data: of samples, or if those cannot be read one by one the least and the largest of batches.

    Both are None if all are alike. `num_workers` is that of the loader, None if it cannot be changed. `scan_problem` is
    the error that ended the scan early, or None.
    """

    num_workers: int | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[int, int] | None = None
    scan_problem: str | None = None


def scan(workload: Workload, batch_size: int) -> Scan:
    """Read samples or batches of the data, opened for `batch_size`, and return their sizes.

    Sizes are skipped if the workload names its worst batch. An error in the user's code ends the scan. Random
    generators keep their state.
    """
    put_back = save_generators()
    found, is_stream = Scan(), False
    try:
        batches, loader = opened(workload.data, batch_size)
        with closing(batches):
            if loader is not None:
                # A stream with at most one worker may not be written for several, each of which would then yield all of
                # it.
                is_stream = isinstance(loader.dataset, IterableDataset)
                found = Scan(None if is_stream and loader.num_workers <= 1 else loader.num_workers)
            if workload.worst_batch is not None:
                return found
            has_samples = loader is not None and loader.batch_sampler is not None and not is_stream
            if loader is not None and has_samples and length(loader.dataset) and not gives_batches(loader):
                indices = _indices(loader)
                order = random.Random(0).sample(indices, min(len(indices), MAX_SCANNED_SAMPLES))  # noqa: S311 - no secret
                sizes, problem = scan_samples(loader, order, size, SCAN_SECONDS)
                if sizes:
                    if _are_alike(sizes):
                        return found._replace(scan_problem=problem)
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
                    return found._replace(sample_sizes=summary, scan_problem=problem)
            drawn: list[int] = []
            until = time.monotonic() + DRAW_SECONDS
            for batch in islice(batches, MAX_DRAWN_BATCHES):
                drawn.append(size(batch))
                if time.monotonic() > until:
                    break
            return found._replace(batch_sizes_seen=None if _are_alike(drawn) else (min(drawn), max(drawn)))
    except Exception as error:  # the user's code may raise anything
        return found._replace(scan_problem=_one_line(error))
    finally:
        put_back()


def scan_samples(
    loader: DataLoader[Any], order: Sequence[Any], measure: Callable[[Any], int], seconds: float
) -> tuple[list[int], str | None]:
    """Return `measure` of each sample in `order` until `seconds` are over, and a line on the error that ended it, or
    None.

    Samples pass through worker processes if the loader has them: a dataset opened here may not survive their start.
    """
    found: list[int] = []
    deadline = None
    settings: dict[str, Any] = {"generator": torch.Generator(), "pin_memory": False}
    alone = partial(_measured, measure, loader.collate_fn)
    looking = rebuilt(loader, batch_size=SAMPLES_AT_ONCE, sampler=order, collate_fn=alone, **settings)
    try:
        for several in looking:
            found += several
            # The clock starts at the first sample: starting the workers takes time of its own.
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                break
    except Exception as error:  # the user's code may raise anything
        return found, _one_line(error)
    return found, None


def _measured(measure: Callable[[Any], int], collate: Callable[[list[Any]], Any], samples: list[Any]) -> list[int]:
    """Return `measure` of each sample collated alone: collating may create the data, as from a file's name."""
    return [measure(collate([copied(sample)])) for sample in samples]


def _indices(loader: DataLoader[Any]) -> Sequence[int]:
    """Return the indices that the loader draws, if its sampler lists them, else all indices of the dataset."""
    own: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    own = own.sampler if isinstance(own, Spread) else own
    own = getattr(own, "sampler", own)
    indices = getattr(own, "indices", own if isinstance(own, Sequence) else None)
    return range(len(loader.dataset)) if indices is None else [int(index) for index in indices]  # type: ignore[arg-type]


def _are_alike(sizes: list[int]) -> bool:
    return max(sizes) - min(sizes) <= ALIKE_SHARE * max(sizes)


def size(value: Any) -> int:
    """Return the number of elements of tensors and arrays and of characters of text in `value`."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    own = getattr(value, "size", None)
    return own if isinstance(own, int) else sum(tensor.numel() for _, tensor in batch_tensors(value)) or 1


def _one_line(error: Exception) -> str:
    """Return an error's type and last line, which is the user's own message if a worker process caught the error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'it says nothing'}"[:MAX_PROBLEM_LENGTH]


def worst_batches(
    named: Callable[[int], Any] | None,
    loader: DataLoader[Any] | None,
    samples: Sequence[int],
    batch_size: int,
    num_batches: int,
) -> Stream:
    """Yield the worst batch `num_batches` times, made anew each time; nothing if there is none.

    It is `named(batch_size)`, else the `samples` collated by the loader, repeated if they are too few. Raises
    `WorkloadError` if `named` returns too few samples.
    """
    if named is not None:
        made: Iterator[Any] = map(named, repeat(batch_size, num_batches))
    elif samples and loader is not None:
        # From a worker process if the loader has them, since a dataset opened here may not survive their start. A
        # generator of its own leaves the loader's next draws as they are.
        settings = {"batch_sampler": [list(islice(cycle(samples), batch_size))] * num_batches}
        made = iter(rebuilt(loader, min(loader.num_workers, 1), generator=torch.Generator(), **settings))
    else:
        return
    for batch in made:
        found = 0 if batch is None else num_samples(batch, batch_size)
        if named is not None and found is not None and found < batch_size:
            raise WorkloadError(
                f"Workload(worst_batch=...) was asked for the worst batch of {batch_size} samples and gave {found}.",
                "Give Workload(worst_batch=...) a function of the batch size that returns a batch of so many samples.",
            )
        yield batch
        del batch

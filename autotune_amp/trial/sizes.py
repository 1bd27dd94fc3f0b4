"""How large the user's samples are: a look through the data that the clock cuts off."""

from __future__ import annotations

import heapq
import math
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from autotune_amp.core.outcome import SampleSizes
from autotune_amp.core.workload import Workload
from autotune_amp.numerics.passes import keep_generators
from autotune_amp.trial import data
from autotune_amp.trial.data import Spread

SCAN_SECONDS, DRAW_SECONDS, CHECK_SECONDS = 1.5, 1.0, 0.5
SAMPLES_AT_ONCE = 4  # a worker's answer costs as much as a small sample, and the clock is looked at between answers
MAX_SCANNED_SAMPLES, MAX_DRAWN_BATCHES = 200_000, 32
# Samples may take long to decode, and a few in a batch show what batches are made of.
MAX_CHECKED_BATCH_SIZE = 8
# Tokens get a mask, labels and positions; a batch that holds more numbers than that was made of something else.
MAX_MADE = 4
# The batch sizes searched go up to sixteen times the baseline's.
NUM_LARGEST_BATCHES, MIN_NUM_LARGEST = 16, 512
NUM_SMALLEST = 64
# Samples are alike whose sizes differ by no more: as the length of an image's file name does.
ALIKE_SHARE = 0.01
MAX_PROBLEM_LENGTH = 200


class Look(NamedTuple):
    """What was seen: the sizes of samples that differ; the least and the largest of batches that differ otherwise than
    their samples say, or have none to look at; the loader's number of workers, None where that cannot be changed.
    `scan_problem` is what ended it before its time."""

    num_workers: int | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[int, int] | None = None
    scan_problem: str | None = None


def look(workload: Workload, batch_size: int) -> Look:
    """Look at the data as it is opened for `batch_size`; not at its sizes if the workload names its worst batch.

    What the user's code raises ends the look. The generators stand where they stood.
    """
    put_back = keep_generators(torch.device("cpu"))
    num_workers = None
    try:
        opened = data.opened(workload.data, batch_size)
        with closing(opened.stream):
            num_workers = None if opened.loader is None else _num_workers(opened.loader)
            if workload.worst_batch is not None:
                return Look(num_workers)
            if opened.loader is not None and _can_be_scanned(opened.loader):
                return _look_through(opened.loader, batch_size)._replace(num_workers=num_workers)
            return Look(num_workers, batch_sizes_seen=_range(_drawn_sizes(opened.stream, DRAW_SECONDS)))
    except Exception as error:  # the user's code may raise anything
        return Look(num_workers, scan_problem=_one_line(error))
    finally:
        put_back()


def _look_through(loader: DataLoader[Any], batch_size: int) -> Look:
    """The sizes of the map-style dataset's samples, in random order until the time is over, held against batches.

    Where collate_fn makes what takes the memory, as of the names of files, the samples are sized as it collates each
    alone. Where they do not tell the largest batch then either, the largest that was seen stands for it.
    """
    indices = _indices(loader)
    order = random.Random(0).sample(indices, min(len(indices), MAX_SCANNED_SAMPLES))  # noqa: S311 - no secret
    num_largest = max(MIN_NUM_LARGEST, NUM_LARGEST_BATCHES * batch_size)
    scan = _scan(loader, order, _sizes)
    found = scan.look(len(indices), num_largest)
    if not scan.sizes or scan.problem is not None or loader.collate_fn is default_collate:
        return found
    try:
        check = _Check(loader, scan, min(batch_size, MAX_CHECKED_BATCH_SIZE))
        if check.bears_out(scan) and check.num_made <= MAX_MADE:
            return found
        alone = _scan(loader, order, partial(_sizes_alone, loader.collate_fn))
        if alone.sizes and (alone.problem is not None or check.bears_out(alone)):
            return alone.look(len(indices), num_largest)
    except Exception as error:  # the user's code may raise anything
        return found._replace(scan_problem=_one_line(error))
    if _are_alike(check.sizes):
        return found
    stand_in = scan.sample_sizes(len(indices), num_largest)
    largest = tuple(dict.fromkeys((*check.largest, *stand_in.largest)))[:num_largest]
    seen = msgspec.structs.replace(stand_in, largest=largest)
    return Look(sample_sizes=seen, batch_sizes_seen=_range(check.sizes))


class _Scan(NamedTuple):
    """Samples that were looked at, with their sizes; `problem` is what the next one raised, in one line."""

    samples: list[int]
    sizes: list[int]
    problem: str | None

    def largest(self, num: int) -> list[int]:
        """The largest samples, the largest first."""
        return [sample for _, sample in heapq.nlargest(num, zip(self.sizes, self.samples, strict=True))]

    def sample_sizes(self, num_samples: int, num_largest: int) -> SampleSizes:
        """What the description holds of them, of `num_samples` in all."""
        return SampleSizes(
            num_seen=len(self.sizes),
            num_samples=num_samples,
            smallest_size=min(self.sizes),
            median_size=statistics.median_low(self.sizes),
            largest_size=max(self.sizes),
            largest=tuple(self.largest(num_largest)),
            smallest=tuple(s for _, s in heapq.nsmallest(NUM_SMALLEST, zip(self.sizes, self.samples, strict=True))),
        )

    def look(self, num_samples: int, num_largest: int) -> Look:
        """What it says by itself."""
        are_alike = not self.sizes or _are_alike(self.sizes)
        return Look(
            sample_sizes=None if are_alike else self.sample_sizes(num_samples, num_largest), scan_problem=self.problem
        )


def _scan(loader: DataLoader[Any], order: list[int], sized: Callable[[list[Any]], list[int]]) -> _Scan:
    """Look at samples in this order until the time is over. What one of them raises ends it.

    They pass through worker processes if the loader has them: a dataset opened here may not survive their start.
    """
    sizes: list[int] = []
    deadline, problem = None, None
    scanning = data.rebuilt(
        loader, batch_size=SAMPLES_AT_ONCE, sampler=order, collate_fn=sized, generator=torch.Generator()
    )
    try:
        for found in scanning:
            sizes += found
            # From the first sample on: starting the workers takes its own time.
            deadline = deadline or time.monotonic() + SCAN_SECONDS
            if time.monotonic() > deadline:
                break
    except Exception as error:  # the user's code may raise anything
        problem = _one_line(error)
    return _Scan(order[: len(sizes)], sizes, problem)


class _Check:
    """A few batches of samples that were looked at, as the loader collates them.

    `num_made` is how many numbers a batch holds for each that its samples hold when they are padded to the largest.
    """

    def __init__(self, loader: DataLoader[Any], scan: _Scan, batch_size: int) -> None:
        self._loader = loader
        self._batch_size = min(batch_size, len(scan.samples))
        starts = range(0, len(scan.samples) - self._batch_size + 1, self._batch_size)[:MAX_DRAWN_BATCHES]
        batches = [scan.samples[start : start + self._batch_size] for start in starts]
        self.sizes = _drawn_sizes(data.collated(loader, batches), CHECK_SECONDS)
        self.largest = batches[self.sizes.index(max(self.sizes))]
        padded = sum(max(scan.sizes[start : start + self._batch_size]) for start in starts[: len(self.sizes)])
        self.num_made = sum(self.sizes) / max(1, padded * self._batch_size)

    def bears_out(self, scan: _Scan) -> bool:
        """Whether its largest samples make a batch as large as any; of alike samples, whether batches are alike too."""
        if _are_alike(scan.sizes):
            return _are_alike(self.sizes)
        (worst,) = data.collated(self._loader, [scan.largest(self._batch_size)])
        return size(worst) >= (1 - ALIKE_SHARE) * max(self.sizes)


def size(value: Any) -> int:
    """How many numbers it holds: the elements of tensors and arrays, the pixels of images, the characters of text."""
    if isinstance(value, (int, float)):  # most of what a list holds
        return 1
    if isinstance(value, torch.Tensor):
        return value.numel()
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(size, value))
    own = getattr(value, "size", None)
    if isinstance(own, int):  # an array's
        return own
    if isinstance(own, tuple):  # an image's width and height
        return math.prod(own)
    if hasattr(value, "__dict__") and not callable(value):
        return sum(map(size, vars(value).values()))
    return 1


def _sizes(samples: list[Any]) -> list[int]:
    return [size(sample) for sample in samples]


def _sizes_alone(collate: Callable[[list[Any]], Any], samples: list[Any]) -> list[int]:
    return [size(collate([sample])) for sample in samples]


def _are_alike(sizes: list[int]) -> bool:
    return max(sizes) - min(sizes) <= ALIKE_SHARE * max(sizes)


def _num_workers(loader: DataLoader[Any]) -> int | None:
    """Of a stream with one worker or none None: it need not be made for several, and then each would give all of it."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    return None if is_stream and loader.num_workers <= 1 else loader.num_workers


def _one_line(error: Exception) -> str:
    """What it says; of what a worker process caught, the last line of the traceback."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    if lines and lines[0].startswith("Caught "):
        return lines[-1][:MAX_PROBLEM_LENGTH]
    return (f"{name}: {lines[0]}" if lines else name)[:MAX_PROBLEM_LENGTH]


def _can_be_scanned(loader: DataLoader[Any]) -> bool:
    """Whether it collates samples of a dataset that has a length, rather than handing on ready batches."""
    is_stream = isinstance(loader.dataset, IterableDataset)
    return not is_stream and loader.batch_sampler is not None and data.length(loader.dataset) is not None


def _indices(loader: DataLoader[Any]) -> Sequence[int]:
    """What the loader may draw where its sampler lists it, else the whole dataset."""
    own: Any = loader.batch_sampler if loader.batch_size is None else loader.sampler
    own = own.sampler if isinstance(own, Spread) else own
    sampler = getattr(own, "sampler", own)
    listed = getattr(sampler, "indices", sampler)
    if hasattr(listed, "__getitem__"):
        try:
            return [operator.index(index) for index in listed]
        except TypeError:  # of something else, such as whole batches
            pass
    return range(len(loader.dataset))  # type: ignore[arg-type]  # it has a length


def _drawn_sizes(batches: Iterable[Any], seconds: float) -> list[int]:
    sizes: list[int] = []
    deadline = time.monotonic() + seconds
    for batch in islice(batches, MAX_DRAWN_BATCHES):
        sizes.append(size(batch))
        if time.monotonic() > deadline:
            break
    return sizes


def _range(sizes: list[int]) -> tuple[int, int] | None:
    return None if _are_alike(sizes) else (min(sizes), max(sizes))

"""How large the user's samples are: a look through the data that the clock cuts off."""

from __future__ import annotations

import heapq
import math
import operator
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.numerics.draws import generators, set_generators
from autotune_amp.trial import data
from autotune_amp.trial.outcome import SampleSizes
from autotune_amp.workload import Workload

SCAN_SECONDS, DRAW_SECONDS = 1.5, 1.0
SAMPLES_AT_ONCE = 4  # a worker's answer costs as much as a small sample, and the clock is looked at between answers
MAX_SCANNED_SAMPLES, MAX_DRAWN_BATCHES = 200_000, 32
# The batch sizes searched go up to sixteen times the baseline's.
NUM_LARGEST_BATCHES, MIN_NUM_LARGEST = 16, 512
NUM_SMALLEST = 64
# Samples are alike whose sizes differ by no more: as the length of an image's file name does.
ALIKE_SHARE = 0.01
MAX_PROBLEM_LENGTH = 200


class Look(NamedTuple):
    """What was seen: the sizes of samples, or else of batches, that differ, and the loader's number of workers; None
    where that cannot be changed. `scan_problem` is what ended it before its time."""

    num_workers: int | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[int, int] | None = None
    scan_problem: str | None = None


def look(workload: Workload, batch_size: int) -> Look:
    """Look at the data as it is opened for `batch_size`; not at its sizes if the workload names its worst batch.

    What the user's code raises ends the look. The generators stand where they stood.
    """
    cpu = torch.device("cpu")
    before = generators(cpu)
    num_workers = None
    try:
        opened = data.opened(workload.data, batch_size)
        with closing(opened.stream):
            num_workers = None if opened.loader is None else _num_workers(opened.loader)
            if workload.worst_batch is not None:
                return Look(num_workers)
            if opened.loader is not None and _can_be_scanned(opened.loader):
                num_largest = max(MIN_NUM_LARGEST, NUM_LARGEST_BATCHES * batch_size)
                sample_sizes, problem = scan(opened.loader, num_largest)
                return Look(num_workers, sample_sizes=sample_sizes, scan_problem=problem)
            return Look(num_workers, batch_sizes_seen=_drawn_sizes(opened.stream))
    except Exception as error:  # the user's code may raise anything
        return Look(num_workers, scan_problem=_one_line(error))
    finally:
        set_generators(cpu, before)


def scan(
    loader: DataLoader[Any], num_largest: int, seconds: float = SCAN_SECONDS
) -> tuple[SampleSizes | None, str | None]:
    """The sizes of the map-style dataset's samples, in random order until `seconds` are over; None where alike.

    A sample that raises ends it: what it raised in one line, else None, comes with what was seen before.
    The samples pass through worker processes if the loader has them: a dataset opened here may not survive their start.
    """
    indices = _indices(loader)
    order = random.Random(0).sample(indices, min(len(indices), MAX_SCANNED_SAMPLES))  # noqa: S311 - no secret
    sizes: list[int] = []
    deadline = None
    scanning = data.rebuilt(
        loader, batch_size=SAMPLES_AT_ONCE, sampler=order, collate_fn=_sizes, generator=torch.Generator()
    )
    problem = None
    try:
        for found in scanning:
            sizes += found
            # From the first sample on: starting the workers takes its own time.
            deadline = deadline or time.monotonic() + seconds
            if time.monotonic() > deadline:
                break
    except Exception as error:  # the user's code may raise anything
        problem = _one_line(error)
    if not sizes or _are_alike(sizes):
        return None, problem
    seen = SampleSizes(
        num_seen=len(sizes),
        num_samples=len(indices),
        smallest_size=min(sizes),
        median_size=statistics.median_low(sizes),
        largest_size=max(sizes),
        largest=tuple(index for _, index in heapq.nlargest(num_largest, zip(sizes, order, strict=False))),
        smallest=tuple(index for _, index in heapq.nsmallest(NUM_SMALLEST, zip(sizes, order, strict=False))),
    )
    return seen, problem


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
    sampler = getattr(own, "sampler", own)
    listed = getattr(sampler, "indices", sampler)
    if hasattr(listed, "__getitem__"):
        try:
            return [operator.index(index) for index in listed]
        except TypeError:  # of something else, such as whole batches
            pass
    return range(len(loader.dataset))  # type: ignore[arg-type]  # it has a length


def _drawn_sizes(stream: data.Stream) -> tuple[int, int] | None:
    sizes: list[int] = []
    deadline = time.monotonic() + DRAW_SECONDS
    for batch in islice(stream, MAX_DRAWN_BATCHES):
        sizes.append(size(batch))
        if time.monotonic() > deadline:
            break
    return None if _are_alike(sizes) else (min(sizes), max(sizes))

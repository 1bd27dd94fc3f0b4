"""What a choice was measured under: the wait for its data, and the batch that takes the most memory. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from autotune_amp.core.evidence import LoaderEvidence, MemoryEvidence, ProcessPeak, WorkersTried
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.text import rate
from autotune_amp.search.told import own_workers
from autotune_amp.search.verdicts import sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.evidence import Evidence
    from autotune_amp.core.outcome import Description, Record, SampleSizes
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.evidence import Runs

MAX_DATA_SHARE = 0.10  # a wait of 5 to 10 % of a step: the loader sets the speed (measurement.md, Timing)

_CHEAPER_SAMPLES = "What is left is a sample that costs less to load: decode less of it, or keep it decoded."


def data_share(measured: Measurement) -> float:
    """The share of a step that waits for data."""
    return measured.data_seconds / measured.step_seconds


def is_waiting(records: Sequence[Record]) -> bool:
    """Whether the loader sets the speed of any candidate that was measured with the user's own number of workers."""
    return any(
        isinstance(r.outcome, Measurement) and not r.outcome.was_cut and data_share(r.outcome) > MAX_DATA_SHARE
        for r in records
        if r.purpose == "search" and r.candidate.num_workers is None
    )


def loader_evidence(
    records: Sequence[Record], chosen: Runs, description: Description | None = None
) -> LoaderEvidence | None:
    """What is known of the loader where it sets the speed of the choice with the user's own number of workers."""
    own = own_workers(chosen.candidate)
    searched = [r for r in records if r.purpose == "search"]
    measured = chosen.measurements
    if own != chosen.candidate:
        measured = tuple(r.outcome for r in searched if r.candidate == own and isinstance(r.outcome, Measurement))
    measured = tuple(m for m in measured if not m.was_cut)
    share = median(map(data_share, measured)) if measured else 0.0
    if share <= MAX_DATA_SHARE:
        return None
    return LoaderEvidence(
        num_workers=None if description is None else description.num_workers,
        data_share=share,
        step_samples_per_second=median(m.samples_per_second for m in measured) / (1 - share),
        tried=tuple(_tried(r) for r in searched if r.candidate.num_workers is not None),
    )


def _tried(record: Record) -> WorkersTried:
    assert record.candidate.num_workers is not None
    measured = record.outcome if isinstance(record.outcome, Measurement) else None
    return WorkersTried(
        candidate=str(own_workers(record.candidate)),
        num_workers=record.candidate.num_workers,
        samples_per_second=None if measured is None else measured.samples_per_second,
        data_share=None if measured is None else data_share(measured),
    )


def memory_evidence(chosen: Runs, description: Description | None = None) -> MemoryEvidence:
    """What the peak memory of the choice was measured on."""
    sizes = None if description is None else description.sample_sizes
    worst_case = None
    if description is not None and description.has_worst_batch:
        worst_case = "the worst batch that the workload names"
    elif description is not None and sizes is not None and description.batch_sizes_seen is not None:
        worst_case = f"the samples of the largest batch drawn, {description.batch_sizes_seen[1]:,} numbers"
    elif sizes is not None:
        worst_case = _largest(sizes, chosen.candidate.batch_size)
    return MemoryEvidence(
        worst_case=worst_case,
        num_seen=None if sizes is None else sizes.num_seen,
        num_samples=None if sizes is None else sizes.num_samples,
        has_evaluation=any(m.evaluation_seconds is not None for m in chosen.measurements),
        has_checkpoint=any(m.checkpoint_seconds is not None for m in chosen.measurements),
        processes=tuple(
            ProcessPeak(num_steps=m.num_steps_taken, peak_memory_bytes=m.peak_memory_bytes) for m in chosen.measurements
        ),
    )


def _largest(sizes: SampleSizes, batch_size: int) -> str:
    num = min(batch_size, len(sizes.largest))
    seen = ""
    if sizes.num_seen < sizes.num_samples:
        seen = f", {sizes.num_seen:,} of which were looked at ({_share_seen(sizes)})"
    return (
        f"the {f'{num:,} largest' if num > 1 else 'largest'} of {sizes.num_samples:,} samples{seen}, "
        f"{sizes.smallest_size:,} to {sizes.largest_size:,} numbers each, median {sizes.median_size:,}"
    )


def _share_seen(sizes: SampleSizes) -> str:
    return f"{100 * sizes.num_seen / sizes.num_samples:.2g} %"


def loader_reason(chosen: Setting, evidence: Evidence) -> list[str]:
    """What a choice with another number of workers owes to them."""
    loader = evidence.loader
    if chosen.num_workers is None or loader is None:
        return []
    own = "" if loader.num_workers is None else f" with {_workers(loader.num_workers)}"
    return [
        f"The data loader set the speed: {100 * loader.data_share:.0f} % of a step waited for it{own}, "
        f"{100 * evidence.data_share:.0f} % with {_workers(chosen.num_workers)}."
    ]


def loader_doubts(evidence: Evidence) -> list[str]:
    """That the loader sets the speed, and what was tried against it."""
    loader = evidence.loader
    if loader is None or evidence.data_share <= MAX_DATA_SHARE:
        return []
    known = (
        f"The data loader sets the speed: {100 * evidence.data_share:.0f} % of a step waits for it; "
        f"without waiting it would reach {rate(loader.step_samples_per_second)}."
    )
    if loader.tried:
        return [" ".join([known, *_attempts(loader), _CHEAPER_SAMPLES])]
    if loader.num_workers is None:
        return [f"{known} No workers could be tried: the data makes its batches itself. {_CHEAPER_SAMPLES}"]
    return [
        f"{known} More than its {_workers(loader.num_workers)} were not tried: more --budget or --trials does, "
        "as far as there are CPUs for them."
    ]


def _attempts(loader: LoaderEvidence) -> list[str]:
    """One sentence for each candidate that was tried with other numbers of workers."""
    by_candidate: dict[str, list[str]] = {}
    for tried in loader.tried:
        speed = tried.samples_per_second
        reached = "failed" if speed is None else rate(speed)
        by_candidate.setdefault(tried.candidate, []).append(f"{_workers(tried.num_workers)} ({reached})")
    return [f"{candidate} was tried with {', '.join(tried)}." for candidate, tried in by_candidate.items()]


def _workers(num: int) -> str:
    return f"{num} worker{'' if num == 1 else 's'}"


def memory_doubts(description: Description | None) -> list[str]:
    """What keeps the measured memory from being that of the worst batch."""
    if description is None or description.has_worst_batch:
        return []
    sizes, seen = description.sample_sizes, description.batch_sizes_seen
    if description.scan_problem is not None:
        after = "" if sizes is None else f" after {sizes.num_seen:,} of {sizes.num_samples:,} samples"
        return [
            f"The look through the data for its largest batch ended{after} ({description.scan_problem}): "
            "a batch may take more memory than was measured. Mend the sample, or name the batch that takes the most: "
            "Workload(worst_batch=...)."
        ]
    if seen is not None and sizes is not None:
        return [
            f"Batches differ, from {seen[0]:,} to {seen[1]:,} numbers in those drawn, but not as their samples do: "
            "memory was measured on the samples of the largest, and another may be larger. "
            "Workload(worst_batch=...) names the one that takes the most."
        ]
    if sizes is not None and sizes.num_seen < sizes.num_samples:
        return [
            f"Memory was measured on the largest of {sizes.num_seen:,} samples, {_share_seen(sizes)} of the dataset: "
            "one that was not looked at may be larger. Workload(worst_batch=...) names the batch that takes the most."
        ]
    if seen is not None:
        return [
            f"Batches differ, from {seen[0]:,} to {seen[1]:,} numbers in those drawn, and the data cannot be looked "
            "through: memory and speed are what the batches of the trials took. Workload(worst_batch=...) names the "
            "one that takes the most memory."
        ]
    return []


def ending_doubts(chosen: Runs) -> list[str]:
    """What keeps the measured memory from being that of the workload's evaluation and checkpoint too."""
    problems = [m.ending_problem for m in chosen.measurements if m.ending_problem is not None]
    return [
        f"The peak memory does not hold for the workload's own evaluation and checkpoint: {sentence(problem)} "
        "Mend it where it raised, give a larger --budget where it wants time; then search again with --fresh."
        for problem in problems
    ]

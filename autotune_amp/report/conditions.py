"""What a recommendation was measured under, in lines: its worst batch, the loader's workers, what else ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.text import count, duration, rate, size

if TYPE_CHECKING:
    from autotune_amp.core.hardware import LoadEvidence
    from autotune_amp.core.recommendation import Evidence, LoaderEvidence, WorkersTried


def memory_line(evidence: Evidence, device_type: str) -> str:
    """The peak, what was run for it, and of how many processes it is the highest on a CPU, where they differ."""
    text, found = f"{size(evidence.peak_memory_bytes)} at the peak", evidence.memory
    if found is not None:
        also = ["an evaluation"] * found.has_evaluation + ["a checkpoint"] * found.has_checkpoint
        text += f", with {' and '.join(also)}" if also else ""
        text += f", on {found.worst_case}" if found.worst_case is not None else ""
    processes = found.processes if found is not None and device_type == "cpu" else ()
    if len(processes) > 1:
        text += f"; the highest of {count(len(processes), 'process', 'processes')}"
    return text


def load_line(load: LoadEvidence | None) -> str | None:
    """What others did on the machine, and what that did to the interval; None where it is not worth a word."""
    if load is None or not (load.is_busy or load.is_stolen):
        return None
    said = []
    if load.is_busy and load.others_num_cores is not None:
        said.append(f"others used {load.others_num_cores:.2g} of {count(load.num_cpus, 'core')}")
    if load.is_stolen and load.stolen_share is not None:
        said.append(f"the hypervisor gave {100 * load.stolen_share:.0f} % of the CPU time away")
    low, high = load.interval_factors
    widened = [f"{end} end by {factor:.2f}" for end, factor in (("lower", low), ("upper", high)) if factor != 1]
    return "; ".join([*said, *(["interval multiplied at its " + " and its ".join(widened)] if widened else [])])


def pauses_line(evidence: Evidence) -> str | None:
    """How long the workload's own evaluation and checkpoint take; None where neither was run."""
    named = [("an evaluation", evidence.evaluation_seconds), ("a checkpoint", evidence.checkpoint_seconds)]
    taken = [f"{name} takes {duration(seconds)}" for name, seconds in named if seconds is not None]
    return ", ".join(taken) or None


def loader_line(loader: LoaderEvidence) -> str:
    """What the loader holds up, and what other numbers of workers did."""
    own = "" if loader.num_workers is None else f" with {count(loader.num_workers, 'worker')}"
    text = f"{100 * loader.data_share:.0f} % of a step waits for data{own}"
    alone = f"{rate(loader.step_samples_per_second)} without that wait"
    return "; ".join([text, alone, *map(_tried, loader.tried)])


def _tried(tried: WorkersTried) -> str:
    speed = "failed" if tried.samples_per_second is None else rate(tried.samples_per_second)
    return f"{tried.candidate} with {count(tried.num_workers, 'worker')}: {speed}"

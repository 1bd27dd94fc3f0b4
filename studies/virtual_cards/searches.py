"""One search of the package's own code on a recorded landscape, and its profile of today's batch, beside the truth."""

from __future__ import annotations

import random
from typing import Any

import paths
from landscape import Landscape
from replay import play
from search_replay import search_replay

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.profile.job import LOW, NUM_ROUNDS, Lane, Profiled
from autotune_amp.profile.results import AmpProfile
from autotune_amp.profile.rows import Found, answer, rows
from autotune_amp.trial.jobs import Trial

CHECKS = ("fidelity", "calibration", "accumulation")


def landscape_of(card: str, workload: str) -> Landscape:
    return Landscape.load(paths.RESULTS / "landscapes" / card / f"{workload}.jsonl")


def searched(card: str, workload: str, seed: int) -> dict[str, Any]:
    """Regret is against the fastest cell of the landscape."""
    landscape = landscape_of(card, workload)
    found = search_replay(landscape, seed)
    assert found.decision is not None
    chosen = found.trace[-1][1]
    records = [record for _, record in found.records]
    return {
        "card": card,
        "workload": workload,
        "seed": seed,
        "precision": chosen.precision,
        "batch_size": chosen.batch_size,
        "regret": round(1 - landscape.samples_per_second(chosen) / best_rate(landscape), 4),
        "num_trials": sum(r.purpose in ("search", "fallback") for r in records),
        "num_checks": sum(r.purpose in CHECKS for r in records),
        "num_rounds": 1 + max((r.round for r in records if r.round is not None), default=-1),
        "searched_seconds": round(found.searched_seconds, 1),
        "seconds": round(found.records[-1][0], 1),
    }


def best_rate(landscape: Landscape, *precisions: Precision) -> float:
    """Of any precision where none is named."""
    named = [cell for cell in landscape.cells if cell.precision in (precisions or landscape.header.precisions)]
    return max(map(landscape.samples_per_second, named))


def grid_seconds(landscape: Landscape) -> float:
    """One trial of every cell, as a search makes it."""
    device = landscape.header.hardware.device
    return sum(
        play(process, Trial(candidate=cell, device=device), landscape.header, random.Random(0)).seconds
        for cell, (process,) in landscape.cells.items()
    )


def profiled(landscape: Landscape) -> AmpProfile:
    """What `profile_amp` says of the processes that the landscape has at today's batch."""
    header = landscape.header
    today = header.todays_batch_size
    alone: dict[Precision, Measurement | Failure] = {}
    for precision in header.precisions:
        (process,) = landscape.cells[Setting(precision=precision, batch_size=today)]
        alone[precision] = process.outcome
    lanes = tuple(
        Lane(precision=p, block_seconds=(o.step_seconds,) * NUM_ROUNDS, data_seconds=(0.0,) * NUM_ROUNDS)
        for p, o in alone.items()
        if isinstance(o, Measurement)
    )
    whole = Profiled(lanes=lanes)
    return answer(
        rows(header.precisions, Found({}, alone, whole, {}, header.hardware.identity.type)),
        whole,
        workload=header.workload,
        hardware=header.hardware,
        batch_size=today,
        accumulation_steps=1,
        num_batches=NUM_ROUNDS,
        trace=None,
        notes=(),
    )


def true_speedup(landscape: Landscape, *precisions: Precision) -> float:
    """Of the best batch in any of these precisions over the best in fp32."""
    return best_rate(landscape, *precisions) / best_rate(landscape, "fp32")


def low(landscape: Landscape) -> list[Precision]:
    return [precision for precision in LOW if precision in landscape.header.precisions]

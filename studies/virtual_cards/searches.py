"""One search of the package's own code on a recorded landscape, and its profile of today's batch, beside the truth."""

from __future__ import annotations

import random
from typing import Any

import paths
from landscape import Landscape
from replay import play
from search_replay import search_replay

from autotune_amp.core.outcome import Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.profile_amp import NUM_ROUNDS, AmpProfile, ProfileResults, make_profile, make_rows
from autotune_amp.precision.modes import MIXED_PRECISIONS
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
    outcomes: dict[Precision, list[Outcome]] = {}
    for precision in header.precisions:
        (process,) = landscape.cells[Setting(precision=precision, batch_size=header.todays_batch_size)]
        outcomes[precision] = [process.outcome] * NUM_ROUNDS
    found = ProfileResults(header.hardware, {}, outcomes, {})
    return make_profile(
        make_rows(header.precisions, found),
        found,
        workload=header.workload,
        setting=Setting(precision="fp32", batch_size=header.todays_batch_size),
        num_batches=NUM_ROUNDS,
    )


def true_speedup(landscape: Landscape, *precisions: Precision) -> float:
    """Of the best batch in any of these precisions over the best in fp32."""
    return best_rate(landscape, *precisions) / best_rate(landscape, "fp32")


def low(landscape: Landscape) -> list[Precision]:
    return [precision for precision in MIXED_PRECISIONS if precision in landscape.header.precisions]

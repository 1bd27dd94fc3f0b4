"""recommend_config(): the whole flow on one screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from autotune_amp.errors import InvalidRequestError
from autotune_amp.recommendation import Recommendation
from autotune_amp.search.flow import search
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.origin import live, target
from autotune_amp.search.progress import Progress
from autotune_amp.workload import Workload

DEFAULT_TARGET = "autotune_amp.workloads.transformer:workload"


def recommend_config(
    workload: Workload | Callable[[], Workload] | str | None = None,
    *,
    budget: float = 110.0,
    trials: int | None = None,
    device: str = "auto",
    precision: Sequence[str] | str | None = None,
    batch_size: str | tuple[int, int] | None = None,
    effective_batch_size: int | None = None,
    baseline: str | tuple[str, int] | None = None,
    memory_fraction: float = 0.9,
    study: str | None = None,
    out: str = "studies",
    storage: str | None = None,
    seed: int = 0,
    fresh: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Measure which precision and batch size to train `workload` with, or answer from the cache.

    `workload` is a Workload, a function that returns one, "path/file.py:function" or "package.module:function"; the
    embedded one if left out. `budget` is wall-clock seconds for everything. `batch_size` is "LOW:HIGH" or a pair,
    `baseline` "PRECISION:BATCH" or a pair: what you run today. `effective_batch_size` is kept exactly, by accumulation.
    Results go to `out`/`study`. `fresh` measures again what was measured already. `progress` hears how it goes; by
    default that is standard error unless `quiet`.

    Raises `InvalidRequestError` (a wrong option, workload, device or folder), `BudgetTooSmallError`,
    `NothingWorksError` (every candidate failed) and `SearchInterruptedError` (Ctrl-C; the best so far is saved).
    """
    options = SearchOptions.from_user(
        budget=budget,
        trials=trials,
        device=device,
        precision=precision,
        batch_size=batch_size,
        effective_batch_size=effective_batch_size,
        baseline=baseline,
        memory_fraction=memory_fraction,
        study=study,
        out=out,
        storage=storage,
        seed=seed,
    )
    if "AUTOTUNE_AMP_TRIAL" in os.environ:
        raise InvalidRequestError(
            "recommend_config() was called inside a trial: the workload's own file runs a search when it is imported.",
            'Put that call behind `if __name__ == "__main__":`.',
        )
    origin = target(workload or DEFAULT_TARGET) if workload is None or isinstance(workload, str) else live(workload)
    progress = progress or _default_progress(quiet)
    try:
        return search(origin, options, progress, is_fresh=fresh)
    finally:
        progress.ended()


def _default_progress(quiet: bool) -> Progress:
    if quiet:
        return Progress()
    from autotune_amp.report.progress import TerminalProgress

    return TerminalProgress(sys.stderr)

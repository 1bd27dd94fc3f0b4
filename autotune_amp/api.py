"""recommend_config(): the whole flow on one screen; and check_fidelity(), one precision held against fp32."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from autotune_amp.errors import InvalidRequestError
from autotune_amp.recommendation import Recommendation
from autotune_amp.search.flow import search
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.origin import Origin, live, target
from autotune_amp.search.progress import Progress
from autotune_amp.workload import Workload

if TYPE_CHECKING:
    from autotune_amp.numerics.results import Fidelity

WorkloadArgument: TypeAlias = Workload | Callable[[], Workload] | str | None

DEFAULT_TARGET = "autotune_amp.workloads.transformer:workload"


def recommend_config(
    workload: WorkloadArgument = None,
    *,
    budget: float = 110.0,
    trials: int | None = None,
    device: str = "auto",
    precision: Sequence[str] | str | None = None,
    batch_size: str | tuple[int, int] | None = None,
    effective_batch_size: int | None = None,
    baseline: str | tuple[str, int] | None = None,
    memory_fraction: float = 0.9,
    steps: int = 10_000,
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
    `steps` is how many optimizer steps the training will take: fp16's loss scale is chosen for them.
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
        steps=steps,
        study=study,
        out=out,
        storage=storage,
        seed=seed,
    )
    origin = _origin(workload, "recommend_config", "search")
    progress = progress or _default_progress(quiet)
    try:
        return search(origin, options, progress, is_fresh=fresh)
    finally:
        progress.ended()


def check_fidelity(
    workload: WorkloadArgument = None,
    precision: str = "bf16",
    *,
    batch_size: int | None = None,
    device: str = "auto",
    pinned_modules: Sequence[str] = (),
    seed: int = 0,
    budget: float = 110.0,
    quiet: bool = False,
) -> Fidelity:
    """Whether training `workload` in `precision` learns what fp32 learns: one step and a short training run in both.

    `workload` is as `recommend_config` takes it; it runs in a process of its own, on copies. `batch_size` is the
    workload's own, 16 at most, unless given; fewer samples are used where memory is short. `pinned_modules` run in
    fp32 meanwhile: a bad verdict's `healing_pins` are such. `budget` is wall-clock seconds for everything.

    What could not be checked, for want of memory or time or because the workload does not run in that precision, is
    "unchecked", with the reason. Raises `InvalidRequestError` (a wrong option, device, module name, or a precision that
    the device does not have), `WorkloadError` (the workload does not run in fp32 either), `NothingWorksError` (it
    cannot be built) and `BudgetTooSmallError` (the budget ended before it was loaded).
    """
    from autotune_amp.search.lone_check import checked_request, run_check

    request = checked_request(precision, batch_size, device, pinned_modules, seed, budget)
    origin = _origin(workload, "check_fidelity", "check")
    progress = _default_progress(quiet)
    try:
        return run_check(origin, request, progress)
    finally:
        progress.ended()


def _origin(workload: WorkloadArgument, caller: str, what: str) -> Origin:
    if "AUTOTUNE_AMP_TRIAL" in os.environ:
        raise InvalidRequestError(
            f"{caller}() was called inside a trial: the workload's own file runs a {what} when it is imported.",
            'Put that call behind `if __name__ == "__main__":`.',
        )
    return target(workload or DEFAULT_TARGET) if workload is None or isinstance(workload, str) else live(workload)


def _default_progress(quiet: bool) -> Progress:
    if quiet:
        return Progress()
    from autotune_amp.report.progress import TerminalProgress

    return TerminalProgress(sys.stderr)

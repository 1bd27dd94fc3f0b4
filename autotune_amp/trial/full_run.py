"""The end of a miniature of the job: the workload's own evaluation and checkpoint."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.job import Tell
from autotune_amp.core.outcome import Failure
from autotune_amp.core.workload import Workload
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.trial.training import BaseTraining


class Ending(NamedTuple):
    """What came of both, in the fields of a `Measurement`."""

    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    ending_seconds: float | None = None
    ending_problem: str | None = None


def check_signatures(workload: Workload) -> None:
    """Raises `WorkloadError` where evaluate or checkpoint cannot be called with what they will be given."""
    parts = ("state",) if workload.is_loop else ("model", "optimizer")
    _check_signature("evaluate", workload.evaluate, parts[:1])
    _check_signature("checkpoint", workload.checkpoint, (*parts, "folder"))


def _check_signature(name: str, function: Callable[..., Any] | None, given: tuple[str, ...]) -> None:
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function that is not written in Python nobody knows
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        call = f"{name}({', '.join(given)})"
        raise WorkloadError(
            f"Workload({name}=...) takes {signature} and is called as {call}: {error}.",
            f"Write `def {call}: ...`.",
        ) from error


class Finish:
    """Evaluates, then writes a checkpoint into a folder that is removed, `limit_seconds` for both together.

    The parent holds them to it: before each it is sent the `Ending` that holds should it not come back, and the folder,
    for whoever has to remove it then. `classify` tells running out of memory, which passes through, from what else the
    user's code raises, which is noted.
    """

    def __init__(
        self,
        training: BaseTraining,
        limit_seconds: float,
        tell: Tell,
        keep: Callable[[Ending], None],
        classify: Callable[[BaseException], Failure],
    ) -> None:
        self._training = training
        self._limit_seconds = limit_seconds
        self._tell = tell
        self._keep = keep
        self._classify = classify
        self._began = time.perf_counter()
        self._taken: dict[str, float] = {}
        self._problems: list[str] = []

    def run(self) -> Ending:
        """Both, as far as the workload has them."""
        training = self._training
        if training.workload.evaluate is not None:
            self._run("evaluate", training.evaluate, name="evaluating")
        if training.workload.checkpoint is not None:
            with tempfile.TemporaryDirectory(prefix="autotune-amp-", ignore_cleanup_errors=True) as folder:
                write = partial(training.checkpoint, Path(folder))
                self._run("checkpoint", write, name="writing a checkpoint", folder=folder)
        return self._ending(time.perf_counter() - self._began, self._problems)

    def _run(self, what: str, action: Callable[[], None], **phase: str) -> None:
        started = time.perf_counter()
        left_seconds = self._limit_seconds - (started - self._began)
        if left_seconds <= 0:
            self._problems.append(f"{what} was not run, for want of time")
            return
        overdue = f"{what} did not end within {left_seconds:.{0 if left_seconds >= 10 else 1}f} s"
        self._keep(self._ending(self._limit_seconds, [*self._problems, overdue]))
        self._tell({"event": "phase", "seconds": left_seconds, **phase})
        try:
            action()
            synchronize(self._training.device)
        except (Exception, SystemExit) as error:
            failure = self._classify(error)
            if failure.kind == "oom":
                raise
            self._problems.append(f"{what} raised {failure.message}")
        else:
            self._taken[what] = time.perf_counter() - started

    def _ending(self, seconds: float, problems: list[str]) -> Ending:
        return Ending(
            evaluation_seconds=self._taken.get("evaluate"),
            checkpoint_seconds=self._taken.get("checkpoint"),
            ending_seconds=seconds,
            ending_problem="; ".join(problems) or None,
        )

"""Job: a unit of work that a backend runs in another process; plain data, sent as JSON."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure

Found = TypeVar("Found")
Tell: TypeAlias = Callable[[dict[str, Any]], None]  # sends an event to the waiting parent process
READY = {"event": "ready"}


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of a job in seconds, None for no limit.

    `whole_seconds` limits the whole job, counted from the moment its process is ready. `first_step_seconds` and
    `step_seconds` limit the time without a sign of life until the first step, or any other step, has ended. A
    compilation that the job measures may take `compiling_seconds`, any other half of the remaining time.
    """

    whole_seconds: float | None = None
    first_step_seconds: float | None = None
    step_seconds: float | None = None
    compiling_seconds: float | None = None


class Job(msgspec.Struct, Generic[Found], frozen=True, kw_only=True):
    """Base class of the work that runs in a child process: a trial, a check, a profile and others.

    Subclasses set `answer`, the type of the result, and `work`, the function "package.module:function" that computes it
    from the process's context, the job and a callback that sends events to the parent. Its module is imported in the
    child only, since it may need torch. `torch_state` is the caller's global torch state as returned by
    `torch_state.capture`.

    A job may take `loading_seconds` (None for no limit) until its process is ready, and then `deadline_seconds`. A
    process is ready when it has loaded the workload; if the job `builds_first`, when it has also built its model and
    sent `READY`. With `is_alone` its process runs no other job, before or after.
    """

    answer: ClassVar[Any]
    work: ClassVar[str]
    builds_first: ClassVar[bool] = False

    device: str
    deadline_seconds: float | None = None
    loading_seconds: float | None = None
    is_alone: bool = False
    torch_state: dict[str, Any] = {}

    @classmethod
    def kind(cls) -> str:
        """Return the import path by which a child process finds this class."""
        return f"{cls.__module__}:{cls.__qualname__}"

    @property
    def deadlines(self) -> Deadlines:
        """Return the time limits after which the parent ends the job."""
        return Deadlines(whole_seconds=self.deadline_seconds)

    def run(self, context: Any, tell: Tell) -> Found | Failure:
        """Run the job in a process that holds `context`, and return its result. `tell` sends an event to the parent."""
        found: Found | Failure = _named(self.work)(context, self, tell)
        return found

    def after(self, problem: Failure | AutotuneAmpError, so_far: Found | None) -> Found | Failure | Job[Found]:
        """Return the result of a job that failed or whose process could not load the workload, or a job to run instead.

        `so_far` is the partial result when its process ended. Raises `problem` if it is an `AutotuneAmpError`.
        """
        del so_far
        if isinstance(problem, AutotuneAmpError):
            raise problem
        return problem


def find_job(kind: str, fields: dict[str, Any]) -> Job[Any]:
    """Return the job of class `kind` (see `Job.kind`) with the given fields, as received over a pipe."""
    job: Job[Any] = msgspec.convert(fields, _named(kind))
    return job


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)

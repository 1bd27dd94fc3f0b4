"""Job: what a backend runs, as plain data that is sent to a process as JSON and run there."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure

Found = TypeVar("Found")
Tell: TypeAlias = Callable[[dict[str, Any]], None]  # sends an event to the parent that waits
READY = {"event": "ready"}


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds after which a job is ended, None for no limit: those of all of it, from the moment that its process is
    ready; and those from the last sign of life to the end of its first step, and of any other step. A compilation that
    the job is about may take `compiling_seconds`; any other takes half of what is left."""

    whole_seconds: float | None = None
    first_step_seconds: float | None = None
    step_seconds: float | None = None
    compiling_seconds: float | None = None


class Job(msgspec.Struct, Generic[Found], frozen=True, kw_only=True):
    """What all jobs have: a kind, deadlines, how they are run, and what it means when that fails.

    A kind is a class: `answer` is the type of what it finds, and `work` names the function "package.module:function"
    that finds it, given what the process holds, the job, and what tells the parent. That module is imported in the
    process only, since it may need torch. `torch_state` is the caller's global torch state as
    `torch_state.capture` gave it.

    Until its process is ready, a job has `loading_seconds`, None for any time; from then on `deadline_seconds`. The
    process is ready when it has loaded the workload, and for a job that `builds_first` once that has sent `READY`,
    with its model built. One that `is_alone` has a process that runs no other job, before or after.
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
        """The name by which a process finds this class."""
        return f"{cls.__module__}:{cls.__qualname__}"

    @property
    def deadlines(self) -> Deadlines:
        """When the parent ends it."""
        return Deadlines(whole_seconds=self.deadline_seconds)

    def run(self, context: Any, tell: Tell) -> Found | Failure:
        """Do it, in a process that holds `context`."""
        found: Found | Failure = _named(self.work)(context, self, tell)
        return found

    def after(self, problem: Failure | AutotuneAmpError, so_far: Found | None) -> Found | Failure | Job[Found]:
        """What follows when it failed, or its process could not load the workload: an answer, or another job to run in
        its place. `so_far` is what it had found when its process ended."""
        del so_far
        if isinstance(problem, AutotuneAmpError):
            raise problem
        return problem


def find_job(kind: str, fields: dict[str, Any]) -> Job[Any]:
    """The job of a kind, from the fields that came over a pipe."""
    job: Job[Any] = msgspec.convert(fields, _named(kind))
    return job


def _named(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)

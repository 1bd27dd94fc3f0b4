"""Job: work that a backend runs in another process, and the events that this process sends to its parent. Both are
plain data, sent as lines of JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from autotune_amp.core import errors
from autotune_amp.core.errors import AutotuneAmpError, RunnerError
from autotune_amp.core.outcome import Failure

ResultType = TypeVar("ResultType")


class _JobEvent(msgspec.Struct, frozen=True, tag_field="event"):
    """Base class of the events that a child process sends."""


class Ready(_JobEvent, frozen=True, tag="ready"):
    """Event that the process is ready for its job, whose time counts from now on."""


class FirstStep(_JobEvent, frozen=True, tag="first step"):
    """Event that the first training step begins."""


class StepDone(_JobEvent, frozen=True, tag="step"):
    """Event that a training step ended, with its duration in seconds; `number` is 0 during the warm-up."""

    number: int
    seconds: float


class Compilation(_JobEvent, frozen=True, tag="compiling"):
    """Event that torch compiles code, which takes time of its own."""


class Phase(_JobEvent, frozen=True, tag="phase"):
    """Event that work other than steps begins, with its time limit in seconds; None for no limit of its own."""

    name: str
    seconds: float | None = None


class PartialResult(_JobEvent, frozen=True, tag="so far"):
    """Event with a preliminary result, used if the process ends before it sends another one."""

    value: Any


class Result(_JobEvent, frozen=True, tag="result"):
    """Event with the answer to a request."""

    value: Any


class RequestFailure(_JobEvent, frozen=True, tag="failed"):
    """Event that the user's code failed in a request."""

    failure: Failure


class RequestError(_JobEvent, frozen=True, tag="error"):
    """Event that a request raised an `AutotuneAmpError`; `kind` is the name of its class."""

    kind: str
    message: str
    next_step: str

    def exception(self) -> AutotuneAmpError:
        """Return the error to raise: a `RunnerError` if its class is not one of `core.errors`."""
        kind: type[AutotuneAmpError] = getattr(errors, self.kind, RunnerError)
        return kind(self.message, self.next_step)


class ChildExit(_JobEvent, frozen=True, tag="exit"):
    """Event that the forked child which ran the job has ended, with its exit status."""

    status: int


class EndOfEvents(_JobEvent, frozen=True, tag="end"):
    """Event that the parent adds after the last event of a process."""


JobEvent: TypeAlias = (
    Ready
    | FirstStep
    | StepDone
    | Compilation
    | Phase
    | PartialResult
    | Result
    | RequestFailure
    | RequestError
    | ChildExit
    | EndOfEvents
)
Tell: TypeAlias = Callable[[JobEvent], None]  # sends an event to the waiting parent process


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


class Job(msgspec.Struct, Generic[ResultType], frozen=True, kw_only=True):
    """Base class of the work that runs in a child process: a trial, a check, a profile and others.

    Subclasses set `answer`, the type of the result, and `work`, the function "package.module:function" that computes it
    from the process's context, the job and a callback that sends events to the parent. Its module is imported in the
    child only, since it may need torch. `command_work`, if any, is the function that does the same in the process of a
    training command, on its own steps (see `trial.observed_steps`). `torch_state` is the caller's global torch state as
    returned by `torch_state.capture`.

    A job may take `loading_seconds` (None for no limit) until its process is ready, and then `deadline_seconds`. A
    process is ready when it has loaded the workload; if the job `builds_first`, when it has also built its model and
    sent `Ready`. With `is_alone` its process runs no other job, before or after.
    """

    answer: ClassVar[Any]
    work: ClassVar[str]
    command_work: ClassVar[str | None] = None
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

    def run(self, context: Any, tell: Tell) -> ResultType | Failure:
        """Run the job in a process that holds `context`, and return its result. `tell` sends an event to the parent."""
        result: ResultType | Failure = import_attribute(self.work)(context, self, tell)
        return result

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: ResultType | None
    ) -> ResultType | Failure | Job[ResultType]:
        """Return the result of a job that failed or whose process could not load the workload, or a job to run instead.

        `so_far` is the partial result when its process ended. Raises `problem` if it is an `AutotuneAmpError`.
        """
        del so_far
        if isinstance(problem, AutotuneAmpError):
            raise problem
        return problem


def find_job(kind: str, fields: dict[str, Any]) -> Job[Any]:
    """Return the job of class `kind` (see `Job.kind`) with the given fields, as received over a pipe."""
    job: Job[Any] = msgspec.convert(fields, import_attribute(kind))
    return job


def import_attribute(name: str) -> Any:
    """Import and return the function or class "package.module:name"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)

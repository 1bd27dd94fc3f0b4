"""Backend: where jobs run. What searches use of it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure

Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)
# check, profile: it runs such jobs. share_build: it can build the model once for all jobs.
Ability: TypeAlias = Literal["check", "profile", "share_build"]


class Slot(NamedTuple):
    """A device on which one job runs at a time; a job names its device, and by it its slot."""

    device: str


class Handle(Protocol[Found_co]):
    """A job that was submitted."""

    def result(self) -> Found_co | Failure:
        """Wait for what it found, or for how it failed. Raises our own errors where the job gives them no other
        meaning."""

    @property
    def start_seconds(self) -> float | None:
        """What it waited for its process to start: 0.0 where one was there already, None if it was forked."""


class Backend(Protocol):
    """Runs jobs for one workload, each isolated from the others; a failure is a result, and the next job runs.

    As a context manager it ends whatever it started on the way out.
    """

    @property
    def abilities(self) -> frozenset[Ability]:
        """What can be asked of it now."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Where jobs can run at the same time."""

    @property
    def is_build_shared(self) -> bool:
        """Whether the model is built once for all jobs."""

    def submit(self, job: Job[Found]) -> Handle[Found]:
        """Start a job."""

    def share_build(self, job: Job[Found], deadline_seconds: float) -> str | None:
        """Build the model once, as `job` would, for all jobs to come.

        Returns why that cannot be, None where it can; after a reason the backend is to be closed, or a process kept.
        """

    def keep(self) -> None:
        """Go on with one process that is kept from job to job until one fails."""

    def close(self) -> None:
        """End every process."""

    def __enter__(self) -> Backend: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

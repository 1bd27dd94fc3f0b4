"""Backend: where jobs run; and the one of this machine, in processes that are forked or kept. No torch here."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from autotune_amp.core.errors import AutotuneAmpError, BudgetTooSmallError, WorkloadError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import duration
from autotune_amp.distributed import is_from_launcher
from autotune_amp.isolation.process import Process, ProcessEndedError, Watcher
from autotune_amp.isolation.standby import Standby
from autotune_amp.trial.jobs import Check, Trial

if TYPE_CHECKING:
    from typing_extensions import Self

Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)
Value = TypeVar("Value")
Isolation: TypeAlias = Literal["forked", "kept"]
# fidelity, calibration, accumulation, profile: it answers such jobs, later: fidelity on trained weights too.
# share_build: it can build the model once for all. energy: its trials say what the device drew. load_together: it can
# load the processes of a confirmation at the same time.
Ability: TypeAlias = Literal[
    "fidelity", "later", "calibration", "accumulation", "profile", "share_build", "energy", "load_together"
]

_LOCAL: frozenset[Ability] = frozenset({"fidelity", "later", "calibration", "accumulation", "profile", "energy"})
CANNOT_BE_LOADED = "cannot be loaded"
_CLOCK_TICK = 1e-6  # seconds: what was waited for a process that was ready is small, and not nothing
TRIAL_ENVIRONMENT = {
    "AUTOTUNE_AMP_TRIAL": "1",
    # User code asks torch.cuda.is_available() on import; answered by the CUDA runtime, no forked child could use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Experiment trackers that can be turned off by a variable: a trial is no run of the user's.
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",  # of Transformers' callback; the next is comet_ml's own
    "COMET_AUTO_LOG_DISABLE": "true",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "DISABLE_KUBEFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
    "TRACKIO_SPACE_ID": "",
    "CODECARBON_SAVE_TO_FILE": "false",
    "CODECARBON_SAVE_TO_API": "false",
}


class Slot(NamedTuple):
    """A device, or a share of the CPU, on which one job runs at a time.

    `device` is what a job on it names; `name` tells it from the others, None where there is one alone. `uuid` is the
    card's, `cpus` are the numbers of the CPUs that are its share. `is_here`: on this host.
    """

    device: str
    name: str | None = None
    uuid: str | None = None
    cpus: tuple[int, ...] = ()
    is_here: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """What a process on it starts with."""
        return {} if self.uuid is None else {"CUDA_VISIBLE_DEVICES": self.uuid}

    @property
    def shares_memory(self) -> bool:
        """Whether it has its memory together with the other slots of the host."""
        return bool(self.cpus)


class SlotLostError(Exception):
    """A slot is there no more, with whatever ran on it: nothing is known of its job."""

    def __init__(self, slot: Slot, reason: str) -> None:
        super().__init__(reason)
        self.slot = slot
        self.reason = reason


class Handle(Protocol[Found_co]):
    """A job that was submitted."""

    def result(self) -> Found_co | Failure:
        """Wait for what it found, or for how it failed. Raises our own errors where the job gives them no other
        meaning, and `SlotLostError`."""

    @property
    def start_seconds(self) -> float | None:
        """What it waited for its process: 0.0 only for one that has run a job before, None if it was forked."""


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

    def submit(self, job: Job[Found], slot: Slot | None = None) -> Handle[Found]:
        """Start a job, on one of several slots where no other runs; None is the first."""

    def wait(self, handles: Sequence[Handle[Any]]) -> Handle[Any]:
        """Wait until one of the jobs is over. Where they run one at a time its `result` does."""
        return handles[0]

    def share_build(self, job: Job[Found], deadline_seconds: float) -> str | None:
        """Build the model once, as `job` would, for all jobs to come.

        Returns why that cannot be, None where it can; after a reason the backend is to be closed, or a process kept.
        """

    def keep(self) -> None:
        """Go on with one process that is kept from job to job until one fails."""

    def close(self) -> None:
        """End every process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


class WorkloadBackend(Backend, Protocol):
    """A `Backend` that has a workload of the user's to load before it runs jobs."""

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Load the workload; returns the torch state found after it. Raises `WorkloadError` where it cannot be."""

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> Opened:
        """Call it once on the device, with `num_threads`, None for the number that the user's code asks for."""

    def open_others(self, deadline_seconds: float) -> None:
        """Have it loaded and called where there are other slots, too."""
        del deadline_seconds


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """How a trial process gets the workload: a target to import, or packed bytes; with the caller's import path."""

    target: str | None
    packed: bytes = b""
    path: tuple[str, ...]


def can_fork() -> bool:
    """Whether trials can be forked: on Linux, where fork, pidfd and the parent-death signal are sound."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Opened(NamedTuple):
    """The torch state found after the user's function was called, and why jobs cannot be forked, None if they can.

    `ready_seconds` is what a fresh process takes until then, None where that is what this one took.
    """

    torch_state: dict[str, Any]
    why_not_forked: str | None
    ready_seconds: float | None = None


class LocalBackend(WorkloadBackend):
    """A `Backend` whose jobs run in processes of their own.

    `isolation`: ``forked`` from a template that holds the workload, or ``kept`` in one worker until a job fails or has
    to be alone; None forks where that is sound, else keeps. `environment` is laid over the caller's. They see no other
    card than that of the `slot`, where there are several. A worker that is needed comes from the `standby`, which has
    another one loaded while jobs run.
    """

    def __init__(
        self,
        payload: Payload,
        isolation: Isolation | None,
        watcher: Watcher,
        environment: dict[str, str] | None = None,
        slot: Slot | None = None,
        standby: Standby | None = None,
    ) -> None:
        self.isolation: Isolation = isolation or ("forked" if can_fork() else "kept")
        self._payload = payload
        self._watcher = watcher
        inherited = {name: value for name, value in os.environ.items() if not is_from_launcher(name)}
        of_slot = {} if slot is None else slot.environment
        self._environment = {**inherited, **TRIAL_ENVIRONMENT, **(environment or {}), **of_slot}
        self._standby = standby or Standby(room_for=lambda _: 0)
        self._process: Process | None = None
        self._has_run = False  # a job in this process
        self._device = "cpu"
        self._num_threads: int | None = None
        self._share_command: dict[str, Any] | None = None

    def close(self) -> None:  # noqa: D102 - see Backend
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    @property
    def abilities(self) -> frozenset[Ability]:  # noqa: D102 - see Backend
        # Only a process that others are forked from builds for them.
        if self.isolation == "forked":
            return _LOCAL | {"share_build"}
        is_card, process = self._device != "cpu", self._process  # on a CPU each run of a confirmation has its own
        has_room = is_card and process is not None and self._standby.has_room(process)
        return _LOCAL | {"load_together"} if has_room else _LOCAL

    @property
    def slots(self) -> Sequence[Slot]:  # noqa: D102 - see Backend
        return (Slot(self._device),)

    @property
    def is_build_shared(self) -> bool:  # noqa: D102 - see Backend
        return self._share_command is not None

    def keep(self) -> None:  # noqa: D102 - see Backend
        if self.isolation == "forked":
            self.close()
            self.isolation, self._share_command = "kept", None

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:  # noqa: D102 - see Backend
        command = {"cmd": "share", "device": job.device, "state": job.torch_state, "seed": job.seed}

        def share(until: float) -> str | None:
            self._ready_process(until)
            reason: str | None = self._expect(command, until)
            return reason

        try:
            reason = _within(deadline_seconds, share)
        except (BudgetTooSmallError, WorkloadError) as error:
            return f"it cannot be built in the process that trials are forked from: {error.message.splitlines()[0]}"
        if reason is None:
            self._share_command = command
        return reason

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Start the process and import or unpack the workload; returns the torch state found after it.

        Raises `WorkloadError` where the workload cannot be loaded, with the user's own traceback, and
        `BudgetTooSmallError` where that takes longer than the deadline.
        """
        state: dict[str, Any] = _within(deadline_seconds, self._load)
        return state

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> Opened:
        """Call the user's function once; `num_threads` None leaves the number to the user's code.

        A process that did so, and from which jobs cannot be forked, runs them itself.
        """
        self._device, self._num_threads = device, num_threads

        def open_and_take_over(until: float) -> Opened:
            opened = Opened(**self._open(until))
            if opened.why_not_forked is not None:
                self.isolation = "kept"
                self._take_over(until)
            return opened

        return _within(deadline_seconds, open_and_take_over)

    def submit(self, job: Job[Found], slot: Slot | None = None) -> Submitted[Found]:  # noqa: D102 - see Backend
        return Submitted(self, job, () if slot is None else slot.cpus)

    def start(self, job: Job[Any], until: float | None, cpus: Sequence[int]) -> float | None:
        """Have a process run it, on these CPUs alone where there are some; returns what the process took to start, None
        where it is forked. Raises `ProcessEndedError` where that is not there by `until`."""
        began = time.monotonic()
        self._device = job.device  # known by its number once it was probed
        if job.is_alone and self._has_run:
            self.close()
        command = {"cmd": "run", "kind": job.kind(), "job": msgspec.to_builtins(job), "cpus": cpus}
        process = self._ready_process(until)
        if isinstance(job, Trial) and (number := self._standby.num_wanted):
            self._have_stand_by(process, job, number)
            now = time.monotonic()  # what never loads beside another one leaves half the time
            self._standby.load(self._watcher, None if until is None else (now + until) / 2)
        process.send(command)
        if self.isolation == "forked":
            return None
        start_seconds = 0.0 if self._has_run else max(_CLOCK_TICK, time.monotonic() - began)
        self._has_run = True
        if not job.is_alone and (isinstance(job, Check) or (isinstance(job, Trial) and job.purpose == "search")):
            self._have_stand_by(process, job, 1)
        return start_seconds

    def _have_stand_by(self, process: Process, job: Trial | Check, number: int) -> None:
        command = {"cmd": "stand_by", "device": job.device, "state": job.torch_state, "seed": job.seed}
        command |= self._load_arguments
        self._standby.begin(process, self._environment, command, self._payload.packed, number)

    def finish(self, job: Job[Found], until: float | None) -> tuple[Found | Failure, Found | None]:
        """What the process found, which has to be ready by `until`; with a failure that ended it also what it had found
        so far."""
        assert self._process is not None
        is_forked = self.isolation == "forked"
        try:
            value = self._process.wait(until, job.deadlines, ends_with_exit=is_forked, beside=self._standby)
        except AutotuneAmpError:
            self.close()
            raise
        except ProcessEndedError as ended:
            if self.isolation != "forked":  # a template outlives its children; if it has not, the next job sees it
                self.close()
            return ended.failure, None if ended.so_far is None else converted(job, ended.so_far)
        finally:
            self._standby.go_on()
        if isinstance(value, dict) and value.get("outcome") == "failure":
            value = msgspec.convert(value, Failure)
        if job.is_alone or (self.isolation == "kept" and isinstance(value, Failure)):
            self.close()
        if isinstance(value, Failure):
            return value, None
        try:
            return converted(job, value), None
        except msgspec.ValidationError as error:  # a number that is none, where there must be one
            return Failure(kind="crash", message=f"it gave a result that cannot be read: {error}"), None

    def _ready_process(self, until: float | None) -> Process:
        if self._process is None or not self._process.is_alive():
            self.close()
            if not self._has_taken_standby(until):
                self._load(until)
                self._open(until)
            if self._share_command is not None:
                self._expect(self._share_command, until)
        assert self._process is not None
        return self._process

    def _has_taken_standby(self, until: float | None) -> bool:
        """Have the process that stands by run the jobs from now on, once it is loaded; false where there is none, or it
        does not load beside another."""
        if self.isolation == "forked":
            return False
        self._process, self._has_run = self._standby.take(self._environment, self._watcher, until), False
        if self._process is None:
            return False
        try:
            self._take_over(until)
        except WorkloadError:
            return False
        return True

    def _take_over(self, until: float | None) -> None:
        self._expect({"cmd": "take_over", "device": self._device}, until)

    @property
    def _load_arguments(self) -> dict[str, Any]:
        target, path, packed = self._payload.target, self._payload.path, self._payload.packed
        return {"target": target, "path": path, "num_packed_bytes": len(packed)}

    def _load(self, until: float | None) -> Any:
        self._process, self._has_run = Process(self.isolation, self._environment, self._watcher), False
        self._expect(None, until)  # ready: what is written to one that never reads would block us
        return self._expect({"cmd": "load", **self._load_arguments}, until, self._payload.packed)

    def _open(self, until: float | None) -> Any:
        return self._expect({"cmd": "open", "device": self._device, "num_threads": self._num_threads}, until)

    def _expect(self, command: dict[str, Any] | None, until: float | None, data: bytes = b"") -> Any:
        """What the process answers; raises `ProcessEndedError` where it does not by `until`."""
        assert self._process is not None
        try:
            if command is not None:
                self._process.send(command, data)
            value = self._process.wait(until)
        except ProcessEndedError as ended:
            if ended.failure.kind == "timeout":
                self.close()
                raise
            value = ended.failure
        if not isinstance(value, Failure):
            return value
        self.close()
        details = f"\n{value.details.rstrip()}" if value.details else ""
        raise WorkloadError(
            f"{self._payload.target or 'The workload'} {CANNOT_BE_LOADED}: {value.message}.{details}",
            "Import it and call it in a Python of its own, and fix what that raises.",
        )


def _within(seconds: float, load: Callable[[float], Value]) -> Value:
    """What `load` returns, which is given the time to be ready by. Raises `BudgetTooSmallError` where it is not."""
    try:
        return load(time.monotonic() + seconds)
    except ProcessEndedError:
        raise BudgetTooSmallError(
            f"The workload takes more than the {duration(max(seconds, 0.0))} of the budget that were left to load it.",
            "Give a --budget of several times what importing and calling it takes.",
        ) from None


def _too_slow(seconds: float) -> str:
    return f"the workload takes more than {duration(seconds)} to load"


class Submitted(Generic[Found]):
    """A job in a process of this machine, and what the job asks for in its place."""

    def __init__(self, backend: LocalBackend, job: Job[Found], cpus: Sequence[int]) -> None:
        seconds = job.loading_seconds
        self._until = None if seconds is None else time.monotonic() + seconds
        self._backend = backend
        self._cpus = cpus
        self._start(job)

    def _start(self, job: Job[Found]) -> None:
        self._job = job
        self._problem: Failure | AutotuneAmpError | None = None
        self.start_seconds: float | None = None
        try:
            self.start_seconds = self._backend.start(job, self._until, self._cpus)
        except ProcessEndedError as ended:
            self._problem = ended.failure
        except AutotuneAmpError as error:
            self._problem = error

    def result(self) -> Found | Failure:
        """Wait for it, and run what the job asks for in its place after a failure."""
        while True:
            problem, so_far = self._problem, None
            if problem is None:
                try:
                    found, so_far = self._backend.finish(self._job, self._until)
                    if not isinstance(found, Failure):
                        return found
                    problem = found
                except AutotuneAmpError as error:
                    problem = error
            if isinstance(problem, Failure) and problem.is_loading:
                problem = replace(problem, message=_too_slow(self._job.loading_seconds or 0.0))
            follows = self._job.after(problem, so_far)
            if not isinstance(follows, Job):
                return follows
            self._start(follows)  # in another process: what a failed allocation leaves must not count against it


def converted(job: Job[Found], value: Any) -> Found:
    """What a job found, from what came as plain data."""
    found: Found = msgspec.convert(value, type=job.answer, str_keys=True)  # JSON has no whole numbers as keys
    return found

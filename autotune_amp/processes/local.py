"""Interface of backends, and the backend whose jobs run in forked or kept processes of this host. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec
from msgspec.structs import replace

from autotune_amp.core.errors import AutotuneAmpError, BudgetTooSmallError, WorkloadError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import duration
from autotune_amp.distributed import is_from_launcher
from autotune_amp.processes.process import Process, ProcessEndedError, Watcher
from autotune_amp.processes.standby import Standby
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.memory import can_be_limited

if TYPE_CHECKING:
    from typing_extensions import Self

ResultType = TypeVar("ResultType")
ResultTypeCo = TypeVar("ResultTypeCo", covariant=True)
Value = TypeVar("Value")
Isolation: TypeAlias = Literal["forked", "kept"]
# fidelity, calibration, accumulation, profile: it runs such jobs; later: also checks of fidelity on trained weights.
# share_build: it can build the model once for all jobs. energy: its trials measure the device's energy. load_together:
# it can load the processes of a confirmation at the same time.
Ability: TypeAlias = Literal[
    "fidelity", "later", "calibration", "accumulation", "profile", "share_build", "energy", "load_together"
]

_LOCAL_ABILITIES: frozenset[Ability] = frozenset(
    {"fidelity", "later", "calibration", "accumulation", "profile", "energy"}
)
CANNOT_BE_LOADED = "cannot be loaded"
_MIN_START_SECONDS = 1e-6  # start of a process that was ready; 0.0 means that it had run a job before
TRIAL_ENVIRONMENT = {
    "AUTOTUNE_AMP_TRIAL": "1",
    # torch.cuda.is_available() on import would start the CUDA runtime, which no forked child could use then; NVML not.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Turn off experiment trackers: a trial must not appear among the user's own runs.
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",  # for Transformers' callback; the next one is comet_ml's own
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
    """Device, or share of the CPU, on which one job runs at a time.

    `device` is the name used in its jobs; `name` distinguishes it from other slots, None if it is the only one. `uuid`
    is the GPU's, `cpus` are the indices of the CPUs in its share. `is_here`: it is on this host.
    """

    device: str
    name: str | None = None
    uuid: str | None = None
    cpus: tuple[int, ...] = ()
    is_here: bool = True

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process on the slot."""
        return {} if self.uuid is None else {"CUDA_VISIBLE_DEVICES": self.uuid}


class SlotLostError(Exception):
    """Raised when a slot cannot be used any more. The outcome of its job is unknown."""

    def __init__(self, slot: Slot, reason: str) -> None:
        super().__init__(reason)
        self.slot = slot
        self.reason = reason


class Handle(Protocol[ResultTypeCo]):
    """Interface of a submitted job."""

    def result(self) -> ResultTypeCo | Failure:
        """Wait for the result or failure. Raises errors that the job does not handle, and `SlotLostError`."""

    @property
    def start_seconds(self) -> float | None:
        """Return the seconds that its process took to start: 0.0 only if it had run a job before, None if forked."""


class CompletedHandle(NamedTuple):
    """Handle of a job that ended before `submit` returned."""

    outcome: Any
    start_seconds: float | None = None

    def result(self) -> Any:
        """Return the result of the job."""
        return self.outcome


class Backend(Protocol):
    """Interface for running jobs of one workload, isolated from each other: after a failed job, others still run.

    As a context manager it ends all processes that it started.
    """

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the kinds of jobs and options available at present."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots that can run jobs at the same time."""

    @property
    def is_build_shared(self) -> bool:
        """Whether the model is built once for all jobs."""

    def submit(self, job: Job[ResultType], slot: Slot | None = None) -> Handle[ResultType]:
        """Start a job on a free slot, the first if None."""

    def wait(self, handles: Sequence[Handle[Any]]) -> Handle[Any]:
        """Wait until one of the jobs has ended and return it. This default suits one slot, where `result` waits."""
        return handles[0]

    def share_build(self, job: Job[ResultType], deadline_seconds: float) -> str | None:
        """Build the model once, as `job` would, for all later jobs.

        Return None, or why it is impossible; the caller then has to `close` the backend or call `keep`.
        """

    def keep(self) -> None:
        """Use a single process for all later jobs, until a job fails."""

    def close(self) -> None:
        """End every process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()


@runtime_checkable
class LoadingBackend(Protocol):
    """Interface of a backend that can load the fresh processes of several trials at the same time."""

    @property
    def num_together(self) -> int:
        """Return how many processes can load at the same time, 1 if each has to load alone."""

    def load_together(self, jobs: Sequence[Trial], limit_seconds: float) -> None:
        """Load the processes of these trials, which are expected to be submitted in this order, within `limit_seconds`.

        Nothing is done if the first has been loaded; else processes that were loaded for other trials are ended. One
        that does not load starts once more when it is submitted.
        """


class WorkloadBackend(Backend, Protocol):
    """Interface of a `Backend` that has to load a user's workload before it runs jobs."""

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Load the workload and return the torch state afterwards. Raises `WorkloadError` if it cannot be loaded."""

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:
        """Call the workload's function once on the device. With `num_threads` None its code sets the thread number."""

    def open_others(self, deadline_seconds: float) -> None:
        """Load and call the workload on the other slots."""
        del deadline_seconds


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Workload for a trial process: a target to import, or packed bytes, and the caller's import path."""

    target: str | None
    packed: bytes = b""
    path: tuple[str, ...]


def can_fork() -> bool:
    """Whether trials can be forked: only on Linux, which has the parent-death signal, and where pidfds can be opened.

    A kernel before 5.3 has no pidfds, and a container's seccomp profile may forbid them.
    """
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            os.close(os.pidfd_open(os.getpid()))
            return True
    return False


class OpenResult(NamedTuple):
    """Torch state after the user's function was called, and why jobs cannot be forked, None if they can.

    `ready_seconds` is the time in which a fresh process gets ready for jobs, None if every job has a fresh process.
    """

    torch_state: dict[str, Any]
    why_not_forked: str | None
    ready_seconds: float | None = None


class LocalBackend(WorkloadBackend):
    """`Backend` whose jobs run in processes of their own on this host.

    `isolation`: ``forked`` from a template that has loaded the workload, or ``kept`` in one worker until a job fails or
    has to be alone; with None jobs are forked if the workload allows it. `environment` is added to the caller's. With a
    `slot`, jobs see only its GPU. A new worker is taken from `standby`, which loads another one while jobs run.
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
        slot_environment = {} if slot is None else slot.environment
        self._environment = {**inherited, **TRIAL_ENVIRONMENT, **(environment or {}), **slot_environment}
        self._standby = standby or Standby(room_for=lambda _: 0)
        self._process: Process | None = None
        self._has_run = False  # whether this process has run a job
        self._device = "cpu"
        self._num_threads: int | None = None
        self._share_command: dict[str, Any] | None = None

    def close(self) -> None:  # noqa: D102 - see Backend
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    @property
    def abilities(self) -> frozenset[Ability]:  # noqa: D102 - see Backend
        # only a template can build for its children
        if self.isolation == "forked":
            return _LOCAL_ABILITIES | {"share_build"}
        # On a CPU each run of a confirmation has its own process, so they are not loaded together.
        is_gpu, process = self._device != "cpu", self._process
        has_room = is_gpu and process is not None and self._can_stand_by and self._standby.has_room(process)
        return _LOCAL_ABILITIES | {"load_together"} if has_room else _LOCAL_ABILITIES

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
            reason: str | None = self._request(command, until)
            return reason

        try:
            reason = _within(deadline_seconds, share)
        except (BudgetTooSmallError, WorkloadError) as error:
            return f"it cannot be built in the process that trials are forked from: {error.message.splitlines()[0]}"
        if reason is None:
            self._share_command = command
        return reason

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Start the process, import or unpack the workload, and return the torch state afterwards.

        Raises `WorkloadError` with the user's own traceback if the workload cannot be loaded, and `BudgetTooSmallError`
        if that takes longer than the deadline.
        """
        state: dict[str, Any] = _within(deadline_seconds, self._load)
        return state

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:
        """Call the user's function once; with `num_threads` None the user's code sets the number.

        If jobs cannot be forked from the process, it runs them itself.
        """
        self._device, self._num_threads = device, num_threads

        def open_and_take_over(until: float) -> OpenResult:
            opened = OpenResult(**self._open(until))
            if opened.why_not_forked is not None:
                self.isolation = "kept"
                self._take_over(until)
            return opened

        return _within(deadline_seconds, open_and_take_over)

    def submit(self, job: Job[ResultType], slot: Slot | None = None) -> LocalHandle[ResultType]:  # noqa: D102 - see Backend
        return LocalHandle(self, job, () if slot is None else slot.cpus)

    def start(self, job: Job[Any], until: float | None, cpus: Sequence[int]) -> float | None:
        """Start a job in a process, limited to these CPUs if given. Return the seconds its process took to start, None
        if forked.

        Raises `ProcessEndedError` if the process is not ready by `until`.
        """
        began = time.monotonic()
        self._device = job.device  # its index is known after the probe
        if job.is_alone and self._has_run:
            self.close()
        command = {"cmd": "run", "kind": job.kind(), "job": msgspec.to_builtins(job), "cpus": cpus}
        process = self._ready_process(until)
        if isinstance(job, Trial) and (number := self._standby.num_wanted):
            self._begin_standby(process, job, number)
            now = time.monotonic()  # half of the time is left if a process never finishes loading
            self._standby.load(self._watcher, None if until is None else (now + until) / 2)
        process.send(command)
        if self.isolation == "forked":
            return None
        start_seconds = 0.0 if self._has_run else max(_MIN_START_SECONDS, time.monotonic() - began)
        self._has_run = True
        if not job.is_alone and (isinstance(job, Check) or (isinstance(job, Trial) and job.purpose == "search")):
            self._begin_standby(process, job, 1)
        return start_seconds

    @property
    def _can_stand_by(self) -> bool:
        """Whether a process that stands by can be kept from the device's memory, which the running trial may use up."""
        return self._device == "cpu" or can_be_limited(self._environment)

    def _begin_standby(self, process: Process, job: Trial | Check, number: int) -> None:
        if not self._can_stand_by:
            return
        command = {"cmd": "stand_by", "device": job.device, "state": job.torch_state, "seed": job.seed}
        command |= self._load_arguments
        self._standby.begin(process, self._environment, command, self._payload.packed, number)

    def finish(self, job: Job[ResultType], until: float | None) -> tuple[ResultType | Failure, ResultType | None]:
        """Return the job's result or failure, and with a failure that ended the process also its result so far.

        The process has to be ready by `until`.
        """
        assert self._process is not None
        is_forked = self.isolation == "forked"
        try:
            value = self._process.wait(until, job.deadlines, ends_with_exit=is_forked, beside=self._standby.processes)
        except AutotuneAmpError:
            self.close()
            raise
        except ProcessEndedError as ended:
            if self.isolation != "forked":  # a template outlives its children; the next job checks that
                self.close()
            so_far = convert_result(job, ended.so_far)  # a failure if there is none
            return ended.failure, None if isinstance(so_far, Failure) else so_far
        finally:
            self._standby.resume()
        result = convert_result(job, value)
        if job.is_alone or (self.isolation == "kept" and isinstance(result, Failure)):
            self.close()
        return result, None

    def _ready_process(self, until: float | None) -> Process:
        if self._process is None or not self._process.is_alive():
            self.close()
            if not self._switch_to_standby(until):
                self._load(until)
                self._open(until)
            if self._share_command is not None:
                self._request(self._share_command, until)
        assert self._process is not None
        return self._process

    def _switch_to_standby(self, until: float | None) -> bool:
        """Wait for the standby process to load and use it. Return False if there is none or it fails to load."""
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
        self._request({"cmd": "take_over", "device": self._device}, until)

    @property
    def _load_arguments(self) -> dict[str, Any]:
        target, path, packed = self._payload.target, self._payload.path, self._payload.packed
        return {"target": target, "path": path, "num_packed_bytes": len(packed)}

    def _load(self, until: float | None) -> Any:
        self._process, self._has_run = Process(self.isolation, self._environment, self._watcher), False
        self._request(None, until)  # wait for ready: writing to a process that never reads would block
        return self._request({"cmd": "load", **self._load_arguments}, until, self._payload.packed)

    def _open(self, until: float | None) -> Any:
        return self._request({"cmd": "open", "device": self._device, "num_threads": self._num_threads}, until)

    def _request(self, command: dict[str, Any] | None, until: float | None, data: bytes = b"") -> Any:
        """Send a command to the process and return its answer. Raises `ProcessEndedError` if there is none by `until`.

        Raises `WorkloadError` if the workload fails to load. With `command` None wait for the first message.
        """
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
            "Import it and call it in a new Python process, and fix the error that it raises.",
        )


def _within(seconds: float, load: Callable[[float], Value]) -> Value:
    """Call `load` with the time by which it has to be ready, and return its result.

    Raises `BudgetTooSmallError` if it is not ready in time.
    """
    try:
        return load(time.monotonic() + seconds)
    except ProcessEndedError:
        raise BudgetTooSmallError(
            f"Loading the workload takes more than the {duration(max(seconds, 0.0))} left of the budget.",
            "Use a --budget of several times the time that importing and calling it takes.",
        ) from None


class LocalHandle(Generic[ResultType]):
    """Handle of a job in a process of this host. After a failure it runs the job that `Job.after` returns instead."""

    def __init__(self, backend: LocalBackend, job: Job[ResultType], cpus: Sequence[int]) -> None:
        seconds = job.loading_seconds
        self._until = None if seconds is None else time.monotonic() + seconds
        self._backend = backend
        self._cpus = cpus
        self._start(job)

    def _start(self, job: Job[ResultType]) -> None:
        self._job = job
        self._problem: Failure | AutotuneAmpError | None = None
        self.start_seconds: float | None = None
        try:
            self.start_seconds = self._backend.start(job, self._until, self._cpus)
        except ProcessEndedError as ended:
            self._problem = ended.failure
        except AutotuneAmpError as error:
            self._problem = error

    def result(self) -> ResultType | Failure:
        """Wait for the result, running the follow-up job after a failure."""
        while True:
            problem, so_far = self._problem, None
            if problem is None:
                try:
                    outcome, so_far = self._backend.finish(self._job, self._until)
                    if not isinstance(outcome, Failure):
                        return outcome
                    problem = outcome
                except AutotuneAmpError as error:
                    problem = error
            if isinstance(problem, Failure) and problem.is_loading:
                limit = duration(self._job.loading_seconds or 0.0)
                problem = replace(problem, message=f"the workload takes more than {limit} to load")
            next_result = self._job.after(problem, so_far)
            if not isinstance(next_result, Job):
                return next_result
            self._start(next_result)  # in another process, since memory of a failed allocation must not count


def convert_result(job: Job[ResultType], value: Any) -> ResultType | Failure:
    """Return a job's result or failure converted from plain data, or a failure if that cannot be read."""
    is_failure = isinstance(value, Failure) or (isinstance(value, dict) and value.get("outcome") == "failure")
    try:
        result: ResultType | Failure = msgspec.convert(
            value,
            type=Failure if is_failure else job.answer,
            str_keys=True,  # JSON has no integer keys
        )
    except msgspec.ValidationError as error:  # such as null in the place of a number
        return Failure(kind="crash", message=f"its result cannot be read: {error}")
    return result

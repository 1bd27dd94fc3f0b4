"""Parent side of a trial: start, deadline, kill, classify. No torch here, and no accelerator."""

from __future__ import annotations

import os
import sys
import time
from typing import Any, Literal, TypeAlias

import msgspec

from autotune_amp.core.errors import AutotuneAmpError, BudgetTooSmallError, WorkloadError
from autotune_amp.core.fidelity import MIN_CUT_SAMPLES, Accumulation, Calibration, Fidelity
from autotune_amp.core.outcome import CheckOutcome, Failure, Measurement, Outcome
from autotune_amp.distributed.launcher import is_from_launcher
from autotune_amp.isolation.process import Deadlines, Process, ProcessEndedError, Watcher
from autotune_amp.trial.spec import CheckSpec, TrialSpec, unchecked

Isolation: TypeAlias = Literal["fork", "kept", "fresh"]

# Experiment trackers that can be turned off by a variable: a trial is no run of the user's.
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "SWANLAB_MODE": "disabled",
    "CLEARML_OFFLINE_MODE": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
}


# User code asks torch.cuda.is_available() on import; answered by the CUDA runtime, no forked child could use the card.
_FORK_SAFE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """How a trial process gets the workload: a target to import, or packed bytes; with the caller's import path."""

    target: str | None
    packed: bytes = b""
    path: tuple[str, ...]


def can_fork() -> bool:
    """Whether trials can be forked: on Linux, where fork, pidfd and the parent-death signal are sound."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


class Runner:
    """Runs calls for one workload in processes of their own.

    `isolation`: ``fork`` forks each call from a template that holds the workload; ``kept`` lets one worker answer
    call after call until one fails; ``fresh`` starts a process for each. `environment` is laid over the caller's.
    Use as a context manager: on the way out every process is dead.
    """

    def __init__(
        self, payload: Payload, isolation: Isolation, watcher: Watcher, environment: dict[str, str] | None = None
    ) -> None:
        self._payload = payload
        self._isolation = isolation
        self._watcher = watcher
        self._environment = {
            **{name: value for name, value in os.environ.items() if not is_from_launcher(name)},
            **TRACKERS_OFF,
            **_FORK_SAFE,
            "AUTOTUNE_AMP_TRIAL": "1",
            **(environment or {}),
        }
        self._process: Process | None = None
        self._device = "cpu"
        self._num_threads: int | None = None
        self._share_command: dict[str, Any] | None = None
        self._start_seconds = 0.0

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process."""
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    @property
    def isolation(self) -> Isolation:
        """How calls are run now."""
        return self._isolation

    @property
    def is_build_shared(self) -> bool:
        """Whether the template builds the model once for all calls."""
        return self._share_command is not None

    @property
    def start_seconds(self) -> float | None:
        """What the last call waited for its process to start: 0.0 if one was kept for it, None if it was forked."""
        return None if self._isolation == "fork" else self._start_seconds

    def keep(self) -> None:
        """Go on with one kept worker in place of forks."""
        self.close()
        self._isolation, self._share_command = "kept", None

    def share_build(self, spec: TrialSpec, deadline_seconds: float) -> str | None:
        """Have the template build the model once, as the trial `spec` would, for all calls to come.

        Returns why that cannot be, None where it can; after a reason the process is to be closed, or another kept.
        """
        command = {"cmd": "share", "device": spec.device, "torch_state": spec.torch_state, "seed": spec.seed}
        deadline = time.monotonic() + deadline_seconds
        try:
            self._ready_process(Deadlines(whole=deadline))
            reason: str | None = self._expect(command, b"", deadline)
        except BudgetTooSmallError:
            return f"building it in the process that trials are forked from took more than {deadline_seconds:.0f} s"
        except WorkloadError as error:
            return f"it cannot be built in the process that trials are forked from: {error.message.splitlines()[0]}"
        if reason is None:
            self._share_command = command
        return reason

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Start the process and import or unpack the workload; returns the torch state found after it.

        Raises `WorkloadError` where the workload cannot be loaded, with the user's own traceback.
        """
        state: dict[str, Any] = self._load(time.monotonic() + deadline_seconds)
        return state

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> tuple[dict[str, Any], str | None]:
        """Call the user's function once; `num_threads` None leaves the number to the user's code.

        Returns the torch state found after it, and why trials cannot be forked from that process, None if they can.
        """
        self._device, self._num_threads = device, num_threads
        opened = self._open(time.monotonic() + deadline_seconds)
        return opened["torch_state"], opened["why_not_fork"]

    def ask(self, what: str, args: dict[str, Any], deadline_seconds: float) -> Any:
        """Call ``probe``, ``fingerprint`` or ``describe``; a `Failure` comes back as itself, our errors are raised."""
        return self._call(what, args, Deadlines(whole=time.monotonic() + deadline_seconds))

    def run(self, spec: TrialSpec) -> Outcome:
        """Run one trial; never raises for what the workload does."""
        deadlines = Deadlines(
            whole=None if spec.deadline_seconds is None else time.monotonic() + spec.deadline_seconds,
            first_step_seconds=spec.first_step_deadline_seconds,
            step_seconds=spec.step_deadline_seconds,
        )
        value = self._attempt("trial", spec, deadlines)
        outcome: Outcome = value if isinstance(value, Failure) else msgspec.convert(value, type=Measurement | Failure)
        return outcome

    def check(self, spec: CheckSpec) -> CheckOutcome:
        """Run one check, of half the batch again and again where memory is short; never raises for what the workload
        does. What does not fit at the smallest either is unchecked, an oom `Failure` where fidelity is not asked for.
        """
        seconds = spec.deadline_seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            outcome = self._check(spec, deadline)
            if not (isinstance(outcome, Failure) and outcome.kind == "oom"):
                return outcome
            if spec.batch_size // 2 < (MIN_CUT_SAMPLES if spec.what == "accumulation" else 1):
                return unchecked(spec, outcome) if spec.what == "fidelity" else outcome
            # In another process: what an allocation that failed leaves behind must not count against the next.
            spec = msgspec.structs.replace(spec, batch_size=spec.batch_size // 2)

    def _check(self, spec: CheckSpec, deadline: float | None) -> CheckOutcome:
        value = self._attempt("check", spec, Deadlines(whole=deadline))
        if isinstance(value, Failure):
            return value
        try:
            # JSON has no whole numbers as keys.
            outcome: CheckOutcome = msgspec.convert(
                value, type=Fidelity | Calibration | Accumulation | Failure, str_keys=True
            )
        except msgspec.ValidationError as error:  # a number that is none, where there must be one
            return Failure(kind="crash", message=f"the check gave a result that cannot be read: {error}")
        return outcome

    def _attempt(self, what: str, spec: TrialSpec | CheckSpec, deadlines: Deadlines) -> Any:
        try:
            return self._call(what, msgspec.to_builtins(spec), deadlines)
        except BudgetTooSmallError:  # a fresh process, loading it again
            return Failure(kind="timeout", message="it was still loading the workload when its time was up")
        except AutotuneAmpError as error:
            return Failure(kind="workload_error", message=error.message, details=error.next_step)

    def _call(self, what: str, args: dict[str, Any], deadlines: Deadlines) -> Any:
        self._device = args.get("device", self._device)  # known by its number once it was probed
        try:
            process = self._ready_process(deadlines)
            process.send({"cmd": "call", "what": what, "args": args})
            value = process.wait(deadlines, ends_with_exit=self._isolation == "fork")
        except ProcessEndedError as ended:
            if self._isolation != "fork":  # a template outlives its children; if it has not, the next call sees it
                self.close()
            # A trial whose evaluation was too long was measured; one that died of it did not survive its job.
            is_usable = what == "check" or ended.failure.kind == "timeout"
            return ended.so_far if ended.so_far is not None and is_usable else ended.failure
        except BaseException:
            self.close()
            raise
        if self._isolation == "fresh" or (self._isolation == "kept" and _is_failure(value)):
            self.close()
        return value

    def _ready_process(self, deadlines: Deadlines) -> Process:
        self._start_seconds = 0.0
        if self._process is None or not self._process.is_alive():
            began = time.monotonic()
            self.close()
            self._load(deadlines.whole)
            self._open(deadlines.whole)
            if self._share_command is not None:
                self._expect(self._share_command, b"", deadlines.whole)
            self._start_seconds = time.monotonic() - began
        assert self._process is not None
        return self._process

    def _load(self, deadline: float | None) -> Any:
        mode = "template" if self._isolation == "fork" else self._isolation
        self._process = Process(mode, self._environment, self._watcher)
        command = {
            "cmd": "load",
            "target": self._payload.target,
            "path": self._payload.path,
            "num_packed_bytes": len(self._payload.packed),
        }
        self._expect(None, b"", deadline)  # ready: what is written to one that never reads would block us
        return self._expect(command, self._payload.packed, deadline)

    def _open(self, deadline: float | None) -> Any:
        return self._expect({"cmd": "open", "device": self._device, "num_threads": self._num_threads}, b"", deadline)

    def _expect(self, command: dict[str, Any] | None, data: bytes, deadline: float | None) -> Any:
        assert self._process is not None
        try:
            if command is not None:
                self._process.send(command, data)
            value = self._process.wait(Deadlines(whole=deadline))
        except ProcessEndedError as ended:
            value = ended.failure
        if isinstance(value, Failure):
            self.close()
            if value.kind == "timeout":
                raise BudgetTooSmallError(
                    "The budget ended before the workload was loaded.",
                    "Give a --budget of several times what importing and calling it takes.",
                )
            details = f"\n{value.details.rstrip()}" if value.details else ""
            raise WorkloadError(
                f"{self._payload.target or 'The workload'} cannot be loaded: {value.message}.{details}",
                "Mend it until it can be imported and called on its own.",
            )
        return value


def _is_failure(value: Any) -> bool:
    return isinstance(value, Failure) or (isinstance(value, dict) and value.get("outcome") == "failure")

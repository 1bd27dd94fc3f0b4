"""Source of a workload: live objects of the calling process, or a name that a child process imports."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import DeviceIdentity, Hardware
from autotune_amp.core.outcome import Description, Failure
from autotune_amp.core.recommendation import Fingerprint, NothingWorksError
from autotune_amp.fingerprint import file_digest

if TYPE_CHECKING:
    from autotune_amp.core.command_template import CommandTemplate
    from autotune_amp.core.job import Job, ResultType
    from autotune_amp.processes.local import (  # only where a search begins
        Backend,
        Isolation,
        Payload,
        Slot,
        WorkloadBackend,
    )
    from autotune_amp.processes.process import Watcher
    from autotune_amp.processes.standby import Standby
    from autotune_amp.search.run import ProgressWatcher
    from autotune_amp.search.space import Space

_FINGERPRINT_SECONDS = 60.0


class Source:
    """Workload that has not been loaded yet, by its target: "path/file.py:function" or "package.module:function".

    The child process imports it, never this process: user code may crash on import. `name` is the default name of its
    study.
    """

    is_elsewhere = False  # whether its jobs run on other hosts (--ray)

    def __init__(self, target: str) -> None:
        self.name = "embedded" if target.startswith("autotune_amp.workloads:") else study_name(target)
        self.target: str | None = target  # None if the command line has no name for it

    @cached_property
    def payload(self) -> Payload:
        """Return the data that a trial process needs to load the workload."""
        from autotune_amp.processes.local import Payload

        # Modules are found from the working directory too, as with `python -m`.
        return Payload(target=self.target, path=tuple(dict.fromkeys((str(Path.cwd()), *_import_path()))))

    def backend(
        self,
        watcher: Watcher,
        isolation: Isolation | None = None,
        environment: dict[str, str] | None = None,
        slot: Slot | None = None,
        standby: Standby | None = None,
    ) -> WorkloadBackend:
        """Return a backend for the workload's jobs, with `environment` added to the caller's variables.

        The other arguments are those of `LocalBackend`.
        """
        from autotune_amp.processes.local import LocalBackend

        return LocalBackend(self.payload, isolation, watcher, environment, slot, standby)

    def payload_for_nodes(self) -> Payload:
        """Return the payload for other hosts, with a path relative to the working directory, which is sent to them.

        Raises `InvalidRequestError` for a command and for a file outside the working directory.
        """
        if self.command_template is not None:
            raise InvalidRequestError(
                "--ray runs the trials of a Workload; those of a command run one after the other on this host.",
                "Leave --ray out, or give a function that returns a Workload.",
            )
        path, colon, function = (self.payload.target or "").rpartition(":")
        if path.endswith(".py"):
            path = os.path.relpath(path)
            if path.startswith(os.pardir):
                raise InvalidRequestError(
                    f"--ray sends the working directory to the nodes, and {path} lies outside of it.",
                    "Run the command in the folder that holds your code.",
                )
        return replace(self.payload, target=f"{path}{colon}{function}" or None)

    def plan_lines(self, space: Space, description: Description) -> list[str]:  # noqa: ARG002 - of a command
        """Return lines for the user on what the search tries; only a command's placeholders need any."""
        return []

    @property
    def command_template(self) -> CommandTemplate | None:
        """Return the template of the command if the source is one, else None."""
        return None

    def keep_in(self, folder: Path) -> None:
        """Set the existing folder for files that trials write."""

    def with_opened(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the fingerprint extended by the files that trials read; unchanged unless the source is a command."""
        return fingerprint

    def edited_files(self, fingerprint: Fingerprint) -> list[str]:
        """Return the paths of the files of code and settings that were edited since."""
        edited = []
        for path, digest in () if self.is_elsewhere else fingerprint.files.items():
            with suppress(OSError):  # it was removed, or is being replaced
                edited += [relative_path(path)] if file_digest(path) != digest else []
        return edited

    def notes(self) -> tuple[str, ...]:
        """Return sentences on how the trials ran, for the recommendation; none for a workload."""
        return ()

    def leftovers(self) -> tuple[str, ...]:
        """Return sentences about files that trials wrote, and where they were moved."""
        return ()

    @contextmanager
    def keeping_leftovers(self) -> Iterator[None]:
        """Move the files that trials write in this context to a folder, if the source is a command."""
        yield

    def num_threads(self) -> int | None:
        """Return the number of CPU threads for trials; None leaves it to the workload's code."""
        return None

    def torch_state(self, found_by_child: dict[str, Any]) -> dict[str, Any]:
        """Return the torch state (threads, flags) that trials start with, given that of a child after loading."""
        return found_by_child

    def fingerprint(self, options: dict[str, Any], identity: DeviceIdentity) -> Fingerprint | None:  # noqa: ARG002
        """Return the fingerprint of the workload, options and device; None if only a child process can compute it."""
        return None

    def fingerprint_by_child(
        self, options: dict[str, Any], identity: DeviceIdentity, backend: Backend, state: dict[str, Any]
    ) -> Fingerprint:
        """Return the fingerprint computed by the child process that imported the workload, without calling it."""
        from autotune_amp.trial.jobs import FingerprintJob

        job = FingerprintJob(
            device=identity.type,
            options=options,
            identity=identity,
            torch_state=state,
            deadline_seconds=_FINGERPRINT_SECONDS,
        )
        result = backend.submit(job).result()
        if isinstance(result, Failure):
            unknown = f"the workload cannot be fingerprinted: {result.message}"
            return Fingerprint(digest="", parts={}, unknown=(unknown,))
        return result


class _Live(Source):
    """Workload of live objects, pickled for the child process. Its fingerprint is computed in this process."""

    def __init__(self, workload: Any) -> None:
        self.name = folder_name(str(getattr(workload, "name", None) or getattr(workload, "__name__", "workload")))
        self.target = None
        self._workload = workload

    @cached_property
    def payload(self) -> Payload:
        from autotune_amp.processes.local import Payload
        from autotune_amp.processes.packing import pack

        return Payload(target=None, packed=pack(self._workload), path=_import_path())

    def num_threads(self) -> int | None:
        threads: int = self.torch_state({})["num_threads"]
        return None if self.is_elsewhere else threads

    def torch_state(self, found_by_child: dict[str, Any]) -> dict[str, Any]:
        """Return the torch state of the child, which has the caller's flags unless a function has set others.

        Autocast and the numbers of threads are the caller's; on another host the number of threads is the child's.
        """
        from autotune_amp.precision import torch_state

        caller = torch_state.capture()
        names = {"num_interop_threads"} | (set() if self.is_elsewhere else {"num_threads"})
        kept = {name: caller[name] for name in names} | torch_state.autocast_of(caller)
        return {**(found_by_child or caller), **kept}

    def fingerprint(self, options: dict[str, Any], identity: DeviceIdentity) -> Fingerprint | None:
        from autotune_amp.fingerprint import compute_fingerprint

        return compute_fingerprint(self._workload, options, identity, self.torch_state({}))


def target(name: str) -> Source:
    """Return the source for a target "path/file.py:function" or "package.module:function". Raises `WorkloadError`."""
    if ":" not in name:
        raise WorkloadError(f"{name!r} names no workload.", "Give path/file.py:function or package.module:function.")
    return Source(name)


def live_source(workload: Any) -> Source:
    """Return the source for a Workload of the calling process, or for a function that returns one."""
    from autotune_amp.core.workload import check_source

    check_source(workload, "workload")
    return _Live(workload)


def relative_path(path: str) -> str:
    """Return the path as seen from the working directory if it is inside, else `path` itself."""
    inside = os.path.relpath(path)
    return path if inside.startswith(os.pardir) else inside


def _import_path() -> tuple[str, ...]:
    return tuple(str(Path(entry).absolute()) for entry in sys.path)


def study_name(target: str) -> str:
    """Return a folder name for a target: ``train`` for "path/train.py:workload", ``train-tiny`` for "train.py:tiny"."""
    place, _, function = target.rpartition(":")
    stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
    return folder_name(stem if function == "workload" else f"{stem}-{function}")


def folder_name(name: str) -> str:
    """Return `name` with each character other than letters, digits, "_", "." and "-" replaced by "_"."""
    return re.sub(r"[^\w.-]", "_", name).strip(".") or "workload"


def held_bytes(device: str) -> int:
    """Return the bytes of memory that this process uses on the device."""
    torch = sys.modules.get("torch")
    if device == "cpu":
        import psutil

        return int(psutil.Process().memory_info().rss)
    if device.startswith("cuda") and torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.memory_reserved(device))
    return 0


class OpenedWorkload(NamedTuple):
    """Description of the loaded workload and its device, and the torch state that its jobs start with.

    `ready_seconds` is the time until the workload was loaded and called. `why_not_forked` is the reason that trials
    share one process instead of being forked, or None.
    """

    hardware: Hardware
    description: Description
    torch_state: dict[str, Any]
    ready_seconds: float
    why_not_forked: str | None


@contextmanager
def loaded_backend(source: Source, watcher: ProgressWatcher, seconds: float) -> Iterator[WorkloadBackend]:
    """Load the workload within `seconds` and yield its backend, for a diagnosis without a search."""
    with source.keeping_leftovers(), source.backend(watcher) as backend:
        watcher.phase("loading the workload")
        backend.load(seconds)
        yield backend


def open_workload(
    backend: WorkloadBackend,
    source: Source,
    device: str,
    watcher: ProgressWatcher,
    *,
    baseline_batch_size: int | None = None,
    is_batch_free: bool = True,
    cannot_be_built: Callable[[Failure], AutotuneAmpError] = lambda failure: WorkloadError(*failure_message(failure)),
) -> OpenedWorkload:
    """Call the loaded workload, probe the device and build the workload once.

    Raises `WorkloadError` if it cannot be called, `NothingWorksError` if the probe failed, the error returned by
    `cannot_be_built` if it cannot be built, and `BudgetTooSmallError` if time runs out.
    """
    from autotune_amp.trial.jobs import Describe, ProbeJob

    budget = watcher.budget

    def run_job(job: Job[ResultType]) -> ResultType | Failure:
        result = backend.submit(job).result()
        if isinstance(result, Failure) and result.kind == "timeout":
            raise budget.too_small_error(watcher.last_step_seconds, result)
        return result

    opened = backend.open(device, source.num_threads(), budget.left())
    ready_seconds = budget.elapsed() if opened.ready_seconds is None else opened.ready_seconds
    state = source.torch_state(opened.torch_state)
    watcher.phase("probing the device")
    left_seconds = max(0.0, budget.left())
    hardware = run_job(
        ProbeJob(device=device, torch_state=state, deadline_seconds=left_seconds, loading_seconds=left_seconds)
    )
    if isinstance(hardware, Failure):
        raise NothingWorksError(
            f"The probe failed: {hardware.message.rstrip('.')}.",
            "Try --device cpu."
            if device != "cpu"
            else "Run `autotune-amp probe --device cpu`, which shows the whole error.",
            (),
        )
    watcher.phase("building the workload once")
    description = run_job(
        Describe(
            device=hardware.device,
            torch_state=state,
            has_tf32=hardware.has_tf32,
            baseline_batch_size=baseline_batch_size,
            is_batch_free=is_batch_free,
            deadline_seconds=max(0.0, budget.left()),
            loading_seconds=max(0.0, budget.left()),
        )
    )
    if isinstance(description, Failure):
        raise cannot_be_built(description)
    description = replace(description, checks=tuple(kind for kind in description.checks if kind in backend.abilities))
    return OpenedWorkload(hardware, description, state, ready_seconds, opened.why_not_forked)


def failure_message(failure: Failure) -> tuple[str, str]:
    """Return the message and next step of a failure.

    A single line of `details` is the next step of an error of this package; several lines are a traceback.
    """
    details = (failure.details or "").rstrip()
    if details and "\n" not in details:
        return failure.message, details
    return (
        f"{failure.message}\n{details}".rstrip(),
        "Run one training step in fp32 by itself, in a script of your own, and fix what it raises.",
    )

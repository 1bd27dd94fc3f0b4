"""Process that runs trials or forks them. Started by process.py; messages are lines of JSON.

As a *template* (Linux) it loads the workload once with one thread and forks a child for each job; as a *worker* it runs
jobs itself, one after the other. A worker may stand by first: it loads and builds with one thread, at low priority,
without the accelerator, and waits to take over from another one. The parent writes to its standard input and reads its
original standard output; printed output of the user's code goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import queue
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch._dynamo  # optimizers import it, which takes a second that no trial should spend again

from autotune_amp.core import workload
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import ChildExit, JobEvent, Ready, RequestError, RequestFailure, Result, find_job
from autotune_amp.core.outcome import Failure
from autotune_amp.hardware import identify
from autotune_amp.hardware.device import parse_device_name
from autotune_amp.hardware.measuring import make_current
from autotune_amp.precision import torch_state
from autotune_amp.processes import packing
from autotune_amp.processes.process_tree import terminate_programs
from autotune_amp.trial import failures
from autotune_amp.trial.context import Context
from autotune_amp.trial.worker import raise_oom_score

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_set_num_threads = torch.set_num_threads
_CANARY_SECONDS, _ACCELERATOR_CANARY_SECONDS = 10.0, 60.0  # the latter includes starting the driver


class ParentChannel:
    """Channel of JSON lines to the parent.

    Each line is written at once with a newline before and after it, so that an incomplete line of a killed process
    cannot damage the next.
    """

    def __init__(self) -> None:
        self.input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        with Path(os.devnull).open("rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(2, 1)

    def send(self, event: JobEvent) -> None:
        """Write one event."""
        data = b"\n" + msgspec.json.encode(event) + b"\n"
        while data:
            data = data[os.write(self._output, data) :]

    def read(self) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the input."""
        line = self.input.readline()
        return json.loads(line) if line else None


class Server:
    """Command handler that loads the workload and runs jobs."""

    def __init__(self, channel: ParentChannel, *, is_template: bool) -> None:
        self._channel = channel
        self._is_template = is_template
        self._origin = ""
        self._context: Any = None
        self._num_threads: int | None = None  # requested by the user's code, while only one is used

    def handle(self, command: dict[str, Any]) -> None:
        """Run one command in this process and send its result or error. The user's code may raise anything."""
        action = getattr(self, command.pop("cmd"))
        try:
            answer: JobEvent = Result(action(**command))
        except AutotuneAmpError as error:
            answer = RequestError(type(error).__name__, error.message, error.next_step)
        except SystemExit as error:
            message = f"the workload ended its process: sys.exit({error.code})"
            answer = RequestFailure(Failure(kind="workload_error", message=message))
        except Exception as error:
            answer = RequestFailure(failures.failure_from_exception(error))
        self._channel.send(answer)

    def load(self, target: str | None, path: list[str], num_packed_bytes: int) -> dict[str, Any]:
        """Import or unpack the workload, and return the torch state then. A function is only called by `open`."""
        sys.path[:] = path
        self._origin = target or "workload"
        packed = self._channel.input.read(num_packed_bytes)
        if self._is_template:
            self._hold_threads()
            _note_starts()
        source = workload.import_target(target) if target else packing.unpack(packed)
        self._context = Context(source, is_template=self._is_template)
        return self._torch_state()

    def open(self, device: str, num_threads: int | None) -> dict[str, Any]:
        """Call the user's function once. Return the torch state afterwards, and why forked children could not work, or
        None.

        `num_threads` is the number for trials; None is the one set by the user's code.
        """
        if not self._is_template:  # a template must not use an accelerator
            make_current(device)
        self._context.open(self._origin)
        state = self._torch_state()
        reason = None
        if self._is_template:
            reason = self._why_not_fork(device, num_threads or state["num_threads"], "loading")
        return {"torch_state": state, "why_not_forked": reason}

    def stand_by(self, device: str, state: dict[str, Any], seed: int, **load: Any) -> None:
        """Do everything before a job that does not need the device."""
        _lower_priority()
        self._hold_threads()
        self.load(**load)
        if not _needs_choosing(device):
            self._context.open(self._origin)
            torch_state.apply(state)
            torch_state.seed(seed)
            self._context.build_before(device, self._torch_state)

    def take_over(self, device: str) -> None:
        """Run jobs in this process from now on: it stood by, or is a template that cannot be forked."""
        _put_priority_back()
        torch.set_num_threads = _set_num_threads
        if self._num_threads is not None:
            _set_num_threads(self._num_threads)
        gc.unfreeze()
        self._is_template, self._num_threads = False, None
        self._context.become_worker()
        if _needs_choosing(device):
            make_current(device)
            self._context.open(self._origin)

    def share(self, device: str, state: dict[str, Any], seed: int) -> str | None:
        """Build the model once, as a trial would, for all children. Return why they could not work then, or None."""
        self._hold_threads()
        torch_state.apply(state)
        torch_state.seed(seed)
        self._context.share(self._torch_state)
        return self._why_not_fork(device, self._num_threads or 1, "building")

    def run(self, kind: str, job: dict[str, Any], cpus: Sequence[int]) -> Any:
        """Run a job in this process, limited to these CPUs and that many threads if given."""
        if cpus:
            state = job["torch_state"]
            if "num_threads" in state:
                state["num_threads"] = min(state["num_threads"], len(cpus))
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)
        found = find_job(kind, job)
        self._context.is_kept = not (self._is_template or found.is_alone)
        if not found.builds_first:
            self._channel.send(Ready())
        return found.run(self._context, self._channel.send)

    def _torch_state(self) -> dict[str, Any]:
        state = torch_state.capture()
        return state if self._num_threads is None else {**state, "num_threads": self._num_threads}

    def _hold_threads(self) -> None:
        """Use a single thread while the user's code runs here, and record the number that it sets for the trials.

        A thread pool does not survive a fork, so that children would hang on it, and a standby process leaves the other
        cores to the measurement.
        """

        def note(num_threads: int) -> None:
            self._num_threads = num_threads

        self._num_threads = torch.get_num_threads()
        _set_num_threads(1)
        torch.set_num_threads = note  # type: ignore[assignment]  # the same but for a name

    def _why_not_fork(self, device: str, num_threads: int, done: str) -> str | None:
        torch.set_num_threads = _set_num_threads
        reason = why_not_fork(device, num_threads, done)
        gc.freeze()  # a collection in a child would copy every page that holds an object
        return reason


def _needs_choosing(device: str) -> bool:
    """Return whether "cuda" means this device only after making it current, which starts its driver."""
    return bool(parse_device_name(device)[1])


# -- a process that stands by ------------------------------------------------------------------------------------------

_LOWEST_PRIORITY = 19
_priority_before: list[int] = []  # while the priority is lowered


def _lower_priority() -> None:
    """Lower this process's priority, if the system allows to undo it: Linux does not without CAP_SYS_NICE.

    This is tried out on a thread, which has a priority of its own.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0) if sys.platform == "linux" else _LOWEST_PRIORITY
    can_undo: list[bool] = []

    def attempt() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)
            os.setpriority(os.PRIO_PROCESS, 0, own)
            can_undo.append(True)

    if own < _LOWEST_PRIORITY:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    if can_undo:
        _priority_before.append(own)
        os.setpriority(os.PRIO_PROCESS, 0, _LOWEST_PRIORITY)


def _put_priority_back() -> None:
    """Restore the priority of every thread, including those started meanwhile, which inherited the lower one."""
    while _priority_before:
        own = _priority_before.pop()
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread.name), own)


# -- a process that others are forked from -----------------------------------------------------------------------------


_started_at: dict[str, str] = {}


def _note_starts() -> None:
    """Record the line of code that starts an accelerator, mostly in a package that looks at the GPU on import."""

    def note(device_type: str) -> None:
        ours = f"{Path(torch.__file__).parent}{os.sep}", "<frozen"
        frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(ours)]
        _started_at[device_type] = f", by {frames[-1].filename}:{frames[-1].lineno}" if frames else ""

    for device_type in ("cuda", "xpu"):
        getattr(torch, device_type)._lazy_call(partial(note, device_type))


def why_not_fork(device: str, num_threads: int, done: str) -> str | None:
    """Return why a child of this process could not use the accelerator and all threads, or None, by trying it.

    `done` names the last action with the workload, for the message.
    """
    for device_type in ("cuda", "xpu"):
        if getattr(torch, device_type).is_initialized():
            return f"{done} the workload started {device_type} in its process{_started_at.get(device_type, '')}"
    is_cpu = identify(device).type == "cpu"
    pid = os.fork()
    if pid == 0:
        os._exit(_try_everything(device, num_threads))
    deadline = time.monotonic() + (_CANARY_SECONDS if is_cpu else _ACCELERATOR_CANARY_SECONDS)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return None if status == 0 else "a forked child could not use the accelerator or all threads"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"{done} the workload started threads in its process, and a forked child hung on them"


def _try_everything(device: str, num_threads: int) -> int:
    """Return 0, in a forked child, if the thread pool and the accelerator (if any) can be used, else 1."""
    try:
        torch.set_num_threads(num_threads)
        torch.ones(1 << 20).add_(1).sum()
        if device != "cpu" and torch.accelerator.is_available():
            # Other GPUs than the requested one may be full.
            wanted = torch.accelerator.current_accelerator() if device == "auto" else torch.device(device)
            torch.ones(1, device=wanted).add_(1).cpu()
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def run_template(channel: ParentChannel, server: Server) -> bool:
    """Fork and watch a child for each job. Return whether this process has to run jobs itself from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to end a trial's orphans
    while (command := channel.read()) is not None:
        if command["cmd"] == "run":
            own = {process.pid for process in psutil.Process().children(recursive=True)}
            folder = tempfile.mkdtemp(prefix="")  # a socket's path allows no long names
            status = _watch(channel, _fork(server, command, folder), own)
            shutil.rmtree(folder, ignore_errors=True)
            if status is None:
                return False
            channel.send(ChildExit(status))
        elif command["cmd"] == "take_over":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            server.handle(command)
            return True
        elif command["cmd"] != "kill":  # else for a child that has just ended
            server.handle(command)
    return False


def _fork(server: Server, command: dict[str, Any], folder: str) -> int:
    """Run the command in a child, with its temporary files in `folder`; returns the child's number."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _die_with(parent)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        _enter_trial()
        server.handle(command)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _watch(channel: ParentChannel, pid: int, own: set[int]) -> int | None:
    """Wait for the child's end, killing it on request; return its exit status, None if the parent is gone.

    `own` are processes that the user's code started while it was loaded; every trial uses them.
    """

    def of_the_trial() -> list[psutil.Process]:
        # Including orphans of the child, which we inherit as the subreaper.
        return [process for process in psutil.Process().children(recursive=True) if process.pid not in own]

    pidfd = os.pidfd_open(pid)
    is_parent_there = True
    ready, _, _ = select.select([pidfd, channel.input.fileno()], [], [])
    if pidfd not in ready:  # the only command now is to kill it
        is_parent_there = channel.read() is not None
        terminate_programs(of_the_trial)
        _kill_group(pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    os.close(pidfd)
    _kill_group(pid)  # its loader workers; before it is reaped, while its process ID is still its own
    _, status = os.waitpid(pid, 0)
    left = of_the_trial()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return os.waitstatus_to_exitcode(status) if is_parent_there else None


# -- a process that runs jobs itself -----------------------------------------------------------------------------------


def run_worker(channel: ParentChannel, server: Server, *, is_loaded: bool) -> None:
    """Load, or stand by, then run jobs in this process while a thread watches for the parent's end."""
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        while (command := channel.read()) is not None:
            commands.put(command)
        _kill_group(os.getpid())
        os._exit(1)

    _enter_trial()
    if not is_loaded and (load := channel.read()) is not None:  # packed bytes follow it, before any other command
        server.handle(load)
    threading.Thread(target=listen, daemon=True).start()
    while True:
        server.handle(commands.get())


def _enter_trial() -> None:
    raise_oom_score()
    if sys.platform == "linux":
        # A loader's workers cannot pickle classes of the user's __main__, which exists only as our copy.
        multiprocessing.set_start_method("fork", force=True)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent is gone, whatever it is doing then (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # gone before the call
            os._exit(1)


def main(mode: str) -> None:
    """Serve until our input is closed, as template of ``forked`` children or as ``kept`` worker. If the parent is gone,
    the keeper of this process ends it."""
    channel = ParentChannel()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text stream: nobody replaced it yet
    is_template = mode == "forked"
    server = Server(channel, is_template=is_template)
    channel.send(Result("ready"))
    if not is_template or run_template(channel, server):
        run_worker(channel, server, is_loaded=is_template)

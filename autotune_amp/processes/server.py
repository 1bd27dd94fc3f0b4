"""Server process that runs jobs or forks a child for each. Started by process.py; messages are lines of JSON.

As a *template* (Linux) it loads the workload once with one thread and forks a child for each job; as a *worker* it runs
jobs itself, one after the other. A worker may stand by first: it loads the workload with one thread, at low priority
and in little of the accelerator's memory, and waits for `take_over`. The parent writes to its standard input and reads
its original standard output; printed output of the user's code goes to standard error.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch._dynamo  # optimizers import it: one second, spent once here instead of in each forked trial

from autotune_amp.core import workload
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import ChildExit, JobEvent, Ready, RequestError, RequestFailure, Result, find_job
from autotune_amp.core.outcome import Failure
from autotune_amp.hardware import identify
from autotune_amp.hardware.device import parse_device_name
from autotune_amp.hardware.measuring import make_current
from autotune_amp.precision import torch_state
from autotune_amp.processes import packing
from autotune_amp.processes.process_tree import build_locks_of, terminate_programs
from autotune_amp.trial import failures
from autotune_amp.trial.context import Context
from autotune_amp.trial.memory import set_memory_share
from autotune_amp.trial.worker import raise_oom_score

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_set_num_threads = torch.set_num_threads
_STANDBY_MEMORY_SHARE = 0.02  # of an accelerator, whose memory a process that stands by leaves to the running trial
# Time limits of a forked child that tests what works; on an accelerator it starts the driver.
_FORK_TEST_SECONDS, _ACCELERATOR_FORK_TEST_SECONDS = 10.0, 60.0


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
    """Handler of the parent's commands: each public method but `handle` is one."""

    def __init__(self, channel: ParentChannel, *, is_template: bool) -> None:
        self._channel = channel
        self._is_template = is_template
        self._origin = ""
        self._context: Any = None
        self._num_threads: int | None = None  # number set by the user's code, while this process is held at one
        self._is_standing_by = False
        self._start_method: str | None = None  # of multiprocessing, as importing the workload left it

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
        """Import or unpack the workload, and return the torch state afterwards. Only `open` calls a function."""
        sys.path[:] = path
        self._origin = target or "workload"
        packed = self._channel.input.read(num_packed_bytes)
        if self._is_template:
            self._limit_to_one_thread()
            _record_accelerator_starts()
        if target:
            source = workload.import_target(target)
        else:
            source = packing.unpack(packed)
            packing.send_definitions_to_workers()
        self._context = Context(source, is_template=self._is_template)
        self._start_method = multiprocessing.get_start_method(allow_none=True)
        return self._torch_state()

    def open(self, device: str, num_threads: int | None) -> dict[str, Any]:
        """Call the user's function once. Return the torch state afterwards, and why jobs cannot be forked, or None.

        `num_threads` is the number for trials; with None it is the number set by the user's code.
        """
        if not self._is_template:  # a template must not use an accelerator
            make_current(device)
        self._open_workload()
        state = self._torch_state()
        reason = None
        if self._is_template:
            reason = self._why_not_fork(device, num_threads or state["num_threads"], "loading")
        return {"torch_state": state, "why_not_forked": reason}

    def stand_by(self, device: str, state: dict[str, Any], seed: int, **load: Any) -> None:
        """Load the workload and build the model, as far as that takes little of the device's memory."""
        _lower_priority()
        self._is_standing_by = True
        _call_at_accelerator_starts(self._leave_memory)
        self._limit_to_one_thread()
        self.load(**load)
        if not _has_index(device):
            self._open_workload()
            torch_state.apply(state)
            torch_state.seed(seed)
            self._context.build_before(device, self._torch_state)

    def take_over(self, device: str) -> None:
        """Run jobs in this process from now on. It has stood by, or is a template from which jobs cannot be forked."""
        _restore_priority()
        self._is_standing_by = False
        if (accelerator := torch_state.started_accelerator()) is not None:
            set_memory_share(accelerator, 1.0)
        torch.set_num_threads = _set_num_threads
        if self._num_threads is not None:
            _set_num_threads(self._num_threads)
        gc.unfreeze()
        self._is_template, self._num_threads = False, None
        self._context.become_worker()
        if _has_index(device):
            make_current(device)
            self._open_workload()

    def share(self, device: str, state: dict[str, Any], seed: int) -> str | None:
        """Build the model once, as a trial would, for all children. Return why jobs cannot be forked then, or None."""
        self._limit_to_one_thread()
        torch_state.apply(state)
        torch_state.seed(seed)
        self._context.share(self._torch_state)
        return self._why_not_fork(device, self._num_threads or 1, "building")

    def run(self, kind: str, job: dict[str, Any], cpus: Sequence[int]) -> Any:
        """Run a job in this process. With `cpus`, limit it to these CPUs and as many threads."""
        if cpus:
            state = job["torch_state"]
            if "num_threads" in state:
                state["num_threads"] = min(state["num_threads"], len(cpus))
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, cpus)
        if sys.platform == "linux":
            # Spawned loader workers could not unpickle classes of the user's __main__, which is only a copy here.
            multiprocessing.set_start_method("fork", force=True)
        packing.definition_of.cache_clear()  # global variables that it holds may have changed since the last job
        typed_job = find_job(kind, job)
        self._context.is_kept = not (self._is_template or typed_job.is_alone)
        if not typed_job.builds_first:
            self._channel.send(Ready())
        return typed_job.run(self._context, self._channel.send)

    def _leave_memory(self, device_type: str) -> None:
        """Leave the accelerator's memory to the running trial, while this process stands by."""
        if self._is_standing_by:
            set_memory_share(torch.device(device_type), _STANDBY_MEMORY_SHARE)

    def _open_workload(self) -> None:
        """Call the user's function, which may set the start method of processes once, as in a new Python process."""
        multiprocessing.set_start_method(self._start_method, force=True)
        self._context.open(self._origin)

    def _torch_state(self) -> dict[str, Any]:
        state = torch_state.capture()
        return state if self._num_threads is None else {**state, "num_threads": self._num_threads}

    def _limit_to_one_thread(self) -> None:
        """Use a single thread while the user's code runs here, and record the number of threads that it sets.

        Forked children would hang on a thread pool, and a standby process must leave the other cores to measurements.
        """

        def record_num_threads(num_threads: int) -> None:
            self._num_threads = num_threads

        self._num_threads = torch.get_num_threads()
        _set_num_threads(1)
        torch.set_num_threads = record_num_threads  # type: ignore[assignment]  # its argument has another name

    def _why_not_fork(self, device: str, num_threads: int, done: str) -> str | None:
        torch.set_num_threads = _set_num_threads
        reason = reason_not_to_fork(device, num_threads, done)
        gc.freeze()  # a collection in a child would copy every page that holds an object
        return reason


def _has_index(device: str) -> bool:
    """Whether the device has an index: "cuda" means it only after making it current, which starts its driver."""
    return bool(parse_device_name(device)[1])


# -- priority of a standby process -------------------------------------------------------------------------------------

_LOWEST_PRIORITY = 19
_priority_before: list[int] = []  # while the priority is lowered


def _lower_priority() -> None:
    """Lower this process's priority, if that can be undone: on Linux only with CAP_SYS_NICE.

    A thread, which has its own priority, tries it first.
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


def _restore_priority() -> None:
    """Restore the priority of every thread. Threads started meanwhile have inherited the lower one."""
    while _priority_before:
        own = _priority_before.pop()
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread.name), own)


# -- a process that others are forked from -----------------------------------------------------------------------------


_started_at: dict[str, str] = {}


def _record_accelerator_starts() -> None:
    """Record the line of code that starts an accelerator, as some packages do on import."""

    def record_caller(device_type: str) -> None:
        torch_files = f"{Path(torch.__file__).parent}{os.sep}", "<frozen"
        frames = [frame for frame in traceback.extract_stack()[:-1] if not frame.filename.startswith(torch_files)]
        _started_at[device_type] = f", by {frames[-1].filename}:{frames[-1].lineno}" if frames else ""

    _call_at_accelerator_starts(record_caller)


def _call_at_accelerator_starts(function: Callable[[str], None]) -> None:
    """Call `function` with the type of an accelerator when it starts."""
    for device_type in ("cuda", "xpu"):
        getattr(torch, device_type)._lazy_call(partial(function, device_type))


def reason_not_to_fork(device: str, num_threads: int, done: str) -> str | None:
    """Return why a forked child of this process cannot use the accelerator and all threads; None if one succeeds in it.

    `done` names the last action with the workload in the message: "loading" or "building".
    """
    for device_type in ("cuda", "xpu"):
        if getattr(torch, device_type).is_initialized():
            return f"{done} the workload started {device_type} in its process{_started_at.get(device_type, '')}"
    is_cpu = identify(device).type == "cpu"
    pid = os.fork()
    if pid == 0:
        os._exit(_fork_test_status(device, num_threads))
    deadline = time.monotonic() + (_FORK_TEST_SECONDS if is_cpu else _ACCELERATOR_FORK_TEST_SECONDS)
    while time.monotonic() < deadline:
        ended_pid, status = os.waitpid(pid, os.WNOHANG)
        if ended_pid:
            return None if status == 0 else "a forked child could not use the accelerator or all threads"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"{done} the workload started threads in its process, and a forked child hung on them"


def _fork_test_status(device: str, num_threads: int) -> int:
    """Use the thread pool and the accelerator, if any. Return 0, or 1 after an error: a forked child's exit status."""
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
    """Fork a child for each job and wait for it. Return whether this process has to run jobs itself from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # to end a trial's orphans
    while (command := channel.read()) is not None:
        if command["cmd"] == "run":
            user_pids = {process.pid for process in psutil.Process().children(recursive=True)}
            folder = tempfile.mkdtemp(prefix="")  # a socket's path allows no long names
            status = _wait_for_child(channel, _fork(server, command, folder), user_pids)
            shutil.rmtree(folder, ignore_errors=True)
            if status is None:
                return False
            channel.send(ChildExit(status))
        elif command["cmd"] == "take_over":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            server.handle(command)
            return True
        elif command["cmd"] != "kill":  # a "kill" that comes now was meant for a child that has just ended
            server.handle(command)
    return False


def _fork(server: Server, command: dict[str, Any], folder: str) -> int:
    """Run the command in a child, with its temporary files in `folder`. Return the child's process id."""
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
        raise_oom_score()
        server.handle(command)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _wait_for_child(channel: ParentChannel, pid: int, user_pids: set[int]) -> int | None:
    """Wait for the child's end, killing it on request; return its exit status, None if the parent has ended.

    `user_pids` are the ids of processes that the user's code started while it was loaded; every trial uses them.
    """

    def of_the_trial() -> list[psutil.Process]:
        # Including orphans of the child, which become children of this subreaper.
        return [process for process in psutil.Process().children(recursive=True) if process.pid not in user_pids]

    pidfd = os.pidfd_open(pid)
    is_parent_there = True
    poller = select.poll()  # `select.select` refuses descriptors from 1024 on
    for descriptor in (pidfd, channel.input.fileno()):
        poller.register(descriptor, select.POLLIN)
    if pidfd not in dict(poller.poll()):  # the only command now is to kill it
        is_parent_there = channel.read() is not None
        terminate_programs(of_the_trial)
        locks = build_locks_of(of_the_trial())
        _kill_group(pid)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        for path in locks:
            path.unlink(missing_ok=True)
    os.close(pidfd)
    _kill_group(pid)  # its loader workers; before it is reaped, while its process ID is still its own
    _, status = os.waitpid(pid, 0)
    remaining = of_the_trial()
    for process in remaining:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(remaining, timeout=5)
    return os.waitstatus_to_exitcode(status) if is_parent_there else None


# -- a process that runs jobs itself -----------------------------------------------------------------------------------


def run_worker(channel: ParentChannel, server: Server, *, is_loaded: bool) -> None:
    """Load the workload or stand by, then run jobs in this process. A thread ends the process when the parent ends."""
    commands: queue.Queue[dict[str, Any]] = queue.Queue()

    def listen() -> None:
        while (command := channel.read()) is not None:
            commands.put(command)
        _kill_group(os.getpid())
        os._exit(1)

    raise_oom_score()
    if not is_loaded and (load := channel.read()) is not None:  # packed bytes follow it, before any other command
        server.handle(load)
    threading.Thread(target=listen, daemon=True).start()
    while True:
        server.handle(commands.get())


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def main(mode: str) -> None:
    """Serve the parent until it closes the input, as a template (``forked``) or as a worker (``kept``).

    When the parent ends, the keeper of this process ends it.
    """
    channel = ParentChannel()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr] # a text stream, as Python starts with
    is_template = mode == "forked"
    server = Server(channel, is_template=is_template)
    channel.send(Result("ready"))
    if not is_template or run_template(channel, server):
        run_worker(channel, server, is_loaded=is_template)

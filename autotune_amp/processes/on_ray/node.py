"""Ray actor on a node: it has a backend of the workload and runs its jobs, one at a time, in processes of the node."""

from __future__ import annotations

import os
import platform
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp import __version__
from autotune_amp.core.job import find_job
from autotune_amp.hardware import identify
from autotune_amp.processes.devices import rank_slots
from autotune_amp.processes.local import Isolation, LocalBackend, Payload, Slot, WorkloadBackend
from autotune_amp.processes.on_ray.messages import CallProgress, NodeSetup, ProcessDescription, pack, request_error
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import import_path
from autotune_amp.processes.ranks import RankedBackend

PROGRESS_SECONDS = 0.5  # longest wait of a call for progress; one call for each step would slow the job down


class _StoppedError(Exception):
    """Raised to end the backend's waiting for a job."""


class _ProgressRecorder(Watcher):
    """Watcher that collects progress until it is fetched."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.printed: list[str] = []
        self.is_stopped = threading.Event()

    def tick(self) -> None:
        if self.is_stopped.is_set():
            raise _StoppedError

    def step(self, num_steps: int, step_seconds: float) -> None:
        self.steps.append((num_steps, step_seconds))

    def output(self, text: str) -> None:
        self.printed.append(text)


class NodeActor:
    """Ray actor on a node. Public methods take and return msgpack bytes, and do not wait for the end of a job."""

    def __init__(self, setup: bytes) -> None:
        self._setup = msgspec.msgpack.decode(setup, type=NodeSetup)
        for name, value in self._setup.environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        # The working directory that the search sent is importable, as with `python -m`.
        path = tuple(dict.fromkeys((str(Path.cwd()), *import_path())))
        self._payload = Payload(target=self._setup.target, packed=self._setup.packed, path=path)
        self._recorder = _ProgressRecorder()
        # A single thread for everything: a backend does one thing at a time.
        self._thread = ThreadPoolExecutor(1, "jobs")
        self._work: Future[Any] | None = None
        self._backend: WorkloadBackend | None = None
        self._start_seconds: float | None = None

    def describe(self, device: str) -> bytes:
        """Return a description of the process: device and versions."""
        return pack(
            ProcessDescription(identity=identify(device), version=__version__, python=platform.python_version())
        )

    def start_call(self, call: bytes) -> None:
        """Start one of the methods below, by its name and arguments."""
        method, arguments = msgspec.msgpack.decode(call)
        self._start_seconds = None
        self._work = self._thread.submit(getattr(self, f"_{method}"), *arguments)

    def take_progress(self) -> bytes:
        """Return the progress since the last call of this method, after waiting briefly for the end."""
        assert self._work is not None
        wait([self._work], PROGRESS_SECONDS)
        is_over = self._work.done()  # checked before the progress is taken
        steps, self._recorder.steps = self._recorder.steps, []
        printed, self._recorder.printed = self._recorder.printed, []
        progress = CallProgress(steps=steps, output="".join(printed), is_over=is_over)
        if not is_over:
            return pack(progress)
        backend, error = self._backend, self._work.exception()
        return pack(
            msgspec.structs.replace(
                progress,
                answer=None if error is not None else self._work.result(),
                error=None if error is None else request_error(error),
                abilities=[] if backend is None else sorted(backend.abilities),
                is_build_shared=backend is not None and backend.is_build_shared,
                start_seconds=self._start_seconds,
            )
        )

    def stop(self) -> None:
        """End the running method, since its result is not needed any more."""
        self._recorder.is_stopped.set()
        if self._work is not None:
            self._work.exception()
        self._recorder.is_stopped.clear()

    def _make(self, isolation: Isolation | None, environment: dict[str, str] | None, device: str) -> None:
        self._close()

        def start(slot: Slot | None, watcher: Watcher) -> WorkloadBackend:
            return LocalBackend(self._payload, isolation, watcher, environment, slot)

        if self._setup.num_ranks > 1:
            ranks = rank_slots(self._setup.num_ranks, identify(device).type)
            self._backend = RankedBackend(ranks, start, self._recorder)
        else:
            self._backend = start(None, self._recorder)

    def _load(self, deadline_seconds: float) -> Any:
        return self._required_backend.load(deadline_seconds)

    def _open(self, device: str, num_threads: int | None, deadline_seconds: float) -> Any:
        return msgspec.to_builtins(self._required_backend.open(device, num_threads, deadline_seconds))

    def _share_build(self, kind: str, job: dict[str, Any], deadline_seconds: float) -> str | None:
        return self._required_backend.share_build(find_job(kind, job), deadline_seconds)

    def _keep(self) -> None:
        self._required_backend.keep()

    def _run(self, kind: str, job: dict[str, Any]) -> Any:
        handle = self._required_backend.submit(find_job(kind, job))
        result = handle.result()
        self._start_seconds = handle.start_seconds
        return msgspec.to_builtins(result, str_keys=True)

    def _close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    @property
    def _required_backend(self) -> WorkloadBackend:
        assert self._backend is not None
        return self._backend

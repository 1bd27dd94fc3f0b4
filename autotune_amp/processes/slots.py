"""Backend of several slots: a backend and a thread for each."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from autotune_amp.core.errors import ClusterLostError
from autotune_amp.interruption import heed
from autotune_amp.processes.local import Ability, Handle, OpenResult, Slot, SlotLostError, WorkloadBackend
from autotune_amp.processes.process import MAX_OUTPUT_CHUNKS, TICK_SECONDS, Watcher

T = TypeVar("T")
_POLL_SECONDS = 0.01  # between two looks whether the main thread has taken printed text


class SlotBackend(Protocol):
    """Interface for running the jobs of a slot, one at a time."""

    def submit(self, job: Any, slot: Slot | None, /) -> Handle[Any]:
        """Start a job."""

    def close(self) -> None:
        """End every process."""


S = TypeVar("S", bound=SlotBackend)


class _ClosedError(Exception):
    """Raised in a slot's thread, to end its waiting when the slots are closed."""


class _ThreadWatcher(Watcher):
    """Watcher in a slot's thread, which passes calls on to the main thread, and ends the wait when slots are closed."""

    def __init__(self, watcher: Watcher, calls: queue.SimpleQueue[Callable[[], None]], is_closed: threading.Event):
        self._watcher, self._calls, self._is_closed = watcher, calls, is_closed
        self.end_event = threading.Event()  # set while the result of the slot's job is not needed any more

    def tick(self) -> None:
        if self._is_closed.is_set():
            raise _ClosedError

    def is_over(self) -> bool:
        return self.end_event.is_set()

    def step(self, num_steps: int, step_seconds: float) -> None:
        self._calls.put(partial(self._watcher.step, num_steps, step_seconds))

    def activity(self, text: str) -> None:
        self._calls.put(partial(self._watcher.activity, text))

    def output(self, text: str) -> None:
        while self._calls.qsize() >= MAX_OUTPUT_CHUNKS and not self._is_closed.wait(_POLL_SECONDS):
            pass  # until the main thread has printed some of it
        self._calls.put(partial(self._watcher.output, text))

    def ending(self) -> None:
        self._watcher.ending()  # at once, since it reads from processes that are about to be killed


class _SlotRunner(Generic[S]):
    """Thread that runs the jobs of a slot on the slot's backend."""

    def __init__(self, slot: Slot, watcher: _ThreadWatcher, backend: S) -> None:
        self.slot = slot
        self.watcher = watcher
        self.backend = backend
        self.thread = ThreadPoolExecutor(1, f"slot {slot.name}")


class _SlotHandle:
    """Handle of a job that a slot's thread runs."""

    def __init__(self, slots: Slots[Any], future: Future[tuple[Any, float | None]]) -> None:
        self._slots = slots
        self.future = future

    def result(self) -> Any:
        """See `Handle`."""
        return self._slots.wait_for(self.future)[0]

    @property
    def start_seconds(self) -> float | None:
        """See `Handle`. Available once the job has ended; None if its slot was lost."""
        return None if self.future.exception() is not None else self.future.result()[1]


class Slots(Generic[S]):
    """Backends of several slots, each made by `make`. `watcher_of` returns the watcher of a slot.

    Every slot keeps one thread until `close`. Watchers are called in the main thread while it waits. `close`, also as a
    context manager, ends all jobs.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        make: Callable[[Slot, Watcher], S],
        watcher_of: Callable[[Slot], Watcher],
    ) -> None:
        self._make = make
        self._watcher_of = watcher_of
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        self._runners = [self._make_runner(slot) for slot in slots]
        self._tick = watcher_of(slots[0]).tick

    def _make_runner(self, slot: Slot) -> _SlotRunner[S]:
        watcher = _ThreadWatcher(self._watcher_of(slot), self._calls, self._is_closed)
        return _SlotRunner(slot, watcher, self._make(slot, watcher))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Return the slots that can run jobs at the same time."""
        return tuple(runner.slot for runner in self._runners)

    @property
    def first(self) -> S:
        """Return the backend of the first slot."""
        return self._runner_at(self.slots[0]).backend

    def end_event(self, slot: Slot) -> threading.Event:
        """Return the event that ends the slot's job when set, since its result is not needed any more."""
        return self._runner_at(slot).watcher.end_event

    def submit(self, job: Any, slot: Slot | None = None) -> _SlotHandle:
        """Start a job on a slot; with None on the first one, without limiting it to the slot's CPUs."""
        runner = self._runner_at(self.slots[0] if slot is None else slot)
        return _SlotHandle(self, self._run_in_thread(runner, partial(_run, runner.backend, job, slot)))

    def _runner_at(self, slot: Slot) -> _SlotRunner[S]:
        return next(runner for runner in self._runners if runner.slot == slot)

    def wait(self, handles: Sequence[Any]) -> Any:
        """Wait until one of the jobs has ended, and return it."""
        while True:
            for handle in handles:
                if handle.future.done():
                    return handle
            self._handle_calls()

    def wait_for(self, future: Future[T]) -> T:
        """Return the result of a slot's thread, or raise its error. A lost slot is removed."""
        self.wait_seconds(future, math.inf)
        self._run_calls(0.0)
        try:
            return future.result()
        except SlotLostError as lost:
            self._remove(lost.slot, f"it is lost: {lost.reason}")
            raise

    def _remove(self, slot: Slot, problem: str) -> None:
        """Remove a slot."""
        for runner in [runner for runner in self._runners if runner.slot == slot]:
            self._runners.remove(runner)
            runner.thread.shutdown()
        self._raise_if_no_slot(problem)

    def _raise_if_no_slot(self, problem: str) -> None:
        """Raise `ClusterLostError`, with the last slot's problem, if no slot is left."""
        if not self.slots:
            raise ClusterLostError(
                f"No node of the cluster is left. The last one was left out: {problem}",
                "Start a node, then run the same command again: it resumes with the results so far.",
            )

    def wait_seconds(self, future: Future[Any], seconds: float) -> None:
        """Wait for the future, for at most this many seconds."""
        until = time.monotonic() + seconds
        while not future.done() and time.monotonic() < until:
            self._handle_calls()

    def on_each(self, function: Callable[[S], T]) -> list[T]:
        """Call `function` with each backend in its thread, all at the same time, and return the results.

        Slots that are lost meanwhile have none.
        """
        runners = [self._runner_at(slot) for slot in self.slots]
        results = []
        for future in [self._run_in_thread(runner, partial(function, runner.backend)) for runner in runners]:
            with contextlib.suppress(SlotLostError):
                results.append(self.wait_for(future))
        return results

    def on_first(self, function: Callable[[S], T]) -> T:
        """Call `function` with the first slot's backend in its thread, and return the result."""
        runner = self._runner_at(self.slots[0])
        return self.wait_for(self._run_in_thread(runner, partial(function, runner.backend)))

    def close(self) -> None:
        """End all jobs. No job can be started afterwards."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        closings = [runner.thread.submit(runner.backend.close) for runner in self._runners]
        for runner in self._runners:
            runner.thread.shutdown()
        self._run_calls(0.0)
        for future in closings:
            future.result()

    def _run_in_thread(self, runner: _SlotRunner[S], work: Callable[[], T]) -> Future[T]:
        future = runner.thread.submit(work)
        future.add_done_callback(lambda _: self._calls.put(lambda: None))
        return future

    def _handle_calls(self) -> None:
        """Run the calls that the threads have queued, for about a tick, after waiting for one tick at most."""
        self._run_calls(TICK_SECONDS, TICK_SECONDS)
        heed()
        self._tick()

    def _run_calls(self, wait_seconds: float, run_seconds: float = math.inf) -> None:
        """Run the calls that the threads have queued by now, after waiting at most `wait_seconds` for the first one.

        After `run_seconds` the rest of them is left for the next time.
        """
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=wait_seconds)()
            until = time.monotonic() + run_seconds
            for _ in range(self._calls.qsize()):
                if time.monotonic() > until:
                    return
                self._calls.get_nowait()()


def _run(backend: SlotBackend, job: Any, slot: Slot | None) -> tuple[Any, float | None]:
    handle = backend.submit(job, slot)
    return handle.result(), handle.start_seconds


class WorkloadSlots(Slots[WorkloadBackend], WorkloadBackend):
    """`WorkloadBackend` of several slots: the first loads the workload and probes, then the others load it."""

    @property
    def abilities(self) -> frozenset[Ability]:  # noqa: D102 - see Backend
        return self.first.abilities

    @property
    def is_build_shared(self) -> bool:  # noqa: D102 - see Backend
        return self.first.is_build_shared

    def load(self, deadline_seconds: float) -> dict[str, Any]:  # noqa: D102 - see WorkloadBackend
        return self.on_first(lambda backend: backend.load(deadline_seconds))

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:  # noqa: D102 - see WorkloadBackend
        self._open_arguments = device, num_threads
        opened = self.on_first(lambda backend: backend.open(device, num_threads, deadline_seconds))
        self._can_fork = opened.why_not_forked is None
        return opened

    def open_others(self, deadline_seconds: float) -> None:
        """See `WorkloadBackend`. Each slot opens it on its own device: jobs of a rank other than 0 name theirs."""
        _, num_threads = self._open_arguments

        def open_one(runner: _SlotRunner[WorkloadBackend]) -> OpenResult:
            runner.backend.load(deadline_seconds)
            return runner.backend.open(runner.slot.device, num_threads, deadline_seconds)

        runners = [self._runner_at(slot) for slot in self.slots[1:]]
        others = [
            self.wait_for(future)
            for future in [self._run_in_thread(runner, partial(open_one, runner)) for runner in runners]
        ]
        if not self._can_fork or any(opened.why_not_forked for opened in others):
            self.keep()

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:
        """See `Backend`. Builds on every slot, and returns the first reason why one cannot."""
        reasons = self.on_each(lambda backend: backend.share_build(job, deadline_seconds))
        return next((reason for reason in reasons if reason is not None), None)

    def keep(self) -> None:
        """See `Backend`."""
        self.on_each(lambda backend: backend.keep())

"""Delivery of metrics to sinks, each in a thread of its own, so that training never waits for one. No torch.

A sink is called with the metrics of an update by name (see `autotune_amp.runtime.status`). For a move they include
``autotune_amp/move`` (its kind), ``/before``, ``/reason`` and ``/pinned_modules`` as text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

log = logging.getLogger("autotune_amp.runtime")

MetricValues: TypeAlias = Mapping[str, float | str]
Sink: TypeAlias = Callable[[MetricValues], object]

MAX_WAITING = 256  # metrics queued for a sink
_END_SECONDS = 5.0  # for delivering the rest when the run is over


class BatchSink:
    """Base class of sinks that take all metrics that wait for them at once, in order, instead of one by one."""

    def __call__(self, values: MetricValues) -> None:
        """Deliver the metrics of one update."""
        self.send([values])

    def send(self, batch: Sequence[MetricValues]) -> None:
        """Deliver metrics."""
        raise NotImplementedError


class SinkThread:
    """Delivery of metrics to one sink, in a thread.

    An exception of the sink is logged once; metrics that it is too slow for are dropped, which is also logged once. A
    copy, as of the controller, starts a thread of its own.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.Queue[MetricValues | None] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        self._close: Callable[[], object] | None = None  # set while its thread runs
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return SinkThread, (self._sink,)

    def send(self, metrics: MetricValues) -> None:
        """Queue metrics for the sink, without waiting."""
        if self._close is None or self._process != os.getpid():  # a forked child has no threads
            self._waiting, self._process = queue.Queue(MAX_WAITING), os.getpid()
            arguments = self._sink, self._waiting
            thread = threading.Thread(target=_deliver, args=arguments, name="autotune_amp sink", daemon=True)
            thread.start()
            self._close = weakref.finalize(self, _end, self._waiting, thread)  # at Python's exit at the latest
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            if not self._has_warned:
                log.warning("The sink %r hangs: metrics are dropped until it goes on.", self._sink)
            self._has_warned = True

    def close(self) -> None:
        """Wait up to a few seconds for queued metrics. A later `send` starts again."""
        if self._close is not None:
            self._close()
            self._close = None


def _deliver(sink: Sink, waiting: queue.Queue[MetricValues | None]) -> None:
    has_warned = is_over = False
    while not is_over:
        batch = [waiting.get()]
        if isinstance(sink, BatchSink):
            with contextlib.suppress(queue.Empty):
                while batch[-1] is not None:
                    batch.append(waiting.get_nowait())
        is_over = batch[-1] is None
        if not (given := [metrics for metrics in batch if metrics is not None]):
            return
        try:
            if isinstance(sink, BatchSink):
                sink.send(given)
            else:
                sink(given[0])
        except BaseException:  # whatever the user's code raises, even SystemExit: the next metrics are still delivered
            if not has_warned:
                log.warning("The sink %r raised; the training goes on.", sink, exc_info=True)
            has_warned = True


def _end(waiting: queue.Queue[MetricValues | None], thread: threading.Thread) -> None:
    while thread.is_alive():
        try:
            waiting.put_nowait(None)
            break
        except queue.Full:  # the sink hangs: drop queued metrics, so that the thread ends once it goes on
            with contextlib.suppress(queue.Empty):
                waiting.get_nowait()
    thread.join(_END_SECONDS)

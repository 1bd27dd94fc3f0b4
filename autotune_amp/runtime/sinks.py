"""Metrics on their way to whoever shows them, each in a thread of its own: the training never waits for one. No torch.

A sink is called with the metrics of an update by their names (see `autotune_amp.runtime.readings`). Of a move they come
with ``autotune_amp/move`` (its kind), ``/before``, ``/reason`` and ``/pinned_modules``, which are text.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

log = logging.getLogger("autotune_amp.runtime")

Values: TypeAlias = Mapping[str, float | str]
Sink: TypeAlias = Callable[[Values], object]

MAX_WAITING = 256  # of what a sink has yet to take
_END_SECONDS = 5.0  # that the last of it has when the run is over


class Outlet:
    """Hands metrics to one sink. What it raises is logged once; what it has no time for is dropped, and that, too, is
    logged once.

    A copy, as with the controller's, has a thread of its own.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._waiting: queue.Queue[Values | None] = queue.Queue(MAX_WAITING)
        self._has_warned = False
        self._close: Callable[[], object] | None = None  # while its thread runs
        self._process = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return Outlet, (self._sink,)

    def send(self, metrics: Values) -> None:
        """Have the sink called; returns at once."""
        if self._close is None or self._process != os.getpid():  # a forked child has no threads
            self._waiting, self._process = queue.Queue(MAX_WAITING), os.getpid()
            arguments = self._sink, self._waiting
            thread = threading.Thread(target=_deliver, args=arguments, name="autotune_amp sink", daemon=True)
            thread.start()
            self._close = weakref.finalize(self, _end, self._waiting, thread)  # at the latest when Python ends
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            if not self._has_warned:
                log.warning("The sink %r hangs: metrics are dropped until it goes on.", self._sink)
            self._has_warned = True

    def close(self) -> None:
        """Wait a few seconds for what is on its way; another `send` begins anew."""
        if self._close is not None:
            self._close()
            self._close = None


def _deliver(sink: Sink, waiting: queue.Queue[Values | None]) -> None:
    has_warned = False
    while (metrics := waiting.get()) is not None:
        try:
            sink(metrics)
        except BaseException:  # whatever the user's code raises, SystemExit too: the next is delivered all the same
            if not has_warned:
                log.warning("The sink %r raised; the training goes on.", sink, exc_info=True)
            has_warned = True


def _end(waiting: queue.Queue[Values | None], thread: threading.Thread) -> None:
    while thread.is_alive():
        try:
            waiting.put_nowait(None)
            break
        except queue.Full:  # it hangs: what waits is dropped, and it ends once it goes on
            with contextlib.suppress(queue.Empty):
                waiting.get_nowait()
    thread.join(_END_SECONDS)

"""Ctrl-C and SIGTERM, by which Slurm, Kubernetes and torchrun end a job: both interrupt, and neither is lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM  # as a shell has it

_has_come = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise `KeyboardInterrupt` inside; after SIGTERM the process ends by it, with `EXIT_CODE`.

    A signal that has a handler of its own already is left to that, and other threads than the main one get none.
    Raises `SystemExit` where SIGTERM came.
    """
    global _has_come
    defaults: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, default in defaults.items() if is_main and signal.getsignal(number) == default]
    is_terminated = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        global _has_come
        nonlocal is_terminated
        # Launchers forward what Slurm sends to all by itself: a SIGTERM more must not end what saves.
        is_heard, _has_come = _has_come, True
        is_terminated |= number == signal.SIGTERM
        if number == signal.SIGINT or not is_heard:
            raise KeyboardInterrupt

    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    except BaseException as error:
        if not is_terminated:
            raise
        sys.stderr.write(f"{error}\n".lstrip())
    finally:
        for number in ours:
            signal.signal(number, defaults[number])
            _has_come = False
    if is_terminated:
        raise SystemExit(EXIT_CODE)


def heed() -> None:
    """Raises `KeyboardInterrupt` again where a signal has come and the work goes on: what a handler raises in a
    finalizer or in a callback from C is dropped there."""
    if _has_come:
        raise KeyboardInterrupt

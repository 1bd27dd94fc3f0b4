"""Handling of Ctrl-C and of SIGTERM, by which Slurm, Kubernetes and torchrun end a job: both interrupt the work."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

EXIT_CODE = 128 + signal.SIGTERM  # as shells report it

_has_come = False


@contextmanager
def interruptible() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM raise `KeyboardInterrupt` in the context.

    After SIGTERM, the context ends by raising `SystemExit` with `EXIT_CODE`. A signal that has a handler already keeps
    it, and outside the main thread no handlers are set.
    """
    global _has_come
    defaults: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    is_main = threading.current_thread() is threading.main_thread()
    ours = [number for number, default in defaults.items() if is_main and signal.getsignal(number) == default]
    is_terminated = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        global _has_come
        nonlocal is_terminated
        # Slurm signals all processes and launchers forward the signal: a second SIGTERM must not interrupt the saving.
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
    """Raise `KeyboardInterrupt` again if a signal has come but the work goes on: Python drops an exception that a
    handler raises in a finalizer or in a callback from C."""
    if _has_come:
        raise KeyboardInterrupt

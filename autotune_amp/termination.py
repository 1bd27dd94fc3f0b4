"""SIGTERM, by which Slurm, Kubernetes and torchrun end a job: it interrupts as Ctrl-C does, then ends the process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM  # as a shell has it


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """SIGTERM raises `KeyboardInterrupt` inside; on the way out the process ends by it, with `EXIT_CODE`.

    What has a handler of its own already is left to that, and other threads than the main one get no signal. Raises
    `SystemExit` where SIGTERM came.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    has_come = False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        nonlocal has_come
        if not has_come:  # launchers forward what Slurm sends to all by itself: a second one must not end what saves
            has_come = True
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except BaseException as error:
        if not has_come:
            raise
        sys.stderr.write(f"{error}\n".lstrip())
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if has_come:
        raise SystemExit(EXIT_CODE)

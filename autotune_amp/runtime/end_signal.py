"""Handler of SIGTERM during training: it acts at the end of an accumulation window, the same on all ranks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.runtime.scaler import LaggedReader, Ranks

_LAG_WINDOWS = 1  # on an accelerator, which computes the next window while the flag travels to the host


class EndSignal:
    """SIGTERM handler that calls `callback` once, at the end of the window in which SIGTERM reached any rank.

    With several ranks on an accelerator it is the end of the following window. Afterwards the previous handler of
    SIGTERM is active again. Raises `InvalidRequestError` outside of the main thread, which alone receives signals.
    """

    def __init__(self, callback: Callable[[], object], ranks: Ranks) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidRequestError(
                "on_signal was given in a thread, and Python handles signals in the main thread alone.",
                "Make the controller in the main thread, or leave on_signal out.",
            )
        self._callback = callback
        self._ranks = ranks
        self._reader = LaggedReader()
        self._num_lag_windows = 0 if ranks.device.type == "cpu" else _LAG_WINDOWS
        self._pid = os.getpid()
        self._has_come = False
        self._is_over = self.is_closed = False
        self._before: Any = signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of a handler
        # A process forked from this one must end when asked to. A framework may have put a closed handler back.
        if os.getpid() != self._pid or self.is_closed:
            signal.signal(number, self._before)
            signal.raise_signal(number)
        self._has_come = True  # may be set already if a launcher forwards the same signal

    def end_window(self) -> None:
        """Call the callback if SIGTERM has come. With several ranks, call this on all of them."""
        if self._is_over:
            return
        has_come = self._has_come
        if self._ranks.are_many:
            flag = torch.full((), float(has_come), device=self._ranks.device)
            self._reader.push([self._ranks.maximum_(flag)], ())
            has_come = len(self._reader) > self._num_lag_windows and bool(self._reader.pop()[0][0])
        if has_come:
            self._is_over = True
            try:
                self._callback()
            finally:
                self.close()

    def close(self) -> None:
        """Restore the previous handler of SIGTERM, which gets a signal that came after the last window."""
        is_unheard = self._has_come and not self._is_over
        self._is_over = self.is_closed = True
        if signal.getsignal(signal.SIGTERM) == self._handle:  # else another handler was set meanwhile
            signal.signal(signal.SIGTERM, self._before)
            if is_unheard:
                signal.raise_signal(signal.SIGTERM)

"""Whether children can be forked from this process, and what keeps it so: one thread, no accelerator."""

from __future__ import annotations

import os
import signal
import time
import traceback
from typing import Any

import torch

_CANARY_SECONDS, _ACCELERATOR_CANARY_SECONDS = 10.0, 60.0  # the latter starts the driver


class HeldThreads:
    """Keeps this process at one thread while the user's code runs in it, since a thread pool does not survive a fork
    and children would hang on it. What the user's code asks for is only noted: trials take it over.
    """

    def __init__(self) -> None:
        self.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._set_num_threads: Any = torch.set_num_threads
        torch.set_num_threads = self._note  # type: ignore[assignment]  # the same but for a name

    def _note(self, num_threads: int) -> None:
        self.num_threads = num_threads

    def release(self) -> None:
        """Let the next call of `torch.set_num_threads` act."""
        torch.set_num_threads = self._set_num_threads


def why_not_fork(device: str, num_threads: int, done: str) -> str | None:
    """None if a child of this process can use the accelerator and all threads; found out by trying.

    `done` is what the process did with the workload before.
    """
    for device_type in ("cuda", "xpu"):
        if getattr(torch, device_type).is_initialized():
            return f"{done} the workload started {device_type} in its process"
    pid = os.fork()
    if pid == 0:
        os._exit(_try_everything(device, num_threads))
    deadline = time.monotonic() + (_CANARY_SECONDS if device == "cpu" else _ACCELERATOR_CANARY_SECONDS)
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return None if status == 0 else "a forked child could not use the accelerator or all threads"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"{done} the workload started threads in its process, and a forked child hung on them"


def _try_everything(device: str, num_threads: int) -> int:
    """In a forked child: 0 if the thread pool and the accelerator, where there is one, can be used."""
    try:
        torch.set_num_threads(num_threads)
        torch.ones(1 << 20).add_(1).sum()
        if device != "cpu" and torch.accelerator.is_available():
            # Another card than the one asked for may be full.
            wanted = torch.accelerator.current_accelerator() if device == "auto" else torch.device(device)
            torch.ones(1, device=wanted).add_(1).cpu()
    except Exception:
        traceback.print_exc()
        return 1
    return 0

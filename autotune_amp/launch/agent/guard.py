"""Nothing that was there before a trial is overwritten, appended to, renamed over or removed by it: it is stopped."""

from __future__ import annotations

import os
import sys
from typing import Any

from . import where
from .channel import Channel
from .imports import after_import

REFUSED = 114  # exit status
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_TRUNC | os.O_CREAT
_REMOVING = ("os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")

_guard: _Guard | None = None


def arm(channel: Channel, free: list[str], started: float) -> None:
    """Guard this process from here on. What is in one of the folders `free` may be written to; what was made after
    the time `started`, in seconds since the epoch, is the trial's own."""
    global _guard
    _guard = _Guard(channel, free, started)
    sys.addaudithook(_guard.hear)


class _Guard:
    def __init__(self, channel: Channel, free: list[str], started: float) -> None:
        self._channel = channel
        self._free = tuple(os.path.realpath(folder) + os.sep for folder in free)
        self._started = started
        self._own: set[str] = set()

    def hear(self, event: str, arguments: Any) -> None:
        if event == "open":
            path, mode, flags = arguments
            if any(letter in mode for letter in "wax+") if isinstance(mode, str) else flags & _WRITING:
                self.check("open", path)
        elif event in _REMOVING:
            self.check(event, arguments[0])
        elif event == "os.rename":
            self.check(event, arguments[0])
            self.check(event, arguments[1])

    def check(self, what: str, path: Any) -> None:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a file that is open already
        full = os.path.realpath(os.fsdecode(path))
        if full in self._own or (full + os.sep).startswith(self._free) or "__pycache__" in full:
            return
        try:
            is_older = os.stat(full).st_ctime < self._started
        except OSError:
            is_older = False
        if is_older:
            self._channel.send("refused", what=what, path=full, line=where.user_line())
            os._exit(REFUSED)
        self._own.add(full)
        self._channel.add("made", path=full)


def watch_native_writers() -> None:
    """What writes without Python's knowing is asked before it does."""
    if _guard is None:
        return
    import torch

    _wrap(torch, "save", lambda args, kwargs: kwargs.get("f", args[1] if len(args) > 1 else None))
    for name in ("safetensors.torch", "safetensors.numpy"):
        after_import(
            name, lambda m: _wrap(m, "save_file", lambda a, k: k.get("filename", a[1] if len(a) > 1 else None))
        )


def _wrap(module: Any, name: str, path_of: Any) -> None:
    original, guard = getattr(module, name), _guard
    assert guard is not None

    def guarded(*args: Any, **kwargs: Any) -> Any:
        guard.check(f"{module.__name__}.{name}", path_of(args, kwargs))
        return original(*args, **kwargs)

    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(module, name, guarded)

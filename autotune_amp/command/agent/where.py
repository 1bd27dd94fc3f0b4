"""Callers of the running code, and the rank of this process."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Files between a user's call and the deprecated classes of torch.cuda.amp: these classes, and the warning about them.
_BETWEEN = (
    *(os.path.join("amp", name) for name in ("autocast_mode.py", "grad_scaler.py")),
    "typing_extensions.py",
    "warnings.py",
)


def frames(depth: int = 1) -> Iterator[FrameType]:
    """Yield the frames of the callers, the innermost first; `depth` 1 begins with the function that calls this one."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_library(path: str) -> bool:
    """Whether the code of a file is not the user's own."""
    return path.startswith((*_LIBRARIES, HERE, "<")) or "site-packages" in path or "dist-packages" in path


def user_line() -> str:
    """Return ``path:line`` of the innermost code that is no library or is the main program; "" if there is none."""
    for frame in frames(2):
        if not is_library(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def maker() -> str:
    """Return ``file:function:line`` of the code that called torch, which may be a framework: the same in every run of a
    command.
    """
    frame = _torchs_caller()
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}:{frame.f_lineno}"


def maker_module() -> str:
    """Return the name of the module that called torch."""
    frame = _torchs_caller()
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _torchs_caller() -> FrameType | None:
    for frame in frames(3):
        path = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in path and not path.startswith((HERE, "<")):
            return frame
    return None


def is_called_by_user(depth: int = 2) -> bool:
    """Whether the function that calls this one was called by code that is no library, apart from torch's own
    subclasses.
    """
    for frame in frames(depth + 1):
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and not path.endswith(_BETWEEN):
            return not is_library(path)
    return False


def rank() -> dict[str, Any]:
    """Return rank, world size and local rank: those of torch's process group, else those given by a launcher."""
    step = _number("SLURM_STEP_NUM_TASKS", 0)  # set by srun; this is its task unless another launcher made the ranks
    local = _number("LOCAL_RANK", _number("SLURM_LOCALID", 0) if step else 0)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return {"rank": distributed.get_rank(), "world": distributed.get_world_size(), "local_rank": local}
    if step and "WORLD_SIZE" not in os.environ:
        return {"rank": _number("SLURM_PROCID", 0), "world": step, "local_rank": local}
    return {"rank": _number("RANK", 0), "world": _number("WORLD_SIZE", 1), "local_rank": local}


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default

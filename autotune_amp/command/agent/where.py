"""Position in the user's code from which the running code was called, and the rank of this process."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FrameType
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})

# Files whose frames lie between a user's call and torch's AMP classes: torch's deprecated subclasses in torch.cuda.amp,
# and the decorator that warns about them.
_TORCH_WRAPPERS = (
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


def working_folder() -> str:
    """Return the working folder of this process; the root if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return os.sep


def is_library(path: str) -> bool:
    """Whether a source file belongs to the standard library, an installed package or the agent, not to the user."""
    return path.startswith((*_LIBRARIES, HERE, "<")) or "site-packages" in path or "dist-packages" in path


def user_line() -> str:
    """Return ``path:line`` of the innermost running line of the user's code or of the main program; "" if there is
    none.
    """
    for frame in frames(2):
        if not is_library(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def maker() -> str:
    """Return ``file:function:line`` of the code that called torch, the user's or a framework's. It identifies the call
    in every run of a command.
    """
    frame = _frame_calling_torch()
    if frame is None:
        return ""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_code.co_name}:{frame.f_lineno}"


def maker_module() -> str:
    """Return the name of the module that called torch, "" if there is none."""
    frame = _frame_calling_torch()
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _frame_calling_torch() -> FrameType | None:
    for frame in frames(3):
        path = frame.f_code.co_filename
        if f"{os.sep}torch{os.sep}" not in path and not path.startswith((HERE, "<")) and not _is_of_lightning(frame):
            return frame
    return None


def _is_of_lightning(frame: FrameType) -> bool:
    """Whether a frame is of the function that Lightning puts around DataLoader while it calls a module's hooks."""
    is_in_file = frame.f_code.co_filename.endswith(os.path.join("fabric", "utilities", "data.py"))
    return is_in_file and frame.f_code.co_name == "wrapper"


def is_called_by_user(depth: int = 2) -> bool:
    """Whether the function that calls this one was itself called from the user's code, directly, through torch's
    deprecated subclasses or through Lightning's wrapper of DataLoader.
    """
    for frame in frames(depth + 1):
        path = frame.f_code.co_filename
        if not path.startswith(HERE) and not path.endswith(_TORCH_WRAPPERS) and not _is_of_lightning(frame):
            return not is_library(path)
    return False


def is_called_by(package: str) -> bool:
    """Whether a function of a package is on the call stack."""
    return any(frame.f_globals.get("__name__", "").partition(".")[0] == package for frame in frames())


def rank() -> dict[str, Any]:
    """Return rank and world size: of torch's process group if initialized, else from the launcher's
    environment variables (torchrun, Slurm).
    """
    # Set by srun, whose tasks are the ranks unless a launcher inside sets WORLD_SIZE too.
    step = _number("SLURM_STEP_NUM_TASKS", 0)
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return {"rank": distributed.get_rank(), "world": distributed.get_world_size()}
    if step and "WORLD_SIZE" not in os.environ:
        return {"rank": _number("SLURM_PROCID", 0), "world": step}
    return {"rank": _number("RANK", 0), "world": _number("WORLD_SIZE", 1)}


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default

"""Conversion of a trial's exception to a `Failure` (out of memory, unsupported precision, ...), and advice to fix it.

A trial is a short measured training run. The module `judge` has the rules that tell the kinds of failure apart.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure
from autotune_amp.precision.rules import rule_of
from autotune_amp.trial.judge import RaisedError, StepLosses, failure_from_error, failure_from_steps

_OWN_FILES = Path(__file__).parents[1]


class RunFailedError(Exception):
    """Error that ends a trial with a `failure`, such as losses that are not finite."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def raise_if_steps_failed(steps: Sequence[StepLosses], *, goes_on: bool = False) -> None:
    """Raise `RunFailedError` if the steps of a trial show a failure, as `failure_from_steps` decides."""
    failure = failure_from_steps(steps, goes_on=goes_on)
    if failure is not None:
        raise RunFailedError(failure)


def failure_from_exception(error: BaseException, *, is_oom_killed: bool = False) -> Failure:
    """Return the failure for an exception raised in a trial, with a traceback of the user's and the libraries' frames.

    `is_oom_killed`: the kernel has killed some process of this machine for lack of memory since the trial began, so an
    error such as a lost worker may come from that.
    """
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, RunFailedError):
        return error.failure
    trace = traceback.TracebackException.from_exception(error)
    # Drop the frames of this package, except those of its built-in workload.
    frames = [
        f
        for f in trace.stack
        if not Path(f.filename).is_relative_to(_OWN_FILES) or Path(f.filename).name == "workloads.py"
    ]
    trace.stack = traceback.StackSummary.from_list(frames)
    raised = RaisedError(
        types=tuple(kind.__name__ for kind in type(error).__mro__),
        message=_escape_surrogates(str(error)),
        traceback=_escape_surrogates("".join(trace.format())[-8000:]),
        free_memory_share=free_memory_share(),
    )
    return failure_from_error(raised, is_oom_killed=is_oom_killed)


def _escape_surrogates(text: str) -> str:
    """Return the text with lone surrogates escaped (from file names that are not UTF-8): JSON cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def free_memory_share() -> float | None:
    """Return the free share of the memory that this process may use on the current CUDA device.

    It is what is free now, or was at the peak of this process if that is less. None if this process has not used CUDA,
    or if the device has failed.
    """
    import torch  # here, since the parent process does not import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # an error of the GPU itself, which all its calls repeat
        return None
    allowed = total * torch.cuda.memory.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.max_memory_reserved()) / allowed


def suggested_fix(failure: Failure) -> str | None:
    """Return sentences on how and where to fix a failure, or None if its message matches no rule of `precision.rules`.

    The place is the innermost line outside torch in the traceback, which is in the failure's `details`.
    """
    rule = rule_of(failure.message)
    if rule is None:
        return None
    frames = re.findall(r'File "(.+)", line (\d+)', failure.details or "")
    lines_outside_torch = [f"{file}:{line}" for file, line in frames if "/torch/" not in Path(file).as_posix()]
    where = f" It is raised in {lines_outside_torch[-1]}." if lines_outside_torch else ""
    return f"{rule.fix}{where} `autotune-amp check` finds other places like it (rule {rule.name})."


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    0 on systems that do not count them.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

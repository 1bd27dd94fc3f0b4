"""Failure of a trial from the exception that it raised, by the rules of `judge`; and how to fix it."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure
from autotune_amp.precision.rules import rule_of
from autotune_amp.trial.judge import RaisedError, RunEvidence, judge

_OWN_FILES = Path(__file__).parents[1]


class JudgedError(Exception):
    """Raised to end a trial for which `judge` has found a `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def raise_if_failed(evidence: RunEvidence) -> None:
    """Raise `JudgedError` if `judge` finds a failure in the evidence."""
    failure = judge(evidence)
    if failure is not None:
        raise JudgedError(failure)


def failure_from_exception(error: BaseException, *, is_oom_killed: bool = False) -> Failure:
    """Return the failure for an exception raised in a trial.

    `is_oom_killed`: the kernel has killed a process for lack of memory since the job began.
    """
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, JudgedError):
        return error.failure
    trace = traceback.TracebackException.from_exception(error)
    user_frames = [
        f for f in trace.stack if not Path(f.filename).is_relative_to(_OWN_FILES) or "workloads" in f.filename
    ]
    trace.stack = traceback.StackSummary.from_list(user_frames)  # without the frames of this package
    raised = RaisedError(
        types=tuple(kind.__name__ for kind in type(error).__mro__),
        message=_escape_surrogates(str(error)),
        traceback=_escape_surrogates("".join(trace.format())[-8000:]),
        free_memory_share=free_memory_share(),
    )
    failure = judge(RunEvidence(error=raised, is_oom_killed=is_oom_killed))
    assert failure is not None
    return failure


def _escape_surrogates(text: str) -> str:
    """Return the text with its surrogates escaped, since JSON does not allow them."""
    return text.encode(errors="backslashreplace").decode()


def free_memory_share() -> float | None:
    """Return the smallest free share of the memory that this process may use on the current CUDA device.

    None if the device was not used or has failed.
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
    """Return how and where to fix a failure, by the rule that its message matches; None without one."""
    rule = rule_of(failure.message)
    if rule is None:
        return None
    frames = re.findall(r'File "(.+)", line (\d+)', failure.details or "")
    own = [f"{file}:{line}" for file, line in frames if "/torch/" not in Path(file).as_posix()]
    where = f" It is raised in {own[-1]}." if own else ""
    return f"{rule.fix}{where} `autotune-amp check` finds other places like it (rule {rule.name})."


def num_oom_kills() -> int:
    """Return the kernel's count of processes killed for lack of memory, 0 if there is no such count."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

"""Collects the evidence of a trial in its own process, for `judge` to decide from, and says how a failure is mended."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure
from autotune_amp.precision.rules import rule_of
from autotune_amp.trial.judge import Evidence, RaisedError, judge

_OWN_FILES = Path(__file__).parents[1]


class JudgedError(Exception):
    """Ends a trial that was judged already; holds its `failure`."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def raise_if_failed(evidence: Evidence) -> None:
    """Raise `JudgedError` where the evidence amounts to a failure."""
    failure = judge(evidence)
    if failure is not None:
        raise JudgedError(failure)


def failure_from_exception(error: BaseException, *, is_oom_killed: bool = False) -> Failure:
    """Return the failure that an exception amounts to.

    `is_oom_killed`: the kernel has ended a process for want of memory since the job began.
    """
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, JudgedError):
        return error.failure
    trace = traceback.TracebackException.from_exception(error)
    kept = [f for f in trace.stack if not Path(f.filename).is_relative_to(_OWN_FILES) or "workloads" in f.filename]
    trace.stack = traceback.StackSummary.from_list(kept)  # our own frames tell the user nothing
    raised = RaisedError(
        types=tuple(kind.__name__ for kind in type(error).__mro__),
        message=_as_text(str(error)),
        traceback=_as_text("".join(trace.format())[-8000:]),
        free_memory_share=free_memory_share(),
    )
    failure = judge(Evidence(error=raised, is_oom_killed=is_oom_killed))
    assert failure is not None
    return failure


def _as_text(said: str) -> str:
    """Return it without surrogates, which JSON does not take."""
    return said.encode(errors="backslashreplace").decode()


def free_memory_share() -> float | None:
    """Return the least share of what this process may take of the current CUDA device that was left to it, None for a
    device that was not used or has failed."""
    import torch  # late: the parent has none

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # an error of the card itself, which all its calls repeat
        return None
    allowed = total * torch.cuda.memory.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.max_memory_reserved()) / allowed


def mended(failure: Failure) -> str | None:
    """How the user mends it and where, as the rule that its message breaks says; None where no rule is known."""
    rule = rule_of(failure.message)
    if rule is None:
        return None
    frames = re.findall(r'File "(.+)", line (\d+)', failure.details or "")
    own = [f"{file}:{line}" for file, line in frames if "/torch/" not in Path(file).as_posix()]
    where = f" It is raised in {own[-1]}." if own else ""
    return f"{rule.mend}{where} `autotune-amp check` looks for more of the kind (rule {rule.name})."


def num_oom_kills() -> int:
    """The kernel's count of processes it ended for want of memory, 0 where it keeps none."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

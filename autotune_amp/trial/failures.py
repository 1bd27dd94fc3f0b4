"""What a failure of a trial amounts to: out of memory, not supported, not finite, a crash, or an error of the user's.

Told from an exception, from the memory that a trial took, and from the exit of its process; time's up is for who waits.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import traceback
from pathlib import Path

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.precision.rules import rule_of

_OOM_TEXTS = (
    "out of memory",  # CUDA, its driver, Triton, Metal, SYCL
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",  # cuBLAS, cuDNN and AMD's
)
# What libraries say where memory is short, and where it is not: after an error of the card, in a broken installation.
_OOM_TEXTS_WHERE_SHORT = (
    "status_not_initialized",  # cuBLAS and cuDNN take memory for a handle
    "cudnn_status_internal_error",  # cuDNN loads kernels late (pytorch#81620); ..._ALLOCATION_FAILED is one of these
    "unable to find an engine",  # no algorithm of a convolution has a workspace that fits
    "unable to find a valid cudnn algorithm",
)
_UNSUPPORTED_TEXTS = (
    "not implemented for 'half'",
    "not implemented for 'bfloat16'",
    "not supported for dtype",
    "could not create a primitive",  # oneDNN
    "no kernel image is available",  # code for other cards than this one
    "flashattention only support",  # "... supports Ampere GPUs or newer", "... support fp16 and bf16 data type"
    "no available kernel",  # attention limited to kernels that this card, or the precision, does not have
    "cublas_status_not_supported",
    "cublas_status_arch_mismatch",
    "out of resource: shared memory",  # a Triton kernel that wants more of it than the card has
)
_SHORT_SHARE = 0.1
_OWN_FILES = Path(__file__).parents[1]


class NonFiniteError(Exception):
    """The loss, or every gradient while the loss scale was searched, was not finite."""


def of_error(error: BaseException) -> Failure:
    """The failure that an exception from the user's workload amounts to."""
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, NonFiniteError):
        return Failure(kind="nonfinite", message=str(error))
    trace = traceback.TracebackException.from_exception(error)
    kept = [f for f in trace.stack if not Path(f.filename).is_relative_to(_OWN_FILES) or "workloads" in f.filename]
    trace.stack = traceback.StackSummary.from_list(kept)  # our own frames tell the user nothing
    texts = f"{type(error).__name__}: {error}".splitlines()[0][:500], "".join(trace.format())[-8000:]
    message, details = (text.encode(errors="backslashreplace").decode() for text in texts)  # JSON takes no surrogates
    return Failure(kind=_kind(error), message=message, details=details)


def _kind(error: BaseException) -> FailureKind:
    import torch  # late: the parent has none

    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return "oom"
    if isinstance(error, RuntimeError) or type(error).__module__.startswith("triton."):
        if any(part in text for part in _OOM_TEXTS):
            return "oom"
        if any(part in text for part in _OOM_TEXTS_WHERE_SHORT) and is_memory_short():
            return "oom"
        if isinstance(error, NotImplementedError) or any(part in text for part in _UNSUPPORTED_TEXTS):
            return "unsupported"
    return "workload_error"


def is_memory_short() -> bool:
    """Whether less than a tenth of what this process may take of the current CUDA device is left, or once was."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # an error of the card itself, which all its calls repeat
        return False
    allowed = total * torch.cuda.memory.get_per_process_memory_fraction()
    return min(free, allowed - torch.cuda.max_memory_reserved()) < _SHORT_SHARE * allowed


def mended(failure: Failure) -> str | None:
    """How the user mends it and where, as the rule that its message breaks says; None where no rule is known."""
    rule = rule_of(failure.message)
    if rule is None:
        return None
    frames = re.findall(r'File "(.+)", line (\d+)', failure.details or "")
    own = [f"{file}:{line}" for file, line in frames if "/torch/" not in Path(file).as_posix()]
    where = f" It is raised in {own[-1]}." if own else ""
    return f"{rule.mend}{where} `autotune-amp check` names all such lines (rule {rule.name})."


def of_memory(taken_bytes: int, limit_bytes: int | None, *, has_flushed: bool) -> Failure | None:
    """Of a trial that came to its end: it took more than its limit, or its allocator `has_flushed` its cache."""
    if limit_bytes is not None and taken_bytes > limit_bytes:
        message = f"it took {taken_bytes / 2**20:.0f} MiB, over the limit of {limit_bytes / 2**20:.0f} MiB"
        return Failure(kind="oom", message=message)
    if has_flushed:
        return Failure(kind="oom", message="the allocator had to flush its cache to make room: memory is full")
    return None


def of_exit(status: int, phase: str, details: str | None, *, is_oom_killed: bool) -> Failure:
    """Of a process that ended without an answer; `status` is the negative number of the signal that killed it.

    `is_oom_killed`: the kernel has ended a process for want of memory since this one was given its job.
    """
    if status == -signal.SIGKILL and is_oom_killed:
        return Failure(kind="oom", message=f"the kernel ended it for want of memory, {phase}", details=details)
    if status < 0:
        names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
        what = "segmentation fault" if status == -signal.SIGSEGV else f"signal {names.get(-status, -status)}"
        return Failure(kind="crash", message=f"its process died of {what}, {phase}", details=details)
    message = f"its process exited with status {status} before it reported, {phase}"
    return Failure(kind="crash", message=message, details=details)


def num_oom_kills() -> int:
    """The kernel's count of processes it ended for want of memory, 0 where it keeps none."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0

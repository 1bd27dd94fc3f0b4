"""Judge of a run: decides from an error, an exit, its memory or its losses whether a run failed, and why.

The same rules hold for the process of a `Workload`, on this host or on a Ray node, for a training command, and for each
rank of either. Pure: it depends on its arguments alone.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Final

import msgspec

from autotune_amp.core.outcome import Failure, FailureKind

# One batch of bad data gives one loss that is not finite, which a scaler or the script's own guard skips. With weights
# that are NaN, or in a format with too small a range, every further loss is not finite either.
NUM_NONFINITE_STEPS: Final = 3
# GradScaler halves its scale at each skip: from 65536 down to 1 takes 16. After more skips the scale is not the cause.
MAX_SKIPS: Final = 20

_OOM_TYPES = {"OutOfMemoryError", "MemoryError"}
_OOM_TEXTS = (
    "out of memory",  # CUDA, its driver, Triton, Metal, SYCL
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",  # cuBLAS, cuDNN and AMD's
)
# Messages of libraries when memory is short, but also for other reasons: after an error of the GPU, in a broken
# installation.
_OOM_TEXTS_WHERE_SHORT = (
    "status_not_initialized",  # cuBLAS and cuDNN take memory for a handle
    "cudnn_status_internal_error",  # cuDNN loads kernels late (pytorch#81620); ..._ALLOCATION_FAILED is one of these
    "unable to find an engine",  # no algorithm of a convolution has a workspace that fits
    "unable to find a valid cudnn algorithm",
)
_SHORT_SHARE = 0.1
_UNSUPPORTED_TEXTS = (
    "not implemented for 'half'",
    "not implemented for 'bfloat16'",
    "not implemented for 'float8",
    "not supported for dtype",
    "could not create a primitive",  # oneDNN
    "no kernel image is available",  # code for other GPUs than this one
    "flashattention only support",  # "... supports Ampere GPUs or newer", "... support fp16 and bf16 data type"
    "no available kernel",  # attention limited to kernels that this GPU or the precision does not have
    "cublas_status_not_supported",
    "cublas_status_arch_mismatch",
    "out of resource: shared memory",  # a Triton kernel that wants more than the GPU has
)
# Python's own exceptions, which neither torch nor a driver raises for lack of memory or of a kernel.
_PYTHON_ERRORS = {
    "ValueError",
    "TypeError",
    "LookupError",
    "AssertionError",
    "AttributeError",
    "ImportError",
    "NameError",
}
# Messages of a rank that lost another: torch's own errors, in gloo's and NCCL's words.
_LOST_PEER_MESSAGE = re.compile(
    r"\bDist\w*Error\b|gloo/|NCCL|\[c10d\]|connection (closed|reset)|closed by peer|broken pipe"
    r"|Rank \d+ .*(failed|timed out)|process group|timed out waiting",
    re.IGNORECASE,
)
# The last line of a traceback, except a launcher's, which only says that a rank failed; or an argparse error.
_PRINTED_ERROR = re.compile(r"^(?:(?!.*ChildFailed)[\w.]*(?:Error|Exception|Interrupt)\b|\S+: error:).*$", re.MULTILINE)


class RaisedError(msgspec.Struct, frozen=True, kw_only=True):
    """Exception as plain data.

    `types` are the names of its class and that class's bases, the class first. `free_memory_share` is the smallest free
    share of the accelerator's memory that the process may use, None if no accelerator reports it.
    """

    types: tuple[str, ...]
    message: str
    traceback: str | None = None
    free_memory_share: float | None = None


class StepLosses(msgspec.Struct, frozen=True, kw_only=True):
    """Losses of one optimizer step, one for each backward pass, and whether the loss scaler skipped the step."""

    losses: tuple[float, ...] = ()
    is_skipped: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether all losses of the step are finite."""
        return all(map(math.isfinite, self.losses))


def causing_failure(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others; of several that are equally likely the first.

    A rank that runs out of memory, raises or dies makes all others lose a connection, wait, or be terminated.
    """
    return min(failures, key=_distance_from_cause)


def printed_error(output: str) -> str | None:
    """Return the last line of the output that names an error, or None."""
    error_lines = _PRINTED_ERROR.findall(output)
    return error_lines[-1].strip() if error_lines else None


def _distance_from_cause(failure: Failure) -> int:
    """Return a rank of the failure as the cause of others, 0 for the most likely one."""
    if failure.kind == "oom":
        return 0
    if failure.kind == "timeout":
        return 3
    if failure.kind in ("workload_error", "crash") and _LOST_PEER_MESSAGE.search(failure.message):
        return 4
    # NCCL's watchdog and launchers end a rank with these signals if another one failed.
    return 2 if failure.kind == "crash" and re.search("SIGABRT|SIGTERM", failure.message) else 1


def failure_from_error(error: RaisedError, *, is_oom_killed: bool = False) -> Failure:
    """Return the failure for an exception; `is_oom_killed`: the kernel killed some process for lack of memory."""
    lines = [line for line in error.message.splitlines() if line.strip()]
    message = f"{error.types[0]}: {lines[0] if lines else ''}"[:500]
    details = error.traceback
    if missing := re.search(r"No module named '(\w+)", error.message):
        details = f"Install {missing[1]} in the environment that trains.\n{details or ''}".rstrip()
    return Failure(kind=_kind_of_error(error, is_oom_killed=is_oom_killed), message=message, details=details)


def _kind_of_error(error: RaisedError, *, is_oom_killed: bool) -> FailureKind:
    text, types = error.message.lower(), set(error.types)
    if types & _OOM_TYPES or "[errno 12]" in text:
        return "oom"
    if is_oom_killed and "killed by signal: killed" in text:  # a worker of a DataLoader
        return "oom"
    if types & _PYTHON_ERRORS:
        return "workload_error"
    if any(part in text for part in _OOM_TEXTS):
        return "oom"
    is_short = error.free_memory_share is not None and error.free_memory_share < _SHORT_SHARE
    if is_short and any(part in text for part in _OOM_TEXTS_WHERE_SHORT):
        return "oom"
    if "NotImplementedError" in types or any(part in text for part in _UNSUPPORTED_TEXTS):
        return "unsupported"
    return "workload_error"


def failure_from_exit(
    status: int | None,
    output: str | None,
    *,
    process: str = "its process",
    activity: str = "",
    is_oom_killed: bool = False,
) -> Failure:
    """Return the failure for a process that exited without sending a result, during its `activity`.

    `status` is negative for the signal that killed it, None if it is unknown; `output` the end of what it printed;
    `process` its name in messages. `is_oom_killed`: the kernel killed some process for lack of memory meanwhile.
    """
    text, when = output or "", f" {activity}" if activity else ""
    is_killed = status in (None, -signal.SIGKILL, 128 + signal.SIGKILL)  # as a shell returns it
    if is_killed and is_oom_killed:
        kind: FailureKind = "oom"
        message = f"the kernel killed {process} because memory ran out{when}"
    elif status != 0 and _is_any_in((*_OOM_TEXTS, "memoryerror"), text):
        kind, message = "oom", f"the output of {process} says that memory ran out{when}"
    else:
        is_unsupported = status != 0 and _is_any_in(_UNSUPPORTED_TEXTS, printed_error(text) or "")
        kind = "unsupported" if is_unsupported else "crash"
        message = f"{process} {_exit_text(status)}{when}"
    return Failure(kind=kind, message=message, details=output)


def _is_any_in(texts: Iterable[str], output: str) -> bool:
    lower = output.lower()
    return any(part in lower for part in texts)


def _exit_text(status: int | None) -> str:
    if status is None:
        return "died"
    if status >= 0:
        return f"exited with status {status}"
    names = {member.value: member.name for member in signal.Signals}  # real-time signals have none
    cause = " (segmentation fault)" if status == -signal.SIGSEGV else ""
    return f"died of {names.get(-status, f'signal {-status}')}{cause}"


def failure_from_memory(num_bytes: int, limit_bytes: int | None, *, has_flushed: bool = False) -> Failure | None:
    """Return the failure for memory over a limit, or for an allocator that had to empty its cache; else None."""
    if limit_bytes is not None and num_bytes > limit_bytes:
        used, limit = (f"{number / 2**20:.0f} MiB" for number in (num_bytes, limit_bytes))
        return Failure(kind="oom", message=f"it used {used}, over the limit of {limit}")
    if has_flushed:
        return Failure(kind="oom", message="the allocator had to flush its cache to make room: memory is full")
    return None


def failure_from_steps(steps: Sequence[StepLosses], *, goes_on: bool = False) -> Failure | None:
    """Return the failure for steps whose losses stay non-finite, or that the loss scaler keeps skipping; else None.

    `steps` are in order; `goes_on`: more will follow. A non-finite loss may be due to one bad batch, if later losses
    are finite. In a finished run that ends with one, it counts as a failure.
    """
    steps_with_losses = [step for step in steps if step.losses]
    last_nonfinite = list(takewhile(lambda step: not step.is_finite, reversed(steps_with_losses)))
    is_final = not goes_on and any(not step.is_skipped for step in last_nonfinite)
    if is_final or len(last_nonfinite) >= NUM_NONFINITE_STEPS:
        value = next(loss for loss in last_nonfinite[-1].losses if not math.isfinite(loss))
        return Failure(kind="nonfinite", message=f"the loss became {value}")
    recent = steps[-MAX_SKIPS:] if goes_on else steps
    if recent and all(step.is_skipped for step in recent) and (not goes_on or len(recent) == MAX_SKIPS):
        message = f"gradients still overflow after {len(recent)} steps, all of which were skipped"
        return Failure(kind="nonfinite", message=message)
    return None

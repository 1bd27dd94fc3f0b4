"""What an exception from the user's workload amounts to: by its type, else by its text, since most failures of CPUs,
drivers and libraries are plain RuntimeErrors."""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

import torch

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.trial.memory import is_memory_short
from autotune_amp.trial.timing import NonFiniteError

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
_OWN_FILES = Path(__file__).parents[1]


def classify(error: BaseException) -> Failure:
    """The failure that an exception from the user's workload amounts to."""
    message = _printable(f"{type(error).__name__}: {error}".splitlines()[0])
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, NonFiniteError):
        return Failure(kind="nonfinite", message=str(error))
    return Failure(kind=_kind(error), message=message[:500], details=user_traceback(error))


def _kind(error: BaseException) -> FailureKind:
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


def user_traceback(error: BaseException) -> str:
    """The traceback without this package's own frames, which tell the user nothing; its last 8,000 characters."""
    summary = traceback.TracebackException.from_exception(error, capture_locals=False)
    kept = [f for f in summary.stack if not Path(f.filename).is_relative_to(_OWN_FILES) or "workloads" in f.filename]
    summary.stack = traceback.StackSummary.from_list(kept)
    return _printable("".join(summary.format())[-8000:])


def _printable(text: str) -> str:
    """`text` as JSON can hold it: a file name of undecodable bytes has surrogates in it."""
    return text.encode(errors="backslashreplace").decode()

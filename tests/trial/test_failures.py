"""Tests for autotune_amp/trial/failures.py."""

from __future__ import annotations

from unittest.mock import ANY

import pytest
import torch

from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.trial import failures

GIB = 2**30
# Triton's own errors are no RuntimeErrors, unless the compiler of PyTorch wraps them.
OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton.runtime.errors"})


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (MemoryError(), "oom"),
        (OSError(12, "Cannot allocate memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), "oom"),
        (RuntimeError("\"addmm_cuda\" not implemented for 'Half'"), "unsupported"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "unsupported"),
        (RuntimeError("FlashAttention only support fp16 and bf16 data type"), "unsupported"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), "unsupported"),
        (OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "unsupported"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "workload_error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul`"), "workload_error"),
        (ValueError("No available kernel"), "workload_error"),
        # What libraries also say for other reasons is out of memory only where memory is short.
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), None),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), None),
        (RuntimeError("GET was unable to find an engine to execute this computation"), None),
    ],
)
@pytest.mark.parametrize("is_short", [False, True])
def test_what_an_exception_amounts_to(
    error: Exception, kind: FailureKind | None, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "is_memory_short", lambda: is_short)
    assert failures.of_error(error).kind == (kind or ("oom" if is_short else "workload_error"))


def test_memory_is_short_where_less_than_a_tenth_of_what_one_may_have_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not failures.is_memory_short(), "a card that was not used"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, reserved, fraction, is_short in (
        (30, 8, 1.0, False),
        (3, 8, 1.0, True),  # others hold the rest
        (30, 37, 1.0, True),  # at its peak
        (20, 19, 0.5, True),  # of what the trial may have
        (20, 17, 0.5, False),
    ):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free * GIB, 40 * GIB))
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda reserved=reserved: reserved * GIB)
        monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda share=fraction: share)
        assert failures.is_memory_short() == is_short


def test_over_its_limit_or_with_a_flushed_cache_a_trial_was_out_of_memory() -> None:
    assert failures.of_memory(3 * GIB, 2 * GIB, has_flushed=False) == Failure(kind="oom", message=ANY)
    assert failures.of_memory(2 * GIB, 2 * GIB, has_flushed=True) == Failure(kind="oom", message=ANY)
    assert failures.of_memory(2 * GIB, 2 * GIB, has_flushed=False) is None
    assert failures.of_memory(3 * GIB, None, has_flushed=False) is None


def test_a_signal_without_a_name_is_a_crash_too() -> None:
    found = failures.of_exit(-40, "in the first step", None, is_oom_killed=True)
    assert found.kind == "crash"
    assert "40" in found.message

"""What libraries say is a table; memory is short where a made card says so."""

from __future__ import annotations

import pytest
import torch

from autotune_amp.core.outcome import FailureKind
from autotune_amp.trial import worker
from autotune_amp.trial.memory import is_memory_short
from autotune_amp.trial.worker import classify

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
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"), "oom"),
        (RuntimeError("\"addmm_cuda\" not implemented for 'Half'"), "unsupported"),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "unsupported"),
        (RuntimeError("FlashAttention only supports Ampere GPUs or newer."), "unsupported"),
        (RuntimeError("FlashAttention only support fp16 and bf16 data type"), "unsupported"),
        (RuntimeError("No available kernel. Aborting execution."), "unsupported"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), "unsupported"),
        (RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "unsupported"),
        (OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376."), "unsupported"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "workload_error"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasLtMatmul`"), "workload_error"),
        (ValueError("No available kernel"), "workload_error"),
    ],
)
@pytest.mark.parametrize("is_short", [False, True])
def test_what_an_exception_amounts_to(
    error: Exception, kind: FailureKind, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "is_memory_short", lambda: is_short)
    assert classify(error).kind == kind


@pytest.mark.parametrize(
    "text",
    [
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "GET was unable to find an engine to execute this computation",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ],
)
def test_what_libraries_also_say_for_other_reasons_is_out_of_memory_only_where_memory_is_short(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_short, kind in ((True, "oom"), (False, "workload_error")):
        monkeypatch.setattr(worker, "is_memory_short", lambda is_short=is_short: is_short)
        assert classify(RuntimeError(text)).kind == kind


@pytest.mark.parametrize(
    ("free", "reserved", "fraction", "is_short"),
    [
        (30, 8, 1.0, False),
        (3, 8, 1.0, True),  # others hold the rest
        (30, 37, 1.0, True),  # at its peak
        (20, 19, 0.5, True),  # of what the trial may have
        (20, 17, 0.5, False),
    ],
)
def test_memory_is_short_where_less_than_a_tenth_of_what_one_may_have_is_left(
    free: int, reserved: int, fraction: float, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 40 * GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: reserved * GIB)
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda: fraction)
    assert is_memory_short() is is_short


def test_a_card_that_was_not_used_or_answers_nothing_more_is_not_short_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> tuple[int, int]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    for is_used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        assert not is_memory_short()

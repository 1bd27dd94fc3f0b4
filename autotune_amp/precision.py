"""precision -> autocast, TF32 flags, scaler: the same code in trials and in the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autotune_amp.config import LossScale, Precision
from autotune_amp.errors import InvalidRequestError

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """A fresh context with an explicit dtype: a reused or default one gives stale compiled graphs."""
    if precision == "fp8":
        raise InvalidRequestError("PyTorch's autocast has no fp8.", "Use bf16, fp16, tf32 or fp32.")
    dtype = _AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def set_flags(precision: Precision) -> None:
    """Set this process's TF32 flags to what `precision` means: on everywhere for tf32, off everywhere otherwise.

    The legacy setters keep both TF32 interfaces of torch consistent, so that user code may read either.
    """
    is_tf32 = precision == "tf32"
    backends: Any = torch.backends
    backends.fp32_precision = "none"  # the root of the newer interface: what it says would win over the legacy setters
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = is_tf32
    # oneDNN's own reduced modes on CPUs are no part of any candidate: strict fp32 means fp32.
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined] # set by torch at import
    torch.backends.mkldnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined] # set by torch at import
    torch.backends.mkldnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined] # set by torch at import


def grad_scaler(loss_scale: LossScale | None, device_type: str) -> torch.amp.GradScaler | None:
    """The scaler that fp16 needs, None for every other precision."""
    if loss_scale is None:
        return None
    return torch.amp.GradScaler(
        device_type,
        init_scale=loss_scale.init_scale,
        growth_factor=loss_scale.growth_factor,
        backoff_factor=loss_scale.backoff_factor,
        growth_interval=loss_scale.growth_interval,
    )


def as_found(torch_state: Mapping[str, Any], device_type: str) -> tuple[Precision, bool]:
    """What the caller's own autocast and TF32 flags amount to, and whether they equal that precision's strict flags.

    PyTorch's default on CUDA is such a mixture: TF32 in cuDNN's convolutions, off in matrix products.
    """
    flags = {
        name: "off" if torch_state[f"{name}.fp32_precision"] in ("none", "ieee") else "on"
        for name in (
            ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
            if device_type == "cuda"
            else ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
        )
    }
    all_off = "on" not in flags.values()
    dtype = torch_state.get(f"autocast.{device_type}")
    if dtype in ("bfloat16", "float16"):
        return ("bf16" if dtype == "bfloat16" else "fp16"), all_off
    if device_type == "cuda" and "off" not in flags.values():
        return "tf32", True
    return "fp32", all_off

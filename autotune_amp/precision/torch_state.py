"""The caller's global torch state: read in the caller, taken over by every trial, part of the fingerprint."""

from __future__ import annotations

import random
import sys
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import torch

# The leaves of the fp32_precision tree (torch >= 2.9). The parents only hand down to these, and writing the leaf
# that is read avoids the setter of torch.backends.mkldnn.fp32_precision, which writes another one (torch 2.13).
FP32_PRECISION_FLAGS = (
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
_BACKEND_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)
# The kernels that scaled_dot_product_attention may take.
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.bfloat16, torch.float16)}
_DTYPES["float32"] = torch.float32


def seed(number: int) -> None:
    """Seed every generator that a model's or a dataset's code may draw from."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def capture() -> dict[str, Any]:
    """The state as plain data; reading it touches no accelerator."""
    state: dict[str, Any] = {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "fp32_precision": _backends().fp32_precision,
        "float32_matmul_precision": _legacy_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    for flag in FP32_PRECISION_FLAGS:
        state[f"{flag}.fp32_precision"] = attrgetter(f"{flag}.fp32_precision")(torch.backends)
    for flag in _BACKEND_FLAGS:
        state[flag] = attrgetter(flag)(torch.backends)
    for kernel in _ATTENTION_KERNELS:
        state[f"cuda.{kernel}_sdp"] = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
    for device_type in ("cpu", "cuda", "xpu", "mps"):
        is_on = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if is_on else None
        state[f"autocast.{device_type}"] = str(dtype).removeprefix("torch.") if dtype else None
    return state


def apply(state: dict[str, Any]) -> None:
    """Make this process's state what `capture` read elsewhere; autocast is left to `as_found_autocast`."""
    torch.set_num_threads(state["num_threads"])
    if torch.get_num_interop_threads() != state["num_interop_threads"]:
        torch.set_num_interop_threads(state["num_interop_threads"])
    apply_fp32_flags(state)
    torch.use_deterministic_algorithms(state["deterministic_algorithms"], warn_only=state["deterministic_warn_only"])
    torch.set_default_dtype(_DTYPES[state["default_dtype"]])
    for flag in _BACKEND_FLAGS:
        owner, _, name = flag.rpartition(".")
        setattr(attrgetter(owner)(torch.backends), name, state[flag])
    for kernel in _ATTENTION_KERNELS:
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(state[f"cuda.{kernel}_sdp"])


def apply_fp32_flags(state: dict[str, Any]) -> None:
    """Of `apply` the flags that say how fp32 is computed, which `mode.set_flags` changes."""
    if _backends().fp32_precision != state["fp32_precision"]:
        _backends().fp32_precision = state["fp32_precision"]  # the root: setting it sets every leaf, so it comes first
    if state["float32_matmul_precision"] is not None:
        torch.set_float32_matmul_precision(state["float32_matmul_precision"])
    for flag in FP32_PRECISION_FLAGS:
        backend = attrgetter(flag)(torch.backends)
        if backend.fp32_precision != state[f"{flag}.fp32_precision"]:
            backend.fp32_precision = state[f"{flag}.fp32_precision"]


def _backends() -> Any:
    """torch.backends, whose root flag torch adds at import and does not type."""
    return torch.backends


def _legacy_matmul_precision() -> str | None:
    """The older interface's value; None where the newer one was used, since torch then refuses to read the older."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def as_found_autocast(state: dict[str, Any], device_type: str) -> ExitStack:
    """The caller's own autocast around its call to the search, as a context; empty where there was none."""
    stack = ExitStack()
    dtype = state.get(f"autocast.{device_type}")
    if dtype is not None:
        stack.enter_context(torch.autocast(device_type, dtype=_DTYPES[dtype]))
    return stack

"""torch's global state: autocast, flags and scaler of a precision, and the caller's state, which trials copy."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch

from autotune_amp.core.config import SCALER_ARGUMENTS, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.modes import MODES, mode_of_dtype

AUTOCAST_DTYPES = {
    mode.precision: getattr(torch, mode.autocast_dtype) for mode in MODES.values() if mode.autocast_dtype is not None
}
HALF_DTYPES = (torch.bfloat16, torch.float16)
CUDA_FLAGS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")  # names in torch.backends of the flags for TF32
_ONEDNN_FLAGS = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
# Flags in torch.backends whose `fp32_precision` kernels read (torch >= 2.9). Parents such as torch.backends.mkldnn only
# pass their value on to these, and the setter of torch.backends.mkldnn sets another flag (torch 2.13).
FP32_PRECISION_FLAGS = (*CUDA_FLAGS, *_ONEDNN_FLAGS)
_BACKEND_FLAGS = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "mkldnn.enabled",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
)
# Kernels that scaled_dot_product_attention may use.
_ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
_SDP_ORDER_AT_START = [1, 2, 0, 3, 4]  # flash first: the order of attention backends with which torch begins
_torchs_sdp_order: list[int] = []  # the order that torch itself sets, empty until it has been asked for
_BACKENDS: Any = torch.backends  # torch does not type torch.backends.fp32_precision


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds packed numbers of fewer bits, as bitsandbytes' 4-bit weights.

    Its dtype says nothing then: FSDP needs these weights stored as the others are, for example as bf16.
    """
    return getattr(tensor, "quant_state", None) is not None


def is_half(weight: torch.Tensor) -> bool:
    """Return whether a weight is kept in half precision: its dtype is one, and it is not packed."""
    return weight.dtype in HALF_DTYPES and not is_packed(weight)


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """Return a new autocast context, empty for precisions without autocast.

    A context that is reused, or has no explicit dtype, would make compiled code use outdated graphs.
    """
    dtype = AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def set_flags(precision: Precision) -> None:
    """Set this process's TF32 flags for `precision`: all on for tf32, all off otherwise.

    Uses torch's older setters, which set the flags of its newer interface too, so that user code may read either.
    """
    is_tf32 = MODES[precision].uses_tf32
    _BACKENDS.fp32_precision = "none"  # the newer interface's root flag would override the older setters,
    _BACKENDS.cudnn.fp32_precision = "none"  # and so would cuDNN's in convolutions and RNNs
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    _BACKENDS.cudnn.allow_tf32 = is_tf32
    # No precision uses the reduced modes of oneDNN for fp32 on CPUs.
    for operation in (_BACKENDS.mkldnn.matmul, _BACKENDS.mkldnn.conv, _BACKENDS.mkldnn.rnn):
        operation.fp32_precision = "ieee"


def grad_scaler(loss_scale: LossScale | None, device_type: str) -> torch.amp.GradScaler | None:
    """Return a GradScaler with the arguments in `loss_scale`; None if that is None."""
    return None if loss_scale is None else torch.amp.GradScaler(device_type, **scaler_arguments(loss_scale))


def scaler_arguments(loss_scale: LossScale | None) -> dict[str, Any]:
    """Return the arguments of torch's GradScaler for `loss_scale`; for None those of a disabled scaler."""
    if loss_scale is None:
        return {"enabled": False}
    return {name: getattr(loss_scale, name) for name in SCALER_ARGUMENTS}


def precision_of_state(
    torch_state: Mapping[str, Any], device_type: str, idle: Collection[str] = ()
) -> tuple[Precision, bool]:
    """Return the precision of the caller's autocast and TF32 flags, and whether `set_flags` would change no flag.

    The second value is False for PyTorch's default on CUDA, a mixture: TF32 is on in cuDNN's convolutions and RNNs, and
    off in matrix products. Flags in `idle` are ignored, since no operation uses them.
    """
    flags = {
        name: "off" if torch_state[f"{name}.fp32_precision"] in ("none", "ieee") else "on"
        for name in (CUDA_FLAGS if device_type == "cuda" else _ONEDNN_FLAGS)
        if name not in idle
    }
    are_all_off = "on" not in flags.values()
    autocast_mode = mode_of_dtype(torch_state.get(f"autocast.{device_type}"))
    if autocast_mode.uses_autocast:
        return autocast_mode.precision, are_all_off
    if device_type == "cuda" and flags and "off" not in flags.values():
        return "tf32", True
    return "fp32", are_all_off


def active_autocast_precision(device_type: str) -> Precision:
    """Return the precision of the active autocast; fp32 if none is active."""
    return mode_of_dtype(_autocast_dtype(device_type)).precision


# -- the caller's state ------------------------------------------------------------------------------------------------


def seed(number: int) -> None:
    """Seed the generators of Python, torch and, if it is imported, NumPy."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)


def save_generators() -> Callable[[], None]:
    """Save the state of Python's, NumPy's and torch's CPU generators; return a function that restores it."""
    python_state, torch_rng_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    numpy_state = None if numpy is None else numpy.get_state()

    def restore() -> None:
        random.setstate(python_state)
        torch.set_rng_state(torch_rng_state)
        if numpy is not None:
            numpy.set_state(numpy_state)

    return restore


def capture() -> dict[str, Any]:
    """Return torch's global state as plain data, without initializing an accelerator."""
    state: dict[str, Any] = {
        "num_threads": torch.get_num_threads(),
        "num_interop_threads": torch.get_num_interop_threads(),
        "fp32_precision": _BACKENDS.fp32_precision,
        "float32_matmul_precision": _legacy_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }
    for flag in FP32_PRECISION_FLAGS:
        state[f"{flag}.fp32_precision"] = attrgetter(f"{flag}.fp32_precision")(_BACKENDS)
    for flag in _BACKEND_FLAGS:
        state[flag] = attrgetter(flag)(_BACKENDS)
    for kernel in _ATTENTION_KERNELS:
        state[f"cuda.{kernel}_sdp"] = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")()
    state["sdp_priority_order"] = torch._C._get_sdp_priority_order()
    for device_type in ("cpu", "cuda", "xpu", "mps"):
        state[f"autocast.{device_type}"] = _autocast_dtype(device_type)
    return state


def apply(state: dict[str, Any]) -> None:
    """Set this process's state to one that `capture` returned, except autocast; see `caller_autocast`."""
    torch.set_num_threads(state["num_threads"])
    if torch.get_num_interop_threads() != state["num_interop_threads"]:
        torch.set_num_interop_threads(state["num_interop_threads"])
    apply_flags(state)


def apply_flags(state: dict[str, Any]) -> None:
    """Set this process's state to one that `capture` returned, except autocast and the numbers of threads."""
    apply_fp32_flags(state)
    torch.use_deterministic_algorithms(state["deterministic_algorithms"], warn_only=state["deterministic_warn_only"])
    torch.set_default_dtype(getattr(torch, state["default_dtype"]))
    for flag in _BACKEND_FLAGS:
        if attrgetter(flag)(_BACKENDS) != state[flag]:  # setting one may set another, such as that for split-k
            owner, _, name = flag.rpartition(".")
            setattr(attrgetter(owner)(_BACKENDS), name, state[flag])
    for kernel in _ATTENTION_KERNELS:
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(state[f"cuda.{kernel}_sdp"])
    order, accelerator = state["sdp_priority_order"], started_accelerator()
    if accelerator is not None:
        default_order = default_sdp_order(accelerator)  # torch would set it later, over the caller's
        if order == _SDP_ORDER_AT_START:  # the caller has made no call of attention yet
            order = default_order
    torch._C._set_sdp_priority_order(order)


def started_accelerator() -> torch.device | None:
    """Return the accelerator that this process has started, None if there is none or it is not started."""
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator)
    return accelerator if getattr(module, "is_initialized", lambda: False)() else None


def default_sdp_order(device: torch.device) -> list[int]:
    """Return torch's own order of preference of attention backends in this process, which uses `device`.

    torch sets it in the process's first call, over an order that was set before: on an H100 it prefers cuDNN. This
    makes such a call on `device`, so that an order that is set afterwards stays.
    """
    if not _torchs_sdp_order:
        query = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=device)
        is_math_allowed = torch.backends.cuda.math_sdp_enabled()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_math_sdp(True)  # the call raises if no allowed backend supports it
        try:
            torch._fused_sdp_choice(query, query, query)
        finally:
            torch.backends.cuda.enable_math_sdp(is_math_allowed)
        _torchs_sdp_order[:] = torch._C._get_sdp_priority_order()
    return list(_torchs_sdp_order)


def apply_fp32_flags(state: dict[str, Any]) -> None:
    """Set the flags for TF32 and other computation of fp32, which `set_flags` changes, as `apply` does."""
    if _BACKENDS.fp32_precision != state["fp32_precision"]:
        _BACKENDS.fp32_precision = state["fp32_precision"]  # setting the root sets every leaf, so it comes first
    if state["float32_matmul_precision"] is not None:
        torch.set_float32_matmul_precision(state["float32_matmul_precision"])
    for flag in FP32_PRECISION_FLAGS:
        backend = attrgetter(flag)(_BACKENDS)
        if backend.fp32_precision != state[f"{flag}.fp32_precision"]:
            backend.fp32_precision = state[f"{flag}.fp32_precision"]


def _legacy_matmul_precision() -> str | None:
    """Return `torch.get_float32_matmul_precision()`, None if it raises because the newer interface was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def autocast_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a captured state that tell the active autocast of each device type."""
    return {name: value for name, value in state.items() if name.startswith("autocast.")}


def caller_autocast(state: dict[str, Any], device_type: str) -> AbstractContextManager[object]:
    """Return the autocast context that was active when `state` was captured, empty if there was none."""
    dtype = state.get(f"autocast.{device_type}")
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=getattr(torch, dtype))


def _autocast_dtype(device_type: str) -> str | None:
    """Return the name of the dtype of the active autocast, None if there is none."""
    is_on = torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if is_on else None

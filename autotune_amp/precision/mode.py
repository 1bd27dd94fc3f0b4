"""precision -> autocast, TF32 flags, scaler, and per module: pins, overrides, observers. The same code in trials and in
the runtime."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import Precision
from autotune_amp.precision.forward_wrapper import Player, player_of, set_player
from autotune_amp.precision.modes import MODES, mode_of_dtype

_AUTOCAST_DTYPES = {
    mode.precision: getattr(torch, mode.autocast_dtype) for mode in MODES.values() if mode.autocast_dtype is not None
}
HALF_DTYPES = (torch.bfloat16, torch.float16)
CUDA_FLAGS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")  # of how fp32 is computed, below torch.backends


def autocast(precision: Precision, device_type: str) -> AbstractContextManager[object]:
    """A fresh context with an explicit dtype: a reused or default one gives stale compiled graphs."""
    _refuse_untrainable(precision)
    dtype = _AUTOCAST_DTYPES.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype=dtype)


def _refuse_untrainable(precision: Precision) -> None:
    if not MODES[precision].is_trainable:
        raise InvalidRequestError(f"PyTorch's autocast has no {precision}.", "Use bf16, fp16, tf32 or fp32.")


def set_flags(precision: Precision) -> None:
    """Set this process's TF32 flags to what `precision` means: on everywhere for tf32, off everywhere otherwise.

    The legacy setters keep both TF32 interfaces of torch consistent, so that user code may read either.
    """
    is_tf32 = MODES[precision].uses_tf32
    backends: Any = torch.backends
    backends.fp32_precision = "none"  # the root of the newer interface: what it says would win over the legacy setters
    torch.set_float32_matmul_precision("high" if is_tf32 else "highest")
    backends.cudnn.allow_tf32 = is_tf32
    # oneDNN's own reduced modes on CPUs are no part of any setting: strict fp32 means fp32.
    for operation in (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn):
        operation.fp32_precision = "ieee"


def grad_scaler(loss_scale: LossScale | None, device_type: str) -> torch.amp.GradScaler | None:
    """The scaler that fp16 needs, None for every other precision."""
    return None if loss_scale is None else torch.amp.GradScaler(device_type, **scaler_arguments(loss_scale))


def scaler_arguments(loss_scale: LossScale | None) -> dict[str, Any]:
    """What torch's GradScaler is made with; None gives one that is disabled."""
    if loss_scale is None:
        return {"enabled": False}
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    return {name: getattr(loss_scale, name) for name in names}


def as_found(torch_state: Mapping[str, Any], device_type: str, idle: Collection[str] = ()) -> tuple[Precision, bool]:
    """What the caller's own autocast and TF32 flags amount to, and whether they equal that precision's strict flags.

    PyTorch's default on CUDA is a mixture: TF32 in cuDNN's convolutions and RNNs, off in matrix products. Flags that
    are `idle`, since nothing that they concern runs, do not count.
    """
    flags = {
        name: "off" if torch_state[f"{name}.fp32_precision"] in ("none", "ieee") else "on"
        for name in (CUDA_FLAGS if device_type == "cuda" else ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn"))
        if name not in idle
    }
    all_off = "on" not in flags.values()
    around = mode_of_dtype(torch_state.get(f"autocast.{device_type}"))
    if around.uses_autocast:
        return around.precision, all_off
    if device_type == "cuda" and flags and "off" not in flags.values():
        return "tf32", True
    return "fp32", all_off


def ambient(device_type: str) -> Precision:
    """The precision that the autocast around here means; fp32 where none is on."""
    is_on = torch.is_autocast_enabled(device_type)
    dtype = str(torch.get_autocast_dtype(device_type)).removeprefix("torch.") if is_on else None
    return mode_of_dtype(dtype).precision


def is_cast(module: nn.Module) -> bool:
    """Whether autocast may run it in half precision: a leaf with a weight matrix. Lookups and norms stay in fp32."""
    if next(module.children(), None) is not None or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def has_half_weights(module: nn.Module) -> bool:
    """Whether any parameter in it is kept in half precision, so that fp32 is out of reach for it."""
    return any(weight.dtype in HALF_DTYPES for weight in module.parameters())


def can_be_pinned(module: nn.Module) -> bool:
    """Whether `pin_fp32` takes it."""
    return not isinstance(module, torch.jit.ScriptModule) and not has_half_weights(module)


def pin_fp32(module: nn.Module, device_type: str) -> None:
    """Run `module` in fp32 whatever autocast is on around it; inputs in half precision are cast up."""
    if has_half_weights(module):
        raise InvalidRequestError(
            f"A {type(module).__name__} whose weights are in half precision cannot be pinned in fp32.",
            "Pin a module with fp32 weights, or convert this one with module.float().",
        )
    _run_backward_as_eager_does()
    _change(module, pin=_Forced("fp32", device_type, casts_up=True))


def _run_backward_as_eager_does() -> None:
    """Have compiled backward passes run each operation in the precision of its forward, as eager ones do.

    They would run under the autocast that is on around the whole graph: a pinned module's gradients then go through
    fp16 after all (pytorch#179804).
    """
    import torch._functorch.config as settings

    if hasattr(settings, "backward_pass_autocast"):  # torch before it has no such setting, and no such fault
        settings.backward_pass_autocast = "off"  # noqa: S105 # a pass, not a password


def unpin(module: nn.Module) -> None:
    """Take the pin away; nothing where there is none."""
    _change(module, pin=None)


def is_pinned(module: nn.Module) -> bool:
    """Whether `pin_fp32` holds."""
    return _roles(module).pin is not None


def override(module: nn.Module, precision: Precision, device_type: str) -> None:
    """Run `module` under this precision's autocast, against code that wrote an autocast of its own around it.

    A pin on the same module or one inside it wins. A compiled model recompiles once for each new precision.
    """
    _refuse_untrainable(precision)
    _run_backward_as_eager_does()
    _change(module, override=_Forced(precision, device_type, casts_up=not has_half_weights(module)))


def clear_override(module: nn.Module) -> None:
    """Take the override away; nothing where there is none."""
    _change(module, override=None)


def override_of(module: nn.Module) -> Precision | None:
    """The precision given to `override`, None where there is none."""
    forced = _roles(module).override
    return None if forced is None else forced.precision


class Observer:
    """The largest magnitudes that modules put out, one slot for each module, and the switch that samples them.

    In eager mode a module writes only while `is_sampling` is on. A compiled graph always writes: looking at the switch
    would make two graphs of one. Slots are tensors of their own, so that modules of one class can share a graph.
    With `only_half` outputs in fp32, and the least number of the format, which masks are made of, do not count.
    """

    def __init__(self, num_slots: int, device: torch.device | str, *, only_half: bool = False) -> None:
        self.is_sampling = False
        self.only_half = only_half
        self.precisions: set[Precision] = set()  # that modules ran in while sampling, eager and not pinned ones
        self.maxima = tuple(torch.zeros((), dtype=torch.float32, device=device) for _ in range(num_slots))
        for maximum in self.maxima:
            torch._dynamo.mark_static_address(maximum)  # or CUDA graphs are off: they write to no input that may move

    def read(self) -> Tensor:
        """All slots in one new device tensor, without a synchronisation; NaN where a module put one out."""
        return torch.stack(self.maxima) if self.maxima else torch.empty(0)

    def reset(self) -> None:
        """Set every slot to 0."""
        torch._foreach_zero_(self.maxima)


def observe(module: nn.Module, observer: Observer, slot: int) -> None:
    """Raise `observer.maxima[slot]` to the largest magnitude in the first floating tensor that `module` puts out.

    Only while the module trains. Copies and pickles of the module are not observed.
    """
    _change(module, observed=_Observed(observer, observer.maxima[slot]))


def stop_observing(module: nn.Module) -> None:
    """Undo `observe`; nothing where it was not called."""
    _change(module, observed=None)


class _Forced(NamedTuple):
    precision: Precision
    device_type: str
    casts_up: bool  # whether inputs may be cast up for fp32: not where the weights themselves are in half precision


class _Observed(NamedTuple):
    observer: Observer
    maximum: Tensor


class _Roles(NamedTuple):
    pin: _Forced | None = None
    override: _Forced | None = None
    observed: _Observed | None = None

    def play(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        forced = self.pin or self.override
        output = forward(*args, **kwargs) if forced is None else _force(forced, forward, args, kwargs)
        if self.observed is not None and module.training:
            observer, maximum = self.observed
            if torch.compiler.is_compiling():
                _raise_maximum(maximum, output, only_half=observer.only_half)
            elif observer.is_sampling:
                _raise_maximum(maximum, output, only_half=observer.only_half)
                if forced is None:
                    observer.precisions.add(ambient(maximum.device.type))
        return output

    def for_copy(self) -> Player | None:
        kept = self._replace(observed=None)
        return kept if any(kept) else None


def _roles(module: nn.Module) -> _Roles:
    return cast("_Roles | None", player_of(module)) or _Roles()


def _change(module: nn.Module, **roles: Any) -> None:
    changed = _roles(module)._replace(**roles)
    set_player(module, changed if any(changed) else None)


def _force(forced: _Forced, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = _AUTOCAST_DTYPES.get(forced.precision)
    if dtype is None and forced.casts_up:
        args, kwargs = _cast_up(args), _cast_up(kwargs)
    # Without the cache: it may hold weights cast to the dtype of an autocast outside.
    with torch.autocast(forced.device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
        return forward(*args, **kwargs)


def _cast_up(inputs: Any) -> Any:
    """Half precision to fp32, in containers too. Other objects stay as they are: a copied key-value cache is lost."""
    return tree_map(_tensor_cast_up, inputs, is_leaf=lambda node: not isinstance(node, tuple | list | dict))


def _tensor_cast_up(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES else leaf


def _raise_maximum(maximum: Tensor, output: Any, *, only_half: bool) -> None:
    tensor = _first_floating(output)
    if tensor is None or tensor.numel() == 0:  # an expert that no token was sent to
        return
    if only_half and tensor.dtype not in HALF_DTYPES:
        return
    with torch.no_grad():
        if only_half:
            tensor = tensor.masked_fill(tensor <= torch.finfo(tensor.dtype).min, 0)
        low, high = torch.aminmax(tensor.detach())  # abs() would cost a copy of the whole output
        maximum.copy_(torch.maximum(maximum, torch.maximum(high, -low).to(maximum)))


def _first_floating(output: Any) -> Tensor | None:
    if type(output) is Tensor:  # subclasses may lack the operations, as DTensor's sharded ones do
        return output if output.is_floating_point() else None
    for part in output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ():
        if (tensor := _first_floating(part)) is not None:
            return tensor
    return None

"""Wrappers around a module's forward: pins, overrides and observers, set by the module's name.

A wrapper is installed by changing the class of the instance to a subclass. Hooks would not do: they break fullgraph
compilation, and those registered after compiling are silently ignored. A changed class is guarded on, so a compiled
model recompiles once, and returns to its old graph at no cost.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.torch_state import AUTOCAST_DTYPES, HALF_DTYPES, active_autocast_precision

# Parts of a module's path that wrappers insert into the user's names.
_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside the wrappers of torch.compile and DDP."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the user's own model by its own names; for a wrapper, the wrapped module."""
    return {_own_name(name): module for name, module in unwrap(model).named_modules()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the user's own model by its own names."""
    return {_own_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def _own_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of the user's own model with these names. Raises `InvalidRequestError` if one is missing."""
    modules = modules_by_name(model)
    for name in names:
        if name not in modules:
            raise InvalidRequestError(
                f"The model has no module named {name!r}.", "Take names from model.named_modules()."
            )
    return [modules[name] for name in names]


def is_inside(name: str, around: Sequence[str]) -> bool:
    """Return whether the module `name` is one of `around` or inside one of them; "" is the model itself."""
    return any(not outer or name == outer or name.startswith(outer + ".") for outer in around)


def is_cast_by_autocast(module: nn.Module) -> bool:
    """Return whether autocast may run the module in half precision: a leaf with a weight matrix.

    Embedding lookups and norms stay in fp32.
    """
    if next(module.children(), None) is not None or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def has_half_weights(module: nn.Module) -> bool:
    """Return whether any parameter in the module is kept in half precision, so that it cannot run in fp32."""
    return any(weight.dtype in HALF_DTYPES for weight in module.parameters())


def can_be_wrapped(module: nn.Module) -> bool:
    """Return whether the module can be wrapped: TorchScript modules cannot, since their forward is compiled."""
    return not isinstance(module, torch.jit.ScriptModule)


def can_be_pinned(module: nn.Module) -> bool:
    """Return whether `pin_fp32` accepts the module."""
    return can_be_wrapped(module) and not has_half_weights(module)


def pin_fp32(module: nn.Module, device_type: str) -> None:
    """Run `module` in fp32 under any autocast; inputs in half precision are cast to fp32.

    Raises `InvalidRequestError` for a module with weights in half precision.
    """
    if has_half_weights(module):
        raise InvalidRequestError(
            f"A {type(module).__name__} whose weights are in half precision cannot be pinned in fp32.",
            "Pin a module with fp32 weights, or convert this one with module.float().",
        )
    _run_backward_as_eager_does()
    _change(module, pin=_ForcedPrecision("fp32", device_type, casts_up=True))


def unpin(module: nn.Module) -> None:
    """Remove the pin of `module`, if there is one."""
    _change(module, pin=None)


def is_pinned(module: nn.Module) -> bool:
    """Return whether `module` is pinned by `pin_fp32`."""
    return wrappers_of(module).pin is not None


def override(module: nn.Module, precision: Precision, device_type: str) -> None:
    """Run `module` under this precision's autocast, even inside an autocast of the user's code.

    A pin on the same module or on one inside it takes precedence. A compiled model recompiles once per new precision.
    """
    _run_backward_as_eager_does()
    _change(module, override=_ForcedPrecision(precision, device_type, casts_up=not has_half_weights(module)))


def clear_override(module: nn.Module) -> None:
    """Remove the override of `module`, if there is one."""
    _change(module, override=None)


def _run_backward_as_eager_does() -> None:
    """Make compiled backward passes run each operation in the precision of its forward, as eager mode does.

    Otherwise they run under the autocast around the whole graph: a pinned module's gradients would then pass through
    fp16 (pytorch#179804).
    """
    import torch._functorch.config as settings

    if hasattr(settings, "backward_pass_autocast"):  # older versions of torch have neither the setting nor the fault
        settings.backward_pass_autocast = "off"  # noqa: S105 # a pass, not a password


class ForwardObserver:
    """Recorder of the largest magnitudes in module outputs, with one slot per module.

    In eager mode a module writes only while `is_sampling` is on. A compiled graph always writes: reading the switch
    would split it into two graphs. Each slot is a tensor of its own, so that modules of one class can share a graph.
    With `only_half` fp32 outputs are ignored, and so is the least number of the format, which masks contain; in eager
    mode the slots then stay unchanged: `extremes` collects the ends of each output, which needs fewer operators.
    """

    def __init__(self, num_slots: int, device: torch.device | str, *, only_half: bool = False) -> None:
        self.is_sampling = False
        self.only_half = only_half
        self.precisions: set[Precision] = set()  # of eager, unpinned modules while sampling
        self.extremes: list[tuple[Tensor, Tensor, Tensor]] = []  # for each output: slot, least and largest number
        self.maxima = tuple(torch.zeros((), dtype=torch.float32, device=device) for _ in range(num_slots))
        for maximum in self.maxima:
            torch._dynamo.mark_static_address(maximum)  # else CUDA graphs are off: they write to no input that may move

    def read(self) -> Tensor:
        """Return all slots in one new device tensor, without a synchronisation; NaN for an output with NaN."""
        return torch.stack(self.maxima) if self.maxima else torch.empty(0)

    def reset(self) -> None:
        """Set every slot to 0, and clear the extremes."""
        self.extremes.clear()
        if self.maxima:
            torch._foreach_zero_(self.maxima)


def observe(module: nn.Module, observer: ForwardObserver, slot: int) -> None:
    """Record the largest magnitude of `module`'s first floating-point output in `observer.maxima[slot]`.

    Only in training mode. Copies and pickles of the module are not observed.
    """
    _change(module, observed=_OutputObserver(observer, observer.maxima[slot]))


def stop_observing(module: nn.Module) -> None:
    """Stop observing `module`, if it is observed."""
    _change(module, observed=None)


@contextmanager
def watch_forward(model: nn.Module, device: torch.device) -> Iterator[Callable[[], dict[str, float]]]:
    """Record the largest magnitudes of half-precision module outputs in training mode.

    Yields a function that returns the largest magnitudes since its last call, by module: NaN if an output had one, 0 if
    the module did not run. The function synchronizes with the device. Of each module the first floating-point output
    counts. Compiled models are supported, unlike by hooks: they recompile once on entry, and only modules with a weight
    matrix are recorded, since compiled code keeps other numbers in fp32. TorchScript modules are left out.
    """
    is_compiled = any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )
    watched = {
        name: module
        for name, module in modules_by_name(model).items()
        if can_be_wrapped(module) and (is_cast_by_autocast(module) or not is_compiled)
    }
    observer = ForwardObserver(len(watched), device, only_half=True)
    observer.is_sampling = True

    def read() -> dict[str, float]:
        maxima = observer.read().tolist()
        places = {id(slot): place for place, slot in enumerate(observer.maxima)}
        if observer.extremes:
            slots, *ends = zip(*observer.extremes, strict=True)
            for slot, least, most in zip(slots, *(torch.stack(each).tolist() for each in ends), strict=True):
                place = places[id(slot)]
                maxima[place] = max(maxima[place], most, -least, key=_nan_last)
        observer.reset()
        return dict(zip(watched, maxima, strict=True))

    with ExitStack() as stack:
        for slot, module in enumerate(watched.values()):
            observe(module, observer, slot)
            stack.callback(stop_observing, module)
        yield read


# -- wrapping a forward ------------------------------------------------------------------------------------------------


class _ForcedPrecision(NamedTuple):
    precision: Precision
    device_type: str
    casts_up: bool  # whether inputs may be cast to fp32: not if the weights are in half precision

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = AUTOCAST_DTYPES.get(self.precision)
        if dtype is None and self.casts_up:
            args, kwargs = _cast_up(args), _cast_up(kwargs)
        # Without the cache: it may contain weights cast to the dtype of an outer autocast.
        with torch.autocast(self.device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return forward(*args, **kwargs)


class _OutputObserver(NamedTuple):
    observer: ForwardObserver
    maximum: Tensor

    def look_at(self, output: Any, *, is_forced: bool) -> None:
        is_compiling = torch.compiler.is_compiling()
        if is_compiling or self.observer.is_sampling:
            extremes = _extremes(output, only_half=self.observer.only_half)
            if extremes is not None and self.observer.only_half and not is_compiling:
                self.observer.extremes.append((self.maximum, *extremes))
            elif extremes is not None:
                _raise_maximum(self.maximum, *extremes)
        if not is_compiling and self.observer.is_sampling and not is_forced:
            self.observer.precisions.add(active_autocast_precision(self.maximum.device.type))


class ForwardWrappers(NamedTuple):
    """The wrappers of one module's forward."""

    pin: _ForcedPrecision | None = None
    override: _ForcedPrecision | None = None
    observed: _OutputObserver | None = None


def _run(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Without wrappers: other code, such as Accelerate, kept this forward after the last one was removed.
    wrappers = module.__dict__.get(_WRAPPERS) or ForwardWrappers()
    forced = wrappers.pin or wrappers.override
    output = forward(*args, **kwargs) if forced is None else forced.run(forward, args, kwargs)
    if wrappers.observed is not None and module.training:
        wrappers.observed.look_at(output, is_forced=forced is not None)
    return output


def _cast_up(inputs: Any) -> Any:
    """Cast half-precision tensors to fp32, in containers too. Other objects, as key-value caches, stay unchanged."""
    return tree_map(_tensor_cast_up, inputs, is_leaf=lambda node: not isinstance(node, tuple | list | dict))


def _tensor_cast_up(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES else leaf


@torch.no_grad()
def _extremes(output: Any, *, only_half: bool) -> tuple[Tensor, Tensor] | None:
    """Return the least and the largest number of the first floating-point tensor; None if there is none to observe."""
    tensor = _first_floating(output)
    if tensor is None or tensor.numel() == 0:  # an expert that received no token
        return None
    if only_half:
        if tensor.dtype not in HALF_DTYPES:
            return None
        tensor = tensor.masked_fill(tensor <= torch.finfo(tensor.dtype).min, 0)
    least, most = torch.aminmax(tensor.detach())  # abs() would cost a copy of the whole output
    return least, most


@torch.no_grad()
def _raise_maximum(maximum: Tensor, least: Tensor, most: Tensor) -> None:
    maximum.copy_(torch.maximum(maximum, torch.maximum(most, -least).to(maximum)))


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _first_floating(output: Any) -> Tensor | None:
    if type(output) is Tensor:  # subclasses may lack the operations, as DTensor does for sharded ones
        return output if output.is_floating_point() else None
    for part in output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ():
        if (tensor := _first_floating(part)) is not None:
            return tensor
    return None


# -- the patched class -------------------------------------------------------------------------------------------------

_WRAPPERS = "_autotune_amp_wrappers"  # a plain instance attribute, so that compiled graphs guard on it
_ORIGINAL = "_autotune_amp_original"  # attribute of a patched class: the class that it replaces


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class without wrappers."""
    kinds = type(module).__mro__
    return next((vars(kind)[_ORIGINAL] for kind in kinds if _ORIGINAL in vars(kind)), type(module))


def wrappers_of(module: nn.Module) -> ForwardWrappers:
    """Return the wrappers of `module`."""
    return _uncompiled(module).__dict__.get(_WRAPPERS) or ForwardWrappers()


def _change(module: nn.Module, **wrappers: Any) -> None:
    set_wrappers(module, wrappers_of(module)._replace(**wrappers))


def set_wrappers(module: nn.Module, wrappers: ForwardWrappers) -> None:
    """Set all wrappers of `module`'s forward. Without any, the original class is restored and nothing is left behind.

    Raises `InvalidRequestError` for a TorchScript module.
    """
    module = _uncompiled(module)
    state = module.__dict__
    if not any(wrappers):
        state.pop(_WRAPPERS, None)
        _restore_forward(state)
        # A subclass of ours that FSDP2's fully_shard made stays: without wrappers its forward is the original's.
        if (original := vars(type(module)).get(_ORIGINAL)) is not None:
            _set_class(module, original)
        return
    if not can_be_wrapped(module):
        raise InvalidRequestError(
            "A TorchScript module cannot be pinned, overridden or observed: its forward is compiled in.",
            "Give the model as it was before torch.jit.script or torch.jit.trace; torch.compile is supported.",
        )
    if own_class(module) is type(module):
        _set_class(module, _patched_class(type(module)))  # type: ignore[arg-type] # mypy takes a module's own hash for its class's
    if "forward" in state and not isinstance(state["forward"], _OwnForward):
        state["forward"] = _OwnForward(module, state["forward"])
    state[_WRAPPERS] = wrappers


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, so that the wrappers run inside the compiled graph."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def _restore_forward(state: dict[str, Any]) -> None:
    if isinstance(state.get("forward"), _OwnForward):
        state["forward"] = state["forward"].__wrapped__


@functools.cache
def _patched_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `original` whose forward runs the wrappers of its instance.

    `original` is its only base: an instance may change its class only to one with the same layout, which another base
    before it would change if `original` lists an ABC, `Generic[T]` or another base with empty ``__slots__`` first.
    """

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, original.forward, (self, *args), kwargs)

    def reduce_ex(self: nn.Module, protocol: SupportsIndex) -> Any:
        wrappers = _lasting(self)
        with _as_original(self, patched):
            reduced: Any = original.__reduce_ex__(self, protocol)
            build, arguments, *rest = reduced
            if rest and isinstance(rest[0], dict):
                rest[0] = dict(rest[0])
                if not any(wrappers):
                    _restore_forward(rest[0])
        return _rebuild, (build, arguments, wrappers), *rest

    def copied_by(name: str) -> Callable[..., Any]:
        own: Any = getattr(original, name)

        def copy(self: nn.Module, *args: Any) -> Any:
            with _as_original(self, patched):
                twin = own(self, *args)
            set_wrappers(twin, _lasting(self))
            return twin

        return copy

    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"forward": forward, "__reduce_ex__": reduce_ex, _ORIGINAL: original}
    body |= {name: copied_by(name) for name in ("__copy__", "__deepcopy__") if hasattr(original, name)}
    with _unheard_subclassing(original):
        # Bypass the metaclass's own __new__ and __init__, which may register classes, or need arguments.
        patched: type[nn.Module] = type.__new__(type(original), original.__name__, (original,), body)
    return patched


@contextmanager
def _unheard_subclassing(original: type[nn.Module]) -> Iterator[None]:
    """Suppress the class's own ``__init_subclass__``: a registry must not see the patched class."""
    name = "__init_subclass__"
    own = vars(original).get(name)
    type.__setattr__(original, name, classmethod(lambda _: None))
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(original, name)
        else:
            type.__setattr__(original, name, own)


def _lasting(module: nn.Module) -> ForwardWrappers:
    """Return the wrappers that a copy or a pickle of the module keeps: all but the observer."""
    return wrappers_of(module)._replace(observed=None)


@contextmanager
def _as_original(module: nn.Module, patched: type[nn.Module]) -> Iterator[None]:
    """Remove patched class and wrappers while the module is copied: the patched class cannot be imported by name."""
    kind, wrappers = type(module), module.__dict__.pop(_WRAPPERS, None)
    if kind is patched:
        _set_class(module, own_class(module))
    try:
        yield
    finally:
        _set_class(module, kind)
        if wrappers is not None:
            module.__dict__[_WRAPPERS] = wrappers


def _rebuild(build: Callable[..., nn.Module], arguments: tuple[Any, ...], wrappers: ForwardWrappers) -> nn.Module:
    module = build(*arguments)
    set_wrappers(module, wrappers)
    return module


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Assign ``__class__``, bypassing a ``__setattr__`` or a property of the module's own class."""
    descriptor: Any = vars(object)["__class__"]
    descriptor.__set__(module, kind)


class _OwnForward:
    """Wrapper for a forward set on the instance, as by Accelerate, which hides the forward of the class."""

    __wrapped__: Callable[..., Any]

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self.module, self.__wrapped__, args, kwargs)

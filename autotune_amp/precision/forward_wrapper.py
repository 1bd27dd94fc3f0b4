"""Wrappers around a module's forward: pins to fp32, precision overrides, and observers of the output.

A wrapper is installed by changing the class of the instance to a subclass. Hooks cannot be used: they break fullgraph
compilation, and those registered after compiling are silently ignored. torch.compile guards on the class, so a compiled
model recompiles once when it changes, and uses its old graph when the wrapper is removed.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.torch_state import AUTOCAST_DTYPES, HALF_DTYPES, active_autocast_precision, is_half

# Parts that torch.compile, FSDP and activation checkpointing insert into module names.
_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own model inside the wrappers of torch.compile and DDP."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of the user's own model by name, without the names that wrappers insert."""
    return {_without_wrapper_parts(name): module for name, module in unwrap(model).named_modules()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of the user's own model by name, without the names that wrappers insert."""
    return {_without_wrapper_parts(name): parameter for name, parameter in unwrap(model).named_parameters()}


def _without_wrapper_parts(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def names_matching(model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the modules of the user's own model that are in `names`, where ``*`` stands for any text.

    Raises `InvalidRequestError` if one of `names` matches no module.
    """
    modules = modules_by_name(model)
    found: dict[str, None] = {}
    for name in names:
        pattern = re.compile(re.escape(name).replace(r"\*", ".*"))
        matches = [other for other in modules if pattern.fullmatch(other)]
        if not matches:
            raise InvalidRequestError(
                f"The model has no module named {name!r}.",
                "Take names from model.named_modules(), or use *.",
            )
        found |= dict.fromkeys(matches)
    return tuple(found)


def modules_named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules of the user's own model that match `names`, as `names_matching` does."""
    modules = modules_by_name(model)
    return [modules[name] for name in names_matching(model, names)]


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
    """Return whether any parameter in the module is kept in half precision; such a module cannot run in fp32."""
    return any(map(is_half, module.parameters()))


def computes_in_half(module: nn.Module) -> bool:
    """Return whether the module computes in half precision outside of autocast too: its weights are kept in it, or
    quantized layers, as bitsandbytes', convert their inputs to it.
    """
    return bool(half_dtypes(module))


def half_dtypes(module: nn.Module) -> set[torch.dtype]:
    """Return the half precisions that the module computes in outside of autocast too, as in `computes_in_half`."""
    weights = {weight.dtype for weight in module.parameters() if is_half(weight)}
    return weights | {layer.compute_dtype for layer in layers_with_half_compute_dtype(module)}


def layers_with_half_compute_dtype(module: nn.Module) -> Iterator[Any]:
    """Yield the quantized layers whose attribute `compute_dtype`, to which they convert their inputs, is a half
    precision.
    """
    return (layer for layer in module.modules() if getattr(layer, "compute_dtype", None) in HALF_DTYPES)


def can_be_wrapped(module: nn.Module) -> bool:
    """Return whether the module can be wrapped; TorchScript modules cannot, since their forward is compiled."""
    return not isinstance(module, torch.jit.ScriptModule)


def can_be_pinned(module: nn.Module) -> bool:
    """Return whether `pin_fp32` accepts the module."""
    return can_be_wrapped(module) and not computes_in_half(module)


def pin_fp32(module: nn.Module, device_type: str) -> None:
    """Run `module` in fp32 from now on, under any autocast; half-precision inputs are cast to fp32.

    Raises `InvalidRequestError` for a module that `computes_in_half`.
    """
    if computes_in_half(module):
        raise InvalidRequestError(
            f"A {type(module).__name__} whose weights or compute_dtype are in half precision cannot be pinned in fp32.",
            "Pin a module with fp32 weights, or convert this one with module.float().",
        )
    _disable_autocast_of_compiled_backward()
    _update_wrappers(module, pin=_ForcedPrecision("fp32", device_type, casts_up=True))


def unpin(module: nn.Module) -> None:
    """Remove the pin of `module`, if there is one."""
    _update_wrappers(module, pin=None)


def is_pinned(module: nn.Module) -> bool:
    """Return whether `module` is pinned by `pin_fp32`."""
    return wrappers_of(module).pin is not None


def override(module: nn.Module, precision: Precision, device_type: str) -> None:
    """Run `module` under this precision's autocast from now on, even inside an autocast of the user's code.

    A forward in evaluation mode, without gradients and outside of any autocast stays in fp32: it is no part of a
    training.
    A pin on the same module or on a submodule takes precedence. A compiled model recompiles once per new precision.
    """
    _disable_autocast_of_compiled_backward()
    _update_wrappers(module, override=_ForcedPrecision(precision, device_type, casts_up=not has_half_weights(module)))


def clear_override(module: nn.Module) -> None:
    """Remove the override of `module`, if there is one."""
    _update_wrappers(module, override=None)


def _disable_autocast_of_compiled_backward() -> None:
    """Run each operation of a compiled backward pass in the precision of its forward, as in eager mode.

    By default torch.compile runs the whole backward pass under the autocast around the forward pass: the gradients of a
    pinned module would then be cast to fp16 (pytorch#179804).
    """
    import torch._functorch.config as settings

    if hasattr(settings, "backward_pass_autocast"):  # older versions of torch have neither the setting nor the problem
        settings.backward_pass_autocast = "off"  # noqa: S105 # a pass, not a password


class ForwardObserver:
    """Recorder of the largest magnitudes in module outputs, with one slot per module: the tensors in `maxima`.

    In eager mode magnitudes are recorded only while `is_sampling` is True. Compiled code always records: a check of
    the flag would be compiled into a second graph. Each slot is a separate tensor, so that modules of one class can
    share a graph. With `only_half` fp32 outputs are ignored, and so is the dtype's least number, which masks contain.
    In eager mode `extremes` then collects the least and largest number of each output, in place of the slots, since
    that needs fewer operators.
    """

    def __init__(self, num_slots: int, device: torch.device | str, *, only_half: bool = False) -> None:
        self.is_sampling = False
        self.only_half = only_half
        self.precisions: set[Precision] = set()  # of eager modules without a pin or override, while sampling
        self.extremes: list[tuple[Tensor, Tensor, Tensor]] = []  # for each output: slot, least and largest number
        self.maxima = tuple(torch.zeros((), dtype=torch.float32, device=device) for _ in range(num_slots))
        for maximum in self.maxima:
            # Otherwise CUDA graphs are disabled: they must not write to an input that may move.
            torch._dynamo.mark_static_address(maximum)

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

    It is recorded in training mode only. Copies and pickles of the module are not observed.
    """
    _update_wrappers(module, observed=_OutputObserver(observer, observer.maxima[slot]))


def stop_observing(module: nn.Module) -> None:
    """Stop observing `module`, if it is observed."""
    _update_wrappers(module, observed=None)


@contextmanager
def watch_forward(model: nn.Module, device: torch.device) -> Iterator[Callable[[], dict[str, float]]]:
    """Record the largest magnitudes of half-precision module outputs within the context, in training mode.

    Yields a function that returns the largest magnitudes since its last call, by module name: NaN if an output has a
    NaN, 0 if the module did not run. It synchronizes with the device. Only the first floating-point tensor of an output
    is recorded. A compiled model recompiles once on entry, and only its modules with a weight matrix are recorded,
    since compiled code keeps other numbers in fp32. TorchScript modules are left out.
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
        indices = {id(slot): index for index, slot in enumerate(observer.maxima)}
        if observer.extremes:
            slots, *extremes = zip(*observer.extremes, strict=True)
            for slot, least, most in zip(slots, *(torch.stack(values).tolist() for values in extremes), strict=True):
                index = indices[id(slot)]
                maxima[index] = max(maxima[index], most, -least, key=_nan_as_infinity)
        observer.reset()
        return dict(zip(watched, maxima, strict=True))

    with ExitStack() as stack:
        for slot, module in enumerate(watched.values()):
            observe(module, observer, slot)
            stack.callback(stop_observing, module)
        yield read


# -- wrapping a forward ------------------------------------------------------------------------------------------------


class _ForcedPrecision(NamedTuple):
    """Precision in which a forward runs, whatever autocast is active around it."""

    precision: Precision
    device_type: str
    casts_up: bool  # casts half-precision inputs to fp32 if the precision has no autocast

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `forward` in this precision and return its output."""
        dtype = AUTOCAST_DTYPES.get(self.precision)
        if dtype is None and self.casts_up:
            args, kwargs = _to_fp32(args), _to_fp32(kwargs)
        # Without the cache: it may contain weights cast to the dtype of an outer autocast.
        with torch.autocast(self.device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False):
            return forward(*args, **kwargs)


class _OutputObserver(NamedTuple):
    """Observer of one module's output, which writes to the slot `maximum`."""

    observer: ForwardObserver
    maximum: Tensor

    def observe_output(self, output: Any, *, is_forced: bool) -> None:
        """Record the output's largest magnitude, and the active precision unless a pin or override set it."""
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


def _run_forward(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `forward` with the wrappers of `module`."""
    # There may be no wrappers left: other code, such as Accelerate, may have kept this forward.
    wrappers = module.__dict__.get(_WRAPPERS) or ForwardWrappers()
    forced = wrappers.pin or wrappers.override
    if forced is wrappers.override and forced is not None and _is_plain_evaluation(module, forced.device_type):
        forced = forced._replace(precision="fp32")
    output = forward(*args, **kwargs) if forced is None else forced.run(forward, args, kwargs)
    if wrappers.observed is not None and module.training:
        wrappers.observed.observe_output(output, is_forced=forced is not None)
    return output


def _is_plain_evaluation(module: nn.Module, device_type: str) -> bool:
    """Return whether this forward is in evaluation mode, without gradients and outside of any autocast."""
    return not (module.training or torch.is_grad_enabled() or torch.is_autocast_enabled(device_type))


def _to_fp32(inputs: Any) -> Any:
    """Cast half-precision tensors to fp32, also in tuples, lists and dicts; other objects stay unchanged."""
    return tree_map(_tensor_to_fp32, inputs, is_leaf=lambda node: not isinstance(node, tuple | list | dict))


def _tensor_to_fp32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES else leaf


@torch.no_grad()
def _extremes(output: Any, *, only_half: bool) -> tuple[Tensor, Tensor] | None:
    """Return the least and the largest number of the first floating-point tensor; None if there is none to observe."""
    tensor = _first_floating_tensor(output)
    if tensor is None or tensor.numel() == 0:  # empty for an expert that received no token
        return None
    if only_half:
        if tensor.dtype not in HALF_DTYPES:
            return None
        tensor = tensor.masked_fill(tensor <= torch.finfo(tensor.dtype).min, 0)
    least, most = torch.aminmax(tensor.detach())  # abs() would copy the whole output
    return least, most


@torch.no_grad()
def _raise_maximum(maximum: Tensor, least: Tensor, most: Tensor) -> None:
    maximum.copy_(torch.maximum(maximum, torch.maximum(most, -least).to(maximum)))


def _nan_as_infinity(value: float) -> float:
    """Return a key for `max` by which NaN is the largest number."""
    return math.inf if math.isnan(value) else value


def _first_floating_tensor(output: Any) -> Tensor | None:
    if type(output) is Tensor:  # subclasses such as a sharded DTensor may lack operations
        return output if output.is_floating_point() else None
    for part in output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ():
        if (tensor := _first_floating_tensor(part)) is not None:
            return tensor
    return None


# -- the patched class -------------------------------------------------------------------------------------------------

_WRAPPERS = "_autotune_amp_wrappers"  # a plain instance attribute, so that compiled graphs guard on it
_ORIGINAL = "_autotune_amp_original"  # attribute of a patched class: the class that it replaces


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class before it was patched."""
    kinds = type(module).__mro__
    return next((vars(kind)[_ORIGINAL] for kind in kinds if _ORIGINAL in vars(kind)), type(module))


def wrappers_of(module: nn.Module) -> ForwardWrappers:
    """Return the wrappers of `module`."""
    return _uncompiled(module).__dict__.get(_WRAPPERS) or ForwardWrappers()


def _update_wrappers(module: nn.Module, **wrappers: Any) -> None:
    """Replace these fields of the module's `ForwardWrappers`."""
    set_wrappers(module, wrappers_of(module)._replace(**wrappers))


def set_wrappers(module: nn.Module, wrappers: ForwardWrappers) -> None:
    """Set all wrappers of `module`'s forward. Without any, the module's original class and attributes are restored.

    Raises `InvalidRequestError` for a TorchScript module.
    """
    module = _uncompiled(module)
    state = module.__dict__
    if not any(wrappers):
        state.pop(_WRAPPERS, None)
        _restore_forward(state)
        # A subclass that FSDP2's fully_shard made of the patched class stays: its forward is now the original.
        if (original := vars(type(module)).get(_ORIGINAL)) is not None:
            _set_class(module, original)
        return
    if not can_be_wrapped(module):
        raise InvalidRequestError(
            "A TorchScript module cannot be pinned, overridden or observed, since its forward is compiled.",
            "Pass the model as it was before torch.jit.script or torch.jit.trace, or use torch.compile.",
        )
    if own_class(module) is type(module):
        _set_class(module, _patched_class(type(module)))  # type: ignore[arg-type] # mypy confuses the hashes of instance and class
    if "forward" in state and not isinstance(state["forward"], _InstanceForward):
        state["forward"] = _InstanceForward(module, state["forward"])
    state[_WRAPPERS] = wrappers


def _uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile's wrapper, so that the wrappers run inside the compiled graph."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def _restore_forward(state: dict[str, Any]) -> None:
    if isinstance(state.get("forward"), _InstanceForward):
        state["forward"] = state["forward"].__wrapped__


@functools.cache
def _patched_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `original` whose forward runs the wrappers of its instance.

    `original` is its only base: an instance can change its class only to one with the same memory layout, which a
    mixin may not have.
    """

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run_forward(self, original.forward, (self, *args), kwargs)

    def reduce_ex(self: nn.Module, protocol: SupportsIndex) -> Any:
        wrappers = _copied_wrappers(self)
        with _temporarily_unpatched(self, patched):
            reduced: Any = original.__reduce_ex__(self, protocol)
            build, arguments, *rest = reduced
            if rest and isinstance(rest[0], dict):
                rest[0] = dict(rest[0])
                if not any(wrappers):
                    _restore_forward(rest[0])
        if not any(wrappers):  # loadable without autotune_amp
            if build.__name__.startswith("__newobj"):  # whose class pickle compares with that of self
                build, arguments = functools.partial(build, *arguments), ()
            return build, arguments, *rest
        return _rebuild_with_wrappers, (build, arguments, wrappers), *rest

    def copy_method(name: str) -> Callable[..., Any]:
        original_copy: Any = getattr(original, name)

        def copy(self: nn.Module, *args: Any) -> Any:
            with _temporarily_unpatched(self, patched):
                copied = original_copy(self, *args)
            set_wrappers(copied, _copied_wrappers(self))
            return copied

        return copy

    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {"forward": forward, "__reduce_ex__": reduce_ex, _ORIGINAL: original}
    body |= {name: copy_method(name) for name in ("__copy__", "__deepcopy__") if hasattr(original, name)}
    with _suppressed_init_subclass(original):
        # Bypass the metaclass's own __new__ and __init__, which may register classes, or need arguments.
        patched: type[nn.Module] = type.__new__(type(original), original.__name__, (original,), body)
    return patched


@contextmanager
def _suppressed_init_subclass(original: type[nn.Module]) -> Iterator[None]:
    """Suppress the class's ``__init_subclass__``, so that it does not register the patched class."""
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


def _copied_wrappers(module: nn.Module) -> ForwardWrappers:
    """Return the wrappers that a copy or a pickle of the module keeps: all but the observer."""
    return wrappers_of(module)._replace(observed=None)


@contextmanager
def _temporarily_unpatched(module: nn.Module, patched: type[nn.Module]) -> Iterator[None]:
    """Remove the patched class and the wrappers within the context, to copy or pickle the module.

    pickle could not import the patched class by name.
    """
    kind, wrappers = type(module), module.__dict__.pop(_WRAPPERS, None)
    if kind is patched:
        _set_class(module, own_class(module))
    try:
        yield
    finally:
        _set_class(module, kind)
        if wrappers is not None:
            module.__dict__[_WRAPPERS] = wrappers


def _rebuild_with_wrappers(
    build: Callable[..., nn.Module], arguments: tuple[Any, ...], wrappers: ForwardWrappers
) -> nn.Module:
    module = build(*arguments)
    set_wrappers(module, wrappers)
    return module


def _set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Assign ``__class__``, bypassing a ``__setattr__`` or a property of the module's own class."""
    descriptor: Any = vars(object)["__class__"]
    descriptor.__set__(module, kind)


class _InstanceForward:
    """Wrapper for a forward set on the instance, for example by Accelerate, which hides that of the class."""

    __wrapped__: Callable[..., Any]

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run_forward(self.module, self.__wrapped__, args, kwargs)

"""Attention: the backend of PyTorch that computes ``scaled_dot_product_attention``, such as FlashAttention or cuDNN."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from autotune_amp.dimensions.dimension import Choices, Variant

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining

# Names in messages of the backends that may be excluded, in the order in which a NaN is blamed on them: cuDNN's
# backward pass gave NaN in bf16 (trl#7181). The backend "math" computes every call, by separate operators.
FUSED_BACKENDS: Final = {"cudnn": "cuDNN", "flash": "FlashAttention", "efficient": "memory-efficient attention"}
_FUNCTION = "scaled_dot_product_attention"
# In PyTorch's own order of preference: a part of the names of torch.backends.cuda's functions, and the member of
# torch.nn.attention.SDPBackend.
_BACKENDS: Final = {
    "flash": ("flash", "FLASH_ATTENTION"),
    "efficient": ("mem_efficient", "EFFICIENT_ATTENTION"),
    "math": ("math", "MATH"),
    "cudnn": ("cudnn", "CUDNN_ATTENTION"),
}


class _Attention(Variant):
    """Backend of attention that the process prefers; "math" is used alone, since it computes every call.

    A trial allows only this backend, so that a call that it does not support fails with PyTorch's reason. In a
    training run the process uses the others for such calls.
    """

    name = "attention"
    left_out_of_fallbacks = True  # a backend may not support the fallback's precision

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        supported = super().choices(hardware, description, options)
        if options.variants is not None or hardware.identity.type != "cpu" or "flash" not in supported.values:
            return supported
        left_out = {**supported.left_out, "flash": "PyTorch prefers it on a CPU already; --try flash tries it"}
        return Choices(tuple(value for value in supported.values if value != "flash"), left_out)

    def apply(self, training: Any, value: str) -> None:
        """Prefer this backend and allow no other until the trial's end, so that the trial measures this backend."""
        super().apply(training, value)
        if value != self.default:
            switch_off(enabled_backends() - {value})

    def export(self, value: str, target: str) -> list[str] | None:
        if target != "torch" or value == self.default:
            return None
        names = ["math"] if value == "math" else _preferring(value)
        backends = ", ".join(f"SDPBackend.{_BACKENDS[name][1]}" for name in names)
        return [
            "from torch.nn.attention import SDPBackend, sdpa_kernel",
            f"attention = sdpa_kernel([{backends}], set_priority=True)",
            "attention.__enter__()  # for the whole process, as long as it has this name",
        ]

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - set for the process
        """Return whether the process allows no other backend."""
        return enabled_backends() == {value}

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        if live.device.type != "cuda" and value in ("efficient", "cudnn"):
            return "it needs CUDA"
        if not calls_attention(live):
            return f"no module of the model calls {_FUNCTION}"
        if value not in enabled_backends():
            flag = f"torch.backends.cuda.enable_{_BACKENDS[value][0]}_sdp(False)"
            return f"the process has switched this backend off, by {flag} or sdpa_kernel"
        return None

    def change(self, value: str, live: LiveTraining) -> Callable[[], None]:
        """Prefer this backend in the process; return a function that restores what the process preferred before."""
        import torch

        from autotune_amp.precision.torch_state import default_sdp_order, started_accelerator

        if (accelerator := started_accelerator()) is not None:
            is_on_accelerator = live.device.type == accelerator.type
            default_sdp_order(live.device if is_on_accelerator else accelerator)  # torch would set it later, over this
        before = backends_in_use()
        torch._C._set_sdp_priority_order([_number(name) for name in _preferring(value)])
        if value == "math":  # on CPUs PyTorch ignores the order
            switch_off(FUSED_BACKENDS)
        if backends_in_use() != before:
            forget_compiled_attention()

        def undo() -> None:
            changed = backends_in_use()
            before.set()
            if changed != before:
                forget_compiled_attention()

        return undo


class BackendsInUse(NamedTuple):
    """Attention backends of a process: PyTorch's numbers in order of preference, and the names of those allowed."""

    order: tuple[int, ...]
    allowed: frozenset[str]

    def set(self) -> None:
        """Make this process use these backends, except in code that is compiled already."""
        import torch

        torch._C._set_sdp_priority_order(list(self.order))
        for name in _BACKENDS:
            _switch(name, is_on=name in self.allowed)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use these backends in this context, except in code that is compiled already."""
        before = backends_in_use()
        self.set()
        try:
            yield
        finally:
            before.set()


def backends_in_use() -> BackendsInUse:
    """Return the attention backends that this process prefers and allows."""
    import torch

    return BackendsInUse(tuple(torch._C._get_sdp_priority_order()), frozenset(enabled_backends()))


def enabled_backends() -> set[str]:
    """Return the names of the attention backends that this process allows."""
    import torch

    return {name for name, (flag, _) in _BACKENDS.items() if getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()}


def switch_off(names: Collection[str]) -> set[str]:
    """Switch attention backends off in this process, and return those that it allowed before."""
    allowed = enabled_backends().intersection(names)
    for name in allowed:
        _switch(name, is_on=False)
    return allowed


def switch_on(names: Collection[str]) -> None:
    """Allow attention backends in this process."""
    for name in names:
        _switch(name, is_on=True)


def forget_compiled_attention() -> None:
    """Drop compiled code, which keeps the attention backend that it was compiled with."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled, and the import takes seconds
        sys.modules["torch"].compiler.reset()


def _switch(name: str, *, is_on: bool) -> None:
    import torch

    getattr(torch.backends.cuda, f"enable_{_BACKENDS[name][0]}_sdp")(is_on)


def _preferring(value: str) -> list[str]:
    return [value, *(name for name in _BACKENDS if name != value)]


def _number(name: str) -> int:
    from torch.nn.attention import SDPBackend

    return int(getattr(SDPBackend, _BACKENDS[name][1]))


# -- whether a model calls attention -----------------------------------------------------------------------------------


def calls_attention(live: LiveTraining) -> bool:
    """Return whether code of the model's modules, or what it names, calls ``scaled_dot_product_attention``.

    Models of Transformers look the function up in a table; their config tells. Those of Diffusers compute attention in
    an object of a class that is no module. A class of modules that code names does not count, since the model's own
    are searched anyway.
    """
    import torch
    from torch import nn

    if any(
        isinstance(module, nn.MultiheadAttention)
        or getattr(getattr(module, "config", None), "_attn_implementation", None) == "sdpa"
        for module in live.modules
    ):
        return True
    to_search: list[Any] = [type(module) for module in live.modules]
    seen: set[Any] = set()
    while to_search:
        value = to_search.pop()
        if value in seen or _is_of_library(value):
            continue
        seen.add(value)
        if isinstance(value, type):
            members = [inspect.unwrap(member) for member in vars(value).values() if callable(member)]
            to_search += [*value.__bases__, *(member for member in members if isinstance(member, FunctionType))]
            continue
        names = set(_names(value.__code__))
        found = _values_of(names, value.__globals__)
        if _FUNCTION in names or any(each is torch.nn.functional.scaled_dot_product_attention for each in found):
            return True
        to_search += [each for each in found if isinstance(each, FunctionType) or _is_plain_class(each)]
    return False


def _values_of(names: Collection[str], variables: dict[str, Any]) -> list[Any]:
    """Return the values of these names among a function's global variables, and in the modules among those values."""
    found = [variables[name] for name in names if name in variables]
    modules = [each for each in found if isinstance(each, ModuleType) and not each.__name__.startswith("torch")]
    return found + [vars(module)[name] for module in modules for name in names if name in vars(module)]


def _is_plain_class(value: Any) -> bool:
    from torch import nn

    return isinstance(value, type) and not issubclass(value, nn.Module)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_library(value: Any) -> bool:
    """Return whether a class or function is PyTorch's or Python's own."""
    package = str(getattr(value, "__module__", "")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names


ATTENTION = _Attention()

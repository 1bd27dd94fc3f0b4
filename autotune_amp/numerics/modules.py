"""The modules of the user's own model: their names inside wrappers, and the largest magnitude that each puts out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision.forward_wrapper import Observer, is_cast, observe, stop_observing

# Parts of a module's path that wrappers add to what the user wrote.
_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own model inside torch.compile's and DDP's wrappers."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of the user's own model under the names it gives them; of a wrapper and its inside, the inside."""
    return {_own_name(name): module for name, module in unwrap(model).named_modules()}


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of the user's own model under the names it gives them."""
    return {_own_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def _own_name(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def named(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of the user's own model with these names; raises `InvalidRequestError` where one is missing."""
    modules = modules_by_name(model)
    for name in names:
        if name not in modules:
            raise InvalidRequestError(
                f"The model has no module named {name!r}.", "Take names from model.named_modules()."
            )
    return [modules[name] for name in names]


def is_inside(name: str, around: Sequence[str]) -> bool:
    """Whether the module of this name is one of those `around` or inside one; "" is the model itself."""
    return any(not outer or name == outer or name.startswith(outer + ".") for outer in around)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was called on it or on a part of it."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


@dataclass(frozen=True)
class ForwardWatch:
    """The modules that `watch_forward` watches, and what notes their outputs."""

    names: list[str]
    observer: Observer

    def maxima(self) -> dict[str, float]:
        """By module, since the beginning or `reset`: NaN where it put one out, 0 where it did not run.

        Waits for the device.
        """
        return dict(zip(self.names, self.observer.read().tolist(), strict=True))

    def reset(self) -> None:
        """Begin again."""
        self.observer.reset()


@contextmanager
def watch_forward(model: nn.Module, device: torch.device) -> Iterator[ForwardWatch]:
    """Watch modules while they train: the first floating tensor that each puts out, where that is in half precision.

    Compiled models too, which hooks could not: one recompiles on the first entry, and of what holds no weight matrix
    nothing is watched there, since compiled code keeps such numbers in fp32. TorchScript's modules cannot be watched.
    """
    watched = {
        name: module
        for name, module in modules_by_name(model).items()
        if not isinstance(module, torch.jit.ScriptModule) and (is_cast(module) or not is_compiled(model))
    }
    observer = Observer(len(watched), device, only_half=True)
    observer.is_sampling = True
    with ExitStack() as stack:
        for slot, module in enumerate(watched.values()):
            observe(module, observer, slot)
            stack.callback(stop_observing, module)
        yield ForwardWatch(list(watched), observer)

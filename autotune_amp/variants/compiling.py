"""Compilation of a model by ``torch.compile``, and its mode."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autotune_amp.variants.subject import Trained

_OF_CUDA = {
    "reduce-overhead": "CUDA graphs are CUDA's",
    "max-autotune-no-cudagraphs": "off CUDA it tunes nothing that a training runs",
}


def has(value: str, trained: Trained) -> bool:  # noqa: ARG001 - a compiled model does not tell its mode
    """Return whether a model or a part of it is compiled already."""
    return any(map(_is_compiled, (*trained.models, *trained.modules)))


def why_not(value: str, trained: Trained) -> str | None:
    """Return the reason why the models cannot be compiled in this mode, None if they can."""
    if trained.device.type != "cuda" and value in _OF_CUDA:
        return _OF_CUDA[value]
    return _missing_compiler(trained.device.type)


def apply(value: str, trained: Trained) -> None:
    """Compile the calls of the models in place: objects and names do not change."""
    for model in trained.models:
        for module in _called(model):
            compile_in_place(module, mode=value)


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Run ``module.compile(**options)``, also for instances of torch's own classes such as a bare Sequential.

    Before torch 2.15 `compile` ignores these, since no frame of user code is entered (pytorch#150915).
    """
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call] # torch does not type it

    module._compiled_call_impl = torch.compile(call, **options)


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that training calls: the model, or the parts of a LightningModule with a ``training_step``."""
    if not hasattr(model, "training_step") and not isinstance(model, nn.ModuleList | nn.ModuleDict):
        yield model
        return
    for part in model.children():
        if next(part.parameters(), None) is not None:
            yield from _called(part)


def _is_compiled(module: nn.Module) -> bool:
    # The first is torch.compile's wrapper; checking its class would import the compiler.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _missing_compiler(device_type: str) -> str | None:
    if device_type != "cpu":
        has_triton = importlib.util.find_spec("triton") is not None
        return None if has_triton else "Triton is not installed, which compiles for this device"
    # As in torch._inductor.config.cpp.cxx, whose import takes two seconds.
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name)
    return None if found is not None else f"there is no C++ compiler {name}: install it, or name another in CXX"

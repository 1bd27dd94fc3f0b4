"""Whether ``torch.compile`` makes a model's passes, and in which mode."""

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


def has(value: str, trained: Trained) -> bool:  # noqa: ARG001 - of what was compiled nothing says in which mode
    """Whether a model or a part of it is compiled already."""
    return any(map(_is_compiled, (*trained.models, *trained.modules)))


def why_not(value: str, trained: Trained) -> str | None:
    """Why the models cannot be compiled so, None where they can."""
    if trained.device.type != "cuda" and value in _OF_CUDA:
        return _OF_CUDA[value]
    return _missing_compiler(trained.device.type)


def apply(value: str, trained: Trained) -> None:
    """Compile in place what calling a model does: it stays the object that it is, with the names that it has."""
    for model in trained.models:
        for module in _called(model):
            compile_in_place(module, mode=value)


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """``module.compile(**options)``, of torch's own classes too, as a bare Sequential is one: before torch 2.15 that
    compiles nothing of them, since no frame of the user's is entered (pytorch#150915).
    """
    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call] # torch does not type it

    module._compiled_call_impl = torch.compile(call, **options)


def _called(model: nn.Module) -> Iterator[nn.Module]:
    """What a training calls of a model: itself; of a LightningModule, whose ``training_step`` is called, its parts."""
    if not hasattr(model, "training_step") and not isinstance(model, nn.ModuleList | nn.ModuleDict):
        yield model
        return
    for part in model.children():
        if next(part.parameters(), None) is not None:
            yield from _called(part)


def _is_compiled(module: nn.Module) -> bool:
    # The first is torch.compile's wrapper; asking for its class would import the compiler.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _missing_compiler(device_type: str) -> str | None:
    if device_type != "cpu":
        has_triton = importlib.util.find_spec("triton") is not None
        return None if has_triton else "Triton is not installed, which compiles for this device"
    # As torch._inductor.config.cpp.cxx has it, whose import takes two seconds.
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name)
    return None if found is not None else f"there is no C++ compiler {name}: install it, or name another in CXX"

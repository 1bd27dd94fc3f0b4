"""Linear layers that multiply in fp8 under bf16 autocast, by torchao; their weights stay in fp32.

The first and the last Linear of a model stay in bf16, as in Accelerate, since rounding does most harm there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autotune_amp.precision.forward_wrapper import ForwardWrappers, own_class, set_wrappers, unwrap, wrappers_of

MULTIPLE = 16  # sizes of a matrix product in fp8 must be multiples of this (torch._scaled_mm)
# Attribute of a converted layer: the recipe, and the names of the attributes that torchao added.
_STATE = "_autotune_amp_fp8"


def is_converted(modules: Iterable[nn.Module], recipe: str) -> bool:
    """Return whether a layer already multiplies in fp8, by this recipe or converted by the user."""
    if "torchao.float8.float8_linear" not in sys.modules:
        return False
    from torchao.float8.float8_linear import Float8Linear

    layers = [module for module in modules if isinstance(module, Float8Linear)]
    return any(layer.__dict__.get(_STATE, (recipe,))[0] == recipe for layer in layers)


def has_convertible_linears(models: Sequence[nn.Module]) -> bool:
    """Return whether these models have a layer that can be, or is, converted to fp8."""
    return bool(_linears(models))


def set_recipe(models: Sequence[nn.Module], recipe: str | None, device: torch.device) -> None:
    """Make the Linear layers of these models multiply in fp8 by torchao's `recipe`, or make them plain again for None.

    The layers stay the same objects, with the same parameters. On a device without fp8 tensor cores torchao emulates
    them: that shows fp8's effect on training, but not its speed.
    """
    if recipe == recipe_of(models):
        return
    for module in _modules(models):
        if (state := module.__dict__.pop(_STATE, None)) is not None:
            for name in state[1:]:
                del module.__dict__[name]
            _change_class(module, nn.Linear)
    if recipe is None:
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from autotune_amp.precision.fp8_linear import Fp8Linear

    # Padding, since the number of samples, an inner dimension of the weight's gradient, may be no multiple of 16.
    emulates = not _has_fp8(device)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulates, pad_inner_dim=True)
    for linear in _linears(models):
        converted: Any = convert_to_float8_training(nn.Sequential(linear), config=config)[0]
        attributes = {name: value for name, value in converted.__dict__.items() if name not in linear.__dict__}
        _change_class(linear, Fp8Linear)
        linear.__dict__.update(attributes, **{_STATE: (recipe, *attributes)})


@contextmanager
def temporary_recipe(models: Sequence[nn.Module], recipe: str | None, device: torch.device) -> Iterator[None]:
    """Set `recipe` within the context, and the previous recipe at its end; see `set_recipe`."""
    before = recipe_of(models)
    set_recipe(models, recipe, device)
    try:
        yield
    finally:
        set_recipe(models, before, device)


def recipe_of(models: Sequence[nn.Module]) -> str | None:
    """Return the recipe that `set_recipe` applied, None without one."""
    return next((module.__dict__[_STATE][0] for module in _modules(models) if _STATE in module.__dict__), None)


def _modules(models: Iterable[nn.Module]) -> list[nn.Module]:
    return list(dict.fromkeys(module for model in models for module in unwrap(model).modules()))


def _linears(models: Sequence[nn.Module]) -> list[nn.Linear]:
    """Return the layers between each model's first and last Linear that can be, or are, converted."""
    own = ([module for module in _modules([model]) if isinstance(module, nn.Linear)] for model in models)
    return [linear for linears in own for linear in linears[1:-1] if _can_be_converted(linear)]


def _can_be_converted(linear: nn.Linear) -> bool:
    """Return whether a layer can be converted: a plain Linear with an fp32 weight whose sizes are multiples of 16.

    A subclass, a layer with a forward on the instance, or one with a computed (for example pruned) weight is not plain.
    """
    weight = linear._parameters.get("weight")
    is_plain = (own_class(linear) is nn.Linear and "forward" not in linear.__dict__) or _STATE in linear.__dict__
    if weight is None or not is_plain or weight.dtype != torch.float32:
        return False
    return not any(size % MULTIPLE for size in weight.shape)


def _change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Set the module's class, keeping its forward wrappers."""
    wrappers = wrappers_of(module)
    set_wrappers(module, ForwardWrappers())
    module.__class__ = kind
    set_wrappers(module, wrappers)


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)

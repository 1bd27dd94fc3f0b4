"""Dropout in two precisions: the same draws, or none."""

from __future__ import annotations

import random
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Where each takes its probability: position and name. Attention calls the others out of a mode's sight.
_PROBABILITIES: dict[Any, tuple[int, str]] = {
    **dict.fromkeys(
        (
            functional.dropout,
            functional.dropout1d,
            functional.dropout2d,
            functional.dropout3d,
            functional.alpha_dropout,
            functional.feature_alpha_dropout,
            torch.dropout,
            torch.alpha_dropout,
            torch.feature_dropout,
            torch.feature_alpha_dropout,
        ),
        (1, "p"),
    ),
    functional.scaled_dot_product_attention: (4, "dropout_p"),
    functional.multi_head_attention_forward: (10, "dropout_p"),
}
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)  # the probability is their only float
_NUM_DRAWS = 4099  # more than a vectorised kernel draws at once, and no multiple of it


class _WithoutDropout(TorchFunctionMode):
    """Dropout that drops nothing; a module's own attributes would not reach functional calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PROBABILITIES:
            position, name = _PROBABILITIES[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            else:
                kwargs[name] = 0.0
        elif func in _RECURRENT:
            args = tuple(0.0 if isinstance(argument, float) else argument for argument in args)
        return func(*args, **kwargs)


class Generators(NamedTuple):
    """Where the generators stand that a model's code may draw from; None for one that is not there."""

    python: Any
    numpy: Any
    cpu: torch.Tensor
    device: torch.Tensor | None


def generators(device: torch.device) -> Generators:
    """As they stand now: Python's, NumPy's where it is loaded, torch's on the CPU and on the device."""
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    on_device = None if device.type == "cpu" else _module(device).get_rng_state(*_index(device))
    return Generators(random.getstate(), numpy, torch.get_rng_state(), on_device)


def set_generators(device: torch.device, state: Generators) -> None:
    """Put them back to where `generators` found them."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        _module(device).set_rng_state(state.device, *_index(device))


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.index is None or device.type == "mps" else (device,)  # MPS has one device


def comparable_draws(device: torch.device) -> AbstractContextManager[object]:
    """What to run forward passes in, so that dropout does the same in every precision.

    Nothing on a CPU, where one seed gives the same draws in every dtype. Elsewhere that is found out, and dropout is
    taken out where it is not so: other draws alone make a cosine of 0.88 (measurement.md, Fidelity).
    """
    if device.type == "cpu" or _draws_are_equal(device):
        return nullcontext()
    return _WithoutDropout()


def without_dropout() -> AbstractContextManager[object]:
    """What to run forward passes in, and backward passes that compute them again, so that dropout drops nothing."""
    return _WithoutDropout()


def _draws_are_equal(device: torch.device) -> bool:
    indices = [] if device.index is None else [device.index]
    with torch.random.fork_rng(indices, device_type=device.type):
        return all(
            torch.equal(_kept(device, torch.float32), _kept(device, dtype)) for dtype in (torch.float16, torch.bfloat16)
        )


def _kept(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    dropped = functional.dropout(torch.ones(_NUM_DRAWS, device=device, dtype=dtype), 0.5)
    query = torch.ones(1, 1, 64, 64, device=device, dtype=dtype)
    # Attention to values that are the unit vectors is its own weights, with zeros where they were dropped.
    eye = torch.eye(64, device=device, dtype=dtype)[None, None]
    attended = functional.scaled_dot_product_attention(query, query, eye, dropout_p=0.5)
    return torch.cat([dropped.flatten() != 0, attended.flatten() != 0])

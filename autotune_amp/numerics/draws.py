"""Random draws of passes that are held against each other: the same ones, none, or those of some samples again."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.precision.mode import HALF_DTYPES

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
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(*_index(device))
    return Generators(random.getstate(), numpy, torch.get_rng_state(), on_device)


def set_generators(device: torch.device, state: Generators) -> None:
    """Put them back to where `generators` found them."""
    random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        torch.get_device_module(device).set_rng_state(state.device, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.index is None or device.type == "mps" else (device,)  # MPS has one device


def comparable_draws(device: torch.device) -> AbstractContextManager[object]:
    """What to run forward passes in, so that dropout does the same in every precision.

    Nothing on a CPU, where one seed gives the same draws in every dtype. Accelerators draw as many numbers at once as
    the dtype allows: there dropout is taken out, since other draws alone make a cosine of 0.88 (a T5, measured).
    """
    return nullcontext() if device.type == "cpu" else _WithoutDropout()


def without_dropout() -> AbstractContextManager[object]:
    """What to run forward passes in, and backward passes that compute them again, so that dropout drops nothing."""
    return _WithoutDropout()


# Whose numbers do not depend on how many are drawn beside them, in place or not. Not `randperm`: a permutation of the
# batch's samples has no part that permutes some of them.
_DRAWING = {
    f"aten::{name}"
    for name in (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson"),
        *("binomial", "uniform", "exponential", "random", "log_normal", "geometric", "cauchy", "_standard_gamma"),
    )
}
_MULTIPLYING = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution")}


class CannotReplayError(Exception):
    """A pass draws otherwise than the one whose draws it is to be given."""


class Samples(NamedTuple):
    """`num` samples from the `first` on, of `num_all` that the recorded pass had."""

    first: int
    num: int
    num_all: int


@dataclass(frozen=True)
class Draw:
    """What a random operation gave; `numbers` are its arguments that are plain numbers, such as bounds."""

    name: str
    numbers: tuple[float, ...]
    value: Tensor


class RecordedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Keeps in `draws` what random operations give while it is entered, in their order.

    `has_half` says whether any matrix product or convolution was computed in half precision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.has_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            name = func._schema.name
            self.has_half |= name in _MULTIPLYING and result.dtype in HALF_DTYPES
            if _draws(func):
                self.draws.append(Draw(name, _numbers(args), result.detach().clone()))
        return result


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Gives random operations what the same ones gave when `draws` were recorded, or the part of it of `samples`.

    While it is entered an operation that has nothing to match raises `CannotReplayError`, as does `finish` where draws
    are left.
    """

    def __init__(self, draws: Sequence[Draw], samples: Samples) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._samples = samples
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and _draws(func):
            result.copy_(self._match(func._schema.name, _numbers(args), result.shape))
        return result

    def finish(self) -> None:
        """The pass is over."""
        if self._next != len(self._draws):
            raise CannotReplayError(f"it draws {self._next} times where the whole batch drew {len(self._draws)} times")

    def _match(self, name: str, numbers: tuple[float, ...], shape: torch.Size) -> Tensor:
        draw = self._draws[self._next] if self._next < len(self._draws) else None
        self._next += 1
        if draw is None or (draw.name, draw.numbers) != (name, numbers):
            raise CannotReplayError(f"it draws by {name.removeprefix('aten::')} where the whole batch did not")
        part = _part(draw.value, shape, self._samples)
        if part is None:
            raise CannotReplayError(
                f"its draw of shape {tuple(shape)} is no part of the whole batch's {tuple(draw.value.shape)}"
            )
        return part


def _part(value: Tensor, shape: torch.Size, samples: Samples) -> Tensor | None:
    """The samples' part of `value` along the one dimension in which `shape` is shorter; all of it where none is."""
    if value.shape == shape:
        return value
    if value.dim() != len(shape):
        return None
    shorter = [index for index, size in enumerate(shape) if size != value.shape[index]]
    dim = shorter[0]
    per_sample, rest = divmod(value.shape[dim], samples.num_all)
    if len(shorter) > 1 or rest or shape[dim] != per_sample * samples.num:
        return None
    return value.narrow(dim, samples.first * per_sample, shape[dim])


def _draws(func: Any) -> bool:
    return func._schema.name.removesuffix("_") in _DRAWING


def _numbers(args: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(argument for argument in args if isinstance(argument, (int, float)))

"""S*, the largest loss scale at which a batch stays finite in fp16: by one backward pass, or by bisection."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune_amp.core.config import FP16_MAX
from autotune_amp.numerics.passes import Pass, Passes

LOG2_FP16_MAX = math.log2(FP16_MAX)
# A scale under 2^-24 is 0 in fp16, where the backward pass begins with it. Above 2^40 nobody needs to look: no fp16
# number times that stays finite, so that all gradients would have to be in fp32.
MIN_LOG2_SCALE, MAX_LOG2_SCALE = -24, 40
_LARGEST_FLUSHED = 2.0**-25  # what fp16 rounds to 0
_MARGIN = 2  # octaves under the expected answer where a pass is likely to be safe
# How far above a pass its answer may lie. Further up the gradients of that pass have partly been flushed, and what
# does not grow with the scale (weights, dropout's masks, 2x in the gradient of x²) may be the largest in it.
_REACH = 6


class SafeScale(NamedTuple):
    """`log2_scale` is log2 S*, None where the batch is non-finite at every scale; `last` the last pass made for it.

    `last` is at `last_scale`, which is a safe one unless there is none.
    """

    log2_scale: float | None
    last: Pass
    last_scale: float


class _LargestFp16(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not type it
    """The largest magnitude in any fp16 tensor that an operation of the backward pass writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not type it
        self._largest: dict[torch.device, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # With grad mode on it is a checkpoint that recomputes its forward pass.
        if not torch.is_grad_enabled() and _writes(func):
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.float16 and leaf.numel():
                    self._note(leaf._values() if leaf.is_sparse else leaf)
        return output

    def _note(self, values: Tensor) -> None:
        low, high = torch.aminmax(values)
        largest = torch.maximum(high, -low)
        known = self._largest.get(values.device)
        self._largest[values.device] = largest if known is None else torch.maximum(known, largest)

    def read(self) -> float:
        """inf where one held a NaN, 0 where nothing was written; waits for the device."""
        return max((math.inf if math.isnan(v) else v for v in map(float, self._largest.values())), default=0.0)


def _writes(operation: Any) -> bool:
    """Whether its outputs are new numbers: not where they are views or memory still to be filled."""
    return not operation.is_view and "empty" not in operation.overloadpacket.__name__


def by_backward(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """S* = 65504 S / A: A is the largest magnitude in any fp16 tensor written during a backward pass at scale S.

    Leaf gradients alone miss it by up to 17 octaves (loss-scaling.md, section 3). `start` is log2 S* as expected; one
    pass will do where that is about right. What cannot be answered so is bisected: a model where an overflow reaches
    no gradient, or where A is not in proportion to S. Inside a compiled graph tensors are not seen: bisect there.
    """
    exponent, lowest_unsafe = _within_limits(start - _MARGIN), math.inf
    while True:
        watch = _LargestFp16()
        done = passes.run(index, "fp16", scale=2.0**exponent, around_backward=watch)
        if done.is_finite:
            found = exponent + LOG2_FP16_MAX - math.log2(max(watch.read(), _LARGEST_FLUSHED))
            if math.isinf(found) or found >= lowest_unsafe:
                return by_bisection(passes, index, exponent)
            found = min(found, MAX_LOG2_SCALE)
            if found - exponent <= _REACH:
                return SafeScale(found, done, 2.0**exponent)
            exponent = _within_limits(found - _MARGIN)
        elif not math.isfinite(done.loss) or exponent == MIN_LOG2_SCALE:
            return SafeScale(None, done, 2.0**exponent)
        else:  # which says nothing of how far it is above the answer
            lowest_unsafe = exponent
            exponent = _within_limits(exponent - _REACH)


def by_bisection(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """The largest power of two at which loss and gradients are finite: S* to the octave, on the model as it is.

    `start` is log2 S* as expected; two passes will do where that is right.
    """
    safe, unsafe, stride = MIN_LOG2_SCALE - 1, MAX_LOG2_SCALE + 1, 1
    exponent = _within_limits(start)
    best: Pass | None = None
    while True:
        done = passes.run(index, "fp16", scale=2.0**exponent)
        if done.is_finite:
            safe, best = exponent, done
        else:  # the loss itself does not depend on the scale
            unsafe = exponent if math.isfinite(done.loss) else MIN_LOG2_SCALE
        if unsafe - safe <= 1:
            break
        if best is None:
            exponent = _within_limits(unsafe - stride)
        elif unsafe > MAX_LOG2_SCALE:
            exponent = _within_limits(safe + stride)
        else:
            exponent = (safe + unsafe) // 2
        stride *= 2
    return SafeScale(None, done, 2.0**exponent) if best is None else SafeScale(float(safe), best, 2.0**safe)


def largest_safe_scale(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """By one backward pass, or by bisection where none can be watched."""
    return (by_bisection if must_bisect(passes) else by_backward)(passes, index, start)


def must_bisect(passes: Passes) -> bool:
    """Whether backward passes cannot be watched: compiled graphs hide their tensors, and a loop runs its own."""
    return passes.subject.loop is not None or is_compiled(passes.model)


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile was called on it or on a part of it."""
    return any(
        isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _within_limits(log2_scale: float) -> int:
    return min(max(math.floor(log2_scale), MIN_LOG2_SCALE), MAX_LOG2_SCALE)

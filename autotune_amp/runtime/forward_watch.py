"""Watches the forward pass while losses are not finite: does it overflow, or is the batch bad? Knows no model."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from autotune_amp.numerics.locate import Health, health
from autotune_amp.precision.torch_state import HALF_DTYPES


class ForwardWatch:
    """Looks once in a burst of losses that are not finite whether the forward pass overflows.

    A hook on every module, which waits for the device, is there for the one update after the first such loss. `culprit`
    is the first module whose inputs and parameters are finite and whose output, in half precision, is not. Compiled
    code does not show its modules, and torch warns of such hooks: where any was compiled nothing is looked at.
    """

    def __init__(self) -> None:
        self.culprit: str | None = None
        self._has_looked = False
        self._remove: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks by itself."""
        return vars(ForwardWatch())

    def saw_bad_loss(self) -> str | None:
        """Note a loss that is not finite: after the first of a burst look, then return the `culprit` of the burst."""
        self._unhook()
        if not self._has_looked and not _is_anything_compiled():
            own = weakref.ref(self)

            def look(module: nn.Module, inputs: Any, output: Any) -> None:
                if (watch := own()) is not None:
                    watch._look(module, inputs, output)

            self._remove = weakref.finalize(self, register_module_forward_hook(look).remove)
        self._has_looked = True
        return self.culprit

    def end(self) -> None:
        """Forget the burst: it is over."""
        self._unhook()
        self._has_looked, self.culprit = False, None

    def _unhook(self) -> None:
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.culprit is not None or not torch.is_grad_enabled():
            return
        halves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES]
        if (
            any(_overflowed(module, half.detach()) for half in halves)
            and health([inputs, list(module.parameters())]) is Health.FINITE
        ):
            self.culprit = f"a module {type(module).__name__}"


def _is_anything_compiled() -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in getattr(frames, "cached_backends", {}).values())


def _overflowed(module: nn.Module, output: Tensor) -> bool:
    """Whether it holds what only an overflow gives: infinity; in torch's own layers NaN too, infinity less infinity.

    Negative infinity is what masks are made of, where a module is more than one layer.
    """
    if next(module.children(), None) is not None:
        return bool(output.isposinf().any())
    is_torchs = type(module).__module__.startswith("torch.")
    return bool((~output.isfinite()).any() if is_torchs else output.isinf().any())

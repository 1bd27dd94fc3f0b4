"""Counts floating-point operations. It imports torch alone: the agent and all other parts of the package use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

# Namespaces of operators whose matrix products torch's formulas cover; those of others are custom kernels.
_COVERED = ("aten", "prim", "prims", "c10d", "_c10d_functional", "_dtensor", "fsdp", "profiler", "streams")
_RECURRENT = ("mkldnn_rnn", "cudnn_rnn", "miopen_rnn")  # parts of the names of operators of aten without a formula


class FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Mode that adds up the floating-point operations of matrix products, convolutions and attention in `flops`.

    It uses the formulas of ``torch.utils.flop_counter``: a product of m x k by k x n counts 2mkn in any precision, and
    causal attention counts in full. Activations that are computed again for the backward pass count again.
    `uncounted` are the names of operators that may hold matrix products and have no formula.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.flops = 0
        self.uncounted: set[str] = set()
        self._formulas = dict(flop_counter.flop_registry)
        for name, formula in (("", flop_counter.sdpa_flop), ("_backward", flop_counter.sdpa_backward_flop)):
            operator = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu" + name, None)
            if operator is not None:
                self._formulas.setdefault(operator, formula)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count it. Operators that torch composes of others are counted by these."""
        kwargs = kwargs or {}
        packet = getattr(func, "_overloadpacket", func)  # a higher-order operator is its own
        if packet not in self._formulas and hasattr(func, "decompose") and func.namespace == "aten":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        formula = self._formulas.get(packet)
        try:
            if formula is not None:
                self.flops += int(formula(*args, **kwargs, out_val=result))
        except Exception:  # a formula that does not know this layout must not stop the user's training
            self.uncounted.add(str(packet))
        if formula is None and _may_multiply(func, result):
            self.uncounted.add(str(packet))
        return result

    @property
    def problem(self) -> str | None:
        """Return the reason why `flops` is not the number of all operations; None if it is."""
        if self.uncounted:
            return "torch has no formula for " + ", ".join(sorted(self.uncounted))
        return None if self.flops else "it ran no operation that torch's counter supports"

    @property
    def total(self) -> int | None:
        """Return the number of all operations; None if there is a `problem`."""
        return None if self.problem else self.flops


def _may_multiply(func: Any, result: Any) -> bool:
    """Whether an operator without a formula may hold matrix products: a recurrent layer, or a custom kernel that
    returns floating-point numbers and does not only convert them.
    """
    name, namespace = str(func), getattr(func, "namespace", "higher_order")
    if namespace in _COVERED:
        return any(part in name for part in _RECURRENT)
    results = result if isinstance(result, (tuple, list)) else [result]
    is_floating = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in results)
    return is_floating and "quantize" not in name


@contextmanager
def counting_flops() -> Iterator[FlopCounter]:
    """Count the floating-point operations of what runs in the context, which is not compiled."""
    counter = FlopCounter()
    with torch.compiler.set_stance("force_eager"), counter, warnings.catch_warnings():
        # A compiled module warns of the hooks of all modules.
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        yield counter


def count_flops(step: Callable[[], object]) -> tuple[int | None, str | None]:
    """Run `step` without compiling and return its floating-point operations; None with the reason if they cannot be
    counted.
    """
    try:
        with counting_flops() as counter:
            step()
    except Exception as error:  # not every model supports a dispatch mode
        return None, error_line(error)
    return counter.total, counter.problem


def error_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]

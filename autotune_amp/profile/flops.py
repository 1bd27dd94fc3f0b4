"""The floating-point operations of a step's matrix products, counted as it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_Shape: TypeAlias = torch.Size


def count_flops(step: Callable[[], object]) -> tuple[int | None, str | None]:
    """Run `step` without compiling and count; None with the reason where that cannot be.

    A product of m x k by k x n counts 2mkn; the numbers' format changes nothing. Recurrent layers run in kernels that
    torch's counter does not know.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_on_cpu())
    try:
        with torch.compiler.set_stance("force_eager"), counter, warnings.catch_warnings():
            # The counter's own hooks, which a module that torch.compile wrapped warns of and calls twice.
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            step()
    except Exception as error:  # the counter runs operations through a mode that not all models' bear
        return None, (str(error) or type(error).__name__).splitlines()[0]
    flops = counter.get_total_flops()
    return (flops, None) if flops else (None, "torch's FLOP counter knows none of its operations")


def _on_cpu() -> dict[Any, Any]:
    """The attention of CPUs, which torch's counter lacks (2.13)."""
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    return {operation: formula for operation, formula in formulas.items() if operation not in flop_registry}


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch does not type it


def _attention_backward(grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

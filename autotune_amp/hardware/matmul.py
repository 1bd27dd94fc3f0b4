"""The micro-benchmark: how many FLOP/s a square matrix product reaches in a precision.

It says what a capability flag is worth: some CPUs run fp16 a hundred times slower than fp32.
"""

from __future__ import annotations

from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autotune_amp.core.config import Precision

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST, _LARGEST = 128, 8192
_NUM_REPEATS = 3


def flops_per_second(device: str, precision: Precision, *, seconds: float, max_bytes: int) -> float:
    """The rate of the largest product of which four fit into `seconds`, by the median of at least three.

    Takes `seconds` and little more, however slow the precision, not counting the start of the device itself; uses at
    most about `max_bytes` and all of torch's threads. Raises `RuntimeError` where torch cannot multiply in this
    precision, `torch.OutOfMemoryError` where memory is short.
    """
    start = perf_counter()
    with torch.inference_mode(), _fp32_mode("tf32" if precision == "tf32" else "ieee"):
        size = _SMALLEST
        while True:
            product = _product(device, precision, size)
            _time(product, device)  # the first one chooses kernels and starts libraries
            times = [_time(product, device) for _ in range(_NUM_REPEATS - 1)]
            # Twice the size is eight times the arithmetic and four times the memory.
            if 8 * min(times) > seconds / 4 or size == _LARGEST or 4 * 3 * 4 * size**2 > max_bytes:
                break
            size *= 2
        while len(times) < _NUM_REPEATS or perf_counter() - start < seconds:
            times.append(_time(product, device))
    return 2 * size**3 / median(times)


def _product(device: str, precision: Precision, size: int) -> Callable[[], torch.Tensor]:
    """A product of two random matrices: zeros would take less power and run faster than real data."""
    left, right = torch.randn(2, size, size, device=device)
    if precision == "fp8":
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()  # the second must be column-major
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
    left, right = left.to(_DTYPES[precision]), right.to(_DTYPES[precision])
    return lambda: left @ right


def _time(product: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of one product, from an idle device to an idle device."""
    synchronize(torch.device(device))
    start = perf_counter()
    product()
    synchronize(torch.device(device))
    return perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def _fp32_mode(mode: str) -> Iterator[None]:
    """CUDA's and oneDNN's way to multiply fp32 matrices, put back afterwards."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined] # set at import
    modes = [backend.fp32_precision for backend in backends]
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined] # set at import
    try:
        yield
    finally:
        for backend, found in zip(backends, modes, strict=True):
            backend.fp32_precision = found

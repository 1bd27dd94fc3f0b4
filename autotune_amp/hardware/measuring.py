"""measure(): measures a device by running matrix products on it. `probe` runs this module in a child process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

import msgspec
import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Capability, Hardware
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.hardware.device import DEVICES, Device, ProbeReply, identify, load_device_module, parse_device_name


def measure(device: str, *, seconds: float = 1.0) -> Hardware:
    """Measure a device: its memory, and for each precision the level, the reason and the rate of matrix products.

    `auto` is the NVIDIA GPU that `identify` sees, otherwise the first usable of cuda, xpu, mps and cpu; notes give the
    reason for each device that this PyTorch was built for and that was passed over. `seconds` is shared by the
    micro-benchmarks of all precisions, not counting the start of the device. Raises `DeviceError` with the reason if
    the requested device cannot be used.
    """
    kind, name, passed_over = _resolve(device)
    notes = (*passed_over, *kind.notes(name))  # before the rest makes the device busy
    memory = kind.memory(name)
    precisions = {
        precision: _add_rate(
            capability, name, precision, seconds=seconds / len(PRECISIONS), max_bytes=memory.available // 10
        )
        for precision, capability in kind.capabilities(name).items()
    }
    return Hardware(
        device=name,
        identity=kind.identity(name),
        compute_capability=kind.compute_capability(name),
        memory=memory,
        precisions=precisions,
        notes=notes,
    )


def make_current(device: str) -> None:
    """Make `device` this thread's current device, which "cuda" and .cuda() refer to, if its index is above 0.

    For other devices this starts no driver, so that later code can still select the visible devices. Raises
    `DeviceError` if the device does not exist.
    """
    kind, index = parse_device_name(device)
    if index:
        torch.accelerator.set_device_index(load_device_module(kind).resolve(index))


def _resolve(device: str) -> tuple[Device, str, tuple[str, ...]]:
    """Return the device's module, the device string, and the reasons why `auto` passed over accelerators."""
    kind, index = parse_device_name(device)
    if kind == "auto" and identify(device).type == "cuda":
        kind = "cuda"  # raise if this GPU is unusable: another device's results would be saved under its identity
    if kind != "auto":
        return load_device_module(kind), load_device_module(kind).resolve(index), ()
    passed_over: list[str] = []
    *accelerators, last = map(load_device_module, DEVICES)
    for accelerator in accelerators:
        if accelerator.is_built():
            try:
                return accelerator, accelerator.resolve(None), tuple(passed_over)
            except DeviceError as error:
                passed_over.append(error.message)
    return last, last.resolve(None), tuple(passed_over)


def _add_rate(
    capability: Capability, device: str, precision: Precision, *, seconds: float, max_bytes: int
) -> Capability:
    """Return `capability` with the measured rate, or as unsupported if PyTorch cannot multiply in the precision."""
    if capability.level == "unsupported":
        return capability
    try:
        rate = flops_per_second(device, precision, seconds=seconds, max_bytes=max_bytes)
    except torch.OutOfMemoryError:
        return msgspec.structs.replace(
            capability, reason=f"{capability.reason} Its rate was not measured: too little memory is free."
        )
    except RuntimeError as error:
        return Capability(
            level="unsupported", reason=f"PyTorch cannot multiply matrices in it here: {str(error).splitlines()[0]}"
        )
    return msgspec.structs.replace(capability, matmul_flops_per_second=rate)


_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SMALLEST, _LARGEST = 128, 8192  # sizes of the matrices
_NUM_REPEATS = 3


def flops_per_second(device: str, precision: Precision, *, seconds: float, max_bytes: int) -> float:
    """Return the rate in FLOP/s of a square matrix product, the median of at least three runs.

    The size is the largest (a power of two, 128 to 8192) of which four products fit into `seconds`.

    Takes little more than `seconds`, however slow the precision, not counting the start of the device itself; uses at
    most about `max_bytes` and all of torch's threads. Raises `RuntimeError` if torch cannot multiply in this precision,
    `torch.OutOfMemoryError` if memory is short.
    """
    start = perf_counter()
    with torch.inference_mode(), _fp32_mode("tf32" if precision == "tf32" else "ieee"):
        size = _SMALLEST
        while True:
            product = _product(device, precision, size)
            _time_product(product, device)  # the first product chooses kernels and starts libraries
            times = [_time_product(product, device) for _ in range(_NUM_REPEATS - 1)]
            # Twice the size is eight times the arithmetic and four times the memory.
            if 8 * min(times) > seconds / 4 or size == _LARGEST or 4 * 3 * 4 * size**2 > max_bytes:
                break
            size *= 2
        while len(times) < _NUM_REPEATS or perf_counter() - start < seconds:
            times.append(_time_product(product, device))
    return 2 * size**3 / median(times)


def _product(device: str, precision: Precision, size: int) -> Callable[[], torch.Tensor]:
    """Return a function that multiplies two random matrices: zeros would draw less power and run faster."""
    left, right = torch.randn(2, size, size, device=device)
    if precision == "fp8":
        a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()  # the second must be column-major
        unit_scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, unit_scale, unit_scale, out_dtype=torch.bfloat16)
    left, right = left.to(_DTYPES[precision]), right.to(_DTYPES[precision])
    return lambda: left @ right


def _time_product(product: Callable[[], torch.Tensor], device: str) -> float:
    """Return the seconds of one product, with a synchronisation before and after it."""
    synchronize(torch.device(device))
    start = perf_counter()
    product()
    synchronize(torch.device(device))
    return perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish its work; does nothing for a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def _fp32_mode(mode: str) -> Iterator[None]:
    """Set how CUDA and oneDNN multiply fp32 matrices, and restore the former mode on exit."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined] # set at import
    modes = [backend.fp32_precision for backend in backends]
    torch.backends.cuda.matmul.fp32_precision = mode
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"  # type: ignore[attr-defined] # set at import
    try:
        yield
    finally:
        for backend, former_mode in zip(backends, modes, strict=True):
            backend.fp32_precision = former_mode


if __name__ == "__main__":
    try:
        answer = ProbeReply(hardware=measure(sys.argv[1]))
    except DeviceError as error:
        answer = ProbeReply(no_device=(error.message, error.next_step))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode(answer))

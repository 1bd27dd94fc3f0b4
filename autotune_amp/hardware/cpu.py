"""The CPU: its memory, and the support for each precision according to its instruction sets."""

from __future__ import annotations

import math
import platform
from collections.abc import Set as AbstractSet

import torch

from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host
from autotune_amp.hardware.device import emulated, identify, name_of_single_device, native, unsupported

# Instruction sets with arithmetic in the format, as cpuinfo (x86, ARM) and torch.cpu.get_capabilities() name them.
_BF16_ARITHMETIC = ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16")
_FP16_ARITHMETIC = ("amx_fp16", "avx512_fp16", "fp16_arith", "asimdhp")


def decide(flags: AbstractSet[str], *, has_onednn_fp16: bool) -> dict[Precision, Capability]:
    """Return the capability of every precision from the CPU's instruction sets and oneDNN's support of fp16; pure."""
    bf16 = [flag for flag in _BF16_ARITHMETIC if flag in flags]
    fp16 = [flag for flag in _FP16_ARITHMETIC if flag in flags] + ["oneDNN's fp16 kernels"] * has_onednn_fp16
    return {
        "fp32": native("Every CPU computes in fp32."),
        "tf32": unsupported("TF32 is a mode of NVIDIA's tensor cores; a CPU has none."),
        "bf16": native(f"The CPU multiplies in bf16: {', '.join(bf16)}.")
        if bf16
        else emulated(
            "The CPU has no bf16 arithmetic (avx512_bf16, amx_bf16): PyTorch converts to fp32 and back, "
            "which saves memory and may be slower than fp32."
        ),
        "fp16": native(f"The CPU computes in fp16: {', '.join(fp16)}.")
        if fp16
        else emulated(
            "The CPU has no fp16 arithmetic (avx512_fp16, amx_fp16): matrix products can be tens of times "
            "slower than in fp32."
        ),
        "fp8": unsupported("PyTorch does not train in fp8 on CPUs."),
    }


def is_built() -> bool:
    """Return True: every PyTorch supports the CPU."""
    return True


def resolve(index: int | None) -> str:
    """Return ``cpu``. Raises `DeviceError` for an index above 0."""
    return name_of_single_device("cpu", index)


def identity(device: str) -> DeviceIdentity:
    """Return the CPU's identity, the same as `identify` does."""
    return identify(device)


def compute_capability(_: str) -> str | None:
    """Return the machine's architecture, e.g. ``x86_64``."""
    return platform.machine() or None


def memory(_: str) -> DeviceMemory:
    """Return the machine's memory in bytes, within the container's limit."""
    container = host.container_memory()
    total, free = host.total_memory_bytes(), host.available_memory_bytes()
    return DeviceMemory(
        total=total,
        free=free,
        available=free if container is None else min(free, container.available),
        container_limit=None if container is None else container.limit,
    )


def capabilities(_: str) -> dict[Precision, Capability]:
    """Return the capability of every precision, from torch's list of instruction sets (2.11 on) or the system's."""
    if hasattr(torch.cpu, "get_capabilities"):
        flags = frozenset(name for name, value in torch.cpu.get_capabilities().items() if value is True)
    else:
        flags = host.cpu_flags()
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch gives no types
    return decide(flags, has_onednn_fp16=has_onednn and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()))


def notes(_: str) -> tuple[str, ...]:
    """Return a warning if torch runs more threads than this process may use CPUs."""
    return thread_notes(torch.get_num_threads(), host.num_cpus(), host.container_cpus())


def thread_notes(num_threads: int, num_cpus: int, allowed_cpus: float | None) -> tuple[str, ...]:
    """Return a warning if torch runs more threads than there are CPUs, otherwise an empty tuple.

    `allowed_cpus` is the CPU time that the container allows, in CPUs, None without a limit: torch ignores it.
    """
    most = math.ceil(min(num_cpus, allowed_cpus or num_cpus))
    if num_threads <= most:
        return ()
    return (f"PyTorch runs {num_threads} threads on {most} of the CPUs: they take turns. Set OMP_NUM_THREADS={most}.",)

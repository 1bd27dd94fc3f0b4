"""Measurements, a machine and profiled steps, made up."""

from __future__ import annotations

from typing import Any

from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import Measurement, Profiled, ProfiledStep, StepSplit

HARDWARE = Hardware(
    device="cpu",
    identity=DeviceIdentity(type="cpu", name="test", num_cpus=2, total_memory_bytes=1 << 30),
    memory=DeviceMemory(total=1 << 30, free=1 << 30, available=1000),
    precisions={
        "fp32": Capability(level="native", reason="Every CPU."),
        "bf16": Capability(level="native", reason="amx_bf16."),
        "fp16": Capability(level="emulated", reason="No fp16 arithmetic."),
    },
)


def measured(step_seconds: float, **changes: Any) -> Measurement:
    """A process of three steps; `data_seconds` of a step are the wait for its data."""
    fields: dict[str, Any] = {
        "step_seconds": step_seconds,
        "step_seconds_interval": (step_seconds, step_seconds),
        "samples_per_second": 8 / step_seconds,
        "data_seconds": 0.0,
        "peak_memory_bytes": 1000,
        "reserved_memory_bytes": 1000,
        "raw_step_seconds": (step_seconds,) * 3,
        "build_seconds": 0.1,
        "context_seconds": 0.0,
        "first_step_seconds": 2 * step_seconds,
    }
    return Measurement(**{**fields, **changes})


def host_step(step_seconds: float = 1.0, convolution_seconds: float = 0.0, **operation_seconds: float) -> ProfiledStep:
    return ProfiledStep(
        operation_seconds=operation_seconds, step_seconds=step_seconds, convolution_seconds=convolution_seconds
    )


def profiled(
    *steps: ProfiledStep, device_type: str = "cpu", flops_per_step: int | None = None, is_device: bool = False
) -> Profiled:
    split = StepSplit(steps=steps, largest={}, is_device=is_device)
    return Profiled(device_type=device_type, split=split, flops_per_step=flops_per_step)

"""Landscapes made up for tests: a rate for every cell, processes that differ by a percent."""

from __future__ import annotations

from collections.abc import Callable

from landscape import Cell, Header, Landscape, Process

from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting

SIZES = (4, 8, 16, 32, 64)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
SETUP_SECONDS, START_SECONDS = 0.25, 3.0
MATMUL_RATES: dict[Precision, float] = {"fp32": 1e11, "bf16": 3e11, "fp16": 1e9}

IDENTITY = DeviceIdentity(type="cpu", name="Made(R) Processor @ 2.50GHz", num_cpus=2, total_memory_bytes=2**34)
HEADER = Header(
    workload="made",
    hardware=Hardware(
        device="cpu",
        identity=IDENTITY,
        memory=DeviceMemory(total=2**34, free=2**34, available=2**34),
        precisions={
            p: Capability(level="native" if rate > 1e10 else "emulated", reason="made up", matmul_flops_per_second=rate)
            for p, rate in MATMUL_RATES.items()
        },
    ),
    description=Description(
        name="made",
        batch_size=16,
        num_samples=10_000,
        data="DataLoader, 0 workers",
        num_parameters=1000,
        num_trainable_parameters=1000,
        weights="fp32",
        as_found_precision="fp32",
        is_as_found_strict=True,
        build_seconds=0.01,
        context_seconds=0.0,
        num_workers=0,
    ),
    versions={},
    torch_state={},
    precisions=PRECISIONS,
    batch_sizes=SIZES,
    todays_batch_size=16,
    memory_limit_bytes=2**30,
    start_seconds=START_SECONDS,
    holds_heap=True,
    environment={"MALLOC_TRIM_THRESHOLD_": "1"},
    settings={},
)


def process(
    candidate: Setting,
    steps: tuple[float, ...],
    warmup: tuple[float, ...] | None = None,
    memory: int = 2**28,
    repetition: int = 0,
) -> Process:
    warmup = (2 * steps[0], steps[0], steps[0]) if warmup is None else warmup
    step_seconds = sum(steps) / len(steps)
    outcome = Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(steps), max(steps)),
        samples_per_second=candidate.batch_size / step_seconds,
        data_seconds=0.0,
        peak_memory_bytes=memory,
        reserved_memory_bytes=memory,
        raw_step_seconds=steps,
        build_seconds=0.01,
        context_seconds=0.0,
        first_step_seconds=warmup[0],
    )
    return of(candidate, outcome, SETUP_SECONDS + sum(warmup) + sum(steps), warmup, repetition)


def failed(candidate: Setting) -> Process:
    return of(candidate, Failure(kind="oom", message="made up"), 1.0, (), 0)


def of(
    candidate: Setting, outcome: Measurement | Failure, seconds: float, warmup: tuple[float, ...], repetition: int
) -> Process:
    return Process(
        cell=Cell("grid", "fork", repetition, candidate.precision, candidate.batch_size),
        outcome=outcome,
        seconds=seconds,
        deadline_seconds=60.0,
        warmup_step_seconds=warmup,
    )


def landscape(rate: Callable[[Setting], float], num_processes: int = 4) -> Landscape:
    """Every cell of the grid at `rate` samples per second, each process a percent off the one before it."""
    return Landscape(
        HEADER,
        [
            process(
                candidate,
                (candidate.batch_size / rate(candidate) * (1 + 0.01 * repetition),) * 20,
                memory=2**22 * candidate.batch_size,
                repetition=repetition,
            )
            for repetition in range(num_processes)
            for candidate in HEADER.grid
        ],
    )

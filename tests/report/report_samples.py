"""Made-up recommendations, records and hardware, for the tests of what people see."""

from __future__ import annotations

from typing import Any

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.evidence import BaselineEvidence, Evidence
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.core.recommendation import CandidateRow, Fingerprint, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting

MIB = 2**20


def hardware() -> Hardware:
    return Hardware(
        device="cpu",
        identity=DeviceIdentity(type="cpu", name="Some Processor", num_cpus=2, total_memory_bytes=8 << 30),
        memory=DeviceMemory(total=8 << 30, free=7 << 30, available=6 << 30, container_limit=5 << 30),
        precisions={
            "fp32": Capability(level="native", reason="any CPU has it", matmul_flops_per_second=121e9),
            "bf16": Capability(level="native", reason="amx_bf16", matmul_flops_per_second=1.31e12),
            "fp16": Capability(level="emulated", reason="no avx512_fp16 [here]"),
            "fp8": Capability(level="unsupported", reason="no kernels"),
        },
        notes=("another process holds 3 GiB",),
    )


def row(precision: Any, batch_size: int, samples_per_second: float | None, **changes: Any) -> CandidateRow:
    values: dict[str, Any] = {
        "precision": precision,
        "batch_size": batch_size,
        "accumulation_steps": 1,
        "as_found": False,
        "status": "measured" if samples_per_second else "failed",
        "samples_per_second": samples_per_second,
        "step_seconds": batch_size / samples_per_second if samples_per_second else None,
        "peak_memory_bytes": 612 * MIB if samples_per_second else None,
        "reason": None,
    }
    return CandidateRow(**(values | changes))


def evidence(**changes: Any) -> Evidence:
    values: dict[str, Any] = {
        "samples_per_second": 412.3,
        "samples_per_second_interval": (398.0, 426.0),
        "step_seconds": 0.155,
        "peak_memory_bytes": 702 * MIB,
        "baseline": BaselineEvidence(
            config=AmpConfig(precision="fp32", batch_size=32),
            samples_per_second=307.1,
            samples_per_second_interval=(300.0, 312.0),
            step_seconds=0.104,
            peak_memory_bytes=612 * MIB,
        ),
        "speedup": 1.343,
        "speedup_interval": (1.28, 1.41),
        "num_processes": 4,
        "is_confirmed": True,
        "data_share": 0.0,
    }
    return Evidence(**(values | changes))


def recommendation(**changes: Any) -> Recommendation:
    values: dict[str, Any] = {
        "config": AmpConfig(precision="bf16", batch_size=64),
        "evidence": evidence(),
        "reason": "bf16 at batch 64 is the smallest batch on the plateau.",
        "warnings": (),
        "excluded": (),
        "candidates": (row("fp32", 32, 307.1), row("bf16", 64, 412.3)),
        "search": SearchSummary(study="quiet-otter", num_trials=17, num_failures=2, seconds=84.2),
        "hardware": hardware(),
        "versions": {},
        "fingerprint": Fingerprint(digest="", parts={}),
    }
    return Recommendation(**(values | changes))


def measurement(**changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "step_seconds": 0.0776,
        "step_seconds_interval": (0.077, 0.079),
        "samples_per_second": 412.3,
        "data_seconds": 0.0,
        "peak_memory_bytes": 612 * MIB,
        "reserved_memory_bytes": 612 * MIB,
        "raw_step_seconds": (0.0776,),
        "build_seconds": 0.1,
        "context_seconds": 0.0,
        "first_step_seconds": 0.2,
    }
    return Measurement(**(values | changes))


def record(outcome: Measurement | Failure, number: int = 0, precision: Any = "fp32", **changes: Any) -> Record:
    values: dict[str, Any] = {
        "search_id": "s",
        "number": number,
        "candidate": Setting(precision=precision, batch_size=32),
        "purpose": "search",
        "outcome": outcome,
        "seconds": 3.1,
    }
    return Record(**(values | changes))

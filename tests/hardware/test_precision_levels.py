"""The decision which precision a device has is pure in every backend: tables, no devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.hardware import cpu, cuda, mps, xpu

if TYPE_CHECKING:
    from autotune_amp.core.hardware import Capability, Level
    from autotune_amp.core.precisions import Precision

N: Level = "native"
E: Level = "emulated"
U: Level = "unsupported"


def levels(capabilities: dict[Precision, Capability]) -> tuple[Level, ...]:
    assert all(capability.reason for capability in capabilities.values())
    return tuple(capabilities[precision].level for precision in PRECISIONS)


@pytest.mark.parametrize(
    ("compute_capability", "name", "hip", "expected"),  # fp32 tf32 bf16 fp16 fp8
    [
        ((5, 2), "GTX TITAN X", None, (N, U, E, E, U)),
        ((6, 1), "NVIDIA GeForce GTX 1080 Ti", None, (N, U, E, N, U)),
        ((7, 0), "Tesla V100-SXM2-16GB", None, (N, U, E, N, U)),
        ((7, 5), "Tesla T4", None, (N, U, E, N, U)),
        ((7, 5), "NVIDIA GeForce GTX 1660 Ti", None, (N, U, E, U, U)),
        ((8, 0), "NVIDIA A100", None, (N, N, N, N, U)),
        ((8, 9), "NVIDIA L4", None, (N, N, N, N, N)),
        ((12, 0), "NVIDIA GeForce RTX 5090", None, (N, N, N, N, N)),
        ((9, 4), "AMD Instinct MI300X", "6.4", (N, N, N, N, U)),
        ((6, 0), "AMD without TF32", "6.4", (N, U, N, N, U)),
    ],
)
def test_cuda_levels(
    compute_capability: tuple[int, int], name: str, hip: str | None, expected: tuple[Level, ...]
) -> None:
    is_ampere = compute_capability >= (8, 0)
    found = cuda.decide(compute_capability, name, hip, is_bf16_native=is_ampere, is_tf32_supported=is_ampere)
    assert levels(found) == expected


@pytest.mark.parametrize(
    ("flags", "has_onednn_fp16", "expected"),
    [
        (set(), False, (N, U, E, E, U)),
        ({"avx512_bf16"}, False, (N, U, N, E, U)),
        ({"amx_bf16", "avx512_fp16"}, False, (N, U, N, N, U)),
        ({"amx_fp16"}, False, (N, U, E, N, U)),
        (set(), True, (N, U, E, N, U)),
        ({"bf16", "asimdhp"}, False, (N, U, N, N, U)),
    ],
)
def test_cpu_levels(flags: set[str], has_onednn_fp16: bool, expected: tuple[Level, ...]) -> None:
    assert levels(cpu.decide(flags, has_onednn_fp16=has_onednn_fp16)) == expected


@pytest.mark.parametrize(
    ("num_threads", "num_cpus", "allowed_cpus", "words"),
    [
        (8, 8, None, ""),
        (9, 8, None, "OMP_NUM_THREADS=8"),
        (64, 64, 2.0, "OMP_NUM_THREADS=2"),
        (2, 64, 0.5, "OMP_NUM_THREADS=1"),
    ],
)
def test_thread_notes(num_threads: int, num_cpus: int, allowed_cpus: float | None, words: str) -> None:
    notes = cpu.thread_notes(num_threads, num_cpus, allowed_cpus)
    assert len(notes) == bool(words)
    assert all(words in note for note in notes)


@pytest.mark.parametrize(("is_macos_14", "bf16"), [(True, N), (False, U)])
def test_mps_levels(is_macos_14: bool, bf16: Level) -> None:
    assert levels(mps.decide(is_macos_14=is_macos_14)) == (N, U, bf16, N, U)


@pytest.mark.parametrize(
    ("has_fp16", "has_bf16", "can_hold_bf16", "expected"),
    [
        (True, True, True, (N, U, N, N, U)),
        (True, False, True, (N, U, E, N, U)),
        (False, False, False, (N, U, U, U, U)),
    ],
)
def test_xpu_levels(has_fp16: bool, has_bf16: bool, can_hold_bf16: bool, expected: tuple[Level, ...]) -> None:
    assert levels(xpu.decide(has_fp16=has_fp16, has_bf16=has_bf16, can_hold_bf16=can_hold_bf16)) == expected


def test_older_torch_reads_the_flags_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    monkeypatch.setattr("autotune_amp.hardware.host.cpu_flags", lambda: frozenset({"amx_bf16"}))
    assert "amx_bf16" in cpu.capabilities("cpu")["bf16"].reason

"""A study as a search on an accelerator leaves it: fp16 calibrated and chosen, out of memory, cut, pinned."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
from report_samples import MIB, evidence, hardware, measurement, recommendation, row

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.outcome import Accumulation, Calibration, Failure, Fidelity, GradientDamage, Record
from autotune_amp.core.recommendation import Exclusion, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting

HOSTILE = '</script><script>document.title = "taken over"</script><img src=http://example.com/x.png onerror=alert(1)>'
LOSS_SCALE = LossScale(init_scale=2.0**12, growth_interval=200)
CALIBRATION = Calibration(
    batch_size=64,
    log2_scales=tuple(13 + 2 * math.sin(step) for step in range(12)),
    gradient_histogram=tuple((octave, 1000 - 4 * (octave + 15) ** 2) for octave in range(-30, 0)),
    init_scale=2.0**10,
    forward_max=812.0,
)


def _damage(name: str, noise_ratio: float) -> GradientDamage:
    return GradientDamage(
        name=name,
        noise_ratio=noise_ratio,
        common_error=0.01,
        common_error_interval=(0.0, 0.02),
        cosine=0.99,
        norm_ratio=1.01,
        flushed_share=0.001,
    )


def _fidelity(precision: Any, noise_ratio: float, **changes: Any) -> Fidelity:
    return Fidelity(
        precision=precision,
        batch_size=16,
        verdict="faithful",
        reason=f"{precision} is faithful.",
        next_step="Train.",
        noise_ratio=noise_ratio,
        gradient_cosine=0.9999,
        modules=(
            _damage("", 0.5 * noise_ratio),
            _damage(HOSTILE, 2.5 * noise_ratio),
            *(_damage(f"encoder.block.{block}.layer.1.wo", block * noise_ratio) for block in range(3)),
        ),
        **changes,
    )


FIDELITY = (_fidelity("bf16", 0.04), _fidelity("fp16", 0.006, gradient_histogram=((-20, 5), (-19, 7))))


def records() -> list[Record]:
    found: list[Record] = []

    def add(candidate: Setting, outcome: Any, purpose: Any = "search", seconds: float = 3.0) -> None:
        found.append(
            Record(
                search_id="made-1",
                number=len(found) + 1,
                candidate=candidate,
                purpose=purpose,
                outcome=outcome,
                seconds=seconds,
                loss_scale=LOSS_SCALE if candidate.precision == "fp16" else None,
            )
        )

    def run(candidate: Setting, samples_per_second: float, purpose: Any = "search", **changes: Any) -> None:
        step = candidate.effective_batch_size / samples_per_second
        memory = int((300 + 11.0 * candidate.batch_size * (2 if candidate.precision == "fp32" else 1)) * MIB)
        values = {"samples_per_second": samples_per_second, "step_seconds": step, "peak_memory_bytes": memory}
        interval = (0.97 * step, 1.04 * step)
        made = measurement(**values, step_seconds_interval=interval, reserved_memory_bytes=memory + 40 * MIB, **changes)
        add(candidate, made, purpose)

    def at(precision: Any, batch_size: int, **changes: Any) -> Setting:
        return Setting(precision=precision, batch_size=batch_size, **changes)

    accumulation = Accumulation(verdict="mean", reason="They agree.", next_step="", batch_size=16, num_micro_batches=4)
    add(at("fp32", 16), accumulation, "accumulation", 1.0)
    run(at("fp32", 32), 300)
    run(at("tf32", 32), 420)
    run(at("bf16", 32), 610)
    run(at("fp16", 32), 640)
    run(at("fp32", 64), 160, was_cut=True)
    run(at("bf16", 64), 700)
    run(at("fp16", 64), 800)
    run(at("fp16", 128), 815)
    run(at("fp16", 64), 790)
    add(at("fp32", 128), Failure(kind="oom", message="2.5 GiB over the limit", details="Traceback\n" + HOSTILE))
    add(at("fp16", 256), Failure(kind="oom", message=f"tried to allocate {HOSTILE}"))
    add(at("bf16", 256), Failure(kind="timeout", message="a step took longer than 4.0 s"))
    add(at("fp32", 256), Failure(kind="oom", message="8.1 GiB over the limit"))
    add(at("bf16", 64), FIDELITY[0], "fidelity", 5.0)
    add(at("fp16", 64), FIDELITY[1], "fidelity", 6.0)
    add(at("fp16", 64), CALIBRATION, "calibration", 7.0)
    run(at("fp16", 64, pinned_modules=("head",)), 730)
    run(at("bf16", 32), 605, "fallback")
    for round_number in range(3):
        run(at("fp16", 64), 796 + round_number, "confirm", num_skips=1)
        run(at("fp32", 32), 301 + round_number, "confirm")
    run(at("fp16", 64), 780, "plain")
    return found


def made() -> Recommendation:
    return recommendation(
        config=AmpConfig(precision="fp16", batch_size=64, loss_scale=LOSS_SCALE, fallback=["bf16", "fp32"]),
        evidence=evidence(
            samples_per_second=797.0,
            samples_per_second_interval=(770.0, 824.0),
            speedup=2.64,
            speedup_interval=(2.5, 2.8),
        ),
        reason=f"fp16 batch 64 reaches 797.0 samples/s {HOSTILE}",
        warnings=(f"A warning with {HOSTILE}",),
        excluded=(
            Exclusion(precision="fp8", batch_size=None, reason="no training path"),
            Exclusion(precision="fp32", batch_size=128, reason="oom"),
        ),
        candidates=(
            row("fp32", 32, 302.0, status="confirmed"),
            row("fp32", 64, 160.0, status="cut", peak_memory_bytes=1700 * MIB),
            row("fp32", 128, None, status="oom", reason="2.5 GiB over the limit"),
            row("tf32", 32, 420.0),
            row("bf16", 64, 700.0, peak_memory_bytes=990 * MIB, joules_per_sample=0.31),
            row("fp16", 64, 797.0, status="confirmed", peak_memory_bytes=1004 * MIB),
            row("fp16", 128, 815.0, peak_memory_bytes=1708 * MIB),
        ),
        search=SearchSummary(
            study="made", num_trials=22, num_failures=4, seconds=84.2, search_id="made-1", was_interrupted=True
        ),
        hardware=msgspec.structs.replace(hardware(), notes=(HOSTILE,)),
        versions={"torch": "2.13.0"},
        fidelity=FIDELITY,
        options={"memory_fraction": 0.9},
    )


def write(folder: Path) -> Path:
    """The study in `folder`/made; returns that."""
    study = folder / "made"
    study.mkdir(parents=True)
    made().save(study / "recommendation.json")
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records())
    (study / "outcomes.jsonl").write_bytes(lines)
    return study

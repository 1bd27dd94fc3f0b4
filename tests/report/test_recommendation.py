"""A recommendation as a file, and what it says of itself, fact by fact, in plain text."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from report_samples import MIB, evidence, hardware, recommendation

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import FormatError
from autotune_amp.core.evidence import (
    LossScaleEvidence,
    MemoryEvidence,
    PlainEnvironment,
    ProcessPeak,
    TrainingCost,
    check_line,
    loss_scale_line,
)
from autotune_amp.core.outcome import Fidelity, LostUpdates
from autotune_amp.core.recommendation import Recommendation

SCALES = LossScaleEvidence(
    num_steps=10_000,
    num_skips=9,
    applied_share=0.99871,
    default_num_skips=12,
    default_applied_share=1.0,
    num_confirming_steps=1200,
    num_skips_seen=1,
    num_skips_foretold=0,
    num_calibrated_steps=12,
    log2_safe_scale_min=14.52,
    log2_safe_scale_median=15.04,
    flushed_share=0.00004,
)
BARE: dict[str, Any] = {"noise_ratio": None, "flushed_share": None, "forward_max": None, "training_gap": None}


def fidelity(**changes: Any) -> Fidelity:
    values: dict[str, Any] = {
        "precision": "bf16",
        "batch_size": 16,
        "verdict": "faithful",
        "reason": "bf16 is faithful: its rounding is small.",
        "next_step": "Train in bf16.",
        "noise_ratio": 0.0042,
        "flushed_share": 0.0,
        "forward_max": 12.34,
        "format_max": 65504.0,
        "training_gap": 1.234,
        "num_paired_steps": 8,
    }
    return Fidelity(**(values | changes))


def fact(label: str, **changes: Any) -> str | None:
    """The text beside `label`, None where it is not said."""
    return dict(recommendation(**changes).facts()).get(label)


FALLBACK = FallbackPlan(precision="fp32", batch_size=16, peak_memory_bytes=MIB, samples_per_second=99.5)
FP16 = AmpConfig(precision="fp16", batch_size=64, loss_scale=LossScale(init_scale=1024.0), fallback=["bf16", FALLBACK])
FAILED_BASELINE = msgspec.structs.replace(evidence().baseline, samples_per_second=None, reason="out of memory")
PLAIN = PlainEnvironment(samples_per_second=371.0, speedup=1.21)
JOB = TrainingCost(
    num_steps=10_000,
    num_samples=640_000,
    hours=0.8372,
    hours_interval=(0.7, 1.1),
    baseline_hours=12.345,
    price_per_hour=3.0,
    price=2.4,
    price_interval=(2.1, 3.3),
)
MEASURED_ON = MemoryEvidence(
    worst_case="the 64 largest of 10,000 samples",
    has_evaluation=True,
    has_checkpoint=True,
    processes=(ProcessPeak(num_steps=14, peak_memory_bytes=2**29),) * 3,
)


@pytest.mark.parametrize(
    ("label", "changes", "words"),
    [
        ("set", {"config": {"accumulation_steps": 2, "num_workers": 2}}, ["2 accum", "128", "2 loader workers"]),
        ("speed", {}, ["412 samples/s", "155 ms"]),
        ("sure", {}, ["398 to 426"]),
        (
            "speed",
            {"evidence": {"data_share": 0.3, "update_share": 0.05}},
            ["30 % of it", "5 % of it"],
        ),
        ("sure", {"evidence": {"is_confirmed": False, "num_processes": 1}}, ["unconfirmed", "1 process only"]),
        ("gain", {}, ["1.34x (1.28x to 1.41x)", "fp32 batch 32 at 307 samples/s"]),
        ("gain", {"evidence": {"speedup": None, "baseline": FAILED_BASELINE}}, ["unknown", "out of memory"]),
        ("sure", {"evidence": {"is_confirmed": False, "num_processes": 3}}, ["unconfirmed", "the baseline"]),
        ("plain", {"evidence": {"plain_environment": PLAIN}}, ["371 samples/s (1.21x)"]),
        ("memory", {"evidence": {"memory": MEASURED_ON}}, ["evaluation and a checkpoint", "64 largest", "of 3"]),
        ("energy", {"evidence": {"joules_per_sample": 0.3512}}, ["0.351 J"]),
        ("job", {"job": JOB}, ["0.837 h (0.7 to 1.10)", "10,000 steps", "2.40 (2.10 to 3.30)", "12.3 h"]),
        ("pauses", {"evidence": {"evaluation_seconds": 3.1}}, ["an evaluation takes 3.1 s"]),
        ("loss scale", {"config": FP16}, ["starts at 1024", "growth interval 2000"]),
        ("pinned", {"config": {"pinned_modules": ("head",)}}, ["head in fp32"]),
        ("fallback", {"config": FP16}, ["fp32 batch 16, 99.5 samples/s, 1.00 MiB"]),
    ],
)
def test_each_fact_is_said(label: str, changes: dict[str, Any], words: list[str]) -> None:
    made: dict[str, Any] = dict(changes)
    if isinstance(made.get("config"), dict):
        made["config"] = AmpConfig(**{"precision": "bf16", "batch_size": 64} | made["config"])
    if "evidence" in made:
        made["evidence"] = evidence(**made["evidence"])
    text = str(fact(label, **made))
    assert [word for word in words if word not in text] == []


def test_what_is_not_known_or_makes_no_difference_is_not_said() -> None:
    said = dict(recommendation().facts())
    assert list(said) == ["set", "speed", "gain", "sure", "memory", "why"]
    assert "of it" not in said["speed"]
    assert "unconfirmed" not in said["sure"] + said["gain"]
    card = msgspec.structs.replace(hardware(), identity=msgspec.structs.replace(hardware().identity, type="cuda"))
    assert "processes" not in str(fact("memory", hardware=card, evidence=evidence(memory=MEASURED_ON)))


def test_the_explanation_begins_with_the_answer_and_holds_every_fact_once() -> None:
    config = AmpConfig(precision="bf16", batch_size=64, environment={"PYTORCH_ALLOC_CONF": "x y"})
    shown = recommendation(config=config, warnings=("Mind the gap.",), evidence=evidence(joules_per_sample=0.3512))
    lines = [line.split(": ", 1) for line in str(shown).splitlines()]
    assert [label for label, _ in lines] == [
        *("set", "speed", "gain", "sure", "memory", "why", "before Python starts", "warning", "energy")
    ]
    assert ["before Python starts", "export PYTORCH_ALLOC_CONF='x y'"] in lines


def test_a_check_is_told_with_its_numbers_and_what_heals_it() -> None:
    said = check_line(fidelity(precision="fp16"))
    for words in ("bf16 is faithful: its rounding is small; ", "0.0042", "0 % flushed", "12.3 of 65504", "1.2 over 8"):
        assert words in said
    healed = fidelity(reason="bf16 is bad.", verdict="unfaithful", healing_pins=("a.b", ""), **BARE)
    assert check_line(healed) == "bf16 is bad; with a.b, the model itself in fp32 it is faithful"
    assert check_line(fidelity(pinned_modules=("a.b",), **BARE)).startswith("with a.b in fp32 bf16 is faithful")
    low = LostUpdates(weights="bf16", lost_share=0.84)
    assert "84 %" in check_line(fidelity(low_weights=low, **BARE))


def test_a_loss_scale_is_told_with_what_it_is_based_on() -> None:
    scale = LossScale(init_scale=8192.0)
    said = loss_scale_line(scale, SCALES)
    for words in ("starts at 8192", "9 skips", "99.9 %", "12, 100 %", "1 skip seen", "0.004 %"):
        assert words in said
    assert "seen" not in loss_scale_line(scale, msgspec.structs.replace(SCALES, num_confirming_steps=0))


def test_every_check_is_told_once_and_the_document_holds_them() -> None:
    own = fidelity(precision="fp16", pinned_modules=("head",))
    other = fidelity(reason="bf16 is unfaithful: so.", verdict="unfaithful")
    shown = recommendation(config=FP16, evidence=evidence(fidelity=own, loss_scale=SCALES), fidelity=(other, own))
    assert [label for label, _ in shown.facts()].count("fidelity") == 2
    assert msgspec.json.decode(shown.to_json(), type=Recommendation) == shown
    unchecked = fidelity(reason="bf16 is unchecked: the budget ended.", verdict="unchecked")
    assert "unchecked" in str(fact("fidelity", evidence=evidence(fidelity=unchecked)))


# --- as a file

MADE = recommendation()
GOOD = MADE.to_json().encode()


def test_what_was_saved_comes_back_with_the_rights_of_the_umask_and_older_documents_too(tmp_path: Path) -> None:
    path, before = tmp_path / "r.json", os.umask(0o027)
    try:
        MADE.save(path)
    finally:
        os.umask(before)
    assert Recommendation.load(path) == MADE
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    older = json.loads(GOOD)
    del older["evidence"]["is_build_shared"], older["evidence"]["are_processes_shared"]
    path.write_text(json.dumps(older))
    assert Recommendation.load(path) == MADE


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD.replace(b"quiet", b"\xff\xfe"), "is damaged: .*(utf|UTF)-8"),
        (
            GOOD.replace(b'"batch_size": 64', b'"batch_size": 0'),
            r"is damaged: Expected `int` >= 1 .*batch_size`\.$",
        ),
        (b"[" * 100_000, "is damaged: "),
        (b'{"format": 2}', "has format 2"),
    ],
)
def test_a_damaged_file_is_a_format_error_that_names_it(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "r.json").write_bytes(content)
    with pytest.raises(FormatError) as raised:
        Recommendation.load(tmp_path / "r.json")
    assert raised.value.message.startswith(str(tmp_path / "r.json"))
    assert re.search(said, raised.value.message)


def test_a_limit_that_was_asked_for_is_said() -> None:
    assert fact("limit") is None
    assert "16.0 GiB" in (fact("limit", options={"memory_limit": 2**34}) or "")

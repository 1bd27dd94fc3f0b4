"""Scripted searches in a package that has the dimension of toy_dimension.py; prints what came of them as JSON."""
# mypy: disable-error-code="attr-defined,call-arg"
# The field is in the package that this runs with, and not in the one that is checked.

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from scripted_backend import ScriptedSearch, all_well, described, fidelity, hardware, measured

from autotune_amp import Workload
from autotune_amp.core.outcome import CheckOutcome, Fidelity, Measurement
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.integrations.export import ExportSource, export
from autotune_amp.precision import torch_state
from autotune_amp.report.rows import table
from autotune_amp.search.answer.decide import recommend
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import build_space
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.fallbacks import Fallbacks
from autotune_amp.search.stages.variants import Variants
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.training import make_training

SPEED = {"fp32": 100.0, "bf16": 200.0, "no": 1.0, "partly": 1.5, "wholly": 1.52}  # 1.52 is within 3 % of 1.5


def answer(spec: Trial) -> Measurement:
    setting = spec.candidate
    rate = SPEED[setting.precision] * SPEED[setting.fused] * setting.batch_size / (setting.batch_size + 8)
    return measured(spec, rate)


def searched(folder: Path, harmful: str) -> dict[str, Any]:
    """What a search comes to where a check finds one level of fusing unfaithful."""

    def check_answer(spec: Check) -> CheckOutcome:
        is_harmful = spec.what == "fidelity" and spec.candidate.fused == harmful
        return fidelity(spec.candidate.precision, "unfaithful") if is_harmful else all_well(spec)

    device, about = hardware({"fp32": 1.0, "bf16": 2.0}), described()
    options = SearchOptions.from_user(precision=["fp32", "bf16"])
    space = build_space(device, about, options)
    search = ScriptedSearch(space, answer, check_answer=check_answer, device=device, folder=folder)
    search.explore()
    checking = Checks()
    for stage in (checking, Variants(checking), Fallbacks()):
        search.run(stage)
    made = recommend(
        search.ledger,
        options=options,
        environment={},
        workload=about,
        hardware=device,
        search=SearchSummary(study="toy", num_trials=1, num_failures=0, seconds=1.0),
        fingerprint=Fingerprint(digest="", parts={}),
        versions={},
    )
    made.save(folder / "recommendation.json")
    kept = Recommendation.load(folder / "recommendation.json")
    read = StudyFolder(str(folder), "scripted").records()
    return {
        "tried": [str(r.candidate) for r in read if r.candidate.fused != "no" and r.purpose == "search"],
        "checked": [r.candidate.fused for r in read if r.purpose == "fidelity"],
        "are_read_back": read == list(search.records),
        "variants": [(row.name, row.value, row.status, row.reason) for row in kept.variants],
        "fused": kept.config.fused,
        "plans": [plan.fused for plan in kept.config.plans],
        "excluded": [(entry.precision, entry.batch_size) for entry in kept.excluded],
        "text": kept.explain(),
        "cells": [cells["precision"] for _, cells in table(kept)],
        "script": export(ExportSource(kept.config), "torch").text,
    }


def in_the_process_of_a_job() -> dict[str, Any]:
    """What a trial does to the model, and what a check against fp32 says of it."""
    workload = Workload(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda batch_size: torch.ones(batch_size, 1),
    )
    setting = Setting(precision="bf16", batch_size=2, fused="partly")
    training = make_training(workload, torch.nn.Linear(1, 1), Trial(candidate=setting, device="cpu"))
    training.close()
    check = Check(what="fidelity", candidate=setting, device="cpu", torch_state=torch_state.capture())
    verdict = checks.check(Context(workload, is_kept=False), check, lambda _: None)
    assert isinstance(verdict, Fidelity)
    return {"applied": training.model.fused, "verdict": verdict.verdict, "reason": verdict.reason}


folder = Path(sys.argv[1])
document = {harmful: searched(folder / harmful, harmful) for harmful in ("none", "partly")}
print(json.dumps({**document, "job": in_the_process_of_a_job()}))

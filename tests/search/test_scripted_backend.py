"""The scripted backend is one that searches can rely on like any other."""

from __future__ import annotations

import pytest
from backend_contract import BackendContract, Made
from replay import ReplayBudget
from scripted_backend import ScriptedBackend, candidate, measured, out_of_memory

from autotune_amp.core.outcome import Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Check, Trial


def answer(trial: Trial) -> Outcome:
    return out_of_memory() if trial.candidate.batch_size > 8 else measured(trial, 100.0)


class TestScripted(BackendContract):
    @pytest.fixture
    def made(self) -> Made:
        return Made(
            ScriptedBackend(answer, ReplayBudget(100.0)),
            Trial(candidate=candidate("fp32", 8), device="cpu"),
            Trial(candidate=candidate("fp32", 16), device="cpu"),
            "oom",
            Check(what="fidelity", candidate=Setting(precision="bf16", batch_size=8), device="cpu"),
        )

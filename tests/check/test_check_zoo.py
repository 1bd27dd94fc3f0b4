"""The zoo of studies/fidelity: nothing is found in what trains well; of what is sick, what one step shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

STUDY = Path(__file__).parents[2] / "studies" / "fidelity"
# In a process of its own: the study's modules have names such as `case` and `samples`.
PROGRAM = """
import importlib, json, logging, sys, warnings
warnings.simplefilter("ignore")
import torch
from autotune_amp.check.child import report_on
from autotune_amp.trial.context import make_model
logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.manual_seed(0)
module, name, device = sys.argv[1:]
found = {}
for case in getattr(importlib.import_module(module), name):
    workload = case.make()
    report = report_on(workload, make_model(workload), device, case.batch_size)
    found[case.name] = [report.problem, report.num_calls, [f"{f.rule} {f.file}:{f.line}" for f in report.findings]]
print(json.dumps(found))
"""


def reports(module: str, name: str, device: str) -> dict[str, tuple[str | None, int, list[str]]]:
    command = [sys.executable, "-c", PROGRAM, module, name, device]
    done = subprocess.run(command, cwd=STUDY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str | None, int, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps"])
@pytest.mark.parametrize(("module", "name"), [("zoo_healthy", "HEALTHY"), ("zoo_held_out", "HELD_OUT_HEALTHY")])
def test_nothing_is_found_in_what_is_healthy(module: str, name: str, device: str) -> None:
    found = reports(module, name, device)
    assert found
    assert {case: findings for case, (_, _, findings) in found.items() if findings} == {}
    assert {case: problem for case, (problem, _, _) in found.items() if problem is not None} == {}
    assert all(num_calls > 0 for _, num_calls, _ in found.values())


def test_of_what_is_sick_constants_epsilons_and_weights_are_found() -> None:
    found = reports("zoo_sick", "SICK", "cuda")
    rules = {
        case: sorted(finding.split()[0] for finding in findings) for case, (_, _, findings) in found.items() if findings
    }
    assert rules == {
        "vanishing_eps": ["small_epsilon"],
        "log_of_tiny": ["small_epsilon"],
        "tiny_cosine": ["small_epsilon"],
        "fully_masked_rows": ["large_constant"],
        "bf16_weights": ["weights"],
        "fp16_weights": ["weights"],
    }

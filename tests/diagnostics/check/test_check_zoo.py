"""The zoo of studies/fidelity: nothing is found in what trains well; of what is sick, what one step shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from forked_python import ForkServer

pytestmark = pytest.mark.slow

STUDY = Path(__file__).parents[3] / "studies" / "fidelity"
# In a process of its own: the study's modules have names such as `case` and `samples`.
PROGRAM = """
import importlib, json, logging, sys, warnings
warnings.simplefilter("ignore")
import torch
from autotune_amp.diagnostics.check.child import report_on
from autotune_amp.trial.context import make_model
logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.manual_seed(0)
module, name, *devices = sys.argv[1:]
found = {}
for case in getattr(importlib.import_module(module), name):
    for device in devices:
        workload = case.make()
        report = report_on(workload, make_model(workload), device, case.batch_size)
        findings = [f"{f.rule} {f.file}:{f.line}" for f in report.findings]
        found[f"{case.name} {device}"] = [report.problem, report.num_calls, findings]
print(json.dumps(found))
"""

# The dtypes of all calls as the shadows have them, and as they are in a step under the CPU's real autocast.
COMPARISON = """
import copy, importlib, json, logging, warnings
warnings.simplefilter("ignore")
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from autotune_amp.diagnostics.check import recording
from autotune_amp.trial import data
from autotune_amp.trial.context import make_model
logging.disable(logging.WARNING)
torch.set_num_threads(1)

class Real(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [str(leaf.dtype) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if made:
            real.append([func.__name__, *made])
        return result

def note(call, device):
    if call.outputs:
        shadows.append([call.name, *map(str, call.output_dtypes)])
    return []

recording.call_findings = note
found = {}
for case in importlib.import_module("zoo_healthy").HEALTHY:
    if "fp16" in case.is_unsupported_in:
        continue
    workload = case.make()
    model, batch = make_model(workload), next(data.stream(workload.data, case.batch_size))
    real, shadows = [], []
    step = recording.StepRecorder(model, "cpu")
    with step.recording(), step.autocast():
        workload.loss(model, copy.deepcopy(batch))
    with torch.autocast("cpu", dtype=torch.float16), Real():
        workload.loss(model, copy.deepcopy(batch))
    found[case.name] = [len(real), real == shadows]
print(json.dumps(found))
"""


def output(fork_server: ForkServer, program: str, *arguments: str) -> Any:
    """The document that a program prints last."""
    done = fork_server.run(["-c", program, *arguments], cwd=STUDY, env=os.environ, timeout=280.0)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def reports(
    fork_server: ForkServer, module: str, name: str, *devices: str
) -> dict[str, tuple[str | None, int, list[str]]]:
    """Return problem, number of calls and findings by case and device."""
    found: dict[str, tuple[str | None, int, list[str]]] = output(fork_server, PROGRAM, module, name, *devices)
    return found


def test_shadows_have_the_dtypes_of_the_cpus_real_autocast(fork_server: ForkServer) -> None:
    found = output(fork_server, COMPARISON)
    assert len(found) > 20
    assert [case for case, (num_calls, are_alike) in found.items() if not num_calls or not are_alike] == []


@pytest.mark.parametrize(("module", "name"), [("zoo_healthy", "HEALTHY"), ("zoo_held_out", "HELD_OUT_HEALTHY")])
def test_nothing_is_found_in_what_is_healthy(fork_server: ForkServer, module: str, name: str) -> None:
    found = reports(fork_server, module, name, "cuda", "cpu", "mps")
    assert found
    assert {case: findings for case, (_, _, findings) in found.items() if findings} == {}
    assert {case: problem for case, (problem, _, _) in found.items() if problem is not None} == {}
    assert all(num_calls > 0 for _, num_calls, _ in found.values())


def test_of_what_is_sick_constants_epsilons_and_weights_are_found(fork_server: ForkServer) -> None:
    found = reports(fork_server, "zoo_sick", "SICK", "cuda")
    rules = {
        case: sorted(finding.split()[0] for finding in findings) for case, (_, _, findings) in found.items() if findings
    }
    assert rules == {
        "vanishing_eps cuda": ["small_epsilon"],
        "log_of_tiny cuda": ["small_epsilon"],
        "tiny_cosine cuda": ["small_epsilon"],
        "fully_masked_rows cuda": ["large_constant"],
        "bf16_weights cuda": ["weights"],
        "fp16_weights cuda": ["weights"],
    }

"""check_fidelity() on live objects and files: what it answers and refuses; nothing of the user's changes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from conftest import CommandLine

from autotune_amp import check_fidelity
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import BudgetTooSmallError, InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware, Level
from autotune_amp.core.outcome import Description
from autotune_amp.core.setting import Setting
from autotune_amp.search.check_fidelity import check_job, checked_request
from autotune_amp.trial.jobs import Check

PREAMBLE = """
import torch
from torch import nn
from autotune_amp import Fidelity, Workload, check_fidelity

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def data(size):
    x = torch.randn(size, 8)
    return x, x[:, :1] + 0.1 * torch.randn(size, 1)

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
"""


def python(cli: CommandLine, text: str) -> subprocess.CompletedProcess[str]:
    (cli.folder / "script.py").write_text(PREAMBLE + text)
    return subprocess.run(
        [sys.executable, "script.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True, timeout=200
    )


def test_live_objects_are_the_same_bit_for_bit_after_a_check(cli: CommandLine) -> None:
    script = """
import pickle, random, numpy
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
model[2].eval()
optimizer = torch.optim.AdamW([
    {"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.01)
generator = torch.Generator().manual_seed(11)
dataset = torch.utils.data.TensorDataset(*data(64))
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
loss(model, next(iter(loader))).backward()
optimizer.step()
loss(model, next(iter(loader))).backward()  # gradients are left as they are

def snapshot():
    return pickle.dumps([
        [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()],
        [parameter.grad is None or parameter.grad.numpy().tobytes() for parameter in model.parameters()],
        [(module.training, type(module), sorted(vars(module))) for module in model.modules()],
        [[(k, v.numpy().tobytes() if torch.is_tensor(v) else v) for k, v in s.items()]
         for s in optimizer.state_dict()["state"].values()],
        optimizer.state_dict()["param_groups"],
        torch.get_rng_state().numpy().tobytes(), generator.get_state().numpy().tobytes(),
        random.getstate(), numpy.random.get_state(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    ])

before = snapshot()
addresses = [parameter.data_ptr() for parameter in model.parameters()]
found = check_fidelity(Workload(model, loss, loader, optimizer), "bf16", device="cpu", pinned_modules=["3"])
assert snapshot() == before, "the check changed something"
assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
model[0].weight.data.add_(1)
assert snapshot() != before, "the snapshot sees no change at all"
assert isinstance(found, Fidelity)
print(found.verdict, found.precision, found.batch_size, found.pinned_modules)
"""
    done = python(cli, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "faithful bf16 4 ('3',)\n"
    assert "Checking bf16 against fp32" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "half"}, "'half'"),
        ({"precision": ["bf16"]}, "one name"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"pinned_modules": "head"}, "list of module names"),
        ({"budget": -1}, "budget is -1"),
        ({"device": "gpu"}, "'gpu'"),
        ({"workload": "nothing"}, "names no workload"),
    ],
)
def test_arguments_that_cannot_be_meant(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_fidelity(**arguments)


def hardware() -> Hardware:
    levels: dict[Precision, Level] = {"fp32": "native", "tf32": "unsupported", "bf16": "native", "fp16": "emulated"}
    return Hardware(
        device="cpu",
        identity=DeviceIdentity(type="cpu", name="test", num_cpus=2, total_memory_bytes=1 << 30),
        memory=DeviceMemory(total=1 << 30, free=1 << 30, available=1000),
        precisions={p: Capability(level=level, reason=f"{p} is {level}") for p, level in levels.items()},
    )


def specified(precision: str, asked_batch_size: int | None = None, **about: Any) -> Check:
    request = checked_request(precision, asked_batch_size, "cpu", ["head"], 5, 100.0)
    description = Description(
        **{
            "name": "test",
            "batch_size": 32,
            "num_samples": 10_000,
            "data": "a dataset",
            "num_parameters": 10,
            "num_trainable_parameters": 10,
            "weights": "fp32",
            "as_found_precision": "fp32",
            "is_as_found_strict": True,
            "build_seconds": 0.1,
            "context_seconds": 0.0,
            **about,
        }
    )
    return check_job(request, hardware(), description, {}, 7.0)


@pytest.mark.parametrize(
    ("asked", "about", "expected"),
    [
        (None, {}, 16),
        (None, {"batch_size": 12}, 12),
        (None, {"num_samples": 20}, 10),  # two batches of other samples
        (None, {"num_samples": 1}, 1),
        (64, {"batch_size": 12}, 64),
    ],
)
def test_the_batch_size(asked: int | None, about: dict[str, Any], expected: int) -> None:
    assert specified("bf16", asked, **about).candidate.batch_size == expected


def test_what_was_asked_for_reaches_the_check() -> None:
    spec = specified("fp16", 4)
    assert (spec.what, spec.device) == ("fidelity", "cpu")
    assert spec.candidate == Setting(precision="fp16", batch_size=4, pinned_modules=("head",))
    assert (spec.seed, spec.deadline_seconds, spec.memory_limit_bytes) == (5, 7.0, 900)
    assert specified("fp32", weights="bf16").candidate.precision == "fp32", "checked where the weights are not in it"


@pytest.mark.parametrize(
    ("precision", "about", "message"),
    [
        ("fp32", {}, "fp32"),
        ("tf32", {}, "tf32 is unsupported"),
        ("fp8", {}, "no fp8"),
        ("fp16", {"weights": "bf16"}, "the weights are kept in bf16"),
    ],
)
def test_a_precision_that_cannot_be_checked_here(precision: str, about: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        specified(precision, **about)


def test_a_budget_that_ends_before_the_check_and_a_workload_that_is_not_there() -> None:
    with pytest.raises(BudgetTooSmallError, match="budget"):
        check_fidelity(budget=0.5, device="cpu", quiet=True)
    with pytest.raises(WorkloadError, match="nowhere"):
        check_fidelity("nowhere.py:workload", device="cpu", quiet=True)

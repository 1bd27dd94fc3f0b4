"""check_fidelity() on live objects and files: what it answers and refuses; nothing of the user's changes."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CommandLine
from unisolated import run_jobs_here

from autotune_amp import check_fidelity
from autotune_amp.core.errors import BudgetTooSmallError, InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware, Level
from autotune_amp.core.outcome import Description
from autotune_amp.core.precisions import Precision
from autotune_amp.diagnostics.check_fidelity import check_job
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.source import OpenedWorkload
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
"""


def test_live_objects_are_checked_and_stay_as_they_were(cli: CommandLine) -> None:
    """The rest of what a search leaves as it was, a check does too: it runs in the same processes."""
    script = """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data(64)), batch_size=4, shuffle=True)
loss(model, next(iter(loader))).backward()  # gradients are left as they are

def snapshot():
    return [
        *(value.numpy().tobytes() for value in model.state_dict().values()),
        *(parameter.grad.numpy().tobytes() for parameter in model.parameters()),
        *((module.training, type(module), sorted(vars(module))) for module in model.modules()),
        optimizer.state_dict(), torch.get_rng_state().numpy().tobytes(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision,
    ]

before = snapshot()
found = check_fidelity(Workload(model, loss, loader, optimizer), "bf16", device="cpu", pinned_modules=["3"])
assert snapshot() == before, "the check changed something"
assert isinstance(found, Fidelity)
print(found.verdict, found.precision, found.batch_size, found.pinned_modules)
"""
    (cli.folder / "script.py").write_text(PREAMBLE + script)
    done = cli.python("script.py")
    assert done.code == 0, done.err
    assert done.out == "faithful bf16 4 ('3',)\n"
    assert "Checking bf16 against fp32" in done.err


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
    opened = OpenedWorkload(hardware(), description, {}, 0.0, None)
    options = SearchOptions.from_user(precision=precision, device="cpu", seed=5)
    return check_job(opened, options, asked_batch_size, ("head",), 7.0)


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


@pytest.mark.parametrize(
    ("precision", "about", "message"),
    [
        ("fp32", {}, "fp32"),
        ("tf32", {}, "tf32 is unsupported"),
        ("fp8", {}, "layers are unknown"),
        ("fp8", {"variants": {"fp8_recipe": {"rowwise": "torchao is not installed"}}}, "torchao is not installed"),
        ("fp16", {"weights": "bf16"}, "the weights are kept in bf16"),
    ],
)
def test_a_precision_that_cannot_be_checked_here(precision: str, about: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        specified(precision, **about)


def test_a_budget_that_ends_before_the_check() -> None:
    with pytest.raises(BudgetTooSmallError, match="budget"):
        check_fidelity(budget=0.5, device="cpu", quiet=True)


def test_a_workload_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    run_jobs_here(monkeypatch)
    with pytest.raises(WorkloadError, match="nowhere"):
        check_fidelity("nowhere.py:workload", device="cpu", quiet=True)

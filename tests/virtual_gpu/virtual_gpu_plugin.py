"""pytest on a card: a real one where there is one, else, for `pytest -m gpu`, a virtual machine of two cards."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pynvml
import pytest
import virtual_gpu_build

VirtualMachine: TypeAlias = Callable[..., dict[str, str]]

_folder = pytest.StashKey[str]()
_why_not = pytest.StashKey[str | None]()


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports torch. Workers of pytest-xdist inherit the machine, and have its memory to themselves."""
    config.stash[_why_not] = "needs a CUDA device: pytest -m gpu runs it, on a virtual one where there is no other"
    if not _is_virtual():
        if not _asks_for_gpu(config.option.markexpr) or _num_real_cards():
            return
        if reason := virtual_gpu_build.why_not():
            config.stash[_why_not] = f"needs a CUDA device, and {reason}"
            return
    assert "torch" not in sys.modules, "torch was imported before the virtual card"
    config.stash[_folder] = tempfile.mkdtemp(prefix="virtual-gpu-")
    ledger = Path(config.stash[_folder]) / "ledger"
    if _is_virtual():
        os.environ["VIRTUAL_GPU_LEDGER"] = str(ledger)
        return
    os.environ.setdefault("VIRTUAL_GPU_NUM", "2")
    os.environ.update(virtual_gpu_build.environment(virtual_gpu_build.build(), ledger))
    sys.path.insert(0, str(virtual_gpu_build.SITE))
    import virtual_gpu_loader

    virtual_gpu_loader.await_torch()


def pytest_unconfigure(config: pytest.Config) -> None:
    if folder := config.stash.get(_folder, None):
        shutil.rmtree(folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need a card where there is none, unless nothing else was asked for."""
    if _is_virtual() or _asks_for_gpu(config.option.markexpr) or _num_real_cards():
        return
    without = [item for item in items if item.get_closest_marker("gpu") is None]
    if 0 < len(without) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = without


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip(str(item.config.stash[_why_not]))
    real = item.get_closest_marker("real_gpu")
    if real is not None and _is_virtual():
        pytest.skip(f"needs a real card: the virtual one has no {real.args[0]}")


@pytest.fixture(scope="session")
def virtual_machine(tmp_path_factory: pytest.TempPathFactory) -> VirtualMachine:
    """Makes another virtual machine for child processes, by its variables: `virtual_machine(num=1, cc="7.5")`."""
    if not _is_virtual():
        pytest.skip("needs the virtual card, whose kind it chooses, and this one is real")

    def make(**cards: object) -> dict[str, str]:
        ledger = tmp_path_factory.mktemp("machine") / "ledger"
        chosen = {f"VIRTUAL_GPU_{name.upper()}": str(value) for name, value in cards.items()}
        return {"VIRTUAL_GPU_LEDGER": str(ledger), **chosen}

    return make


def _is_virtual() -> bool:
    return "VIRTUAL_GPU" in os.environ


def _asks_for_gpu(expression: str) -> bool:
    """Whether tests with the mark `gpu` are among those that the expression of -m selects by name."""
    return re.search(r"(?<!not )\bgpu\b", expression) is not None


def _num_real_cards() -> int:
    """By NVML, which does not initialise CUDA."""
    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0

"""Real child processes; those that must die early find a made `torch` first on their path."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from autotune_amp.core.config import PRECISIONS
from autotune_amp.core.errors import DeviceError, RunnerError
from autotune_amp.core.hardware import Hardware
from autotune_amp.hardware import identify, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHADOW = "sitecustomize.py"  # Python runs it before the child's own first line


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    def write(name: str, code: str) -> None:
        (tmp_path / name).write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return write


def test_the_cpu_is_probed_in_a_child_and_a_busy_machine_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    hardware = probe("cpu")
    assert "load average 1000.0" in hardware.notes[0]
    assert isinstance(hardware, Hardware)
    assert (hardware.device, hardware.identity) == ("cpu", identify("cpu"))
    assert tuple(hardware.precisions) == PRECISIONS
    assert (hardware.precisions["fp32"].matmul_flops_per_second or 0) > 0


def test_prints_do_not_corrupt_the_answer(
    shadow: Callable[[str, str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    shadow(SHADOW, "import os; print('{'); os.write(1, b'noise'); os.write(2, b'noise')")
    with pytest.raises(DeviceError, match="only one cpu device"):
        probe("cpu:1")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("device", ["cuda:63", "cpu:1"])
def test_a_device_error_of_the_child_arrives_as_one(device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        probe(device)
    assert caught.value.message
    assert caught.value.next_step.startswith(("Pass", "Install", "Run"))


def test_cuda_on_a_build_without_it() -> None:
    code = "import torch; print(torch.version.cuda or torch.version.hip)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if done.stdout.strip() != "None":
        pytest.skip(f"this PyTorch is built for CUDA {done.stdout.strip()}")
    with pytest.raises(DeviceError, match="built without CUDA") as caught:
        probe("cuda")
    assert "Install a CUDA build" in caught.value.next_step


def test_a_name_that_is_none_needs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(DeviceError, match="'gpu' is no device"):
        probe("gpu")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("torch.py", "raise ImportError('libcudart.so is missing')", r"status 1(.|\n)*libcudart\.so is missing"),
        ("torch.py", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9"),
        ("torch.py", "import os; os._exit(0)", "ended without an answer"),
        ("torch.py", "import os; os.write(2, b'driver says no'); os._exit(3)", "status 3(.|\n)*driver says no"),
    ],
)
def test_a_childs_death_is_a_runner_error(shadow: Callable[[str, str], None], name: str, code: str, words: str) -> None:
    shadow(name, code)
    with pytest.raises(RunnerError, match=words):
        probe("cpu")


def test_a_child_that_hangs_is_ended(shadow: Callable[[str, str], None]) -> None:
    shadow("torch.py", "import time; time.sleep(600)")
    with pytest.raises(RunnerError, match=r"no answer within 1\.5 seconds"):
        probe("cpu", deadline_seconds=1.5)


def test_a_python_that_cannot_be_started_is_a_runner_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(RunnerError, match="could not be started"):
        probe("cpu")


def test_a_module_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DeviceError, match="only one cpu device"):
        probe("cpu:1")


def test_probing_leaves_the_calling_process_without_torch() -> None:
    code = (
        "import sys; from autotune_amp.hardware import probe; probe('cpu');"
        "print(sorted({'torch', 'optuna', 'psutil'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"

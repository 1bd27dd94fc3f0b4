"""Real child processes; those that must die early find a made `torch` first on their path."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from autotune_amp.core.errors import DeviceError, RunnerError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.hardware import identify, probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def write(code: str) -> None:
        (tmp_path / "torch.py").write_text(code)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return write


PROGRAM = """
import os, sys, msgspec
os.getloadavg = lambda: (1000.0, 0.0, 0.0)
from autotune_amp.hardware import probe
found = probe("cpu")
assert not {'torch', 'optuna', 'psutil'} & set(sys.modules)
os.write(1, msgspec.json.encode(found))
"""


def test_the_cpu_is_probed_in_a_child_whatever_it_prints_and_the_working_directory_holds(tmp_path: Path) -> None:
    elsewhere, shadows = tmp_path / "here", tmp_path / "shadows"
    elsewhere.mkdir()
    shadows.mkdir()
    (elsewhere / "torch.py").write_text("raise ImportError('the wrong torch')")
    # Python runs this before the child's own first line, and the parent's.
    noise = "import os, sys\nif '-m' in sys.orig_argv: print('{'); os.write(1, b'noise'); os.write(2, b'noise')\n"
    (shadows / "sitecustomize.py").write_text(noise)
    (shadows / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(shadows), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, shadows / "program.py"],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    hardware = msgspec.json.decode(done.stdout, type=Hardware)
    assert "load average 1000.0" in hardware.notes[0]
    assert (hardware.device, hardware.identity) == ("cpu", identify("cpu"))
    assert tuple(hardware.precisions) == PRECISIONS
    assert (hardware.precisions["fp32"].matmul_flops_per_second or 0) > 0


def test_a_device_error_of_the_child_arrives_as_one() -> None:
    with pytest.raises(DeviceError, match="sees 1 cpu device") as caught:
        probe("cpu:1")
    assert caught.value.next_step.startswith("Pass")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('libcudart.so is missing')", r"status 1(.|\n)*libcudart\.so is missing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "was ended by signal 9"),
        ("import os; os.write(2, b'driver says no'); os._exit(0)", "without an answer(.|\n)*driver says no"),
    ],
)
def test_a_childs_death_is_a_runner_error(shadow: Callable[[str], None], code: str, words: str) -> None:
    shadow(code)
    with pytest.raises(RunnerError, match=words):
        probe("cpu")


def test_a_child_that_hangs_is_ended(shadow: Callable[[str], None]) -> None:
    shadow("import time; time.sleep(600)")
    with pytest.raises(RunnerError, match=r"no answer within 1\.5 seconds"):
        probe("cpu", deadline_seconds=1.5)

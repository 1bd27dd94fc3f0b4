from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from autotune_amp.core.errors import DeviceError
from autotune_amp.hardware import host, identify
from autotune_amp.hardware.device import name_of_numbered_device, name_of_single_device

if TYPE_CHECKING:
    from pathlib import Path


def test_the_cpu_is_identified() -> None:
    identity = identify("cpu")
    assert (identity.type, identity.index, identity.uuid) == ("cpu", None, None)
    assert identity.name == host.cpu_name() != ""
    assert 1 <= identity.num_cpus <= (psutil.cpu_count() or 1)
    assert 0 < identity.total_memory_bytes <= psutil.virtual_memory().total


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_only_the_cpus_that_this_process_may_use_count() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert identify("cpu").num_cpus == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("device", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1 ", "auto:0", "tpu:0"])
def test_what_is_no_device_name_is_refused(device: str) -> None:
    with pytest.raises(DeviceError, match="must be auto"):
        identify(device)


def test_an_index_out_of_range_says_how_many_there_are() -> None:
    assert (name_of_single_device("cpu", 0), name_of_numbered_device("cuda", 1, 2)) == ("cpu", "cuda:1")
    with pytest.raises(DeviceError, match="PyTorch sees 1 cpu device here"):
        name_of_single_device("cpu", 1)
    with pytest.raises(DeviceError, match="cuda:2 does not exist: PyTorch sees 2 cuda devices"):
        name_of_numbered_device("cuda", 2, 2)


def test_identifying_imports_neither_torch_nor_psutil() -> None:
    code = (
        "import sys; from autotune_amp.hardware import identify; identify('auto'); identify('cpu');"
        "print(sorted({'torch', 'psutil', 'optuna'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("word", ["flags", "Features"])  # the second on ARM
def test_names_and_flags_are_read_from_cpuinfo(tmp_path: Path, word: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: Made CPU @ 3 GHz\n{word}\t: sse2 bf16\n\nmodel name\t: Second\n{word}\t: no\n"
    )
    assert host.cpu_flags(tmp_path) == {"sse2", "bf16"}
    assert host.cpu_flags(tmp_path / "none") == frozenset()
    if sys.platform != "darwin":
        assert host.cpu_name(tmp_path) == "Made CPU @ 3 GHz"


@pytest.mark.parametrize(("load", "num_notes"), [(0.0, 0), (4.0, 0), (4.1, 1)])
def test_a_load_above_half_the_cores_is_noted(monkeypatch: pytest.MonkeyPatch, load: float, num_notes: int) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    notes = host.load_notes()
    assert len(notes) == num_notes
    assert all("load average 4.1 on 8 CPUs" in note for note in notes)

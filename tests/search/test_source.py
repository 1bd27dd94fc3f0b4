"""What trials take over from the process that calls the search, and from the child that called the user's function."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from autotune_amp import workloads
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.fingerprint import file_digest
from autotune_amp.precision import torch_state
from autotune_amp.search.source import live_source


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_trials_of_a_live_function_have_the_flags_that_it_sets(*, is_elsewhere: bool) -> None:
    source = live_source(workloads.workload)
    source.is_elsewhere = is_elsewhere
    child = torch_state.capture() | {"cuda.matmul.fp32_precision": "tf32", "num_threads": 1000}
    with torch.autocast("cpu"):
        caller, found = torch_state.capture(), source.torch_state(child)
    num_threads = 1000 if is_elsewhere else torch.get_num_threads()
    assert found == caller | {"cuda.matmul.fp32_precision": "tf32", "num_threads": num_threads}


def test_a_folder_of_the_import_path_that_cannot_be_read_hides_no_edited_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("kept.py", "edited.py"):
        Path(name).write_text("x = 1")
    parts = {f"source file {name}": f"={file_digest(name)}" for name in ("kept.py", "edited.py")}
    monkeypatch.setattr(sys, "path", ["n" * 300, *sys.path])  # like a folder without permission, it raises OSError
    Path("edited.py").write_text("x = 2")
    fingerprint = Fingerprint(digest="", parts=parts, unknown=())
    assert live_source(workloads.workload).edited_files(fingerprint) == ["edited.py"]

"""What trials take over from the process that calls the search, and from the child that called the user's function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from autotune_amp import workloads
from autotune_amp.core.workload import import_target
from autotune_amp.hardware import identify
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


def test_an_edited_file_is_named_although_another_of_its_name_is_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [Path(folder, "part.py") for folder in (".", "lib")]
    Path("lib").mkdir()
    for number, file in enumerate(files):
        file.write_text(f"def loss(model, batch):\n    return {number}")
    sources = [live_source(import_target(f"{file}:loss")) for file in files]
    of_first, of_second = (each.fingerprint({}, identify("cpu")) for each in sources)
    assert of_first is not None
    assert of_second is not None
    fingerprint = replace(of_first, files=of_first.files | of_second.files)
    assert sources[0].edited_files(fingerprint) == []
    files[1].write_text(files[0].read_text())
    assert sources[0].edited_files(fingerprint) == [str(files[1])]
    files[1].unlink()
    assert sources[0].edited_files(fingerprint) == [], "one that is being replaced"

"""What is found of processes: the shared memory that they have mapped."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import psutil
import pytest

from autotune_amp.processes import process_tree


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_shared_memory_is_found_beside_a_mapped_file_whose_name_is_not_utf_8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_tree, "shared_memory", lambda: {f"torch_{os.getpid()}_1": 1, "other": 2})
    name = os.fsencode(tmp_path) + b"/\xe9"
    with open(name, "w+b") as file:  # noqa: PTH123 - a name in bytes
        file.write(b"1")
        file.flush()
        with mmap.mmap(file.fileno(), 1):
            assert process_tree.shared_memory_of([psutil.Process()]) == {f"torch_{os.getpid()}_1"}

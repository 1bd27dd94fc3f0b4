"""The children's traces as one file of the user's."""

from __future__ import annotations

import json
from pathlib import Path

from autotune_amp.profile.trace_file import write_trace


def written(path: Path, name: str) -> Path:
    path.write_text(json.dumps({"traceEvents": [{"name": name}], "made": "up"}))
    return path


def test_several_become_one_and_one_stays_as_it_is(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, name) for name in ("fp32", "bf16")]
    trace = tmp_path / "trace.json"
    assert write_trace(parts, trace) is None
    assert json.loads(trace.read_text()) == {"traceEvents": [{"name": "fp32"}, {"name": "bf16"}], "made": "up"}
    assert write_trace(parts[:1], trace) is None
    assert trace.read_text() == parts[0].read_text()


def test_why_there_is_none(tmp_path: Path) -> None:
    part = written(tmp_path / "fp32", "fp32")
    missing = tmp_path / "no" / "trace.json"
    assert "No such file or directory" in (write_trace([part], missing) or "")
    assert "No such file or directory" in (write_trace([part, part], missing) or "")
    assert write_trace([], missing) == "No trace was written: no precision was taken apart."

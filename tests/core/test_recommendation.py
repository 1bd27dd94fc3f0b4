from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import FormatError
from autotune_amp.core.evidence import BaselineEvidence, Evidence
from autotune_amp.core.hardware import DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = AmpConfig(precision="fp32", batch_size=7777)
MADE = Recommendation(
    config=CONFIG,
    evidence=Evidence(
        samples_per_second=1.0,
        samples_per_second_interval=(0.9, 1.1),
        step_seconds=1.0,
        peak_memory_bytes=1,
        baseline=BaselineEvidence(
            config=CONFIG,
            samples_per_second=None,
            samples_per_second_interval=None,
            step_seconds=None,
            peak_memory_bytes=None,
        ),
        speedup=None,
        speedup_interval=None,
        num_processes=1,
        is_confirmed=False,
        data_share=0.0,
    ),
    reason="It is the only one.",
    warnings=(),
    excluded=(),
    candidates=(),
    search=SearchSummary(study="s", num_trials=1, num_failures=0, seconds=1.0),
    hardware=Hardware(
        device="cpu",
        identity=DeviceIdentity(type="cpu", name="cpu", num_cpus=1, total_memory_bytes=1),
        memory=DeviceMemory(total=1, free=1, available=1),
        precisions={},
    ),
    versions={},
    fingerprint=Fingerprint(digest="d", parts={}),
)
GOOD = MADE.to_json().encode()


def load(path: Path, content: bytes) -> Recommendation:
    path.write_bytes(content)
    return Recommendation.load(path)


def test_what_was_saved_comes_back_and_older_documents_too(tmp_path: Path) -> None:
    MADE.save(tmp_path / "r.json")
    assert Recommendation.load(tmp_path / "r.json") == MADE
    older = json.loads(GOOD)
    del older["evidence"]["is_build_shared"], older["evidence"]["are_processes_shared"]
    assert load(tmp_path / "r.json", json.dumps(older).encode()) == MADE


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        MADE.save(tmp_path / "r.json")
    finally:
        os.umask(before)
    assert (tmp_path / "r.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (GOOD.replace(b"only one", b"\xff\xfe"), "is damaged: .*utf-8"),
        (GOOD.replace(b"7777", b"0"), r"is damaged: AmpConfig\.batch_size is 0; .*[^.]\.$"),
        (b"[" * 100_000, "is damaged: "),
        (b'{"format": 99}', "has format 99"),
    ],
)
def test_a_damaged_file_is_a_format_error_that_names_it(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(FormatError) as raised:
        load(tmp_path / "r.json", content)
    assert raised.value.message.startswith(str(tmp_path / "r.json"))
    assert re.search(said, raised.value.message)

"""Files that others may have written: what is opened, what is decoded, and with which error the rest is refused."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from autotune_amp.api import profile_memory
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import Count, Positive, decode, raise_if_exists, read_file
from autotune_amp.core.errors import InvalidRequestError, StudyError
from autotune_amp.core.recommendation import write_atomically


class Document(msgspec.Struct):
    count: Count = 1
    seconds: Positive = 1.0
    config: AmpConfig | None = None
    rest: object = None


@pytest.fixture
def odd_paths(tmp_path: Path) -> dict[str, str]:
    """Paths that are no regular file; reading some of them would never end."""
    os.mkfifo(tmp_path / "fifo")
    return {"fifo": f"{tmp_path}/fifo", "device": "/dev/zero", "folder": str(tmp_path), "NUL": f"{tmp_path}/a\0b"}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "NUL"])
def test_only_a_regular_file_is_read(odd_paths: dict[str, str], kind: str) -> None:
    with pytest.raises(OSError, match=r"not a regular file|is a folder|not a valid file name"):
        read_file(odd_paths[kind])
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        CommandTemplate.of(["python", odd_paths[kind]], files=[odd_paths[kind]])


def test_a_missing_file_is_told_apart_and_a_link_to_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link") == b"text"
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "missing")


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        (b'{"count": 0}', True),
        (b'{"count": "abc"}', True),
        (b'{"seconds": 0}', True),
        (b'{"seconds": 1e999}', True),
        (b'{"rest": ' + b"9" * 5000 + b"}", True),
        (b'{"config": {"precision": "fp32", "batch_size": 1, "environment": {"LD_PRELOAD": "x"}}}', True),
        (b'{"rest": "\xff"}', False),
        (b'{"rest": ' + b"[" * 100_000, False),
        (b'{"rest": ' + b'{"a":' * 100_000, False),
        (b'{"rest": NaN}', False),
    ],
)
def test_what_cannot_be_decoded_is_one_kind_of_error(text: bytes, is_json: bool) -> None:
    with pytest.raises(msgspec.DecodeError) as raised:
        decode(text, Document)
    assert isinstance(raised.value, msgspec.ValidationError) == is_json


def test_a_settings_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match="utf-8"):
        CommandTemplate.of(["python", f"{tmp_path}/settings.yaml"], files=[f"{tmp_path}/settings.yaml"])


def test_a_path_with_a_nul_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be written"):
        write_atomically(Path(f"{tmp_path}/a\0b"), "text")


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    raise_if_exists("--trace", None)
    raise_if_exists("--trace", tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for there in (tmp_path, tmp_path / "link"):
        with pytest.raises(InvalidRequestError, match="not overwritten"):
            raise_if_exists("--trace", there)
    with pytest.raises(InvalidRequestError, match="snapshot"):
        profile_memory(snapshot=__file__)

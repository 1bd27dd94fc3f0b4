"""The run log: a training run as a file of JSON lines, appended to by the controller and read for its report. No torch.

A run begins with a `BeginLine`, and so does each of its resumptions, with the same `run_id`: several runs may share a
file. A run that was resumed from an earlier checkpoint trains some updates again: what the log holds of the first time
is not read.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.documents import Count, Whole, cause, decode, read_file, regular
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.text import one_line
from autotune_amp.runtime.readings import Readings

log = logging.getLogger("autotune_amp.runtime")

FORMAT = 2
_MAX_BEGIN_BYTES = 1 << 20  # of a log's first line, which is looked at to know the file
_SIGNATURE = b'{"event":"begin",'
_HOW_TO_MAKE_ONE = 'Give a file that PrecisionController(config, run_log="run.jsonl") wrote.'


class BeginLine(Readings, frozen=True, kw_only=True, tag_field="event", tag="begin"):
    """A controller begins, or goes on from a checkpoint; `config` is what it was made with, `time` in ISO 8601, UTC.

    `run_id` is kept in the checkpoint; one without it begins a run of its own.
    """

    format: int = FORMAT
    run_id: str
    is_resumed: bool
    time: str
    device: str
    rank: Whole
    num_ranks: Count
    config: AmpConfig


class SampleLine(Readings, frozen=True, kw_only=True, tag_field="event", tag="sample"):
    """Every 64 updates and where the loss scale changed; `loss` is None where it was not finite or not seen."""


class MoveLine(Readings, frozen=True, kw_only=True, tag_field="event", tag="move"):
    """A move, or what the controller would have done; see `autotune_amp.runtime.status.MoveRecord`."""

    kind: str = msgspec.field(name="move")
    before: Precision
    after: Precision
    reason: str
    pinned_modules: tuple[str, ...]


class _Versioned(msgspec.Struct):
    format: int


Line: TypeAlias = BeginLine | SampleLine | MoveLine
_DECODER: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)


class RunLog:
    """Appends to the file at `path`, which is open only while a line is written.

    A line that cannot be written is logged as an error, and the training goes on without the log. `checks`: raise
    `InvalidRequestError` where no run can be added to the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, checks: bool = False) -> None:
        self.path = Path(path).absolute()  # the training may change its folder
        self._is_writing = True
        if not checks:
            return
        try:
            with open(self.path, "a+b", opener=regular) as file:
                file.seek(0)
                first = file.readline(_MAX_BEGIN_BYTES)
                is_one = not first or first.startswith(_SIGNATURE)
                why_not = (_other_format(first) or "") if is_one else "is no run log"
        except (OSError, ValueError) as error:  # the latter for a NUL in the path
            why_not = f"cannot be written: {cause(error)}"
        if why_not:
            raise InvalidRequestError(
                f"run_log is {str(self.path)!r}, which {why_not}.",
                "Name a file in a folder that is there: a new one, or one that an earlier run logged to.",
            )

    def write(self, line: Line) -> None:
        """Append one line, out of this process when this returns."""
        if not self._is_writing:
            return
        try:
            with open(self.path, "a+b", opener=regular) as file:
                if isinstance(line, BeginLine) and _is_cut(file):
                    file.write(b"\n")
                file.write(msgspec.json.encode(line) + b"\n")
        except (OSError, ValueError) as error:
            self._is_writing = False
            log.error("The run log %s cannot be written, and ends here: %s.", one_line(str(self.path)), cause(error))


@dataclass(frozen=True)
class Run:
    """The run that wrote last in a log, in the order of updates; `lines` begin with a `BeginLine`.

    They hold none of `num_other_runs`. `num_cut_lines` could not be read: the process was killed as it wrote them.
    """

    lines: tuple[Line, ...]
    num_other_runs: int
    num_cut_lines: int

    @property
    def begin(self) -> BeginLine:
        """How the run began."""
        first = self.lines[0]
        assert isinstance(first, BeginLine)
        return first

    @property
    def moves(self) -> list[MoveLine]:
        """All moves."""
        return [line for line in self.lines if isinstance(line, MoveLine)]


def read(path: str | os.PathLike[str]) -> Run:
    """The run that wrote last in the log at `path`.

    Raises `FormatError` where there is no run log, or it is damaged elsewhere than a kill can leave it, or newer.
    """
    try:
        written = read_file(path).rstrip(b"\n").split(b"\n")
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {cause(error)}.", _HOW_TO_MAKE_ONE) from error
    runs: dict[str, list[Line]] = {}
    lines: list[Line] = []  # of the run that is being read
    num_cut_lines = 0
    for number, text in enumerate(written, start=1):
        if other := _other_format(text):
            raise FormatError(
                f"{path} {other}.", "Use the version of autotune_amp that wrote it, or log to a new file."
            )
        try:
            line = decode(text, _DECODER)
        except msgspec.MsgspecError as error:
            is_cut = number == len(written) or written[number].startswith(_SIGNATURE)
            if is_cut and not isinstance(error, msgspec.ValidationError):
                num_cut_lines += bool(text)
                continue
            raise FormatError(
                f"{path} line {number} is damaged: {error}.", f"Remove that line. {_HOW_TO_MAKE_ONE}"
            ) from error
        if isinstance(line, BeginLine):
            before = runs.get(line.run_id, []) if line.is_resumed else []
            lines = runs[line.run_id] = [known for known in before if known.update <= line.update]
        elif not lines:
            raise FormatError(f"{path} line {number} comes before any run begins.", _HOW_TO_MAKE_ONE)
        lines.append(line)
    if not lines:
        raise FormatError(f"{path} holds no run.", _HOW_TO_MAKE_ONE)
    return Run(tuple(lines), len(runs) - 1, num_cut_lines)


def _other_format(line: bytes) -> str | None:
    """What is wrong with the format of a line that begins a run, None where nothing is, or it cannot be read."""
    if not line.startswith(_SIGNATURE):
        return None
    try:
        found = decode(line, _Versioned).format
    except msgspec.MsgspecError:
        return None
    return None if found == FORMAT else f"has format {found}; this version reads {FORMAT}"


def _is_cut(file: BinaryIO) -> bool:
    """Whether the last line is not ended: the process was killed while it wrote it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"

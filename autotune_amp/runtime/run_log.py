"""Run log: a training run as a file of JSON lines, written by the controller and read for its report. No torch.

A run begins with a `BeginLine`, and so does each of its resumptions. Every line has its run's id, so several runs may
share a file, at the same time too. A run resumed from an earlier checkpoint repeats some updates: their first lines
are ignored when reading.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import Count, Whole, cause, decode, open_regular, read_file
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.text import one_line
from autotune_amp.runtime.status import Readings

log = logging.getLogger("autotune_amp.runtime")

FORMAT = 3
_MAX_BEGIN_BYTES = 1 << 20  # of a log's first line, which is read to recognize the file
_SIGNATURE = b'{"event":"begin",'
_HOW_TO_MAKE_ONE = 'Give a file that PrecisionController(config, run_log="run.jsonl") wrote.'


class _RunLine(Readings, frozen=True, kw_only=True, tag_field="event"):
    """Line of a run. `run_id` is kept in checkpoints; a checkpoint without it starts a new run."""

    run_id: str = ""


class BeginLine(_RunLine, frozen=True, kw_only=True, tag="begin"):
    """Line for the start of a controller, or its resumption from a checkpoint. `config` is the controller's, `time` ISO
    8601 in UTC.
    """

    format: int = FORMAT
    run_id: str  # always written; a line without it is damaged
    is_resumed: bool
    time: str
    device: str
    rank: Whole
    num_ranks: Count
    config: AmpConfig


class SampleLine(_RunLine, frozen=True, kw_only=True, tag="sample"):
    """Line written every 64 updates and when the loss scale changed. `loss` is None if not finite or not seen."""


class MoveLine(_RunLine, frozen=True, kw_only=True, tag="move"):
    """Line for a move, or for advice of an advisory controller; see `autotune_amp.runtime.status.MoveRecord`."""

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
    """Writer that appends to the file at `path`, which is open only while a line is written.

    If a line cannot be written an error is logged, and training goes on without the log. `checks`: raise
    `InvalidRequestError` if no run can be added to the file.
    """

    def __init__(self, path: str | os.PathLike[str], *, checks: bool = False) -> None:
        self.path = Path(path).absolute()  # the training may change its working directory
        self._is_writing = True
        if not checks:
            return
        try:
            with open(self.path, "a+b", opener=open_regular) as file:
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
        """Append one line and flush it to the operating system."""
        if not self._is_writing:
            return
        try:
            with open(self.path, "a+b", opener=open_regular) as file:
                if isinstance(line, BeginLine) and _is_cut(file):
                    file.write(b"\n")
                file.write(msgspec.json.encode(line) + b"\n")
        except (OSError, ValueError) as error:
            self._is_writing = False
            log.error("The run log %s cannot be written, and ends here: %s.", one_line(str(self.path)), cause(error))


@dataclass(frozen=True)
class LoggedRun:
    """Run in a log that began last, with its lines in the order of updates; the first is a `BeginLine`.

    A run that was posted to a service has no `BeginLine`.

    `num_other_runs` is the number of other runs in the file. `num_cut_lines` lines could not be read, since the process
    was killed while writing them.
    """

    lines: tuple[Line, ...]
    num_other_runs: int
    num_cut_lines: int

    @property
    def begin(self) -> BeginLine:
        """Return the line with which the run began."""
        first = self.lines[0]
        assert isinstance(first, BeginLine)
        return first

    @property
    def moves(self) -> list[MoveLine]:
        """Return all lines of moves."""
        return [line for line in self.lines if isinstance(line, MoveLine)]


def read(path: str | os.PathLike[str]) -> LoggedRun:
    """Return the run that began last in the log at `path`.

    Raises `FormatError` if the file is no run log, has a newer format, or is damaged in a way that a kill cannot
    explain.
    """
    try:
        written = read_file(path).rstrip(b"\n").split(b"\n")
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {cause(error)}.", _HOW_TO_MAKE_ONE) from error
    runs: dict[str, list[Line]] = {}
    lines: list[Line] = []  # of the run that began last
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
        elif line.run_id not in runs:
            raise FormatError(f"{path} line {number} comes before its run begins.", _HOW_TO_MAKE_ONE)
        runs[line.run_id].append(line)
    if not lines:
        raise FormatError(f"{path} holds no run.", _HOW_TO_MAKE_ONE)
    return LoggedRun(tuple(lines), len(runs) - 1, num_cut_lines)


def _other_format(line: bytes) -> str | None:
    """Return the problem with the format of a run's first line, or None if there is none or the line cannot be read."""
    if not line.startswith(_SIGNATURE):
        return None
    try:
        found = decode(line, _Versioned).format
    except msgspec.MsgspecError:
        return None
    return None if found == FORMAT else f"has format {found}; this version reads {FORMAT}"


def _is_cut(file: BinaryIO) -> bool:
    """Whether the last line is incomplete, since the process was killed while writing it."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"

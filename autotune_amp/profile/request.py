"""A profile as it is asked for: what cannot be meant, or not be written to, is refused before anything runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.search.options import SearchOptions

_EXAMPLES = {"batches": 10, "batch-size": 32}


class Request(NamedTuple):
    """A profile that was asked for; None leaves precisions and batch size to what the device and the workload have."""

    num_batches: int
    precisions: tuple[Precision, ...] | None
    batch_size: int | None
    device: str
    trace: Path | None


def checked_request(
    num_batches: int,
    device: str,
    precision: Sequence[str] | str | None,
    batch_size: int | None,
    trace: str | os.PathLike[str] | None,
) -> Request:
    """The arguments of `profile_amp`; raises `InvalidRequestError` for one that cannot be meant, and for a trace that
    cannot be written."""
    for name, given in (("batches", num_batches), ("batch-size", batch_size)):
        is_missing = given is None and name == "batch-size"
        if not is_missing and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise InvalidRequestError(
                f"--{name} is {given!r}; it must be a whole number from 1 up.", f"Give --{name} {_EXAMPLES[name]}."
            )
    options = SearchOptions.from_user(device=device, precision=precision)
    return Request(num_batches, options.precisions, batch_size, device, None if trace is None else _writable(trace))


def _writable(trace: str | os.PathLike[str]) -> Path:
    """The absolute path of a trace that can be written; what the file holds so far stays."""
    path = Path(trace).absolute()
    next_step = "Give for example --trace trace.json."
    if path.is_dir() or not path.parent.is_dir() or path.suffix == ".gz":
        raise InvalidRequestError(
            f"--trace is {str(trace)!r}; it must be a file in a folder that is there, and is not compressed.", next_step
        )
    was_there = path.exists()
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise InvalidRequestError(
            f"--trace is {str(trace)!r}, which cannot be written: {error.strerror}.", next_step
        ) from error
    return path

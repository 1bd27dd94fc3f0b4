"""Which code of the package a search was played with, so that results of other code say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import autotune_amp

PACKAGE = Path(autotune_amp.__file__).parent
CODE = ("search/**/*.py", "core/intervals.py", "trial/jobs.py")  # what decides a replayed search


def digest(package: Path = PACKAGE) -> str:
    """Of the names and contents of `CODE`."""
    found = sha256()
    for path in sorted(path for pattern in CODE for path in package.glob(pattern)):
        found.update(f"{path.relative_to(package).as_posix()} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:16]


def outdated(codes: Sequence[Mapping[str, str]], variants: Iterable[str], now: str) -> list[str]:
    """The variants not played with the code `now` on every landscape; `codes` has each landscape's digests. Pure."""
    return [variant for variant in variants if any(code.get(variant) != now for code in codes)]


def said(old: Sequence[str], num_variants: int, now: str) -> str:
    """The README's line about it. Pure."""
    if not old:
        return f"When these tables were written, the package's code was that of every search in them (digest `{now}`)."
    which = "all of its searches" if len(old) == num_variants else f"these of its searches: {'; '.join(old)}"
    return (
        f"When these tables were written, the package's code (digest `{now}`) was no longer that of {which}. "
        "`run.py` plays them again."
    )

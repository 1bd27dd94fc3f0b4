"""What runs of a command made outside of their own folders: noted in a file by the agent's guard, said to the user."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

MAX_NAMED = 3  # of one folder; beyond them they are counted


def write(file: Path, made: Iterable[str]) -> None:
    """Note what was made before."""
    file.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in made))


def read(file: Path) -> tuple[str, ...]:
    """What was made and is there: of a folder that was made, the folder alone."""
    noted = {os.fsdecode(path) for path in file.read_bytes().split(b"\0") if path}
    outermost = (path for path in noted if not any(str(parent) in noted for parent in Path(path).parents))
    return tuple(sorted(path for path in outermost if os.path.lexists(path)))


def summary(made: Iterable[str]) -> tuple[str, ...]:
    """The paths, and for a folder that holds more than `MAX_NAMED` of them their number."""
    paths = [Path(path) for path in made]
    num_in = Counter(path.parent for path in paths)
    named = [str(path) for path in paths if num_in[path.parent] <= MAX_NAMED]
    return (*named, *(f"{num} in {folder}" for folder, num in num_in.items() if num > MAX_NAMED))

"""What runs of a command made outside of their own folders: noted in a file by the agent's guard, said to the user,
and known again when the search goes on."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from autotune_amp.core.documents import cause, decode, read_file
from autotune_amp.core.errors import FormatError
from autotune_amp.core.recommendation import write_atomically

MAX_NAMED = 3  # of one folder; beyond them they are counted


def write(file: Path, made: Iterable[str]) -> None:
    """Note what was made before."""
    file.write_bytes(b"".join(os.fsencode(path) + b"\0" for path in made))


def read(file: Path) -> tuple[str, ...]:
    """What was made and is there: of a folder that was made, the folder alone."""
    noted = {os.fsdecode(path) for path in file.read_bytes().split(b"\0") if path}
    outermost = (path for path in noted if not any(str(parent) in noted for parent in Path(path).parents))
    return tuple(sorted(path for path in outermost if os.path.lexists(path)))


def remember(path: Path, made: Iterable[str]) -> None:
    """Write down what was made, with what tells whether it is still what a run of ours left."""
    files = {str(file): _state(file) for each in made for file in (Path(each), *sorted(Path(each).rglob("*")))}
    write_atomically(path, json.dumps(files, indent=1))


def keep_notes(noted: str, memory: str) -> None:
    """Write down what the file `noted` names, as the keeper of a command does whose search was killed."""
    remember(Path(memory), read(Path(noted)))


KEEP_NOTES = keep_notes.__module__, keep_notes.__name__


def remembered(path: Path) -> tuple[str, ...]:
    """Return the paths that `remember` wrote down and nobody has changed or made anew since; of folders those whose
    files are all so.

    Raises `FormatError` where the file is damaged.
    """
    try:
        files = decode(read_file(path), dict[str, list[int] | None])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise FormatError(
            f"{path} is damaged: {cause(error)}.", "Remove it: it lists files that trials left."
        ) from error
    same = {name for name, state in files.items() if state is not None and _state(Path(name)) == state}
    return tuple(sorted(name for name in same if _holds_only(Path(name), same)))


def _state(path: Path) -> list[int] | None:
    """A file's inode and time of change, a folder's inode; None where it is not there."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return [found.st_ino] if path.is_dir() else [found.st_ino, found.st_mtime_ns]


def _holds_only(path: Path, names: Collection[str]) -> bool:
    return not path.is_dir() or all(str(inner) in names for inner in path.rglob("*"))


def summary(made: Iterable[str]) -> tuple[str, ...]:
    """The paths, and for a folder that holds more than `MAX_NAMED` of them their number."""
    paths = [Path(path) for path in made]
    num_in = Counter(path.parent for path in paths)
    named = [str(path) for path in paths if num_in[path.parent] <= MAX_NAMED]
    return (*named, *(f"{num} in {folder}" for folder, num in num_in.items() if num > MAX_NAMED))

"""Files that the runs of a command leave outside of their own folders. They are moved away after each run, so that
neither the next trial nor the real training run resumes from them.

The agent's guard lists every path that a run makes in one file. Entries `-path` are moved; `+path` are data that were
downloaded or prepared, which stay for the next run once they are complete.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from autotune_amp.core.documents import cause, decode, read_file
from autotune_amp.core.errors import FormatError
from autotune_amp.core.recommendation import write_atomically

FOLDER = "trial_leftovers"  # the folder of a study that leftovers are moved to
_FILE_CLOCK_SECONDS = 0.02  # files are stamped by a clock that lags behind by a tick of the kernel, 10 ms at most
MAX_NAMED, MAX_NAMED_IN_FOLDER = 5, 3  # beyond them they are counted


def write(file: Path, kept: Iterable[str]) -> None:
    """Write the list of the data that earlier runs made, which the next run may change."""
    file.write_bytes(b"".join(b"+" + os.fsencode(path) + b"\0" for path in kept))


def entries_of(file: Path) -> list[str]:
    """Return the entries of a file to which the processes of a run add paths; empty if none was added."""
    content = file.read_bytes() if file.exists() else b""
    return [os.fsdecode(entry) for entry in content.split(b"\0") if entry]


def set_aside(file: Path, folder: Path | None, data_until: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Move the paths that are listed in `file` to `folder`, below which they keep their path from the working
    directory, or from the root.

    Data last written before `data_until` (seconds since the epoch) stay; later data may be incomplete. A file that an
    earlier run left in `folder` under the same path is replaced. Return the data that stay and exist, or all paths if
    `folder` is None, and the paths that cannot be moved. A folder that a run made stands for its files.
    """
    noted = entries_of(file)
    data = {entry[1:] for entry in noted if entry[0] == "+"}
    made = {entry[1:] for entry in noted}
    if folder is None:
        return _outermost(made), ()
    stuck = {
        path for path in sorted(made) if not _move(Path(path), _target(Path(path), folder), data, made, data_until)
    }
    return _outermost(data - stuck), _outermost(stuck)


def _outermost(paths: Collection[str]) -> tuple[str, ...]:
    """Return those of the paths that exist and are not below another one."""
    found = (path for path in paths if not any(str(parent) in paths for parent in Path(path).parents))
    return tuple(sorted(path for path in found if os.path.lexists(path)))


def _target(path: Path, folder: Path) -> Path:
    here = Path.cwd()
    return folder / (path.relative_to(here) if path.is_relative_to(here) else Path("root", *path.parts[1:]))


def _move(
    path: Path, target: Path, data: Collection[str], made: Collection[str], data_until: float, *, is_data: bool = False
) -> bool:
    """Move a file or the contents of a folder, except `data` of before `data_until` and subfolders that are not `made`
    by the run, as another program may have made them; return whether all of it was moved.
    """
    if not os.path.lexists(path):
        return True
    is_folder, is_data = _is_folder(path), is_data or str(path) in data
    try:
        if is_data and not is_folder and path.lstat().st_ctime < data_until - _FILE_CLOCK_SECONDS:
            return True
        while os.path.lexists(target) and is_folder is not _is_folder(target):
            target = target.with_name(f"{target.name}~")
        if not is_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, target)
            return True
        if not is_data:
            target.mkdir(parents=True, exist_ok=True)
        inner = [each for each in sorted(path.iterdir()) if is_data or str(each) in made or not _is_folder(each)]
        are_moved = [_move(each, target / each.name, data, made, data_until, is_data=is_data) for each in inner]
        with suppress(OSError):  # data are in it
            path.rmdir()
    except OSError:
        return False
    return all(are_moved)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder itself, and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _replace(path: Path, target: Path) -> None:
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        target.unlink(missing_ok=True)
        shutil.move(path, target)


def _from_here(path: str) -> str:
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def remember(path: Path, kept: Iterable[str]) -> None:
    """Write the paths that stay to the file `path`, with the state that shows whether they were changed since."""
    files = {str(file): _state(file) for each in kept for file in (Path(each), *sorted(Path(each).rglob("*")))}
    write_atomically(path, json.dumps(files, indent=1))


def clear_up(noted: str, aside: str, memory: str, began: float) -> None:
    """Move the paths listed in the file `noted` to the folder `aside`, and write those that stay to the file `memory`.

    The supervisor of a command calls this if the search was killed. Data written since `began` (seconds since the
    epoch) are moved too, since they may be incomplete.
    """
    remember(Path(memory), set_aside(Path(noted), Path(aside), began)[0])


CLEAR_UP = clear_up.__module__, clear_up.__name__


def remembered(path: Path) -> tuple[str, ...]:
    """Return the paths that `remember` wrote and that nobody changed or made anew since; a folder only if this holds
    for all of its files.

    Raises `FormatError` if the file is damaged.
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
    """Return a file's inode and modification time in nanoseconds, or a folder's inode; None if the path does
    not exist.
    """
    try:
        found = path.lstat()
    except OSError:
        return None
    return [found.st_ino] if path.is_dir() else [found.st_ino, found.st_mtime_ns]


def _holds_only(path: Path, names: Collection[str]) -> bool:
    return not path.is_dir() or all(str(inner) in names for inner in path.rglob("*"))


def leftover_notes(folder: Path | None, kept: Iterable[str], stuck: Iterable[str]) -> tuple[str, ...]:
    """Return sentences for the user on the files that could not be moved (`stuck`), those that were moved to `folder`,
    and the data that were `kept`; empty if there are none.
    """
    said, moved, stay = [], _moved_to(folder) if folder else (), named(map(_from_here, kept))
    if left := named(map(_from_here, (path for path in stuck if os.path.lexists(path)))):
        said.append(f"Trials wrote {left}, which could not be moved: remove it, or your own run may resume from it.")
    if folder and moved:
        said.append(
            f"Trials wrote {named(moved)}: moved to {os.path.relpath(folder)}, so that your own run does not resume "
            "from it. Delete it when you like."
        )
    if stay:
        said.append(f"Data or caches that trials wrote stay in their place: {stay}.")
    return tuple(said)


def _moved_to(folder: Path) -> tuple[str, ...]:
    """Return the former paths of the files in `folder`; if a folder they were in no longer exists, the path of that
    folder.
    """
    found = set()
    for file in folder.rglob("*"):
        if _is_folder(file):
            continue
        path = file.relative_to(folder)
        path = Path("/", *path.parts[1:]) if path.parts[0] == "root" else path
        gone = (each for each in (*reversed(path.parents), path) if not os.path.lexists(each))
        found.add(str(next(gone, path)))
    return tuple(sorted(found))


def named(paths: Iterable[str]) -> str:
    """Return a text that lists the first `MAX_NAMED` paths; a folder with more than `MAX_NAMED_IN_FOLDER` of them is
    listed with their number.
    """
    found = [Path(path) for path in paths]
    num_in = Counter(path.parent for path in found)
    names = [str(path) for path in found if num_in[path.parent] <= MAX_NAMED_IN_FOLDER]
    names += [f"{num} in {folder}" for folder, num in num_in.items() if num > MAX_NAMED_IN_FOLDER]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more

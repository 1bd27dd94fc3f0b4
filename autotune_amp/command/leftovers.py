"""Move away the files that runs of a command create outside of their own folders, so that neither the next trial nor
the real training resumes from them.

The agent's guard lists every path that a run creates in one file, in the study's folder, so that the next search knows
it even if nothing of this one was left to clear up. Entries `-path` are moved; entries `+path` are data that were
downloaded or prepared, which stay for the next run once they are complete.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from autotune_amp.core.documents import cause, read_file
from autotune_amp.core.errors import FormatError
from autotune_amp.core.recommendation import write_atomically
from autotune_amp.processes.program import new_folder

FOLDER = "trial_leftovers"  # the folder of a study that leftovers are moved to
_CREATED_LIST = "created-"  # begins the name of a run's list file in the folder of its study
_FILE_CLOCK_SECONDS = 0.02  # twice the largest tick (10 ms) of the kernel clock that sets file times
MAX_LISTED, MAX_LISTED_IN_FOLDER = 5, 3  # more paths are only counted


def created_list_in(study: Path, run: Path) -> Path:
    """Return the path of the list file of a run that begins now. Its name has the time and that of the run's folder."""
    return study.absolute() / f"{_CREATED_LIST}{time.time_ns()}-{run.name}"


def write_kept(file: Path, kept: Iterable[str]) -> None:
    """Write the list file of a run, with the data that earlier runs created, which this run may change."""
    file.write_bytes(b"".join(b"+" + os.fsencode(path) + b"\0" for path in kept))


def read_entries(file: Path) -> list[str]:
    """Return the entries of a list file to which the processes of a run append; empty if it does not exist.

    A last entry without its end, of which a full disk took only a part, is left out.
    """
    content = file.read_bytes() if file.exists() else b""
    return [os.fsdecode(entry) for entry in content.split(b"\0")[:-1] if entry]


def set_aside(file: Path, folder: Path | None, data_until: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Move the paths listed in `file` to `folder`, at their path relative to the working directory, or below `root`.

    Data last written before `data_until` (seconds since the epoch) stay; later data may be incomplete. A file of an
    earlier run at the same place in `folder` is replaced. Return the data that stay (all existing paths if `folder` is
    None) and the paths that cannot be moved. A folder that the run created represents its files.
    """
    entries = read_entries(file)
    data = {entry[1:] for entry in entries if entry[0] == "+"}
    created = {entry[1:] for entry in entries}
    if folder is None:
        return existing_outermost(created), ()
    stuck = {
        path
        for path in sorted(created)
        if not _move_to(Path(path), _target(Path(path), folder), data, created, data_until)
    }
    return existing_outermost(data - stuck), existing_outermost(stuck)


def existing_outermost(paths: Collection[str]) -> tuple[str, ...]:
    """Return the existing paths that are not below another of the paths, sorted."""
    outermost = (path for path in paths if not any(str(parent) in paths for parent in Path(path).parents))
    return tuple(sorted(path for path in outermost if os.path.lexists(path)))


def _target(path: Path, folder: Path) -> Path:
    here = Path.cwd()
    return folder / (path.relative_to(here) if path.is_relative_to(here) else Path("root", *path.parts[1:]))


def _move_to(
    path: Path,
    target: Path,
    data: Collection[str],
    created: Collection[str],
    data_until: float,
    *,
    is_data: bool = False,
) -> bool:
    """Move a file, or the contents of a folder; return whether all could be moved.

    Two exceptions stay: `data` written before `data_until`, and subfolders that are not in `created`, which another
    program may have created.
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
        inner = [each for each in sorted(path.iterdir()) if is_data or str(each) in created or not _is_folder(each)]
        are_moved = [_move_to(each, target / each.name, data, created, data_until, is_data=is_data) for each in inner]
        with suppress(OSError):  # it still contains data
            path.rmdir()
    except OSError:
        return False
    return all(are_moved)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder, not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


def _replace(path: Path, target: Path) -> None:
    try:
        path.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        target.unlink(missing_ok=True)
        shutil.move(path, target)


def _relative(path: str) -> str:
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def save_kept(path: Path, kept: Iterable[str], stuck: Iterable[str] = ()) -> None:
    """Add the paths of data that stay to the JSON file `path`, each with its `_state`, to recognise later changes.

    Runs that load together end one after the other, each with the data that it knows. `stuck` paths are removed.
    """
    kept = existing_outermost({*load_kept(path), *kept}.difference(stuck))
    files = {str(file): _state(file) for each in kept for file in (Path(each), *sorted(Path(each).rglob("*")))}
    write_atomically(path, json.dumps(files, indent=1))


def clear_up(created_list: str, aside: str, memory: str) -> None:
    """Move the paths listed in the file `created_list` to the folder `aside`; write those that stay to the file
    `memory`. Remove the list.

    The keeper of a command calls it if the search was killed. Data written since the run began are moved too, as they
    may be incomplete.
    """
    file = Path(created_list)
    began = int(file.name.removeprefix(_CREATED_LIST).partition("-")[0]) / 1e9
    save_kept(Path(memory), *set_aside(file, Path(aside), began))
    file.unlink(missing_ok=True)


CLEAR_UP = clear_up.__module__, clear_up.__name__


def clear_up_after_killed(study: Path, aside: Path, memory: Path) -> None:
    """Move the files of runs whose keepers were killed too, and remove the folders of these runs."""
    for file in sorted(study.iterdir()):
        if name := re.fullmatch(rf"{_CREATED_LIST}[0-9]+-(amp-[0-9a-f]+)", file.name):
            clear_up(str(file), str(aside), str(memory))
            shutil.rmtree(new_folder().with_name(name[1]), ignore_errors=True)


def load_kept(path: Path) -> tuple[str, ...]:
    """Return the paths that `save_kept` wrote and that are unchanged since; a folder only if all of its files are.

    Raises `FormatError` if the file is damaged.
    """
    try:
        content = json.loads(read_file(path))  # names that are not UTF-8 have surrogates, which msgspec refuses
        files = msgspec.convert(content, dict[str, list[int] | None])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:  # msgspec's is a ValueError too
        raise FormatError(
            f"{path} is damaged: {cause(error)}.", "Delete it: it only lists files that trials created."
        ) from error
    unchanged = {name for name, state in files.items() if state is not None and _state(Path(name)) == state}
    return tuple(sorted(name for name in unchanged if _contains_only(Path(name), unchanged)))


def _state(path: Path) -> list[int] | None:
    """Return a file's inode and modification time in nanoseconds, or a folder's inode; None if the path does
    not exist.
    """
    try:
        status = path.lstat()
    except OSError:
        return None
    return [status.st_ino] if path.is_dir() else [status.st_ino, status.st_mtime_ns]


def _contains_only(path: Path, names: Collection[str]) -> bool:
    return not path.is_dir() or all(str(inner) in names for inner in path.rglob("*"))


def leftover_notes(folder: Path | None, kept: Iterable[str], stuck: Iterable[str]) -> tuple[str, ...]:
    """Return sentences for the user on the files that could not be moved (`stuck`), those moved to `folder`, and the
    data that stay (`kept`); empty if there are none.
    """
    notes, moved, staying = [], _paths_moved_to(folder) if folder else (), shortened_list(map(_relative, kept))
    if not_moved := shortened_list(map(_relative, (path for path in stuck if os.path.lexists(path)))):
        notes.append(
            f"Trials wrote {not_moved}, which could not be moved: remove it, or your own run may resume from it."
        )
    if folder and moved:
        notes.append(
            f"Trials wrote {shortened_list(moved)}: moved to {os.path.relpath(folder)}, so that your own run does not "
            "resume from it. Delete it when you like."
        )
    if staying:
        notes.append(f"Data or caches that trials wrote stay in their place: {staying}.")
    return tuple(notes)


def _paths_moved_to(folder: Path) -> tuple[str, ...]:
    """Return the former paths of the files in `folder`. If the folder of a file no longer exists, return that
    instead.
    """
    former_paths = set()
    for file in folder.rglob("*"):
        if _is_folder(file):
            continue
        path = file.relative_to(folder)
        path = Path("/", *path.parts[1:]) if path.parts[0] == "root" else path
        missing = (each for each in (*reversed(path.parents), path) if not os.path.lexists(each))
        former_paths.add(str(next(missing, path)))
    return tuple(sorted(former_paths))


def shortened_list(paths: Iterable[str]) -> str:
    """Return a text that lists the first `MAX_LISTED` paths. Of a folder with more than `MAX_LISTED_IN_FOLDER` of them,
    only their number is listed.
    """
    all_paths = [Path(os.fsencode(path).decode(errors="replace")) for path in paths]
    num_in = Counter(path.parent for path in all_paths)
    names = [str(path) for path in all_paths if num_in[path.parent] <= MAX_LISTED_IN_FOLDER]
    names += [f"{num} in {folder}" for folder, num in num_in.items() if num > MAX_LISTED_IN_FOLDER]
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more

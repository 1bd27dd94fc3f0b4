"""Source of a search whose trials run a training command, and the fingerprint of its files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.documents import cause, decode, read_file
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.hardware import DeviceIdentity
from autotune_amp.core.outcome import Description
from autotune_amp.core.recommendation import Fingerprint, write_atomically
from autotune_amp.distributed import is_from_launcher
from autotune_amp.fingerprint import file_digest, imported_names, installed_version, text_digest, user_modules
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.source import Source, folder_name, relative_path
from autotune_amp.search.space import Space
from autotune_amp.search.storage.folder import StudyFolder

if TYPE_CHECKING:
    from autotune_amp.command.command import Command
    from autotune_amp.processes.local import Backend, Isolation, Slot, WorkloadBackend
    from autotune_amp.processes.process import Watcher
    from autotune_amp.processes.standby import Standby


MAX_SOURCES = 2000  # more files take too long to compare before every cached recommendation
# Variables that do not affect a training, or that devices and the program have parts for.
_PLACES = {
    *("PATH", "HOME", "PWD", "OLDPWD", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "TMP", "TEMP", "CUDA_VISIBLE_DEVICES"),
    *("TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME"),
}
_OF_A_JOB = ("SLURM_JOB", "SLURM_ARRAY_", "SLURM_NODELIST", "SLURM_STEP", "PBS_JOB", "LSB_JOB", "SSH_")
_GONE = "gone"  # digest of a recorded file that no longer exists


def plan_lines(space: Space, description: Description, template: CommandTemplate) -> list[str]:
    """Return lines for the user on what the search of a command tries, and which placeholders would let it try more."""
    sizes = sorted({c.batch_size for c in space.candidates})
    precisions = list(dict.fromkeys(c.precision for c in space.candidates))

    def how(name: str, values: Sequence[object]) -> str:
        if len(values) == 1:
            return "only"
        return f"({{{name}}})" if name in template.filled_names else "(set from outside)"

    tried = [
        f"precision {' or '.join(precisions)} {how('precision', precisions)}",
        f"batch size {' to '.join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))} {how('batch_size', sizes)}",
    ]
    arguments = {name.lstrip("!"): values for name, values in space.argument_values.items()}
    tried += [f"{name} {' or '.join(values)}" for name, values in arguments.items() if space.variants.get(name)]
    lines = [f"Tries {'; '.join(tried)}."]
    if description.missing_placeholders:
        lines.append(f"Not tried without a placeholder: {', '.join(description.missing_placeholders)}.")
    if description.suggestions:
        suggested = " ".join(description.suggestions)
        lines.append(
            f"If the script takes them, these arguments (in place of those of that name) let it try more: {suggested}."
        )
    return lines


def files_of_command(arguments: Sequence[str]) -> list[Path]:
    """Return the files that can be found from the arguments of a command without running it.

    They are the files named in the arguments, in the text after ``-c`` and in shell scripts, and those that Python
    files import, at every depth. Other files that the command reads are recorded by `OpenedFiles`.
    """
    values = [value for argument in arguments for value in (argument, argument.partition("=")[2]) if value]
    scripts = [word for flag, text in pairwise(arguments) if re.fullmatch(r"-\w*c", flag) for word in _words(text)]
    files = dict.fromkeys(Path(value) for value in (*values, *scripts) if _is_file(value))
    unread = list(files)
    while unread and len(files) <= MAX_SOURCES:
        new_files = [path for path in _named_in(unread.pop()) if path not in files]
        files |= dict.fromkeys(new_files)
        unread += new_files
    return list(files)


def _named_in(path: Path) -> Iterator[Path]:
    """Yield the files that a Python file imports or that a shell script names.

    They are looked up in the working directory and in the folder of the file.
    """
    if path.suffix == ".sh":
        named = _words(path.read_text(errors="replace"))
        yield from (folder / word for folder in (Path(), path.parent) for word in named if _is_file(str(folder / word)))
    for name in imported_names(path.read_text(errors="replace")) if path.suffix == ".py" else ():
        dots = len(name) - len(name.lstrip("."))
        above = path.parent.joinpath(*[os.pardir] * (dots - 1))
        for folder in (above,) if dots else (Path(), above):
            for _, file in user_modules(name.lstrip("."), [str(folder.absolute())], {}):
                yield from () if file is None else [Path(relative_path(file))]


def _words(text: str) -> list[str]:
    return re.findall(r"[\w./+-]+", text)


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # the text is not a path
        return False


def fingerprint_parts(line: CommandTemplate) -> dict[str, str]:
    """Return the parts of a command's fingerprint that are known before it runs: its arguments, values and files."""
    parts = {"command": f"={shlex.join(line.arguments)}"}
    parts |= {f"--value {name}": f"={word}" for name, word in line.values.items()}
    files = [*files_of_command(line.arguments), *map(Path, line.files)]
    parts |= {f"file {file}": file_digest(file) for file in files}
    variables, libraries = _named_in_code(path for path in files if path.suffix in (".py", ".sh"))
    parts |= {f"environment variable {name}": text_digest(os.environ[name]) for name in variables}
    program = shutil.which(line.arguments[0])
    if program is None or Path(program).parent != Path(sys.executable).parent:
        return parts | {"program": f"={program}"}  # its libraries are those of another environment
    return parts | {f"version of {name}": f"={installed_version(name)}" for name in libraries}


def _named_in_code(files: Iterable[Path]) -> tuple[list[str], list[str]]:
    """Return the environment variables that are set, and the installed libraries, that Python files and shell scripts
    name, in the order of their names.

    Variables that tell the place of files, a process its rank, or a job its number and hosts, do not count.
    """
    variables, libraries = set[str](), set[str]()
    for path in files:
        text = path.read_text(errors="replace")
        is_python = path.suffix == ".py"
        variables.update(re.findall(r"[\"']([A-Z][A-Z0-9_]*)[\"']" if is_python else r"\$\{?([A-Z][A-Z0-9_]*)", text))
        libraries.update(name.partition(".")[0] for name in (imported_names(text) if is_python else ()))
    counted = [
        each
        for each in variables & os.environ.keys()
        if not (each in _PLACES or each.startswith(_OF_A_JOB) or is_from_launcher(each))
    ]
    return sorted(counted), sorted(each for each in libraries if each and installed_version(each) is not None)


class OpenedFiles:
    """Record of the files of code and settings that trials read, with the digest of each when it was first read.

    Unchanged files are not part of a fingerprint's digest, so that a search keeps its ID although these files become
    known only in its trials. The record is kept in a file of the study's folder.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._now: dict[str, str] = {}  # digests at the start of this search, or when a trial first read the file
        self._path: Path | None = None

    def keep_in(self, path: Path) -> None:
        """Load the record of earlier searches from `path`, and write additions to it.

        Raises `FormatError` if the file is damaged.
        """
        self._path = path
        with contextlib.suppress(FileNotFoundError):
            try:
                self._first = decode(read_file(path), dict[str, str])
            except msgspec.MsgspecError as error:
                raise FormatError(
                    f"{path} is damaged: {cause(error)}.", "Remove it: it lists files that trials read."
                ) from error
        self._now = {path: file_digest(path) if _is_file(path) else _GONE for path in self._first}

    def add(self, paths: Iterable[str]) -> None:
        """Record the files that a trial read and that are not recorded yet."""
        new = {path: file_digest(path) for path in paths if path not in self._first and _is_file(path)}
        if new and self._path is not None:
            self._first |= new
            self._now |= new
            write_atomically(self._path, json.dumps(self._first, indent=1))

    def parts(self, excluded: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the digests of the recorded files by label, and of those that changed before this search.

        Files in `excluded`, which the fingerprint contains already, are left out.
        """
        real = {os.path.realpath(each) for each in excluded}
        now = {path: digest for path, digest in self._now.items() if path not in real}
        changed = {_label(path): each for path, each in now.items() if each != self._first[path]}
        return {_label(path): each for path, each in now.items()}, changed


def _label(path: str) -> str:
    return f"file {relative_path(path)}"


class CommandSource(Source):
    """Source whose trials run a command, described by a `CommandTemplate`."""

    def __init__(self, line: CommandTemplate) -> None:
        super().__init__("autotune_amp.workloads:workload")  # the probe of the device runs no code of the user
        self._line = line
        self._opened = OpenedFiles()
        self.name = folder_name(line.name)

    @property
    def command_template(self) -> CommandTemplate:
        """Return the command's template, with the placeholders that were added after its first run."""
        return self.command.line

    def plan_lines(self, space: Space, description: Description) -> list[str]:  # noqa: D102 - see Source
        return plan_lines(space, description, self.command.line)

    @cached_property
    def command(self) -> Command:
        """Return the command, which keeps the observations of its runs."""
        from autotune_amp.command.command import Command

        command = Command(self._line)
        command.opened = self._opened.add
        return command

    def backend(
        self,
        watcher: Watcher,
        isolation: Isolation | None = None,
        environment: dict[str, str] | None = None,
        slot: Slot | None = None,
        standby: Standby | None = None,  # noqa: ARG002 - it is the command that is started again
    ) -> WorkloadBackend:
        """Return a backend that starts the command for each trial.

        Trials train one after the other. Raises `InvalidRequestError` if `slot` is one of several.
        """
        if slot is not None and slot.name is not None:
            raise InvalidRequestError(
                "The trials of a command run one after the other, and on the ranks that it starts itself.",
                "Leave --devices and --ranks out, or give a function that returns a Workload.",
            )
        from autotune_amp.command.backend import CommandBackend

        return CommandBackend(self.command, super().backend(watcher, isolation, environment), watcher, environment)

    def keep_in(self, folder: Path) -> None:
        """Move files that trials write to a subfolder of `folder`, and record there the files that they read.

        Raises `FormatError` if the record is damaged.
        """
        self.command.keep_in(folder)
        self._opened.keep_in(folder / "opened.json")

    def notes(self) -> tuple[str, ...]:  # noqa: D102 - see Source
        return self.command.notes()

    def leftovers(self) -> tuple[str, ...]:  # noqa: D102 - see Source
        return self.command.leftovers()

    @contextlib.contextmanager
    def keeping_leftovers(self) -> Iterator[None]:
        """Move the files that trials write in this context to the study folder of a search with default options.

        A new folder without such files is removed. Raises `StudyError` if a search runs in the folder, or if it cannot
        be used.
        """
        from autotune_amp.command.command import KEPT_LIST

        with StudyFolder(SearchOptions().out, self.name) as folder:
            self.command.keep_in(folder.path)
            try:
                yield
            finally:
                if not self.leftovers():
                    (folder.path / KEPT_LIST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it holds studies
            folder.path.parent.rmdir()

    def fingerprint_by_child(
        self, options: dict[str, Any], identity: DeviceIdentity, backend: Backend, state: dict[str, Any]
    ) -> Fingerprint:
        """Return the fingerprint, including the command and the files that it names, imports or has read."""
        base = super().fingerprint_by_child(options, identity, backend, state)
        parts = {name: part for name, part in fingerprint_parts(self._line).items() if name not in base.parts}
        opened, changed = self._opened.parts(_files(parts))
        digest = hashlib.sha256(repr((base.digest, sorted({**parts, **changed}.items()))).encode()).hexdigest()
        return _with_files(Fingerprint(digest=digest, parts={**base.parts, **parts, **opened}, unknown=base.unknown))

    def with_opened(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the fingerprint with the files that trials have read as further parts."""
        opened, _ = self._opened.parts(_files(fingerprint.parts))
        return _with_files(msgspec.structs.replace(fingerprint, parts={**fingerprint.parts, **opened}))


def _files(parts: Iterable[str]) -> list[str]:
    return [name.removeprefix("file ") for name in parts if name.startswith("file ")]


def _with_files(fingerprint: Fingerprint) -> Fingerprint:
    """Return the fingerprint with the digests of its files, marked as unknown if they are more than `MAX_SOURCES`."""
    files = {name: fingerprint.parts[f"file {name}"] for name in _files(fingerprint.parts)}
    problem = f"the command reads more than {MAX_SOURCES} files of code and settings"
    unknown = (*fingerprint.unknown, *([problem] if len(files) > MAX_SOURCES else []))
    return msgspec.structs.replace(fingerprint, files=files, unknown=unknown)

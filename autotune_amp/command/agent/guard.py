"""Guard of existing files: the process ends before a trial overwrites, appends to, moves or removes a file that was
there before, or uploads anything, and reports the line that was about to do so.

*Checked:* files that Python itself opens for writing, renames, removes or truncates (audit events: ``open``, shutil,
logging, numpy and pandas all raise them); a file opened for update (``r+``) once it is written to or its descriptor is
taken; statements that change an SQLite database; files that torch, torch.jit and safetensors write in native code;
creating a repository of the Hugging Face Hub or committing to one.

*Free:* the trial's own folders; files that the same run has made, which all its processes list in one file, and the
data that earlier runs made; devices, pipes, byte code, empty lock files; the caches in `_CACHES`, which libraries fill
and repair by themselves. Data that were downloaded or prepared are listed apart from other new files: see `_is_data`.

*Not visible here:* writing by programs other than Python (``rm``, ``tee``, a shell's ``>``), by a Python that ignores
PYTHONPATH, by other native writers (HDF5, Arrow, OpenCV), and os.open with a ``dir_fd``.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import re
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import source_from_cache
from typing import Any

from . import where
from .channel import Channel
from .imports import after_import

REFUSED = 114  # exit status
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - no folder of devices
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_NEW = os.O_CREAT | os.O_EXCL  # fails if the file exists
# Folders of caches: the variable that names each, and its default.
_CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "",
    "HF_HUB_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TRANSFORMERS_CACHE": "",
    "TORCH_HOME": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TORCH_EXTENSIONS_DIR": "",
    "TRITON_HOME": "~/.triton",
    "TRITON_CACHE_DIR": "",
    "NUMBA_CACHE_DIR": "",
    "CUDA_CACHE_PATH": "~/.nv",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "": "~/Library/Caches",
}
_DATA_CLASSES = frozenset({"Dataset", "IterableDataset", "LightningDataModule"})
_DATA_MODULES = (
    "datasets",
    "gdown",
    "huggingface_hub._snapshot_download",
    "huggingface_hub.file_download",
    "kagglehub",
    "nltk.downloader",
    "ogb",
    "sklearn.datasets",
    "torch.hub",
    "torchaudio.datasets",
    "torchvision.datasets",
    "wget",
)
_DATA_FUNCTIONS = frozenset({"extract", "extractall", "unpack_archive", "urlretrieve"})  # of the standard library
_CACHE_NAME = re.compile(r"\.?caches?|.+[._-]cache", re.IGNORECASE)
_STANDARD = os.path.dirname(os.__file__) + os.sep
# Actions of SQLite's authorizer that change a database: insert, delete, update, create, drop.
_SQL_CHANGES = frozenset({*range(1, 19), 23, 26, 29, 30})


# Files of code and settings: a cached answer holds for those that a training run reads.
_SOURCES = (".py", ".pyc", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")


def arm(channel: Channel, free: list[str], made: str, opened: str) -> None:
    """Guard this process from here on.

    Files may be changed in the folders `free` and if they are named in the file `made`. Every path that is made
    elsewhere is added to `made`: as `+path` if it is data, else as `-path`. Code and settings of the user that are read
    are added to the file `opened`.
    """
    guard = _Guard(channel, free, made, opened)
    guard.watch_updating()
    sys.addaudithook(guard.hear)
    after_import("torch", channel.shield(guard.watch_torch))
    after_import("safetensors", channel.shield(guard.watch_safetensors))
    after_import("huggingface_hub.hf_api", channel.shield(guard.watch_hub))
    after_import("sqlite3.dbapi2", channel.shield(guard.watch_sqlite))


class _Guard:
    def __init__(self, channel: Channel, free: list[str], made: str, opened: str) -> None:
        self._channel = channel
        self._opened = os.path.realpath(opened)
        self._read: set[str] = set()
        self._made = os.path.realpath(made)
        caches = (os.environ.get(name) or os.path.expanduser(usual) for name, usual in _CACHES.items())
        self._here = os.path.realpath(os.getcwd())
        folders = ["/dev", "/proc", *free, *filter(os.path.isabs, (*caches, sys.pycache_prefix or ""))]
        self._free = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._own: dict[str, bool] = {}  # paths that the run made, and whether each holds data
        self._opening = threading.local()  # `is_deferred` while opening a file that is checked at its first write
        self._asked: dict[str, Any] = {
            "open": self._opens,
            "cpython.run_file": self._reads,
            "os.truncate": lambda path, _: self.changes("os.truncate", _followed(path)),
            "os.remove": lambda path, folder=-1: self.removes("os.remove", _named(path, folder)),
            "os.rmdir": lambda path, folder=-1: self.removes("os.rmdir", _named(path, folder)),
            "shutil.rmtree": lambda path, *_: self.removes("shutil.rmtree", _named(path)),
            "os.rename": self._renames,
            "os.mkdir": lambda path, _, folder=-1: self._makes(_named(path, folder), is_folder=True),
            "os.link": lambda _, path, __=-1, folder=-1: self._makes(_named(path, folder)),
            "os.symlink": lambda _, path, folder=-1: self._makes(_named(path, folder)),
        }

    def hear(self, event: str, arguments: Any) -> None:
        """Check an audit event: called before every action of Python that raises one."""
        asked = self._asked.get(event)
        if asked is None:
            return
        with suppress(Exception):  # an open file or an impossible name is left to Python
            asked(*arguments)

    def changes(self, what: str, path: str) -> None:
        """Check a file that is about to be written to: note it if it is new, end the process if it was there before."""
        try:
            status = os.stat(path)
        except OSError:
            self._makes(path)
            return
        if stat.S_ISREG(status.st_mode) and not (path.endswith(".lock") and status.st_size == 0):
            self._refuse_unless_own(what, path)

    def removes(self, what: str, path: str) -> None:
        """End the process if a file or folder that is about to be removed was there before."""
        if os.path.lexists(path):
            self._refuse_unless_own(what, path)

    def _opens(self, path: Any, _: Any, flags: int) -> None:
        if getattr(self._opening, "is_deferred", False):
            return
        if flags & _NEW == _NEW:
            self._makes(_followed(path))
        elif flags & _WRITING:
            self.changes("open", _followed(path))
        else:
            self._reads(path)

    def _reads(self, path: Any) -> None:
        """Note a file that is read, byte code as the source that it was compiled from."""
        name = os.fsdecode(path)
        if name in self._read or not name.endswith(_SOURCES):
            return
        self._read.add(name)
        source = _followed(source_from_cache(name) if name.endswith(".pyc") else name)
        if not where.is_library(source) and not self._is_own(source) and os.path.isfile(source):
            _note(self._opened, source)

    def _renames(self, path: Any, to: Any, folder: int = -1, to_folder: int = -1) -> None:
        self.removes("os.rename", _named(path, folder))
        target = _named(to, to_folder)
        self.removes("os.rename", target)
        self._makes(target)

    def _makes(self, path: str, *, is_folder: bool = False) -> None:
        """Note a path as the trial's own, if it does not exist yet: every folder, since others may make some beside it
        in the same one, and files that no noted folder stands for.
        """
        if self._is_free(path) or os.path.lexists(path):
            return
        is_data = _is_cache(os.path.relpath(path, self._here)) or _is_data()
        is_known = next((self._own[each] for each in _with_parents(path) if each in self._own), None) is is_data
        if is_known and (not is_folder or path in self._own):
            return
        self._own[path] = is_data
        _note(self._made, path, b"+" if is_data else b"-")

    def _is_free(self, path: str) -> bool:
        is_in_folder = (path + os.sep).startswith(self._free) and not path.startswith(_SHARED_MEMORY)
        return path in (self._made, self._opened) or is_in_folder or "__pycache__" in path.split(os.sep)

    def _is_own(self, path: str) -> bool:
        return self._is_free(path) or any(each in self._own for each in _with_parents(path))

    def _refuse_unless_own(self, what: str, path: str) -> None:
        if self._is_own(path):
            return
        if os.path.exists(self._made):  # another process may have made it
            with open(self._made, "rb") as made:
                entries = made.read().split(b"\0")[:-1]
            self._own.update((os.fsdecode(entry[1:]), entry[:1] == b"+") for entry in entries)
            if self._is_own(path):
                return
        self._refuse(what, path)

    def _refuse(self, what: str, path: str) -> None:
        try:
            self._channel.send("refused", what=what, path=path, line=where.user_line())
        finally:
            os._exit(REFUSED)

    def watch_updating(self) -> None:
        """Hook into ``open`` so that a file opened for update may be read: it is checked when it is first
        written to.
        """
        original = io.open

        def open_(
            file: Any,
            mode: Any = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            is_text = isinstance(mode, str) and "b" not in mode
            if not self._is_to_be_updated(file, mode) or (is_text and buffering == 0):  # error of open()
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            ask = functools.partial(self.changes, "open", _followed(file))
            self._opening.is_deferred = True
            try:
                raw = _AskingFile(file, "r+", closefd, opener)
            finally:
                self._opening.is_deferred = False
            raw.ask = ask
            if buffering == 0:
                return raw
            buffered = _AskingBuffer(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
            buffered.ask = ask
            if not is_text:
                return buffered
            text = _AskingText(buffered, encoding, errors, newline, buffering == 1)
            text.ask, text.mode = ask, mode
            return text

        builtins.open = io.open = _Open(open_, original)

    def _is_to_be_updated(self, file: Any, mode: Any) -> bool:
        """Whether the file exists, is not the trial's own, and is opened to be read and written."""
        is_plain = isinstance(mode, str) and "+" in mode and "r" in mode and not set(mode) - set("r+bt")
        if not is_plain or not isinstance(file, (str, bytes, os.PathLike)):
            return False
        path = _followed(file)
        return os.path.isfile(path) and not self._is_own(path)

    # -- Native writers, which raise no audit event, are checked before they write -------------------------------------

    def watch_torch(self, torch: Any) -> None:
        """Hook into the one class by which torch.save, torch.export.save and torch.package write, and into
        TorchScript's method.
        """
        guard, writer, script = self, torch._C.PyTorchFileWriter, torch.jit.RecursiveScriptModule

        class PyTorchFileWriter(writer):  # type: ignore[misc, valid-type]
            def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
                if isinstance(file, (str, os.PathLike)):
                    guard.changes("torch.save", _followed(file))
                super().__init__(file, *args, **kwargs)

        torch._C.PyTorchFileWriter = PyTorchFileWriter
        _ask_before(script, "save", lambda _, file, **__: guard.changes("torch.jit.save", _followed(file)))

    def watch_safetensors(self, safetensors: Any) -> None:
        """Hook into the one function by which all frontends of safetensors write."""
        _ask_before(
            safetensors,
            "serialize_file",
            lambda _, filename, *__, **___: self.changes("safetensors", _followed(filename)),
        )

    def watch_sqlite(self, sqlite: Any) -> None:
        """Hook into ``sqlite3.connect`` so that a database may be read, and its first change is checked."""
        connect = sqlite.connect

        def guarded(database: Any, *args: Any, **kwargs: Any) -> Any:
            path = _database_file(database)
            if path:
                self._makes(path)
            connection = connect(database, *args, **kwargs)
            if path and not self._is_own(path):

                def allows(action: int, _: Any, __: Any, which: Any, ___: Any) -> int:
                    if action in _SQL_CHANGES and which == "main":
                        self.changes("sqlite3", path)
                    return 0  # SQLITE_OK, as without an authorizer

                connection.set_authorizer(allows)
            return connection

        sqlite.connect = guarded

    def watch_hub(self, hub: Any) -> None:
        """Hook into the functions that make a repository or a commit on the Hugging Face Hub, which every
        upload does.
        """

        def uploads(repo_id: Any, *_: Any, **__: Any) -> None:
            self._refuse("an upload", f"{hub.constants.ENDPOINT}/{repo_id}")

        for name in ("create_repo", "create_commit", "preupload_lfs_files"):
            _ask_before(hub, name, uploads)
            _ask_before(hub.HfApi, name, lambda _, *args, **kwargs: uploads(*args, **kwargs))


def _is_cache(path: str) -> bool:
    """Whether a part of the path is named like a cache."""
    return any(_CACHE_NAME.fullmatch(part) for part in path.split(os.sep))


def _is_data() -> bool:
    """Whether data are about to be written: the caller is one of torch's dataset classes or a library that
    downloads.
    """
    for frame in where.frames(2):
        code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
        if f"{module}.".startswith(tuple(f"{name}." for name in _DATA_MODULES)):
            return True
        if code.co_name in _DATA_FUNCTIONS and module.partition(".")[0] in ("shutil", "tarfile", "urllib", "zipfile"):
            return True
        if code.co_varnames[:1] == ("self",):
            kinds = type(frame.f_locals.get("self")).__mro__
            if any(kind.__name__ in _DATA_CLASSES for kind in kinds):
                return True
    return False


def is_standard(path: str, folder: str) -> bool:
    """Return whether a file of code belongs to the standard library in `folder`, which may hold site-packages too."""
    return path.startswith(folder) and "site-packages" not in path and "dist-packages" not in path


class _Open:
    """Stand in for ``open`` and, like it, become no method where a class has it as an attribute."""

    def __init__(self, function: Any, original: Any) -> None:
        functools.update_wrapper(self, original)
        self.__module__ = "io"  # where pickle finds it
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return "open"


class _Asking:
    """Layer of a file that calls `ask` before anything is written, and before its descriptor is given to code that may
    write.
    """

    ask: Any = staticmethod(lambda: None)  # until the file is open

    def write(self, *args: Any) -> Any:
        self.ask()
        return super().write(*args)  # type: ignore[misc]

    def truncate(self, *args: Any) -> Any:
        self.ask()
        return super().truncate(*args)  # type: ignore[misc]

    def fileno(self) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller != __file__ and (not is_standard(caller, _STANDARD) or caller.endswith("subprocess.py")):
            self.ask()
        return super().fileno()  # type: ignore[misc]


class _AskingFile(_Asking, io.FileIO):
    pass


class _AskingBuffer(_Asking, io.BufferedRandom):
    pass


class _AskingText(_Asking, io.TextIOWrapper):
    mode: Any = "r+"


def _ask_before(owner: Any, name: str, ask: Any) -> None:
    """Have `ask` called with the arguments of a function before the function is called."""
    original = getattr(owner, name, None)
    if original is None:
        return

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # the function itself raises the error about its arguments
            ask(*args, **kwargs)
        return original(*args, **kwargs)

    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, guarded)


def _note(file: str, path: str, kind: bytes = b"") -> None:
    """Add a path to a list file that all processes of a run add to."""
    noted = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(noted, kind + os.fsencode(path) + b"\0")
    finally:
        os.close(noted)


def _followed(path: Any) -> str:
    """Return the real path of the file that a path leads to."""
    return os.path.realpath(os.fsdecode(path))


def _named(path: Any, folder: int = -1) -> str:
    """Return the absolute path without following a link that it names; relative to the open folder `folder`
    if given.
    """
    name = os.fsdecode(path).rstrip(os.sep)
    if folder is not None and folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    head, tail = os.path.split(name)
    return os.path.join(os.path.realpath(head), tail)


def _database_file(database: Any) -> str:
    """Return the file of an argument to ``sqlite3.connect``, "" for a database in memory and for an invalid
    argument.
    """
    if not isinstance(database, (str, bytes, os.PathLike)):
        return ""
    name = os.fsdecode(database)
    name = name[len("file:") :].partition("?")[0] if name.startswith("file:") else name
    return "" if name in ("", ":memory:") else os.path.realpath(name)


def _with_parents(path: str) -> Iterator[str]:
    while True:
        yield path
        parent = os.path.dirname(path)
        if parent == path:
            return
        path = parent

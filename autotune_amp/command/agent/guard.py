"""Guard of existing files: the process ends before a trial overwrites, appends to, moves or removes a file that was
there before, or uploads anything; the message names the line of the user's code.

*Checked:* files that Python itself opens for writing, renames, removes or truncates (audit events: ``open``, shutil,
logging, numpy and pandas all raise them); a file opened for update (``r+``) at its first write or when its descriptor
is requested; statements that change an SQLite database; files that torch, torch.jit, torch.profiler and safetensors
write in native code; creating a repository of the Hugging Face Hub or committing to one.

*Allowed:* the trial's own folders; files that the same run has created, which all its processes record in one list, and
the data that earlier runs created; devices, pipes, byte code, empty lock files; the caches in `_cache_folders()`, which
libraries fill and repair themselves. Data that the run downloads or prepares are marked in the list: see `_is_data`.

*Not checked:* writing by programs other than Python (``rm``, ``tee``, a shell's ``>``), by a Python that ignores
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

REFUSED = 114  # exit status after a refused change: a number without another meaning
_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - not a device: it holds files
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_EXCLUSIVE = os.O_CREAT | os.O_EXCL  # open() then fails if the file exists
# Cache folders: the environment variable that sets each, and its default.
_CACHE_FOLDERS = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "",
    "HF_HUB_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TRANSFORMERS_CACHE": "",
    "TORCH_HOME": "",
    "TORCHINDUCTOR_CACHE_DIR": "",
    "TORCH_EXTENSIONS_DIR": "",
    "TRITON_CACHE_DIR": "",
    "NUMBA_CACHE_DIR": "",
    "CUDA_CACHE_PATH": "~/.nv",
    "MPLCONFIGDIR": "~/.config/matplotlib",
    "": "~/Library/Caches",
}
# Classes, modules and standard-library functions that write downloaded or prepared data: see `_is_data`.
_DATA_CLASSES = ("Dataset", "LightningDataModule")
_MODULES_OF_DATA_CLASSES = ("torch.utils.data", "lightning.pytorch", "pytorch_lightning")
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
_DATA_FUNCTIONS = frozenset({"extract", "extractall", "unpack_archive", "urlretrieve"})
_CACHE_NAME = re.compile(r"\.?caches?|.+[._-]cache", re.IGNORECASE)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
# Actions of SQLite's authorizer that change a database: insert, delete, update, create, drop.
_SQL_CHANGES = frozenset({*range(1, 19), 23, 26, 29, 30})
# Suffixes of code and settings. A search result is reused from the cache while the files of these kinds that the
# training read are unchanged.
_SOURCE_SUFFIXES = (".py", ".pyc", ".sh", ".yaml", ".yml", ".json", ".toml", ".cfg", ".ini")


def arm(channel: Channel, free: list[str], made: str, opened: str) -> None:
    """Guard this process from now on.

    Files may be changed in the folders `free`, or if they are listed in the file `made`. Every path that the process
    creates elsewhere is appended to `made`: as `+path` if it is data, else as `-path`. Every file of the user's code
    and settings that is read is appended to the file `opened`.
    """
    guard = _Guard(channel, free, made, opened)
    guard.hook_open()
    sys.addaudithook(guard.check_event)
    after_import("torch", channel.shield(guard.hook_torch))
    after_import("safetensors", channel.shield(guard.hook_safetensors))
    after_import("huggingface_hub.hf_api", channel.shield(guard.hook_hub))
    after_import("sqlite3.dbapi2", channel.shield(guard.hook_sqlite))


class _Guard:
    """Checks of the file accesses of this process, and the hooks that call them; see the module's docstring."""

    def __init__(self, channel: Channel, free: list[str], made: str, opened: str) -> None:
        self._channel = channel
        self._read_list = os.path.realpath(opened)
        self._read_names: set[str] = set()
        self._created_list = os.path.realpath(made)
        self._working_folder = os.path.realpath(where.working_folder())
        folders = ["/dev", "/proc", *free, *filter(os.path.isabs, (*_cache_folders(), sys.pycache_prefix or ""))]
        self._free = tuple(os.path.realpath(folder) + os.sep for folder in folders)
        self._is_data_by_path: dict[str, bool] = {}  # paths that the run created, and whether each holds data
        self._opening = threading.local()  # `is_deferred` while opening a file that is checked at its first write
        self._checks: dict[str, Any] = {
            "open": self._check_open,
            "cpython.run_file": self._record_read,
            "os.truncate": lambda path, _: self.check_write("os.truncate", _real_path(path)),
            "os.remove": lambda path, folder=-1: self.check_removal("os.remove", _path_of_link(path, folder)),
            "os.rmdir": lambda path, folder=-1: self.check_removal("os.rmdir", _path_of_link(path, folder)),
            "shutil.rmtree": lambda path, *_: self.check_removal("shutil.rmtree", _path_of_link(path)),
            "os.rename": self._check_rename,
            "os.mkdir": lambda path, _, folder=-1: self._record_created(_path_of_link(path, folder), is_folder=True),
            "os.link": lambda _, path, __=-1, folder=-1: self._record_created(_path_of_link(path, folder)),
            "os.symlink": lambda _, path, folder=-1: self._record_created(_path_of_link(path, folder)),
        }

    def check_event(self, event: str, arguments: Any) -> None:
        """Check an audit event, before Python performs its action."""
        check = self._checks.get(event)
        if check is None:
            return
        with suppress(Exception):  # e.g. a file descriptor or an invalid path: Python raises its own error
            check(*arguments)

    def check_write(self, what: str, path: str) -> None:
        """Check a file before it is written to: record it if it is new, end the process if it existed before."""
        try:
            status = os.stat(path)
        except OSError:
            self._record_created(path)
            return
        if stat.S_ISREG(status.st_mode) and not (path.endswith(".lock") and status.st_size == 0):
            self._refuse_unless_allowed(what, path)

    def check_removal(self, what: str, path: str) -> None:
        """Check a path before it is removed: end the process if it existed before the run."""
        if os.path.lexists(path):
            self._refuse_unless_allowed(what, path)

    def _check_open(self, path: Any, _: Any, flags: int) -> None:
        if getattr(self._opening, "is_deferred", False):
            return
        if flags & _EXCLUSIVE == _EXCLUSIVE:
            self._record_created(_real_path(path))
        elif flags & _WRITE_FLAGS:
            self.check_write("open", _real_path(path))
        else:
            self._record_read(path)

    def _record_read(self, path: Any) -> None:
        """Record a file of code or settings that is read; for byte code, its source file."""
        name = os.fsdecode(path)
        if name in self._read_names or not name.endswith(_SOURCE_SUFFIXES):
            return
        self._read_names.add(name)
        source = _real_path(source_from_cache(name) if name.endswith(".pyc") else name)
        if not where.is_library(source) and not self._is_allowed(source) and os.path.isfile(source):
            _append_to_list(self._read_list, source)

    def _check_rename(self, path: Any, to: Any, folder: int = -1, to_folder: int = -1) -> None:
        source, target = _path_of_link(path, folder), _path_of_link(to, to_folder)
        self.check_removal("os.rename", source)
        self.check_removal("os.rename", target)
        if os.path.islink(source) or not os.path.isdir(source):
            self._record_created(target)
            return
        if self._is_free(target):
            return
        self._read_created_list()
        for each, _, _ in os.walk(source):
            if each == source or each in self._is_data_by_path or self._is_free(source):
                self._record_created(target + each[len(source) :], is_folder=True)

    def _record_created(self, path: str, *, is_folder: bool = False) -> None:
        """Record a path that does not exist yet as created by the run. Folders are always recorded, since other
        programs may create files beside them; a file is not if a recorded folder of the same kind (data or not)
        contains it.
        """
        if self._is_free(path) or os.path.lexists(path):
            return
        is_data = _is_cache(os.path.relpath(path, self._working_folder)) or _is_data()
        recorded = [self._is_data_by_path[each] for each in _with_parents(path) if each in self._is_data_by_path]
        is_recorded = recorded[:1] == [is_data]
        if is_recorded and (not is_folder or path in self._is_data_by_path):
            return
        self._is_data_by_path[path] = is_data
        _append_to_list(self._created_list, path, b"+" if is_data else b"-")

    def _is_free(self, path: str) -> bool:
        is_in_folder = (path + os.sep).startswith(self._free) and not path.startswith(_SHARED_MEMORY)
        return path in (self._created_list, self._read_list) or is_in_folder or "__pycache__" in path.split(os.sep)

    def _is_allowed(self, path: str) -> bool:
        return self._is_free(path) or any(each in self._is_data_by_path for each in _with_parents(path))

    def _refuse_unless_allowed(self, what: str, path: str) -> None:
        if self._is_allowed(path):
            return
        self._read_created_list()
        if not self._is_allowed(path):
            self._refuse(what, path)

    def _read_created_list(self) -> None:
        """Add the paths that other processes of the run have created."""
        if os.path.exists(self._created_list):
            with open(self._created_list, "rb") as file:
                entries = file.read().split(b"\0")[:-1]
            self._is_data_by_path.update((os.fsdecode(entry[1:]), entry[:1] == b"+") for entry in entries)

    def _refuse(self, what: str, path: str) -> None:
        try:
            self._channel.send("refused", what=what, path=path, line=where.user_line())
        finally:
            os._exit(REFUSED)

    def hook_open(self) -> None:
        """Patch ``open`` so that a file opened for update may be read; its first write is checked."""
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
            is_invalid = is_text and buffering == 0  # open() raises an error
            if not self._is_existing_file_for_update(file, mode) or is_invalid:
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            check = functools.partial(self.check_write, "open", _real_path(file))
            self._opening.is_deferred = True
            try:
                raw = _CheckedFile(file, "r+", closefd, opener)
            finally:
                self._opening.is_deferred = False
            raw.check = check
            if buffering == 0:
                return raw
            buffered = _CheckedBuffer(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
            buffered.check = check
            if not is_text:
                return buffered
            text = _CheckedText(buffered, encoding, errors, newline, buffering == 1)
            text.check, text.mode = check, mode
            return text

        builtins.open = io.open = _OpenFunction(open_, original)

    def _is_existing_file_for_update(self, file: Any, mode: Any) -> bool:
        """Whether an existing file that the run did not create is opened for reading and writing."""
        is_plain = isinstance(mode, str) and "+" in mode and "r" in mode and not set(mode) - set("r+bt")
        if not is_plain or not isinstance(file, (str, bytes, os.PathLike)):
            return False
        path = _real_path(file)
        return os.path.isfile(path) and not self._is_allowed(path)

    # -- Native writers, which raise no audit event, are checked before they write -------------------------------------

    def hook_torch(self, torch: Any) -> None:
        """Hook into the class with which torch.save, torch.export.save and torch.package write, into TorchScript's
        save, and into that of a profiler's trace.
        """
        guard, writer, script = self, torch._C.PyTorchFileWriter, torch.jit.RecursiveScriptModule
        profile = getattr(torch._C._autograd, "_ProfilerResult", None)

        class PyTorchFileWriter(writer):  # type: ignore[misc, valid-type]
            def __init__(self, file: Any, *args: Any, **kwargs: Any) -> None:
                if isinstance(file, (str, os.PathLike)):
                    guard.check_write("torch.save", _real_path(file))
                super().__init__(file, *args, **kwargs)

        torch._C.PyTorchFileWriter = PyTorchFileWriter
        _check_before(script, "save", lambda _, file, **__: guard.check_write("torch.jit.save", _real_path(file)))
        _check_before(profile, "save", lambda _, path: guard.check_write("export_chrome_trace", _real_path(path)))

    def hook_safetensors(self, safetensors: Any) -> None:
        """Hook into the function with which all frontends of safetensors write."""
        _check_before(
            safetensors,
            "serialize_file",
            lambda _, filename, *__, **___: self.check_write("safetensors", _real_path(filename)),
        )

    def hook_sqlite(self, sqlite: Any) -> None:
        """Hook into ``sqlite3.connect``: a database may be read, and statements that change it are checked."""
        connect = sqlite.connect

        def connect_guarded(database: Any, *args: Any, **kwargs: Any) -> Any:
            path = _database_file(database)
            if path:
                self._record_created(path)
            connection = connect(database, *args, **kwargs)
            if path and not self._is_allowed(path):

                def authorize(action: int, _: Any, __: Any, which: Any, ___: Any) -> int:
                    if action in _SQL_CHANGES and which == "main":
                        self.check_write("sqlite3", path)
                    return 0  # SQLITE_OK, as without an authorizer

                connection.set_authorizer(authorize)
            return connection

        sqlite.connect = connect_guarded

    def hook_hub(self, hub: Any) -> None:
        """Hook into the functions that make a repository or a commit on the Hugging Face Hub, which every
        upload does.
        """

        def refuse_upload(repo_id: Any, *_: Any, **__: Any) -> None:
            self._refuse("an upload", f"{hub.constants.ENDPOINT}/{repo_id}")

        for name in ("create_repo", "create_commit", "preupload_lfs_files"):
            _check_before(hub, name, refuse_upload)
            _check_before(hub.HfApi, name, lambda _, *args, **kwargs: refuse_upload(*args, **kwargs))


def _cache_folders() -> list[str]:
    """Return the folders that libraries use as their caches."""
    folders = [os.environ.get(name) or os.path.expanduser(usual) for name, usual in _CACHE_FOLDERS.items()]
    return [*folders, os.path.join(os.environ.get("TRITON_HOME") or os.path.expanduser("~"), ".triton")]


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
        if code.co_varnames[:1] == ("self",) and _is_method_of_data(frame, module):
            return True
    return False


def _is_method_of_data(frame: Any, module: str) -> bool:
    """Whether a frame runs a method of a dataset.

    Its local variables are read only if a class of datasets has a method of this name in this module: until 3.12 Python
    then keeps their objects, which are tensors in a training loop, as long as the method runs.
    """
    is_possible = _may_be_method_of_data(frame.f_code, module)
    return is_possible and isinstance(frame.f_locals.get("self"), tuple(_data_classes(module)))


# A file may be created for each sample.
@functools.lru_cache(maxsize=None)  # noqa: UP033 - Python 3.8 has no `functools.cache`
def _may_be_method_of_data(code: Any, module: str) -> bool:
    kinds = _data_classes(module)
    for kind in kinds:  # which grows
        kinds += type.__subclasses__(kind)
    bases = {base for kind in kinds for base in kind.__mro__}
    return any(base.__module__ == module and code.co_name in vars(base) for base in bases)


def _data_classes(module: str) -> list[type]:
    """Return the base classes of datasets: those of the libraries, and of this module's own."""
    modules = filter(None, map(sys.modules.get, (module, *_MODULES_OF_DATA_CLASSES)))
    named = [vars(each).get(name) for each in modules for name in _DATA_CLASSES]
    return [kind for kind in named if isinstance(kind, type)]


def is_standard(path: str, folder: str) -> bool:
    """Whether a source file belongs to the standard library in `folder`, which may contain site-packages too."""
    return path.startswith(folder) and "site-packages" not in path and "dist-packages" not in path


class _OpenFunction:
    """Replacement of ``open``. Unlike a function, it does not become a method as an attribute of a class."""

    def __init__(self, function: Any, original: Any) -> None:
        functools.update_wrapper(self, original)
        self.__module__ = "io"  # pickle imports it from there
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> str:
        return "open"


class _CheckedLayer:
    """Mixin of a file object that calls `check` before a write, and before code that may write gets its descriptor."""

    check: Any = staticmethod(lambda: None)  # replaced once the file is open

    def write(self, *args: Any) -> Any:
        self.check()
        return super().write(*args)  # type: ignore[misc]

    def truncate(self, *args: Any) -> Any:
        self.check()
        return super().truncate(*args)  # type: ignore[misc]

    def fileno(self) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller != __file__ and (not is_standard(caller, _STANDARD_LIBRARY) or caller.endswith("subprocess.py")):
            self.check()
        return super().fileno()  # type: ignore[misc]


class _CheckedFile(_CheckedLayer, io.FileIO):
    pass


class _CheckedBuffer(_CheckedLayer, io.BufferedRandom):
    pass


class _CheckedText(_CheckedLayer, io.TextIOWrapper):
    mode: Any = "r+"


def _check_before(owner: Any, name: str, check: Any) -> None:
    """Wrap the function `name` of `owner` so that `check` is called first, with the same arguments."""
    original = getattr(owner, name, None)
    if original is None:
        return

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):  # the function itself raises the error about its arguments
            check(*args, **kwargs)
        return original(*args, **kwargs)

    guarded.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(owner, name, guarded)


def _append_to_list(file: str, path: str, kind: bytes = b"") -> None:
    """Append a path to a list that all processes of a run share; `kind` is `+`, `-` or empty."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, kind + os.fsencode(path) + b"\0")
    finally:
        os.close(descriptor)


def _real_path(path: Any) -> str:
    """Return the absolute path with all symbolic links resolved."""
    return os.path.realpath(os.fsdecode(path))


def _path_of_link(path: Any, folder: int = -1) -> str:
    """Return the absolute path with links resolved, except in its last part. `folder` is the descriptor of the open
    folder to which it is relative, -1 for the working directory.
    """
    name = os.fsdecode(path).rstrip(os.sep)
    if folder is not None and folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    head, tail = os.path.split(name)
    return os.path.join(os.path.realpath(head), tail)


def _database_file(database: Any) -> str:
    """Return the path of the database given to ``sqlite3.connect``, "" if it is in memory or the argument is
    invalid.
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

"""Fingerprint of a search: the conditions under which its recommendation holds, without running the workload.

It covers the source files of the user's code and of all modules that it imports; loaded functions and the variables
that they name; shapes, dtypes and settings of live objects; options, device, environment and versions of libraries. It
does not cover values of tensors, states of random generators, folders, files that a factory opens, attributes whose
names are computed, and functions that a program puts into a library's module. Objects are hashed by the content that
pickle would write, so an object's own ``__reduce__`` may run; those that cannot be pickled (a lock, an open file) are
listed as unknown.
"""

from __future__ import annotations

import copyreg
import functools
import hashlib
import importlib.metadata
import linecache
import marshal
import os
import platform
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import resolve_name
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any

import msgspec

from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.distributed import is_from_launcher
from autotune_amp.hardware import host

if TYPE_CHECKING:
    from autotune_amp.core.hardware import DeviceIdentity

# Environment variables that affect the allocator, the threads and the kernels: names or prefixes.
_SPEED_VARIABLES = (
    *("LD_PRELOAD", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_"),
    *("TORCH", "PYTORCH_", "ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "TRITON_", "NVIDIA_TF32_OVERRIDE"),
)
# Set by this package in child processes, by torch, its compiler and scikit-learn in the running process, or by Slurm
# for each job. Devices have parts of their own, and the location of files does not affect speed.
_SET_BY_PROGRAMS = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "TORCH_HOME", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_INIT_AT_FORK"),
    *("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_DUPLICATE_LIB_OK"),
    *("TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE"),
)
MAX_READ_BYTES = 1 << 24  # larger files (data, checkpoints) are compared by size and modification time
# A larger container counts by its length and this many elements spread evenly over it, so that a list of a million file
# names does not cost seconds. A larger set has no order to sample by.
MAX_ELEMENTS, NUM_SAMPLED = 1000, 100
# Attributes of library objects that differ between equal objects, or change while they are used.
_IGNORED_ATTRIBUTES = {
    "torch.optim.optimizer.Optimizer": {"state", "step", "_opt_called", "_warned_capturable_if_run_uncaptured"},
    "torch.utils.data.dataloader.DataLoader": {"_iterator", "_IterableDataset_len_called"},
    # Salted `hash()` of the object's own JSON; lists in the order of a set; the Trainer that fitted the module before.
    "transformers.generation.configuration_utils.GenerationConfig": {"_original_object_hash"},
    "transformers.trainer.Trainer": {"_signature_columns"},
    "transformers.trainer_utils.RemoveColumnsCollator": {"signature_columns"},
    "lightning.pytorch.core.module.LightningModule": {"_trainer"},
}


def versions() -> dict[str, str]:
    """Return the versions that a measurement depends on, without importing; `cuda` only if torch is loaded."""
    torch: Any = sys.modules.get("torch")
    all_versions = {name: version(name) for name in ("torch", "autotune_amp", "optuna", "torchao")}
    all_versions["cuda"] = None if torch is None else torch.version.cuda
    all_versions |= {"python": platform.python_version(), "platform": f"{sys.platform} {platform.machine()}"}
    return {name: value for name, value in all_versions.items() if value is not None}


def compute_fingerprint(
    workload: object, options: dict[str, object], identity: DeviceIdentity, torch_state: dict[str, object]
) -> Fingerprint:
    """Return the fingerprint of a search: workload, options, device, torch flags, environment and versions."""
    parts, unknown, files = workload_parts(workload)
    parts = {name: part for name, part in parts.items() if name.rpartition("variable ")[2] not in _SET_BY_PROGRAMS}
    groups = {"option": options, "device": msgspec.structs.asdict(identity), "torch flag": torch_state}
    for group, named in groups.items():
        parts |= {f"{group} {name}": _text_or_hash(value) for name, value in named.items()}
    parts |= {"platform" if name == "platform" else f"version of {name}": f"={v}" for name, v in versions().items()}
    if identity.name == "unknown":  # the kind of host stands for it
        parts["host of the device"] = f"={host.cpu_name()}, {host.total_memory_bytes()} bytes"
    for name, value in os.environ.items():
        if name.startswith(_SPEED_VARIABLES) and not (name in _SET_BY_PROGRAMS or is_from_launcher(name)):
            parts[f"environment variable {name}"] = text_digest(value)
    content = msgspec.json.encode(sorted(parts.items()))
    return Fingerprint(digest=hashlib.sha256(content).hexdigest(), parts=parts, unknown=unknown, files=files)


def _text_or_hash(value: object) -> str:
    """Return `value` as text if it is short and not a URL, which may contain a password; otherwise its hash."""
    is_plain = value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "://" not in value)
    return f"={value}" if is_plain and len(str(value)) <= 60 else _hex(FingerprintBuilder().hash(value))


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...], dict[str, str]]:
    """Return a hash for each part of a workload, by name, descriptions of parts that cannot be compared, and the
    digests of the source files by their paths.

    `workload` is an object with attributes, or a function that returns one and is not called. Examples of names are
    ``workload.model`` and ``source file train.py``. A value with the prefix ``=`` is plain text.
    """
    builder = FingerprintBuilder()
    is_function = isinstance(workload, (FunctionType, BuiltinFunctionType, MethodType, type, functools.partial))
    builder.add("workload", workload if is_function else type(workload))
    for name, value in () if is_function else vars(workload).items():
        builder.add(f"workload.{name}", value)
    return builder.parts, tuple(builder.unknown), builder.files


def file_digest(file: str | Path) -> str:
    """Return 16 hexadecimal digits of the hash of a file's bytes, or the size and time of a large file."""
    stat = Path(file).stat()
    if stat.st_size > MAX_READ_BYTES:
        return f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def text_digest(text: str) -> str:
    """Return 16 hexadecimal digits of the hash of a text, such as the value of a variable, which may be a password."""
    return _hex(text.encode(errors="surrogateescape"))


@functools.cache
def user_label(module: str, file: str | None) -> str | None:
    """Return the name of a user's source file, such as ``pkg/data.py``; None for a library's module or Python's own."""
    root = module.partition(".")[0]
    # autotune_amp and torch, even in their own source trees, are identified by their version.
    if root in ("autotune_amp", "torch") or (file is None and root in sys.stdlib_module_names and module != "__main__"):
        return None
    if file is None:
        return module  # in a notebook
    path = Path(file).absolute()
    depth = 1 if module == "__main__" else min(module.count(".") + 1 + (path.stem == "__init__"), len(path.parents))
    if not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or path.is_relative_to(Path(os.__file__).parent):
        return None
    is_target = any(path.parents[depth - 1].glob("*.dist-info"))  # `pip install --target` leaves metadata there
    return None if is_target else "/".join(path.parts[-depth:])


@functools.cache
def version(root: str) -> str | None:
    """Return the version of a top-level package as it states it if it is imported, else as it is installed; None if it
    is not installed.
    """
    stated = getattr(sys.modules.get(root), "__version__", None)
    installed = installed_version(root)
    return str(stated) if isinstance(stated, str) and installed is not None else installed  # torch's is a subclass


def installed_version(root: str) -> str | None:
    """Return the version of a top-level package by its installation, None if it is not installed."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(root)
    return None


# An import statement: the module after "from", and everything after "import".
_IMPORT = re.compile(r"(?:\bfrom\s+([.\w]+)\s*)?\bimport\b\s*(\((?:[^)#]|#.*)*\)|(?:[^\n;\\]|\\\n)*)")


def imported_names(text: str) -> Iterator[str]:
    """Yield the names of modules that Python code imports, anywhere in it, relative ones with their dots.

    The result may contain more: attributes of modules, and text that only resembles an import.
    """
    for base_module, imported in dict.fromkeys(_IMPORT.findall(text)):
        names = re.findall(r"[.\w]+", re.sub(r"#.*", "", imported))
        base = base_module if base_module.endswith(".") or not base_module else f"{base_module}."
        yield from (base_module, *(f"{base}{name}" for name in names))


def user_modules(name: str, folders: Sequence[str], loaded: Mapping[str, object]) -> Iterator[tuple[str, str | None]]:
    """Yield name and file of the user's modules that an import of the absolute `name` would run: packages and itself.

    Those that are not `loaded` (such as ``sys.modules``) are looked up in `folders`. Nothing is imported.
    """
    parts = name.split(".")
    for depth, part in enumerate(parts, 1):
        module = loaded.get(prefix := ".".join(parts[:depth]))
        spec = getattr(module, "__spec__", None) or (PathFinder.find_spec(part, folders) if part else None)
        file = spec.origin if spec is not None and spec.has_location else None
        if spec is None or user_label(prefix, file) is None:
            return
        yield prefix, file
        folders = list(spec.submodule_search_locations or ())


def _hex(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class FingerprintBuilder:
    """Collects the parts of a fingerprint by name: objects, and the files, libraries and variables of their code."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        self._name = ""
        self.files: dict[str, str] = {}  # digests of source files by their paths
        self._hashes: dict[int, tuple[object, bytes]] = {}  # keeps objects alive, so that no id is reused
        # Functions and classes that can be found by name are hashed one by one, so that neither a long chain of calls
        # nor the order in which a cycle is entered matters: the hash of each, and what it refers to in turn.
        self._definitions: dict[int, tuple[object, bytes, list[Any]]] = {}
        self._links: list[Any] = []
        self.num_tensors = 0  # number of tensors hashed so far, to recognise tied weights

    def add(self, name: str, obj: object) -> None:
        """Add a part for an object and all that is reached from it."""
        self._name = name
        content, pending = self._content(self.hash, obj)
        definitions: dict[int, bytes] = {}
        while pending:
            definition = pending.pop()
            if id(definition) in definitions:
                continue
            if id(definition) not in self._definitions:
                self._definitions[id(definition)] = definition, *self._content(self._hash_definition, definition)
            _, definitions[id(definition)], links = self._definitions[id(definition)]
            pending += links
        self.parts[name] = _hex(self.node("part", content, *definitions.values(), ordered=False))

    def _content(self, hash_object: Callable[[Any], bytes], obj: Any) -> tuple[bytes, list[Any]]:
        """Return the hash of an object, and the functions and classes that it refers to by name."""
        self._hashes, self._links, self.num_tensors = {}, [], 0
        return hash_object(obj), self._links

    def _hash_definition(self, definition: Any) -> bytes:
        return (_hash_class_content if isinstance(definition, type) else _hash_function_content)(self, definition)

    def link(self, label: str, definition: Any) -> bytes | None:
        """Return the hash of the name of a user's function or class, whose content is hashed apart; None if its module
        has another object, or none, of that name.
        """
        try:
            found = _without_hooks(attrgetter(definition.__qualname__)(sys.modules[definition.__module__]))
        except (AttributeError, KeyError):  # e.g. a nested function
            return None
        if found is not definition:
            return None
        self._links.append(definition)
        return self.node("link", label, definition.__qualname__)

    def add_unknown(self, obj: object, why: str) -> bytes:
        """Record that `obj` cannot be compared, with the reason `why`, and return the hash that stands for it."""
        self.unknown[f"{self._name} cannot be known: {_class_name(type(obj)).removeprefix('builtins.')} {why}"] = None
        return b"unknown"

    def hash(self, obj: Any) -> bytes:
        """Return the hash of any object, equal in every process: addresses, ``hash()`` and set order do not count."""
        cls: type = type(obj)
        try:
            if cls in _ATOMS:
                return marshal.dumps(obj, 0)  # version 0 has no references and no interned strings
            if id(obj) not in self._hashes:
                self._hashes[id(obj)] = (obj, b"cycle")  # for objects below it that refer back to it
                self._hashes[id(obj)] = (obj, _hash_method(cls)(self, obj))
        except Exception as error:  # pickling may run any code; objects may be nested too deeply
            why = f"cannot be read ({type(error).__name__}: {error})"
            self._hashes[id(obj)] = (obj, self.add_unknown(obj, why))
        return self._hashes[id(obj)][1]

    def node(self, tag: str, *values: Any, ordered: bool = True) -> bytes:
        """Return the hash of a kind of object, `tag`, with the values that describe it."""
        children = map(self.hash, values) if ordered else sorted(map(self.hash, values))
        return hashlib.sha256(b"".join([tag.encode(), *[b":%d:%b" % (len(c), c) for c in children]])).digest()

    def add_source(self, module: str, file: str | None, package: str | None = None) -> str | None:
        """Add the version of a library, or a user's source file and all that it imports; return its `user_label`.

        `package` is what the file's relative imports are relative to, if the name of the module does not say it.
        """
        root, label = module.partition(".")[0], user_label(module, file)
        if label is None and root not in sys.stdlib_module_names:
            installed_version = version(root)
            with suppress(OSError):  # a library without a version, and a file that cannot be read
                self.parts[f"version of {root if installed_version else module}"] = (
                    f"={installed_version}" if installed_version or not file else file_digest(file)
                )
        if label is None or file is None or (path := str(Path(file).absolute())) in self.files:
            return label
        name = f"source file {label}"
        try:
            self.files[path] = file_digest(file)
            self.parts[name] = self.parts.get(name, "") + self.files[path]  # two files may have one label
            if file.endswith(".py"):
                parent = module if Path(file).stem == "__init__" else module.rpartition(".")[0]
                self.add_imports(Path(file).read_text("utf-8", "replace"), package or parent)
        except OSError as error:
            self.unknown[f"{name} cannot be known: {error.strerror}"] = None
        return label

    def add_imports(self, code: str, package: str) -> None:
        """Add the user's files that `code`, the text of a module in `package`, imports."""
        for name in imported_names(code):
            with suppress(ImportError):  # relative to nothing
                for module, file in user_modules(resolve_name(name, package), sys.path, sys.modules):
                    self.add_source(module, file)

    def add_module(self, module: Any) -> str | None:
        """Add a module, given by its globals or its name, and return the label of a user's module, else None."""
        if isinstance(module, str):
            module = vars(sys.modules[module]) if module in sys.modules else {"__name__": module}
        names = map(module.get, ("__name__", "__file__", "__package__"))
        name, file, package = (value if type(value) is str else None for value in names)
        return self.add_source(name or "?", file, package)


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _hash_container(builder: FingerprintBuilder, obj: Any) -> bytes:
    """Return the hash of a container, regardless of a dictionary's order, which may come from a set."""
    elements = obj.items() if hasattr(obj, "items") else obj
    if len(obj) > MAX_ELEMENTS:
        elements = () if isinstance(obj, (set, frozenset)) else islice(elements, 0, None, -(-len(obj) // NUM_SAMPLED))
    return builder.node(f"{type(obj).__name__} {len(obj)}", *elements, ordered=isinstance(obj, (list, tuple)))


def _hash_pickled(builder: FingerprintBuilder, obj: Any) -> bytes:
    """Return the hash of the content that pickle would write for an object."""
    cls: Any = type(obj)
    try:
        registered = copyreg.dispatch_table.get(cls)
        reduced: Any = registered(obj) if registered is not None else obj.__reduce_ex__(4)
    except Exception as error:  # __reduce_ex__ may be the user's
        return builder.add_unknown(obj, f"has no content to compare ({error})")
    if isinstance(reduced, str):
        return builder.node("global", cls, str(getattr(obj, "__module__", "")), reduced)
    function, arguments, state, elements, items = (*reduced, None, None, None)[:5]
    state = _counted_attributes(cls, state) if isinstance(state, dict) else state
    return builder.node("object", cls, function, arguments, state, list(elements or ()), dict(items or ()))


def _counted_attributes(cls: type, named: Mapping[str, Any]) -> list[Any]:
    """Return names and values of the attributes of an object that identify it, in the order of their names."""
    bases = set(map(_class_name, cls.__mro__))
    left_out = {name for base in bases for name in _IGNORED_ATTRIBUTES.get(base, ())}
    is_live = not bases.isdisjoint(_LIVE)
    counted: list[Any] = []
    for name in sorted(named.keys() - left_out, key=str):
        value = named[name]
        if is_live and name.endswith("_hooks") and isinstance(value, dict):
            counted += [name, list(value.values())] if value else []  # the keys count all hooks of the process
        elif is_live and name in ("_parameters", "_buffers", "_modules"):
            counted += [name, list(value.items())]  # in their order
        elif is_live and name == "param_groups":
            counted += [name, [{**group, "params": len(group["params"])} for group in value]]
        else:
            counted += [name, value]
    return counted


def _without_hooks(obj: Any) -> Any:
    """Return `obj`, or the `step` of an optimizer class that torch has wrapped when the first instance was made."""
    return vars(obj)["__wrapped__"] if isinstance(obj, FunctionType) and "hooked" in vars(obj) else obj


def _hash_function(builder: FingerprintBuilder, function: FunctionType) -> bytes:
    """Return the hash of a function: one that its module has by its name, for a user's also its content apart."""
    if (inner := _without_hooks(function)) is not function:
        return builder.hash(inner)
    label = builder.add_module(function.__globals__)
    if label is None and builder.add_module(function.__module__) is None:  # else it wraps a user's function
        with suppress(AttributeError):  # e.g. a nested function
            if attrgetter(function.__qualname__)(sys.modules.get(function.__module__)) is function:
                return builder.node("library", function.__module__, function.__qualname__)
    return (label and builder.link(label, function)) or _hash_function_content(builder, function)


def _hash_function_content(builder: FingerprintBuilder, function: FunctionType) -> bytes:
    """Return the hash of a function's code, its variables, and for a user's function the globals that it names."""
    label, code = builder.add_module(function.__globals__), function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # some are empty
    identity = (code, *_global_variables(builder, function)) if label else (function.__module__, code.co_name)
    attributes = {name: value for name, value in vars(function).items() if name != "__wrapped__"}
    return builder.node("function", *identity, function.__defaults__, function.__kwdefaults__, cells, attributes)


def _hash_wrapper(builder: FingerprintBuilder, obj: object) -> bytes:
    """Return the hash of a method, a property, or a function with a cache."""
    names = ("fget", "fset", "fdel", "__func__", "__self__", "func", "__wrapped__")
    return builder.node(type(obj).__name__, *[getattr(obj, name, None) for name in names])


def _hash_code(builder: FingerprintBuilder, code: CodeType) -> bytes:
    """Return the hash of instructions, constants and names, but not of the position in the file."""
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    handlers = getattr(code, "co_exceptiontable", b"")  # from Python 3.11 on
    return builder.node("code", code.co_code, handlers, names, counts, *code.co_consts)


def _global_variables(builder: FingerprintBuilder, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the global variables that a function names, also in modules that it names.

    Adds the environment variables that it reads and the modules that a notebook's cells import.
    """
    codes, spaces = [function.__code__], [function.__globals__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)  # of attributes too
    for space in spaces:
        is_user = builder.add_module(space) is not None
        for name in [name for name in names if is_user and name in space]:
            if isinstance(space[name], ModuleType):
                inner = vars(space[name])
                spaces += [inner] if all(inner is not space_seen for space_seen in spaces) else []
            elif not name.startswith("__"):  # names of the module system, some of them paths
                yield name, space[name]
    if "__file__" not in function.__globals__:  # a notebook, which keeps the text of its cells
        builder.add_imports("".join(linecache.getlines(function.__code__.co_filename)), "")
    if names.keys() & {"environ", "getenv"}:
        for name in {c for code in codes for c in code.co_consts if isinstance(c, str) and c.isidentifier()}:
            if name == name.upper() and not is_from_launcher(name):
                builder.parts[f"environment variable {name}"] = _hex(builder.hash(os.environ.get(name)))


def _hash_class(builder: FingerprintBuilder, cls: type) -> bytes:
    """Return the hash of a class: a library class by its name, a user's by bases, metaclass and members."""
    if (label := builder.add_module(cls.__module__)) is None:
        return builder.node("library", cls.__module__, cls.__qualname__)
    return builder.link(label, cls) or _hash_class_content(builder, cls)


def _hash_class_content(builder: FingerprintBuilder, cls: type) -> bytes:
    """Return the hash of a user's class: its name, bases, metaclass and members."""
    members = {
        name: value
        for name, value in vars(cls).items()
        if isinstance(value, (FunctionType, *_WRAPPERS))
        or not (name.startswith("__") or name == "_abc_impl" or isinstance(value, _SLOTS))
    }
    label = builder.add_module(cls.__module__)
    return builder.node("class", label, cls.__qualname__, type(cls), cls.__bases__, members)


def _hash_set(builder: FingerprintBuilder, obj: Any) -> bytes:
    """Return the hash of an object of a subclass of set or frozenset."""
    attributes = _counted_attributes(type(obj), getattr(obj, "__dict__", {}))
    return builder.node("set", type(obj), _hash_container(builder, obj), attributes)


def _hash_array(builder: FingerprintBuilder, array: Any) -> bytes:
    """Return the hash of a NumPy array's type and shape, and of some elements if these are Python objects."""
    step = -(-array.size // NUM_SAMPLED) if array.size > MAX_ELEMENTS else 1
    elements = array.reshape(-1)[::step].tolist() if array.dtype.hasobject else []
    return builder.node("array", type(array), str(array.dtype), array.shape, elements)


def _hash_tensor(builder: FingerprintBuilder, tensor: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may see reading an attribute as an operation
        kind = [str(tensor.dtype), tensor.device.type, str(tensor.layout), tensor.requires_grad]
        with suppress(RuntimeError):  # uninitialized and nested tensors have no shape, sparse ones no strides
            kind.append(tuple(tensor.shape))
            kind.append(tensor.stride())
    builder.num_tensors += 1
    return builder.node("tensor", type(tensor), kind, builder.num_tensors)


def _hash_compiled(builder: FingerprintBuilder, module: Any) -> bytes:
    """Return the hash of the result of ``torch.compile``: the module inside and the plain settings."""
    settings = vars(module.dynamo_ctx)
    plain = [item for item in (settings.get("compiler_config") or {}).items() if isinstance(item[1], (bool, int))]
    return builder.node("compiled", module._orig_mod, plain, settings.get("fullgraph"), settings.get("_dynamic"))


# Attributes of a class that its own code or a C extension makes for its slots.
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
_LIVE = ("torch.nn.modules.module.Module", "torch.optim.optimizer.Optimizer")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, functools._lru_cache_wrapper, MethodType)
# Functions that hash an object, by the name of its class or a base class: names, so that no library is imported.
_HASH_METHODS: dict[str, Callable[[FingerprintBuilder, Any], bytes]] = {
    **{f"exactly builtins.{kind}": _hash_container for kind in ("list", "tuple", "set", "frozenset", "dict")},
    **dict.fromkeys(map(_class_name, _WRAPPERS), _hash_wrapper),
    "builtins.mappingproxy": _hash_container,
    "builtins.set": _hash_set,
    "builtins.frozenset": _hash_set,
    "builtins.function": _hash_function,
    "builtins.code": _hash_code,
    "builtins.type": _hash_class,
    "builtins.module": lambda builder, module: builder.node(
        "module", builder.add_module(vars(module)) or module.__name__
    ),
    _class_name(weakref.ReferenceType): lambda builder, obj: builder.node("weakref", obj()),
    # The state of a generator counts as little as a tensor's values; variables that code names have their own parts.
    **dict.fromkeys(
        ("os._Environ", "random.Random", "numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"),
        lambda builder, obj: builder.hash(type(obj)),
    ),
    "numpy.ndarray": _hash_array,
    "datasets.arrow_dataset.Dataset": lambda builder, obj: builder.node(
        "dataset", obj._fingerprint
    ),  # a hash of its content
    "torch.Tensor": _hash_tensor,
    **dict.fromkeys(
        _LIVE,
        lambda builder, obj: builder.node("live", type(obj), *_counted_attributes(type(obj), vars(obj))),
    ),
    "torch.nn.parallel.distributed.DistributedDataParallel": lambda builder, obj: builder.hash(obj.module),
    "torch._dynamo.eval_frame.OptimizedModule": _hash_compiled,
}


@functools.cache
def _hash_method(cls: Any) -> Callable[[FingerprintBuilder, Any], bytes]:
    """Return the function that hashes the objects of a class."""
    names = (f"exactly {_class_name(cls)}", *map(_class_name, cls.__mro__))
    return next((_HASH_METHODS[name] for name in names if name in _HASH_METHODS), _hash_pickled)

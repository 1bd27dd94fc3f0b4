"""Traversal of a workload that computes a digest for each part of its fingerprint.

Functions and classes are read through their code and the names in it, containers by content, live objects by shape and
settings, others by attributes or pickled content. Nothing that differs between processes is used: no address, no
``hash()``, no set order, no path.
"""

from __future__ import annotations

import copyreg
import functools
import os
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias

from autotune_amp.distributed import is_from_launcher
from autotune_amp.fingerprint.source import (
    Origin,
    code_digest,
    digest,
    imported_files,
    module_origin,
    named_modules,
    origin_of,
    short_hex,
    text,
    version,
)

# By `id` of the exact type: looking a type up by its hash could run a user's metaclass. The unbound methods read a
# subclass's content without running its overrides.
_LEAVES: dict[int, Callable[..., bytes]] = {
    id(type(None)): lambda _: b"None",
    id(bool): lambda value: b"bool %d" % value,
    id(int): lambda value: text("int", int.__format__(value, "x")),
    id(float): lambda value: text("float", float.__repr__(value)),
    id(str): lambda value: text("str", str.__str__(value)),
    id(bytes): lambda value: digest("bytes", bytes(value)),
}


class Walk:
    """Traversal of one workload. Parts wait in a queue, so that names given by the workload itself come first."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self.unknown: dict[str, None] = {}
        # A library that is not imported cannot have an object in a workload.
        self._handlers = _HANDLERS | _live_handlers()
        self._queue: deque[tuple[str, Callable[[], bytes]]] = deque()
        self._named: dict[Hashable, tuple[str, object]] = {}  # keeps objects alive, so that no id is reused
        self._num_named: dict[str, int] = {}
        self._start("")

    def _start(self, part: str) -> None:
        self._part = part
        self.num_tensors = 0  # number of tensors in this part, to recognise tied weights
        self._digests: dict[int, tuple[object, bytes]] = {}  # keeps objects alive too

    def run(self) -> None:
        """Compute the digest of every part that is reached."""
        while self._queue:
            name, work = self._queue.popleft()
            self._start(name)
            try:
                self.parts[name] = short_hex(work())
            except RecursionError:
                self.unknown[f"{name} cannot be known: it is nested too deeply"] = None

    def part(self, key: Hashable, name: str, work: Callable[[], bytes]) -> bytes:
        """Return a link to the part that `key` identifies; queue the part if it is new."""
        if key not in self._named:
            number = self._num_named[name] = self._num_named.get(name, 0) + 1
            unique = name if number == 1 else f"{name} #{number}"
            self._named[key] = (unique, work)
            self._queue.append((unique, work))
        return text("part", self._named[key][0])

    def note(self, origin: Origin) -> None:
        """Add a part for a user's source file, or for a library's version; Python's own is in `versions()`."""
        if origin.is_user and origin.file is not None:
            self.part(("source", origin.file), f"source file {origin.label}", lambda: self._file(origin))
        elif origin.is_library and f"version of {origin.root}" not in self.parts:
            known = version(origin.root)
            self.parts[f"version of {origin.root}"] = f"={known}" if known else short_hex(self._file(origin))

    def by_origin(self, origin: Origin) -> bytes:
        """Return the digest of a module: the user's by its file, a library's by its version."""
        self.note(origin)
        return text("module", origin.label)

    def _file(self, origin: Origin) -> bytes:
        """Return the digest of a file's bytes; add parts for the files that a user's source imports."""
        try:
            content = Path(str(origin.file)).read_bytes()
        except OSError as error:
            self.unknown[f"source file {origin.label} cannot be known: {error.strerror}"] = None
            return text("unknown")
        if origin.is_user:
            for imported in imported_files(content.decode("utf-8", "replace"), origin.package):
                self.note(imported)
        return digest("file", content)

    def value(self, obj: Any) -> bytes:
        """Return the digest of any object."""
        cls = type(obj)
        leaf = _LEAVES.get(id(cls))
        if leaf is not None:
            return leaf(obj)
        if id(obj) not in self._digests:
            self._digests[id(obj)] = (obj, b"cycle")  # for objects below it that refer back to it
            handler = next((self._handlers[id(base)] for base in cls.__mro__ if id(base) in self._handlers), _instance)
            self._digests[id(obj)] = (obj, handler(self, obj))
        return self._digests[id(obj)][1]

    def attributes(self, cls: type, named: Mapping[str, Any], left_out: frozenset[str] = frozenset()) -> bytes:
        """Return the digest of the attributes of an object of class `cls`, independent of their order."""
        left_out = left_out.union(*(_CHANGING.get(class_name(base), ()) for base in cls.__mro__))
        children = [text("name", name) + self.value(named[name]) for name in sorted(named) if name not in left_out]
        return digest("attributes", *children)

    def unknowable(self, obj: object, why: str) -> bytes:
        """Record `obj` as not comparable, with the reason `why`, and return the digest for it."""
        kind = ".".join(class_name(type(obj))).removeprefix("builtins.")
        self.unknown[f"{self._part} cannot be known: {kind} {why}"] = None
        return text("unknown")


Handler: TypeAlias = "Callable[[Walk, Any], bytes]"


# --- objects are read through dictionaries and slots, without running a user's property or `__getattr__`


def is_a(obj: object, *kinds: type) -> bool:
    """Return whether the real type of `obj` is one of `kinds`; ``isinstance`` could run a ``__class__`` property."""
    return issubclass(type(obj), kinds)


def class_name(cls: type) -> tuple[str, str]:
    """Return the module and the qualified name of a class."""
    return str(cls.__module__), cls.__qualname__


def instance_dict(obj: object) -> dict[str, Any]:
    """Return the attributes in the object's own dictionary, empty if it has none."""
    try:
        namespace: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return namespace if type(namespace) is dict else {}


def attributes_of(obj: object) -> dict[str, Any]:
    """Return the attributes in slots and dictionary; a slot shadowed by a subclass gets its class's name in front."""
    found: dict[str, Any] = {}
    for base in type(obj).__mro__:
        for name, descriptor in vars(base).items():
            if type(descriptor) is types.MemberDescriptorType and not name.startswith("__"):
                with suppress(AttributeError):  # an empty slot
                    found[name if name not in found else f"{base.__qualname__}.{name}"] = descriptor.__get__(obj)
    return found | instance_dict(obj)


def is_opaque(cls: type) -> bool:
    """Return whether instances hold C or Rust data besides attributes and slots; ``copyreg`` does not pickle it."""
    num_slots = sum(
        type(member) is types.MemberDescriptorType for base in cls.__mro__ for member in vars(base).values()
    )
    num_pointers = (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0) + num_slots
    return cls.__basicsize__ > object.__basicsize__ + 8 * num_pointers or cls.__itemsize__ > 0


# Attributes of library objects that differ between processes for equal objects.
_CHANGING: dict[tuple[str, str], tuple[str, ...]] = {
    # Python's salted `hash()` of the object's own JSON.
    ("transformers.generation.configuration_utils", "GenerationConfig"): ("_original_object_hash",),
    # Lists of the model's arguments in the order of a set.
    ("transformers.trainer", "Trainer"): ("_signature_columns",),
    ("transformers.trainer_utils", "RemoveColumnsCollator"): ("signature_columns",),
    # Trainer that fitted the module before; it is not pickled with the module.
    ("lightning.pytorch.core.module", "LightningModule"): ("_trainer",),
}


# --- functions


def _function(walk: Walk, function: FunctionType) -> bytes:
    """Return a link to a function: by name for a library's, to a part of its own for a user's."""
    own = vars(function)
    if "hooked" in own:  # torch wraps an optimizer class's `step` when its first instance is made
        return walk.value(own["__wrapped__"])
    if is_library_function(function):
        walk.note(origin_of(function.__globals__))
        return text("library", function.__module__, function.__qualname__)
    name = function.__qualname__.replace(".<locals>", "")
    label = f"function {name} of {module_origin(function.__module__).label}"
    return walk.part(id(function), label, partial(_function_content, walk, function))


def is_library_function(function: FunctionType) -> bool:
    """Return whether a library's version describes the function completely: it is the library's, and found by its name.

    A library's wrapper around a user's function carries the user's module.
    """
    if origin_of(function.__globals__).is_user or module_origin(function.__module__).is_user:
        return False
    found: Any = instance_dict(sys.modules.get(function.__module__))
    for step in function.__qualname__.split("."):
        found = (vars(found) if is_a(found, type) else found).get(step)
        if not is_a(found, type):
            break
    return found is function


def _function_content(walk: Walk, function: FunctionType) -> bytes:
    """Return the digest of a function's code, defaults, closure and references, and of the function that it wraps."""
    code, origin = function.__code__, origin_of(function.__globals__)
    walk.note(origin)
    if origin.is_user:
        body = digest("user code", code_digest(code), *_references(walk, function))
    else:
        body = text("library code", origin.label, code.co_name)
    outer = function.__qualname__.rpartition(".<locals>")[0].replace(".<locals>", "")
    return digest(
        "function",
        body,
        walk.value(function.__defaults__),
        walk.value(function.__kwdefaults__),
        *(
            _variable(walk, id(cell), name, f"closure {name} of {outer}", cell.cell_contents)
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
            if cell != CellType()  # an empty cell
        ),
        walk.attributes(FunctionType, vars(function), frozenset({"__wrapped__"})),
    )


def _variable(walk: Walk, key: Hashable, name: str, label: str, value: Any) -> bytes:
    """Return the digest of a variable: a function, class or module by its definition, data by its value."""
    is_definition = is_a(value, FunctionType, BuiltinFunctionType, ModuleType, type)
    link = walk.value(value) if is_definition else walk.part(key, label, partial(walk.value, value))
    return digest("variable", text("name", name), link)


def _references(walk: Walk, function: FunctionType) -> Iterator[bytes]:
    """Yield the digests of all globals and environment variables that the code names, including nested code.

    Names that occur only as attributes count too.
    """
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if is_a(constant, CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    yield from _globals(walk, function.__globals__, names, set())
    if origin_of(function.__globals__).file is None:  # a notebook, without a source file that shows its imports
        for found in named_modules(names):
            walk.note(found)
    if names.keys() & {"environ", "getenv"}:
        for name in {c for code in codes for c in code.co_consts if isinstance(c, str) and c.isidentifier()}:
            if name == name.upper() and not is_from_launcher(name):
                known = partial(walk.value, os.environ.get(name))
                walk.part(("environment", name), f"environment variable {name}", known)


def _globals(walk: Walk, namespace: dict[str, Any], names: Iterable[str], seen: set[int]) -> Iterator[bytes]:
    """Yield the digests of these names in the globals of a user's module, and in modules among them."""
    origin = origin_of(namespace)
    walk.note(origin)
    seen.add(id(namespace))
    for name in names if origin.is_user else ():
        value = namespace.get(name)
        if is_a(value, ModuleType):
            if id(inner := instance_dict(value)) not in seen:
                yield from _globals(walk, inner, names, seen)
        elif name in namespace and not name.startswith("__"):  # names of the module system, some of them paths
            yield _variable(walk, (id(namespace), name), name, f"global {name} of {origin.label}", value)


# --- classes


def _class(walk: Walk, cls: type) -> bytes:
    """Return a link to a class: by name for a library's, to a part of its own for a user's."""
    module, name = class_name(cls)
    origin = module_origin(module)
    walk.note(origin)
    if not origin.is_user:
        return text("library", module, name)
    label = f"class {name.replace('.<locals>', '')} of {origin.label}"
    return walk.part(id(cls), label, partial(_class_content, walk, cls))


def _class_content(walk: Walk, cls: type) -> bytes:
    """Return the digest of a class: bases, metaclass and members, without documentation and bookkeeping."""
    members = [
        digest("member", text("name", name), walk.value(value))
        for name, value in sorted(vars(cls).items())
        if name != "_abc_impl"
        and not is_a(value, types.MemberDescriptorType, types.GetSetDescriptorType)
        and (not (name.startswith("__") and name.endswith("__")) or is_a(value, FunctionType, *_WRAPPERS))
    ]
    return digest("class", walk.value(type(cls)), *map(walk.value, cls.__bases__), *members)


# --- containers and Python's own types

# A larger container is represented by its type, its length and this many elements spread evenly over it, so that a list
# of a million file names does not invalidate the cache. A larger set has no order to sample by: type and length only.
MAX_ELEMENTS = 1000
NUM_SAMPLED = 100


def _container(kind: Any, walk: Walk, obj: Any) -> bytes:
    """Return the digest of a container of a built-in kind: class, elements and, for a user's class, attributes.

    Dictionaries are compared without order, which is a set's if they were made from one.
    """
    length = kind.__len__(obj)
    elements = kind.items(obj) if hasattr(kind, "items") else kind.__iter__(obj)
    if length > MAX_ELEMENTS:
        elements = () if kind in (set, frozenset) else islice(elements, 0, None, -(-length // NUM_SAMPLED))
    children = map(walk.value, elements)
    own = text("kind", kind.__name__) if type(obj) is kind else _class_and_attributes(walk, obj)
    return digest("container", own, b"%d" % length, *(children if kind in (list, tuple) else sorted(children)))


def _class_and_attributes(walk: Walk, obj: Any) -> bytes:
    return digest("object", walk.value(type(obj)), walk.attributes(type(obj), attributes_of(obj)))


def _leaf_subclass(kind: type, walk: Walk, obj: Any) -> bytes:
    return digest("leaf", _LEAVES[id(kind)](obj), _class_and_attributes(walk, obj))


def _by_class(walk: Walk, obj: object) -> bytes:
    """Return the digest of the object's class; its content does not count."""
    return walk.value(type(obj))


def _by_attributes(*names: str) -> Handler:
    """Return a handler that reads an object of a built-in type by these attributes."""
    return lambda walk, obj: digest(type(obj).__name__, *(walk.value(getattr(obj, name)) for name in names))


_WRAPPERS: dict[Any, Handler] = {
    property: _by_attributes("fget", "fset", "fdel"),
    staticmethod: _by_attributes("__func__"),
    classmethod: _by_attributes("__func__"),
}

# The first match along an object's bases reads it.
_BY_TYPE: dict[Any, Handler] = {
    **{kind: partial(_container, kind) for kind in (list, tuple, set, frozenset, dict, types.MappingProxyType)},
    **{kind: partial(_leaf_subclass, kind) for kind in (int, float, str, bytes)},
    **_WRAPPERS,
    functools._lru_cache_wrapper: _by_attributes("__wrapped__"),
    functools.cached_property: _by_attributes("func"),
    types.MethodType: _by_attributes("__func__", "__self__"),
    FunctionType: _function,
    ModuleType: lambda walk, obj: walk.by_origin(origin_of(instance_dict(obj))),
    type: _class,
    weakref.ReferenceType: lambda walk, obj: digest("weakref", walk.value(weakref.ReferenceType.__call__(obj))),
    # Variables that code names are parts of their own; a generator's state counts as little as a tensor's values.
    **dict.fromkeys((type(os.environ), random.Random), _by_class),
}
_HANDLERS = {id(kind): handler for kind, handler in _BY_TYPE.items()}


# --- objects without a handler


def _instance(walk: Walk, obj: object) -> bytes:
    """Return the digest of an object: by attributes, or for a library's by the content that it would pickle."""
    cls: Any = type(obj)
    if class_name(cls) == ("datasets.arrow_dataset", "Dataset"):  # has a digest of its content and transforms
        return digest("dataset", walk.value(instance_dict(obj).get("_fingerprint")))
    if module_origin(class_name(cls)[0]).is_user:
        if is_opaque(cls):
            return walk.unknowable(obj, "holds data outside Python")
    elif (
        cls in copyreg.dispatch_table
        or (cls.__reduce__, cls.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__)
        or is_opaque(cls)
    ):
        return _pickled(walk, obj)
    return _class_and_attributes(walk, obj)


def _pickled(walk: Walk, obj: object) -> bytes:
    try:
        registered = copyreg.dispatch_table.get(type(obj))
        reduced = registered(obj) if registered is not None else obj.__reduce_ex__(4)
    except Exception as error:  # a library may raise anything here
        return walk.unknowable(obj, f"has no content to compare ({error})")
    link = walk.value(type(obj))
    if isinstance(reduced, str):
        return digest("by name", link, text("name", str(getattr(obj, "__module__", "")), reduced))
    function, arguments, *rest = reduced
    content = (function, arguments, *rest[:1], *(list(items) for items in rest[1:3] if items is not None))
    return digest("pickled", link, *map(walk.value, content))


# --- live tensors, arrays, modules, optimizers and loaders: shapes, dtypes and settings, never values

_OPTIMIZER_STATE = frozenset({"state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called"})
# Set during the iteration of a loader.
_LOADER_STATE = frozenset({"_iterator", "_IterableDataset_len_called"})


def _live_handlers() -> dict[int, Handler]:
    """Return the handlers for the libraries that are imported."""
    found: dict[Any, Handler] = {}
    torch, numpy, random_numbers = (sys.modules.get(name) for name in ("torch", "numpy", "numpy.random"))
    if torch is not None:
        found |= {
            torch.Tensor: _tensor,
            torch.nn.Module: partial(_module, frozenset(vars(torch.nn.Module()))),
            # Trials run the model without it.
            torch.nn.parallel.DistributedDataParallel: lambda walk, obj: walk.value(obj.module),
            torch.optim.Optimizer: _optimizer,
            torch.utils.data.DataLoader: lambda walk, obj: _settings("loader", walk, obj, _LOADER_STATE),
        }
    if numpy is not None:
        found[numpy.ndarray] = partial(_array, numpy)
    if random_numbers is not None:
        found |= dict.fromkeys((random_numbers.Generator, random_numbers.RandomState), _by_class)
    return {id(kind): handler for kind, handler in found.items()}


def _tensor(walk: Walk, tensor: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may run user code when an attribute is read
        kind = [str(tensor.dtype), tensor.device.type, str(tensor.layout), str(tensor.requires_grad)]
        with suppress(RuntimeError):  # uninitialized and nested tensors have no shape, sparse ones no strides
            kind.append(str(tuple(tensor.shape)))
            kind.append(str(tensor.stride()))
    walk.num_tensors += 1
    return digest("tensor", walk.value(type(tensor)), text("tensor", *kind), b"%d" % walk.num_tensors)


def _array(numpy: Any, walk: Walk, array: Any) -> bytes:
    dtype, shape = numpy.ndarray.dtype.__get__(array), numpy.ndarray.shape.__get__(array)
    if dtype.hasobject:
        return walk.unknowable(array, "holds Python objects")
    return digest("array", walk.value(type(array)), text("array", str(dtype), str(shape)))


def _settings(tag: str, walk: Walk, obj: Any, left_out: frozenset[str], *more: bytes) -> bytes:
    """Return the digest of a live object: its class, attributes and hooks."""
    named = instance_dict(obj)
    hooks = {name: tuple(named[name].values()) for name in named if name.endswith("_hooks") and named[name]}
    settings = walk.attributes(type(obj), named, left_out | hooks.keys())
    return digest(tag, walk.value(type(obj)), *more, walk.value(hooks), settings)


def _module(internals: frozenset[str], walk: Walk, module: Any) -> bytes:
    """Return the digest of a module; `internals` are the attributes that every module of this torch version has."""
    named = instance_dict(module)
    if "_torchdynamo_orig_callable" in named:  # result of `torch.compile`: the compiled object, and its plain settings
        compiler = instance_dict(named.get("dynamo_ctx"))
        config = [item for item in (compiler.get("compiler_config") or {}).items() if type(item[1]) in (bool, int)]
        plain = (config, compiler.get("fullgraph"), compiler.get("_dynamic"))
        return digest("compiled", walk.value(named["_modules"]["_orig_mod"]), walk.value(plain))
    entries = [item for group in ("_parameters", "_buffers", "_modules") for item in (named.get(group) or {}).items()]
    states = (named.get("training"), named.get("_non_persistent_buffers_set"))
    return _settings("module", walk, module, internals, walk.value(states), *map(walk.value, entries))


def _optimizer(walk: Walk, optimizer: Any) -> bytes:
    named = instance_dict(optimizer)
    groups = [
        {name: len(value) if name == "params" else value for name, value in group.items()}
        for group in named.get("param_groups", ())
    ]
    internal = {name for name in named if name.startswith("_warned")}
    return _settings("optimizer", walk, optimizer, _OPTIMIZER_STATE | internal, walk.value(groups))

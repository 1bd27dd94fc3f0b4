"""How objects are read: functions and classes by their code and what it reaches, containers by content, live objects
by shape and settings, others by attributes or as pickled."""

from __future__ import annotations

import copyreg
import functools
import os
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from functools import partial
from itertools import islice
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from autotune_amp.distributed.ranks import is_from_launcher
from autotune_amp.fingerprint.origin import module_origin, named_modules, origin_of
from autotune_amp.fingerprint.walk import LEAVES, Handler, Walk, code_digest, digest, text

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping

# --- objects are read through their dictionaries and slots: no property and no `__getattr__` of the user's is asked


def is_a(obj: object, *kinds: type) -> bool:
    """``isinstance`` by the real type; ``isinstance`` asks an object's ``__class__``, which may be a property."""
    return issubclass(type(obj), kinds)


def class_name(cls: type) -> tuple[str, str]:
    """Module and qualified name."""
    module = cls.__module__
    return module if isinstance(module, str) else "?", cls.__qualname__


def instance_dict(obj: object) -> dict[str, Any]:
    """The attributes set on the object, empty where it has no such dictionary."""
    try:
        namespace: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return {}
    return namespace if type(namespace) is dict else {}


def attributes_of(obj: object) -> dict[str, Any]:
    """Slots and dictionary; a slot that a class below shadows stands behind the name of its own class."""
    found: dict[str, Any] = {}
    for base in type(obj).__mro__:
        for name, descriptor in vars(base).items():
            if type(descriptor) is types.MemberDescriptorType and not name.startswith("__"):
                with suppress(AttributeError):  # an empty slot
                    found[name if name not in found else f"{base.__qualname__}.{name}"] = descriptor.__get__(obj)
    return found | instance_dict(obj)


def is_opaque(cls: type) -> bool:
    """Whether instances hold data of C or Rust beside attributes and slots, which ``copyreg`` refuses to pickle."""
    num_slots = sum(
        type(member) is types.MemberDescriptorType for base in cls.__mro__ for member in vars(base).values()
    )
    num_pointers = (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0) + num_slots
    return cls.__basicsize__ > object.__basicsize__ + 8 * num_pointers or cls.__itemsize__ > 0


# --- functions

# What `torch.compile` sets on what it returns.
_COMPILED_FROM = "_torchdynamo_orig_callable"

_DEFINITIONS = (FunctionType, BuiltinFunctionType, ModuleType, type)  # linked to, rather than read as data


def _function_label(function: FunctionType) -> str:
    name = function.__qualname__.replace(".<locals>", "")
    return f"function {name} of {module_origin(function.__module__).label}"


def is_library_function(function: FunctionType) -> bool:
    """Whether a library's version says all there is to know: a function of its own that is found by its name.

    A library's wrapper around a function of the user's carries the user's module.
    """
    if origin_of(function.__globals__).is_user or module_origin(function.__module__).is_user:
        return False
    found: Any = instance_dict(sys.modules.get(function.__module__))
    for step in function.__qualname__.split("."):
        found = (vars(found) if is_a(found, type) else found).get(step)
        if not is_a(found, type):
            break
    return found is function


def _function(walk: Walk, function: FunctionType) -> bytes:
    """A link: by name into a library, or to a part of the user's."""
    own = vars(function)
    if "hooked" in own:  # torch wraps an optimizer class's `step` when its first instance is made
        return walk.value(own["__wrapped__"])
    if is_library_function(function):
        walk.note(origin_of(function.__globals__))
        return text("library", function.__module__, function.__qualname__)
    return walk.part(id(function), _function_label(function), partial(_function_content, walk, function))


def _function_content(walk: Walk, function: FunctionType) -> bytes:
    """Code, defaults, closure and what it refers to; of a library's wrapper, what it wraps."""
    own, code = vars(function), function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    if _COMPILED_FROM in own:
        return _compiled(walk, own[_COMPILED_FROM], cells["self"].cell_contents if "self" in cells else None)
    origin = origin_of(function.__globals__)
    walk.note(origin)
    if origin.is_user:
        body = digest("user code", code_digest(code), *_references(walk, function))
    else:
        body = text("library code", origin.label, code.co_name)
    return digest(
        "function",
        body,
        walk.child("'s defaults", function.__defaults__),
        walk.child("'s defaults", function.__kwdefaults__),
        *(_closure(walk, name, cell, function) for name, cell in cells.items()),
        walk.attributes({name: value for name, value in own.items() if name != "__wrapped__"}),
    )


def _compiled(walk: Walk, original: object, context: object) -> bytes:
    """What `torch.compile` returned: what it compiles, and its settings that are plain."""
    named = instance_dict(context)
    config = {name: value for name, value in (named.get("compiler_config") or {}).items() if type(value) in (bool, int)}
    return digest("compiled", *map(walk.value, (original, named.get("fullgraph"), named.get("_dynamic"), config)))


def _closure(walk: Walk, name: str, cell: CellType, function: FunctionType) -> bytes:
    try:
        content = cell.cell_contents
    except ValueError:
        return text("empty cell", name)
    outer = function.__qualname__.rpartition(".<locals>")[0].replace(".<locals>", "") or function.__qualname__
    return _variable(walk, id(cell), name, f"closure {name} of {outer}", content)


def _variable(walk: Walk, key: Hashable, name: str, label: str, value: Any) -> bytes:
    """A link to a definition; data are a part of their own."""
    link = walk.value(value) if is_a(value, *_DEFINITIONS) else walk.part(key, label, partial(walk.value, value))
    return digest("variable", text("name", name), link)


def _references(walk: Walk, function: FunctionType) -> Iterator[bytes]:
    """The globals and the environment variables that the code, with the code nested in it, names.

    Attributes are among the names, so that more counts than is used.
    """
    namespace, codes = function.__globals__, [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if is_a(constant, CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    yield from _globals(walk, namespace, names, set())
    if origin_of(namespace).file is None:  # a notebook's: there is no source file that says what it imports
        for found in named_modules(names):
            walk.note(found)
    if names.keys() & {"environ", "getenv"}:
        for name in {c for code in codes for c in code.co_consts if isinstance(c, str) and c.isidentifier()}:
            if name == name.upper() and not is_from_launcher(name):
                known = partial(walk.value, os.environ.get(name))
                walk.part(("environment", name), f"environment variable {name}", known)


def _globals(walk: Walk, namespace: dict[str, Any], names: Iterable[str], seen: set[int]) -> Iterator[bytes]:
    """What a module's globals of these names hold, and those of the modules among them.

    A library's count by its version; but for functions of the user's that were put in their place.
    """
    seen.add(id(namespace))
    origin = origin_of(namespace)
    for name in names:
        if name not in namespace or name.startswith("__"):  # a module's own, some of them paths
            continue
        value = namespace[name]
        if is_a(value, ModuleType):
            inner = instance_dict(value)
            walk.note(origin_of(inner))
            if id(inner) not in seen:
                yield from _globals(walk, inner, names, seen)
        elif origin.is_user or (is_a(value, FunctionType) and origin_of(value.__globals__).is_user):
            yield _variable(walk, (id(namespace), name), name, f"global {name} of {origin.label}", value)


def _module_link(walk: Walk, module: ModuleType) -> bytes:
    """The user's by its file, a library's by its version."""
    origin = origin_of(instance_dict(module))
    walk.note(origin)
    return text("module", origin.label)


# --- classes


def _class(walk: Walk, cls: type) -> bytes:
    """A link: by name into a library, or to a part of the user's."""
    module, name = class_name(cls)
    origin = module_origin(module)
    walk.note(origin)
    if origin.is_user:
        label = f"class {name.replace('.<locals>', '')} of {origin.label}"
        return walk.part(id(cls), label, partial(_class_content, walk, cls))
    return digest("library", text("name", module, name), *sorted(_replaced_methods(walk, cls)))


def _replaced_methods(walk: Walk, cls: type) -> Iterator[bytes]:
    """Functions of the user's that were put into a library's class; not what a library generates, without a file."""
    for base in cls.__mro__:
        home = instance_dict(sys.modules.get(base.__module__))
        for name, value in vars(base).items():
            if type(value) is FunctionType and value.__globals__ is not home:
                origin = origin_of(value.__globals__)
                if origin.is_user and (origin.file is not None or origin.root == "__main__"):
                    yield digest("replaced", text("name", base.__qualname__, name), walk.value(value))


def _class_content(walk: Walk, cls: type) -> bytes:
    """Bases, metaclass and what the class holds, its methods among it: no documentation, no bookkeeping of Python's."""
    members = [
        digest("member", text("name", name), walk.child(f".{name}", value))
        for name, value in sorted(vars(cls).items())
        if name != "_abc_impl"
        and not is_a(value, types.MemberDescriptorType, types.GetSetDescriptorType)
        and (not (name.startswith("__") and name.endswith("__")) or is_a(value, FunctionType, *_WRAPPERS))
    ]
    return digest("class", walk.value(type(cls)), *(walk.value(base) for base in cls.__bases__), *members)


# --- containers and what Python itself defines

# A larger container counts by its type, its length and this many elements spread evenly over it, so that a list of a
# million file names does not cost a search its cache. A larger set has no order to sample by: type and length alone.
MAX_ELEMENTS = 1000
NUM_SAMPLED = 100


def _sampled(elements: Iterable[Any], length: int) -> Iterable[Any]:
    """All elements of a small container, some of a large one."""
    return elements if length <= MAX_ELEMENTS else islice(elements, 0, None, -(-length // NUM_SAMPLED))


def _container(kind: Any, walk: Walk, obj: Any) -> bytes:
    """A container of a kind of Python's own: by its class, elements and, where the class is the user's, attributes.

    Equal dictionaries are equal here, whatever their order, which is a set's where they were made from one.
    """
    length = kind.__len__(obj)
    if hasattr(kind, "items"):
        pairs = _sampled(kind.items(obj), length)
        steps = [(f"[{key!r}]" if type(key) is str else "[...]", key, value) for key, value in pairs]
        children = [digest("item", walk.value(key), walk.child(step, value)) for step, key, value in steps]
    else:
        elements = () if kind in (set, frozenset) and length > MAX_ELEMENTS else _sampled(kind.__iter__(obj), length)
        children = [walk.child(f"[{index}]", element) for index, element in enumerate(elements)]
    if kind not in (list, tuple, deque, OrderedDict):
        children.sort()
    return digest("container", _class_and_attributes(walk, obj), b"%d" % length, *children)


def _class_and_attributes(walk: Walk, obj: Any) -> bytes:
    return digest("object", walk.value(type(obj)), walk.attributes(_settled(type(obj), attributes_of(obj))))


def _leaf_subclass(kind: type, walk: Walk, obj: Any) -> bytes:
    return digest("leaf", LEAVES[id(kind)](obj), _class_and_attributes(walk, obj))


def _parts_of(tag: str, *names: str) -> Handler:
    """Reads an object of a type of Python's own by these attributes."""
    return lambda walk, obj: digest(tag, *(walk.value(getattr(obj, name)) for name in names))


_WRAPPERS: dict[Any, Handler] = {
    property: _parts_of("property", "fget", "fset", "fdel"),
    staticmethod: _parts_of("staticmethod", "__func__"),
    classmethod: _parts_of("classmethod", "__func__"),
}

# By `id` of the type, for the reason given at `LEAVES`; the first found along an object's bases reads it.
_BY_TYPE: dict[Any, Handler] = {
    **{kind: partial(_container, kind) for kind in (list, tuple, deque, set, frozenset)},
    **{kind: partial(_container, kind) for kind in (dict, OrderedDict, defaultdict, types.MappingProxyType)},
    **{kind: partial(_leaf_subclass, kind) for kind in (int, float, complex, str, bytes)},
    **_WRAPPERS,
    functools._lru_cache_wrapper: _parts_of("lru_cache", "__wrapped__"),
    functools.cached_property: _parts_of("cached_property", "func"),
    types.MethodType: _parts_of("method", "__func__", "__self__"),
    FunctionType: _function,
    ModuleType: _module_link,
    type: _class,
    weakref.ReferenceType: lambda walk, obj: digest("weakref", walk.value(weakref.ReferenceType.__call__(obj))),
    # The variables that code names are parts of their own; a generator's state counts no more than a tensor's.
    **dict.fromkeys((type(os.environ), random.Random), lambda walk, obj: walk.value(type(obj))),
}
_HANDLERS = {id(kind): handler for kind, handler in _BY_TYPE.items()}


# --- objects that no handler reads

# Of a library's objects that also hold caches, locks or handles: the attributes that say what they are.
_ESSENCE: dict[tuple[str, str], tuple[str, ...]] = {
    ("triton.runtime.jit", "JITFunction"): ("fn",),
    ("triton.runtime.autotuner", "Autotuner"): ("fn", "configs", "keys"),
    ("datasets.arrow_dataset", "Dataset"): ("_fingerprint",),  # its own digest of content and transforms
}


def _nothing(_: object) -> None:
    """What it holds does not count."""


def _without_order(names: Any) -> Any:
    return frozenset(names) if type(names) is list else names


# Attributes of a library's objects that differ between processes while the object does not, and what counts instead.
_SETTLED: dict[tuple[str, str], dict[str, Callable[[Any], object]]] = {
    # Python's salted `hash()` of the object's own JSON.
    ("transformers.generation.configuration_utils", "GenerationConfig"): {"_original_object_hash": _nothing},
    # Lists in the order of a set.
    ("transformers.trainer", "Trainer"): {"_signature_columns": _without_order},
    ("transformers.trainer_utils", "RemoveColumnsCollator"): {"signature_columns": _without_order},
    # What has fitted the module before; it is not pickled with it.
    ("lightning.pytorch.core.module", "LightningModule"): {"_trainer": _nothing},
}


def _settled(cls: type, named: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object of this class, as they are in every process."""
    changes = {name: settle for base in cls.__mro__ for name, settle in _SETTLED.get(class_name(base), {}).items()}
    return {name: changes[name](value) if name in changes else value for name, value in named.items()}


def _instance(walk: Walk, obj: object) -> bytes:
    """An object that no handler reads: by its attributes, or a library's as what its library would pickle it to."""
    cls: Any = type(obj)
    for name in map(class_name, cls.__mro__):
        if name in _ESSENCE:
            essence = {key: value for key, value in attributes_of(obj).items() if key in _ESSENCE[name]}
            return digest("essence", walk.value(cls), walk.attributes(essence))
    if module_origin(class_name(cls)[0]).is_user:
        if is_opaque(cls):
            return walk.unknowable(obj, "holds data outside Python")
    elif (
        cls in copyreg.dispatch_table
        or (cls.__reduce__, cls.__reduce_ex__) != (object.__reduce__, object.__reduce_ex__)
        or is_opaque(cls)
    ):
        return _pickled(walk, obj, walk.value(cls))
    return _class_and_attributes(walk, obj)


def _pickled(walk: Walk, obj: object, link: bytes) -> bytes:
    try:
        registered = copyreg.dispatch_table.get(type(obj))
        reduced = registered(obj) if registered is not None else obj.__reduce_ex__(4)
    except Exception as error:  # a library may raise anything here
        return walk.unknowable(obj, f"has no content to compare ({error})")
    if isinstance(reduced, str):
        return digest("by name", link, text("name", str(getattr(obj, "__module__", "")), reduced))
    function, arguments, *rest = reduced
    content = (function, arguments, *rest[:1], *(list(items) for items in rest[1:3] if items is not None))
    return digest("pickled", link, *map(walk.value, content))


# --- live tensors, arrays, modules, optimizers and loaders: shapes, dtypes and settings, never values

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_OPTIMIZER_STATE = frozenset({"state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called"})
# Set while a loader is iterated.
_LOADER_STATE = frozenset({"_iterator", "_IterableDataset_len_called"})


def _live_handlers() -> dict[int, Handler]:
    """The handlers for what is imported."""
    found: dict[Any, Handler] = {}
    torch, numpy, random_numbers = (sys.modules.get(name) for name in ("torch", "numpy", "numpy.random"))
    if torch is not None:
        found |= {
            torch.Tensor: _tensor,
            torch.Generator: lambda _, obj: text("generator", str(obj.initial_seed()), str(obj.device)),
            torch.layout: lambda _, obj: text("layout", str(obj)),
            torch.nn.Module: partial(_module, frozenset(vars(torch.nn.Module()))),
            # A trial has none around its model.
            torch.nn.parallel.DistributedDataParallel: lambda walk, obj: walk.value(obj.module),
            torch.optim.Optimizer: _optimizer,
            torch.utils.data.DataLoader: lambda walk, obj: _settings("loader", walk, obj, _LOADER_STATE),
        }
    if numpy is not None:
        found |= {numpy.ndarray: _array, numpy.ufunc: lambda _, obj: text("ufunc", obj.__name__)}
    if random_numbers is not None:
        kinds = (random_numbers.Generator, random_numbers.RandomState)
        found |= dict.fromkeys(kinds, lambda walk, obj: walk.value(type(obj)))
    return {id(kind): handler for kind, handler in found.items()}


def _tensor(walk: Walk, tensor: Any) -> bytes:
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may run code of the user's where an attribute is read
        kind = [str(tensor.dtype), tensor.device.type, str(tensor.layout), str(tensor.requires_grad)]
        with suppress(RuntimeError):  # an uninitialized or nested one has no shape, a sparse one no strides
            kind.append(str(tuple(tensor.shape)))
            kind.append(str(tensor.stride()))
    return digest("tensor", walk.value(type(tensor)), walk.tensor(text("tensor", *kind)))


def _array(walk: Walk, array: Any) -> bytes:
    read = type(array).__mro__[-2].__dict__  # numpy.ndarray's own
    dtype, shape = read["dtype"].__get__(array), read["shape"].__get__(array)
    children = [text("array", str(dtype), str(shape))]
    if dtype.hasobject and not dtype.names:  # samples of unequal lengths, as such or in their names
        elements = read["ravel"](array).tolist()
        children += [walk.child("[...]", element) for element in _sampled(elements, len(elements))]
    return digest("array", walk.value(type(array)), *children)


def _settings(tag: str, walk: Walk, obj: Any, left_out: frozenset[str], *more: bytes) -> bytes:
    """A live object by its class, its attributes and its hooks."""
    named = _settled(type(obj), instance_dict(obj))
    hooks = [(name, tuple(named[name].values())) for name in _HOOKS if named.get(name)]
    return digest(
        tag,
        walk.value(type(obj)),
        *more,
        *(digest(name, walk.child(f".{name}", hooks)) for name, hooks in hooks),
        walk.attributes({name: value for name, value in named.items() if name not in left_out}),
    )


def _module(internals: frozenset[str], walk: Walk, module: Any) -> bytes:
    """`internals` are the attributes that every module has, in this version of torch."""
    named = instance_dict(module)
    if _COMPILED_FROM in named:
        return _compiled(walk, named["_modules"]["_orig_mod"], named.get("dynamo_ctx"))
    entries = [item for group in ("_parameters", "_buffers", "_modules") for item in (named.get(group) or {}).items()]
    content = [digest("entry", text("name", name), walk.child(f".{name}", value)) for name, value in entries]
    states = (named.get("training"), named.get("_non_persistent_buffers_set"))
    return _settings("module", walk, module, internals, *map(walk.value, states), *content)


def _optimizer(walk: Walk, optimizer: Any) -> bytes:
    named = instance_dict(optimizer)
    groups = [
        {name: len(value) if name == "params" else value for name, value in group.items()}
        for group in named.get("param_groups", ())
    ]
    internal = {name for name in named if name.endswith("_hooks") or name.startswith("_warned")}
    left_out = _OPTIMIZER_STATE | internal
    return _settings("optimizer", walk, optimizer, left_out, walk.child(".param_groups", groups))


# --- the workload


def walk_objects() -> Walk:
    """A walk that reads what is imported now; a library that is not imported can have no object in a workload."""
    handlers = _HANDLERS | _live_handlers()

    def handler_of(cls: type) -> Handler:
        return next((handlers[id(base)] for base in cls.__mro__ if id(base) in handlers), _instance)

    return Walk(handler_of)


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """What makes the workload: a digest by part name, and what of it cannot be known (empty: everything can).

    `workload` is an object with attributes, or a function that returns one and is not called. A name is what a user
    would call the part: ``workload.loss (function loss of train.py)``, ``global LEARNING_RATE of train.py``. A value
    that begins with ``=`` is no digest but the thing itself, a library's version.
    """
    walk = walk_objects()
    if is_a(workload, FunctionType, BuiltinFunctionType, types.MethodType, type, partial):
        _root(walk, "workload", workload)
    else:
        walk.part("workload", "workload", partial(walk.value, type(workload)))
        for name, value in attributes_of(workload).items():
            _root(walk, f"workload.{name}", value)
    walk.run()
    return walk.parts, tuple(walk.unknown)


def _root(walk: Walk, name: str, value: Any) -> None:
    """Make an attribute of the workload a part, which is the function itself where it is one of the user's."""
    if is_a(value, FunctionType) and not is_library_function(value) and not walk.is_part(id(value)):
        walk.part(id(value), f"{name} ({_function_label(value)})", partial(_function_content, walk, value))
    else:
        walk.part(name, name, partial(walk.value, value))

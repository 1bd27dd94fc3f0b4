"""How objects are read: containers by content, live ones by shape and settings, others by attributes or as pickled."""

from __future__ import annotations

import copyreg
import functools
import os
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from autotune_amp.fingerprint.definitions import (
    COMPILED_FROM,
    class_digest,
    class_label,
    class_link,
    compiled,
    function_digest,
    function_label,
    function_link,
    is_library_function,
    member,
    module_link,
    note_module,
)
from autotune_amp.fingerprint.origin import (
    attributes_of,
    class_name,
    instance_dict,
    is_a,
    is_opaque,
    module_origin,
    mro,
)
from autotune_amp.fingerprint.walk import LEAVES, Handler, Walk, code_digest, digest, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# A larger container counts by its type, its length and this many elements spread evenly over it, so that a list of a
# million file names does not cost a search its cache. A larger set has no order to sample by: type and length alone.
MAX_ELEMENTS = 1000
NUM_SAMPLED = 100


def sampled(elements: Iterable[Any], length: int) -> Iterable[Any]:
    """All elements of a small container, some of a large one."""
    return elements if length <= MAX_ELEMENTS else islice(elements, 0, None, -(-length // NUM_SAMPLED))


def _container(tag: str, walk: Walk, obj: Any, length: int, children: Sequence[bytes]) -> bytes:
    """A container of these elements: the user's own class of it may have attributes."""
    link = class_link(walk, type(obj))
    return digest(tag, link, text("length", str(length)), *children, walk.attributes(attributes_of(obj)))


def _sequence(read: type, walk: Walk, obj: Any) -> bytes:
    length = read.__len__(obj)  # type: ignore[attr-defined]
    elements = sampled(read.__iter__(obj), length)  # type: ignore[attr-defined]
    children = [walk.child(f"[{index}]", element) for index, element in enumerate(elements)]
    return _container("sequence", walk, obj, length, children)


def _set(read: type, walk: Walk, obj: Any) -> bytes:
    length = read.__len__(obj)  # type: ignore[attr-defined]
    elements = read.__iter__(obj) if length <= MAX_ELEMENTS else ()  # type: ignore[attr-defined]
    children = sorted([walk.child("{}", element) for element in elements])
    return _container("set", walk, obj, length, children)


def _mapping(read: type, walk: Walk, obj: Any) -> bytes:
    """Equal dictionaries are equal here, whatever their order, which is a set's where they were made from one."""
    length = read.__len__(obj)  # type: ignore[attr-defined]
    items = sampled(read.items(obj), length)  # type: ignore[attr-defined]
    children = [
        digest("item", walk.value(key), walk.child(f"[{key!r}]" if type(key) is str else "[...]", value))
        for key, value in items
    ]
    if not issubclass(read, OrderedDict):
        children.sort()
    return _container("mapping", walk, obj, length, children)


def _of_leaf(read: type, walk: Walk, obj: Any) -> bytes:
    """A subclass of ``int``, ``str`` and the like."""
    return digest("leaf", class_link(walk, type(obj)), LEAVES[id(read)](obj), walk.attributes(attributes_of(obj)))


def _descriptor(walk: Walk, obj: Any) -> bytes:
    return digest("descriptor", text("name", obj.__name__), walk.value(obj.__objclass__))


def _builtin(walk: Walk, obj: Any) -> bytes:
    owner = obj.__self__
    note_module(walk, obj.__module__)
    return digest("builtin", text("name", str(obj.__module__), obj.__qualname__), walk.child(".__self__", owner))


def _cell(walk: Walk, obj: Any) -> bytes:
    try:
        return digest("cell", walk.value(obj.cell_contents))
    except ValueError:
        return text("empty cell")


def _property(walk: Walk, obj: Any) -> bytes:
    return digest("property", *map(partial(member, walk), (obj.fget, obj.fset, obj.fdel)))


def _method(walk: Walk, obj: Any) -> bytes:
    return digest("method", walk.value(obj.__func__), walk.child(".__self__", obj.__self__))


# By `id` of the type, for the reason given at `LEAVES`; the first found along an object's bases reads it.
HANDLERS: dict[int, Handler] = {
    **{id(kind): partial(_sequence, kind) for kind in (list, tuple, deque)},
    **{id(kind): partial(_set, kind) for kind in (set, frozenset)},
    **{id(kind): partial(_mapping, kind) for kind in (dict, OrderedDict, defaultdict, types.MappingProxyType)},
    **{id(kind): partial(_of_leaf, kind) for kind in (int, float, complex, str, bytes, bytearray)},
    **{
        id(kind): _descriptor
        for kind in (
            types.WrapperDescriptorType,
            types.MethodDescriptorType,
            types.GetSetDescriptorType,
            types.MemberDescriptorType,
            types.ClassMethodDescriptorType,
        )
    },
    id(types.BuiltinFunctionType): _builtin,
    id(types.MethodWrapperType): lambda walk, obj: digest(
        "method wrapper", text("name", obj.__name__), walk.value(obj.__self__)
    ),
    id(types.MethodType): _method,
    id(types.FunctionType): function_link,
    id(types.ModuleType): module_link,
    id(type): class_link,
    # The variables that code names are parts of their own.
    id(type(os.environ)): lambda walk, obj: class_link(walk, type(obj)),
    id(types.CodeType): lambda _, obj: code_digest(obj),
    id(types.CellType): _cell,
    id(property): _property,
    id(staticmethod): lambda walk, obj: digest("staticmethod", member(walk, obj.__func__)),
    id(classmethod): lambda walk, obj: digest("classmethod", member(walk, obj.__func__)),
    id(functools._lru_cache_wrapper): lambda walk, obj: digest("lru_cache", member(walk, obj.__wrapped__)),
    id(functools.cached_property): lambda walk, obj: digest("cached_property", member(walk, obj.func)),
    id(weakref.ReferenceType): lambda walk, obj: digest("weakref", walk.value(weakref.ReferenceType.__call__(obj))),
}


# --- objects that no handler reads

# Of a library's objects that also hold caches, locks or handles: the attributes that say what they are.
_ESSENCE: dict[tuple[str, str], tuple[str, ...]] = {
    ("triton.runtime.jit", "JITFunction"): ("fn",),
    ("triton.runtime.autotuner", "Autotuner"): ("fn", "configs", "keys"),
    ("datasets.arrow_dataset", "Dataset"): ("_fingerprint",),  # its own digest of content and transforms
}


def _nothing(_: Any) -> None:
    """Left out."""


def _without_order(names: Any) -> Any:
    return frozenset(names) if type(names) is list else names


# Attributes of a library's objects that differ between processes while the object does not: by name and class, and what
# counts in their stead.
_SETTLED: dict[str, tuple[tuple[str, str], Callable[[Any], object]]] = {
    # Python's salted `hash()` of the object's own JSON.
    "_original_object_hash": (("transformers.generation.configuration_utils", "GenerationConfig"), _nothing),
    # Lists in the order of a set.
    "_signature_columns": (("transformers.trainer", "Trainer"), _without_order),
    "signature_columns": (("transformers.trainer_utils", "RemoveColumnsCollator"), _without_order),
    # What has fitted the module before; it is not pickled with it.
    "_trainer": (("lightning.pytorch.core.module", "LightningModule"), _nothing),
}


def settled(cls: type, named: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object of this class, as they are in every process."""
    found = dict(named)
    for name in found.keys() & _SETTLED.keys():
        owner, settle = _SETTLED[name]
        if any(class_name(base) == owner for base in mro(cls)):
            found[name] = settle(found[name])
    return found


def instance(walk: Walk, obj: object) -> bytes:
    """The digest of an object that no handler reads."""
    cls = type(obj)
    named = settled(cls, attributes_of(obj))
    for base in mro(cls):
        if class_name(base) in _ESSENCE:
            essence = {name: named[name] for name in _ESSENCE[class_name(base)] if name in named}
            return digest("essence", class_link(walk, cls), walk.attributes(essence))
    if module_origin(class_name(cls)[0]).is_user:
        if is_opaque(cls):
            return walk.unknowable(obj, "holds data outside Python")
    elif _has_own_pickling(cls) or is_opaque(cls):
        return _pickled(walk, obj)
    return digest("instance", class_link(walk, cls), walk.attributes(named))


def _has_own_pickling(cls: Any) -> bool:
    return (
        cls in copyreg.dispatch_table
        or cls.__reduce__ is not object.__reduce__
        or cls.__reduce_ex__ is not object.__reduce_ex__
    )


def _pickled(walk: Walk, obj: object) -> bytes:
    """A library's object as what its library would pickle it to."""
    link = class_link(walk, type(obj))
    try:
        registered = copyreg.dispatch_table.get(type(obj))
        reduced = registered(obj) if registered is not None else obj.__reduce_ex__(4)
    except Exception as error:  # a library may raise anything here
        return walk.unknowable(obj, f"has no content to compare ({error})")
    if isinstance(reduced, str):
        return digest("by name", link, text("name", reduced))
    function, arguments, *rest = reduced
    content = (function, arguments, *rest[:1], *(list(items) for items in rest[1:3] if items is not None))
    return digest("pickled", link, *map(walk.value, content))


# --- live tensors, arrays, modules, optimizers and loaders: shapes, dtypes and settings, never values

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_OPTIMIZER_STATE = frozenset({"state", "param_groups", "step", "_zero_grad_profile_name", "_opt_called"})
# Set while a loader is iterated.
_LOADER_STATE = frozenset({"_iterator", "_IterableDataset_len_called"})


def live_handlers() -> dict[int, Handler]:
    """The handlers for what is imported."""
    found: dict[int, Handler] = {id(random.Random): lambda walk, obj: class_link(walk, type(obj))}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found |= {
            id(torch.Tensor): _tensor,
            id(torch.Generator): lambda _, obj: text("generator", str(obj.initial_seed()), str(obj.device)),
            id(torch.layout): lambda _, obj: text("layout", str(obj)),
            id(torch.nn.Module): _module,
            # A trial has none around its model.
            id(torch.nn.parallel.DistributedDataParallel): lambda walk, obj: walk.value(
                instance_dict(obj)["_modules"]["module"]
            ),
            id(torch.optim.Optimizer): _optimizer,
            id(torch.utils.data.DataLoader): _loader,
        }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found |= {
            id(numpy.ndarray): _array,
            id(numpy.ufunc): lambda _, obj: text("ufunc", obj.__name__),
        }
    numpy_random: Any = sys.modules.get("numpy.random")  # loaded when first used
    if numpy_random is not None:
        found |= {
            id(numpy_random.Generator): _numpy_generator,
            id(numpy_random.RandomState): lambda walk, obj: class_link(walk, type(obj)),
        }
    return found


def _tensor(walk: Walk, tensor: Any) -> bytes:
    """A tensor counts by its number in this part, so that tied weights show; its shape goes to the shapes."""
    torch: Any = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may run code of the user's where an attribute is read
        kind = [str(tensor.dtype), tensor.device.type, str(tensor.layout), str(tensor.requires_grad)]
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            kind.append("uninitialized")
        elif tensor.layout is not torch.strided or tensor.is_nested:
            kind.append(str(tensor.dim()) if tensor.is_nested else str(tuple(tensor.shape)))
        else:
            kind += [str(tuple(tensor.shape)), str(tensor.stride())]
    return digest("tensor", class_link(walk, type(tensor)), walk.shape(text("tensor", *kind)))


def _array(walk: Walk, array: Any) -> bytes:
    numpy: Any = sys.modules["numpy"]
    get = numpy.ndarray.__dict__
    dtype, shape = get["dtype"].__get__(array), get["shape"].__get__(array)
    children = [walk.shape(text("array", str(dtype), str(shape)))]
    if dtype.hasobject and not dtype.names:
        elements = numpy.ndarray.ravel(array)
        children += [walk.child("[...]", element) for element in sampled(elements.tolist(), elements.size)]
    return digest("array", class_link(walk, type(array)), *children)


def _numpy_generator(walk: Walk, generator: Any) -> bytes:
    """By its seed. One drawn from the operating system, recognised by its size, is as good as any other."""
    sequence = getattr(generator.bit_generator, "seed_seq", None)
    entropy = getattr(sequence, "entropy", None)
    is_drawn = isinstance(entropy, int) and entropy >> 64 > 0
    return digest("numpy generator", class_link(walk, type(generator)), walk.value(None if is_drawn else entropy))


def _hooks(walk: Walk, attributes: Mapping[str, Any]) -> bytes:
    found = [(name, tuple(attributes[name].values())) for name in _HOOKS if attributes.get(name)]
    return digest("hooks", *(digest(name, walk.child(f".{name}", hooks)) for name, hooks in found))


def _module(walk: Walk, module: Any) -> bytes:
    attributes = instance_dict(module)
    if COMPILED_FROM in attributes:
        return compiled(walk, attributes["_modules"]["_orig_mod"], attributes.get("dynamo_ctx"))
    own = {name: value for name, value in attributes.items() if name not in _module_internals()}
    groups = [attributes.get(name) or {} for name in ("_parameters", "_buffers", "_modules")]
    return digest(
        "module",
        class_link(walk, type(module)),
        walk.value(attributes.get("training")),
        walk.value(attributes.get("_non_persistent_buffers_set")),
        *(
            digest("entry", text("name", name), walk.child(f".{name}", value))
            for group in groups
            for name, value in group.items()
        ),
        _hooks(walk, attributes),
        walk.attributes(settled(type(module), own)),
    )


_internals: frozenset[str] = frozenset()


def _module_internals() -> frozenset[str]:
    """The attributes that every module has, in this version of torch."""
    global _internals
    if not _internals:
        torch: Any = sys.modules["torch"]
        _internals = frozenset(vars(torch.nn.Module()))
    return _internals


def _optimizer(walk: Walk, optimizer: Any) -> bytes:
    attributes = instance_dict(optimizer)
    own = {
        name: value
        for name, value in attributes.items()
        if name not in _OPTIMIZER_STATE and not name.endswith("_hooks") and not name.startswith("_warned")
    }
    groups = [
        {name: len(value) if name == "params" else value for name, value in group.items()}
        for group in attributes.get("param_groups", ())
    ]
    return digest(
        "optimizer",
        class_link(walk, type(optimizer)),
        walk.child(".param_groups", groups),
        _hooks(walk, attributes),
        walk.attributes(own),
    )


def _loader(walk: Walk, loader: Any) -> bytes:
    own = {name: value for name, value in instance_dict(loader).items() if name not in _LOADER_STATE}
    return digest("loader", class_link(walk, type(loader)), walk.attributes(own))


# --- the workload


def walk_objects() -> Walk:
    """A walk that reads what is imported now; a library that is not imported can have no object in a workload."""
    handlers = HANDLERS | live_handlers()

    def handler_of(cls: type) -> Handler:
        return next((handlers[id(base)] for base in mro(cls) if id(base) in handlers), instance)

    return Walk(handler_of)


def workload_parts(workload: object) -> tuple[dict[str, str], tuple[str, ...]]:
    """What makes the workload: a digest by part name, and what of it cannot be known (empty: everything can).

    `workload` is an object with attributes, or a function that returns one and is not called. A name is what a user
    would call the part: ``workload.loss (function loss of train.py)``, ``global LEARNING_RATE of train.py``. A value
    that begins with ``=`` is no digest but the thing itself, a library's version.
    """
    walk = walk_objects()
    if is_a(workload, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, partial):
        _root(walk, "workload", workload)
    else:
        walk.part("workload", "workload", lambda: class_link(walk, type(workload)))
        for name, value in attributes_of(workload).items():
            _root(walk, f"workload.{name}", value)
    walk.run()
    return walk.parts, tuple(walk.unknown)


def _root(walk: Walk, name: str, value: Any) -> None:
    """Make an attribute of the workload a part, which is the function or class itself where it is one."""
    if walk.is_part(id(value)):
        walk.part(name, name, partial(walk.value, value))
    elif is_a(value, types.FunctionType) and not is_library_function(value):
        walk.part(id(value), f"{name} ({function_label(value)})", partial(function_digest, walk, value))
    elif is_a(value, type) and module_origin(class_name(value)[0]).is_user:
        walk.part(id(value), f"{name} ({class_label(value)})", partial(class_digest, walk, value))
    else:
        walk.part(name, name, partial(walk.value, value))

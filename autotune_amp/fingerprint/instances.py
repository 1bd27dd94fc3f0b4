"""How an object of any other class is read: the user's by its attributes, a library's as it would be pickled."""

from __future__ import annotations

import copyreg
from typing import TYPE_CHECKING, Any

from autotune_amp.fingerprint.code import digest, text
from autotune_amp.fingerprint.definitions import class_link
from autotune_amp.fingerprint.origin import module_origin
from autotune_amp.fingerprint.peek import attributes_of, class_name, is_opaque, mro

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from autotune_amp.fingerprint.walk import Walk

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

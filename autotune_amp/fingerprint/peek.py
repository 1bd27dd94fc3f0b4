"""Reading objects without running anything of the user's: no property, no metaclass, no ``__getattr__``."""

from __future__ import annotations

import types
from typing import Any

_get_type = type.__dict__


def mro(cls: type) -> tuple[type, ...]:
    """The bases of a class, itself first."""
    bases: tuple[type, ...] = _get_type["__mro__"].__get__(cls)
    return bases


def class_dict(cls: type) -> dict[str, Any]:
    """What the class itself defines."""
    namespace: dict[str, Any] = _get_type["__dict__"].__get__(cls)
    return namespace


def class_name(cls: type) -> tuple[str, str]:
    """Module and qualified name."""
    module, name = _get_type["__module__"].__get__(cls), _get_type["__qualname__"].__get__(cls)
    return module if isinstance(module, str) else "?", name


def instance_dict(obj: object) -> dict[str, Any]:
    """The attributes set on the object, empty where it has no such dictionary."""
    for base in mro(type(obj)):
        descriptor: Any = class_dict(base).get("__dict__")
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):  # the latter in modules
            namespace: dict[str, Any] = descriptor.__get__(obj)
            return namespace
    return {}


def slots(obj: object) -> dict[str, Any]:
    """The values in the object's slots."""
    found: dict[str, Any] = {}
    for base in mro(type(obj)):
        for name, descriptor in class_dict(base).items():
            if type(descriptor) is types.MemberDescriptorType and not name.startswith("__") and name not in found:
                try:
                    found[name] = descriptor.__get__(obj)
                except AttributeError:
                    continue
    return found


def attributes_of(obj: object) -> dict[str, Any]:
    """Slots and dictionary."""
    return slots(obj) | instance_dict(obj)


def is_a(obj: object, *kinds: type) -> bool:
    """``isinstance`` by the real type; ``isinstance`` asks an object's ``__class__``, which may be a property."""
    return issubclass(type(obj), kinds)


def is_opaque(cls: type) -> bool:
    """Whether instances hold data of C or Rust beside attributes and slots (the rule by which ``copyreg`` refuses)."""
    offsets = (_get_type[name].__get__(cls) for name in ("__dictoffset__", "__weakrefoffset__"))
    names = {
        name
        for base in mro(cls)
        for name, member in class_dict(base).items()
        if type(member) is types.MemberDescriptorType
    }
    size = object.__basicsize__ + 8 * (sum(offset > 0 for offset in offsets) + len(names))
    return bool(_get_type["__basicsize__"].__get__(cls) > size or _get_type["__itemsize__"].__get__(cls))

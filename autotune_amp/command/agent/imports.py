"""Call functions after a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module called `name`: now if it is imported already, else right after its own code has
    run.
    """
    module = sys.modules.get(name)
    spec: Any = getattr(module, "__spec__", None)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, action))
    elif getattr(spec, "_initializing", False):  # its code runs: it is importing the module that led to this call
        spec.__dict__.setdefault("_autotune_amp_actions", []).append(action)
        spec.__class__ = _RunningSpec
    else:
        action(module)


class _RunningSpec(ModuleSpec):
    """Spec of a module whose code runs: Python sets `_initializing` to false on it when the import is done."""

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__["_initializing"])

    @_initializing.setter
    def _initializing(self, is_so: bool) -> None:
        self.__dict__["_initializing"] = is_so
        if not is_so and self.name in sys.modules:
            for action in self.__dict__.pop("_autotune_amp_actions", []):
                action(sys.modules[self.name])


class _Finder:
    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name = name
        self._action = action
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - importlib's signature
        if name != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:  # not earlier: frameworks look up torch's spec to check that it exists
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

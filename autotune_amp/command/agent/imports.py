"""Hooks that call a function after a module has been imported, without importing it themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module `name`: now if it is already imported, else right after its code has run."""
    module = sys.modules.get(name)
    spec: Any = getattr(module, "__spec__", None)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, action))
    elif getattr(spec, "_initializing", False):  # it is being imported further up the call stack
        spec.__dict__.setdefault("_autotune_amp_actions", []).append(action)
        spec.__class__ = _RunningSpec
    else:
        action(module)


class _RunningSpec(ModuleSpec):
    """Spec of a module that is being imported. Python sets `_initializing` to false at the end of the import, which
    calls the waiting actions.
    """

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
    """Finder on `sys.meta_path` that wraps the loader of one module so that `action` follows its import."""

    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name = name
        self._action = action
        self._is_finding = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - importlib's signature
        if name != self._name or self._is_finding:
            return None
        self._is_finding = True
        try:
            spec = find_spec(name)
        finally:
            self._is_finding = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        # Not in `find_spec`, which frameworks call just to check that torch is installed.
        def exec_module(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

"""Doing something once a module has been imported, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module called `name`: now if it is there, else right after its own code has run."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder:
    def __init__(self, name: str, action: Callable[[Any], None]) -> None:
        self._name = name
        self._action = action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - importlib's signature
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

"""A live workload as bytes that another process can read, and what of it cannot travel."""

from __future__ import annotations

import copyreg
import io
import types
from collections.abc import Iterator
from typing import Any

from autotune_amp.errors import WorkloadError
from autotune_amp.workload import WorkloadSource, type_name


def pack(source: WorkloadSource) -> bytes:
    """Everything of the workload in one piece, so that tied weights and optimizer groups keep their identity.

    Tensors on an accelerator travel as CPU copies. Raises `WorkloadError` naming by its path what cannot travel.
    """
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(source, buffer, pickle_module=_pickle_module())
    except Exception as error:
        path, culprit, reason = _find_unpicklable(source, "workload", error)
        raise WorkloadError(
            f"{path} (a {type_name(culprit)}) cannot be sent to a trial: {reason}.",
            "Make it inside a function that the trial calls (model, data and optimizer may all be functions).",
        ) from error
    return buffer.getvalue()


def _pickle_module() -> Any:
    """cloudpickle, without the running iterator that a DataLoader with persistent workers keeps between epochs."""
    import cloudpickle
    from torch.utils.data import DataLoader

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, DataLoader) and obj._iterator is not None:
                return copyreg.__newobj__, (type(obj),), {**vars(obj), "_iterator": None}  # type: ignore[attr-defined]
            return super().reducer_override(obj)

    return types.SimpleNamespace(__name__="cloudpickle", Pickler=Pickler, dumps=cloudpickle.dumps)


def unpack(packed: bytes) -> WorkloadSource:
    """What `pack` packed, with every tensor on the CPU. Only ever called on bytes from the parent's own pipe."""
    import torch

    # What cloudpickle wrote, plain pickle reads.
    source: WorkloadSource = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    return source


def _find_unpicklable(value: Any, path: str, error: Exception) -> tuple[str, Any, Exception]:
    """Walk down to the innermost part that fails on its own."""
    import cloudpickle

    seen: set[int] = set()
    while id(value) not in seen:
        seen.add(id(value))
        for name, part in _parts(value):
            try:
                cloudpickle.dumps(part)
            except Exception as part_error:
                value, path, error = part, path + name, part_error
                break
    return path, value, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    else:
        closure = getattr(value, "__closure__", None)
        if closure:
            names = value.__code__.co_freevars
            yield from ((f".<{name}>", cell.cell_contents) for name, cell in zip(names, closure, strict=True))
        code, scope = getattr(value, "__code__", None), getattr(value, "__globals__", {})
        if code is not None:
            yield from ((f".<global {name}>", scope[name]) for name in code.co_names if name in scope)
        for name in ("__self__", "__func__", "func", "args", "keywords"):
            if hasattr(value, name) and not isinstance(value, type):
                yield f".{name}", getattr(value, name)
        if hasattr(value, "__dict__") and not isinstance(value, type):
            yield from ((f".{name}", part) for name, part in vars(value).items())

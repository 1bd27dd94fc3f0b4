"""A live workload as bytes that another process can read, and what of it cannot travel."""

from __future__ import annotations

import copyreg
import io
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import WorkloadSource, type_name

_ONE_DEVICE = "Pass the bare model: one device is measured, without the exchange of gradients."
_IN_A_FUNCTION = "Make it inside a function that the trial calls (model, data and optimizer may all be functions)."

# What has a share in a process group, which a trial has none of, where its module is imported.
_OF_A_GROUP = (
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
    ("torch.distributed.tensor", "DTensor"),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed", "ProcessGroup"),
)


class _RefusedError(Exception):
    """What could be written, but would be another thing where it is read."""

    def __init__(self, culprit: object, reason: str, next_step: str) -> None:
        super().__init__(reason)
        self.culprit = culprit
        self.next_step = next_step


def pack(source: WorkloadSource) -> bytes:
    """Everything of the workload in one piece, so that tied weights and optimizer groups keep their identity.

    Tensors on an accelerator travel as CPU copies, a model without the DistributedDataParallel around it, and one
    compiled in place is compiled anew where it arrives. Raises `WorkloadError` naming by its path what cannot travel.
    """
    import torch

    buffer = io.BytesIO()
    module = _pickle_module()
    try:
        torch.save(source, buffer, pickle_module=module)
    except Exception as error:
        path, culprit, reason = _find_unpicklable(source, "workload", error, module.dumps)
        raise WorkloadError(
            f"{path} (a {type_name(culprit)}) cannot be sent to a trial: {reason}.",
            getattr(reason, "next_step", _IN_A_FUNCTION),
        ) from error
    return buffer.getvalue()


def _pickle_module() -> Any:
    """cloudpickle, for what a trial is to have: no running iterator of a DataLoader with persistent workers."""
    import cloudpickle
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    found = (getattr(sys.modules.get(module), name, None) for module, name in _OF_A_GROUP)
    of_a_group = tuple(kind for kind in found if isinstance(kind, type))

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, DataLoader) and obj._iterator is not None:
                return copyreg.__newobj__, (type(obj),), {**vars(obj), "_iterator": None}  # type: ignore[attr-defined]
            if isinstance(obj, of_a_group):
                raise _RefusedError(obj, "it needs the process group of this process", _ONE_DEVICE)
            if isinstance(obj, nn.Module):
                is_wrapper = isinstance(obj, DistributedDataParallel)
                context = compiler_of(obj)
                if is_wrapper or context is not None:
                    reduced: Any = (_same, (obj.module,)) if is_wrapper else obj.__reduce_ex__(4)
                    return reduced if context is None else _with_compiler(reduced, context)
            return super().reducer_override(obj)

    def dumps(value: Any) -> bytes:
        buffer = io.BytesIO()
        Pickler(buffer).dump(value)
        return buffer.getvalue()

    return types.SimpleNamespace(__name__="cloudpickle", Pickler=Pickler, dumps=dumps)


def _same(value: Any) -> Any:
    return value


def compiler_of(module: Any) -> Any:
    """What ``module.compile()`` compiles with, which no copy of a module takes along; None where it is not compiled."""
    call = vars(module).get("_compiled_call_impl")
    if call is None or isinstance(call, types.MethodType):  # the latter with disable=True
        return None
    names = call.__code__.co_freevars if hasattr(call, "__code__") else ()
    context = call.__closure__[names.index("self")].cell_contents if "self" in names else None
    if not callable(context):
        raise _RefusedError(
            module,
            "this torch does not tell how it was compiled in place",
            "Call compile() inside a function that makes the model, or pass torch.compile(model).",
        )
    return context


def _with_compiler(reduced: tuple[Any, ...], context: Any) -> tuple[Any, ...]:
    function, arguments, state, items, entries = (*reduced, None, None, None)[:5]
    return function, arguments, (state, context), items, entries, _compile_again


def _compile_again(module: Any, state: tuple[Any, Any]) -> None:
    own, context = state
    if own is not None:
        module.__setstate__(own)
    compile_with(module, context)


def compile_with(module: Any, context: Any) -> None:
    """Compile in place, with what `compiler_of` told of another module."""
    module._compiled_call_impl = context(module._call_impl)


def unpack(packed: bytes) -> WorkloadSource:
    """What `pack` packed, with every tensor on the CPU. Only ever called on bytes from the parent's own pipe."""
    import torch

    # What cloudpickle wrote, plain pickle reads.
    source: WorkloadSource = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    return source


def _find_unpicklable(
    value: Any, path: str, error: Exception, dumps: Callable[[Any], bytes]
) -> tuple[str, Any, Exception]:
    """Walk down to the innermost part that fails on its own."""
    seen: set[int] = set()
    while id(value) not in seen and getattr(error, "culprit", None) is not value:
        seen.add(id(value))
        for name, part in _parts(value):
            try:
                dumps(part)
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

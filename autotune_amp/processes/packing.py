"""Conversion of a live workload to bytes for another process; errors name the part that cannot be sent."""

from __future__ import annotations

import copyreg
import io
import linecache
import sys
import types
from pathlib import Path
from typing import Any

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import Workload, WorkloadSource, type_name

_ONE_DEVICE = "Pass the model without its wrapper: a trial runs on one device, without exchange of gradients."
_IN_A_FUNCTION = "Make it inside a function that the trial calls (model, data and optimizer may all be functions)."
_NOT_IN_PLACE = "Call compile() inside a function that makes the model, or pass torch.compile(model)."

# Objects tied to a process group, which a trial does not have; FSDP consists of them. Looked up only if imported.
_PROCESS_GROUP_TYPES = (("torch.distributed.tensor", "DTensor"), ("torch.distributed", "ProcessGroup"))


def pack(source: WorkloadSource) -> bytes:
    """Return the workload as bytes, in one piece, so that tied weights and optimizer groups keep their identity.

    Tensors on an accelerator are sent as CPU copies, a model without its DistributedDataParallel wrapper. Raises
    `WorkloadError` with the name of a part that cannot be sent, such as a module compiled in place by `compile()`.
    """
    import torch

    buffer = io.BytesIO()
    module = _pickle_module()
    try:
        torch.save(source, buffer, pickle_module=module)
    except Exception as error:
        path, culprit, reason = "workload", source, error
        for name, part in vars(source).items() if isinstance(source, Workload) else ():
            try:
                torch.save(part, io.BytesIO(), pickle_module=module)
            except Exception as error_of_part:
                path, culprit, reason = f"workload.{name}", part, error_of_part
                break
        raise WorkloadError(
            f"{path} (a {type_name(culprit)}) cannot be sent to a trial: {getattr(reason, 'message', reason)}.",
            getattr(reason, "next_step", _IN_A_FUNCTION),
        ) from error
    return buffer.getvalue()


def _pickle_module() -> Any:
    """Return a pickle module for torch.save: cloudpickle, adapted to trials.

    Code objects keep the name of their file, which cloudpickle would replace, and their text if no file holds it. A
    DataLoader with persistent workers loses its running iterator.
    """
    import cloudpickle
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    types_or_none = (getattr(sys.modules.get(module), name, None) for module, name in _PROCESS_GROUP_TYPES)
    process_group_types = tuple(kind for kind in types_or_none if isinstance(kind, type))
    texts: dict[str, str] = {}  # by file; pickled once as long as it is one object

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                file = obj.co_filename
                text = texts.setdefault(file, "" if Path(file).is_file() else "".join(linecache.getlines(file)))
                return _code_of_file, (file, text, *self.dispatch_table[types.CodeType](obj)[:2])
            if isinstance(obj, DataLoader) and obj._iterator is not None:
                return copyreg.__newobj__, (type(obj),), {**vars(obj), "_iterator": None}  # type: ignore[attr-defined]
            if isinstance(obj, process_group_types):
                raise WorkloadError(f"a {type_name(obj)} needs the process group of this process", _ONE_DEVICE)
            compiled = vars(obj).get("_compiled_call_impl") if isinstance(obj, nn.Module) else None
            if not isinstance(
                compiled, types.MethodType | None
            ):  # with compile(disable=True) it is a method, and nothing is lost
                raise WorkloadError(
                    f"a {type_name(obj)} compiled in place cannot be copied in its compiled form", _NOT_IN_PLACE
                )
            if isinstance(obj, DistributedDataParallel):
                return _identity, (obj.module,)
            return super().reducer_override(obj)

    return types.SimpleNamespace(__name__="cloudpickle", Pickler=Pickler)


def _code_of_file(file: str, text: str, make: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    """Return the code object that `make` creates, with the file name `file`, so that tracebacks show its lines.

    `text` is the source of a notebook cell, and "" if `file` is on disk.
    """
    if text and file not in linecache.cache:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=file)


def _identity(value: Any) -> Any:
    """Return `value`, as the reconstructor in a pickle."""
    return value


def unpack(packed: bytes) -> WorkloadSource:
    """Return the workload of `pack`, with every tensor on the CPU. Use it only on bytes from the parent's own pipe."""
    import torch

    # Plain pickle reads what cloudpickle wrote.
    source: WorkloadSource = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    return source

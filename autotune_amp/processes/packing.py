"""Pickling of a workload made of live objects (model, data, optimizer), for the process that runs its trials."""

from __future__ import annotations

import copyreg
import functools
import io
import linecache
import pickle
import sys
import types
from collections import defaultdict
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import Workload, WorkloadSource, type_name

# Next steps in errors.
_USE_BARE_MODEL = "Pass the model without its wrapper: a trial runs on one device, without exchange of gradients."
_MAKE_IN_FUNCTION = "Make it inside a function that the trial calls (model, data and optimizer may all be functions)."
_SET_DEFAULT_DEVICE = (
    'Call torch.set_default_device("cpu") before the search, and name the device where your code makes tensors and '
    "generators."
)
_COMPILE_ELSEWHERE = "Call compile() inside a function that makes the model, or pass torch.compile(model)."

# Types of objects tied to a process group, which a trial does not have. FSDP's parameters are DTensors.
_PROCESS_GROUP_TYPES = (("torch.distributed.tensor", "DTensor"), ("torch.distributed", "ProcessGroup"))


def pack(source: WorkloadSource) -> bytes:
    """Return the workload as bytes, with the flags of torch in this process, in which its functions are to be called.

    It is one pickle, so that tied weights and the optimizer's parameters stay shared.

    A model is sent without its DistributedDataParallel wrapper, an optimizer without Accelerate's. The workload's
    `optimizer` is sent without its state, since each trial makes a new one. `unpack` puts all tensors on the CPU; those
    that were on an accelerator move to a trial's when it starts. Raises `WorkloadError` with the name of a part that
    cannot be sent, such as a module compiled in place by `compile()`, or any module or loader where torch has another
    default device than a trial.
    """
    import torch

    from autotune_amp.precision import torch_state

    buffer = io.BytesIO()
    is_rebuilt = isinstance(source, Workload) and not source.is_loop
    module = _pickle_module(_optimizers_of(source) if is_rebuilt else [])
    try:
        torch.save((source, torch_state.capture()), buffer, pickle_module=module)
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
            getattr(reason, "next_step", _MAKE_IN_FUNCTION),
        ) from error
    return buffer.getvalue()


def _optimizers_of(workload: Any) -> list[Any]:
    """Return the optimizers of the workload, without Accelerate's wrapper. A function is returned too."""
    given = workload.optimizer
    return [getattr(each, "optimizer", each) for each in (given if isinstance(given, list | tuple) else [given])]


def _pickle_module(rebuilt_optimizers: list[Any]) -> Any:
    """Return a pickle module for torch.save: cloudpickle, adapted to trials.

    A code object keeps the name of its file, which cloudpickle would replace, and, if that is not on disk (as for a
    notebook cell), the source text. A DataLoader loses its running iterator, which it keeps with persistent workers;
    `rebuilt_optimizers`, of which each trial makes new ones, lose their state.
    """
    import cloudpickle
    import torch
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader, Sampler

    from autotune_amp.trial.context import restore_on_cpu

    default_device = torch.get_default_device()
    process_group_types = _imported_types(*_PROCESS_GROUP_TYPES)
    accelerated_types = _imported_types(("accelerate.optimizer", "AcceleratedOptimizer"))
    # Source text by file name. All code objects of a file share one str, which pickle writes only once.
    source_by_file: dict[str, str] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                file = obj.co_filename
                text = "" if Path(file).is_file() else "".join(linecache.getlines(file))
                text = source_by_file.setdefault(file, text)
                return _code_of_file, (file, text, *self.dispatch_table[types.CodeType](obj)[:2])
            if default_device.type != "cpu" and isinstance(obj, nn.Module | DataLoader | Sampler):
                raise WorkloadError(
                    f"torch's default device is {default_device}; that of a trial is the CPU", _SET_DEFAULT_DEVICE
                )
            if isinstance(obj, DataLoader) and obj._iterator is not None:
                return copyreg.__newobj__, (type(obj),), {**vars(obj), "_iterator": None}  # type: ignore[attr-defined]
            if isinstance(obj, process_group_types):
                raise WorkloadError(f"a {type_name(obj)} needs the process group of this process", _USE_BARE_MODEL)
            compiled = vars(obj).get("_compiled_call_impl") if isinstance(obj, nn.Module) else None
            # With compile(disable=True) it is a bound method, and nothing is lost.
            if not isinstance(compiled, types.MethodType | None):
                raise WorkloadError(
                    f"a {type_name(obj)} compiled in place cannot be copied in its compiled form", _COMPILE_ELSEWHERE
                )
            if isinstance(obj, DistributedDataParallel):
                return _identity, (obj.module,)
            if type(obj) in (Tensor, nn.Parameter) and obj.device.type not in ("cpu", "meta"):
                return restore_on_cpu, obj.__reduce_ex__(2)[:2]
            if isinstance(obj, accelerated_types):
                return _identity, (obj.optimizer,)
            if isinstance(obj, Optimizer) and any(obj is each for each in rebuilt_optimizers):
                reduced: Any = obj.__reduce_ex__(2)
                make, arguments, attributes, *_ = reduced
                return make, arguments, {**attributes, "state": defaultdict(dict)}
            return super().reducer_override(obj)

    return types.SimpleNamespace(__name__="cloudpickle", Pickler=Pickler)


def _imported_types(*names: tuple[str, str]) -> tuple[Any, ...]:
    """Return the types of these modules and names. If a module is not imported, the workload has no such object."""
    types_or_none = (getattr(sys.modules.get(module), name, None) for module, name in names)
    return tuple(kind for kind in types_or_none if isinstance(kind, type))


def _code_of_file(file: str, text: str, make: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    """Return the code object ``make(*arguments)``, cloudpickle's own, with the file name `file`.

    Tracebacks show its lines: `text`, the source of a notebook cell, is added to `linecache`; it is "" if `file` is on
    disk.
    """
    if text and file not in linecache.cache:
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code: types.CodeType = make(*arguments)
    return code.replace(co_filename=file)


def _identity(value: Any) -> Any:
    """Return `value`. A pickle names a function that restores an object: this one, for an object sent unwrapped."""
    return value


def _reduce_for_worker(_: ForkingPickler, obj: Any) -> Any:
    """Reduce a class or function of `__main__` to its definition, for a loader's worker that is not forked.

    Here `__main__` is not the user's script, in which the worker would look it up.
    """
    if isinstance(obj, type | types.FunctionType) and obj.__module__ == "__main__":
        return _restore_definition, (definition_of(obj),)
    return NotImplemented


@functools.cache  # each batch of a worker names the definition of its class
def definition_of(obj: Any) -> bytes:
    """Return a class or function as bytes, with the global variables that it uses at the first call in a job."""
    import cloudpickle

    definition: bytes = cloudpickle.dumps(obj)
    return definition


@functools.cache
def _restore_definition(definition: bytes) -> Any:
    """Return the class or function of `_reduce_for_worker`, and send others back in the same way."""
    send_definitions_to_workers()
    return pickle.loads(definition)  # noqa: S301 - of the process that started this one


def send_definitions_to_workers() -> None:
    """Make this process pickle classes and functions of the user's `__main__` by value for workers of its loaders."""
    pickler: Any = ForkingPickler
    pickler.reducer_override = _reduce_for_worker


def unpack(packed: bytes) -> WorkloadSource:
    """Set torch's flags as they were in `pack`, and return its workload, with every tensor on the CPU.

    Unpickling can run any code: use it only on bytes that the parent process sent.
    """
    import torch

    from autotune_amp.precision import torch_state

    # Plain pickle reads what cloudpickle wrote.
    unpacked: tuple[WorkloadSource, dict[str, Any]]
    unpacked = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    source, state = unpacked
    torch_state.apply_flags(state)
    return source

"""Workload: what is trained, and loading it from "package.module:function" or "path/file.py:function"."""

from __future__ import annotations

import copyreg
import importlib
import importlib.util
import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autotune_amp.errors import WorkloadError


class Workload:
    """What a training step is made of. Nothing given here is ever changed: trials run on copies in other processes.

    model      an ``nn.Module``, or a function without arguments that makes one
    loss       ``loss(model, batch) -> Tensor``: runs the model on one batch and returns a scalar
    data       a Dataset; a DataLoader, whose batch size and settings become the baseline; or a function of the batch
               size that returns one batch of so many samples, or a loader (a DataLoader or an iterator) of such batches
    optimizer  a class or function of the parameters that makes an optimizer, or an optimizer instance whose class and
               hyperparameters are taken; ``torch.optim.AdamW`` with its defaults if left out
    name       the study's name; letters, digits, '.', '_' and '-'

    Raises `WorkloadError` for what cannot be any of these.
    """

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        data: Any,
        optimizer: Any = None,
        name: str = "workload",
    ) -> None:
        if not callable(model):
            raise WorkloadError(
                f"Workload(model=...) is a {_type_name(model)}; it must be an nn.Module or a function that makes one.",
                "Pass the model itself or `lambda: MyModel(...)`.",
            )
        if not callable(loss):
            raise WorkloadError(
                f"Workload(loss=...) is a {_type_name(loss)}; it must be a function loss(model, batch) -> Tensor.",
                "Pass for example `lambda model, batch: cross_entropy(model(batch[0]), batch[1])`.",
            )
        if isinstance(data, Iterator):
            raise WorkloadError(
                f"Workload(data=...) is a {_type_name(data)}, an iterator that can be used only once.",
                "Pass the Dataset or DataLoader itself, or a function of the batch size.",
            )
        if not (callable(data) or hasattr(data, "__getitem__") or hasattr(data, "__iter__")):
            raise WorkloadError(
                f"Workload(data=...) is a {_type_name(data)}; it must be a Dataset, a DataLoader or a function of the "
                "batch size.",
                "Pass for example `lambda n: (torch.randn(n, 8), torch.randint(2, (n,)))`.",
            )
        if optimizer is not None and not callable(optimizer) and not hasattr(optimizer, "param_groups"):
            raise WorkloadError(
                f"Workload(optimizer=...) is a {_type_name(optimizer)}; it must be a function of the parameters or an "
                "optimizer.",
                "Pass for example `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`.",
            )
        self.model = model
        self.loss = loss
        self.data = data
        self.optimizer = optimizer
        self.name = name


WorkloadSource = Workload | Callable[[], Workload]


def import_target(target: str) -> WorkloadSource:
    """The function or Workload that "package.module:function" or "path/file.py:function" names; it is not called.

    A file is imported as a module of its own name, so that its ``if __name__ == "__main__"`` part does not run.
    Raises `WorkloadError` where there is no such file, module or function; the user's own exceptions pass through.
    """
    place, colon, attribute = target.rpartition(":")
    if not (colon and place and attribute):
        raise WorkloadError(f"{target!r} names no workload.", "Give path/file.py:function or package.module:function.")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            defined = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            raise WorkloadError(
                f"{place} has no {attribute!r}.", f"Name one of what it defines: {defined or 'nothing callable'}."
            )
        found = getattr(found, name)
    return check_source(found, target)


def check_source(found: Any, origin: str) -> WorkloadSource:
    """Check that `found` is a Workload or a function that can be called for one."""
    if isinstance(found, Workload) or callable(found):
        source: WorkloadSource = found
        return source
    raise WorkloadError(
        f"{origin} is a {_type_name(found)}; it must be a Workload or a function without arguments that returns one.",
        "Write `def workload(): return Workload(model=..., loss=..., data=..., optimizer=...)`.",
    )


def make_workload(source: WorkloadSource, origin: str) -> Workload:
    """Call `source` if it is a function; raises `WorkloadError` for a wrong signature or return value."""
    if isinstance(source, Workload):
        return source
    import inspect

    try:
        inspect.signature(source).bind()
    except TypeError as error:
        raise WorkloadError(
            f"{origin} has the wrong signature {inspect.signature(source)}: {error}.",
            "It must take no arguments: give each one a default, or wrap it in a function.",
        ) from error
    made = source()
    if not isinstance(made, Workload):
        raise WorkloadError(
            f"{origin} returned a {_type_name(made)}; it must return a Workload.",
            "Return Workload(model=..., loss=..., data=..., optimizer=...).",
        )
    return made


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # an import inside the user's module: its own exception, with its traceback
        raise WorkloadError(
            f"There is no module {error.name!r} on the path.",
            "Check the spelling, run from the folder that holds it, or give path/file.py:function.",
        ) from error


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise WorkloadError(f"There is no file {path}.", "Check the path: it is taken from the working directory.")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as `python path/file.py` would have it
        sys.path.insert(0, folder)
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path.resolve()):
        return loaded
    name = path.stem if loaded is None else f"{path.stem}_workload"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise WorkloadError(f"{path} cannot be imported.", "Give a Python source file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that classes of the file can be pickled to loader workers
    spec.loader.exec_module(module)
    return module


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
            f"{path} (a {_type_name(culprit)}) cannot be sent to a trial: {reason}.",
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


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"

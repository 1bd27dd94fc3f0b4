"""Workload and model of a trial process, shared by its jobs (such as trials and checks), and new optimizers for it."""

from __future__ import annotations

import copy
import inspect
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import OptimizersOfModel, Workload, WorkloadSource, make_workload, type_name
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import torch_state
from autotune_amp.precision.step_amp import needs_closure, parameters_of
from autotune_amp.trial.memory import BuildMemory, build_with_memory, file_bytes

_OPAQUE_TYPES = (  # types whose contents `_walk` does not search for modules, tensors and optimizers
    *(str, bytes, int, float, complex, type(None)),
    *(type, types.ModuleType, types.FunctionType, types.MethodType, Dataset, DataLoader, _BaseDataLoaderIter),
)
# Packages whose objects are not searched either: restoring a lock or a queue could make a thread wait for ever.
_CONCURRENCY_PACKAGES = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading")

_RETURN_EVERYTHING = "Return everything that train_step needs, for example a dict of the models and their optimizers."


class LoopState(nn.Module):
    """Module of all modules and tensors found in `held`, the object that the `build` of a user's own loop returned.

    They are the same objects, not copies. A module's name is its path in `held` ("generator", "nets.0"), the first one
    if there are several. Tensors outside of modules are parameters if they require gradients, else buffers. Raises
    `WorkloadError` if `held` contains neither modules nor optimizers.
    """

    held: Any
    optimizers: dict[str, torch.optim.Optimizer]
    _restore_calls: list[Callable[[], object]]  # each restores one object that changes from step to step
    _first_states: dict[str, dict[str, Any]]  # state dicts of the optimizers before the first step

    def __init__(self, held: Any) -> None:
        super().__init__()
        # nn.Module's setter would register `held` as a submodule if it is a module.
        self.__dict__.update(held=held, optimizers={}, _restore_calls=[])
        tensors: dict[str, Tensor] = {}
        for path, value in _walk(held):
            name = path or "model"
            if isinstance(value, nn.Module):
                # Bypass nn.Module's setter, which refuses the dots of a path and names of its methods.
                self._modules[name] = value
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[name] = value
                tensors |= {f"{name}.{index}": tensor for index, tensor in enumerate(parameters_of(value))}
            elif isinstance(value, Tensor):
                tensors[name] = value
            if not isinstance(value, Tensor | torch.optim.Optimizer):
                self._restore_calls.append(_restore_call(value))
        if not self._modules and not self.optimizers:
            raise WorkloadError(
                f"build() returned a {type_name(held)} without any module or optimizer in it.", _RETURN_EVERYTHING
            )
        first_states = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in self.optimizers.items()}
        self.__dict__["_first_states"] = first_states
        registered_ids = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        for name, tensor in tensors.items():
            if id(tensor) not in registered_ids:
                registered_ids.add(id(tensor))
                target: dict[str, Any] = self._parameters if tensor.requires_grad else self._buffers
                target[name] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoopState:
        """Apply `fn`, such as a move to a device, to the data of all tensors in place; return this module.

        The tensors that the user's loop and its optimizers hold stay the same objects.
        """
        for tensor in self._buffers.values():
            assert tensor is not None
            tensor.data = fn(tensor.data)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not type it
        for optimizer in self.optimizers.values():
            if optimizer.state:  # loading moves it to its parameters' device; Adagrad has one before the first step
                optimizer.load_state_dict(optimizer.state_dict())
        return self

    def trained(self) -> list[Tensor]:
        """Return the tensors that an optimizer trains; all trainable parameters if there is no optimizer."""
        if not self.optimizers:
            return [parameter for parameter in self.parameters() if parameter.requires_grad]
        return list(dict.fromkeys(tensor for part in self.optimizers.values() for tensor in parameters_of(part)))

    def live_training(self, device: torch.device) -> LiveTraining:
        """Return the loop's models and optimizers, and `device`, for settings that change them, such as compilation."""
        models = [module for module in self._modules.values() if module is not None]
        return LiveTraining(models, list(self.optimizers.values()), device)

    def restore_first_state(self, first_state: dict[str, Tensor]) -> None:
        """Restore all state from before the first step: tensors from the state dict `first_state`, else as saved."""
        self.load_state_dict(first_state, strict=False)  # strict loading does not accept names with dots
        self._restore_optimizers()
        self.restore_python_state()

    def first_optimizer(self) -> torch.optim.Optimizer:
        """Return all optimizers as one `Optimizers`, with their state from before the first step.

        Raises `WorkloadError` if there is none.
        """
        if not self.optimizers:
            raise WorkloadError(
                f"build() returned a {type_name(self.held)} without any optimizer in it. A check restores the "
                "optimizer's state, to repeat a step in another precision: return the optimizer from build() too.",
                _RETURN_EVERYTHING,
            )
        self._restore_optimizers()
        return Optimizers(list(self.optimizers.values()))

    def _restore_optimizers(self) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(copy.deepcopy(self._first_states[name]))

    def restore_python_state(self) -> None:
        """Restore all but tensors and optimizers as at creation: random generators, containers and attributes."""
        for restore in self._restore_calls:
            restore()


def _walk(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, optimizers, leaf tensors, generators and containers in `held`, each once, with their paths."""
    visited: dict[int, Any] = {}
    pending = [("", held)]
    while pending:
        path, value = pending.pop()
        package = type(value).__module__.partition(".")[0]
        if isinstance(value, _OPAQUE_TYPES) or package in _CONCURRENCY_PACKAGES or id(value) in visited:
            continue
        visited[id(value)] = value
        if not isinstance(value, Tensor) or value.is_leaf:
            yield path, value
        if isinstance(value, nn.Module):
            visited.update((id(part), part) for part in value.modules())
        if not isinstance(value, Tensor | torch.optim.Optimizer | torch.Generator):
            parts = [(f"{path}.{name}" if path else name, part) for name, part in _parts(value)]
            pending += reversed(parts)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a container, or the attributes of another object, each with its key, index or name."""
    if isinstance(value, MutableMapping):
        yield from ((str(key), part) for key, part in list(value.items()))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    else:
        yield from _attributes(value).items()


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, from its `__dict__` and slots, without those that nn.Module adds."""
    slots = [cls.__dict__.get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for cls_slots in slots for name in ([cls_slots] if isinstance(cls_slots, str) else cls_slots)]
    attributes = {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        return {name: part for name, part in attributes.items() if not name.startswith("_") and name != "training"}
    return attributes


def _restore_call(value: Any) -> Callable[[], object]:
    """Return a function that restores `value` in place to its current contents, attributes or generator state."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", copy.deepcopy(value.state))
    if isinstance(value, numpy.random.Generator):
        return _restore_call(value.bit_generator)
    if isinstance(value, list | deque | set):
        contents = list(value)
        fill = value.update if isinstance(value, set) else value.extend

        def refill() -> None:
            value.clear()
            fill(contents)

        return refill
    if isinstance(value, MutableMapping):
        items = dict(value)

        def restore_items() -> None:
            # Not cleared first: it may be backed by a file, which would be left empty if the process were killed.
            for key in value.keys() - items.keys():
                del value[key]
            for key, part in items.items():  # a Counter's `update` would add the values
                value[key] = part

        return restore_items
    first = dict(_attributes(value))

    def restore_attributes() -> None:
        current = _attributes(value)
        for name, part in first.items():
            if name not in current or current[name] is not part:
                object.__setattr__(value, name, part)
        # A module keeps the attributes made in its first pass, since compiled code may rely on them.
        for name in () if isinstance(value, nn.Module) else current.keys() - first.keys():
            object.__delattr__(value, name)

    return restore_attributes


def make_model(workload: Workload) -> nn.Module:
    """Return the workload's model, on the device on which the user's code creates it.

    For a training loop of the user's own, it is a `LoopState` of all that its `build` returns. Another model in
    evaluation mode is set to training mode. Raises `WorkloadError` if the user's function returns no module.
    """
    if workload.build is not None:
        return LoopState(workload.build())
    model = workload.model if isinstance(workload.model, nn.Module) else workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"The model function returned a {type_name(model)}; it must return an nn.Module.", "Return only the model."
        )
    if not model.training:
        model.train()
    return model


def copy_model(model: nn.Module, workload: Workload) -> nn.Module:
    """Return a copy of the model with the same weights, on the same device.

    A `LoopState` is copied by calling the workload's `build` again and loading the weights, without optimizer states.
    """
    if not isinstance(model, LoopState):
        return copy.deepcopy(model)
    device = next(iter((*model.parameters(), *model.buffers())), torch.empty(0)).device
    built = make_model(workload).to(device)
    built.load_state_dict(model.state_dict(), strict=False)
    return built


class Optimizers(torch.optim.Optimizer):
    """Several optimizers that step together. It shares their parameter groups, so that a change to one changes both."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        # torch refuses a parameter that is in two groups, but two optimizers may train the same one.
        super().__init__(list(dict.fromkeys(parameter for group in groups for parameter in group["params"])), {})
        self.param_groups = groups
        self.parts = tuple(parts)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever passed
        """Step each optimizer."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state dicts, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore each optimizer from `state_dict`, its learning rates included."""
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def users_optimizers(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that the user's code made: the parts of an `Optimizers`, else `optimizer` alone."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)


# Least learning rate of a trial as a share of its schedule's peak, like one early in a warm-up: at the peak itself,
# training without a warm-up may diverge.
_MIN_SHARE_OF_PEAK = 0.1


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return a new optimizer over the model's parameters, or an `Optimizers` of several.

    If the workload gives a function, the function makes them; if it gives instances, the new ones have their classes
    and hyperparameters; by default it is AdamW.

    A learning rate set by a scheduler is raised to at least a tenth of the schedule's peak: at the beginning of a
    warm-up and after a finished schedule it is 0, and a trial's weights would not change. torch's schedulers keep the
    peak in the parameter group, as ``initial_lr`` or (OneCycleLR) ``max_lr``. Raises `WorkloadError` if the workload's
    optimizer is no torch optimizer, needs a closure, or holds no parameter of the model.
    """
    source: Any = torch.optim.AdamW if workload.optimizer is None else workload.optimizer
    is_function = not isinstance(source, torch.optim.Optimizer) and callable(source)
    if is_function:
        source = source(model if isinstance(source, OptimizersOfModel) else model.parameters())
    optimizers = list(source) if isinstance(source, list | tuple) else [source]
    for optimizer in optimizers or [source]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"The optimizer function returned a {type_name(optimizer)}; it must return a torch.optim.Optimizer "
                "or several in a list.",
                "Return for example torch.optim.SGD(parameters, lr=0.1).",
            )
    for optimizer in filter(needs_closure, optimizers):
        raise WorkloadError(
            f"{type_name(optimizer)} needs a closure for its step, which a trial of model, loss and optimizer "
            "does not have.",
            "Write the training step yourself, as Workload(build=..., train_step=..., data=...), or search the "
            "training's own command: autotune-amp search -- python train.py.",
        )
    if not is_function:
        optimizers = _rebuild_optimizers(optimizers, workload.model, model)
    own_ids = {id(parameter) for parameter in model.parameters()}
    optimized = chain.from_iterable(map(parameters_of, optimizers))
    if own_ids and not any(id(parameter) in own_ids for parameter in optimized):
        raise WorkloadError(
            f"The optimizer, {type_name(optimizers[0])}, holds no parameter of the model that the loss is computed "
            "with: nothing would be trained.",
            "Make it from the parameters that the function is given: lambda parameters: "
            f"{type(optimizers[0]).__name__}(parameters, ...).",
        )
    for group in chain.from_iterable(optimizer.param_groups for optimizer in optimizers):
        if "initial_lr" in group:
            rate, least_rate = group["lr"], _MIN_SHARE_OF_PEAK * float(group.get("max_lr", group["initial_lr"]))
            if rate < least_rate:
                # a tensor may be the user's own, which another optimizer reads
                group["lr"] = torch.full_like(rate, least_rate) if isinstance(rate, Tensor) else least_rate
    return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)


def _rebuild_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], given_model: Any, model: nn.Module
) -> list[torch.optim.Optimizer]:
    """Return new optimizers of the same classes over the parameters of `model`, which may be a copy of `given_model`.

    They have the same parameter groups, with any parameters of the loss. If none of the parameters is the model's, a
    single optimizer has one group with its defaults; several groups or optimizers raise `WorkloadError`.
    """
    own_parameters = {id(parameter): parameter for parameter in model.parameters()}
    if isinstance(given_model, nn.Module):
        pairs = zip(given_model.parameters(), model.parameters(), strict=True)
        own_parameters |= {id(original): copied for original, copied in pairs}
    all_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) in own_parameters for group in all_groups for parameter in group["params"]):

        def groups_of(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
            return [
                {**group, "params": [own_parameters.get(id(p), p) for p in group["params"]]}
                for group in optimizer.param_groups
            ]

        return [_rebuild_optimizer(optimizer, groups_of(optimizer)) for optimizer in optimizers]
    if len(all_groups) > 1:
        raise WorkloadError(
            f"An optimizer of {len(all_groups)} parameter groups holds parameters of another model.",
            "Pass the model instance that it was made for, or a function that makes the optimizer from parameters.",
        )
    return [_rebuild_optimizer(optimizer, model.parameters()) for optimizer in optimizers]


def _rebuild_optimizer(optimizer: torch.optim.Optimizer, groups: Iterable[Any]) -> torch.optim.Optimizer:
    """Return a new optimizer of the same class and defaults over `groups`.

    Raises `WorkloadError` if the class has an argument whose value is not among the optimizer's defaults.
    """
    cls = type(optimizer)
    named = constructor_arguments(cls)
    if unknown := [name for name in named if name not in optimizer.defaults]:
        raise WorkloadError(
            f"A trial cannot make an optimizer like this {type_name(optimizer)}: its defaults do not hold the values "
            f"of {', '.join(unknown)}.",
            f"Pass a function that makes it, lambda parameters: {cls.__name__}(parameters, ...), or, with a Trainer, "
            f"Trainer(..., optimizer_cls_and_kwargs=({cls.__name__}, {{...}})).",
        )
    return cls(groups, **{name: optimizer.defaults[name] for name in named})


def constructor_arguments(optimizer_class: type[torch.optim.Optimizer]) -> list[str]:
    """Return the names of an optimizer class's arguments after the parameters to train."""
    _, *arguments = inspect.signature(optimizer_class).parameters.values()
    return [each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]


_from_accelerator: list[weakref.ref[Tensor]] = []


def restore_on_cpu(make: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Tensor:
    """Return ``make(*arguments)``, a tensor that a live workload holds on an accelerator, to be moved there later."""
    tensor = make(*arguments)
    _from_accelerator.append(weakref.ref(tensor))  # a parameter's data have a tensor of their own, which goes
    return tensor


def move_to_accelerator(device: torch.device) -> None:
    """Move the tensors of `restore_on_cpu` to the device. They stay the same objects, and views of the same memory."""
    moved: dict[int, torch.UntypedStorage] = {}  # by the address on the CPU
    for reference in _from_accelerator:
        if (tensor := reference()) is None:
            continue
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            tensor.data = tensor.data.to(device)
            continue
        storage, place = tensor.untyped_storage(), (tensor.storage_offset(), tensor.size(), tensor.stride())
        if (address := storage.data_ptr()) not in moved:
            moved[address] = storage.to(device=device)
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=device).set_(moved[address], *place)
    _from_accelerator.clear()


class Context:
    """State of a trial process: the workload from `source`, and a model that its jobs share.

    A template process (`is_template`) builds the model once on the CPU, then forks a child for each job. A kept worker
    (`is_kept`) runs several jobs itself: it keeps the model of the first one and restores its initial state for every
    later one. `build_memory` is the CPU memory that building the shared model took, None without one.
    `template_file_bytes` is the resident memory mapped from files in a template, else 0.
    """

    def __init__(self, source: WorkloadSource, *, is_kept: bool = False, is_template: bool = False) -> None:
        self.source = source
        self.is_kept = is_kept
        self.template_file_bytes = 0
        self.build_memory: BuildMemory | None = None
        self._is_template = is_template
        self._workload = source if isinstance(source, Workload) else None
        self._model: nn.Module | None = None  # the shared model, once it is built
        self._torch_state: dict[str, Any] = {}  # torch's global state (threads, TF32 flags, ...) after building it
        self._first_state: dict[str, Tensor] | None = None  # its state dict, which a kept worker restores
        self._first_buffers: dict[str, Tensor] = {}  # those that the state dict does not contain

    def open(self, origin: str) -> None:
        """Create the workload from the source, by calling a function. `origin` names the source in error messages."""
        self._workload = make_workload(self.source, origin)
        self.template_file_bytes = file_bytes() if self._is_template else 0

    def become_worker(self) -> None:
        """Make this process run its jobs itself from now on: it is no longer a template that forks."""
        self._is_template, self.template_file_bytes = False, 0

    @property
    def workload(self) -> Workload:
        """Return the workload. `open` has to be called before."""
        assert self._workload is not None, "open() comes first"
        return self._workload

    def share(self, capture_torch_state: Callable[[], dict[str, Any]]) -> None:
        """Build the model before the jobs, for this process or children forked from it.

        `capture_torch_state` is called afterwards. Jobs begin with the global state of torch that it returns.
        """
        self._model, self.build_memory = build_with_memory(lambda: make_model(self.workload))
        self._torch_state = capture_torch_state()

    def build_before(self, device: str, capture_torch_state: Callable[[], dict[str, Any]]) -> None:
        """Build the model before the first job, as `share` does; drop it if the user's code put it on an accelerator.

        For trials on an accelerator a loop of the user's own is not built, since most `build` functions use the device.
        """
        if device != "cpu" and self.workload.is_loop:
            return
        self.share(capture_torch_state)
        assert self._model is not None
        if any(tensor.device.type != "cpu" for tensor in chain(self._model.parameters(), self._model.buffers())):
            self._model = self.build_memory = None

    def model_for(self, setting: Setting, device: torch.device) -> nn.Module:
        """Return the model on the device for a trial, in its initial state.

        In a process that runs more jobs it is a copy if the setting has a variant, such as compilation.
        """
        if not (self.is_kept and setting.active_variants):
            return self.model(device)
        # Copy on the CPU, so that only the copy takes memory on the device.
        return copy_model(self.model(torch.device("cpu")), self.workload).to(device)

    def model(self, device: torch.device) -> nn.Module:
        """Return the model on the device, in its initial state, and restore torch's global state from after building.

        The model is built if none is shared yet, or if an earlier job has changed the names of its parameters.
        """
        if self._model is None:
            model, memory = build_with_memory(lambda: make_model(self.workload).to(device))
            if self.is_kept:
                self._model, self.build_memory, self._torch_state = model, memory, torch_state.capture()
                self._keep_first_state()
            return model
        torch_state.apply(self._torch_state)
        model = self._model
        if self._first_state is None:
            if self.is_kept:
                self._keep_first_state()
            return model.to(device)
        model.zero_grad(set_to_none=True)
        missing: Sequence[str] = ()
        if isinstance(model, LoopState):
            model.restore_first_state(self._first_state)
        else:
            # Not strict: quantized layers, as bitsandbytes', write entries that they do not read back.
            missing, _ = model.load_state_dict(self._first_state, strict=False)
        buffers = dict(model.named_buffers())
        if missing or not self._first_buffers.keys() <= buffers.keys():  # an earlier job changed the names
            self._model = self._first_state = None
            return self.model(device)
        for name, first in self._first_buffers.items():
            buffers[name].data = first.to(buffers[name].device, copy=True)  # which may have another shape
        return model.to(device)

    def _keep_first_state(self) -> None:
        """Save the state that later jobs start from. A model with lazy parameters is rebuilt for each instead."""
        assert self._model is not None
        state = self._model.state_dict()
        if any(map(is_lazy, state.values())):
            self._model = self.build_memory = None
        else:
            self._first_state = {name: _copy_entry(value) for name, value in state.items()}
            buffers = self._model.named_buffers()
            self._first_buffers = {name: _copy_entry(value) for name, value in buffers if name not in state}


def _copy_entry(value: Any) -> Any:
    """Return a copy of a state dict's entry on the CPU. A module's extra state may not be a tensor."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

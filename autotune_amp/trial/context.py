"""Context of a process for its jobs: the workload, the model that several jobs share, and its optimizers."""

from __future__ import annotations

import copy
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import OptimizersOfModel, Workload, WorkloadSource, make_workload, type_name
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import torch_state
from autotune_amp.precision.step_amp import needs_closure, parameters_of
from autotune_amp.trial.memory import BuildMemory, build_with_memory, file_bytes

_NOT_LOOKED_INTO = (
    *(str, bytes, int, float, complex, type(None)),
    *(type, types.ModuleType, types.FunctionType, types.MethodType, Dataset, DataLoader),
)
# Locks and queues are no state of the training: if they were restored, a waiting thread would never be woken.
_MACHINERY = ("asyncio", "concurrent", "logging", "multiprocessing", "queue", "threading")

_ALL = "Return everything that train_step needs, for example a dict of the models and their optimizers."


class LoopState(nn.Module):
    """Module that holds the state of a user's own loop and shares all its tensors.

    Modules are named by their paths ("generator", "nets.0"), by the first of several; tensors outside of modules are
    parameters if they are trained, else buffers. `held` is the object that `build` returned. Raises `WorkloadError` for
    a state without modules and optimizers.
    """

    held: Any
    optimizers: dict[str, torch.optim.Optimizer]
    _undo: list[Callable[[], object]]  # each restores something that changes from step to step
    _first_states: dict[str, dict[str, Any]]  # of the optimizers

    def __init__(self, held: Any) -> None:
        super().__init__()
        # As an attribute, a state that is a module itself would be registered a second time.
        self.__dict__.update(held=held, optimizers={}, _undo=[])
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
                self._undo.append(_undo(value))
        if not self._modules and not self.optimizers:
            raise WorkloadError(f"build() returned a {type_name(held)} without any module or optimizer in it.", _ALL)
        first = {name: copy.deepcopy(optimizer.state_dict()) for name, optimizer in self.optimizers.items()}
        self.__dict__["_first_states"] = first
        known = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        for name, tensor in tensors.items():
            if id(tensor) not in known:
                known.add(id(tensor))
                registered: dict[str, Any] = self._parameters if tensor.requires_grad else self._buffers
                registered[name] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoopState:
        """Apply `fn` in place, so that tensors stay the objects that the state and the optimizers hold."""
        for tensor in self._buffers.values():
            assert tensor is not None
            tensor.data = fn(tensor.data)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not type it
        for optimizer in self.optimizers.values():
            if optimizer.state:  # Adagrad has a state from the beginning
                optimizer.load_state_dict(optimizer.state_dict())
        return self

    def trained(self) -> list[Tensor]:
        """Return the tensors that an optimizer trains; all trainable parameters if there is no optimizer."""
        if not self.optimizers:
            return [parameter for parameter in self.parameters() if parameter.requires_grad]
        return list(dict.fromkeys(tensor for part in self.optimizers.values() for tensor in parameters_of(part)))

    def live_training(self, device: torch.device) -> LiveTraining:
        """Return the models, optimizers and device that further dimensions are set up on."""
        models = [module for module in self._modules.values() if module is not None]
        return LiveTraining(models, list(self.optimizers.values()), device)

    def start_again(self, first_state: dict[str, Tensor]) -> None:
        """Restore the state as it began. `first_state` is the `state_dict` from then."""
        self.load_state_dict(first_state, strict=False)  # strict loading takes a name to end at its first dot
        self._put_optimizers_back()
        self.forget_steps()

    def first_optimizer(self) -> torch.optim.Optimizer:
        """Return all optimizers as one, restored to their first state. Raises `WorkloadError` if there is none."""
        if not self.optimizers:
            raise WorkloadError(
                f"build() returned a {type_name(self.held)} without any optimizer in it, so that no step can be taken "
                "back to take it again in another precision: return the optimizer from build() with the rest.",
                _ALL,
            )
        self._put_optimizers_back()
        return Optimizers(list(self.optimizers.values()))

    def _put_optimizers_back(self) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(copy.deepcopy(self._first_states[name]))

    def forget_steps(self) -> None:
        """Restore everything outside tensors and optimizers: counters, lists, generators, keys and attributes."""
        for undo in self._undo:
            undo()


def _walk(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules, optimizers, leaf tensors, generators and containers in `held`, each once, with their paths."""
    known: dict[int, Any] = {}
    pending = [("", held)]
    while pending:
        path, value = pending.pop()
        package = type(value).__module__.partition(".")[0]
        if isinstance(value, _NOT_LOOKED_INTO) or package in _MACHINERY or id(value) in known:
            continue
        known[id(value)] = value
        if not isinstance(value, Tensor) or value.is_leaf:
            yield path, value
        if isinstance(value, nn.Module):
            known.update((id(part), part) for part in value.modules())
        if not isinstance(value, Tensor | torch.optim.Optimizer | torch.Generator):
            parts = [(f"{path}.{name}" if path else name, part) for name, part in _parts(value)]
            pending += reversed(parts)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
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
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for of_kind in slots for name in ([of_kind] if isinstance(of_kind, str) else of_kind)]
    found = {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        return {name: part for name, part in found.items() if not name.startswith("_") and name != "training"}
    return found


def _undo(value: Any) -> Callable[[], object]:
    """Return a function that restores the present contents of `value`."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, list | deque | set):
        contents = list(value)
        fill = value.update if isinstance(value, set) else value.extend

        def refill() -> None:
            value.clear()
            fill(contents)

        return refill
    if isinstance(value, MutableMapping):
        items = dict(value)

        def put_back() -> None:  # never empty in between: it may be backed by a file, and the process may be killed
            for key in value.keys() - items.keys():
                del value[key]
            for key, part in items.items():  # a Counter's `update` would add the values
                value[key] = part

        return put_back
    first = dict(_attributes(value))

    def set_again() -> None:
        present = _attributes(value)
        for name, part in first.items():
            if name not in present or present[name] is not part:
                object.__setattr__(value, name, part)
        # Compiled code may rely on attributes that a module makes in its first pass.
        for name in () if isinstance(value, nn.Module) else present.keys() - first.keys():
            object.__delattr__(value, name)

    return set_again


def make_model(workload: Workload) -> nn.Module:
    """Return the workload's model, on the device where its factory puts it, in training mode unless parts are set
    otherwise.

    For a loop, return everything that it builds as a `LoopState`.
    """
    if workload.build is not None:
        return LoopState(workload.build())
    model = workload.model if isinstance(workload.model, nn.Module) else workload.model()
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"The model function returned a {type_name(model)}; it must return an nn.Module.", "Return the model alone."
        )
    if not model.training:
        model.train()
    return model


def copy_model(model: nn.Module, workload: Workload) -> nn.Module:
    """Return another model with the same weights. A loop is built anew: only its code knows its whole state."""
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
    """Return the user's own optimizers in `optimizer`."""
    return optimizer.parts if isinstance(optimizer, Optimizers) else (optimizer,)


# Share of a schedule's peak, as early in a warm-up. At the full peak, training without its warm-up may diverge.
LEAST_SHARE_OF_PEAK = 0.1


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return a new optimizer over the model's parameters. For an instance its class and hyperparameters are used.

    A learning rate set by a scheduler is raised to at least a tenth of the schedule's peak: a warm-up begins at 0 and a
    finished schedule leaves 0, with which a trial's weights would not move. The peak is what torch's schedulers keep in
    the parameter group: ``initial_lr``, and OneCycleLR ``max_lr``. Raises `WorkloadError` for anything but optimizers
    of this model's parameters.
    """
    given: Any = torch.optim.AdamW if workload.optimizer is None else workload.optimizer
    is_function = not isinstance(given, torch.optim.Optimizer) and callable(given)
    if is_function:
        given = given(model if isinstance(given, OptimizersOfModel) else model.parameters())
    several = list(given) if isinstance(given, list | tuple) else [given]
    for optimizer in several or [given]:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise WorkloadError(
                f"The optimizer function returned a {type_name(optimizer)}; it must return a torch.optim.Optimizer "
                "or several in a list.",
                "Return for example torch.optim.SGD(parameters, lr=0.1).",
            )
    for optimizer in filter(needs_closure, several):
        raise WorkloadError(
            f"{type_name(optimizer)} calls a closure in its step, which a trial of model, loss and optimizer has none "
            "of.",
            "Write the training step yourself, as Workload(build=..., train_step=..., data=...), or search the "
            "training's own command: autotune-amp search -- python train.py.",
        )
    if not is_function:
        several = [_like(optimizer, workload.model, model, is_alone=len(several) == 1) for optimizer in several]
    own = {id(parameter) for parameter in model.parameters()}
    held = chain.from_iterable(map(parameters_of, several))
    if own and not any(id(parameter) in own for parameter in held):
        raise WorkloadError(
            f"The optimizer, {type_name(several[0])}, holds no parameter of the model that the loss is computed with: "
            "nothing would be trained.",
            "Make it from the parameters that the function is given: lambda parameters: "
            f"{type(several[0]).__name__}(parameters, ...).",
        )
    for group in chain.from_iterable(optimizer.param_groups for optimizer in several):
        if "initial_lr" in group:
            rate, least = group["lr"], LEAST_SHARE_OF_PEAK * float(group.get("max_lr", group["initial_lr"]))
            if rate < least:
                # a tensor may be the user's own, which another optimizer reads
                group["lr"] = torch.full_like(rate, least) if isinstance(rate, Tensor) else least
    return several[0] if len(several) == 1 else Optimizers(several)


def _like(
    optimizer: torch.optim.Optimizer, given_model: Any, model: nn.Module, *, is_alone: bool
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    defaults = {
        name: optimizer.defaults[name] for name in inspect.signature(kind).parameters.keys() & optimizer.defaults
    }
    own = {id(parameter): parameter for parameter in model.parameters()}
    if isinstance(given_model, nn.Module):  # `model` may be a copy of it
        own |= {id(given): ours for given, ours in zip(given_model.parameters(), model.parameters(), strict=True)}
    groups: Iterable[Any] = model.parameters()
    if all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        groups = [{**group, "params": [own[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    elif len(optimizer.param_groups) > 1 or not is_alone:
        raise WorkloadError(
            f"An optimizer of {len(optimizer.param_groups)} parameter groups is over another model's parameters.",
            "Pass the model instance that it was made for, or an optimizer function of the parameters.",
        )
    return kind(groups, **defaults)


class Context:
    """State of a trial process: the workload, and a model that its jobs share.

    A template process builds the model once on the CPU for the children that it forks. A kept worker keeps the model of
    its first trial and restores its first state for every other. `is_kept`: more jobs follow in this process.
    `build_memory` is the memory that the model took.
    """

    def __init__(self, source: WorkloadSource, *, is_kept: bool = False, is_template: bool = False) -> None:
        self.source = source
        self.is_kept = is_kept
        self.template_file_bytes = 0
        self.build_memory: BuildMemory | None = None
        self._is_template = is_template
        self._workload = source if isinstance(source, Workload) else None
        self._model: nn.Module | None = None  # built once, with the torch state after building
        self._torch_state: dict[str, Any] = {}
        self._first_state: dict[str, Tensor] | None = None  # state that a kept worker restores

    def open(self, origin: str) -> None:
        """Create the workload. `origin` is the name of its source in error messages."""
        self._workload = make_workload(self.source, origin)
        self.template_file_bytes = file_bytes() if self._is_template else 0

    def become_worker(self) -> None:
        """Run jobs in this process from now on, without forking."""
        self._is_template, self.template_file_bytes = False, 0

    @property
    def workload(self) -> Workload:
        """Return the workload. `open` has to be called before."""
        assert self._workload is not None, "open() comes first"
        return self._workload

    def share(self, capture: Callable[[], dict[str, Any]]) -> None:
        """Build the model for children forked later. `capture` returns the torch state that they start with."""
        self._model, self.build_memory = build_with_memory(lambda: make_model(self.workload))
        self._torch_state = capture()

    def build_before(self, device: str, capture: Callable[[], dict[str, Any]]) -> None:
        """Build the model before the first job, unless the user's code would put it on the accelerator.

        Loops are not built beforehand for an accelerator, since their `build` mostly does so.
        """
        if device != "cpu" and self.workload.is_loop:
            return
        self.share(capture)
        assert self._model is not None
        if any(tensor.device.type != "cpu" for tensor in chain(self._model.parameters(), self._model.buffers())):
            self._model = self.build_memory = None

    def model_for(self, setting: Setting, device: torch.device) -> nn.Module:
        """Return the model on the device for a trial; in a kept worker a copy, if the setting changes it."""
        if not (self.is_kept and setting.active_variants):
            return self.model(device)
        # On the device only the trial's own copy takes memory.
        return copy_model(self.model(torch.device("cpu")), self.workload).to(device)

    def model(self, device: torch.device) -> nn.Module:
        """Return the model on the device, in its first state."""
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
        if isinstance(model, LoopState):
            model.start_again(self._first_state)
        else:
            # Not strict: quantized layers, as bitsandbytes', write entries that they do not read back.
            missing, _ = model.load_state_dict(self._first_state, strict=False)
            if missing:  # the previous job changed the model's parameters
                self._model = self._first_state = None
                return self.model(device)
        return model.to(device)

    def _keep_first_state(self) -> None:
        """Save the state that later jobs start from. A model with lazy parameters is rebuilt for each instead."""
        assert self._model is not None
        state = self._model.state_dict()
        if any(map(is_lazy, state.values())):
            self._model = self.build_memory = None
        else:
            self._first_state = {name: _copied(value) for name, value in state.items()}


def _copied(value: Any) -> Any:
    """Return a copy of a state dict's entry on the CPU. A module's extra state may not be a tensor."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)

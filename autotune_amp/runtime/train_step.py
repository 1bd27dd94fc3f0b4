"""Training step in a single call: from a closure that returns the loss, and the model found in the closure's code."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision.step_amp import parameters_of
from autotune_amp.runtime.diagnosis import checked_loss
from autotune_amp.runtime.executor import Executor
from autotune_amp.runtime.model import AttachedModel
from autotune_amp.runtime.optimizers import refuse_clip_norm, refuse_closure
from autotune_amp.runtime.scaler import NO_GRADIENTS, StepResult
from autotune_amp.runtime.windows import WindowPosition

log = logging.getLogger("autotune_amp.runtime")

_MAX_DEPTH = 4  # of functions and objects that refer to one another
_MAX_ITEMS = 64  # of a container that is searched


class TrainStep:
    """Training step by closure. The latest closure is the rerun if the user gave none; its model is sought once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._has_looked = False
        self._closure: Callable[[], Tensor] | None = None  # the model's rerun, if it is a closure of `train_step`
        self._is_of_model: dict[tuple[int, ...], bool] = {}  # by the optimizers' ids
        self._latest: WindowPosition | None = None
        self._failed_window: Sequence[float] = ()  # the window in which a pass raised

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the closure: a copy belongs to another training."""
        return vars(self) | {"_closure": None}

    def run(
        self,
        controller: Any,
        current: WindowPosition,
        closure: Callable[[], Tensor],
        optimizer: Optimizer | Sequence[Optimizer],
        clip_norm: float | None,
    ) -> StepResult:
        """Run one pass of a `PrecisionController`, and the step if it is the window's last; see its `train_step`."""
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        self._refuse(current, optimizers)
        if clip_norm is not None:
            refuse_clip_norm(clip_norm)
        is_part = len(current.shares) > 1
        if is_part and current.shares is self._failed_window:
            return StepResult(NO_GRADIENTS)
        self._latest = current
        self._rerun_by(closure, optimizers)
        try:
            if current.is_first:
                _zero_gradients(optimizers)
            with self._exchanging(current.is_last):
                with controller.autocast():
                    loss = checked_loss(closure(), "The closure")
                controller.backward(current.share_of(loss))
            if not current.is_last:
                return StepResult(NO_GRADIENTS, loss=loss.detach())
            norm = None
            if clip_norm is not None:
                if len(optimizers) == 1:
                    controller.unscale_(optimizers[0])
                else:
                    controller.unscale_together(optimizers)
                norm = self._clip(optimizers, clip_norm)
            steps = [controller.step(one) for one in optimizers]
            controller.update()
        except BaseException:
            _zero_gradients(optimizers)
            controller.discard_window()
            self._failed_window = current.shares if is_part else ()
            raise
        return StepResult.all_of(steps, loss.detach(), norm)

    def _refuse(self, current: WindowPosition, optimizers: Sequence[Optimizer]) -> None:
        """Raise `InvalidRequestError` for a loop that contradicts its config."""
        num_passes = self._executor.own_config.accumulation_steps
        if not current.shares and num_passes > 1:
            raise InvalidRequestError(
                f"The config accumulates {num_passes} passes, and the loop takes one.",
                "Call train_step in `for batch, is_last in controller.windows(loader):`.",
            )
        if len(current.shares) > 1 and current is self._latest:
            raise InvalidRequestError(
                "train_step was called twice for one pass of an accumulation window, which has one loss scale and ends "
                "once.",
                "Give it all optimizers of one loss in a list; for two losses, as a GAN's, make a controller for each.",
            )
        for one in optimizers:
            refuse_closure(one)

    def _exchanging(self, is_last: bool) -> AbstractContextManager[object]:
        """Return a context in which DDP exchanges a window's gradients only in its last pass."""
        stack = ExitStack()
        if not is_last and self._executor.model is not None:
            for module in self._executor.model.ddp_modules:
                stack.enter_context(module.no_sync())
        return stack

    def _clip(self, optimizers: Sequence[Optimizer], max_norm: float) -> Tensor:
        """Clip the gradients and return their norm, by FSDP's own method if the model has it, since a rank holds only a
        part of each gradient there.
        """
        given: Any = None if self._executor.model is None else self._executor.model.given
        if hasattr(given, "clip_grad_norm_"):
            norm: Tensor = given.clip_grad_norm_(max_norm)
            return norm
        return nn.utils.clip_grad_norm_([p for one in optimizers for p in parameters_of(one)], max_norm)

    def _rerun_by(self, closure: Callable[[], Tensor], optimizers: Sequence[Optimizer]) -> None:
        executor = self._executor
        if executor.model is None and not self._has_looked:
            executor.ranks.note_device(parameter for one in optimizers for parameter in parameters_of(one))
            found = self._attachment(trained_model(closure, optimizers), closure)
            if executor.ranks.any(found is None) or found is None:  # the ranks diagnose together or not at all
                log.warning(
                    "The closure's code names no one model that holds the optimizer's parameters and can be watched, "
                    "so steps that fail are not diagnosed: call controller.attach(model) once."
                )
            else:
                executor.attach(found)
                self._closure = closure
            self._has_looked = True
        if executor.model is None:
            return
        key = tuple(map(id, optimizers))
        if key not in self._is_of_model:
            self._is_of_model[key] = holds_any(executor.model.given, optimizers)
        # A closure for another model would be rerun without restoring that model's state.
        if executor.model.rerun is self._closure:
            self._closure = closure if self._is_of_model[key] else None
            executor.use_rerun(self._closure)

    def _attachment(self, model: nn.Module | None, closure: Callable[[], Tensor]) -> AttachedModel | None:
        """Return the model under observation; None, with a warning, if it cannot be watched, only trained."""
        if model is None:
            return None
        try:
            return AttachedModel(model, closure, self._executor.ranks.device, is_from_closure=True)
        except Exception as error:  # whatever a third-party class does when it is changed
            log.warning("The %s cannot be watched: %s: %s", type(model).__name__, type(error).__name__, error)
            return None


def _zero_gradients(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


def trained_model(closure: Callable[[], Tensor], optimizers: Sequence[Optimizer]) -> nn.Module | None:
    """Return the module named in the closure's code that holds parameters of the optimizers, or None.

    Of nested modules it is the outermost; None also if there are several side by side.
    """
    named = list(_named_by(closure))
    trained = [module for module in named if holds_any(module, optimizers)]
    inner = {id(child) for module in trained for child in module.modules() if child is not module}
    outer = [module for module in trained if id(module) not in inner]
    return outer[0] if len(outer) == 1 else None


def holds_any(module: nn.Module, optimizers: Sequence[Optimizer]) -> bool:
    """Return whether the module has any parameter of the optimizers."""
    theirs = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
    return any(id(parameter) in theirs for parameter in module.parameters())


def _named_by(closure: Callable[[], Tensor]) -> Iterator[nn.Module]:
    """Yield the modules that a closure's code and objects name, the nearest first, without calling anything."""
    waiting: deque[tuple[Any, int]] = deque([(closure, 0)])
    seen: set[int] = set()
    while waiting:
        found, depth = waiting.popleft()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if issubclass(type(found), nn.Module):
            yield found
        elif depth < _MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(found))


def _parts(found: Any) -> list[Any]:
    """Return the objects that an object or function refers to."""
    kind = type(found)  # not isinstance, which some objects answer with a warning or an import
    if issubclass(kind, partial):
        return [found.func, *found.args, *found.keywords.values()]
    if issubclass(kind, MethodType):
        return [found.__self__, found.__func__]
    if issubclass(kind, FunctionType):
        return [] if _is_torchs(found.__module__) else list(_held_by(found))
    if issubclass(kind, list | tuple | dict):
        items = found.values() if issubclass(kind, dict) else found
        return list(items) if len(found) <= _MAX_ITEMS else []
    if issubclass(kind, type | ModuleType) or _is_torchs(kind.__module__):
        return []
    called = getattr(kind, "__call__", None)  # noqa: B004 # the function, not whether there is one
    return [*getattr(found, "__dict__", {}).values(), *([called] if isinstance(called, FunctionType) else [])]


def _is_torchs(module: object) -> bool:
    return str(module).partition(".")[0] == "torch"


def _held_by(function: FunctionType) -> Iterator[Any]:
    """Yield the values of a function's cells, defaults, and the globals that its code names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    names = set(_names(function.__code__))
    yield from (value for name, value in function.__globals__.items() if name in names)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)

"""Search for the modules that a precision damages: the first wrong output, and the origin of non-finite numbers.

It uses hooks, so compiled models run eagerly here; the other parts of a check do not depend on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.passes import Passes, stored
from autotune_amp.precision.forward_wrapper import (
    can_be_wrapped,
    has_half_weights,
    modules_by_name,
    parameters_by_name,
)

# Used like a module's name. "" is the model's own forward, outside of the modules in it.
OUTSIDE = "outside of the model"  # usually the loss function, or the optimizer
# A module whose output error is a smaller share of the difference between samples does not cause a wrong gradient.
_MIN_ERROR = 0.05


def first_wrong(low: Passes, reference: Passes, index: int, precision: Precision) -> str | None:
    """Return the first module whose output in `precision` differs from fp32's, inner modules before outer ones.

    The model itself, "", comes last. An error is relative to the difference of the output between samples: an offset
    common to all samples carries no information, and a later module may remove it.
    """
    expected: dict[tuple[str, int], Tensor] = {}
    wrong: list[str] = []

    def keep(call: tuple[str, int], output: Tensor) -> None:
        expected[call] = output.float().to("cpu", copy=True)

    def compare(call: tuple[str, int], output: Tensor) -> None:
        wanted = expected.get(call)
        if wanted is not None and wanted.shape == output.shape and _error(output.float().cpu(), wanted) >= _MIN_ERROR:
            wrong.append(call[0])

    _look_at_outputs(reference, index, "fp32", keep)
    _look_at_outputs(low, index, precision, compare)
    return next(iter(wrong), None)


def _look_at_outputs(
    passes: Passes, index: int, precision: Precision, look: Callable[[tuple[str, int], Tensor], None]
) -> None:
    """Call `look` with the first output tensor of each module call, in the order in which the calls end."""
    num_calls: Counter[str] = Counter()

    def ended(name: str, _: nn.Module, __: Any, output: Any) -> None:
        num_calls[name] += 1
        for tensor in islice(_floating(output), 1):
            look((name, num_calls[name]), tensor)

    @contextmanager
    def watching() -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in modules_by_name(passes.model).items():
                if can_be_wrapped(module):
                    hooks.callback(module.register_forward_hook(partial(ended, name)).remove)
            yield

    with torch.compiler.set_stance("force_eager"):
        passes.run(index, precision, around_forward=watching())


def _error(given: Tensor, wanted: Tensor) -> float:
    usable = wanted.isfinite()
    if not bool(given.isfinite().where(usable, True).all()):
        return math.inf
    wanted, given = wanted.where(usable, 0), given.where(usable, 0)
    difference = float(torch.linalg.vector_norm(given - wanted))
    spread = wanted - wanted.mean(0) if wanted.dim() and len(wanted) > 1 else wanted
    size = float(torch.linalg.vector_norm(spread))
    whole = float(torch.linalg.vector_norm(wanted))
    size = size if size > 1e-6 * whole else whole  # equal for all samples, as positions are
    return difference / size if size else (math.inf if difference else 0.0)


# -- origin of non-finite numbers --------------------------------------------------------------------------------------


def blown_up(passes: Passes, index: int, precision: Precision, scale: float) -> tuple[str, ...]:
    """Return the modules where a pass becomes non-finite but fp32's does not, from the present weights.

    ("",), the model's own name, if no module in it does, and (`OUTSIDE`,) if the model does not either. A pass in fp32
    itself is compared with none.
    """
    is_alone = precision == "fp32" or has_half_weights(passes.model)
    healthy = None if is_alone else _recorded(passes, index, "fp32", 1.0)
    damaged, _ = _recorded(passes, index, precision, scale).damaged(healthy)
    return tuple(filter(None, dict.fromkeys(damaged))) or (("",) if damaged else (OUTSIDE,))


def _recorded(passes: Passes, index: int, precision: Precision, scale: float) -> Recorder:
    recorder = Recorder(modules_by_name(passes.model))
    with torch.compiler.set_stance("force_eager"):
        passes.run(
            index,
            precision,
            scale=scale,
            restores=False,
            around_forward=recorder.watching_forward(),
            before_backward=recorder.watch_backward,
        )
    return recorder


def bad_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that are not finite."""
    named = parameters_by_name(model).items()
    return tuple(name for name, parameter in named if health(parameter) is not Health.FINITE)


class Health(IntEnum):
    """Worst kind of number in the floating-point tensors of an input, output or gradient."""

    FINITE = 0
    MASKED = 1  # -inf and nothing worse: attention masks
    BAD = 2


def health(values: Any) -> Health:
    """Return the worst kind of number in all floating-point tensors in `values`. Synchronizes with the device."""
    return max(map(_health_of, _floating(values)), default=Health.FINITE)


def _floating(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensor = leaf.detach()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            tensor = stored(tensor)
            tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            if tensor.is_floating_point() and tensor.numel():
                yield tensor


def _health_of(tensor: Tensor) -> Health:
    smallest, largest = tensor.aminmax()  # NaN in the tensor makes both NaN
    if not largest.item() < math.inf:
        return Health.BAD
    return Health.MASKED if smallest.item() == -math.inf else Health.FINITE


@dataclass(eq=False)
class ModuleCall:
    """Record of one call of the module `name`; `number` counts its calls."""

    name: str
    number: int
    parent: ModuleCall | None
    inputs: Health
    first_node: int
    outputs: Health = Health.FINITE
    end_node: int = 0  # sequence number of the first autograd node made after the call

    def ancestors(self) -> Iterator[ModuleCall]:
        """Yield the calls around this one, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class _Origin:
    """Origin of a non-finite gradient: an autograd node's number, and those of the nodes that it feeds."""

    node: int
    next_nodes: tuple[int, ...]


class Recorder:
    """Recorder of one pass through `modules`: `watching_forward()` around the forward pass, then `watch_backward`.

    TorchScript modules accept no hooks: an error in one is attributed to the module around it.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {name: module for name, module in modules.items() if can_be_wrapped(module)}
        self._timeline: list[tuple[ModuleCall, bool]] = []  # a call, and whether it ended there or began
        self._running: list[ModuleCall] = []
        self._num_calls: Counter[str] = Counter()
        self._origins: list[_Origin] = []
        self._first_bad_sum: _Origin | None = None

    @contextmanager
    def watching_forward(self) -> Iterator[None]:
        """Record the forward pass within the context, without recomputation by a checkpoint in the backward pass."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                beginning = module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
                hooks.callback(beginning.remove)
                hooks.callback(module.register_forward_hook(partial(self._end, name)).remove)
            yield

    def _begin(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._num_calls[name] += 1
        parent = self._running[-1] if self._running else None
        call = ModuleCall(name, self._num_calls[name], parent, health((args, kwargs)), _next_node())
        self._running.append(call)
        self._timeline.append((call, False))

    def _end(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        # A call that raised, inside a module that caught the exception, never ended.
        while (call := self._running.pop()).name != name:
            pass
        call.outputs = health(output)
        call.end_node = _next_node()
        self._timeline.append((call, True))

    def forward_culprit(self) -> str:
        """Return the origin of a non-finite loss, in the order of execution."""
        masked: ModuleCall | None = None  # the first to make -inf, which the next may turn into NaN
        for call, has_ended in self._timeline:
            if has_ended and call.outputs > call.inputs:
                if call.outputs is Health.BAD:
                    return self._module(call if call.inputs is Health.FINITE else masked or call)
                masked = masked or call
            elif not has_ended and call.inputs is Health.BAD:
                holder = next((outer for outer in call.ancestors() if outer.inputs is not Health.BAD), None)
                if holder is not None:
                    return self._module(holder)
                return f"the input of {self._module(call)}" if call.name else "the input of the model"
        return "the loss function" if masked is None else self._module(masked)

    def watch_backward(self, loss: Tensor) -> list[Tensor]:
        """Record the following backward pass, and return the leaves whose gradients it will write."""
        leaves: list[Tensor] = []
        seen = {loss.grad_fn}
        pending: list[Any] = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if hasattr(node, "variable"):  # AccumulateGrad can outlive the graph, so it gets no hook
                leaves.append(node.variable)
                continue
            next_nodes = [following for following, _ in node.next_functions if following is not None]
            # The hook must not hold the node itself: a cycle through C++ is never collected.
            origin = _Origin(node._sequence_nr(), tuple(following._sequence_nr() for following in next_nodes))
            node.register_hook(partial(self._passed, origin))
            pending += [following for following in next_nodes if following not in seen]
            seen.update(next_nodes)
        return leaves

    def _passed(self, origin: _Origin, grad_inputs: Any, grad_outputs: Any) -> None:
        if health(grad_outputs) is not Health.FINITE:
            self._first_bad_sum = self._first_bad_sum or origin
        elif health(grad_inputs) is not Health.FINITE:
            self._origins.append(origin)

    def backward_culprit(self) -> str | None:
        """Return the origin of the first non-finite gradient; None if no node made it, as in a sum over ranks."""
        if not (origins := self._backward_origins()):
            return None
        call = self._call_of(origins[0].node)
        return f"{'the loss function' if call is None else self._module(call)}, in its backward pass"

    def _backward_origins(self) -> list[_Origin]:
        if self._origins or self._first_bad_sum is None:
            return self._origins
        # No single node is at fault: finite gradients from several consumers overflowed in their sum.
        return [self._first_bad_sum]

    def _call_of(self, node: int) -> ModuleCall | None:
        around = (call for call in self._ended_calls() if call.first_node <= node < call.end_node)
        return max(around, key=lambda call: call.first_node, default=None)

    def damaged(self, healthy: Recorder | None) -> tuple[list[str], str | None]:
        """Return the modules where this pass became non-finite and `healthy` did not, and a text naming the first.

        Inner modules come before the modules that hold them.
        """
        before = {} if healthy is None else {(call.name, call.number): call for call in healthy._ended_calls()}
        found: list[ModuleCall] = []
        has_found_inside: set[ModuleCall] = set()
        for call in self._ended_calls():
            reference = before.get((call.name, call.number))
            is_worse_in = call.inputs > (reference.inputs if reference else Health.FINITE)
            is_worse_out = call.outputs > (reference.outputs if reference else Health.FINITE)
            if is_worse_out and not is_worse_in and call not in has_found_inside:
                found.append(call)
                has_found_inside.update(call.ancestors())
        if found:
            return [call.name for call in found], self._module(found[0])
        return [call.name for call in self._backward_calls()], self.backward_culprit()

    def _backward_calls(self) -> Iterator[ModuleCall]:
        for origin in self._backward_origins():
            call = self._call_of(origin.node)
            if call is not None and call.name:
                yield call
            else:  # Usually the loss function, in the model or outside, which casts a gradient for the last module.
                yield from filter(None, map(self._call_of, origin.next_nodes))

    def _ended_calls(self) -> Iterator[ModuleCall]:
        return (call for call, has_ended in self._timeline if has_ended)

    def _module(self, call: ModuleCall) -> str:
        kind = type(self._modules[call.name]).__name__
        return f"module {call.name} ({kind})" if call.name else f"the model itself ({kind})"


def _next_node() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined] # not exported, as the nodes' own
    return number

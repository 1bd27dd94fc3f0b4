"""Search for the modules where a precision fails: the first inaccurate output, and the origin of non-finite numbers.

It uses hooks, so compiled models run eagerly here. Only the search depends on hooks, not the verdict of a check.
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
from autotune_amp.numerics.comparison import ratio
from autotune_amp.numerics.passes import Passes, stored_values
from autotune_amp.precision.forward_wrapper import (
    can_be_wrapped,
    computes_in_half,
    modules_by_name,
    parameters_by_name,
)

# Used in place of a module's name for the loss function or the optimizer. "" is the model's own forward.
OUTSIDE = "outside of the model"
# Least error of a module's output that can explain a wrong gradient, relative to the difference between samples.
_MIN_ERROR = 0.05


def first_inaccurate_module(low: Passes, reference: Passes, index: int, precision: Precision) -> str | None:
    """Return the first module whose output in `precision` is inaccurate, or None; "" is the model itself.

    Modules are compared in the order in which their calls end, so inner ones come before outer ones. An error is
    relative to the difference between samples, since an offset common to all samples carries no information.
    """
    expected: dict[tuple[str, int], Tensor] = {}
    inaccurate: list[str] = []

    def store(call: tuple[str, int], output: Tensor) -> None:
        expected[call] = output.float().to("cpu", copy=True)

    def compare(call: tuple[str, int], output: Tensor) -> None:
        reference_output = expected.get(call)
        if (
            reference_output is not None
            and reference_output.shape == output.shape
            and _relative_error(output.float().cpu(), reference_output) >= _MIN_ERROR
        ):
            inaccurate.append(call[0])

    _visit_outputs(reference, index, "fp32", store)
    _visit_outputs(low, index, precision, compare)
    return next(iter(inaccurate), None)


def _visit_outputs(
    passes: Passes, index: int, precision: Precision, visit: Callable[[tuple[str, int], Tensor], None]
) -> None:
    """Call `visit` with the first output tensor of each module call, in the order in which the calls end.

    Its first argument is the module's name and the number of the call.
    """
    num_calls: Counter[str] = Counter()

    def visit_output(name: str, _: nn.Module, __: Any, output: Any) -> None:
        num_calls[name] += 1
        for tensor in islice(_floating_tensors(output), 1):
            visit((name, num_calls[name]), tensor)

    @contextmanager
    def hooked_modules() -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in modules_by_name(passes.model).items():
                if can_be_wrapped(module):
                    hooks.callback(module.register_forward_hook(partial(visit_output, name)).remove)
            yield

    with torch.compiler.set_stance("force_eager"):
        passes.run(index, precision, around_forward=hooked_modules())


def _relative_error(output: Tensor, reference: Tensor) -> float:
    """Return the length of the difference over that of the reference's variation between samples.

    Infinity if `output` is not finite where the reference is.
    """
    is_comparable = reference.isfinite()
    if not bool(output.isfinite().where(is_comparable, True).all()):
        return math.inf
    reference, output = reference.where(is_comparable, 0), output.where(is_comparable, 0)
    difference = float(torch.linalg.vector_norm(output - reference))
    spread = reference - reference.mean(0) if reference.dim() and len(reference) > 1 else reference
    size = float(torch.linalg.vector_norm(spread))
    whole = float(torch.linalg.vector_norm(reference))
    size = size if size > 1e-6 * whole else whole  # the same for all samples, like position embeddings
    return ratio(difference, size)


# -- origin of non-finite numbers --------------------------------------------------------------------------------------


def nonfinite_modules(passes: Passes, index: int, precision: Precision, scale: float) -> tuple[str, ...]:
    """Return the names of the modules where a pass becomes non-finite and fp32's does not, from the current weights.

    ("",), the model itself, if none of its submodules does, and (`OUTSIDE`,) if the model does not either. Without an
    fp32 pass to compare with, all modules that become non-finite are returned.
    """
    has_no_reference = precision == "fp32" or computes_in_half(passes.model)
    reference = None if has_no_reference else _record_pass(passes, index, "fp32", 1.0)
    names, _ = _record_pass(passes, index, precision, scale).newly_nonfinite_modules(reference)
    return tuple(filter(None, dict.fromkeys(names))) or (("",) if names else (OUTSIDE,))


def _record_pass(passes: Passes, index: int, precision: Precision, scale: float) -> PassRecorder:
    recorder = PassRecorder(modules_by_name(passes.model))
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


def nonfinite_parameters(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that `is_nonfinite_weight`."""
    return tuple(name for name, parameter in parameters_by_name(model).items() if is_nonfinite_weight(parameter))


def is_nonfinite_weight(parameter: Tensor) -> bool:
    """Return whether a parameter has a number that is not finite; a frozen one may hold -inf, as an attention mask."""
    return health(parameter) > (Health.FINITE if parameter.requires_grad else Health.MASKED)


class Health(IntEnum):
    """Whether tensors hold only finite numbers, also -inf, or NaN and +inf; a higher value is worse."""

    FINITE = 0
    MASKED = 1  # -inf, as in attention masks, but no NaN and no +inf
    BAD = 2  # NaN or +inf


def health(values: Any) -> Health:
    """Return the worst health of all floating-point tensors in `values`. Synchronizes with the device."""
    return max(map(_tensor_health, _floating_tensors(values)), default=Health.FINITE)


def _floating_tensors(values: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor):
            tensor = leaf.detach()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            tensor = stored_values(tensor)
            tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            if tensor.is_floating_point() and tensor.numel():
                yield tensor


def _tensor_health(tensor: Tensor) -> Health:
    smallest, largest = tensor.aminmax()  # both are NaN if the tensor has a NaN
    if not largest.item() < math.inf:
        return Health.BAD
    return Health.MASKED if smallest.item() == -math.inf else Health.FINITE


@dataclass(eq=False)
class ModuleCall:
    """Record of one call of the module `name`, its `number`-th call in the pass.

    `first_node` is the sequence number of the first autograd node created in the call, `end_node` that of the first
    one created after it.
    """

    name: str
    number: int
    parent: ModuleCall | None
    inputs: Health
    first_node: int
    outputs: Health = Health.FINITE
    end_node: int = 0

    def ancestors(self) -> Iterator[ModuleCall]:
        """Yield the calls around this one, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class _Origin:
    """Sequence numbers of the autograd node where a gradient became non-finite, and of the nodes that follow it."""

    node: int
    next_nodes: tuple[int, ...]


class PassRecorder:
    """Recorder of where one pass through `modules` becomes non-finite.

    Run the forward pass within `watching_forward()`, and call `watch_backward(loss)` before the backward pass. An error
    in a TorchScript module, which accepts no hooks, is attributed to the module around it.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {name: module for name, module in modules.items() if can_be_wrapped(module)}
        self._timeline: list[tuple[ModuleCall, bool]] = []  # each call, and whether this is its end or its beginning
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
        """Record the beginning of a module call; a forward pre-hook."""
        self._num_calls[name] += 1
        parent = self._running[-1] if self._running else None
        call = ModuleCall(name, self._num_calls[name], parent, health((args, kwargs)), _next_node())
        self._running.append(call)
        self._timeline.append((call, False))

    def _end(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """Record the end of a module call; a forward hook."""
        # Calls that raised an exception, which a module around them caught, have no end.
        while (call := self._running.pop()).name != name:
            pass
        call.outputs = health(output)
        call.end_node = _next_node()
        self._timeline.append((call, True))

    def forward_culprit(self) -> str:
        """Return the first place in the forward pass that explains a non-finite loss, as text for a message."""
        masked: ModuleCall | None = None  # the first call that produced -inf, which a later one may turn into NaN
        for call, has_ended in self._timeline:
            if has_ended and call.outputs > call.inputs:
                if call.outputs is Health.BAD:
                    return self._describe(call if call.inputs is Health.FINITE else masked or call)
                masked = masked or call
            elif not has_ended and call.inputs is Health.BAD:
                holder = next((outer for outer in call.ancestors() if outer.inputs is not Health.BAD), None)
                if holder is not None:
                    return self._describe(holder)
                return f"the input of {self._describe(call)}" if call.name else "the input of the model"
        return "the loss function" if masked is None else self._describe(masked)

    def watch_backward(self, loss: Tensor) -> list[Tensor]:
        """Record the backward pass of `loss`, and return the leaf tensors whose gradients it will write."""
        leaves: list[Tensor] = []
        visited = {loss.grad_fn}
        pending: list[Any] = [loss.grad_fn]
        while pending:
            node = pending.pop()
            if hasattr(node, "variable"):  # an AccumulateGrad node can outlive the graph, so it gets no hook
                leaves.append(node.variable)
                continue
            next_nodes = [following for following, _ in node.next_functions if following is not None]
            # The hook must not refer to the node: Python never collects a cycle through C++.
            origin = _Origin(node._sequence_nr(), tuple(following._sequence_nr() for following in next_nodes))
            node.register_hook(partial(self._record_node, origin))
            pending += [following for following in next_nodes if following not in visited]
            visited.update(next_nodes)
        return leaves

    def _record_node(self, origin: _Origin, grad_inputs: Any, grad_outputs: Any) -> None:
        """Record whether gradients became non-finite in an autograd node; a hook of the node."""
        if health(grad_outputs) is not Health.FINITE:
            self._first_bad_sum = self._first_bad_sum or origin
        elif health(grad_inputs) is not Health.FINITE:
            self._origins.append(origin)

    def backward_culprit(self) -> str | None:
        """Return where the first non-finite gradient arose, as text; None if in no node, as in a sum over ranks."""
        if not (origins := self._gradient_origins()):
            return None
        call = self._call_around(origins[0].node)
        return f"{'the loss function' if call is None else self._describe(call)}, in its backward pass"

    def _gradient_origins(self) -> list[_Origin]:
        if self._origins or self._first_bad_sum is None:
            return self._origins
        # No node made a non-finite gradient: finite gradients from several nodes overflowed in their sum.
        return [self._first_bad_sum]

    def _call_around(self, node: int) -> ModuleCall | None:
        around = (call for call in self._ended_calls() if call.first_node <= node < call.end_node)
        return max(around, key=lambda call: call.first_node, default=None)

    def newly_nonfinite_modules(self, healthy: PassRecorder | None) -> tuple[list[str], str | None]:
        """Return the modules where this pass became non-finite and the pass `healthy` did not, and a text on the first.

        Inner modules come before the modules that hold them.
        """
        healthy_calls = {} if healthy is None else {(call.name, call.number): call for call in healthy._ended_calls()}
        culprits: list[ModuleCall] = []
        has_inner_culprit: set[ModuleCall] = set()
        for call in self._ended_calls():
            healthy_call = healthy_calls.get((call.name, call.number))
            is_worse_in = call.inputs > (healthy_call.inputs if healthy_call else Health.FINITE)
            is_worse_out = call.outputs > (healthy_call.outputs if healthy_call else Health.FINITE)
            if is_worse_out and not is_worse_in and call not in has_inner_culprit:
                culprits.append(call)
                has_inner_culprit.update(call.ancestors())
        if culprits:
            return [call.name for call in culprits], self._describe(culprits[0])
        return [call.name for call in self._backward_calls()], self.backward_culprit()

    def _backward_calls(self) -> Iterator[ModuleCall]:
        for origin in self._gradient_origins():
            call = self._call_around(origin.node)
            if call is not None and call.name:
                yield call
            else:  # Usually the loss function: its gradient becomes non-finite in the cast to the last module's dtype.
                yield from filter(None, map(self._call_around, origin.next_nodes))

    def _ended_calls(self) -> Iterator[ModuleCall]:
        return (call for call, has_ended in self._timeline if has_ended)

    def _describe(self, call: ModuleCall) -> str:
        kind = type(self._modules[call.name]).__name__
        return f"module {call.name} ({kind})" if call.name else f"the model itself ({kind})"


def _next_node() -> int:
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined] # torch does not export it
    return number

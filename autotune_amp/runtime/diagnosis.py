"""A batch run again in a given precision, without a step: whose fault a trip is, where it begins, what helps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from autotune_amp.core.dimensions import Precision, autocast_precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.variants import FP8_RECIPE
from autotune_amp.numerics.locate import Health, Recorder, bad_parameters, health
from autotune_amp.numerics.passes import scaled
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    is_cast,
    modules_by_name,
    override,
    pin_fp32,
    roles_of,
    set_roles,
    takes_roles,
    unwrap,
)
from autotune_amp.precision.torch_state import HALF_DTYPES, ambient, autocast, set_flags
from autotune_amp.runtime.policy_state import Finding
from autotune_amp.runtime.scaler import Ranks
from autotune_amp.variants import fp8

_MAX_PINNED_SHARE = 0.05  # of the modules; one module may always be pinned
_MAX_PIN_ROUNDS = 3


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass. `is_finite` and `fits` hold for all ranks; the rest is this rank's own."""

    is_finite: bool
    fits: bool  # False: out of memory, or it ran in another precision after all; nothing else is known
    is_loss_finite: bool
    recorder: Recorder


def checked_loss(loss: object, whose: str) -> Tensor:
    """The loss that a closure returned; raises `InvalidRequestError` unless it is one number with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
        raise InvalidRequestError(
            f"{whose} must return the loss, one number with a gradient; it returned {loss!r:.80}.",
            "Return it as the training loop computes it, before backward() and without item() or detach().",
        )
    return loss


def diagnose(
    rerunner: Rerunner,
    lower: Sequence[Precision],
    loss_scale: float,
    *,
    finds_pins: bool = True,
    can_run_fp32: bool = True,
    is_whole: bool = True,
) -> Finding:
    """Rerun the batch in the current precision, in fp32, with modules pinned and in each of `lower`; no step is taken.

    `lower` is ordered, first choice first. `is_whole`: the batch is all of the window that failed, not the last of
    several passes, which tells nothing of the others if it is finite. Raises `InvalidRequestError` where the closure
    fails.
    """
    current = rerunner.current
    first = rerunner.run(current, loss_scale)
    if not first.fits:
        return Finding(True)
    if first.is_finite:
        elsewhere = "an earlier pass of the window than the one run again"
        return Finding(reproduced=not is_whole, culprit=None if is_whole else elsewhere)

    passes = {current: first}

    def run_once(precision: Precision) -> Pass:
        if precision not in passes:
            passes[precision] = rerunner.run(precision, 1.0)
        return passes[precision]

    # The safest precision that can be run decides whether precision is at fault at all. Without any, pins may show it.
    fp32: tuple[Precision, ...] = ("fp32",) if can_run_fp32 else ()
    decider = next((done for precision in (*fp32, *reversed(lower)) if (done := run_once(precision)).fits), None)
    if decider is not None and not decider.is_finite:
        return Finding(True, culprit=rerunner.culprit(decider), is_precision=False)
    healthy = None if decider is None else decider.recorder
    culprit = rerunner.first(first.recorder.damaged(healthy)[1])
    pins = _find_pins(rerunner, first, healthy, loss_scale) if finds_pins else ()
    finite_in = tuple(precision for precision in lower if run_once(precision).is_finite)
    is_precision = True if pins or decider is not None else None
    return Finding(True, finite_in, culprit, pins, is_precision)


def _find_pins(rerunner: Rerunner, bad: Pass, healthy: Recorder | None, loss_scale: float) -> tuple[str, ...]:
    """Modules that make the precision finite once they run in fp32; () where that takes too many, or does not help."""
    limit = max(1, int(_MAX_PINNED_SHARE * len(rerunner.modules)))
    pins: tuple[str, ...] = ()
    for _ in range(_MAX_PIN_ROUNDS):
        damaged = (name for name in bad.recorder.damaged(healthy)[0] if name and can_be_pinned(rerunner.modules[name]))
        wanted = tuple(dict.fromkeys((*pins, *rerunner.ranks.union(tuple(damaged)))))
        if wanted == pins or len(wanted) > limit:
            return ()
        pins = wanted
        bad = rerunner.run(rerunner.current, loss_scale, pins)
        if bad.is_finite:
            return pins
        if not bad.fits:
            return ()
    return ()


class Rerunner:
    """Repeats the batch that `rerun` computes the loss of, in a run whose precision is `current`; no step is taken.

    The ranks are asked equally often on every rank, whatever happens there.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: Callable[[], Tensor],
        current: Precision,
        ranks: Ranks,
        fp8_recipe: str = FP8_RECIPE.default,
    ) -> None:
        self.current = current
        self.modules = modules_by_name(model)
        self.ranks = ranks
        self._model = model
        self._rerun = rerun
        self._fp8_recipe = fp8_recipe
        self._device_type = ranks.device.type
        self._seen: set[Precision] = set()

    def culprit(self, bad: Pass) -> str | None:
        """Where a pass went bad that precision has no part in."""
        if parameters := self.ranks.union(bad_parameters(self._model)):
            return f"parameter {parameters[0]}"
        return self.first(bad.recorder.backward_culprit() if bad.is_loss_finite else bad.recorder.forward_culprit())

    def first(self, name: str | None) -> str | None:
        """The first name that any rank has."""
        return next(iter(self.ranks.union(() if name is None else (name,))), None)

    def run(self, precision: Precision, loss_scale: float, pins: Sequence[str] = ()) -> Pass:
        """One pass in `precision` with the modules named in `pins` in fp32 beside those that are already.

        Raises `InvalidRequestError`, on every rank, where the closure fails on any.
        """
        recorder = Recorder(self.modules)
        has_run_out, error = False, None
        self._seen.clear()
        is_loss_finite = is_finite = False
        try:
            with self._as_before(), self._forced(precision, pins):
                is_loss_finite, is_finite = self._forward_and_backward(recorder, precision, loss_scale)
        except torch.OutOfMemoryError:
            has_run_out = True
        except Exception as raised:  # whatever the user's closure raises: passed on below, once all ranks know
            error = raised
        if self.ranks.any(error is not None):
            if isinstance(error, InvalidRequestError):
                raise error
            what = "raised on another rank" if error is None else f"raised {type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"The rerun closure {what}, in {precision}.",
                "Give attach() a closure that computes the loss of the batch just trained on, forward pass only.",
            ) from error
        # A method other than forward, or an autocast inside: the override did not reach it. Layers in fp32 do no harm.
        is_elsewhere = precision != self.current and not self._seen <= {autocast_precision(precision), "fp32"}
        if self.ranks.any(has_run_out or is_elsewhere):
            return Pass(False, False, False, recorder)
        return Pass(not self.ranks.any(not is_finite), True, is_loss_finite, recorder)

    def _no_autocast(self) -> torch.autocast:
        """Off, not just absent: the caller may be inside an autocast. No cache: it may hold casts of that."""
        return torch.autocast(self._device_type, enabled=False, cache_enabled=False)

    def _forward_and_backward(self, recorder: Recorder, precision: Precision, loss_scale: float) -> tuple[bool, bool]:
        with torch.enable_grad():
            with self._no_autocast(), autocast(precision, self._device_type), recorder.watching_forward():
                loss = self._rerun()
            scaled_loss = scaled(checked_loss(loss, "The rerun closure"), loss_scale)
        with self._no_autocast(), ExitStack() as gradients:
            # Also those of a nested backward pass, which the graph of the loss does not show.
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            written = [*recorder.watch_backward(scaled_loss), *parameters]
            for leaf in written:
                gradients.callback(setattr, leaf, "grad", leaf.grad)
                leaf.grad = None
            torch.autograd.backward(scaled_loss)  # of a non-finite loss too: other ranks may be waiting in theirs
            is_loss_finite = health(loss) is Health.FINITE
            return is_loss_finite, is_loss_finite and health([leaf.grad for leaf in written]) is Health.FINITE

    @contextmanager
    def _forced(self, precision: Precision, pins: Sequence[str]) -> Iterator[None]:
        def note_precision(*_: object) -> None:
            self._seen.add(ambient(self._device_type))

        root = unwrap(self._model)
        pinned = [self.modules[name] for name in pins if name in self.modules]  # with pipelines a rank has but some
        with ExitStack() as stack:
            for module in (root, *pinned):
                stack.callback(set_roles, module, roles_of(module))
            if precision != self.current:
                stack.callback(torch_state.apply, torch_state.capture())
                set_flags(precision)
            recipe = self._fp8_recipe if precision == "fp8" else None
            stack.enter_context(fp8.running([root], recipe, self.ranks.device))
            if takes_roles(root):  # else the autocast around the closure has to do
                override(root, precision, self._device_type)
            for module in pinned:
                pin_fp32(module, self._device_type)
            for module in (each for each in self.modules.values() if is_cast(each) and takes_roles(each)):
                stack.callback(module.register_forward_pre_hook(note_precision).remove)
            # Compiled code would not see the hooks of the recorder.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Put back random states, buffers and what DDP remembers. Gradients are put back where they are written."""
        with ExitStack() as stack:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            devices = {tensor.device.index for tensor in tensors if tensor.device.type == self._device_type}
            indices = sorted(index for index in devices if index is not None)
            stack.enter_context(torch.random.fork_rng(indices, device_type=self._device_type))
            for module in self._model.modules():
                _keep_buffers(module, stack)
                if isinstance(module, DistributedDataParallel):
                    # Gradients in DDP's buckets would be overwritten by a reduction; the ranks agree by themselves.
                    stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                    stack.enter_context(module.no_sync())
            yield


def _keep_buffers(module: nn.Module, stack: ExitStack) -> None:
    kept = dict(module._buffers)
    values = {name: buffer.detach().clone() for name, buffer in kept.items() if buffer is not None}

    def restore() -> None:
        if takes_roles(module):  # TorchScript's own stay where they are
            module._buffers.clear()
            module._buffers.update(kept)
        for name, value in values.items():
            module._buffers[name].copy_(value)  # type: ignore[union-attr] # those that are not None

    stack.callback(torch.no_grad()(restore))


# -- without a rerun ---------------------------------------------------------------------------------------------------


class ForwardWatch:
    """Looks once in a burst of losses that are not finite whether the forward pass overflows.

    A hook on every module, which waits for the device, is there for the one update after the first such loss. `culprit`
    is the first module whose inputs and parameters are finite and whose output, in half precision, is not. Compiled
    code does not show its modules, and torch warns of such hooks: where any was compiled nothing is looked at.
    """

    def __init__(self) -> None:
        self.culprit: str | None = None
        self.is_hidden = False  # by compiled code
        self._has_looked = False
        self._has_seen = False  # a forward pass: verdicts may come updates late
        self._remove: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks by itself."""
        return vars(ForwardWatch())

    def saw_bad_loss(self) -> str | None:
        """Note a loss that is not finite: after the first of a burst look, then return the `culprit` of the burst."""
        if self._has_seen:
            self._unhook()
        self.is_hidden = _is_anything_compiled()
        if not self._has_looked and not self.is_hidden:
            own, self._has_seen = weakref.ref(self), False

            def look(module: nn.Module, inputs: Any, output: Any) -> None:
                if (watch := own()) is not None:
                    watch._look(module, inputs, output)

            self._remove = weakref.finalize(self, register_module_forward_hook(look).remove)
        self._has_looked = True
        return self.culprit

    def end(self) -> None:
        """Forget the burst: it is over."""
        self._unhook()
        self._has_looked, self.culprit = False, None

    def _unhook(self) -> None:
        if self._remove is not None:
            self._remove()
            self._remove = None

    def _look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.culprit is not None or not torch.is_grad_enabled():
            return
        self._has_seen = True
        halves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dtype in HALF_DTYPES]
        if (
            any(_overflowed(module, half.detach()) for half in halves)
            and health([inputs, list(module.parameters())]) is Health.FINITE
        ):
            self.culprit = f"a module {type(module).__name__}"


def _is_anything_compiled() -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return any(backend is not None for backend in getattr(frames, "cached_backends", {}).values())


def _overflowed(module: nn.Module, output: Tensor) -> bool:
    """Whether it holds what only an overflow gives: infinity; in torch's own layers NaN too, infinity less infinity.

    Negative infinity is what masks are made of, where a module is more than one layer.
    """
    if next(module.children(), None) is not None:
        return bool(output.isposinf().any())
    is_torchs = type(module).__module__.startswith("torch.")
    return bool((~output.isfinite()).any() if is_torchs else output.isinf().any())

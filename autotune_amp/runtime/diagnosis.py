"""Diagnosis of failing steps by rerunning the batch in other precisions: cause, place and remedy."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision, autocast_precision
from autotune_amp.core.setting import DEFAULTS
from autotune_amp.dimensions.attention import FUSED_BACKENDS, enabled_backends, switch_off, switch_on
from autotune_amp.numerics.locate import Health, PassRecorder, health, nonfinite_parameters
from autotune_amp.numerics.passes import scaled
from autotune_amp.precision import fp8, torch_state
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    can_be_wrapped,
    is_cast_by_autocast,
    modules_by_name,
    override,
    pin_fp32,
    set_wrappers,
    unwrap,
    wrappers_of,
)
from autotune_amp.precision.torch_state import HALF_DTYPES, active_autocast_precision, autocast, set_flags
from autotune_amp.runtime.policy import DiagnosisResult
from autotune_amp.runtime.scaler import Ranks

_MAX_PINNED_SHARE = 0.05  # share of the modules; one module may always be pinned
_MAX_PIN_ROUNDS = 3


@dataclass(frozen=True)
class RerunResult:
    """Result of a forward and backward pass. `is_finite` and `fits` hold for all ranks, the rest for this one."""

    is_finite: bool
    fits: bool  # False: out of memory, or not run as requested, or not without an error; the other fields are unknown
    is_loss_finite: bool
    recorder: PassRecorder


def checked_loss(loss: object, whose: str) -> Tensor:
    """Return a closure's loss. Raises `InvalidRequestError` unless it is a single number with a gradient."""
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
) -> DiagnosisResult:
    """Rerun the batch in the current precision, then without each backend of attention, in fp32, with pinned modules
    and in each of `lower`, without a step.

    `lower` is ordered by preference. `is_whole`: the batch is the whole window that failed, not the last of several
    passes, whose success would say nothing about the others. Raises `InvalidRequestError` if the closure fails.
    """
    current = rerunner.current
    first = rerunner.run(current, loss_scale)
    if not first.fits:
        return DiagnosisResult(True)
    if first.is_finite:
        elsewhere = "an earlier pass of the window than the one run again"
        return DiagnosisResult(reproduced=not is_whole, culprit=None if is_whole else elsewhere)

    if backends := _find_attention(rerunner, loss_scale):
        return DiagnosisResult(True, attention=backends)

    passes = {current: first}

    def run_once(precision: Precision) -> RerunResult:
        if precision not in passes:
            passes[precision] = rerunner.run(precision, 1.0)
        return passes[precision]

    # The safest precision that can be run decides whether precision is at fault. If none can be run, pins may show it.
    fp32: tuple[Precision, ...] = ("fp32",) if can_run_fp32 else ()
    decider = next((done for precision in (*fp32, *reversed(lower)) if (done := run_once(precision)).fits), None)
    if decider is not None and not decider.is_finite:
        return DiagnosisResult(True, culprit=rerunner.culprit(decider), is_precision=False)
    healthy = None if decider is None else decider.recorder
    culprit = rerunner.first(first.recorder.newly_nonfinite_modules(healthy)[1])
    pins = _find_pins(rerunner, first, healthy, loss_scale) if finds_pins else ()
    finite_in = tuple(precision for precision in lower if run_once(precision).is_finite)
    is_precision = True if pins or decider is not None else None
    return DiagnosisResult(True, finite_in, culprit, pins, is_precision)


def _find_attention(rerunner: Rerunner, loss_scale: float) -> tuple[str, ...]:
    """Return the attention backend without which alone the precision is finite, or ().

    A pass that is finite at loss scale 1 overflowed by the scale, which other backends may bear since they compute more
    in fp32.
    """
    if not rerunner.ranks.any(rerunner.calls_attention):
        return ()
    enabled = rerunner.ranks.union(tuple(name for name in FUSED_BACKENDS if name in enabled_backends()))
    if not enabled or (loss_scale != 1.0 and rerunner.run(rerunner.current, 1.0).is_finite):
        return ()

    def is_finite_without(name: str) -> bool:
        return rerunner.run(rerunner.current, loss_scale, without_attention=(name,)).is_finite

    return next(((name,) for name in FUSED_BACKENDS if name in enabled and is_finite_without(name)), ())


def _find_pins(
    rerunner: Rerunner, bad: RerunResult, healthy: PassRecorder | None, loss_scale: float
) -> tuple[str, ...]:
    """Return modules that make the precision finite when run in fp32; () if there are too many or it does not help."""
    limit = max(1, int(_MAX_PINNED_SHARE * len(rerunner.modules)))
    pins: tuple[str, ...] = ()
    for _ in range(_MAX_PIN_ROUNDS):
        damaged = (
            name
            for name in bad.recorder.newly_nonfinite_modules(healthy)[0]
            if name and can_be_pinned(rerunner.modules[name])
        )
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
    """Runner that repeats the batch whose loss `rerun` computes, in a run whose precision is `current`, without a step.

    Collectives are called equally often on every rank, whatever happens on one.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: Callable[[], Tensor],
        current: Precision,
        ranks: Ranks,
        fp8_recipe: str = DEFAULTS["fp8_recipe"],
    ) -> None:
        self.current = current
        self.modules = modules_by_name(model)
        self.ranks = ranks
        self._model = model
        self._rerun = rerun
        self._fp8_recipe = fp8_recipe
        self._device_type = ranks.device.type
        self._seen: set[Precision] = set()
        self.failed: dict[Precision, str] = {}  # precisions other than the current one in which a pass raised, and why
        self.calls_attention = False  # whether a pass called `scaled_dot_product_attention`

    def culprit(self, bad: RerunResult) -> str | None:
        """Return where a pass became non-finite, if precision is not the cause."""
        if parameters := self.ranks.union(nonfinite_parameters(self._model)):
            return f"parameter {parameters[0]}"
        return self.first(bad.recorder.backward_culprit() if bad.is_loss_finite else bad.recorder.forward_culprit())

    def first(self, name: str | None) -> str | None:
        """Return the first name given on any rank, or None."""
        return next(iter(self.ranks.union(() if name is None else (name,))), None)

    def run(
        self,
        precision: Precision,
        loss_scale: float,
        pins: Sequence[str] = (),
        without_attention: Collection[str] = (),
    ) -> RerunResult:
        """Run one pass in `precision`, with the modules named in `pins` in fp32 in addition to those pinned already.

        The attention backends named in `without_attention` are not used.

        Raises `InvalidRequestError` on every rank if the closure fails on any in a pass as the loop runs it. If only
        another pass fails, the model cannot run in that precision, or with those pins.
        """
        recorder = PassRecorder(self.modules)
        has_run_out, error = False, None
        attention = _AttentionCalls()
        self._seen.clear()
        is_loss_finite = is_finite = False
        try:
            with self._as_before(), self._forced(precision, pins), ExitStack() as stack:
                stack.callback(switch_on, switch_off(without_attention))
                stack.enter_context(attention)
                is_loss_finite, is_finite = self._forward_and_backward(recorder, precision, loss_scale)
        except torch.OutOfMemoryError:
            has_run_out = True
        except Exception as raised:  # any error of the user's closure: raised below, once all ranks know
            error = raised
        if self.ranks.any(error is not None):
            if precision != self.current or pins or without_attention:
                why = self.first(None if error is None else f"it raised {type(error).__name__}: {error}")
                error = None  # whose traceback holds the activations
                self.run(self.current, loss_scale)  # raises if the closure fails there too
                if precision != self.current:
                    self.failed[precision] = str(why)
                return RerunResult(False, False, False, recorder)
            if isinstance(error, InvalidRequestError):
                raise error
            what = "raised on another rank" if error is None else f"raised {type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"The rerun closure {what}, in {precision}.",
                "Give attach() a closure that computes the loss of the batch just trained on, forward pass only.",
            ) from error
        # The override did not reach a method other than forward, or was replaced by an inner autocast. fp32 layers are
        # fine.
        is_elsewhere = precision != self.current and not self._seen <= {autocast_precision(precision), "fp32"}
        if self.ranks.any(has_run_out or is_elsewhere):
            return RerunResult(False, False, False, recorder)
        self.calls_attention |= attention.are_seen
        return RerunResult(not self.ranks.any(not is_finite), True, is_loss_finite, recorder)

    def _no_autocast(self) -> torch.autocast:
        """Return a context that disables autocast, which the caller may be inside of, and its cache of casts."""
        return torch.autocast(self._device_type, enabled=False, cache_enabled=False)

    def _forward_and_backward(
        self, recorder: PassRecorder, precision: Precision, loss_scale: float
    ) -> tuple[bool, bool]:
        with torch.enable_grad():
            with self._no_autocast(), autocast(precision, self._device_type), recorder.watching_forward():
                loss = self._rerun()
            scaled_loss = scaled(checked_loss(loss, "The rerun closure"), loss_scale)
        with self._no_autocast(), ExitStack() as gradients:
            # Including those of a nested backward pass, which are not in the graph of the loss.
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
            self._seen.add(active_autocast_precision(self._device_type))

        root = unwrap(self._model)
        pinned = [self.modules[name] for name in pins if name in self.modules]  # a pipeline's rank has only some
        with ExitStack() as stack:
            for module in (root, *pinned):
                stack.callback(set_wrappers, module, wrappers_of(module))
            if precision != self.current:
                stack.callback(torch_state.apply_fp32_flags, torch_state.capture())
                set_flags(precision)
            recipe = self._fp8_recipe if precision == "fp8" else None
            stack.enter_context(fp8.temporary_recipe([root], recipe, self.ranks.device))
            if can_be_wrapped(root):  # else the autocast around the closure has to suffice
                override(root, precision, self._device_type)
            for module in pinned:
                pin_fp32(module, self._device_type)
            for module in (
                each for each in self.modules.values() if is_cast_by_autocast(each) and can_be_wrapped(each)
            ):
                stack.callback(module.register_forward_pre_hook(note_precision).remove)
            # Compiled code would skip the recorder's hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Restore random states, buffers and DDP's flags after a pass, but not gradients."""
        with ExitStack() as stack:
            tensors = [*self._model.parameters(), *self._model.buffers()]
            devices = {tensor.device.index for tensor in tensors if tensor.device.type == self._device_type}
            indices = sorted(index for index in devices if index is not None)
            stack.enter_context(torch.random.fork_rng(indices, device_type=self._device_type))
            for module in self._model.modules():
                _keep_buffers(module, stack)
                if isinstance(module, DistributedDataParallel):
                    # A reduction would overwrite gradients in DDP's buckets. The ranks compare their results
                    # separately.
                    stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
                    stack.enter_context(module.no_sync())
            yield


def _keep_buffers(module: nn.Module, stack: ExitStack) -> None:
    kept = dict(module._buffers)
    values = {name: buffer.detach().clone() for name, buffer in kept.items() if buffer is not None}

    def restore() -> None:
        if can_be_wrapped(module):  # TorchScript's buffers stay the same objects
            module._buffers.clear()
            module._buffers.update(kept)
        for name, value in values.items():
            module._buffers[name].copy_(value)  # type: ignore[union-attr] # those that are not None

    stack.callback(torch.no_grad()(restore))


class _AttentionCalls(TorchFunctionMode):
    """Context that notes in `are_seen` whether attention is computed by ``scaled_dot_product_attention``, which torch's
    own layers call by ``multi_head_attention_forward``.
    """

    are_seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        functions = (nn.functional.scaled_dot_product_attention, nn.functional.multi_head_attention_forward)
        self.are_seen |= func in functions
        return func(*args, **(kwargs or {}))


# -- without a rerun ---------------------------------------------------------------------------------------------------


class ForwardWatch:
    """Watch that checks, once in a burst of non-finite losses, whether the forward pass overflows.

    A hook on every module, which synchronizes with the device, is active for the one update after the first such loss.
    `culprit` is the first module whose inputs and parameters are finite and whose half-precision output is not.
    Compiled code hides its modules, and torch warns about such hooks: if anything was compiled no hook is set.
    """

    def __init__(self) -> None:
        self.culprit: str | None = None
        self.is_hidden = False  # by compiled code
        self._has_looked = False
        self._has_seen = False  # whether a forward pass was seen, since verdicts may come several updates late
        self._remove: Callable[[], object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return a new state, since a copy watches its own model."""
        return vars(ForwardWatch())

    def saw_bad_loss(self) -> str | None:
        """Note a non-finite loss: watch the update after the first of a burst, then return the burst's `culprit`."""
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
        """Forget the burst, which is over."""
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
    """Return whether an output contains a sign of overflow: infinity, or in torch's own layers NaN (infinity minus
    infinity).

    In a module with children negative infinity does not count, since masks are made of it.
    """
    if next(module.children(), None) is not None:
        return bool(output.isposinf().any())
    is_torchs = type(module).__module__.startswith("torch.")
    return bool((~output.isfinite()).any() if is_torchs else output.isinf().any())

"""A batch run again in a given precision, without a step: whose fault a trip is, where it begins, what helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import Precision
from autotune_amp.numerics.modules import modules_by_name, unwrap
from autotune_amp.numerics.nonfinite import Health, Recorder, bad_parameters, health
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import player_of, set_player
from autotune_amp.precision.mode import ambient, autocast, can_be_pinned, is_cast, override, pin_fp32, set_flags
from autotune_amp.runtime.gradient_check import NEGLIGIBLE

_MAX_PINNED_SHARE = 0.05  # of the modules; one module may always be pinned
_MAX_PIN_ROUNDS = 3


@dataclass(frozen=True)
class Finding:
    """What reruns of the batch have shown; the same on every rank.

    `reproduced`: the batch is not finite again, or an earlier pass of its window may be what was not.
    `culprit` says for people where the non-finite numbers begin. `finite_in` are those of the precisions asked for in
    which loss and gradients are finite, `not_run` those that could not be: out of memory, or the loop keeps its own.
    With `pins` kept in fp32 the current precision is finite. `is_precision`: the batch is finite in a safer precision,
    or with the pins; None where that could not be found out.
    """

    reproduced: bool
    finite_in: tuple[Precision, ...]
    culprit: str | None
    pins: tuple[str, ...]
    num_passes: int
    not_run: tuple[Precision, ...] = ()
    is_precision: bool | None = None


@dataclass(frozen=True)
class ProbeResult:
    """How a batch fares in a precision. `forward_max` is this rank's largest magnitude put out by a module."""

    is_finite: bool
    forward_max: float


def diagnose(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    current: Precision,
    lower: Sequence[Precision],
    loss_scale: float,
    device_type: str,
    already_pinned: bool,
    agree: Callable[[bool], bool] = lambda flag: flag,
    gather: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda names: names,
    can_run_fp32: bool = True,
    is_whole: bool = True,
) -> Finding:
    """Rerun the batch in `current`, in fp32, with modules pinned and in each of `lower`; no step is taken.

    `rerun` computes the loss of the batch. `lower` is ordered, first choice first. `agree` is whether a flag is set on
    any rank, `gather` the names from all ranks. `is_whole`: the batch is all of the window that failed, not the last of
    several passes, which tells nothing of the others if it is finite. Raises `InvalidRequestError` where the closure
    fails.
    """
    rerunner = Rerunner(model, rerun, current=current, device_type=device_type, agree=agree)
    first = rerunner.run(current, loss_scale)
    if not first.fits:
        return Finding(True, (), None, (), rerunner.num_passes, not_run=(current,))
    if first.is_finite:
        culprit = None if is_whole else "an earlier pass of the window than the one run again"
        return Finding(not is_whole, (), culprit, (), rerunner.num_passes)

    passes = {current: first}

    def run_once(precision: Precision) -> Pass:
        if precision not in passes:
            passes[precision] = rerunner.run(precision, 1.0)
        return passes[precision]

    # The safest precision that can be run decides whether precision is at fault at all. Without any, pins may show it.
    fp32: tuple[Precision, ...] = ("fp32",) if can_run_fp32 else ()
    decider = next((done for precision in (*fp32, *reversed(lower)) if (done := run_once(precision)).fits), None)
    pins: tuple[str, ...] = ()
    finite_in: tuple[Precision, ...] = ()
    if decider is not None and not decider.is_finite:
        culprit = _culprit(model, decider, gather)
    else:
        healthy = None if decider is None else decider.recorder
        culprit = _first(gather(_as_names(first.recorder.damaged(healthy)[1])))
        if not already_pinned:
            pins = _find_pins(rerunner, first, healthy, current, loss_scale, gather)
        finite_in = tuple(precision for precision in lower if run_once(precision).is_finite)
    not_run = tuple(precision for precision, done in passes.items() if not done.fits)
    is_precision = True if pins else None if decider is None else decider.is_finite
    return Finding(True, finite_in, culprit, pins, rerunner.num_passes, not_run, is_precision)


def _culprit(model: nn.Module, bad: Pass, gather: Callable[[tuple[str, ...]], tuple[str, ...]]) -> str | None:
    """Where a pass went bad that precision has no part in."""
    if parameters := gather(bad_parameters(model)):
        return f"parameter {parameters[0]}"
    mine = bad.recorder.backward_culprit() if bad.is_loss_finite else bad.recorder.forward_culprit()
    return _first(gather(_as_names(mine)))


def _first(names: tuple[str, ...]) -> str | None:
    return names[0] if names else None


def _as_names(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _find_pins(
    rerunner: Rerunner,
    bad: Pass,
    healthy: Recorder | None,
    current: Precision,
    loss_scale: float,
    gather: Callable[[tuple[str, ...]], tuple[str, ...]],
) -> tuple[str, ...]:
    """Modules that make `current` finite once they run in fp32; () where that takes too many, or does not help."""
    limit = max(1, int(_MAX_PINNED_SHARE * len(rerunner.modules)))
    pins: tuple[str, ...] = ()
    for _ in range(_MAX_PIN_ROUNDS):
        damaged = (name for name in bad.recorder.damaged(healthy)[0] if name and can_be_pinned(rerunner.modules[name]))
        wanted = tuple(dict.fromkeys((*pins, *gather(tuple(damaged)))))
        if wanted == pins or len(wanted) > limit:
            return ()
        pins = wanted
        bad = rerunner.run(current, loss_scale, pins)
        if bad.is_finite:
            return pins
        if not bad.fits:
            return ()
    return ()


def probe(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    precision: Precision,
    loss_scale: float,
    device_type: str,
    agree: Callable[[bool], bool] = lambda flag: flag,
) -> ProbeResult:
    """Run the batch in `precision` at `loss_scale`, without a step, before promoting to it."""
    done = Rerunner(model, rerun, current=precision, device_type=device_type, agree=agree).run(precision, loss_scale)
    return ProbeResult(done.is_finite, done.recorder.forward_max)


def flushed_share(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    loss_scale: float,
    device_type: str,
    agree: Callable[[bool], bool] = lambda flag: flag,
) -> float:
    """The share of the gradient's entries that matter which fp16 rounds to zero at `loss_scale`, from a pass in fp32.

    What is at most 2^-25 after scaling is nearer to 0 than to the smallest fp16 number, 2^-24. 0.0 where the pass is
    not finite or does not fit: then there is nothing to tell.
    """
    rerunner = Rerunner(model, rerun, current="fp16", device_type=device_type, agree=agree)
    done = rerunner.run("fp32", 1.0, keeps_gradients=True)
    if not done.is_finite:
        return 0.0
    magnitudes = [gradient.abs() for gradient in done.gradients if gradient.numel()]
    largest = max((float(magnitude.max()) for magnitude in magnitudes), default=0.0)
    matters = [magnitude[magnitude > largest * NEGLIGIBLE] for magnitude in magnitudes]
    num_flushed = sum(int((magnitude <= 2.0**-25 / loss_scale).sum()) for magnitude in matters)
    return num_flushed / max(1, sum(magnitude.numel() for magnitude in matters))


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass. `is_finite` and `fits` hold for all ranks; the rest is this rank's own."""

    is_finite: bool
    fits: bool  # False: out of memory, or it ran in another precision after all; nothing else is known
    is_loss_finite: bool
    recorder: Recorder
    gradients: tuple[Tensor, ...] = ()  # of the parameters, still scaled; only where they were asked for


class Rerunner:
    """Repeats the batch that `rerun` computes the loss of.

    `agree` is whether a flag is set on any rank. It is asked equally often on every rank, whatever happens there.
    """

    def __init__(
        self,
        model: nn.Module,
        rerun: Callable[[], Tensor],
        *,
        current: Precision,
        device_type: str,
        agree: Callable[[bool], bool],
    ) -> None:
        self.modules = modules_by_name(model)
        self.num_passes = 0
        self._gradients: tuple[Tensor, ...] = ()
        self._model = model
        self._rerun = rerun
        self._current = current
        self._device_type = device_type
        self._agree = agree

    def run(
        self, precision: Precision, loss_scale: float, pins: Sequence[str] = (), *, keeps_gradients: bool = False
    ) -> Pass:
        """One pass in `precision` with the modules named in `pins` in fp32 beside those that are already.

        Raises `InvalidRequestError`, on every rank, where the closure fails on any.
        """
        self.num_passes += 1
        recorder = Recorder(self.modules)
        has_run_out, error = False, None
        self._seen: set[Precision] = set()
        is_loss_finite = is_finite = False
        try:
            with self._as_before(), self._forced(precision, pins):
                is_loss_finite, is_finite = self._forward_and_backward(recorder, precision, loss_scale)
        except torch.OutOfMemoryError:
            has_run_out = True
        except Exception as raised:  # whatever the user's closure raises: passed on below, once all ranks know
            error = raised
        if self._agree(error is not None):
            if isinstance(error, InvalidRequestError):
                raise error
            what = "raised on another rank" if error is None else f"raised {type(error).__name__}: {error}"
            raise InvalidRequestError(
                f"The rerun closure {what}, in {precision}.",
                "Give attach() a closure that computes the loss of the batch just trained on, forward pass only.",
            ) from error
        # A method other than forward, or an autocast inside: the override did not reach it. Layers in fp32 do no harm.
        is_elsewhere = precision != self._current and not self._seen <= {precision, "fp32"}
        if self._agree(has_run_out or is_elsewhere):
            return Pass(is_finite=False, fits=False, is_loss_finite=False, recorder=recorder)
        is_finite = not self._agree(not is_finite)
        gradients, self._gradients = self._gradients if keeps_gradients else (), ()
        return Pass(
            is_finite=is_finite, fits=True, is_loss_finite=is_loss_finite, recorder=recorder, gradients=gradients
        )

    def _no_autocast(self) -> torch.autocast:
        """Off, not just absent: the caller may be inside an autocast. No cache: it may hold casts of that."""
        return torch.autocast(self._device_type, enabled=False, cache_enabled=False)

    def _forward_and_backward(self, recorder: Recorder, precision: Precision, loss_scale: float) -> tuple[bool, bool]:
        with torch.enable_grad():
            seen = self._watching_precision()
            with self._no_autocast(), autocast(precision, self._device_type), recorder.watching_forward(), seen:
                loss = self._rerun()
            _require_a_loss(loss)
            # As GradScaler scales: by a tensor in fp32, so that a loss in fp16 gets its gradient in fp16.
            scaled = loss * torch.full((), loss_scale, device=loss.device)
        with self._no_autocast(), ExitStack() as gradients:
            leaves = recorder.watch_backward(scaled)
            for leaf in leaves:
                _set_aside(leaf, gradients)
            # Also those of a nested backward pass, which the graph of the loss does not show.
            parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            for parameter in parameters:
                _set_aside(parameter, gradients)
            torch.autograd.backward(scaled)  # of a non-finite loss too: other ranks may be waiting in theirs
            is_loss_finite = health(loss) is Health.FINITE
            grads = [tensor.grad for tensor in (*leaves, *parameters)]
            self._gradients = tuple(p.grad for p in parameters if p.grad is not None)
            return is_loss_finite, is_loss_finite and health(grads) is Health.FINITE

    @contextmanager
    def _watching_precision(self) -> Iterator[None]:
        def note(*_: object) -> None:
            self._seen.add(ambient(self._device_type))

        handles = [module.register_forward_pre_hook(note) for module in self.modules.values() if is_cast(module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _forced(self, precision: Precision, pins: Sequence[str]) -> Iterator[None]:
        root = unwrap(self._model)
        pinned = [self.modules[name] for name in pins if name in self.modules]  # with pipelines a rank has but some
        with ExitStack() as stack:
            for module in (root, *pinned):
                stack.callback(set_player, module, player_of(module))
            if precision != self._current:
                stack.callback(torch_state.apply, torch_state.capture())
                set_flags(precision)
            override(root, precision, self._device_type)
            for module in pinned:
                pin_fp32(module, self._device_type)
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


def _require_a_loss(loss: object) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    if isinstance(loss, Tensor):
        given = f"a tensor of shape {tuple(loss.shape)} " + ("without a gradient" if loss.grad_fn is None else "")
    else:
        given = f"a {type(loss).__name__}"
    raise InvalidRequestError(
        f"The rerun closure returned {given.strip()}; it must return the loss, one number with a gradient.",
        "Return the loss as the training loop computes it, before backward() and without item() or detach().",
    )


def _set_aside(leaf: Tensor, stack: ExitStack) -> None:
    stack.callback(setattr, leaf, "grad", leaf.grad)
    leaf.grad = None


def _keep_buffers(module: nn.Module, stack: ExitStack) -> None:
    kept = [
        (name, buffer, None if buffer is None else buffer.detach().clone()) for name, buffer in module._buffers.items()
    ]

    def restore() -> None:
        module._buffers.clear()
        for name, buffer, values in kept:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.copy_(values)

    stack.callback(torch.no_grad()(restore))

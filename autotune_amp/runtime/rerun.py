"""Runs a batch again in a given precision, takes no step, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.modules import modules_by_name, unwrap
from autotune_amp.numerics.nonfinite import Health, Recorder, health
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import player_of, set_player
from autotune_amp.precision.mode import ambient, autocast, is_cast, override, pin_fp32, set_flags


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

"""Accelerate: an Accelerator whose scaler is the PrecisionController, and Accelerate's settings from a config."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    AutocastKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    convert_to_fp32,
)
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, DemotedError
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.accelerate_config import accelerate_config
from autotune_amp.integrations.accelerate_windows import FetchedBatches
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.status import MoveRecord

__all__ = ["AutotuneAccelerator", "accelerate_config", "grad_scaler_kwargs"]

Batch = TypeVar("Batch")

# The rest scales losses, casts models or makes optimizers by itself.
_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


class AutotuneAccelerator(Accelerator):  # type: ignore[misc] # accelerate ships no types
    """An ``accelerate.Accelerator`` that trains in the config's precision and steps it down when that fails.

    It is used as the original: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``, ``save_state`` and
    ``load_state`` (which goes on at the rung that was saved). The forward pass of every prepared model runs under the
    controller's autocast, on a CPU too, where Accelerate's own fp16 has neither autocast nor scaler. Outputs come back
    in fp32, as Accelerate has it; inside ``with accelerator.autocast():`` a training pass leaves them as they are, and
    the loss runs under the autocast too: that is what a search measures. `controller` is the PrecisionController; the
    first prepared model with anything to train is attached to it. After ``free_memory`` or ``clear`` it is another, for
    the models that are prepared next.

    config: precision, fallbacks, loss scale and accumulation steps, or the recommendation that holds them. The batch
        size is the DataLoader's.
    rerun: recomputes the loss of the latest batch as the loop does, inside ``autocast()`` if that is; see
        `PrecisionController.attach`. It may name objects that are made later.
    controller_options: more arguments for the `PrecisionController`: ``guard``, ``halt``, ``on_demotion``, ...
    others: arguments for the ``Accelerator``.

    Raises `InvalidRequestError` for arguments that contradict the config, and where DeepSpeed, FSDP, Megatron-LM or XLA
    would scale and cast by themselves. Raises `DemotedError`, with the config to start again with, where a fallback was
    measured with another batch size or accumulation and the loop does not use `windows`, which takes them up: at the
    move, and at the first training pass after `load_state` has come back to that fallback.
    """

    def __init__(
        self,
        config: AmpConfig | Recommendation,
        *,
        rerun: Callable[[], Tensor] | None = None,
        controller_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._own_config = config if isinstance(config, AmpConfig) else config.config
        plugin = _accumulation(self._own_config, others)
        _refuse_contradictions(others)
        # Explicitly: what `accelerate launch` put into the environment would else be taken.
        super().__init__(mixed_precision="no", gradient_accumulation_plugin=plugin, **others)
        if self.distributed_type not in _KNOWN:
            raise InvalidRequestError(
                f"AutotuneAccelerator cannot train under {self.distributed_type.value}, which casts and scales itself.",
                "Use it on one device or with DistributedDataParallel; for DeepSpeed write its JSON with "
                "`autotune-amp export --to deepspeed`.",
            )
        self._controller_options = dict(controller_options or {})
        self._rerun = rerun
        self._holds_loss = False  # in `autocast`
        self._is_last: bool | None = None  # pass of the window in `windows`; None outside of it
        self._fetched: FetchedBatches | None = None  # in `windows`
        self._begin()

    def _begin(self) -> None:
        self.controller = PrecisionController(self._own_config, self.device, **self._controller_options)
        self.controller.on_move(self._stop_where_batches_change)
        self.scaler = self.controller
        self._is_attached = False
        self._turns = _Turns(self)

    def free_memory(self, *objects: Any) -> Any:
        """As the original's; the model is no longer pinned or watched, and what is prepared next begins anew."""
        self.controller.detach()
        self._begin()
        return super().free_memory(*objects)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """As the original's; the model's forward follows the rung from here on."""
        if not getattr(model, "_is_accelerate_prepared", False):
            # As Accelerate wraps it, so that ``unwrap_model(keep_fp32_wrapper=False)`` finds its way back.
            changed: Any = model
            changed._original_forward = forward = model.forward
            if isinstance(forward, MethodType):
                changed.forward = MethodType(self._in_rung(forward.__func__), model)
            else:
                changed.forward = self._in_rung(forward)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        is_trained = not evaluation_mode and any(parameter.requires_grad for parameter in prepared.parameters())
        if is_trained and not self._is_attached:
            self.controller.attach(prepared, self._rerun)
            self._is_attached = True
        return prepared

    def _in_rung(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._rung():
                outputs = function(*args, **kwargs)
            return outputs if self._holds_loss and torch.is_grad_enabled() else convert_to_fp32(outputs)

        return forward

    def _rung(self) -> AbstractContextManager[object]:
        if not torch.is_grad_enabled():
            return self.controller.validation()
        self._turns.end()
        plan = self.controller.config
        self._refuse_other_batches(plan, f"The run goes on in {plan.precision}, its fallback")
        return self.controller.autocast()

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """The current rung's autocast; none with a handler that says ``enabled=False``."""
        is_off = autocast_handler is not None and not autocast_handler.enabled
        with torch.autocast(self.device.type, enabled=False) if is_off else self._rung():
            before, self._holds_loss = self._holds_loss, not is_off
            try:
                yield
            finally:
                self._holds_loss = before

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As the original's; the controller takes the steps."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.scaler = self._turns
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss, divided by the accumulation steps, and run the backward pass."""
        self._turns.end()
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of these optimizers, or all; a second time in the same window does nothing.

        Raises `InvalidRequestError` inside an accumulation window, whose gradients are not complete.
        """
        if not self.sync_gradients:
            raise InvalidRequestError(
                "Gradients are to be unscaled or clipped in the middle of an accumulation window.",
                "Write `if accelerator.sync_gradients:` before it.",
            )
        given = self._optimizers if optimizer is None else optimizer
        for one in given if isinstance(given, tuple | list) else [given]:
            self._turns.unscale_(one)

    def windows(
        self, loader: Iterable[Batch], weigh: Callable[[Batch], float | torch.Tensor] | None = None
    ) -> Iterator[Batch]:
        """The passes of a prepared loader, in the batch size and accumulation of the current rung.

        Use ``accumulate`` inside as ever, and ``gather_for_metrics``. `weigh` is as in the controller's `windows`:
        multiply the loss by ``controller.window_share`` and, since Accelerate divides by them, by
        ``gradient_accumulation_steps``. A fallback with a smaller batch splits the
        loader's batches; raises `InvalidRequestError` where they cannot be split.
        """
        self._fetched = fetched = FetchedBatches(self.gradient_state)
        try:
            for batch, is_last in self.controller.windows(fetched.of(loader), weigh):
                self._is_last = is_last
                with fetched.turn(batch):
                    yield batch
        finally:
            self._is_last = self._fetched = None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As the original's; in `windows` too without the samples that only fill up the last batch."""
        gathered = super().gather_for_metrics(input_data, use_gather_object)
        return self._fetched.without_filler(gathered, use_gather_object) if self._fetched else gathered

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """As the original's; inside `windows` the gradients are complete at the end of the rung's window."""
        with ExitStack() as stack:
            if self._is_last is None:
                stack.enter_context(super().accumulate(*models))
            else:
                self.sync_gradients = self._is_last
                for model in () if self._is_last else models:
                    stack.enter_context(self.no_sync(model))
            yield

    @property
    def gradient_accumulation_steps(self) -> int:
        """What `backward` divides the loss by: inside `windows` the passes of the current window."""
        return self.controller.window_size if self._is_last is not None else int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    def _stop_where_batches_change(self, record: MoveRecord) -> None:
        self._refuse_other_batches(
            record.config, f"The precision went from {record.before} to {record.after}: {record.reason}"
        )

    def _refuse_other_batches(self, plan: AmpConfig, what: str) -> None:
        own = self._own_config
        is_same = (plan.batch_size, plan.accumulation_steps) == (own.batch_size, own.accumulation_steps)
        if is_same or self._is_last is not None:
            return
        raise DemotedError(
            f"{what}. It was measured with batch size {plan.batch_size} and {plan.accumulation_steps} accumulation "
            f"steps, not {own.batch_size} and {own.accumulation_steps}, which the loop takes.",
            "Loop over accelerator.windows(loader), which splits them, or save_state() and start again with the "
            "error's config.",
            plan,
        )

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's, the controller's state in its ``scaler.pt``."""
        self._turns.end()
        return super().save_state(*args, **kwargs)


class _Turns:
    """What prepared optimizers take for their scaler: the window ends once all have stepped, not after the first.

    Accelerate updates its scaler after each step: the scale, and here the precision, would change between two
    optimizers whose gradients come from one backward pass. Where not all take part, the next pass ends the window.
    """

    def __init__(self, accelerator: AutotuneAccelerator) -> None:
        self._accelerator = accelerator
        self._stepped: set[int] = set()
        self._unscaled: set[int] = set()

    def unscale_(self, optimizer: Any) -> None:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if id(optimizer) not in self._unscaled:
            self._accelerator.controller.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Take the step unless it is to be skipped."""
        if closure is not None:
            raise InvalidRequestError(
                "An optimizer's step was given a closure, whose gradients nobody would check.",
                "Call backward() before step(), and step() without a closure.",
            )
        self._accelerator.controller.step(optimizer)
        self._stepped.add(id(optimizer))

    def update(self) -> None:
        """Called after every step."""
        if len(self._stepped) >= len(self._accelerator._optimizers):
            self.end()

    def end(self) -> None:
        """End the window if an optimizer has stepped in it."""
        if self._stepped:
            self._stepped.clear()
            self._unscaled.clear()
            self._accelerator.controller.update()


def grad_scaler_kwargs(config: AmpConfig) -> GradScalerKwargs:
    """What the scaler of a plain ``Accelerator(kwargs_handlers=[...])`` is to be made with; not enabled without fp16.

    It has no place for `hysteresis`, `min_scale` and `max_scale`, and on a CPU Accelerate makes no scaler at all:
    `AutotuneAccelerator` has both.
    """
    scale = config.loss_scale
    if scale is None:
        return GradScalerKwargs(enabled=False)
    return GradScalerKwargs(
        init_scale=scale.init_scale,
        growth_factor=scale.growth_factor,
        backoff_factor=scale.backoff_factor,
        growth_interval=scale.growth_interval,
    )


def _accumulation(config: AmpConfig, others: dict[str, Any]) -> GradientAccumulationPlugin:
    """The plugin that says how many passes make a step; taken out of `others` where one is given there."""
    plugin = others.pop("gradient_accumulation_plugin", None)
    steps = others.pop("gradient_accumulation_steps", None) if plugin is None else plugin.num_steps
    if steps not in (None, config.accumulation_steps):
        raise InvalidRequestError(
            f"The accelerator is to accumulate {steps} passes, the config {config.accumulation_steps}.",
            "Leave gradient_accumulation_steps out: it is taken from the config.",
        )
    return plugin or GradientAccumulationPlugin(num_steps=config.accumulation_steps)


def _refuse_contradictions(others: Mapping[str, Any]) -> None:
    mixed_precision = others.get("mixed_precision")
    if mixed_precision is not None:
        raise InvalidRequestError(
            f"mixed_precision={mixed_precision!r} contradicts the controller, which sets the precision.",
            "Leave mixed_precision out: the config names the precision.",
        )
    for handler in others.get("kwargs_handlers") or ():
        if isinstance(handler, GradScalerKwargs | AutocastKwargs):
            raise InvalidRequestError(
                f"{type(handler).__name__} was given to an accelerator whose controller scales and casts.",
                "Leave it out and put a loss scale into the config.",
            )

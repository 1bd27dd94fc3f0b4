"""Accelerate: an Accelerator whose scaler is the PrecisionController, and Accelerate's settings from a config.

`AutotuneAccelerator` is an Accelerator whose autocast and scaler are the controller's; `windows` follows the batch
size of a fallback.

```python
import torch
from torch import nn
from autotune_amp import AmpConfig, LossScale
from autotune_amp.integrations.accelerate import AutotuneAccelerator

dataset = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# Or the recommendation itself.
config = AmpConfig(
    precision="fp16", batch_size=32, accumulation_steps=2, loss_scale=LossScale(), fallback=["bf16", "fp32"]
)
loader = torch.utils.data.DataLoader(dataset, batch_size=config.batch_size, shuffle=True)

def compute_loss():
    inputs, targets = batch
    with accelerator.autocast():  # the loss too, as it was measured
        return nn.functional.cross_entropy(model(inputs), targets)

accelerator = AutotuneAccelerator(config, cpu=True, rerun=compute_loss)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in accelerator.windows(loader):
    with accelerator.accumulate(model):
        accelerator.backward(compute_loss())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("checkpoint")  # load_state resumes at its rung
print(accelerator.controller.status().precision)
```
"""

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

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.bridge import Window, config_of, refuse_other, refuse_other_window
from autotune_amp.integrations.documents import accelerate_config
from autotune_amp.integrations.export import SCALER_ARGUMENTS
from autotune_amp.runtime.controller import PrecisionController

__all__ = ["AutotuneAccelerator", "accelerate_config", "grad_scaler_kwargs"]

Batch = TypeVar("Batch")

# Other types scale losses, cast models or make optimizers themselves.
_KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


class AutotuneAccelerator(Accelerator):  # type: ignore[misc] # accelerate ships no types
    """Accelerator that trains in the config's precision and steps it down when that fails.

    It is used like ``accelerate.Accelerator``: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``,
    ``save_state`` and ``load_state`` (which continues at the saved rung). The forward pass of every prepared model runs
    under the controller's autocast, on a CPU too, where Accelerate's own fp16 has neither autocast nor scaler. Outputs
    are returned in fp32, as in Accelerate; inside ``with accelerator.autocast():`` a training pass leaves them as they
    are, and the loss runs under the autocast too: that is how a search measures. `controller` is the
    PrecisionController; the first prepared model with trainable parameters is attached to it. After ``free_memory`` or
    ``clear`` there is a new controller, for the models that are prepared next.

    config: precision, fallbacks, loss scale and accumulation steps, or the recommendation that holds them. The batch
        size is the DataLoader's.
    rerun: recomputes the loss of the latest batch as the loop does, inside ``autocast()`` if the loop uses it; see
        `PrecisionController.attach`. It may refer to objects that are made later.
    controller_options: more arguments for the `PrecisionController`: ``guard``, ``halt``, ``on_demotion``, ...
    others: arguments for the ``Accelerator``.

    Raises `InvalidRequestError` for arguments that contradict the config, and under DeepSpeed, FSDP, Megatron-LM or
    XLA, which scale and cast themselves. Raises `DemotedError`, with the config to start again with, if a fallback was
    measured with another batch size or accumulation and the loop does not use `windows`, which follows them: at the
    move, or at the first training pass after `load_state` returned to that fallback.
    """

    def __init__(
        self,
        config: AmpConfig | Recommendation,
        *,
        rerun: Callable[[], Tensor] | None = None,
        controller_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._own_config = config_of(config)
        plugin = others.pop("gradient_accumulation_plugin", None)
        steps = others.pop("gradient_accumulation_steps", None) if plugin is None else plugin.num_steps
        refuse_other("gradient_accumulation_steps", steps, self._own_config.accumulation_steps)
        plugin = plugin or GradientAccumulationPlugin(num_steps=self._own_config.accumulation_steps)
        refuse_other("mixed_precision", others.pop("mixed_precision", None), self._own_config.autocast_precision)
        for handler in others.get("kwargs_handlers") or ():
            if isinstance(handler, GradScalerKwargs | AutocastKwargs):
                raise InvalidRequestError(
                    f"{type(handler).__name__} was given to an accelerator whose controller scales and casts.",
                    "Leave it out and put a loss scale into the config.",
                )
        # Given explicitly, since otherwise the environment set by `accelerate launch` would count.
        super().__init__(mixed_precision="no", gradient_accumulation_plugin=plugin, **others)
        if self.distributed_type not in _KNOWN:
            raise InvalidRequestError(
                f"AutotuneAccelerator cannot train under {self.distributed_type.value}, which casts and scales itself.",
                "Use it on one device or with DistributedDataParallel; for DeepSpeed write its JSON with "
                "`autotune-amp export --to deepspeed`.",
            )
        self._controller_options = dict(controller_options or {})
        self._rerun = rerun
        self._holds_loss = False  # while inside `autocast`
        self._is_last: bool | None = None  # whether the pass is its window's last, in `windows`; None outside
        self._windowed: Iterable[Any] | None = None  # the loader in `windows`
        self._begin()

    def _begin(self) -> None:
        self.controller = PrecisionController(self._own_config, self.device, **self._controller_options)
        self.controller.on_move(lambda _: self._refuse_other_batches())
        self.scaler = self.controller
        self._is_attached = False
        self._window = _Scaler(self)

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as in Accelerator. The model is detached, and models prepared next start anew."""
        self.controller.detach()
        self._begin()
        return super().free_memory(*objects)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as in Accelerator. Its forward follows the rung from then on."""
        if not getattr(model, "_is_accelerate_prepared", False):
            # Wrapped as Accelerate does, so that ``unwrap_model(keep_fp32_wrapper=False)`` can undo it.
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
        self._window.end()
        self._refuse_other_batches()
        return self.controller.autocast()

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run under the current rung's autocast; without autocast for a handler with ``enabled=False``."""
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
        """Prepare an optimizer as in Accelerator. The controller takes its steps."""
        prepared = super().prepare_optimizer(optimizer, device_placement)
        prepared.scaler = self._window
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Scale the loss, divide it by the accumulation steps, and run the backward pass."""
        self._window.end()
        super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of these optimizers, or of all; a second call in the same window does nothing.

        Raises `InvalidRequestError` inside an accumulation window, whose gradients are incomplete.
        """
        if not self.sync_gradients:
            raise InvalidRequestError(
                "Gradients are to be unscaled or clipped in the middle of an accumulation window.",
                "Write `if accelerator.sync_gradients:` before it.",
            )
        for one in plain_optimizers(self._optimizers if optimizer is None else optimizer):
            self._window.unscale_(one)

    def windows(
        self, loader: Iterable[Batch], weigh: Callable[[Batch], float | torch.Tensor] | None = None
    ) -> Iterator[Batch]:
        """Yield the passes of a prepared loader, at the batch size and accumulation steps of the current rung.

        Use ``accumulate`` inside as usual. `weigh` is as in the controller's `windows`: multiply the loss by
        ``controller.window_share`` and by ``gradient_accumulation_steps``, since Accelerate divides by them. A fallback
        with a smaller batch size splits the loader's batches; raises `InvalidRequestError` if they cannot be split.
        """
        self._windowed = loader
        try:
            for batch, is_last in self.controller.windows(loader, weigh):
                self._is_last = is_last
                yield batch
        finally:
            self._is_last = self._windowed = None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as in Accelerator, also for an evaluation loop inside `windows`.

        Raises `InvalidRequestError` for the loader in `windows`: its batches are prefetched, and Accelerate only knows
        which samples pad the latest one.
        """
        if self._is_last is None or self.gradient_state.active_dataloader not in (None, self._windowed):
            return super().gather_for_metrics(input_data, use_gather_object)
        raise InvalidRequestError(
            "gather_for_metrics was asked for a batch of accelerator.windows(loader), and cannot tell the samples that "
            "only fill up the last batch.",
            "Call accelerator.gather(), or gather_for_metrics in an evaluation loop of its own.",
        )

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Accumulate as in Accelerator; inside `windows` the gradients are complete at the end of the rung's window."""
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
        """Return the divisor of the loss in `backward`: inside `windows` the number of passes of the current window."""
        return self.controller.window_size if self._is_last is not None else int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    def _refuse_other_batches(self) -> None:
        if self._is_last is None:
            refuse_other_window(
                self.controller,
                self._own_config,
                "the loop takes the latter",
                "Loop over accelerator.windows(loader), which splits them, or save_state() and start again with the "
                "error's config.",
            )

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the state as in Accelerator, with the controller's state in its ``scaler.pt``."""
        self._window.end()
        return super().save_state(*args, **kwargs)


class _Scaler(Window):
    """Scaler of prepared optimizers. If not all of them step, the next pass ends the window."""

    def __init__(self, accelerator: AutotuneAccelerator) -> None:
        super().__init__(accelerator.controller)
        self._accelerator = accelerator

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless the step is to be skipped. Raises `InvalidRequestError` for a closure."""
        if any(given is not None for given in (*args, *kwargs.values())):
            raise InvalidRequestError(
                "An optimizer's step was given a closure, whose gradients nobody would check.",
                "Call backward() before step(), and step() without a closure.",
            )
        return super().step(optimizer)

    def update(self) -> None:
        """End the window if all optimizers have stepped; called after every step."""
        if self.num_stepped >= len(self._accelerator._optimizers):
            self.end()


def grad_scaler_kwargs(config: AmpConfig) -> GradScalerKwargs:
    """Return the scaler's arguments for a plain ``Accelerator(kwargs_handlers=[...])``; disabled without fp16.

    They cannot express `hysteresis`, `min_scale` and `max_scale`, and on a CPU Accelerate makes no scaler at all:
    `AutotuneAccelerator` supports both.
    """
    scale = config.loss_scale
    if scale is None:
        return GradScalerKwargs(enabled=False)
    return GradScalerKwargs(**{name: getattr(scale, name) for name in SCALER_ARGUMENTS})


def plain_optimizers(given: Any) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers without Accelerate's wrappers."""
    found = []
    for one in given if isinstance(given, tuple | list) else [given]:
        while isinstance(one, AcceleratedOptimizer):
            one = one.optimizer
        found.append(one)
    return found

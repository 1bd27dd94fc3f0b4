"""Accelerate: an Accelerator with the PrecisionController's autocast and scaler, and a launch file for a plain one.

`AutotuneAccelerator.windows` changes the batch size when the controller falls back to a precision with another one.

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
accelerator.save_state("checkpoint")  # load_state resumes in its precision
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
from autotune_amp.core.evidence import AUTOCAST_DTYPES
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.bridge import (
    AccumulationWindow,
    config_and_options,
    raise_if_argument_differs,
    raise_if_window_differs,
)
from autotune_amp.integrations.documents import accelerate_config
from autotune_amp.runtime.controller import PrecisionController

__all__ = ["AutotuneAccelerator", "accelerate_config"]

Batch = TypeVar("Batch")

# Accelerate itself scales losses, casts models or makes optimizers for all other types.
_SUPPORTED_TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)


class AutotuneAccelerator(Accelerator):  # type: ignore[misc] # accelerate ships no types
    """Accelerator that trains in the config's precision and steps it down when that fails.

    It is used like ``accelerate.Accelerator``: ``prepare``, ``accumulate``, ``backward``, ``clip_grad_norm_``,
    ``save_state`` and ``load_state`` (which continues in the saved precision). The forward pass of every prepared model
    runs under the controller's autocast, on a CPU too, where Accelerate's own fp16 has neither autocast nor scaler.
    Outputs are returned in fp32, as in Accelerate; inside ``with accelerator.autocast():`` a training pass keeps their
    dtype, and the loss runs under autocast too, as in the measurements of a search. `controller` is the
    PrecisionController; the first prepared model with trainable parameters is attached to it. After ``free_memory`` or
    ``clear`` there is a new controller, for the models that are prepared next.

    config: precision, fallbacks, loss scale and accumulation steps, or the recommendation that holds them. The batch
        size is the DataLoader's.
    rerun: recomputes the loss of the latest batch as the loop does, inside ``autocast()`` if the loop uses it; see
        `PrecisionController.attach`. It may use variables that are assigned after this call.
    controller_options: more arguments for the `PrecisionController`: ``guard``, ``halt``, ``on_demotion``, ...
    others: other arguments of ``Accelerator``.

    Raises `InvalidRequestError` for arguments that contradict the config, and under DeepSpeed, FSDP, Megatron-LM or
    XLA, which scale and cast themselves. Raises `DemotedError`, with the config to start again with, if a fallback was
    measured with another batch size or accumulation and the loop does not use `windows`: at the change
    of precision, or at the first training pass after `load_state` returned to that fallback.
    """

    def __init__(
        self,
        config: AmpConfig | Recommendation,
        *,
        rerun: Callable[[], Tensor] | None = None,
        controller_options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        self._own_config, options = config_and_options(config)
        plugin = others.pop("gradient_accumulation_plugin", None)
        steps = others.pop("gradient_accumulation_steps", None) if plugin is None else plugin.num_steps
        raise_if_argument_differs("gradient_accumulation_steps", steps, self._own_config.accumulation_steps)
        plugin = plugin or GradientAccumulationPlugin(num_steps=self._own_config.accumulation_steps)
        own_precision = self._own_config.autocast_precision if self._own_config.precision in AUTOCAST_DTYPES else "no"
        raise_if_argument_differs("mixed_precision", others.pop("mixed_precision", None), own_precision)
        for handler in others.get("kwargs_handlers") or ():
            if isinstance(handler, GradScalerKwargs | AutocastKwargs):
                raise InvalidRequestError(
                    f"AutotuneAccelerator takes no {type(handler).__name__}: its controller scales and casts.",
                    "Leave it out, and set the loss scale in the config.",
                )
        # Explicit, since Accelerate otherwise reads the environment that `accelerate launch` sets.
        super().__init__(mixed_precision="no", gradient_accumulation_plugin=plugin, **others)
        if self.distributed_type not in _SUPPORTED_TYPES:
            raise InvalidRequestError(
                f"AutotuneAccelerator cannot train under {self.distributed_type.value}, which casts and scales itself.",
                "Use it on one device or with DistributedDataParallel; for DeepSpeed write its JSON with "
                "`autotune-amp export --to deepspeed`.",
            )
        self._controller_options = options | dict(controller_options or {})
        self._rerun = rerun
        self._is_loss_in_autocast = False  # whether the running code is inside `autocast`
        self._is_last_pass: bool | None = None  # whether the pass is its window's last, in `windows`; None outside
        self._window_loader: Iterable[Any] | None = None  # the loader in `windows`
        self._make_controller()

    def _make_controller(self) -> None:
        self.controller = PrecisionController(self._own_config, self.device, **self._controller_options)
        self.controller.close()  # until a model is attached: before, SIGTERM is not the controller's
        self.controller.on_move(lambda _: self._raise_if_batches_differ())
        self.scaler = self.controller
        self._is_attached = False
        self._window = _AcceleratorWindow(self)

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as in Accelerator, detach the model, and make a new controller for models prepared next."""
        self.controller.detach()
        self._make_controller()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End the training as in Accelerator, and the controller's reports and its handling of SIGTERM."""
        self.controller.close()
        super().end_training()

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare a model as in Accelerator. Its forward then runs under the current precision's autocast."""
        if not getattr(model, "_is_accelerate_prepared", False):
            # As in Accelerate, so that ``unwrap_model(keep_fp32_wrapper=False)`` restores the forward.
            patched: Any = model
            patched._original_forward = forward = model.forward
            if isinstance(forward, MethodType):
                patched.forward = MethodType(self._under_autocast(forward.__func__), model)
            else:
                patched.forward = self._under_autocast(forward)
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode)
        is_trained = not evaluation_mode and any(parameter.requires_grad for parameter in prepared.parameters())
        if is_trained and not self._is_attached:
            self.controller.attach(prepared, self._rerun)
            self.controller.open()
            self._is_attached = True
        return prepared

    def _under_autocast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._autocast_context():
                outputs = function(*args, **kwargs)
            return outputs if self._is_loss_in_autocast and torch.is_grad_enabled() else convert_to_fp32(outputs)

        return forward

    def _autocast_context(self) -> AbstractContextManager[object]:
        if not torch.is_grad_enabled():
            return self.controller.validation()
        self._window.end()
        self._raise_if_batches_differ()
        return self.controller.autocast()

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Run under the current precision's autocast, or without autocast for a handler with ``enabled=False``."""
        is_disabled = autocast_handler is not None and not autocast_handler.enabled
        with torch.autocast(self.device.type, enabled=False) if is_disabled else self._autocast_context():
            was_loss_in_autocast, self._is_loss_in_autocast = self._is_loss_in_autocast, not is_disabled
            try:
                yield
            finally:
                self._is_loss_in_autocast = was_loss_in_autocast

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer as in Accelerator. Its step is skipped if its gradients are not finite."""
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
                "Gradients cannot be unscaled or clipped before the last pass of an accumulation window.",
                "Write `if accelerator.sync_gradients:` before it.",
            )
        for plain_optimizer in unwrap_optimizers(self._optimizers if optimizer is None else optimizer):
            self._window.unscale_(plain_optimizer)

    def windows(
        self, loader: Iterable[Batch], weigh: Callable[[Batch], float | torch.Tensor] | None = None
    ) -> Iterator[Batch]:
        """Yield the batches of a prepared loader, at the batch size and accumulation steps of the current precision.

        Use ``accumulate`` inside as usual. `weigh` is as in the controller's `windows`: multiply the loss by
        ``controller.window_share`` and by ``gradient_accumulation_steps``, since Accelerate divides by them. A fallback
        with a smaller batch size splits the loader's batches; raises `InvalidRequestError` if they cannot be split.
        """
        self._window_loader = loader
        try:
            for batch, is_last in self.controller.windows(loader, weigh):
                self._is_last_pass = is_last
                yield batch
        finally:
            self._is_last_pass = self._window_loader = None

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as in Accelerator, also for an evaluation loop inside `windows`.

        Raises `InvalidRequestError` for the loader in `windows`: its batches are prefetched, and Accelerate only knows
        which samples pad the latest one.
        """
        if self._is_last_pass is None or self.gradient_state.active_dataloader not in (None, self._window_loader):
            return super().gather_for_metrics(input_data, use_gather_object)
        raise InvalidRequestError(
            "gather_for_metrics cannot gather a batch of accelerator.windows(loader): it does not know which samples "
            "pad the last batch.",
            "Call accelerator.gather(), or gather_for_metrics in an evaluation loop of its own.",
        )

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Accumulate as in Accelerator; inside `windows`, synchronize gradients in the last pass of a window only."""
        with ExitStack() as stack:
            if self._is_last_pass is None:
                stack.enter_context(super().accumulate(*models))
            else:
                self.sync_gradients = self._is_last_pass
                for model in () if self._is_last_pass else models:
                    stack.enter_context(self.no_sync(model))
            yield

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the divisor of the loss in `backward`: inside `windows` the number of passes of the current window."""
        return self.controller.window_size if self._is_last_pass is not None else int(self.gradient_state.num_steps)

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs.update({"num_steps": steps})

    def _raise_if_batches_differ(self) -> None:
        if self._is_last_pass is None:
            raise_if_window_differs(
                self.controller,
                self._own_config,
                "the loop keeps the batch size of its loader",
                "Loop over accelerator.windows(loader), which splits its batches, or save_state() and start "
                "again with the error's config.",
            )

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save the state as in Accelerator, with the controller's state in its ``scaler.pt``."""
        self._window.end()
        return super().save_state(*args, **kwargs)


class _AcceleratorWindow(AccumulationWindow):
    """Accumulation window that serves as the scaler of prepared optimizers.

    If not all of them step, the next forward pass ends the window.
    """

    def __init__(self, accelerator: AutotuneAccelerator) -> None:
        super().__init__(accelerator.controller)
        self._accelerator = accelerator

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer unless the step is to be skipped. Raises `InvalidRequestError` for a closure."""
        if any(argument is not None for argument in (*args, *kwargs.values())):
            raise InvalidRequestError(
                "AutotuneAccelerator supports no optimizer step with a closure: its gradients would go unchecked.",
                "Call backward() before step(), and step() without a closure.",
            )
        return super().step(optimizer)

    def update(self) -> None:
        """End the window if all optimizers have stepped; called after every step."""
        if self.num_stepped >= len(self._accelerator._optimizers):
            self.end()


def unwrap_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer, or each of a list or tuple, without Accelerate's wrappers."""
    plain = []
    for optimizer in optimizers if isinstance(optimizers, tuple | list) else [optimizers]:
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        plain.append(optimizer)
    return plain

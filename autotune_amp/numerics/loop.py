"""A loop of its own, passed through without stepping: what each optimizer would have stepped on is caught instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from autotune_amp.core.config import AmpConfig, LossScale, Precision
from autotune_amp.core.errors import WorkloadError
from autotune_amp.precision.step_amp import StepAmp


@dataclass(frozen=True)
class Loop:
    """`step(model, batch, amp)` is one training step of a loop whose modules `model` holds.

    `forget(model)` puts back what its steps change beside the numbers in tensors. Batches have `batch_size` samples.
    """

    step: Callable[[Any, Any, StepAmp], object]
    forget: Callable[[Any], object]
    batch_size: int

    def config(self, precision: Precision) -> AmpConfig:
        """What a step in this precision is told that it is run with."""
        loss_scale = LossScale() if precision == "fp16" else None
        return AmpConfig(precision=precision, batch_size=self.batch_size, loss_scale=loss_scale)


class NoStepError(Exception):
    """A call of train_step came to no optimizer step: there are no gradients of a step to look at."""


class CatchingAmp(StepAmp):
    """Scales by a fixed `factor` and steps nothing.

    `gradients` are those that optimizers would have stepped on, unscaled, in fp32, by the names of `names` (by id); of
    a parameter that is stepped twice the last.
    """

    def __init__(
        self,
        new_autocast: Callable[[], AbstractContextManager[object]],
        device_type: str,
        config: AmpConfig,
        names: Mapping[int, str],
        factor: float,
    ) -> None:
        super().__init__(new_autocast, device_type, config, scales=False)
        self.gradients: dict[str, Tensor] = {}
        self._names = names
        self._factor = factor
        self._unscaled: dict[int, bool] = {}  # by optimizer: whether its gradients were finite

    def is_enabled(self) -> bool:
        """As a scaler of the precision would be."""
        return self.config.loss_scale is not None

    def get_scale(self) -> float:
        """What losses are multiplied by."""
        super().get_scale()
        return self._factor

    def scale(self, outputs: Any) -> Any:
        """The outputs times the factor."""
        super().scale(outputs)
        return tree_map(lambda leaf: scaled(leaf, self._factor) if isinstance(leaf, Tensor) else leaf, outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the factor. What is not finite is caught at once: clipping might hide it."""
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                parameter.grad = unscaled(parameter.grad, self._factor).to(parameter.dtype)
        gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
        is_finite = all(is_all_finite(gradient) for gradient in gradients)
        if not is_finite:
            self._catch(optimizer, 1.0)
        self._unscaled[id(optimizer)] = is_finite

    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> bool:
        """Catch the gradients; as if it stepped."""
        self.num_steps += 1
        is_finite = self._unscaled.pop(id(optimizer), None)
        if is_finite is not False:
            self._catch(optimizer, self._factor if is_finite is None else 1.0)
        return True

    def update(self, new_scale: float | Tensor | None = None) -> None:  # noqa: ARG002 # the interface's
        """The factor stays."""
        super().update()
        self._unscaled.clear()

    def _catch(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self.gradients[self._names[id(parameter)]] = unscaled(parameter.grad, factor)


def no_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001 # the signature of one
    """In the place of a loop's loss function."""
    raise WorkloadError("A loop of its own has no loss function to run alone.", "Run its train_step.")


def scaled(loss: Tensor, factor: float) -> Tensor:
    """As GradScaler scales: by a tensor in fp32, so that a loss in fp16 gets its gradient in fp16."""
    return loss * torch.full((), factor, device=loss.device)


def unscaled(gradient: Tensor, factor: float) -> Tensor:
    """A copy in fp32, or complex, divided by the factor; sparse where autograd makes it so."""
    gradient = gradient.detach()
    gradient = gradient.coalesce() if gradient.is_sparse else gradient
    return (gradient if gradient.is_complex() else gradient.float()) / factor


def is_all_finite(tensor: Tensor) -> bool:
    """Whether every number in it is; waits for the device."""
    return bool(torch.isfinite(tensor._values() if tensor.is_sparse else tensor).all())


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

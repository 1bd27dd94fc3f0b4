"""What other trainers do about overflow, re-stated as GradScaler-like policies: scale, step, update.

The numbers and the order of events follow the projects' sources. `start_scale` replaces a rule's own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Rule:
    """A loss scale on the host; a step with a non-finite gradient is skipped."""

    init_scale: float

    def __init__(self, start_scale: float | None = None) -> None:
        self.loss_scale = self.init_scale if start_scale is None else start_scale
        self.has_overflowed = False

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.has_overflowed = not all(bool(gradient.isfinite().all()) for gradient in gradients)
        if not self.has_overflowed:
            for gradient in gradients:
                gradient.div_(self.loss_scale)
            optimizer.step()

    def update(self) -> None:
        if self.has_overflowed:
            self.overflow()
        else:
            self.clean()

    def overflow(self) -> None:
        raise NotImplementedError

    def clean(self) -> None:
        raise NotImplementedError

    def get_scale(self) -> float:
        return self.loss_scale


class DeepSpeed(Rule):
    """DynamicLossScaler as the engine configures it: 2^16, window 1000, hysteresis 2, minimum 1, which raises."""

    init_scale = 2.0**16
    window, hysteresis, minimum = 1000, 2, 1.0

    def __init__(self, start_scale: float | None = None) -> None:
        super().__init__(start_scale)
        self.hysteresis_left = self.hysteresis
        self.num_updates, self.last_overflow = 0, -1

    def overflow(self) -> None:
        if self.hysteresis_left > 1:
            self.hysteresis_left -= 1
        elif self.loss_scale == self.minimum:
            raise RuntimeError("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
        else:
            self.loss_scale = max(self.loss_scale / 2, self.minimum)
        self.last_overflow = self.num_updates
        self.num_updates += 1

    def clean(self) -> None:
        if (self.num_updates - self.last_overflow) % self.window == 0:
            self.hysteresis_left = self.hysteresis
            self.loss_scale *= 2
        self.num_updates += 1


class Fairseq(Rule):
    """DynamicLossScaler as the command line configures it: 2^7, window 2^14 on one device, tolerance 0, minimum 1e-4.

    With tolerance 0 every overflow backs off.
    """

    init_scale = 2.0**7
    window, minimum = 2**14, 1e-4

    def __init__(self, start_scale: float | None = None) -> None:
        super().__init__(start_scale)
        self.num_updates, self.last_overflow = 0, -1

    def overflow(self) -> None:
        self.last_overflow = self.num_updates
        if self.loss_scale / 2 <= self.minimum:
            raise FloatingPointError(
                f"Minimum loss scale reached ({self.minimum}). Your loss is probably exploding. Try lowering the "
                "learning rate, using gradient clipping or increasing the batch size."
            )
        self.loss_scale /= 2
        self.num_updates += 1

    def clean(self) -> None:
        if (self.num_updates - self.last_overflow) % self.window == 0:
            self.loss_scale *= 2
        self.num_updates += 1


class Megatron(Rule):
    """DynamicGradScaler: 2^32, 1000, hysteresis 2 refilled on growth alone, minimum 1, which holds.

    The training script aborts on a loss that is not finite.
    """

    init_scale = 2.0**32
    window, hysteresis, minimum = 1000, 2, 1.0

    def __init__(self, start_scale: float | None = None) -> None:
        super().__init__(start_scale)
        self.hysteresis_left = self.hysteresis
        self.num_clean = 0

    def scale(self, loss: Tensor) -> Tensor:
        value = loss.item()
        if not math.isfinite(value):
            what = "NaN" if math.isnan(value) else "Inf"
            raise RuntimeError(f"Unexpected result {value} (message='found {what} in local forward loss calculation')")
        return super().scale(loss)

    def overflow(self) -> None:
        self.num_clean = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left <= 0:
            self.loss_scale = max(self.loss_scale / 2, self.minimum)

    def clean(self) -> None:
        self.num_clean += 1
        if self.num_clean == self.window:
            self.num_clean = 0
            self.hysteresis_left = self.hysteresis
            self.loss_scale *= 2

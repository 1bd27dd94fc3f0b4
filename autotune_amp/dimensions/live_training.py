"""LiveTraining: the models and optimizers that a variant changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from autotune_amp.precision.forward_wrapper import unwrap


@dataclass(frozen=True)
class LiveTraining:
    """Models that a training step calls, usually one, and the optimizers of their parameters, on `device`."""

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device

    @cached_property
    def own_models(self) -> list[nn.Module]:
        """Return the user's own models, without wrappers."""
        return [unwrap(model) for model in self.models]

    @cached_property
    def modules(self) -> list[nn.Module]:
        """Return all modules, the user's own models first."""
        return list(dict.fromkeys(module for model in self.own_models for module in model.modules()))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters, each once."""
        return list(dict.fromkeys(parameter for model in self.models for parameter in model.parameters()))

    def convert_optimizer_state(self) -> None:
        """Convert the optimizers' state to the current dtype and memory format of its parameters."""
        for parameter, state in (item for optimizer in self.optimizers for item in optimizer.state.items()):
            for name, value in state.items():
                if not isinstance(value, Tensor) or name == "step" or value.shape != parameter.shape:
                    continue
                if value.is_floating_point():
                    state[name] = torch.empty_like(parameter, requires_grad=False).copy_(value)

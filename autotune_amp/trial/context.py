"""Context: the workload as a trial process holds it, and the model that several trials share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autotune_amp.core.workload import Workload, WorkloadSource, make_workload
from autotune_amp.precision import torch_state
from autotune_amp.trial.memory import BuildMemory, file_bytes, watched_build
from autotune_amp.trial.state import LoopState
from autotune_amp.trial.step import make_model


class _Shared(NamedTuple):
    """What was built once: `torch_state` is how building left it, `first_state` what a kept worker goes back to."""

    model: nn.Module
    memory: BuildMemory
    torch_state: dict[str, Any]
    first_state: dict[str, torch.Tensor] | None


class Context:
    """What a trial process holds.

    A template builds the model once, on the CPU, for the children it forks; a kept worker builds it in its first
    trial and starts every other from its first state.
    """

    def __init__(self, source: WorkloadSource, *, is_kept: bool, is_template: bool = False) -> None:
        self.source = source
        self.is_kept = is_kept
        self.template_file_bytes = 0
        self._is_template = is_template
        self._workload = source if isinstance(source, Workload) else None
        self._shared: _Shared | None = None

    def open(self, origin: str) -> None:
        """Make the workload; `origin` is what errors call its source."""
        self._workload = make_workload(self.source, origin)
        self.template_file_bytes = file_bytes() if self._is_template else 0

    @property
    def workload(self) -> Workload:
        """The workload, once this is open."""
        assert self._workload is not None, "open() comes first"
        return self._workload

    @property
    def is_build_shared(self) -> bool:
        """Whether the model is there already."""
        return self._shared is not None

    @property
    def build_memory(self) -> BuildMemory | None:
        """What the model that is there took, None where there is none yet."""
        return None if self._shared is None else self._shared.memory

    def share(self, capture: Callable[[], dict[str, Any]]) -> None:
        """Build the model for all children that are forked after this; `capture` reads the torch state they take."""
        model, memory = watched_build(lambda: make_model(self.workload))
        self._shared = _Shared(model, memory, capture(), None)

    def model(self, device: torch.device) -> nn.Module:
        """The model on the device, as first built."""
        if self._shared is None:
            model, memory = watched_build(lambda: make_model(self.workload).to(device))
            if self.is_kept and not any(map(is_lazy, model.state_dict().values())):
                first_state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
                self._shared = _Shared(model, memory, torch_state.capture(), first_state)
            return model
        torch_state.apply(self._shared.torch_state)
        model = self._shared.model
        if self._shared.first_state is not None:
            model.zero_grad(set_to_none=True)
            if isinstance(model, LoopState):
                model.start_again(self._shared.first_state)
            else:
                model.load_state_dict(self._shared.first_state)
        return model.to(device)

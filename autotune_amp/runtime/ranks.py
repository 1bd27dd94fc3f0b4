"""What the ranks of a distributed run must agree on before any of them moves. One process agrees with itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """The ranks of `process_group` (None: all of them). Every method is a collective: call it on all ranks alike."""

    def __init__(self, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        self._device = device
        self._group = process_group

    @property
    def are_many(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.num_ranks > 1

    @property
    def rank(self) -> int:
        """This process's place among them; before `init_process_group`, what the launcher says."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self._group)
        return int(os.environ.get("RANK", "0"))

    @property
    def num_ranks(self) -> int:
        """How many there are, 1 before `init_process_group`."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def maximum_(self, values: Tensor) -> Tensor:
        """The largest of each value over the ranks, in place; waits for the device only where the backend does."""
        if self.are_many:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        if not self.are_many:
            return flag
        return bool(self.maximum_(torch.tensor(float(flag), device=self._device)).item())

    def least(self, value: float) -> float:
        """The smallest `value` over the ranks."""
        if not self.are_many:
            return value
        return -float(self.maximum_(torch.tensor(-value, dtype=torch.float32, device=self._device)).item())

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of all ranks, each once, in the order of the ranks."""
        if not self.are_many:
            return tuple(names)
        gathered: list[Sequence[str] | None] = [None] * dist.get_world_size(self._group)
        with torch.accelerator.device_index(self._device.index):  # NCCL would send objects by way of the current one
            dist.all_gather_object(gathered, list(names), group=self._group)
        return tuple(dict.fromkeys(name for given in gathered for name in given or ()))

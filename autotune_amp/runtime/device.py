"""Where a run computes: its device and the memory there, its environment, and the ranks that decide alike."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from autotune_amp.core.errors import DeviceError
from autotune_amp.hardware.device import device_of, parse

log = logging.getLogger("autotune_amp.runtime")


def checked_device(device: str | torch.device) -> torch.device:
    """`device` as torch has it. Raises `DeviceError` where torch cannot use it."""
    kind, index = parse(str(device))
    if kind == "auto":
        raise DeviceError("device='auto' does not say where the model is.", 'Pass its device: device="cuda", for one.')
    return torch.device(device_of(kind).resolve(index))


def warn_of_missing(environment: Mapping[str, str]) -> None:
    """Say which of the variables that a config was measured with this process lacks."""
    missing = " ".join(f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value)
    if missing:
        log.warning(
            "The config was measured with variables that this process was started without, so it may be slower. "
            "Before Python starts: export %s",
            missing,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process's tensors took on an accelerator; on a CPU, what the process holds now."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).max_memory_allocated(device))
    return _held_memory_bytes(device)


def available_memory_bytes(device: torch.device) -> int:
    """What this process may hold on the device in all: what is free and what it already holds."""
    return device_of(device.type).memory(str(device)).available + _held_memory_bytes(device)


def _held_memory_bytes(device: torch.device) -> int:
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(psutil.Process().memory_info().rss)


class Ranks:
    """The ranks of `process_group` (None: all of them). Every method is a collective: call it on all ranks alike."""

    def __init__(self, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        self.device = device
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
        return bool(self.maximum_(torch.tensor(float(flag), device=self.device)).item())

    def least(self, value: float) -> float:
        """The smallest `value` over the ranks."""
        if not self.are_many:
            return value
        return -float(self.maximum_(torch.tensor(-value, dtype=torch.float32, device=self.device)).item())

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of all ranks, each once, in the order of the ranks."""
        if not self.are_many:
            return tuple(names)
        gathered: list[Sequence[str] | None] = [None] * dist.get_world_size(self._group)
        with torch.accelerator.device_index(self.device.index):  # NCCL would send objects by way of the current one
            dist.all_gather_object(gathered, list(names), group=self._group)
        return tuple(dict.fromkeys(name for given in gathered for name in given or ()))

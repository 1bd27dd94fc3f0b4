"""Numbers on their way from the device to the host: read a fixed number of updates later, so that nobody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

LAG_UPDATES = 4
Waiting: TypeAlias = Sequence[tuple[Sequence[float], Sequence[int]]]  # (values, label)


class LaggedReader:
    """A queue of small groups of device scalars, each copied to pinned host memory as it is pushed, with its label."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, torch.Event | None, tuple[int, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Sequence[Tensor], label: tuple[int, ...]) -> None:
        """Send `values`, scalars of one device, on their way."""
        packed = values[0].reshape(1) if len(values) == 1 else torch.stack(list(values))
        if packed.device.type == "cpu":
            self._waiting.append((packed, None, label))
            return
        host = torch.empty(len(values), pin_memory=True)
        host.copy_(packed, non_blocking=True)
        # On the stream of the copy, which need not be the current device's.
        event = torch.accelerator.current_stream(packed.device).record_event()
        self._waiting.append((host, event, label))

    def waiting(self) -> list[tuple[list[float], tuple[int, ...]]]:
        """All groups and their labels, oldest first, which go on waiting; waits for the device."""
        for _, event, _ in self._waiting:
            if event is not None:
                event.synchronize()
        return [(host.tolist(), label) for host, _, label in self._waiting]

    def restore(self, waiting: Waiting) -> None:
        """Have these wait, and nothing else."""
        self._waiting.clear()
        self._waiting.extend((torch.tensor(values), None, tuple(label)) for values, label in waiting)

    def pop(self) -> tuple[list[float], tuple[int, ...]]:
        """The oldest group and its label; waits for the device where it is not there yet."""
        host, event, label = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        return host.tolist(), label

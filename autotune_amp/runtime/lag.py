"""Numbers on their way from the device to the host: read a fixed number of updates later, so that nobody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LAG_UPDATES = 4


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
        event = torch.Event(device=packed.device)
        event.record()
        self._waiting.append((host, event, label))

    def due(self, lag_updates: int) -> Iterator[tuple[list[float], tuple[int, ...]]]:
        """What has waited for `lag_updates` pushes, oldest first; 0 waits for the device and gives everything."""
        while len(self._waiting) > lag_updates:
            host, event, label = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield host.tolist(), label

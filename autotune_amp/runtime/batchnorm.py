"""Running statistics of normalisation layers, put back where the step was skipped: a bad batch poisons them too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SavedStatistics: TypeAlias = list[list[float]]


class RunningStatistics:
    """The running statistics of every such layer of `model` (pytorch#88474)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.save()

    def save(self) -> None:
        """Remember them as they are now: a window begins."""
        self._saved = {key: torch.cat([b.reshape(-1) for b in alike]) for key, alike in self._alike().items()}

    def saved(self) -> SavedStatistics:
        """What is remembered, in plain types."""
        return [flat.tolist() for flat in self._saved.values()]

    def can_load(self, saved: SavedStatistics) -> bool:
        """Whether `saved` is of layers like these."""
        return [len(flat) for flat in saved] == [len(flat) for flat in self._saved.values()]

    def load(self, saved: SavedStatistics) -> None:
        """Remember what `saved` gave."""
        for flat, values in zip(self._saved.values(), saved, strict=True):
            flat.copy_(torch.tensor(values, dtype=flat.dtype))

    def undo(self) -> None:
        """Put them back as they were remembered."""
        for alike, saved in self._pairs():
            self._write(alike, saved)

    def undo_where(self, skipped: Tensor) -> None:
        """Put them back where `skipped`, a scalar on the device, is not 0; the host need not know."""
        for alike, saved in self._pairs():
            now = torch.cat([buffer.reshape(-1) for buffer in alike])
            self._write(alike, torch.where(skipped.to(now.device, non_blocking=True) != 0, saved, now))

    def _pairs(self) -> Iterator[tuple[list[Tensor], Tensor]]:
        """What is there now with what was saved of it; not what was converted or replaced in between."""
        for key, alike in self._alike().items():
            saved = self._saved.get(key)
            if saved is not None and saved.numel() == sum(buffer.numel() for buffer in alike):
                yield alike, saved

    @staticmethod
    def _write(buffers: list[Tensor], flat: Tensor) -> None:
        pieces = torch.split(flat, [buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [p.reshape(b.shape) for p, b in zip(pieces, buffers, strict=True)])

    def _layers(self) -> list[nn.Module]:
        return [m for m in self._model.modules() if isinstance(m, _NormBase) and m.track_running_stats]

    def _alike(self) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        # Read anew each time: model.to() and load_state_dict(assign=True) replace buffers, conversions whole layers.
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for layer in self._layers():
            for buffer in layer._buffers.values():
                if buffer is not None:
                    alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        return alike

"""The largest magnitude that each module puts out in half precision; in compiled models too, unlike with hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from autotune_amp.numerics.blame import modules_by_name
from autotune_amp.numerics.safe_scale import is_compiled
from autotune_amp.precision.mode import Observer, is_cast, observe, stop_observing


class ForwardWatch:
    """What `watch_forward` gives."""

    def __init__(self, names: list[str], observer: Observer) -> None:
        self._names = names
        self._observer = observer

    def maxima(self) -> dict[str, float]:
        """By module, since the beginning or `reset`: NaN where it put one out, 0 where it did not run.

        Waits for the device.
        """
        return dict(zip(self._names, self._observer.read().tolist(), strict=True))

    def reset(self) -> None:
        """Begin again."""
        self._observer.reset()


@contextmanager
def watch_forward(model: nn.Module, device: torch.device) -> Iterator[ForwardWatch]:
    """Watch modules while they train: the first floating tensor that each puts out, where that is in half precision.

    TorchScript's modules cannot be watched. A compiled model recompiles on the first entry; of what holds no weight
    matrix nothing is watched there, since compiled code keeps such numbers in fp32.
    """
    watched = {
        name: module
        for name, module in modules_by_name(model).items()
        if not isinstance(module, torch.jit.ScriptModule) and (is_cast(module) or not is_compiled(model))
    }
    observer = Observer(len(watched), device, only_half=True)
    observer.is_sampling = True
    with ExitStack() as stack:
        for slot, module in enumerate(watched.values()):
            observe(module, observer, slot)
            stack.callback(stop_observing, module)
        yield ForwardWatch(list(watched), observer)

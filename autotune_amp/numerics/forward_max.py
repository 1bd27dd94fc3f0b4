"""The largest magnitude that each module puts out; in compiled models too, where forward hooks would not be called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from autotune_amp.numerics.blame import modules_by_name
from autotune_amp.precision import Observer, observe, stop_observing


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
    """Watch every module that holds no other, while it trains: the first floating tensor of what it puts out.

    TorchScript's modules cannot be watched. A compiled model recompiles on the first entry.
    """
    leaves = {
        name: module
        for name, module in modules_by_name(model).items()
        if next(module.children(), None) is None and not isinstance(module, torch.jit.ScriptModule)
    }
    observer = Observer(len(leaves), device)
    observer.is_sampling = True
    with ExitStack() as stack:
        for slot, module in enumerate(leaves.values()):
            observe(module, observer, slot)
            stack.callback(stop_observing, module)
        yield ForwardWatch(list(leaves), observer)

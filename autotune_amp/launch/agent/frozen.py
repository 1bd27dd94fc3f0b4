"""Gradients without steps: every batch meets the first weights, so that two precisions can be held against each other.

A run in fp32 and one in the low precision write the same entries of the same gradients; digests of weights and batch
prove that they are the same.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch

from . import where
from .batches import first_tensor
from .channel import Channel


class Frozen:
    """Takes no step. The first `num_steps` gradients go to files in `folder`: float32, at most `max_entries` of them,
    at even distances in each parameter."""

    def __init__(self, channel: Channel, observer: Any, folder: str, settings: dict[str, int]) -> None:
        self._channel = channel
        self._observer = observer
        self._folder = folder
        self._num_steps = settings["num_steps"]
        self._max_entries = settings["max_entries"]
        observer.loaders.keeps_latest = observer.passes.keeps_latest = True

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """In place of what the step would do; of one with a closure, after its passes."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self._capture(optimizer)
            return None

        def captured(*args_: Any, **kwargs_: Any) -> Any:  # Lightning makes its passes inside of the step
            loss = closure(*args_, **kwargs_)
            self._capture(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": captured}

    def _capture(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        number = self._observer.num_steps
        found_inf, scale = (getattr(optimizer, name, None) for name in ("found_inf", "grad_scale"))
        is_skipped = found_inf is not None and bool(found_inf)  # a fused optimizer finds so out by itself
        if number < self._num_steps and not is_skipped:
            index, rank = self._observer.index_of(optimizer), where.rank()["rank"]
            path = os.path.join(self._folder, f"gradient_{rank}_{index}_{number}.float32")
            sizes = self._write(path, parameters, 1.0 if scale is None else 1.0 / float(scale))
            batch = first_tensor(self._observer.loaders.latest)
            if batch is None:  # without a DataLoader
                batch = self._observer.passes.latest
            self._channel.send(
                "gradient",
                optimizer=index,
                number=number,
                path=path,
                sizes=sizes,
                weights=_digest(parameters),
                batch=None if batch is None else _digest([batch]),
                **where.rank(),
            )
        for parameter in parameters:
            parameter.grad = None  # with which no optimizer moves it

    def _write(self, path: str, parameters: list[Any], factor: float) -> list[int]:
        total = sum(parameter.numel() for parameter in parameters)
        distance = max(1, -(-total // self._max_entries))
        sizes = []
        with open(path, "wb") as file:
            for parameter in parameters:
                entries = torch.zeros_like(_local(parameter)) if parameter.grad is None else _local(parameter.grad)
                kept = _real(entries.detach()).flatten()[::distance].float().cpu() * factor
                file.write(kept.numpy().tobytes())
                sizes.append(kept.numel())
        return sizes


def _local(tensor: Any) -> Any:
    """Of a tensor that is spread over ranks, this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _real(tensor: Any) -> Any:
    """The entries of any tensor, in full and as real numbers."""
    dense = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _digest(tensors: list[Any]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        entries = _real(_local(tensor.detach())).cpu().contiguous().flatten()
        found.update(entries.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()

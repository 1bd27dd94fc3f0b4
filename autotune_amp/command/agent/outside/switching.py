"""Switcher of a running training to another batch size and precision, so that one start measures several settings.

The switch is made where the script asks for a batch right after an optimizer step: no gradient, loss scale or region of
autocast is in use there. The first switch copies the training's state to a file, later ones put that state back.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, dataloader

_pairs: Any = zip  # equally long; Python 3.8 has no `strict=`


class Switcher:
    """Switcher that sets the values of `request` at the next point between two steps, and then sends ``switched``.

    Put back are trained parameters, buffers, the optimizers' states and hyperparameters, and random number generators.
    A GradScaler starts anew. Learning rate schedulers and the script's own counters go on.
    """

    def __init__(self, channel: Any, observer: Any, hooks: Any, folder: str) -> None:
        self._channel = channel
        self._observer = observer
        self._hooks = hooks
        self._path = os.path.join(folder, "state.pt")
        self._has_copy = False
        self._requested: dict[str, Any] | None = None  # set by the channel's thread, read by the training's
        self._num_old_batches: int | None = None  # fetched in the previous size and not used yet
        self._own_batch_size: int | None = None
        channel.on_switch = self.request
        observer.loaders.before_batch = channel.shield(self._before_batch)

    def request(self, values: dict[str, Any]) -> None:
        """Request `values`: `batch_size`, the `maker` of its DataLoader, and `precision` (without it, the script's)."""
        self._num_old_batches, self._requested = None, values

    def _before_batch(self, iterator: Any) -> None:
        """Switch if this is the training's DataLoader, no gradient is pending, and batches of the old size are used."""
        values, loader = self._requested, iterator._autotune_amp_loader()
        if values is None or loader is None or loader._autotune_amp_maker != values["maker"]:
            return
        if self._num_old_batches is not None:
            self._num_old_batches = max(0, self._num_old_batches - 1)
        if not self._observer.is_between_steps:
            return
        if self._num_old_batches is None:
            problem = self._problem(iterator, loader, values)
            if problem is not None:
                self._requested = None
                self._channel.send("switched", problem=problem)
                return
            self._num_old_batches = self._set_batch_size(iterator, loader, values["batch_size"])
        if self._num_old_batches:
            return
        self._requested = None
        self._restore_state(loader)
        self._hooks.switch(values)
        self._observer.restart()
        _reset_peak_memory(self._observer.device)
        self._channel.send("switched", problem=None)
        if values["batch_size"] != self._own_batch_size:
            line = loader._autotune_amp_line
            self._hooks.report_set("batch_size", "DataLoader", self._own_batch_size, values["batch_size"], line)

    def _problem(self, iterator: Any, loader: Any, values: dict[str, Any]) -> str | None:
        """Return why the values cannot be set in the running process, None if they can."""
        changes_precision = values.get("precision") != self._hooks.values.get("precision")
        if self._observer.has_compiled:
            return "the training code is compiled"
        if changes_precision and self._hooks.has_framework_precision:
            return "the framework has read its precision already"
        if iterator._dataset_kind != dataloader._DatasetKind.Map:
            return "the dataset makes its own order of samples"
        if type(loader.batch_sampler) is not BatchSampler:
            return "the DataLoader does not make its batches by torch's BatchSampler"
        if self._observer.device.type == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
            return "the peak of resident memory cannot be reset"
        return None

    def _set_batch_size(self, iterator: Any, loader: Any, size: int) -> int:
        """Set the batch size in the iterator that the script is using; return the number of batches of the old one that
        are on their way.
        """
        sampler = loader.batch_sampler
        self._own_batch_size = self._own_batch_size or sampler.batch_size
        if sampler.batch_size == size:
            return 0
        sampler.batch_size = size
        loader.__dict__["batch_size"] = size  # torch refuses to change the attribute
        iterator._sampler_iter = iter(sampler)
        self._observer.loaders.report(loader)
        num_old_batches: int = self._observer.loaders.num_on_their_way(iterator)
        return num_old_batches

    def _restore_state(self, loader: Any) -> None:
        """Put the state back that the file holds; at the first call write it. Gradients are removed."""
        generators = _generators(loader)
        tensors, optimizers = list(self._tensors()), list(self._observer.living_optimizers())
        if self._has_copy:
            state = torch.load(self._path, map_location="cpu", mmap=True, weights_only=False)
            _restore(state, tensors, optimizers, generators)
        else:
            torch.save(_state(tensors, optimizers, generators), self._path)
            self._has_copy = True
        for optimizer in optimizers:
            for parameter in _parameters(optimizer):
                parameter.grad = None

    def _tensors(self) -> Iterator[Any]:
        """Yield the trained parameters of the optimizers, and the buffers of the modules, each once."""
        found: set[int] = set()
        modules = [module for module in (each() for each in self._observer.modules.values()) if module is not None]
        for tensors in (
            *(_parameters(optimizer) for optimizer in self._observer.living_optimizers()),
            *(module.buffers() for module in modules),
        ):
            for tensor in tensors:
                if id(tensor) not in found:
                    found.add(id(tensor))
                    yield tensor


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _generators(loader: Any) -> list[Any]:
    """Return the random number generators that a DataLoader draws from, beside the global ones."""
    owners = (loader, loader.batch_sampler.sampler)
    return [each.generator for each in owners if getattr(each, "generator", None) is not None]


def _state(tensors: list[Any], optimizers: list[Any], generators: list[Any]) -> dict[str, Any]:
    """Return the state of a training, with its tensors as they are: they are copied when they are saved."""
    numpy = sys.modules.get("numpy")
    return {
        "tensors": [tensor.detach() for tensor in tensors],
        "optimizers": [
            (
                [dict(optimizer.state.get(parameter, {})) for parameter in _parameters(optimizer)],
                [
                    {name: value for name, value in group.items() if name != "params"}
                    for group in optimizer.param_groups
                ],
            )
            for optimizer in optimizers
        ],
        "generators": [generator.get_state() for generator in generators],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "python": random.getstate(),
        "numpy": None if numpy is None else numpy.random.get_state(),
    }


def _restore(state: dict[str, Any], tensors: list[Any], optimizers: list[Any], generators: list[Any]) -> None:
    """Copy a state into the tensors of the training, in place: the script and its optimizers hold references to them.

    Raises `RuntimeError` if the training has other tensors than when the state was saved.
    """
    shapes = [tensor.shape for tensor in tensors]
    if shapes != [tensor.shape for tensor in state["tensors"]] or len(optimizers) != len(state["optimizers"]):
        raise RuntimeError("the training has other parameters, buffers or optimizers than before")
    with torch.no_grad():
        for tensor, saved in _pairs(tensors, state["tensors"]):
            tensor.copy_(saved)
        for optimizer, (states, groups) in _pairs(optimizers, state["optimizers"]):
            for parameter, saved in _pairs(_parameters(optimizer), states):
                if saved or parameter in optimizer.state:
                    _restore_values(optimizer.state[parameter], saved)
            for group, saved in _pairs(optimizer.param_groups, groups):
                _restore_values(group, saved)
    for generator, saved in _pairs(generators, state["generators"]):
        generator.set_state(saved.clone())
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([each.clone() for each in state["cuda"]])
    random.setstate(state["python"])
    if state["numpy"] is not None:
        sys.modules["numpy"].random.set_state(state["numpy"])


def _restore_values(values: Any, saved: dict[str, Any]) -> None:
    """Put saved values back into a dictionary, tensors in place; keys that were not saved are removed, but not the
    parameters of a group.
    """
    for name in [name for name in values if name not in saved and name != "params"]:
        del values[name]
    for name, value in saved.items():
        present = values.get(name)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and present.shape == value.shape:
            present.copy_(value)
        else:
            values[name] = value.clone() if isinstance(value, torch.Tensor) else value


def _reset_peak_memory(device: Any) -> None:
    """Return freed memory to the device or the system, and let the peak begin with the memory in use now."""
    if device.type != "cpu":
        module = getattr(torch, device.type)
        module.empty_cache()
        module.reset_peak_memory_stats()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library has it
    if trim is not None:
        trim(0)
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")

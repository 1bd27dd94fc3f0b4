"""Switcher of a running training loop to another batch size and precision, so that one start measures several settings.

It serves plain loops over one DataLoader in one process. What it cannot put back as it was at the start is a reason not
to switch, which the parent is told before the measurement ends.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import sys
import threading
import weakref
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, dataloader

MAX_SHARE = 0.25  # of the free disk space and of the available memory that the saved state may take
_ITERATORS = (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter)
_pairs: Any = zip  # equally long; Python 3.8 has no `strict=`


class Switcher:
    """Switcher that puts a training back to its first step with other values, where the script asks for a batch right
    after an optimizer step: no gradient, scaled loss or autocast region is in use there.

    Trained parameters and buffers are saved in `folder` before they change; optimizers, schedulers and random number
    generators in memory. The script's iterator goes on with the batches of a new one. GradScalers begin anew. Counters
    and other objects of the script go on. ``hold`` and ``switch`` are requests of the parent (see `Channel.listen`).
    """

    def __init__(self, channel: Any, observer: Any, hooks: Any, folder: str) -> None:
        self._channel = channel
        self._observer = observer
        self._hooks = hooks
        self._folder = folder
        self._problem: str | None = None  # why this training cannot switch
        self._is_reported = False
        self._saved: list[tuple[str, list[Any]]] = []  # path, and weak references to the tensors in it
        self._saved_ids: set[int] = set()
        self._num_bytes = 0
        self._groups: list[tuple[Any, list[dict[str, Any]]]] = []  # of each optimizer, a weak reference
        self._made_schedulers: list[Any] = []  # weak references
        self._schedulers: list[tuple[Any, dict[str, Any]]] = []  # weak references and states at the first step
        self._iterator: Any = None  # the script's, of the training's first steps
        self._random_states: list[_RandomState] = []  # when that iterator was made, and at its first batch
        self._num_asked = [0, 0]  # batches before the first step, and between the first and the second
        self._has_switched = False
        self._has_old_batch = False  # whether the script's variables may hold a batch from before the switch
        self._is_held = threading.Event()
        self._may_go_on = threading.Event()
        self._request: dict[str, Any] | None = None  # set by the channel's thread
        channel.on_request = self.receive
        add_scheduler = self._made_schedulers.append
        channel.after_init(torch.optim.lr_scheduler.LRScheduler, lambda made: add_scheduler(weakref.ref(made)))
        observer.before_first_step = self.save_optimizer
        observer.loaders.before_iterator = channel.shield(self.before_iterator)
        observer.loaders.before_batch = channel.shield(self.before_batch)
        observer.passes.on_outermost.append(self.save_module)

    def receive(self, request: str) -> None:
        """Receive a request: ``hold`` stops the training at the next batch, ``switch`` and JSON let it go on with other
        values.

        ``batch_size`` is that to use, None for the present one; ``outside`` are all values to set (`SettingHooks`).
        """
        name, _, fields = request.partition(" ")
        if name == "hold":
            self._may_go_on.clear()
            self._is_held.set()
        elif name == "switch":
            self._request = json.loads(fields)
            self._may_go_on.set()

    # -- before the first step -----------------------------------------------------------------------------------------

    def save_module(self, module: Any) -> None:
        """Save what training changes in an outermost module, before it first runs."""
        if isinstance(module, torch.jit.ScriptModule):
            self._problem = "its model is a TorchScript module"
        self._save([*(each for each in module.parameters() if each.requires_grad), *module.buffers()])

    def save_optimizer(self, optimizer: Any) -> None:
        """Save what an optimizer changes, before its first step."""
        if self._has_switched or any(reference() is optimizer for reference, _ in self._groups):
            return
        if optimizer.state:
            self._problem = "its optimizer has a state before the first step"
        self._save([parameter for group in optimizer.param_groups for parameter in group["params"]])
        try:
            if not self._groups:
                living = [reference for reference in self._made_schedulers if reference() is not None]
                self._schedulers = [(reference, copy.deepcopy(reference().state_dict())) for reference in living]
            self._groups.append((weakref.ref(optimizer), copy.deepcopy(_hyperparameters(optimizer))))
        except Exception as error:  # objects of the user's own classes
            self._problem = f"its optimizer or scheduler cannot be copied: {error}"

    def _save(self, tensors: list[Any]) -> None:
        """Write those of the tensors that are not saved yet to a file, unless they take too much space."""
        new = [tensor for tensor in tensors if id(tensor) not in self._saved_ids]
        if self._problem is not None or not new:
            return
        try:
            self._num_bytes += sum(tensor.untyped_storage().nbytes() for tensor in new)
            if self._num_bytes > MAX_SHARE * _available_bytes(self._folder):
                self._problem = f"its state, {self._num_bytes / 2**30:.1f} GiB or more, does not fit beside it"
            elif any(type(tensor.detach()) is not torch.Tensor for tensor in new):
                self._problem = "its parameters are of another class than torch.Tensor"
            else:
                path = os.path.join(self._folder, f"state-{os.getpid()}-{len(self._saved)}.pt")
                torch.save([tensor.detach() for tensor in new], path)
                self._saved.append((path, [weakref.ref(tensor) for tensor in new]))
                self._saved_ids.update(map(id, new))
        except Exception as error:  # a full disk, parameters without storage
            self._problem = f"its state cannot be saved: {error}"

    def before_iterator(self, iterator: Any, loader: Any) -> None:
        """Remember how random number generators are before a DataLoader makes an iterator, until the first step."""
        iterator._autotune_amp_loader = loader
        if not self._observer.num_steps:
            iterator._autotune_amp_random = _RandomState(loader)

    # -- between two steps ---------------------------------------------------------------------------------------------

    def before_batch(self, iterator: Any) -> None:
        """Wait for the parent after ``hold``, and switch if it has asked for that, before a batch is fetched.

        After a switch, the attribute ``_autotune_amp_successor`` of the script's iterator is the one to fetch from.
        """
        if not self._is_reported:
            self._observe_batch(iterator)
        elif self._observer.is_between_steps and self._is_of_training(iterator):
            if self._has_old_batch:  # until now the script's variables held the last batch of the old size
                self._has_old_batch = False
                self._observer.reset_peaks()
            if self._is_held.is_set():
                self._may_go_on.wait()
                self._is_held.clear()
            if self._request is not None:
                request, self._request = self._request, None
                self._switch(iterator, request)

    def _observe_batch(self, iterator: Any) -> None:
        """Learn from the batches of the first two steps which iterator the training uses, then report whether it can
        switch.
        """
        num_steps = self._observer.num_steps_of_first_optimizer
        if num_steps == 0 and iterator is not self._iterator:
            self._iterator, self._num_asked = iterator, [0, 0]
            loader = iterator._autotune_amp_loader
            self._random_states = [iterator._autotune_amp_random, _RandomState(loader)]
            self._observer.note_peaks_at_start()
        if num_steps < 2:
            if iterator is not self._iterator:
                self._problem = "it uses several DataLoaders in its first steps"
            self._num_asked[num_steps] += 1
            return
        self._is_reported = True
        self._problem = self._problem or self._problem_of_training(iterator)
        self._channel.send("switchable", problem=self._problem)

    def _problem_of_training(self, iterator: Any) -> str | None:
        """Return why the training cannot switch, as far as its first steps show; None if it can."""
        device, loader = self._observer.device, iterator._autotune_amp_loader
        if self._hooks.frameworks:
            return f"{self._hooks.frameworks[0]} has read its values"
        if self._observer.has_compiled:
            return "its code is compiled"
        if threading.current_thread() is not threading.main_thread():
            return "another thread loads its batches"
        if iterator is not self._iterator or self._num_asked[0] != self._num_asked[1]:
            return "its first steps take different numbers of batches, or it fetches batches ahead"
        if type(iterator) not in _ITERATORS or type(loader).__iter__ is not dataloader.DataLoader.__iter__:
            return "its DataLoader iterates in its own way"
        sampler = loader.batch_sampler
        if type(sampler) is not BatchSampler or type(sampler.sampler) not in (RandomSampler, SequentialSampler):
            return "its DataLoader has a sampler of its own"
        if device.type not in ("cpu", "cuda"):
            return f"the peak memory of {device.type} cannot be reset"
        if device.type == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
            return "the peak of its resident memory cannot be reset"
        return None

    def _is_of_training(self, iterator: Any) -> bool:
        """Whether an iterator is of the DataLoader of the first steps, or of one that the same call made anew."""
        ours, other = self._iterator._autotune_amp_loader, iterator._autotune_amp_loader
        return ours is other or (ours.dataset is other.dataset and ours._autotune_amp_call == other._autotune_amp_call)

    def _switch(self, iterator: Any, request: dict[str, Any]) -> None:
        """Put the training back to its start with the requested values, and send ``switched``."""
        try:
            self._has_switched = self._has_old_batch = True
            _end_workers(iterator.__dict__.get("_autotune_amp_successor", iterator))
            self._restore()
            self._observer.reset_peaks()
            self._observer.restart()
            self._channel.add("switched", problem=None)  # the messages after it are of the new setting
            self._hooks.switch(request["outside"])
            self._random_states[0].restore()
            iterator._autotune_amp_successor = self._iterator_with(iterator._autotune_amp_loader, request["batch_size"])
            self._random_states[1].restore()
            self._channel.flush()
        except Exception as error:  # the parent starts a new process then
            self._problem = f"{type(error).__name__}: {error}"
            self._channel.send("switched", problem=self._problem)

    def _restore(self) -> None:
        """Put tensors, optimizers and schedulers back to their first values, and remove gradients.

        Raises `RuntimeError` if the training has others by now.
        """
        optimizers = [reference() for reference, _ in self._groups]
        if self._problem is not None:
            raise RuntimeError(self._problem)
        if self._observer.has_compiled or optimizers != self._observer.live_optimizers():
            raise RuntimeError("code was compiled, or an optimizer replaced, since the first step")
        with torch.no_grad():
            for path, references in self._saved:
                values = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                for reference, value in _pairs(references, values):
                    tensor = reference()
                    if tensor is None or tensor.shape != value.shape:
                        raise RuntimeError("a parameter or buffer was replaced since the first step")
                    tensor.copy_(value)
                    if tensor.requires_grad:
                        tensor.grad = None
        for optimizer, (_, groups) in _pairs(optimizers, self._groups):
            optimizer.state.clear()
            for group, values in _pairs(optimizer.param_groups, copy.deepcopy(groups)):
                for name in group.keys() - values.keys() - {"params"}:
                    del group[name]
                group.update(values)
        for scheduler, state in self._schedulers:
            if scheduler() is not None:
                scheduler().load_state_dict(copy.deepcopy(state))

    def _iterator_with(self, loader: Any, batch_size: int | None) -> Any:
        """Return a new iterator of a DataLoader, with another batch size if one is given."""
        own = loader.batch_sampler.batch_size
        if batch_size is not None and batch_size != own:
            loader.batch_sampler.batch_size = loader.__dict__["batch_size"] = batch_size  # not settable otherwise
            self._observer.loaders.report(loader)
        if "batch_size" in self._hooks.values:
            self._hooks.report_set("batch_size", "DataLoader", own, batch_size, loader._autotune_amp_call[1])
        loader._iterator = None  # with persistent workers, that of the old setting
        return iter(loader)


class _RandomState:
    """States of the random number generators that a training and its DataLoader draw from."""

    def __init__(self, loader: Any) -> None:
        owners: tuple[Any, ...] = (loader, getattr(loader.batch_sampler, "sampler", None))
        own = [getattr(owner, "generator", None) for owner in owners]
        self._generators = [(generator, generator.get_state()) for generator in own if generator is not None]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def restore(self) -> None:
        """Set all generators to these states."""
        for generator, state in self._generators:
            generator.set_state(state)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator, with the batches that they have prefetched."""
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        iterator._shutdown_workers()


def _hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _available_bytes(folder: str) -> int:
    """Return the free space of a folder's disk or the available memory, whichever is less: the folder may be in
    memory.
    """
    free = shutil.disk_usage(folder).free
    try:
        with open("/proc/meminfo", "rb") as lines:
            available = next(int(line.split()[1]) for line in lines if line.startswith(b"MemAvailable"))
    except (OSError, StopIteration):
        return free
    return min(free, 1024 * available)

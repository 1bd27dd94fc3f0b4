"""Calls in the user's code that made the objects used in training: their places and the resulting values.

The exact call is reported, not the line nearest to it: it is in the function that called the class, outside of the
constructors of subclasses. For an object that a library made, the library is named in place of a call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.utils.data import BatchSampler, dataloader

from . import where
from .channel import Channel
from .imports import after_import

_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "tf32",
    "dataloader_num_workers",
    "use_cpu",
)


def watch(channel: Channel, observer: Any) -> None:
    """Report the calls from here on, each once; torch has just been imported."""
    sites = _Sites(channel)
    sites.watch_loaders()
    sites.watch_regions()
    observer.passes.on_outermost.append(sites.forward)
    sites.watch("scaler", GradScaler, ("step",), lambda scaler: {"enabled": scaler.is_enabled()})

    @channel.shield
    def tell(trainer: Any) -> None:
        values = {name: getattr(trainer.args, name, None) for name in _ARGUMENTS}
        sites.tell("training_arguments", trainer.args, values)

    def with_trainer(module: Any) -> None:
        sites.note_made(module.TrainingArguments)
        train = module.Trainer.train

        @functools.wraps(train)
        def train_(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            tell(trainer)
            return train(trainer, *args, **kwargs)

        module.Trainer.train = train_

    def with_lightning(module: Any) -> None:
        sites.watch(
            "lightning_trainer",
            module.Trainer,
            ("fit",),
            lambda trainer: {
                "precision": trainer.precision,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
            },
        )

    def with_accelerate(module: Any) -> None:
        sites.watch(
            "accelerator",
            module.Accelerator,
            ("backward",),
            lambda accelerator: {
                "mixed_precision": accelerator.mixed_precision,
                "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            },
        )

    after_import("transformers.trainer", with_trainer)
    after_import("accelerate.accelerator", with_accelerate)
    after_import("lightning.pytorch.trainer.trainer", with_lightning)
    after_import("pytorch_lightning.trainer.trainer", with_lightning)


class _Sites:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: dict[int, dict[str, Any]] = {}  # by the id of the object made
        self._told: set[tuple[str, str]] = set()
        self._num_regions = 0  # the user's regions that are entered now

    def note_made(self, owner: Any) -> None:
        """Remember the calls that make objects of the class `owner`."""
        original, note = owner.__init__, self._channel.shield(self._note)

        @functools.wraps(original)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            note(self_)
            original(self_, *args, **kwargs)

        owner.__init__ = __init__

    def _note(self, made: Any) -> None:
        self._calls[id(made)] = _call(made)

    def watch(self, kind: str, owner: Any, uses: tuple[str, ...], values: Any) -> None:
        """Report the objects of the class `owner` that are used, which means that one of the methods `uses` is called
        on them.
        """
        self.note_made(owner)
        for name in uses:
            setattr(owner, name, self._telling(kind, getattr(owner, name), values))

    def _telling(self, kind: str, original: Any, values: Any) -> Any:
        tell = self._channel.shield(lambda made: self.tell(kind, made, values(made)))

        @functools.wraps(original)
        def used(self_: Any, *args: Any, **kwargs: Any) -> Any:
            tell(self_)
            return original(self_, *args, **kwargs)

        return used

    def tell(self, kind: str, made: Any, values: dict[str, Any], call: dict[str, Any] | None = None) -> None:
        """Report the call that made an object, unless its line was reported before."""
        call = call or self._calls.get(id(made)) or _call(made)
        if (kind, call["line"]) in self._told:
            return
        self._told.add((kind, call["line"]))
        plain = {name: value if isinstance(value, (bool, int, str)) else None for name, value in values.items()}
        self._channel.add("site", kind=kind, name=type(made).__name__, values=plain, **call)

    def forward(self, module: Any) -> None:
        """Report the call of a module that is about to run in training and is not called by another module."""
        device = next(module.parameters()).device.type
        self.tell("forward", module, {"device": device}, _call(module))

    def watch_loaders(self) -> None:
        """Report each DataLoader when it is made, with its index and the id of its dataset."""
        self.note_made(BatchSampler)
        self._channel.after_init(dataloader.DataLoader, self._made_loader)

    def _made_loader(self, loader: Any) -> None:
        call, sampler = _call(loader), self._calls.get(id(loader.batch_sampler))
        has_own = sampler is not None and not sampler["maker"]
        self._channel.add(
            "site",
            kind="batch_sampler" if has_own else "loader",
            name=type(loader.batch_sampler if has_own else loader).__name__,
            values={
                "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
                "num_workers": loader.num_workers,
            },
            loader=getattr(loader, "_autotune_amp_index", None),
            dataset=id(loader.dataset),
            **(sampler if sampler is not None and has_own else call),
        )

    def watch_regions(self) -> None:
        """Report the outermost autocast regions that training enters, disabled ones too."""
        self.note_made(autocast)
        region_class: Any = autocast
        enter, leave = region_class.__enter__, region_class.__exit__
        entering, leaving = self._channel.shield(self._entering), self._channel.shield(self._leaving)

        @functools.wraps(enter)
        def __enter__(region: Any) -> Any:
            entering(region)
            return enter(region)

        @functools.wraps(leave)
        def __exit__(region: Any, *args: Any) -> Any:
            leaving(region)
            return leave(region, *args)

        region_class.__enter__, region_class.__exit__ = __enter__, __exit__

    def _entering(self, region: Any) -> None:
        call = self._calls.get(id(region))
        if call is None or call["maker"]:
            return
        if self._num_regions == 0 and torch.is_grad_enabled():
            dtype = str(region.fast_dtype).replace("torch.", "")
            self.tell("autocast", region, {"device": region.device, "dtype": dtype, "enabled": region._enabled})
        self._num_regions += 1

    def _leaving(self, region: Any) -> None:
        call = self._calls.get(id(region))
        if call is not None and not call["maker"]:
            self._num_regions -= 1


def _call(made: Any) -> dict[str, Any]:
    """Return the place where `made` is called or being made, outside of the functions of its own class."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(where.HERE) or _is_of(frame, made)):
        frame = frame.f_back
    if frame is None or where.is_library(frame.f_code.co_filename):
        maker = "?" if frame is None else str(frame.f_globals.get("__name__"))
        return {"line": where.user_line(), "maker": maker, "end": None, "parameters": ()}
    return {
        "line": f"{frame.f_code.co_filename}:{frame.f_lineno}",
        "maker": "",
        "end": _end(frame),
        "parameters": _parameters(type(made)),
    }


def _is_of(frame: FrameType, made: Any) -> bool:
    """Whether the frame is that of a method of `made`, or of a library's decorator around one."""
    names = frame.f_code.co_varnames
    if not names or (names[0] != "self" and not where.is_library(frame.f_code.co_filename)):
        return False
    first = frame.f_locals.get(names[0])
    return first is made or (isinstance(first, tuple) and bool(first) and first[0] is made)


def _end(frame: FrameType) -> tuple[int, int] | None:
    """Return the line and column at which the running call ends, None before Python 3.11 or if it is not known."""
    if sys.version_info < (3, 11):
        return None
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return None if positions[1] is None or positions[3] is None else (positions[1], positions[3])


def _parameters(owner: Any) -> tuple[str, ...]:
    """Return the names of a class's positional arguments, in order."""
    try:
        found = inspect.signature(owner).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in found if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))

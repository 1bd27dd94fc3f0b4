"""Reporter of the calls in the user's code that create the objects used in training, as `Site` messages.

A site is the exact call of the class, not one inside a subclass's constructor. For an object that a library creates,
the library is named instead of a call.
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
from .batches import batch_size_of
from .channel import Channel
from .imports import after_import

_TRAINING_ARGUMENTS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "tf32",
    "dataloader_num_workers",
    "use_cpu",
)


def watch(channel: Channel, observer: Any) -> None:
    """Hook into the classes whose calls are reported, each once; torch has just been imported."""
    reporter = _SiteReporter(channel)
    reporter.report_loaders()
    reporter.report_regions()
    observer.passes.on_outermost.append(reporter.report_forward)
    reporter.watch("scaler", GradScaler, "step", lambda scaler: {"enabled": scaler.is_enabled()})

    @channel.shield
    def report_arguments(trainer: Any) -> None:
        values = {name: getattr(trainer.args, name, None) for name in _TRAINING_ARGUMENTS}
        reporter.report("training_arguments", trainer.args, values)

    def hook_training_arguments(module: Any) -> None:
        # Subclasses such as Seq2SeqTrainingArguments have a constructor of their own, which calls this method only.
        reporter.record_calls(module.TrainingArguments, "__post_init__")

    def hook_transformers(module: Any) -> None:
        train = module.Trainer.train

        @functools.wraps(train)
        def train_(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            report_arguments(trainer)
            return train(trainer, *args, **kwargs)

        module.Trainer.train = train_

    def hook_lightning(module: Any) -> None:
        reporter.watch(
            "lightning_trainer",
            module.Trainer,
            "fit",
            lambda trainer: {
                "precision": trainer.precision,
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
            },
        )

    def hook_accelerate(module: Any) -> None:
        reporter.watch(
            "accelerator",
            module.Accelerator,
            "backward",
            lambda accelerator: {
                "mixed_precision": accelerator.mixed_precision,
                "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            },
        )

    after_import("transformers.training_args", hook_training_arguments)  # a script may import Trainer later
    after_import("transformers.trainer", hook_transformers)
    after_import("accelerate.accelerator", hook_accelerate)
    after_import("lightning.pytorch.trainer.trainer", hook_lightning)
    after_import("pytorch_lightning.trainer.trainer", hook_lightning)


class _SiteReporter:
    """Recorder of call sites by object, which reports each site once."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: dict[int, dict[str, Any]] = {}  # call site by id of the created object
        self._reported: set[tuple[str, str]] = set()
        self._num_entered_regions = 0  # nesting depth of the user's autocast regions

    def record_calls(self, owner: Any, method: str = "__init__") -> None:
        """Record the call site of each new object of the class `owner`, whose construction calls `method`."""
        original, record_call = getattr(owner, method), self._channel.shield(self._record_call)

        @functools.wraps(original)
        def recorded(self_: Any, *args: Any, **kwargs: Any) -> None:
            record_call(self_)
            original(self_, *args, **kwargs)

        setattr(owner, method, recorded)

    def _record_call(self, instance: Any) -> None:
        self._calls[id(instance)] = _call_site(instance)

    def watch(self, kind: str, owner: Any, use: str, values: Any) -> None:
        """Report each object of the class `owner` once its method `use` is called, with `values(object)`."""
        self.record_calls(owner)
        setattr(owner, use, self._with_report(kind, getattr(owner, use), values))

    def _with_report(self, kind: str, original: Any, values: Any) -> Any:
        report = self._channel.shield(lambda instance: self.report(kind, instance, values(instance)))

        @functools.wraps(original)
        def report_and_call(self_: Any, *args: Any, **kwargs: Any) -> Any:
            report(self_)
            return original(self_, *args, **kwargs)

        return report_and_call

    def report(self, kind: str, instance: Any, values: dict[str, Any], call: dict[str, Any] | None = None) -> None:
        """Report the call that created an object, unless a call at that line was reported before."""
        call = call or self._calls.get(id(instance)) or _call_site(instance)
        if (kind, call["line"]) in self._reported:
            return
        self._reported.add((kind, call["line"]))
        plain = {name: value if isinstance(value, (bool, int, str)) else None for name, value in values.items()}
        self._channel.add("site", kind=kind, name=type(instance).__name__, values=plain, **call)

    def report_forward(self, module: Any) -> None:
        """Report the call of an outermost module (one that no other module calls) in training."""
        device = next(module.parameters()).device.type
        self.report("forward", module, {"device": device}, _call_site(module))

    def report_loaders(self) -> None:
        """Report each new DataLoader with its index and the id of its dataset."""
        self.record_calls(BatchSampler)
        self._channel.after_init(dataloader.DataLoader, self._report_loader)

    def _report_loader(self, loader: Any) -> None:
        call, sampler = _call_site(loader), self._calls.get(id(loader.batch_sampler))
        has_own = sampler is not None and not sampler["maker"]
        self._channel.add(
            "site",
            kind="batch_sampler" if has_own else "loader",
            name=type(loader.batch_sampler if has_own else loader).__name__,
            values={
                "batch_size": batch_size_of(loader),
                "num_workers": loader.num_workers,
            },
            loader=getattr(loader, "_autotune_amp_index", None),
            dataset=id(loader.dataset),
            **(sampler if sampler is not None and has_own else call),
        )

    def report_regions(self) -> None:
        """Report the outermost autocast regions that training enters, also disabled ones."""
        self.record_calls(autocast)
        region_class: Any = autocast
        original_enter, original_exit = region_class.__enter__, region_class.__exit__
        on_enter, on_exit = self._channel.shield(self._on_enter), self._channel.shield(self._on_exit)

        @functools.wraps(original_enter)
        def __enter__(region: Any) -> Any:
            on_enter(region)
            return original_enter(region)

        @functools.wraps(original_exit)
        def __exit__(region: Any, *args: Any) -> Any:
            on_exit(region)
            return original_exit(region, *args)

        region_class.__enter__, region_class.__exit__ = __enter__, __exit__

    def _on_enter(self, region: Any) -> None:
        call = self._calls.get(id(region))
        if call is None or call["maker"]:
            return
        if self._num_entered_regions == 0 and torch.is_grad_enabled():
            dtype = str(region.fast_dtype).replace("torch.", "")
            self.report("autocast", region, {"device": region.device, "dtype": dtype, "enabled": region._enabled})
        self._num_entered_regions += 1

    def _on_exit(self, region: Any) -> None:
        call = self._calls.get(id(region))
        if call is not None and not call["maker"]:
            self._num_entered_regions -= 1


def _call_site(instance: Any) -> dict[str, Any]:
    """Return the fields of `Site` for the running call that creates or calls `instance`, outside of its own methods."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(where.HERE) or _is_method_of(frame, instance)):
        frame = frame.f_back
    if frame is None or where.is_library(frame.f_code.co_filename):
        maker = "?" if frame is None else str(frame.f_globals.get("__name__"))
        return {"line": where.user_line(), "maker": maker, "end": None, "parameters": ()}
    return {
        "line": f"{frame.f_code.co_filename}:{frame.f_lineno}",
        "maker": "",
        "end": _call_end(frame),
        "parameters": _positional_parameters(type(instance)),
    }


def _is_method_of(frame: FrameType, instance: Any) -> bool:
    """Whether the frame is that of a method of `instance`, or of a library's decorator around one."""
    names = frame.f_code.co_varnames
    if not names or (names[0] != "self" and not where.is_library(frame.f_code.co_filename)):
        return False
    first = frame.f_locals.get(names[0])
    return first is instance or (isinstance(first, tuple) and bool(first) and first[0] is instance)


def _call_end(frame: FrameType) -> tuple[int, int] | None:
    """Return the line and column at which the running call ends; None before Python 3.11 or if unknown."""
    if sys.version_info < (3, 11):
        return None
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    return None if positions[1] is None or positions[3] is None else (positions[1], positions[3])


def _positional_parameters(owner: Any) -> tuple[str, ...]:
    """Return the names of a class's positional arguments, in order."""
    try:
        parameters = inspect.signature(owner).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))

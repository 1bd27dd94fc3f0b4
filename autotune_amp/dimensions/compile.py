"""Compilation of the model by ``torch.compile``, and its mode."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count
from autotune_amp.dimensions.dimension import Choices, Leader, Variant

if TYPE_CHECKING:
    from torch import nn

    from autotune_amp.dimensions.live_training import LiveTraining

CUDA_GRAPHS = "reduce-overhead"
_MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
_REASONS_OFF_CUDA = {
    CUDA_GRAPHS: "CUDA graphs need CUDA",
    _MAX_AUTOTUNE: "without CUDA it does not tune kernels that training runs",
}
UNRELATED_FAILURES = ("oom", "timeout", "nonfinite")  # kinds of failure that compiling does not cause
# If half the batch takes at least this share of the time of a pass, kernel launches bound it, not computation.
LAUNCH_BOUND_SHARE = 0.8


class _Compile(Variant):
    """Mode of torch.compile. The slow mode max-autotune-no-cudagraphs is tried only if the user names it."""

    name = "compile"
    removable: ClassVar[Mapping[str, float]] = dict.fromkeys(("casts", "fp32_operations", "idle", "rest"), 1.0)
    extra_seconds = 5.0  # least time of a first compilation: a convnet of six blocks took 6.5 s on 2 cores, no AVX-512
    left_out_of_fallbacks = True  # compiling takes too long for a setting that may never run
    line = 'model.compile(mode="{0}")  # for a bare nn.Sequential before torch 2.15: torch.compile(model, mode="{0}")'

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        supported, slow = super().choices(hardware, description, options), _MAX_AUTOTUNE
        if options.variants is not None or slow not in supported.values:
            return supported
        why = "it times every kernel for minutes, more than 100 s for a model of 125 million parameters on an H200: "
        left_out = {**supported.left_out, slow: f"{why}--try {slow} tries it"}
        return Choices(tuple(value for value in supported.values if value != slow), left_out)

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - a compiled model hides its mode
        """Return whether a model or a part of it is already compiled."""
        return any(map(_is_compiled, (*live.models, *live.modules)))

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        if live.device.type != "cuda" and value in _REASONS_OFF_CUDA:
            return _REASONS_OFF_CUDA[value]
        return _reason_without_compiler(live.device.type)

    def change(self, value: str, live: LiveTraining) -> None:
        """Compile the models in place: objects and parameter names do not change."""
        for model in live.models:
            for module in _modules_to_compile(model):
                compile_in_place(module, mode=value)

    def is_tried_in(self, setting: Setting, value: str) -> bool:
        # A compiled fp8 trial does not show the gain of compiling alone.
        return setting.precision != "fp8" and super().is_tried_in(setting, value)

    def reason_against_setting(self, setting: Setting, leader: Leader) -> str | None:
        """Return the reason why a compiled setting is not worth a trial: the compiler failed, or the run is too short.

        A failure with CUDA graphs does not count for other modes.
        """
        for record in leader.trials:
            is_alike = record.candidate.is_compiled and record.candidate.compile in (setting.compile, "default")
            if is_alike and isinstance(record.outcome, Failure) and record.outcome.kind not in UNRELATED_FAILURES:
                return f"the compiler failed on {record.candidate}"
        if leader.setting.is_compiled or leader.effect != "speed":
            return None
        seconds = leader.num_steps * leader.step_seconds
        if seconds / 2 < self.extra_seconds:
            steps = f"compiling takes longer than it could gain in {count(leader.num_steps, 'step')}, which take"
            return f"{steps} {seconds:.0f} s: --fresh --steps N tries it for a longer training run"
        return None

    def reason_against(self, value: str, leader: Leader) -> str | None:
        """Return the reason why a mode is not worth a trial, or None; None if the user named the mode.

        If kernel launches bound the step, CUDA graphs are tried first, and the default mode only if they failed.
        """
        if leader.effect != "speed" or leader.are_values_named:
            return None
        search = [r for r in leader.trials if r.purpose == "search"]
        tried = {mode: [r.outcome for r in search if self.is_tried_in(r.candidate, mode)] for mode in self.others}
        is_launch_bound = _is_launch_bound(leader)
        if CUDA_GRAPHS in leader.values.get(self.name, ()) and is_launch_bound:
            if value != CUDA_GRAPHS and not any(isinstance(outcome, Failure) for outcome in tried[CUDA_GRAPHS]):
                return f"kernel launches bound the step, which {CUDA_GRAPHS} avoids"
            return None
        if value == CUDA_GRAPHS and is_launch_bound is not None:
            return "kernel launches do not bound the step"
        if value == CUDA_GRAPHS and not leader.setting.is_compiled and not tried["default"]:
            return "no smaller batch shows whether kernel launches bound the step, so the default mode comes first"
        if not leader.setting.is_compiled and tried["default"]:
            return "the default mode gained nothing"
        return None


def _is_launch_bound(leader: Leader) -> bool | None:
    """Return whether a pass of half the batch or less took about as long; None if no such batch was measured."""
    setting = leader.setting
    pass_seconds = {
        c.batch_size: min(m.step_seconds for m in measurements) / c.accumulation_steps
        for c, measurements in leader.measurements.items()
        if c.precision == setting.precision and c.is_ordinary
    }
    whole = pass_seconds.get(setting.batch_size)
    smaller = [seconds for size, seconds in pass_seconds.items() if 2 * size <= setting.batch_size]
    if whole is None or not smaller:
        return None
    return any(seconds > LAUNCH_BOUND_SHARE * whole for seconds in smaller)


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Run ``module.compile(**options)``, also for an instance of a torch class such as a bare Sequential.

    Before torch 2.15 ``compile`` ignores these, since no frame of user code is entered (pytorch#150915).
    """
    import torch

    if not type(module).forward.__module__.startswith("torch.nn."):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call] # torch does not type it

    module._compiled_call_impl = torch.compile(call, **options)


def _modules_to_compile(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that training calls: the model, or the parts of a LightningModule with a ``training_step``."""
    from torch import nn

    if not hasattr(model, "training_step") and not isinstance(model, nn.ModuleList | nn.ModuleDict):
        yield model
        return
    for part in model.children():
        if next(part.parameters(), None) is not None:
            yield from _modules_to_compile(part)


def _is_compiled(module: nn.Module) -> bool:
    # _orig_mod marks torch.compile's wrapper; importing its class would import the compiler.
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _reason_without_compiler(device_type: str) -> str | None:
    """Return the reason why torch.compile cannot run on this device, None if it can."""
    if device_type == "mps":
        return None  # its kernels are written in Metal, whose compiler belongs to macOS
    if device_type != "cpu":
        has_triton = importlib.util.find_spec("triton") is not None
        return None if has_triton else "torch.compile needs Triton on this device, which is not installed"
    # The default of torch._inductor.config.cpp.cxx, which is not imported as that takes two seconds.
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    path = shutil.which(name)
    return None if path is not None else f"there is no C++ compiler {name}: install it, or set CXX to another"


COMPILE = _Compile()

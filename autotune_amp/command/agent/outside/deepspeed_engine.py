"""Hooks into DeepSpeed's engine that report its optimizer steps, also those that it skips, and that set its config."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from .. import where
from ..imports import after_import

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # by precision, which is also the name of its section in the config
_ARGUMENTS = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "accumulation_steps": "gradient_accumulation_steps",
}


def watch(observer: Any) -> None:
    """Report each step of an engine to the `Observer` once DeepSpeed is imported.

    The engine calls its optimizer once for each group of parameters, and not at all if gradients are not finite: in
    bf16 it then says nothing.
    """

    def hook(module: Any) -> None:
        owner = module.DeepSpeedEngine
        begin, take_step, backward = owner.__init__, owner._take_model_step, owner.backward
        report = observer.channel.shield(observer.report_step)
        record_loss = observer.channel.shield(observer.passes.record_unscaled_loss)

        @functools.wraps(begin)
        def __init__(engine: Any, *args: Any, **kwargs: Any) -> None:
            observer.ignores_steps = True
            try:
                begin(engine, *args, **kwargs)
            finally:
                observer.ignores_steps = False

        @functools.wraps(take_step)
        def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(engine, "torch_autocast_z0_gradscaler", None):  # its GradScaler's step is reported
                return take_step(engine, *args, **kwargs)
            observer.scaler_depth += 1
            try:
                result = take_step(engine, *args, **kwargs)
            finally:
                observer.scaler_depth -= 1
            report(_optimizer(engine), is_skipped=is_skipped(engine))
            return result

        @functools.wraps(backward)
        def backward_(engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
            record_loss(loss)  # DeepSpeed scales it
            return backward(engine, loss, *args, **kwargs)

        owner.__init__, owner._take_model_step, owner.backward = __init__, _take_model_step, backward_

    after_import("deepspeed.runtime.engine", observer.channel.shield(hook))


def is_skipped(engine: Any) -> bool:
    """Whether the engine skipped its latest step because a gradient was not finite."""
    return bool(getattr(engine.optimizer, "overflow", False))


def _optimizer(engine: Any) -> Any:
    """Return torch's optimizer inside DeepSpeed's wrappers, else the wrapper."""
    inner = getattr(engine, "basic_optimizer", None)
    return engine.optimizer if inner is None else inner


def tell_skips(shield: Callable[..., Any]) -> None:
    """Print a line when an engine of this process skips a step without saying so: at the first, and at every tenfold of
    their number. In fp16 DeepSpeed prints its own. `shield` as in `Channel.shield`.
    """

    def hook(module: Any) -> None:
        owner = module.DeepSpeedEngine
        take_step, tell_skip = owner._take_model_step, shield(_tell_skip)

        @functools.wraps(take_step)
        def _take_model_step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            result = take_step(engine, *args, **kwargs)
            if is_skipped(engine):
                tell_skip(engine)
            return result

        owner._take_model_step = _take_model_step

    after_import("deepspeed.runtime.engine", shield(hook))


def _tell_skip(engine: Any) -> None:
    num_skips = engine.skipped_steps
    if engine.global_rank == 0 and not engine.fp16_enabled() and str(num_skips).rstrip("0") == "1":
        sys.stderr.write(
            f"autotune-amp: DeepSpeed has skipped {num_skips} of {engine.global_steps} steps, since their gradients "
            "were not finite\n"
        )


def hook_config(hooks: Any, values: dict[str, Any], report_switch: Callable[..., None]) -> None:
    """Set batch size, accumulation steps and precision in the config of DeepSpeed once it is imported.

    `hooks` are the `SettingHooks`, `values` what is to be set; `report_switch` is called with DeepSpeed's own values.
    """

    def hook(module: Any) -> None:
        owner = module.DeepSpeedConfig
        original, complete = owner._initialize_params, owner._configure_train_batch_size

        @functools.wraps(original)
        def _initialize_params(config: Any, document: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            precision = values.get("precision")
            if precision is not None:
                hooks.is_in_framework = True
                hooks.report_set("precision", "DeepSpeed's config", _precision(document), precision)
                _set_precision(document, precision)
            original(config, document, *args, **kwargs)

        @functools.wraps(complete)
        def _configure_train_batch_size(config: Any) -> None:
            complete(config)  # from train_batch_size and the number of ranks
            arguments = dict(_ARGUMENTS)
            if where.is_called_by("accelerate") and not where.is_called_by("transformers"):
                del arguments["accumulation_steps"]  # Accelerate itself tells the engine when to take a step
            today = {name: getattr(config, argument) for name, argument in arguments.items()}
            today["precision"] = _precision(config._param_dict)
            report_switch("DeepSpeed's config", {**arguments, "precision": "bf16.enabled"}, today)
            for name, argument in arguments.items():
                if name in values:
                    hooks.report_set(name, f"DeepSpeed's {argument}", today[name], values[name])
                    setattr(config, argument, values[name])
            num_samples = config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps
            config.train_batch_size = num_samples * config.world_size

        owner._initialize_params, owner._configure_train_batch_size = _initialize_params, _configure_train_batch_size

    after_import("deepspeed.runtime.config", hooks.channel.shield(hook))


def _set_precision(config: dict[str, Any], precision: str) -> None:
    """Set the precision in the dict of a config, in place."""
    if config.get("torch_autocast", {}).get("enabled"):
        dtype = _DTYPES.get(precision)
        autocast = {**config["torch_autocast"], "enabled": dtype is not None}
        config["torch_autocast"] = autocast if dtype is None else {**autocast, "dtype": dtype}
    else:
        for name in _DTYPES:
            config[name] = {**_section(config, name), "enabled": name == precision}


def _precision(config: dict[str, Any]) -> str:
    """Return the precision in the dict of a config."""
    autocast = config.get("torch_autocast", {})
    dtype = str(autocast.get("dtype", "bfloat16")) if autocast.get("enabled") else ""
    return next(
        (name for name in _DTYPES if _section(config, name).get("enabled") is True or _DTYPES[name] in dtype), "fp32"
    )


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the section of a precision in the dict of a config; that of bf16 is called "bfloat16" in older ones."""
    section: dict[str, Any] = config.get(name, config.get(_DTYPES[name], {}))
    return section

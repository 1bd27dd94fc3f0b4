"""DeepSpeed: its JSON from a config, and what that rounds. Pure, and without importing the framework."""

from __future__ import annotations

import math
from typing import Any

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import InvalidRequestError


def deepspeed_config(config: AmpConfig) -> dict[str, Any]:
    """DeepSpeed's configuration document (``ds_config.json``) for a config; keys as of DeepSpeed 0.19.

    DeepSpeed keeps the weights themselves in bf16 or fp16, with an fp32 copy in the optimizer, where autocast casts
    fp32 weights: its ``torch_autocast`` section, which does as autocast does, has no keys for the scaler. The initial
    scale is a power of two there, so `init_scale` is rounded down to one; the least scale is a whole number from 1 up.
    The scale doubles and halves, whatever the growth and backoff factors, and has no upper bound.

    Raises `InvalidRequestError` for an initial loss scale below 1, which DeepSpeed cannot go on from.
    """
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "bf16": {"enabled": config.precision == "bf16"},
        "fp16": {"enabled": False} if config.loss_scale is None else {"enabled": True, **_scaler(config.loss_scale)},
    }


def _scaler(scale: LossScale) -> dict[str, Any]:
    if scale.init_scale < 1:
        raise InvalidRequestError(
            f"DeepSpeed cannot hold the initial loss scale {scale.init_scale!r}: its least scale is 1.",
            "Train a loss that is a mean rather than a sum, or export to another framework.",
        )
    return {
        "loss_scale": 0,  # dynamic
        "initial_scale_power": math.floor(math.log2(scale.init_scale)),
        "loss_scale_window": scale.growth_interval,
        "hysteresis": scale.hysteresis,
        "consecutive_hysteresis": False,  # counted anew when the scale grows, as `LossScale` has it
        "min_loss_scale": max(1, math.floor(scale.floor)),
    }


def roundings(scale: LossScale) -> list[str]:
    """What DeepSpeed's JSON makes of a loss scale where it is not the same, a sentence each."""
    found, written = [], _scaler(scale)
    if (power := 2.0 ** written["initial_scale_power"]) != scale.init_scale:
        found.append(f"init_scale {scale.init_scale!r} is rounded down to a power of two, {power!r}.")
    if written["min_loss_scale"] != scale.floor:
        found.append(f"min_scale {scale.floor!r} becomes {written['min_loss_scale']}, a whole number from 1 up.")
    for name, fixed in (("growth_factor", 2.0), ("backoff_factor", 0.5)):
        if (given := getattr(scale, name)) != fixed:
            found.append(f"{name} {given!r} has no key: it is {fixed!r}.")
    found.append(f"max_scale {scale.max_scale!r} has no key: the scale is unbounded.")
    return found

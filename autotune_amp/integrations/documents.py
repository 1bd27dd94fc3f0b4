"""Conversion of a config to frameworks' documents: the file of ``accelerate config`` and DeepSpeed's JSON. Pure."""

from __future__ import annotations

import math
from typing import Any

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import AUTOCAST_DTYPES


def accelerate_config(config: AmpConfig, device_type: str = "cuda", num_processes: int = 1) -> dict[str, Any]:
    """Return the content of the file that ``accelerate config`` writes, for processes on one machine (keys as of
    Accelerate 1.15).

    It has the precision, the device and the number of processes; Accelerate refuses other keys. The precision is
    ``"no"`` (fp32) if modules are pinned or for fp16 on a CPU, which a plain Accelerator cannot train. For fp8 it is
    the bf16 of the other layers; ``prepare`` sets up the fp8 layers, and compiles. On a CPU Accelerate itself starts
    one process: several are started by torchrun or mpirun.
    """
    is_cast = config.precision in AUTOCAST_DTYPES and (device_type, config.precision) != ("cpu", "fp16")
    is_multi = num_processes > 1
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": f"MULTI_{'GPU' if device_type == 'cuda' else device_type.upper()}" if is_multi else "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": config.autocast_precision if is_cast and not config.pinned_modules else "no",
        "num_machines": 1,
        "num_processes": num_processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": device_type == "cpu",
    }


def deepspeed_config(config: AmpConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration document (``ds_config.json``) for a config; keys as of DeepSpeed 0.19.

    DeepSpeed keeps the weights themselves in bf16 or fp16, with an fp32 copy in the optimizer, while autocast casts
    fp32 weights. `init_scale` is rounded down to a power of two, the least scale to an integer of at least 1. The scale
    doubles and halves, whatever the growth and backoff factors, and has no upper bound.

    Raises `InvalidRequestError` for an initial loss scale below 1, which DeepSpeed cannot represent.
    """
    scale = config.loss_scale
    fp16: dict[str, Any] = {"enabled": False}
    if scale is not None:
        if scale.init_scale < 1:
            raise InvalidRequestError(
                f"DeepSpeed cannot represent the initial loss scale {scale.init_scale!r}: its least scale is 1.",
                "Train a loss that is a mean rather than a sum, or export to another framework.",
            )
        fp16 = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": math.floor(math.log2(scale.init_scale)),
            "loss_scale_window": scale.growth_interval,
            "hysteresis": scale.hysteresis,
            "consecutive_hysteresis": False,  # its count restarts when the scale grows, as in `LossScale`
            "min_loss_scale": max(1, math.floor(scale.floor)),
        }
    return {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "bf16": {"enabled": config.autocast_precision == "bf16"},
        "fp16": fp16,
    }

"""The file that `accelerate launch --config_file` reads. Nothing here imports Accelerate."""

from __future__ import annotations

import json
from typing import Any

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError

MIXED_PRECISION = {"fp32": "no", "tf32": "no", "bf16": "bf16", "fp16": "fp16"}


def accelerate_config(config: AmpConfig, device_type: str = "cuda") -> dict[str, Any]:
    """What ``accelerate config`` would write for one process on one device; keys as of Accelerate 1.15.

    It holds the precision and the device. Loss scale, batch size, accumulation steps and TF32 belong to the script:
    Accelerate refuses a file with unknown keys. Where a plain Accelerator cannot train the config (`beyond_plain`) the
    precision is ``"no"``: fp32 rather than what was not measured. `AutotuneAccelerator` sets its own under any file.
    Raises `InvalidRequestError` for fp8.
    """
    if config.precision not in MIXED_PRECISION:
        raise InvalidRequestError(
            f"Accelerate's {config.precision} needs a recipe of its own.", "Export a config in bf16, fp16 or fp32."
        )
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "NO",
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": "no" if beyond_plain(config, device_type) else MIXED_PRECISION[config.precision],
        "num_machines": 1,
        "num_processes": 1,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": device_type == "cpu",
    }


def beyond_plain(config: AmpConfig, device_type: str) -> list[str]:
    """What of the config only an `AutotuneAccelerator` trains, a clause each."""
    found = []
    if device_type == "cpu" and config.precision == "fp16":
        found.append("on a CPU Accelerate itself neither casts to fp16 nor scales")
    if config.pinned_modules:
        found.append(f"Accelerate itself does not keep {', '.join(config.pinned_modules)} in fp32")
    return found


def to_yaml(settings: dict[str, Any]) -> str:
    """A flat mapping as YAML. JSON's strings, numbers and booleans are YAML's; unquoted, ``NO`` would be false."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())

"""A config as keyword arguments of ``transformers.TrainingArguments``. Pure, and without importing transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autotune_amp.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig


def training_arguments(config: AmpConfig, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments for ``TrainingArguments``, those of `others` among them.

    The config decides `per_device_train_batch_size` (samples), `gradient_accumulation_steps`, `fp16`, `bf16`, `tf32`
    (unless it keeps the flags as found) and, where it names a number of loader workers, `dataloader_num_workers`.
    TrainingArguments has no place for the loss scale, the fallbacks, the pinned modules and the environment: a plain
    ``Trainer`` scales with GradScaler's defaults, and on a CPU trains in fp32 where `fp16` is set.
    ``AutotuneTrainer(amp_config=config)`` keeps to them.

    Raises `InvalidRequestError` where `others` names what the config decides, and for fp8, which Transformers cannot be
    asked for.
    """
    if config.precision == "fp8":
        raise InvalidRequestError("TrainingArguments has no fp8.", "Use a config in bf16, fp16, tf32 or fp32.")
    decided: dict[str, Any] = {
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "fp16": config.precision == "fp16",
        "bf16": config.precision == "bf16",
    }
    if not config.as_found:
        decided["tf32"] = config.precision == "tf32"
    if config.num_workers is not None:
        decided["dataloader_num_workers"] = config.num_workers
    given = dict(others or {})
    if twice := [name for name in decided if name in given]:
        raise InvalidRequestError(
            f"{', '.join(f'{name}={given[name]!r}' for name in twice)}: the config decides that.",
            f"Leave {', '.join(twice)} out, or change the config: msgspec.structs.replace(config, ...).",
        )
    return decided | given


def changes(config: AmpConfig, others: Mapping[str, Any]) -> dict[str, Any]:
    """What of someone's TrainingArguments is to be another: `training_arguments`, and what 0 workers do not go with."""
    workers = {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
    return (workers if config.num_workers == 0 else {}) | training_arguments(config, others)

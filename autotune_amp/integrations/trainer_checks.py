"""What an AutotuneTrainer's arguments and fallbacks have to be like. No transformers."""

from __future__ import annotations

from typing import Any

from autotune_amp.core.config import AmpConfig, training_arguments
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.runtime import windows


def refuse_contradictions(args: Any, config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for TrainingArguments that say something else than the config."""
    wanted = training_arguments(config)
    wrong = [
        name
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        if getattr(args, name) != wanted[name]
    ]
    if args.tf32 is not None and args.tf32 != wanted["tf32"]:
        wrong.append("tf32")
    if wrong:
        given, asked = (
            ", ".join(f"{name}={value(name)!r}" for name in wrong) for value in (vars(args).get, wanted.get)
        )
        raise InvalidRequestError(
            f"TrainingArguments has {given}; the config says {asked}.",
            "Make them with amp_config.to_training_arguments(like=args), which keeps the others.",
        )
    # None asked for is no contradiction: the controller sets the precision.
    if args.mixed_precision not in ("no", config.precision):
        raise InvalidRequestError(
            f"TrainingArguments, or `accelerate launch`, asks for {args.mixed_precision}; the config's precision is "
            f"{config.precision}.",
            "Make the arguments with amp_config.to_training_arguments(like=args), and leave --mixed_precision out: the "
            "config names the precision.",
        )
    if args.auto_find_batch_size:
        raise InvalidRequestError(
            f"auto_find_batch_size would leave the config's batch size of {config.batch_size}.",
            "Leave it out: the config's batch size was measured.",
        )
    if args.n_gpu > 1:
        raise InvalidRequestError(
            f"The Trainer sees {args.n_gpu} GPUs in one process: nn.DataParallel does not keep to a bf16 autocast.",
            "Start it with torchrun, or let it see one GPU (CUDA_VISIBLE_DEVICES=0).",
        )


def refuse_other_windows(config: AmpConfig) -> None:
    """Raise `InvalidRequestError` for a fallback whose window is not that of the Trainer's loop, in a smaller batch."""
    for plan in config.plans:
        if not can_follow(config, plan.batch_size, plan.accumulation_steps):
            raise InvalidRequestError(
                f"The fallback {plan.precision} makes a step of {plan.batch_size} x {plan.accumulation_steps} samples, "
                f"the config of {config.batch_size} x {config.accumulation_steps}: the Trainer's loop keeps to one.",
                'Pass controller_options={"on_demotion": "checkpoint_and_stop"} and start again with the error\'s '
                "config.",
            )


def can_follow(config: AmpConfig, batch_size: int, accumulation_steps: int) -> bool:
    """Whether these passes are a window of the config's batches, each split or whole."""
    try:
        num_batches, _ = windows.shape(config.batch_size, batch_size, accumulation_steps)
    except InvalidRequestError:
        return False
    return num_batches == config.accumulation_steps

"""Functions that tell which values of a command can be set, and whether a run used the requested values. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from autotune_amp.command.measure import (
    FULL_PRECISIONS,
    autocast_precision,
    batch_sizes,
    passes_per_step,
    precision_of,
    samples_per_step,
    training_loader,
    weights_of,
)
from autotune_amp.command.messages import Set
from autotune_amp.command.rank_steps import Rank
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.setting import Setting

_ACCUMULATION_FLAG = re.compile(r"--gradient[_-]accumulation[_-]steps\b")


def unsettable(line: CommandTemplate, rank: Rank) -> dict[str, str]:
    """Return the reason for each precision or dimension that cannot be changed. `rank` is of the unchanged run."""
    reasons, placeholders = {}, line.placeholders
    in_framework = {name for switch in rank.switches for name in switch.arguments}
    precision = placeholders.get("precision")
    if precision is None:
        reasons["fp8"] = "the command has no {precision}, and without it layers cannot be replaced by fp8 layers"
        if not rank.scalers and "precision" not in in_framework:
            reasons["fp16"] = "the script has no GradScaler, and the command no {precision}: fp16 needs one of them"
    elif precision.choices is not None:
        for name in PRECISIONS:
            if name not in precision.choices:
                reasons[name] = "{precision:…} has no arguments for it"
    if "accumulation_steps" not in placeholders and "accumulation_steps" not in in_framework:
        least, most = passes_per_step(rank) or (1.0, 1.0)
        reasons["accumulation_steps"] = (
            f"the script itself changes how many batches it accumulates: {least:g} to {most:g} were seen"
            if least < most
            else "the command has no {accumulation_steps}, and a script's own loop cannot be changed to accumulate"
        )
    accumulating = {switch.owner for switch in rank.switches if "accumulation_steps" in switch.arguments}
    if "accumulation_steps" not in placeholders and accumulating == {"Accelerator.accumulate"}:
        flag = next((word for word in _script_arguments(line.arguments) if _ACCUMULATION_FLAG.match(word)), None)
        if flag is not None:  # as in Transformers' examples, whose number of steps also depends on it
            reasons["accumulation_steps"] = f"the script itself reads {flag}, and it has no {{accumulation_steps}}"
    if "batch_size" not in placeholders and "batch_size" not in in_framework:
        loader = training_loader(rank)
        if loader is None or loader.batch_size is None:
            own_sampler = "the script's own batch sampler makes the batches of its DataLoader"
            reason = "no DataLoader was seen" if loader is None else own_sampler
            reasons["batch_size"] = f"the command has no {{batch_size}}, and {reason}"
    return reasons


def _script_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments of a command from its script or module on, without those of a launcher before it; all if
    there is neither.
    """
    scripts = [number for number, word in enumerate(arguments) if word.endswith(".py")]
    modules = [number for number, word in enumerate(arguments) if word in ("-m", "--module")]
    return arguments[min([*scripts, *modules], default=0) :]


def left_to_script(config: AmpConfig, handled: Collection[str] = ()) -> list[str]:
    """Return the dimensions of a recommendation that only a line of the script can set: those that neither the agent,
    nor an environment variable, nor `handled` sets.
    """
    others = {"precision", "fp8_recipe", "batch_size", "accumulation_steps", "as_found", "arguments", "allocator"}
    return [name for name in Setting.__struct_fields__ if name not in {*others, *handled} and config.uses(name)]


def raise_if_fp8(precision: object) -> None:
    """Raise `InvalidRequestError` for fp8, whose layers cannot be set from outside of the script."""
    if precision == "fp8":
        raise InvalidRequestError(
            "The recommendation is fp8, whose layers only a line of the script can set up.",
            "Write `model, optimizer = prepare(config, model, optimizer)` and the controller in the script: "
            "`autotune-amp show` prints the lines.",
        )


def raise_if_data_parallel(rank: Rank) -> None:
    """Raise `WorkloadError` if a Trainer of Transformers put its model in ``nn.DataParallel``, and so multiplied its
    batch size by the number of visible GPUs.
    """
    num_gpus = max((int(switch.today.get("n_gpu", 0)) for switch in rank.switches), default=0)
    if num_gpus > 1:
        raise WorkloadError(
            f"Without a launcher, Transformers' Trainer multiplies its batch size by the {num_gpus} GPUs that it sees.",
            f"Start it with `torchrun --nproc_per_node {num_gpus}` in place of python, or set CUDA_VISIBLE_DEVICES=0.",
        )


def missing_placeholders(
    line: CommandTemplate, today: Setting, num_workers: int | None, reasons: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the placeholders that would let a search try more values, each with the value in use.

    `num_workers` is that of the training's DataLoader, None without one; `reasons` are those of `unsettable`.
    """
    in_use = {"precision": today.precision, "num_workers": num_workers} | {
        name: getattr(today, name) for name in ("batch_size", "accumulation_steps") if name in reasons
    }
    if not any(name in reasons for name in PRECISIONS if name != "fp8"):  # few scripts have layers for fp8
        del in_use["precision"]
    return tuple(
        f"{{{name}={value}}}" for name, value in in_use.items() if value is not None and name not in line.filled_names
    )


def note_on_values_set(sets: Iterable[Set]) -> list[str]:
    """Return a note on the values that the agent set without a placeholder, and where; empty without any."""
    places = [
        f"{message.name.replace('_', ' ')} in {message.what}{f' at {message.line}' if message.line else ''}"
        for message in sets
    ]
    if not places:
        return []
    return [f"Set without a placeholder: {', '.join(places)}."]


def probing_setting(
    today: Setting, reasons: Mapping[str, str], *, is_batch_free: bool = True, num_sharing: int = 1
) -> Setting | None:
    """Return a setting with which to check that values reach the training: `today` with another batch size and
    precision, as far as they can be set; None if neither can.

    `reasons` are those of `unsettable`. Unless `is_batch_free`, the batch size is changed only if the accumulation can
    be changed too, or if the script accumulates today: it may then keep its effective batch size itself. `num_sharing`
    ranks divide a batch among them.
    """
    is_accumulation_fixed = "accumulation_steps" in reasons
    is_batch_size_fixed = "batch_size" in reasons or (
        is_accumulation_fixed and not is_batch_free and today.accumulation_steps == 1
    )
    of_rank = msgspec.structs.replace(today, batch_size=max(1, today.batch_size // num_sharing))
    sizes = [] if is_batch_size_fixed else [num_sharing * _other_batch_size(of_rank)]
    candidates: tuple[Precision, ...] = ("bf16", "fp32")
    precisions = [p for p in candidates if p not in reasons and p != today.precision]
    if not sizes and not precisions:
        return None
    return Setting(
        precision=precisions[0] if precisions else today.precision,
        batch_size=sizes[0] if sizes else today.batch_size,
        accumulation_steps=today.accumulation_steps if is_accumulation_fixed else _other_accumulation_steps(today),
        num_workers=today.num_workers,
    )


def _other_batch_size(today: Setting) -> int:
    """Return half of today's batch size; for a script that accumulates, the nearest size below that which divides its
    effective batch size.
    """
    half = max(1, today.batch_size // 2) if today.batch_size > 1 else 2
    if today.accumulation_steps == 1:
        return half
    total = today.effective_batch_size
    divisors = [size for size in range(1, total + 1) if total % size == 0 and size != today.batch_size]
    return max((size for size in divisors if size <= half), default=half)


def keeps_effective_batch_size(today: Setting, rank_today: Rank, other: Setting, rank_other: Rank) -> bool:
    """Whether the script keeps its effective batch size: all optimizer steps of a run have the same number of batches,
    and those at another batch size as many samples as those of `today`.
    """
    totals = samples_per_step(rank_today), samples_per_step(rank_other)
    passes = passes_per_step(rank_today), passes_per_step(rank_other)
    is_steady = all(least_most is not None and least_most[0] == least_most[1] for least_most in passes)
    return (
        other.batch_size != today.batch_size
        and is_steady
        and None not in totals
        and _is_close(totals[0] or 0.0, totals[1] or 0.0)
    )


def _other_accumulation_steps(today: Setting) -> int:
    """Return accumulation steps with which half the batch size gives another effective batch size than today's."""
    return today.accumulation_steps + (1 if today.accumulation_steps == 2 else 2)


def batches_in(num_samples: float, batch_size: int) -> int:
    """Return the number of batches of `batch_size` in an optimizer step, 1 if its samples are not a whole number of
    batches.
    """
    num = round(num_samples / batch_size)
    return num if num and _is_close(num_samples, num * batch_size) else 1


def _is_close(observed: float, requested: float) -> bool:
    """Whether the numbers differ by at most 2 %."""
    return abs(observed - requested) <= 0.02 * requested


def deviation(
    line: CommandTemplate,
    setting: Setting,
    rank: Rank,
    num_sharing: int = 1,
    *,
    is_accumulation_own: bool = False,
    is_batch_size_own: bool = False,
) -> Failure | None:
    """Return a failure that names the requested and the observed value, if a run of `setting` did not use it; else
    None.

    `num_sharing` ranks divide a batch among them. `is_accumulation_own`: the script decides how many batches it
    accumulates; `is_batch_size_own`: and how many samples are in each, which may vary.
    """
    if is_batch_size_own:
        message = None if is_accumulation_own else _accumulation_problem(setting, rank)
    else:
        message = _samples_problem(line, setting, rank, num_sharing, is_accumulation_own=is_accumulation_own)
    if message is not None:
        if training_loader(rank) is None:
            message += "; without a DataLoader, the leading dimension of the model's inputs is counted"
        return Failure(kind="workload_error", message=message)
    loader = training_loader(rank)
    if setting.num_workers is not None and loader is not None and loader.num_workers != setting.num_workers:
        message = f"its loader has {loader.num_workers} workers, but {setting.num_workers} were requested"
        return Failure(kind="workload_error", message=f"{message}: {{num_workers}} does not reach the DataLoader")
    return None if is_precision_possible(setting.precision, rank) else _precision_failure(line, setting, rank)


def ignored_precision(
    line: CommandTemplate, setting: Setting, rank: Rank, today: Setting, rank_today: Rank
) -> str | None:
    """Return the problem if a run of `setting` used the same precision as the run of `today`; None if it used another,
    or none was observed.

    Weights in bf16 alone do not show whether the script loads them so or converts them on request, so that both runs
    are compared.
    """
    if setting.precision == today.precision or {setting.precision, today.precision} <= FULL_PRECISIONS:
        return None
    observed, observed_today = [(autocast_precision(each), weights_of(each)) for each in (rank, rank_today)]
    return (
        _precision_failure(line, setting, rank).message
        if observed == observed_today and observed[1] is not None
        else None
    )


def is_precision_possible(precision: Precision, rank: Rank) -> bool:
    """Whether the run of a rank may have used a precision. Without autocast, weights in half precision may be trained
    in what is called fp32.
    """
    observed = precision_of(rank)
    if observed is None or observed == precision:
        return True
    return precision in FULL_PRECISIONS and autocast_precision(rank) in FULL_PRECISIONS


def _precision_failure(line: CommandTemplate, setting: Setting, rank: Rank) -> Failure:
    placeholder_reason = ": {precision} does not reach its autocast regions" if "precision" in line.placeholders else ""
    is_precision_of_weights = autocast_precision(rank) in FULL_PRECISIONS and weights_of(rank) not in FULL_PRECISIONS
    weights_reason = " (the dtype of its weights, without autocast)" if is_precision_of_weights else ""
    message = f"its steps ran in {precision_of(rank)}{weights_reason}, but {setting.precision} was requested"
    return Failure(kind="unsupported", message=message + placeholder_reason)


def _accumulation_problem(setting: Setting, rank: Rank) -> str | None:
    """Return a message on the number of batches in an optimizer step, if it is not the requested one; else None."""
    least, most = passes_per_step(rank) or (setting.accumulation_steps,) * 2
    if least <= setting.accumulation_steps <= most:
        return None
    return (
        f"an optimizer step took {least:g} batches, but {setting.accumulation_steps} were requested: "
        "{accumulation_steps} does not reach the training"
    )


def _samples_problem(
    line: CommandTemplate, setting: Setting, rank: Rank, num_sharing: int, *, is_accumulation_own: bool
) -> str | None:
    """Return a message on the size of the batches or the samples of an optimizer step, if they differ from the
    requested ones; else None.
    """
    observed, passes = samples_per_step(rank), passes_per_step(rank)
    requested, requested_size = setting.effective_batch_size / num_sharing, setting.batch_size / num_sharing
    if observed is None or passes is None:
        return None
    sizes = sorted(batch_sizes(rank))
    is_batch_size_used = any(_is_close(size, requested_size) for size in sizes)
    is_total_used = _is_close(observed, requested)
    keeps = line.keeps_effective_batch_size
    is_total_decided_by_script = (is_accumulation_own or keeps) and not (keeps and passes[0] == passes[1])
    if (is_total_used and (is_batch_size_used or not keeps)) or (is_batch_size_used and is_total_decided_by_script):
        return None
    reasons = {name: f"{{{name}}} does not reach the training, or the script changes it" for name in line.placeholders}
    if is_batch_size_used:
        batches = f" ({passes[0]:g} batches of {requested_size:g})" if passes[0] == passes[1] else ""
        reason = reasons.get("accumulation_steps", "")
    else:
        batches = f" (batches of {' or '.join(f'{size:g}' for size in sizes)})" if sizes else ""
        reason = reasons.get("batch_size", "")
    product = f" ({setting.batch_size} x {setting.accumulation_steps})" if setting.accumulation_steps > 1 else ""
    each = " on each rank" if rank.world > 1 else ""
    message = f"an optimizer step took {observed:g} samples{batches}{each}, but {requested:g}{product} were requested"
    return f"{message}: {reason}" if reason else message

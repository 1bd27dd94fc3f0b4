"""Values of a command that can be set, by a placeholder or from outside, and whether a run used the values asked for.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autotune_amp.command.measure import (
    FULL,
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
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.setting import Setting


def unsettable(line: CommandTemplate, rank: Rank) -> dict[str, str]:
    """Return, for each precision or dimension that cannot be changed, the reason. `rank` was observed in a run as of
    today.
    """
    found, placeholders = {}, line.placeholders
    in_framework = {name for switch in rank.switches for name in switch.arguments}
    precision = placeholders.get("precision")
    if precision is None:
        found["fp8"] = "the command has no {precision}, and from outside of it no layers can be replaced"
        if not rank.scalers and "precision" not in in_framework:
            found["fp16"] = "the script has no GradScaler, without which fp16 cannot be set from outside"
    elif precision.choices is not None:
        for name in PRECISIONS:
            if name not in precision.choices:
                found[name] = "{precision:…} has no arguments for it"
    if "accumulation_steps" not in placeholders and "accumulation_steps" not in in_framework:
        least, most = passes_per_step(rank) or (1.0, 1.0)
        found["accumulation_steps"] = (
            f"the script itself changes how many batches it accumulates: {least:g} to {most:g} were seen"
            if least < most
            else "the command has no {accumulation_steps}, and a loop of the script's own cannot be made to accumulate"
        )
    if "batch_size" not in placeholders and "batch_size" not in in_framework:
        loader = training_loader(rank)
        if loader is None or loader.batch_size is None:
            own = "its DataLoader takes batches from a sampler of its own"
            what = "no DataLoader was seen" if loader is None else own
            found["batch_size"] = f"the command has no {{batch_size}}, and {what}"
    return found


def set_from_outside(sets: Iterable[Set]) -> list[str]:
    """Return a note that names the values that are set without a placeholder and the places where; empty if there are
    none.
    """
    found = [f"{one.name.replace('_', ' ')} in {one.what}{f' at {one.line}' if one.line else ''}" for one in sets]
    if not found:
        return []
    return [f"Set from outside, since the command has no placeholder for it: {', '.join(found)}."]


def probing_setting(today: Setting, cannot: Mapping[str, str], *, is_batch_free: bool = True) -> Setting | None:
    """Return a setting that shows whether a command follows: `today` with another batch size and another precision, as
    far as they can be set; None if neither can.

    Unless `is_batch_free`, the batch size is changed only if accumulation can make up for it, or if the script
    accumulates today and so may keep its effective batch size itself.
    """
    is_given = "accumulation_steps" in cannot
    is_kept = "batch_size" in cannot or (is_given and not is_batch_free and today.accumulation_steps == 1)
    sizes = [] if is_kept else [_other_size(today)]
    lower: tuple[Precision, ...] = ("bf16", "fp32")
    others = [p for p in lower if p not in cannot and p != today.precision]
    if not sizes and not others:
        return None
    return Setting(
        precision=others[0] if others else today.precision,
        batch_size=sizes[0] if sizes else today.batch_size,
        accumulation_steps=today.accumulation_steps if is_given else _other_steps(today),
        num_workers=today.num_workers,
    )


def _other_size(today: Setting) -> int:
    """Return half of today's batch size; for a script that accumulates, the nearest size below that which divides its
    effective batch size.
    """
    half = max(1, today.batch_size // 2) if today.batch_size > 1 else 2
    if today.accumulation_steps == 1:
        return half
    total = today.effective_batch_size
    divisors = [size for size in range(1, total + 1) if total % size == 0 and size != today.batch_size]
    return max((size for size in divisors if size <= half), default=half)


def keeps_effective_batch_size(today: Setting, seen: Rank, other: Setting, seen_other: Rank) -> bool:
    """Whether every optimizer step took the same number of batches, and as many samples at another batch size as
    `today`.
    """
    totals = samples_per_step(seen), samples_per_step(seen_other)
    passes = passes_per_step(seen), passes_per_step(seen_other)
    is_steady = all(found is not None and found[0] == found[1] for found in passes)
    return (
        other.batch_size != today.batch_size
        and is_steady
        and None not in totals
        and _is_close(totals[0] or 0.0, totals[1] or 0.0)
    )


def _other_steps(today: Setting) -> int:
    """Return accumulation steps with which half the batch size gives another effective batch size than today's."""
    return today.accumulation_steps + (1 if today.accumulation_steps == 2 else 2)


def batches_in(num_samples: float, batch_size: int) -> int:
    """Return the number of batches of `batch_size` in an optimizer step, 1 if its samples are not a whole number of
    batches.
    """
    num = round(num_samples / batch_size)
    return num if num and _is_close(num_samples, num * batch_size) else 1


def _is_close(seen: float, asked: float) -> bool:
    return abs(seen - asked) <= 0.02 * asked


def deviation(
    line: CommandTemplate, setting: Setting, rank: Rank, num_sharing: int = 1, *, is_accumulation_own: bool = False
) -> Failure | None:
    """Return a failure that names the value asked for and the value seen, if a run of `setting` did not use it; else
    None.

    `num_sharing` ranks divide a batch among them. With `is_accumulation_own` the script decides how many batches it
    accumulates.
    """
    message = _other_samples(line, setting, rank, num_sharing, is_accumulation_own=is_accumulation_own)
    if message is not None:
        if training_loader(rank) is None:
            message += "; no DataLoader was seen, so that the leading dimension of what enters the model is counted"
        return Failure(kind="workload_error", message=message)
    loader = training_loader(rank)
    if setting.num_workers is not None and loader is not None and loader.num_workers != setting.num_workers:
        message = f"its loader has {loader.num_workers} workers, where {setting.num_workers} were asked for"
        return Failure(kind="workload_error", message=f"{message}: {{num_workers}} does not reach it")
    return None if _may_have_run_in(setting.precision, rank) else _of_precision(line, setting, rank)


def ignored_precision(
    line: CommandTemplate, setting: Setting, rank: Rank, today: Setting, rank_today: Rank
) -> str | None:
    """Return why a run of `setting` used the same precision as the run of `today`; None if it used another or none is
    visible.

    A model whose weights are loaded in bf16 computes with them as they are in rows called fp32, and a script may also
    convert its weights when bf16 is asked for: only the two runs together tell these apart.
    """
    if setting.precision == today.precision or {setting.precision, today.precision} <= FULL:
        return None
    seen, seen_today = [(autocast_precision(each), weights_of(each)) for each in (rank, rank_today)]
    return _of_precision(line, setting, rank).message if seen == seen_today and seen[1] is not None else None


def _may_have_run_in(precision: Precision, rank: Rank) -> bool:
    seen = precision_of(rank)
    if seen is None or seen == precision:
        return True
    return precision in FULL and autocast_precision(rank) in FULL


def _of_precision(line: CommandTemplate, setting: Setting, rank: Rank) -> Failure:
    why = ": {precision} does not reach its autocast" if "precision" in line.placeholders else ""
    is_by_weights = autocast_precision(rank) in FULL and weights_of(rank) not in FULL
    how = ", which its weights are kept in, without autocast," if is_by_weights else ","
    message = f"its steps ran in {precision_of(rank)}{how} where {setting.precision} was asked for{why}"
    return Failure(kind="unsupported", message=message)


def _other_samples(
    line: CommandTemplate, setting: Setting, rank: Rank, num_sharing: int, *, is_accumulation_own: bool
) -> str | None:
    """Return a message that names the size of the batches or the samples of the optimizer steps, if they differ from
    those asked for; else None.
    """
    seen, passes = samples_per_step(rank), passes_per_step(rank)
    asked, asked_size = setting.effective_batch_size / num_sharing, setting.batch_size / num_sharing
    if seen is None or passes is None:
        return None
    sizes = sorted(batch_sizes(rank))
    is_followed = any(_is_close(size, asked_size) for size in sizes)
    is_total = _is_close(seen, asked)
    keeps = line.keeps_effective_batch_size
    is_decided = (is_accumulation_own or keeps) and not (keeps and passes[0] == passes[1])  # the script decides
    if (is_total and (is_followed or not keeps)) or (is_followed and is_decided):
        return None
    why = {name: f"{{{name}}} does not reach its loader, or it adapts it" for name in line.placeholders}
    if is_followed:
        batches = f" ({passes[0]:g} batches of {asked_size:g})" if passes[0] == passes[1] else ""
        reason = why.get("accumulation_steps", "")
    else:
        batches = f" (batches of {' or '.join(f'{size:g}' for size in sizes)})" if sizes else ""
        reason = why.get("batch_size", "")
    wanted = f" ({setting.batch_size} x {setting.accumulation_steps})" if setting.accumulation_steps > 1 else ""
    each = " on each rank" if rank.world > 1 else ""
    said = f"an optimizer step took {seen:g} samples{batches}{each}, where {asked:g}{wanted} were asked for"
    return f"{said}: {reason}" if reason else said

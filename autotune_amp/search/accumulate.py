"""Whether gradient accumulation is offered: one check on the user's own workload before anything accumulates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.fidelity import Accumulation
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.setting import Setting
from autotune_amp.search.batch_sizes import has_few, neighbours, of_all_ranks
from autotune_amp.search.verdicts import MAX_BATCH_SIZE, sentence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.config import AmpConfig
    from autotune_amp.core.outcome import Record
    from autotune_amp.isolation.backend import Backend
    from autotune_amp.search.session import Session
    from autotune_amp.search.space import Space

CHECK_SHARE = 0.15  # of the budget, at most: a search without accumulation is better than none

_FREE = "--effective-batch-size free tries them without it."


def judge(session: Session, runner: Backend, space: Space) -> Space:
    """The space with what accumulates only where that learns what the whole batch learns; checks it where needed.

    Raises `InvalidRequestError` where accumulation is withheld and nothing is left without it.
    """
    if _accumulates(space) and finding(session.records) is None:
        _check(session, runner, space.baseline.effective_batch_size)
    return judged(space, session.records)


def judged(space: Space, records: Sequence[Record]) -> Space:
    """The same from the records of a search, without running anything."""
    found = finding(records)
    if found is None or found.is_exact or not _accumulates(space):
        return space
    space = without_accumulation(space, found.reason, found.next_step)
    if space.baseline.accumulation_steps == 1:
        return space
    learns = "does not learn" if found.verdict == "inexact" else "may not learn"
    note = f"The baseline, {space.baseline}, accumulates: what runs today {learns} what "
    note += f"a batch of {space.baseline.effective_batch_size} learns."
    return msgspec.structs.replace(space, notes=(*space.notes, note))


def is_offered(session: Session, runner: Backend, space: Space) -> bool:
    """Whether anything may accumulate; checks it where nobody has, for a space in which nothing does."""
    if space.accumulation_withheld is None and finding(session.records) is None and session.clock.left_for_search() > 0:
        _check(session, runner, space.baseline.effective_batch_size)
    return may_add(space, session.records)


def may_add(space: Space, records: Sequence[Record]) -> bool:
    """Whether what does not accumulate today may: it is not withheld, and the check found it exact."""
    found = finding(records)
    return space.accumulation_withheld is None and found is not None and found.is_exact


def finding(records: Sequence[Record]) -> Accumulation | None:
    """What the check found, *unchecked* where it did not come to an end; None where there was none."""
    record = next((r for r in reversed(records) if r.purpose == "accumulation"), None)
    if record is None:
        return None
    if isinstance(record.outcome, Accumulation):
        return record.outcome
    failure = record.outcome
    assert isinstance(failure, Failure)
    return Accumulation(
        verdict="unchecked",
        reason=sentence(f"Accumulation is unchecked: the check did not end: {failure.kind}: {failure.message}"),
        next_step="Give a larger --budget." if failure.kind == "timeout" else "Mend what the reason names.",
        batch_size=record.candidate.batch_size,
        num_micro_batches=0,
        seconds=record.seconds,
    )


def is_loss_sum(records: Sequence[Record]) -> bool:
    """Whether the loss was found to be a sum, which is not divided by the accumulation steps."""
    found = finding(records)
    return found is not None and found.verdict == "sum"


def without_accumulation(space: Space, reason: str, next_step: str) -> Space:
    """The space without what accumulates, which is said: an exclusion for each precision, and a note.

    The baseline stays, since it is what the user runs. Raises `InvalidRequestError` where nothing is left to try.
    """
    whole = space.effective_batch_size
    assert whole is not None  # nothing accumulates where it is free
    left = tuple(c for c in space.candidates if c.accumulation_steps == 1)
    if not left:
        raise InvalidRequestError(
            f"Gradient accumulation is withheld, and no batch size in the range does without it to keep the effective "
            f"batch size {of_all_ranks(whole, space.num_ranks)}. {sentence(reason)}",
            f"Give a --batch-size range and a dataset that hold {whole}, or --effective-batch-size free.",
        )
    todays = space.baseline.precision, space.baseline.batch_size
    largest: dict[str, Setting] = {}
    for candidate in space.candidates:  # ascending by batch size
        if candidate.accumulation_steps > 1 and (candidate.precision, candidate.batch_size) != todays:
            largest[candidate.precision] = candidate
    why = f"accumulation is withheld: {reason.rstrip('.')}; this and all smaller batch sizes are left out"
    excluded = [Exclusion(precision=c.precision, batch_size=c.batch_size, reason=why) for c in largest.values()]
    note = f"Batch sizes below {whole} are left out, since gradient accumulation is withheld. {sentence(reason)} "
    note += f"{sentence(next_step)} {_FREE}" if next_step else _FREE
    return msgspec.structs.replace(
        space,
        candidates=left,
        excluded=(*space.excluded, *excluded),
        notes=(*space.notes, note) if largest else space.notes,
        accumulation_withheld=reason,
    )


def warnings(space: Space, chosen: Setting, config: AmpConfig, found: Accumulation | None) -> list[str]:
    """What a changed effective batch, a loss to be weighted and an effective batch without divisors ask of the user."""
    said = []
    before, after = space.baseline.effective_batch_size, chosen.effective_batch_size
    if before != after:
        said.append(
            f"The batch size was free to change: the optimizer sees {after} samples a step instead of {before}, and "
            f"the learning rate may need another look. --effective-batch-size {before * space.num_ranks} keeps them."
        )
    num_steps = [config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]
    asking = ("sum",) if space.weighs_passes else ("sum", "weighted")
    if max(num_steps) > 1 and found is not None and found.verdict in asking:
        said.append(f"{sentence(found.reason)} {sentence(found.next_step)}")
    kept = space.effective_batch_size
    if kept is not None and space.accumulation_withheld is None and has_few(kept):
        options = [f"--effective-batch-size {n * space.num_ranks}" for n in neighbours(kept)]
        if options:
            said.append(
                f"The effective batch size {of_all_ranks(kept, space.num_ranks)} has few divisors, so there are few "
                f"batch sizes that keep it. Its neighbours have more: {' or '.join(options)}."
            )
    return said


def _accumulates(space: Space) -> bool:
    return any(c.accumulation_steps > 1 for c in (*space.candidates, space.baseline))


def _check(session: Session, runner: Backend, effective_batch_size: int) -> None:
    session.progress.phase("checking whether gradients accumulate")
    session.check(
        runner,
        "accumulation",
        Setting(precision="fp32", batch_size=min(MAX_BATCH_SIZE, effective_batch_size)),
        seconds=CHECK_SHARE * session.clock.budget_seconds,
    )

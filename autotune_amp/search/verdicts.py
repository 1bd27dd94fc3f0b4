"""What the checks against fp32 say of candidates: which are out, which come last, which nobody has checked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from autotune_amp.core.config import Precision  # msgspec and NamedTuple read it
from autotune_amp.core.fidelity import Fidelity
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Exclusion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.core.outcome import Record
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.space import Space

# A check or calibration that fails so tells of the precision; any other failure tells of the check itself.
OF_THE_PRECISION = ("unsupported", "nonfinite")

MAX_BATCH_SIZE = 16  # of a check: what rounding does hardly moves with the batch size (measurement.md, Fidelity)


class Check(NamedTuple):
    """What one check is of; its verdict holds for every batch size."""

    precision: Precision
    pinned_modules: tuple[str, ...] = ()


def check_of(candidate: Setting) -> Check:
    """The check whose verdict holds for a candidate. fp32 as found is fp32 with TF32 in parts of it."""
    if candidate.as_found and candidate.precision == "fp32":
        return Check("tf32")
    return Check(candidate.precision, candidate.pinned_modules)


def needs_check(candidate: Setting, space: Space) -> bool:
    """Whether fp32 is to be held against it: not strict fp32 itself, unless its weights are in low precision."""
    return check_of(candidate).precision != "fp32" or space.weights in ("bf16", "fp16")


def can_check(candidate: Setting, space: Space) -> bool:
    """Whether a check tells something of the candidate: fp32 as found can mean more than TF32 off CUDA."""
    return needs_check(candidate, space) and (check_of(candidate).precision != "tf32" or space.has_tf32)


def verdicts(records: Sequence[Record]) -> dict[Check, Fidelity]:
    """The latest verdict of each check that was made, one that failed too."""
    found: dict[Check, Fidelity] = {}
    for record in records:
        if record.purpose == "fidelity":
            outcome = record.outcome
            judged = outcome if isinstance(outcome, Fidelity) else _of_failure(record)
            found[Check(record.candidate.precision, record.candidate.pinned_modules)] = judged
    return found


def verdict_on(candidate: Setting, space: Space, known: Mapping[Check, Fidelity]) -> Fidelity | None:
    """The verdict on a candidate, *unchecked* where no check was made; None for fp32, which the others are held to."""
    if not needs_check(candidate, space):
        return None
    unmade = (
        ("the budget ended before it was checked", "Give a larger --budget.")
        if can_check(candidate, space)
        else ("its flags are the caller's own, and here they cannot be checked", "Try --baseline with a precision.")
    )
    return known.get(check_of(candidate)) or _unchecked(candidate, *unmade)


def unfaithful(known: Mapping[Check, Fidelity], candidate: Setting) -> Fidelity | None:
    """The verdict against a candidate, if there is one."""
    found = known.get(check_of(candidate))
    return found if found is not None and found.verdict == "unfaithful" else None


def tier(found: Fidelity | None) -> int:
    """What ranks before what: fp32 and the faithful are in tier 0, then the unchecked, then the doubtful."""
    return 0 if found is None else {"unchecked": 1, "doubtful": 2}.get(found.verdict, 0)


def exclusions(known: Mapping[Check, Fidelity]) -> tuple[Exclusion, ...]:
    """The precisions that the verdicts rule out, at every batch size; with their pins they are candidates apart."""
    return tuple(
        Exclusion(precision=check.precision, batch_size=None, reason=harm(found))
        for check, found in known.items()
        if found.verdict == "unfaithful" and not check.pinned_modules
    )


def harm(found: Fidelity) -> str:
    """A verdict against a precision as the reason of an exclusion."""
    return found.reason.rstrip(".")


def sentence(text: str) -> str:
    """A reason or a message with one full stop."""
    return f"{text.rstrip('.')}."


def _of_failure(record: Record) -> Fidelity:
    failure, candidate = record.outcome, record.candidate
    assert isinstance(failure, Failure)
    if failure.kind in OF_THE_PRECISION:
        return Fidelity(
            precision=candidate.precision,
            batch_size=candidate.batch_size,
            pinned_modules=candidate.pinned_modules,
            verdict="unfaithful",
            reason=f"{candidate.precision} is unfaithful: {failure.kind}: {failure.message.rstrip('.')}.",
            next_step="Use another precision.",
            seconds=record.seconds,
        )
    next_step = "Give a larger --budget." if failure.kind == "timeout" else "Mend what the reason names."
    return _unchecked(candidate, f"the check did not come to an end: {failure.kind}: {failure.message}", next_step)


def _unchecked(candidate: Setting, reason: str, next_step: str) -> Fidelity:
    return Fidelity(
        precision=check_of(candidate).precision,
        batch_size=candidate.batch_size,
        pinned_modules=candidate.pinned_modules,
        verdict="unchecked",
        reason=f"{check_of(candidate).precision} is unchecked: {reason.rstrip('.')}.",
        next_step=next_step,
    )

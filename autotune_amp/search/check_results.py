"""What failures and checks say of settings: which are out, which come last, which nobody has checked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from autotune_amp.core.outcome import Accumulation, Failure, Fidelity, Measurement
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.core.text import sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.core.outcome import Record
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.space import Space

# A check or calibration that fails so tells of the precision; any other failure tells of the check itself.
OF_THE_PRECISION = ("unsupported", "nonfinite")
BEFORE_CONFIRMATION = ("search", "fallback")  # purposes of the trials whose measurements say what to confirm

MAX_BATCH_SIZE = 16  # of a check: what rounding does hardly moves with the batch size (studies/README.md)


def is_trial(record: Record) -> bool:
    """Whether a record is of a trial, and not of a check."""
    return record.purpose not in ("fidelity", "calibration", "accumulation")


def disqualifying(record: Record, records: Sequence[Record]) -> Failure | None:
    """The failure that speaks against a record's candidate, if it is one; `records` are what else is known of it.

    A confirmation cut off by the budget does not, nor does the one run without the recommended environment, nor what
    is no more than an outlook, nor a search trial that overran its time where another of its candidate did not: the
    machine stalled. What a check's failure says is for `found_fidelity`, `found_accumulation` and `loss_scales` to
    tell.
    """
    failure = record.outcome
    if not isinstance(failure, Failure) or record.purpose in ("plain", "outlook") or not is_trial(record):
        return None
    if failure.kind != "timeout":
        return failure
    is_stalled = record.purpose == "search" and any(
        r.candidate == record.candidate and r.purpose == "search" and isinstance(r.outcome, Measurement)
        for r in records
    )
    return None if is_stalled or record.purpose == "confirm" else failure


def failures(records: Sequence[Record]) -> dict[Setting, Failure]:
    """The candidates with a failure that speaks against them, and the first such of each."""
    found: dict[Setting, Failure] = {}
    for record in records:
        if failure := disqualifying(record, records):
            found.setdefault(record.candidate, failure)
    return found


def check_key(candidate: Setting) -> Setting:
    """The check whose verdict holds for a candidate at every batch size: its numerics at batch 1.

    fp32 as found is fp32 with TF32 in parts of it.
    """
    precision = "tf32" if candidate.as_found and candidate.precision == "fp32" else candidate.precision
    return replace(candidate.numerics, precision=precision, batch_size=1, accumulation_steps=1)


def needs_check(candidate: Setting, space: Space) -> bool:
    """Whether fp32 is to be held against it: not strict fp32 itself, unless its weights are in low precision."""
    return check_key(candidate).precision != "fp32" or space.weights in ("bf16", "fp16")


def can_check(candidate: Setting, space: Space) -> bool:
    """Whether a check tells something of the candidate: fp32 as found can mean more than TF32 off CUDA."""
    return needs_check(candidate, space) and (check_key(candidate).precision != "tf32" or space.has_tf32)


def found_fidelity(records: Sequence[Record]) -> dict[Setting, Fidelity]:
    """The latest verdict of each check that was made, one that failed too."""
    found: dict[Setting, Fidelity] = {}
    for record in records:
        if record.purpose == "fidelity":
            outcome = record.outcome
            judged = outcome if isinstance(outcome, Fidelity) else _of_failure(record)
            found[check_key(record.candidate)] = judged
    return found


def found_accumulation(records: Sequence[Record]) -> Accumulation | None:
    """What the check of accumulation found, *unchecked* where it did not come to an end; None where there was none."""
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


def verdict_on(candidate: Setting, space: Space, known: Mapping[Setting, Fidelity]) -> Fidelity | None:
    """The verdict on a candidate, *unchecked* where no check was made; None for fp32, which the others are held to."""
    if not needs_check(candidate, space):
        return None
    unmade = (
        ("the budget ended before it was checked", "Give a larger --budget.")
        if can_check(candidate, space)
        else ("its flags are the caller's own, and here they cannot be checked", "Try --baseline with a precision.")
    )
    return known.get(check_key(candidate)) or _unchecked(candidate, *unmade)


def unfaithful(known: Mapping[Setting, Fidelity], candidate: Setting) -> Fidelity | None:
    """The verdict against a candidate, if there is one."""
    found = known.get(check_key(candidate))
    return found if found is not None and found.verdict == "unfaithful" else None


def tier(found: Fidelity | None) -> int:
    """What ranks before what: fp32 and the faithful are in tier 0, then the unchecked, then the doubtful."""
    return 0 if found is None else {"unchecked": 1, "doubtful": 2}.get(found.verdict, 0)


def exclusions(known: Mapping[Setting, Fidelity]) -> tuple[Exclusion, ...]:
    """The precisions that the verdicts rule out, at every batch size; with their pins they are candidates apart."""
    return tuple(
        Exclusion(precision=check.precision, batch_size=None, reason=harm(found))
        for check, found in known.items()
        if found.verdict == "unfaithful" and not check.pinned_modules
    )


def harm(found: Fidelity) -> str:
    """A verdict against a precision as the reason of an exclusion."""
    return found.reason.rstrip(".")


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
        precision=check_key(candidate).precision,
        batch_size=candidate.batch_size,
        pinned_modules=candidate.pinned_modules,
        verdict="unchecked",
        reason=f"{check_key(candidate).precision} is unchecked: {reason.rstrip('.')}.",
        next_step=next_step,
    )

"""One rank searches for all of them: the first one; the others wait for its answer. No torch where there is but one."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core import errors
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, RunnerError
from autotune_amp.core.recommendation import (
    Exclusion,
    Fingerprint,
    NothingWorksError,
    Recommendation,
    SearchInterruptedError,
)

# Rank 0 may come later than the others, and its budget does not hold what it does before and after the search.
_LATE_SECONDS = 600.0

_MAX_REASONS = 3


class Place(NamedTuple):
    """Which rank this process is, of how many.

    `is_rerun`: one that Lightning started by running the script again, where rank 0, which knew of no other ranks then,
    has come past this call. It takes what was saved there, as the one rank that rank 0 took itself for.
    """

    rank: int
    num_ranks: int
    is_rerun: bool = False


class _Raised(msgspec.Struct, frozen=True, kw_only=True):
    """An error of ours on its way to another process."""

    name: str
    message: str
    next_step: str
    excluded: tuple[Exclusion, ...] = ()
    best: Recommendation | None = None


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Either of the two."""

    recommendation: Recommendation | None = None
    raised: _Raised | None = None


def place() -> Place:
    """As torch's process group has it, or else as a launcher says in RANK and WORLD_SIZE.

    Raises `InvalidRequestError` where these are no numbers that go together.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size())
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    if size == "1":
        return Place(0, 1)
    if not rank and os.environ.get("LOCAL_RANK", "0") != "0":
        return Place(0, 1, is_rerun=True)
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise InvalidRequestError(
            f"WORLD_SIZE is {size!r} and RANK is {rank!r}; a launcher sets whole numbers, RANK below WORLD_SIZE.",
            "Start the ranks with torchrun, or unset WORLD_SIZE to search in this process alone.",
        )
    return Place(int(rank), int(size))


def answer_on_first(find: Callable[[], Recommendation], where: Place, budget_seconds: object) -> Recommendation:
    """What `find` returns or raises on rank 0, on every rank; only there is it called.

    Raises `RunnerError` on the other ranks where rank 0 dies, fails by another error than ours or gives no answer in
    twice the budget and ten minutes, and `SearchInterruptedError` at Ctrl-C.
    """
    if where.num_ranks == 1:
        return find()
    from autotune_amp.distributed.rank_store import RankStore

    try:
        store = RankStore(where.rank, where.num_ranks, _limit_seconds(budget_seconds))
        if where.rank > 0:
            return _opened(msgspec.json.decode(store.hear(), type=_Answer))
    except KeyboardInterrupt:
        raise SearchInterruptedError(
            f"Rank {where.rank} was interrupted before rank 0 had an answer.", "Start all ranks again.", (), None
        ) from None
    try:
        found = find()
    except BaseException as error:
        store.tell(_encoded(_Answer(raised=_closed(error))))
        raise
    store.tell(_encoded(_Answer(recommendation=found)))
    return found


def left_no_answer(path: Path, cached: Recommendation | None, fingerprint: Fingerprint | None) -> InvalidRequestError:
    """For a rerun that finds nothing saved by rank 0 which holds for its own call."""
    if fingerprint is None:
        why: tuple[str, ...] = ("a workload given by its name is not known before it is loaded",)
    elif cached is None or cached.search.was_interrupted:
        why = ("there is no finished recommendation",)
    else:
        why = cached.fingerprint.differences(fingerprint)[:_MAX_REASONS]
    return InvalidRequestError(
        f"LOCAL_RANK is {os.environ.get('LOCAL_RANK', '')!r} without a RANK, as in the processes that Lightning starts "
        "by running the script again. They take the answer of the first process, and for this call there is none in "
        f"{path}: {'; '.join(why)}.",
        "Call recommend_config() alike in every process and before the training starts, with the workload itself; or "
        "start the script with torchrun, which needs neither.",
    )


def alone(num_ranks: int, device: str) -> tuple[str, ...]:
    """What one rank's measurement does not hold, as warnings."""
    if num_ranks == 1:
        return ()
    beside = ", and their load was not on the CPU" if device == "cpu" else ""
    return (
        f"Measured on one of {num_ranks} ranks while the others waited: gradients were not exchanged{beside}. A rank "
        "will be slower than this in training.",
    )


def _limit_seconds(budget_seconds: object) -> float:
    """Of a budget that rank 0 may still find to be none."""
    is_budget = isinstance(budget_seconds, (int, float)) and 0 < budget_seconds < math.inf
    return _LATE_SECONDS + (2 * float(budget_seconds) if is_budget else 0.0)  # type: ignore[arg-type]


def _encoded(answer: _Answer) -> str:
    return msgspec.json.encode(answer).decode()


def _closed(error: BaseException) -> _Raised:
    if not isinstance(error, AutotuneAmpError):
        message = f"Rank 0 failed: {type(error).__name__}: {error}"
        return _Raised(name=RunnerError.__name__, message=message, next_step="See the traceback of rank 0.")
    return _Raised(
        name=type(error).__name__,
        message=error.message,
        next_step=error.next_step,
        excluded=error.excluded if isinstance(error, (NothingWorksError, SearchInterruptedError)) else (),
        best=error.best if isinstance(error, SearchInterruptedError) else None,
    )


def _opened(answer: _Answer) -> Recommendation:
    raised = answer.raised
    if raised is None:
        assert answer.recommendation is not None
        return answer.recommendation
    if raised.name == NothingWorksError.__name__:
        raise NothingWorksError(raised.message, raised.next_step, raised.excluded)
    if raised.name == SearchInterruptedError.__name__:
        raise SearchInterruptedError(raised.message, raised.next_step, raised.excluded, raised.best)
    raise vars(errors)[raised.name](raised.message, raised.next_step)

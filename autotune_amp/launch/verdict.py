"""How a run ended, or whether it goes on: decided from what was heard, how its processes ended, and the clock. Pure."""

from __future__ import annotations

import re
import signal
from typing import Literal

import msgspec

from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.launch.messages import Refused
from autotune_amp.launch.ranks import NUM_WARMUP_STEPS, Heard

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|not enough memory|OutOfMemoryError|MemoryError",
    re.IGNORECASE,
)
# What a rank says of another that it lost, and a launcher of its ranks: never the cause.
_OF_OTHERS = re.compile(
    r"connection (closed|reset)|closed by peer|broken pipe|DistBackendError|NCCL|Rank \d+ .*(failed|timed out)|process group",
    re.IGNORECASE,
)
_LAUNCHERS_ERRORS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
_TAIL_CHARACTERS = 4000


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it stands: seconds since it was started and since its latest step, memory of all its processes, how the
    command ended (None: it runs), and what it printed."""

    seconds: float
    seconds_since_step: float
    memory_bytes: int = 0
    status: int | None = None
    printed: str = ""


def verdict(
    heard: Heard, seen: Seen, deadlines: Deadlines, *, is_enough: bool, memory_limit_bytes: int | None
) -> Literal["measured"] | Failure | None:
    """What became of it, None while it goes on. `is_enough`: its steps are measured."""
    if heard.refused is not None:
        return _of_refused(heard.refused)
    if heard.errors:
        return _of_errors(heard, seen)
    for rank in heard.ranks.values():
        if num_ooms := max((step.num_ooms for step in rank.steps), default=0):
            return Failure(kind="oom", message=f"rank {rank.rank} ran out of memory {num_ooms} times and went on")
    if is_enough:
        return "measured"
    if memory_limit_bytes is not None and seen.memory_bytes > memory_limit_bytes:
        return Failure(
            kind="oom",
            message=f"its processes took {seen.memory_bytes >> 20} MiB, over the limit of {memory_limit_bytes >> 20} MiB",
        )
    if seen.status is not None:
        return _of_exit(heard, seen)
    return _overdue(heard, seen, deadlines)


def _of_refused(refused: Refused) -> Failure:
    at = f"{refused.what} at {refused.line}"
    if refused.path.startswith("https://"):
        message, step = f"the command is about to upload to {refused.path} ({at})", "Turn the upload off for the search."
    else:
        message = f"the command is about to change {refused.path}, which was there before ({at})"
        step = "Send its output to {trial_dir}, as in --output {trial_dir}."
    return Failure(kind="workload_error", message=message, details=step)


def _of_errors(heard: Heard, seen: Seen) -> Failure:
    """The error that is the cause: out of memory first, then one that speaks of no other rank."""
    own = [e for e in heard.errors if e.type not in _LAUNCHERS_ERRORS and not _OF_OTHERS.search(e.message)]
    worst = next((e for e in heard.errors if e.is_oom or _OUT_OF_MEMORY.search(e.message)), own[0] if own else None)
    if worst is not None:
        is_oom = worst.is_oom or bool(_OUT_OF_MEMORY.search(worst.message))
        of_rank = f"rank {worst.rank}: " if worst.world > 1 else ""
        first = worst.message.strip().splitlines()[0][:300] if worst.message.strip() else ""
        return Failure(
            kind="oom" if is_oom else "workload_error",
            message=f"{of_rank}{worst.type}: {first}",
            details=worst.traceback,
        )
    if heard.lost:
        rank = heard.lost[0]
        died = re.search(rf"exitcode:? *-(\d+)\)? .*\(pid: {rank.pid}\)", seen.printed)
        how = f" of {signal.Signals(int(died[1])).name}" if died else ""
        return Failure(kind="crash", message=f"rank {rank.rank} died{how}, without a word", details=_tail(seen))
    first_error = heard.errors[0]
    return Failure(
        kind="workload_error", message=f"{first_error.type}: {first_error.message[:300]}", details=first_error.traceback
    )


def _of_exit(heard: Heard, seen: Seen) -> Literal["measured"] | Failure:
    if seen.status == 0:
        if not heard.hellos:
            message = "it ended, and no Python that imports torch was seen in it"
        elif not heard.ranks:
            message = "it ended without an optimizer step: is it finished already, or resumed from a checkpoint?"
        elif heard.num_steps > NUM_WARMUP_STEPS + 1:
            return "measured"
        else:
            message = f"it ended by itself after {heard.num_steps} optimizer steps, too few to measure"
        return Failure(kind="workload_error", message=message, details=_tail(seen))
    if _OUT_OF_MEMORY.search(seen.printed[-_TAIL_CHARACTERS:]):
        return Failure(kind="oom", message="its output says that memory ran out", details=_tail(seen))
    assert seen.status is not None
    how = f"died of {signal.Signals(-seen.status).name}" if seen.status < 0 else f"exited with status {seen.status}"
    return Failure(kind="crash", message=f"the command {how}", details=_tail(seen))


def _overdue(heard: Heard, seen: Seen, deadlines: Deadlines) -> Failure | None:
    whole, first, step = deadlines.whole_seconds, deadlines.first_step_seconds, deadlines.step_seconds
    if whole is not None and seen.seconds > whole:
        message = f"it was still running, with {heard.num_steps} steps, when its time was up"
    elif not heard.num_steps and first is not None and seen.seconds > first:
        message = "no optimizer step was seen in time"
    elif heard.num_steps and step is not None and seen.seconds_since_step > step:
        message = f"no step for {step:.0f} s, after step {heard.num_steps}"
    else:
        return None
    if not heard.hellos:
        message = "no Python with torch was seen in it: is it started with -I, -E or -S, in a container, or elsewhere?"
        return Failure(kind="workload_error", message=message, details=_tail(seen))
    if heard.ranks and not heard.is_whole:
        message += f"; {len(heard.ranks)} of {heard.world} ranks were heard"
    behind = min(heard.ranks.values(), key=lambda rank: len(rank.pace), default=None)
    if behind is not None and heard.world > 1:
        message += f"; rank {behind.rank} is behind"
    stack = None if behind is None else heard.stacks.get(behind.pid)
    return Failure(kind="timeout", message=message, details=stack or _tail(seen))


def _tail(seen: Seen) -> str | None:
    return seen.printed[-_TAIL_CHARACTERS:] or None

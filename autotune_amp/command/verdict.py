"""Verdict on a run of a command: how it ended, or that it goes on. Gathers the evidence of its processes for `judge`.
Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from autotune_amp.command.messages import Error, Hello, Refused, Stack, Torch, Unstepped
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import count
from autotune_amp.processes.ranks import failure_of_rank
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS
from autotune_amp.trial.judge import RaisedError, RunEvidence, culprit, judge

# Errors that launchers raise about their ranks: they are the cause only if no rank reports an error.
_LAUNCHERS_ERRORS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
_TAIL_CHARACTERS = 8000
UNOBSERVED_SECONDS = 10.0  # a Python process with the agent sends `Hello` before it does anything


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run as seen from outside: seconds since its start and since its latest step, memory of all its
    processes.

    `unobserved_seconds`: how long a Python process has run in it while none has sent a message. `status`: exit status
    of the command, None while it runs. `printed`: its output. `is_oom_killed`: the kernel has killed a process for lack
    of memory since the run started.
    """

    seconds: float
    seconds_since_step: float
    memory_bytes: int = 0
    unobserved_seconds: float = 0.0
    status: int | None = None
    printed: str = ""
    is_oom_killed: bool = False


def verdict(
    heard: RunEvents, seen: RunState, deadlines: Deadlines, *, is_enough: bool, memory_limit_bytes: int | None
) -> Literal["measured"] | Failure | None:
    """Return "measured" or the failure that a run ended with, None while it goes on. `is_enough`: its steps are
    measured.
    """
    if refused := heard.first(Refused):
        return _of_refused(refused)
    if _is_fatal(heard, seen):
        return culprit(_of_errors(heard, seen))
    for rank in heard.ranks.values():
        num_ooms = max((step.num_ooms for step in rank.steps), default=0)
        if failure := judge(RunEvidence(num_ooms=num_ooms)):
            return failure_of_rank(failure, rank.rank, rank.world)
    if is_enough:
        return "measured"
    if failure := judge(RunEvidence(memory_bytes=seen.memory_bytes, memory_limit_bytes=memory_limit_bytes)):
        return failure
    if seen.status is not None:
        return _of_exit(heard, seen)
    if not heard.of(Hello) and seen.unobserved_seconds > UNOBSERVED_SECONDS:  # nor is it guarded
        return Failure(kind="workload_error", message=_unseen(heard), details=_tail(seen))
    unstepped = heard.first(Unstepped)
    if unstepped is not None and not heard.ranks:
        return Failure(
            kind="workload_error",
            message=f"{unstepped.num_backward} backward passes were made, and no optimizer of torch took a step",
            details="Train by a class of torch.optim, whose steps are what is measured.",
        )
    return _overdue(heard, seen, deadlines)


def _of_refused(refused: Refused) -> Failure:
    at = f"{refused.what} at {refused.line}"
    if refused.path.startswith("https://"):
        message, step = (
            f"the command is about to upload to {refused.path} ({at})",
            "Turn the upload off for the search.",
        )
    else:
        message = f"the command is about to change {refused.path}, which was there before ({at})"
        step = (
            "Send its output to {trial_dir}, as in --output {trial_dir}. Where it has no argument for that, start it "
            "there: bash -c 'cd {trial_dir} && python /path/to/train.py'; it then looks for its data there too, so "
            "name them by absolute paths, or link them: bash -c 'ln -s /path/to/data {trial_dir}/data && cd ...'."
        )
    return Failure(kind="workload_error", message=message, details=step)


def _is_fatal(heard: RunEvents, seen: RunState) -> bool:
    """Whether an error ends the run: that of a rank does, that of a helper process only if the command ended
    with it.
    """
    if seen.status is not None and (seen.status != 0 or not heard.ranks):
        return bool(heard.of(Error))
    return any(error.pid in heard.rank_by_pid for error in heard.of(Error))


def _of_errors(heard: RunEvents, seen: RunState) -> Iterator[Failure]:
    """Yield the failure of each process that raised an error or was lost; that of a launcher only if there is
    no other.
    """
    own = [error for error in heard.of(Error) if error.types[0] not in _LAUNCHERS_ERRORS]
    for error in own:
        yield failure_of_rank(_of_error(error, seen), error.rank, error.world)
    if heard.lost:
        yield _of_lost(heard, seen)
    elif not own:
        error = heard.of(Error)[0]
        nested = re.search(r"Process (\d+) terminated", error.message)
        if error.types[0] == "ProcessRaisedException" and nested:  # it quotes the rank's traceback
            *_, last = filter(str.strip, error.message.splitlines())
            kind, _, said = last.partition(": ")
            error = replace(error, types=(kind.rpartition(".")[2],), message=said)
            yield failure_of_rank(_of_error(error, seen), int(nested[1]), 2)
        elif seen.status:  # the rank's own error is in the printed output
            yield _of_status(heard, seen, seen.status)
        else:
            yield _of_error(error, seen)


def _of_error(error: Error, seen: RunState) -> Failure:
    raised = RaisedError(
        types=error.types,
        message=error.message,
        traceback=error.traceback,
        free_memory_share=error.free_memory_share,
    )
    return _judged(RunEvidence(error=raised, is_oom_killed=seen.is_oom_killed))


def _judged(evidence: RunEvidence) -> Failure:
    failure = judge(evidence)
    assert failure is not None  # the process raised or ended, or is overdue
    return failure


def _of_lost(heard: RunEvents, seen: RunState) -> Failure:
    """Return the failure of a rank that ended without a message; its exit status is taken from the launcher's
    output.
    """
    pid = heard.lost[0]
    by_launcher = re.search(rf"exitcode:? *(-?\d+)\)? .*\(pid: {pid}\)", seen.printed)
    by_spawn = re.search(r"process \d+ terminated with signal (\w+)", seen.printed)
    return _judged(
        RunEvidence(
            has_ended=True,
            exit_status=int(by_launcher[1]) if by_launcher else -signal.Signals[by_spawn[1]] if by_spawn else None,
            process=f"rank {heard.rank_by_pid[pid]}",
            activity="without a word",
            output=_tail(seen),
            is_oom_killed=seen.is_oom_killed,
        )
    )


def _of_status(heard: RunEvents, seen: RunState, status: int) -> Failure:
    if heard.lost and heard.world > 1:
        return _of_lost(heard, seen)
    return _judged(
        RunEvidence(
            has_ended=True,
            exit_status=status,
            process="the command",
            output=_tail(seen),
            is_oom_killed=seen.is_oom_killed,
        )
    )


def _of_exit(heard: RunEvents, seen: RunState) -> Literal["measured"] | Failure:
    if seen.status:
        return _of_status(heard, seen, seen.status)
    if heard.num_steps > NUM_WARMUP_STEPS + 1:
        return "measured"
    if heard.ranks and not heard.is_whole:
        message = f"it ended, and {_heard_ranks(heard)}"
    elif heard.ranks:
        message = f"it ended by itself after {heard.num_steps} optimizer steps, too few to measure"
    else:
        message = f"it ended, and {_unseen(heard)}"
    return Failure(kind="workload_error", message=message, details=_tail(seen))


def _overdue(heard: RunEvents, seen: RunState, deadlines: Deadlines) -> Failure | None:
    whole, first, step = deadlines.whole_seconds, deadlines.first_step_seconds, deadlines.step_seconds
    is_loading = False  # a command's start and build cannot be told from its first step
    if whole is not None and seen.seconds > whole:
        state = f"still running, with {count(heard.num_steps, 'step')}," if heard.of(Torch) else "still starting"
        message = f"it was {state} when its time of {whole:.0f} s was up"
        is_loading = not heard.ranks
    elif not heard.num_steps and first is not None and seen.seconds > first:
        message = "no optimizer step was seen in time"
    elif heard.num_steps and step is not None and seen.seconds_since_step > step:
        message = f"no step for {step:.0f} s, after step {heard.num_steps}"
    else:
        return None
    if heard.of(Error) and not heard.ranks:
        return culprit(_of_errors(heard, seen))
    if not heard.ranks:
        message += f": {_unseen(heard)}"
    elif not heard.is_whole:
        message += f"; {_heard_ranks(heard)}"
    if not heard.of(Hello):
        return Failure(kind="workload_error", message=message, details=_tail(seen))
    silent = heard.silent if heard.world > 1 else []
    if 0 < len(silent) < len(heard.rank_by_pid):
        message += "; " + " and ".join(f"rank {heard.rank_by_pid[pid]}" for pid in sorted(silent)) + " hangs"
    output = _stacks(heard, silent) or _tail(seen)
    return _judged(RunEvidence(overdue=message, output=output, is_loading=is_loading))


def _unseen(heard: RunEvents) -> str:
    """Return the reason why no rank has sent a message."""
    if not heard.of(Hello):
        return (
            "no Python in it could be observed: is it started with -I, -E or -S, by `env -i`, in a container, "
            "or on another machine?"
        )
    if not heard.of(Torch):
        return "no Python in it had imported torch"
    return (
        "torch was imported, but no optimizer of torch took a step: is the training finished already, or resumed "
        "from a checkpoint?"
    )


def _heard_ranks(heard: RunEvents) -> str:
    return f"{len(heard.ranks)} of {heard.world} ranks were heard"


def _stacks(heard: RunEvents, first: list[int]) -> str:
    """Return the stacks of the ranks, those in `first` at the top; without ranks, of all processes that
    imported torch.
    """
    pids = heard.rank_by_pid or {torch.pid: 0 for torch in heard.of(Torch)}
    found = [stack for stack in heard.of(Stack) if stack.pid in pids]
    found.sort(key=lambda stack: (stack.pid not in first, pids[stack.pid]))
    return "\n".join(f"rank {pids[stack.pid]}, pid {stack.pid}:\n{stack.text}" for stack in found)


def _tail(seen: RunState) -> str | None:
    return seen.printed[-_TAIL_CHARACTERS:] or None

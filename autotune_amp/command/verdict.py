"""Verdict on a run of a command: measured, failed, or still running. Collects the evidence of its processes for
`trial.judge`, and adds advice to a failure. Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from autotune_amp.command.messages import Captured, Error, Hello, Refused, Stack, Torch, Unstepped
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import count
from autotune_amp.processes.ranks import failure_of_rank
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS
from autotune_amp.trial.judge import (
    RaisedError,
    causing_failure,
    failure_from_error,
    failure_from_exit,
    failure_from_memory,
    printed_error,
)

# Errors that launchers raise when a rank fails: reported only if no rank sent its own error.
_LAUNCHER_ERRORS = ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "SignalException")
_TAIL_CHARACTERS = 8000  # of the output that is shown with a failure
# After this time without `Hello`, no agent is in the command: a Python process with the agent sends it on startup.
UNOBSERVED_SECONDS = 10.0
_ADVICE_BY_PATTERN = {
    r"address already in use|EADDRINUSE": (
        "Its port is taken. Give each run a port of its own, as in `--master_port {port}`, or torchrun --standalone."
    ),
    r"EOFError: EOF when reading a line": (
        "It reads from standard input, which is empty in a trial. Give the value as an argument."
    ),
    r"invalid device (ordinal|id)|Duplicate GPU detected": (
        "With `--device cuda:N` the command sees that GPU alone, as cuda:0. Use `--device cuda` if it chooses its GPUs "
        "itself."
    ),
}


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run's processes: seconds since the start and since the latest step, and the memory of all processes.

    `unobserved_seconds` is the age of the oldest Python process while no process has sent a message; `status` the exit
    status of the command, None while it runs; `printed` its latest output. `is_oom_killed` says whether the kernel has
    killed a process for lack of memory since the run started.
    """

    seconds: float
    seconds_since_step: float
    memory_bytes: int = 0
    unobserved_seconds: float = 0.0
    status: int | None = None
    printed: str = ""
    is_oom_killed: bool = False


def verdict(
    events: RunEvents, state: RunState, deadlines: Deadlines, *, is_enough: bool, memory_limit_bytes: int | None
) -> Literal["measured"] | Failure | None:
    """Return "measured", or the failure of the run, or None to let it continue. `is_enough`: enough steps are
    measured.
    """
    if refused := events.first(Refused):
        return _refusal_failure(refused)
    if _is_fatal(events, state):
        return causing_failure(_error_failures(events, state))
    for rank in events.ranks.values():
        num_ooms = max((step.num_ooms for step in rank.steps), default=0)
        if num_ooms:
            caught = Failure(kind="oom", message=f"it ran out of memory {num_ooms} times, but continued")
            return failure_of_rank(caught, rank.rank, rank.world)
    if is_enough:
        return "measured"
    if failure := failure_from_memory(state.memory_bytes, memory_limit_bytes):
        return failure
    if events.of(Captured) and not state.status:
        return Failure(
            kind="workload_error",
            message="the command captures its optimizer step in a CUDA graph, whose replays cannot be observed",
            details="Run it without the CUDA graph.",
        )
    if state.status is not None:
        return _exit_verdict(events, state)
    if not events.of(Hello) and state.unobserved_seconds > UNOBSERVED_SECONDS:  # existing files are not guarded either
        return Failure(kind="workload_error", message=_reason_without_steps(events), details=_tail(state))
    unstepped = events.first(Unstepped)
    if unstepped is not None and not events.ranks:
        return Failure(
            kind="workload_error",
            message=f"{unstepped.num_backward} backward passes were made, and no optimizer of torch took a step",
            details="Train with a class of torch.optim: its steps are measured.",
        )
    return _timeout_failure(events, state, deadlines)


def with_advice(failure: Failure) -> Failure:
    """Return the failure with the error from the command's output added to its message and, if the cause is known, the
    next step added before the output in its details.
    """
    details = failure.details or ""
    if failure.kind == "crash":
        error_text = printed_error(details)
        failure = replace(failure, message=f"{failure.message}: {error_text[:300]}" if error_text else failure.message)
    for pattern, step in _ADVICE_BY_PATTERN.items():
        if re.search(pattern, f"{failure.message}\n{details}", re.IGNORECASE):
            return replace(failure, details=f"{step}\n{details}".rstrip())
    return failure


def _refusal_failure(refused: Refused) -> Failure:
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


def _is_fatal(events: RunEvents, state: RunState) -> bool:
    """Whether an error message ends the run: one of a rank always, one of a helper process only if the command has
    failed or ended without a rank.
    """
    if state.status is not None and (state.status != 0 or not events.ranks):
        return bool(events.of(Error))
    return any(error.pid in events.rank_by_pid for error in events.of(Error))


def _error_failures(events: RunEvents, state: RunState) -> Iterator[Failure]:
    """Yield the failures of processes that sent an error or ended without a message; of launchers only if there is no
    other.
    """
    rank_errors = [error for error in events.of(Error) if error.types[0] not in _LAUNCHER_ERRORS]
    for error in rank_errors:
        yield failure_of_rank(_error_failure(error, state), error.rank, error.world)
    if events.lost_pids:
        yield _lost_rank_failure(events, state)
    elif not rank_errors:
        error = events.of(Error)[0]
        nested = re.search(r"Process (\d+) terminated", error.message)
        if error.types[0] == "ProcessRaisedException" and nested:  # its message contains the rank's traceback
            *_, last = filter(str.strip, error.message.splitlines())
            kind, _, message = last.partition(": ")
            error = replace(error, types=(kind.rpartition(".")[2],), message=message)
            yield failure_of_rank(_error_failure(error, state), int(nested[1]), 2)
        elif state.status:  # the rank's own error is in the output
            yield _exit_status_failure(events, state, state.status)
        else:
            yield _error_failure(error, state)


def _error_failure(error: Error, state: RunState) -> Failure:
    raised = RaisedError(
        types=error.types,
        message=error.message,
        traceback=error.traceback,
        free_memory_share=error.free_memory_share,
    )
    return failure_from_error(raised, is_oom_killed=state.is_oom_killed)


def _lost_rank_failure(events: RunEvents, state: RunState) -> Failure:
    """Return the failure of a rank that ended without a message; its exit status is taken from the launcher's
    output.
    """
    pid = events.lost_pids[0]
    by_launcher = re.search(rf"exitcode:? *(-?\d+)\)? .*\(pid: {pid}\)", state.printed)
    by_spawn = re.search(r"process \d+ terminated with signal (\w+)", state.printed)
    return failure_from_exit(
        int(by_launcher[1]) if by_launcher else -signal.Signals[by_spawn[1]] if by_spawn else None,
        _tail(state),
        process=f"rank {events.rank_by_pid[pid]}",
        activity="without an error message",
        is_oom_killed=state.is_oom_killed,
    )


def _exit_status_failure(events: RunEvents, state: RunState, status: int) -> Failure:
    if events.lost_pids and events.world > 1:
        return _lost_rank_failure(events, state)
    return failure_from_exit(status, _tail(state), process="the command", is_oom_killed=state.is_oom_killed)


def _exit_verdict(events: RunEvents, state: RunState) -> Literal["measured"] | Failure:
    if state.status:
        return _exit_status_failure(events, state, state.status)
    if events.num_steps > NUM_WARMUP_STEPS + 1:
        return "measured"
    if events.ranks and not events.has_all_ranks:
        message = f"it ended, and {_num_reporting_ranks(events)}"
    elif events.ranks:
        message = f"it ended by itself after {events.num_steps} optimizer steps, too few to measure"
    else:
        message = f"it ended, and {_reason_without_steps(events)}"
    return Failure(kind="workload_error", message=message, details=_tail(state))


def _timeout_failure(events: RunEvents, state: RunState, deadlines: Deadlines) -> Failure | None:
    whole, first, step = deadlines.whole_seconds, deadlines.first_step_seconds, deadlines.step_seconds
    is_loading = False  # whether no rank had appeared when the time was up
    if whole is not None and state.seconds > whole:
        progress = f"still running, with {count(events.num_steps, 'step')}," if events.of(Torch) else "still starting"
        message = f"it was {progress} when its time of {whole:.0f} s was up"
        is_loading = not events.ranks
    elif not events.num_steps and first is not None and state.seconds > first:
        message = "no optimizer step was seen in time"
    elif events.num_steps and step is not None and state.seconds_since_step > step:
        message = f"no step for {step:.0f} s, after step {events.num_steps}"
    else:
        return None
    if events.of(Error) and not events.ranks:
        return causing_failure(_error_failures(events, state))
    if not events.ranks:
        message += f": {_reason_without_steps(events)}"
    elif not events.has_all_ranks:
        message += f"; {_num_reporting_ranks(events)}"
    if not events.of(Hello):
        return Failure(kind="workload_error", message=message, details=_tail(state))
    silent = events.silent_pids if events.world > 1 else []
    if 0 < len(silent) < len(events.rank_by_pid):
        message += "; " + " and ".join(f"rank {events.rank_by_pid[pid]}" for pid in sorted(silent)) + " hangs"
    output = _stacks(events, silent) or _tail(state)
    return Failure(kind="timeout", message=message, details=output, is_loading=is_loading)


def _reason_without_steps(events: RunEvents) -> str:
    """Return the reason why no optimizer step was observed."""
    if not events.of(Hello):
        return (
            "no Python process in it could be observed: is it started with -I, -E or -S, by `env -i`, with another "
            "PYTHONPATH, in a container, or on another machine?"
        )
    if not events.of(Torch):
        return "no Python process in it had imported torch"
    return (
        "torch was imported, but no optimizer of torch took a step: is the training finished already, or resumed "
        "from a checkpoint?"
    )


def _num_reporting_ranks(events: RunEvents) -> str:
    return f"{len(events.ranks)} of {events.world} ranks sent messages"


def _stacks(events: RunEvents, first: list[int]) -> str:
    """Return the stacks of the ranks, those in `first` at the top; without ranks, of all processes that
    imported torch.
    """
    pids = events.rank_by_pid or {torch.pid: 0 for torch in events.of(Torch)}
    stacks = [stack for stack in events.of(Stack) if stack.pid in pids]
    stacks.sort(key=lambda stack: (stack.pid not in first, pids[stack.pid]))
    return "\n".join(f"rank {pids[stack.pid]}, pid {stack.pid}:\n{stack.text}" for stack in stacks)


def _tail(state: RunState) -> str | None:
    return state.printed[-_TAIL_CHARACTERS:] or None

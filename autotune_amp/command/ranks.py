"""Messages that the processes of one run of a command sent, and the ranks among these processes. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, TypeVar

from autotune_amp.command.messages import AgentMessage, ConnectionClosed, Error, Exit, Gradient, Message, Stack, Torch
from autotune_amp.command.rank_steps import Rank

M = TypeVar("M", bound=AgentMessage)


class RunEvents:
    """Messages of all processes of one run, in the order of their arrival."""

    def __init__(self) -> None:
        self._processes: dict[int, Rank] = {}  # by pid
        self._messages: dict[type[AgentMessage], list[Any]] = {}

    def add(self, message: Message) -> None:
        """Add a message."""
        self._messages.setdefault(type(message), []).append(message)
        self._processes.setdefault(message.pid, Rank(message.pid)).add(message)

    def of(self, kind: type[M]) -> list[M]:
        """Return all messages of one kind."""
        return self._messages.get(kind, [])

    def first(self, kind: type[M]) -> M | None:
        """Return the first message of one kind, None if there is none."""
        return next(iter(self.of(kind)), None)

    @property
    def ranks(self) -> dict[int, Rank]:
        """Return the processes that have taken an optimizer step or are about to, by pid."""
        return {pid: process for pid, process in self._processes.items() if process.optimizers}

    @property
    def rank_by_pid(self) -> dict[int, int]:
        """Return the rank of each training process by pid, also before its first step.

        A process is a rank if a launcher gave it one and its parent has none: processes that a rank starts inherit its
        environment variables.
        """
        launched = {torch.pid: torch for torch in self.of(Torch) if torch.world > 1 and torch.worker is None}
        ranks = {pid: torch.rank for pid, torch in launched.items() if torch.parent_pid not in launched}
        return ranks | {pid: rank.rank for pid, rank in self.ranks.items()}

    @property
    def world(self) -> int:
        """Return the world size: the number of ranks that the processes report."""
        return max([rank.world for rank in self.ranks.values()] + [torch.world for torch in self.of(Torch)], default=1)

    @property
    def has_all_ranks(self) -> bool:
        """Whether every rank has taken an optimizer step or is about to."""
        return len(self.ranks) >= self.world

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps that every rank has taken; 0 before all ranks have appeared."""
        return min((len(rank.primary_steps) for rank in self.ranks.values()), default=0) if self.has_all_ranks else 0

    @property
    def num_measured_steps(self) -> int:
        """Return the number of optimizer steps that every rank has taken after its warm-up; 0 before all ranks have
        appeared.
        """
        nums = [len(rank.warm_steps) - 1 for rank in self.ranks.values()]
        return max(0, min(nums, default=0)) if self.has_all_ranks else 0

    @property
    def num_frozen_steps(self) -> int:
        """Return the number of completed steps whose gradients every rank has written; 0 before all ranks have
        appeared.
        """
        completed = {(g.pid, g.number) for g in self.of(Gradient) if g.number < len(self._processes[g.pid].steps)}
        num_by_pid = Counter(pid for pid, _ in completed)
        return min((num_by_pid[pid] for pid in self.ranks), default=0) if self.has_all_ranks else 0

    @property
    def step_seconds(self) -> float | None:
        """Return the duration of the latest step in seconds, None before two steps."""
        pace = max((rank.primary_steps for rank in self.ranks.values()), key=len, default=[])
        return pace[-1].time - pace[-2].time if len(pace) > 1 else None

    @property
    def last_step_time(self) -> float | None:
        """Return the time of the latest step of any rank (monotonic clock, seconds), None before the first."""
        return max((rank.steps[-1].time for rank in self.ranks.values() if rank.steps), default=None)

    @property
    def lost_pids(self) -> list[int]:
        """Return the pids of the ranks whose connection ended without an `Error` or `Exit` message, the first one
        first.
        """
        pids = self.rank_by_pid.keys() - {message.pid for message in (*self.of(Error), *self.of(Exit))}
        return [message.pid for message in self.of(ConnectionClosed) if message.pid in pids]

    @property
    def silent_pids(self) -> list[int]:
        """Return the pids of the ranks that probably hang: those with the fewest steps whose stacks are not in a
        collective operation or a backward pass, where a rank waits for others. Needs the stacks of all ranks (`Stack`).
        """
        steps = {pid: len(self._processes[pid].primary_steps) for pid in self.rank_by_pid}
        behind = [pid for pid in steps if steps[pid] == min(steps.values())]
        waiting = {stack.pid for stack in self.of(Stack) if _is_waiting_for_ranks(stack)}
        return [pid for pid in behind if pid not in waiting] or behind

    def samples_per_second(self) -> float | None:
        """Return the samples per second of all ranks together: their samples in a step, by the step time of the slowest
        rank. None before every rank has an interval.
        """
        means = [rank.mean_interval() for rank in self.ranks.values()]
        available = [mean for mean in means if mean is not None]
        if not available or len(available) < len(means) or not self.has_all_ranks:
            return None
        return sum(num_samples for num_samples, _ in available) / max(seconds for _, seconds in available)

    def tokens(self) -> tuple[float, float] | None:
        """Return the real tokens per second of all ranks together, as `samples_per_second` does, and the padded share
        of all positions. None if a rank has no token ids.
        """
        ranks = list(self.ranks.values())
        counts = [count for rank in ranks if (count := rank.tokens_per_step) is not None]
        means = [mean for rank in ranks if (mean := rank.mean_interval()) is not None]
        if not counts or len(counts) < len(ranks) or len(means) < len(ranks):
            return None
        num_tokens, num_positions = sum(num for num, _ in counts), sum(num for _, num in counts)
        if not num_tokens:  # a mask or boundaries that mark none
            return None
        return num_tokens / max(seconds for _, seconds in means), 1 - num_tokens / num_positions


def _is_waiting_for_ranks(stack: Stack) -> bool:
    """Whether the main thread is in a collective operation or a backward pass."""
    innermost = stack.at[-1] if stack.at else ""
    return "/torch/distributed/" in innermost or innermost.endswith("/torch/autograd/graph.py")

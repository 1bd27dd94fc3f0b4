"""What the processes of one run have said, put together: which are ranks, what their steps took, who fell silent. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

import msgspec

from autotune_amp.launch import messages
from autotune_amp.launch.messages import Message, Step

NUM_WARMUP_STEPS = 3


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one rank between two that its device was waited for; `step_seconds` is the mean of `num_steps` steps."""

    step_seconds: float
    num_steps: int
    num_samples: int
    num_passes: int
    wait_seconds: float
    num_skips: int


@dataclass
class Rank:
    """One process that trains: the steps of each of its optimizers, and its loaders."""

    pid: int
    rank: int = 0
    world: int = 1
    host: str = ""
    optimizers: dict[int, messages.Optimizer] = field(default_factory=dict)
    loaders: dict[str, messages.Loader] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    is_gone: bool = False
    has_ended: bool = False

    @property
    def pace(self) -> list[Step]:
        """The steps of the optimizer that steps least: of a GAN's, the generator's."""
        by_optimizer = [[s for s in self.steps if s.optimizer == index] for index in self.optimizers]
        return min(by_optimizer, key=len, default=[])

    @property
    def warm(self) -> list[Step]:
        """The steps of `pace` from the end of the warm-up on: after `NUM_WARMUP_STEPS`, the last compilation, and what
        loader workers had ready before the first."""
        steps = self.pace
        ahead = max((it.num_workers * (it.prefetch_factor or 0) for it in self.loaders.values()), default=0)
        last = steps[-1].num_compilations if steps else 0
        return [s for s in steps[NUM_WARMUP_STEPS - 1 :] if s.num_batches >= ahead and s.num_compilations == last]

    @property
    def training_loaders(self) -> frozenset[str]:
        """Those that are fetched from in at least half of the steps: the others evaluate."""
        pairs = list(pairwise(self.pace))
        fetched = [_fetched(a, b) for a, b in pairs]
        return frozenset(name for one in fetched for name in one if 2 * sum(name in f for f in fetched) >= len(pairs))

    def intervals(self) -> Iterator[Interval]:
        """Of the warm steps, without those in which it evaluated."""
        training = self.training_loaders
        settled = [(number, step) for number, step in enumerate(self.warm) if step.is_settled]
        for (i, before), (j, after) in pairwise(settled):
            fetched = _fetched(before, after)
            if not fetched.keys() <= training:
                continue
            samples = (
                sum(fetched.values()) if training else sum(self._entered(step) for step in self.warm[i + 1 : j + 1])
            )
            yield Interval(
                step_seconds=(after.time - before.time) / (j - i),
                num_steps=j - i,
                num_samples=samples,
                num_passes=after.num_backward - before.num_backward,
                wait_seconds=after.wait_seconds - before.wait_seconds,
                num_skips=sum(step.is_skipped for step in self.warm[i + 1 : j + 1]),
            )

    def _entered(self, step: Step) -> int:
        """Samples of a step without a loader: what entered the outermost modules in one that was watched."""
        watched = next((s for s in reversed(self.pace) if s.forwards), step)
        return sum(num or 0 for _, num in watched.forwards)


def _fetched(before: Step, after: Step) -> dict[str, int]:
    return {
        name: num - before.num_samples.get(name, 0)
        for name, num in after.num_samples.items()
        if num != before.num_samples.get(name, 0)
    }


@dataclass
class Heard:
    """All that was said in one run."""

    ranks: dict[int, Rank] = field(default_factory=dict)  # by pid
    hellos: list[messages.Hello] = field(default_factory=list)
    errors: list[messages.Error] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    gradients: list[messages.Gradient] = field(default_factory=list)
    sets: list[messages.Set] = field(default_factory=list)
    sites: list[messages.Site] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    refused: messages.Refused | None = None
    last_time: float = 0.0  # of the latest step
    _loaders: dict[int, dict[str, messages.Loader]] = field(default_factory=dict)

    def hear(self, message: Message) -> None:
        """Add a message."""
        match message:
            case messages.Hello():
                self.hellos.append(message)
            case messages.Loader():
                self._loaders.setdefault(message.pid, {})[message.index] = message
            case messages.Optimizer():
                rank = self.ranks.setdefault(message.pid, Rank(message.pid))
                rank.rank, rank.world, rank.host = message.rank, message.world, message.host
                rank.loaders = self._loaders.setdefault(message.pid, {})
                rank.optimizers[message.index] = message
            case Step():
                self.ranks[message.pid].steps.append(message)
                self.last_time = max(self.last_time, message.time)
            case messages.Gradient():
                self.gradients.append(message)
            case messages.Set():
                self.sets.append(message)
            case messages.Site():
                self.sites.append(message)
            case messages.Refused():
                self.refused = message
            case messages.Made():
                self.made.append(message.path)
            case messages.Error():
                self.errors.append(message)
                self._ended(message.pid)
            case messages.Exit():
                self._ended(message.pid)
            case messages.Stack():
                self.stacks[message.pid] = message.text

    def gone(self, pid: int) -> None:
        """A process's connection has ended."""
        if pid in self.ranks:
            self.ranks[pid].is_gone = True

    def _ended(self, pid: int) -> None:
        if pid in self.ranks:
            self.ranks[pid].has_ended = True

    @property
    def world(self) -> int:
        """The ranks that are to be heard of."""
        return max((rank.world for rank in self.ranks.values()), default=1)

    @property
    def is_whole(self) -> bool:
        """Whether every rank was heard of."""
        return len(self.ranks) >= self.world

    @property
    def num_steps(self) -> int:
        """Steps that all ranks have taken."""
        return min((len(rank.pace) for rank in self.ranks.values()), default=0) if self.is_whole else 0

    @property
    def step_seconds(self) -> float | None:
        """Of the latest step, None before there were two."""
        pace = max((rank.pace for rank in self.ranks.values()), key=len, default=[])
        return pace[-1].time - pace[-2].time if len(pace) > 1 else None

    @property
    def num_frozen_steps(self) -> int:
        """Frozen steps whose gradients all ranks have written."""
        return min((sum(g.pid == pid for g in self.gradients) for pid in self.ranks), default=0) if self.is_whole else 0

    @property
    def lost(self) -> list[Rank]:
        """The ranks that ended without a word."""
        return [rank for rank in self.ranks.values() if rank.is_gone and not rank.has_ended]

    def samples_per_second(self) -> float | None:
        """The job's: the samples of all ranks in the time of the slowest, None before every rank has an interval."""
        per_rank: list[tuple[float, float]] = []
        for rank in self.ranks.values():
            intervals = list(rank.intervals())
            num_steps = sum(one.num_steps for one in intervals)
            if not num_steps:
                return None
            seconds = sum(one.step_seconds * one.num_steps for one in intervals) / num_steps
            per_rank.append((sum(one.num_samples for one in intervals) / num_steps, seconds))
        if not per_rank or not self.is_whole:
            return None
        return sum(samples for samples, _ in per_rank) / max(seconds for _, seconds in per_rank)


def mean_wait(intervals: Sequence[Interval]) -> float:
    """Seconds of a mean step spent waiting for its data."""
    return fmean(one.wait_seconds / one.num_steps for one in intervals)

"""Optimizer steps of one training process: the steps that are measured, and their batches. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile

import msgspec

from autotune_amp.command import messages
from autotune_amp.command.messages import Message, Step
from autotune_amp.trial.jobs import MAX_WARMUP_STEPS, NUM_WARMUP_STEPS, should_continue_warmup
from autotune_amp.trial.judge import MAX_SKIPS, StepLosses

# Least and largest number. The least is below that of other trials, as no run of a command is stopped in its warm-up.
LIMITS_OF_WARMUP_STEPS = 2, MAX_WARMUP_STEPS
NUM_STEPS_WITHOUT = 32  # of others, before an optimizer may have stopped; more critic steps than usual in a GAN


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one rank between two synchronizations of its device. `step_seconds` is their mean duration.

    `num_batches` is the number of batches from its loaders; without a loader, the number of batches given to its model.
    `tokens` are the number of real tokens in these batches, and of all positions; None without token ids.
    """

    step_seconds: float
    num_steps: int
    num_samples: float
    num_batches: float
    num_passes: int
    wait_seconds: float
    num_skips: int
    tokens: tuple[float, float] | None = None


class EnteredBatches(msgspec.Struct, frozen=True, kw_only=True):
    """Batches given to the outermost modules in one optimizer step: their most frequent size in samples, their number,
    and for each the number of backward passes, and of real tokens and all positions (None without token ids).
    """

    batch_size: int = 0
    num: int = 0
    num_passes: float = 1.0
    tokens: tuple[float, float] | None = None

    def num_batches(self, num_passes: int, num_steps: int) -> float:
        """Return the number of batches in `num_steps` steps with `num_passes` backward passes. A step with one batch
        and several passes counts one batch: an optimizer with a closure calls it a varying number of times.
        """
        is_counted = num_passes and not (self.num == 1 and self.num_passes != 1)
        return num_passes / self.num_passes if is_counted else self.num * num_steps


def _entered_batches(
    forwards: Sequence[tuple[str, int | None, str]],
    tokens: tuple[float, float] | None,
    num_passes: int,
    num_optimizers: int,
) -> EnteredBatches:
    """Return the batches that the forwards of one optimizer step received, with `tokens` in all of them.

    If several models are trained together, as in a GAN, the one with the fewest forwards gives their number. Two
    forwards with one backward pass, as in siamese networks, count as one batch.
    """
    num_by_class = Counter(name for name, size, _ in forwards if size)
    if not num_by_class:
        return EnteredBatches()
    num = (min if num_optimizers > 1 else max)(num_by_class.values())
    num = min(num, num_passes) if num_passes else num
    batch_size = Counter(size for _, size, _ in forwards if size).most_common(1)[0][0]
    of_each = None if tokens is None else (tokens[0] / num, tokens[1] / num)
    return EnteredBatches(batch_size=batch_size, num=num, num_passes=num_passes / num, tokens=of_each)


@dataclass
class Rank:
    """One training process: the steps of each of its optimizers, its loaders and loss scalers, the settings of its
    frameworks that can be or were set, and the operations of a step, if they were counted. Once it `has_ended`, no more
    steps come.
    """

    pid: int
    rank: int = 0
    world: int = 1
    optimizers: dict[int, messages.Optimizer] = field(default_factory=dict)
    loaders: dict[str, messages.Loader] = field(default_factory=dict)
    scalers: list[messages.Scaler] = field(default_factory=list)
    switches: list[messages.Switch] = field(default_factory=list)
    sets: list[messages.Set] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    flops: messages.Flops | None = None
    has_ended: bool = False

    def add(self, message: Message) -> None:
        """Add a message of this process, which goes on after the end of a connection if it has become another program
        (`os.execv`).
        """
        self.has_ended = isinstance(message, (messages.Exit, messages.ConnectionClosed))
        match message:
            case messages.Optimizer():
                self.rank, self.world = message.rank, message.world
                self.optimizers[message.index] = message
            case messages.Loader():
                self.loaders[message.index] = message
            case messages.Scaler():
                self.scalers.append(message)
            case messages.Switch():
                self.switches.append(message)
            case messages.Set():
                self.sets.append(message)
            case messages.Flops():
                self.flops = message
            case Step():
                self.steps.append(message)

    @property
    def primary_steps(self) -> list[Step]:
        """Return the steps of the optimizer that steps least often, such as the generator's in a GAN, with those of the
        optimizers that it replaces.
        """
        sequences = [numbers for _, numbers in self._running_optimizers()]
        return [self.steps[number] for number in min(sequences, key=len, default=[])]

    @property
    def running_optimizers(self) -> list[messages.Optimizer]:
        """Return the optimizers that take steps now: neither replaced by later ones nor stopped."""
        return [optimizer for optimizer, _ in self._running_optimizers()]

    def _running_optimizers(self) -> list[tuple[messages.Optimizer, list[int]]]:
        """Return the optimizers that take steps now, each with the numbers of its steps and of those it replaces.

        A script that makes its optimizer anew for each round or fold replaces one of the same class, line and
        parameters, which takes no step any more. An optimizer has stopped, such as that of a search for the learning
        rate, if others go on for longer than ever before between two of its steps.
        """
        numbers: dict[int, list[int]] = {index: [] for index in self.optimizers}
        for number, step in enumerate(self.steps):
            numbers.setdefault(step.optimizer, []).append(number)
        found: list[tuple[messages.Optimizer, list[int]]] = []
        for index, optimizer in self.optimizers.items():
            first = min(numbers[index], default=len(self.steps))
            for at, (replaced, earlier) in reversed(list(enumerate(found))):
                if _kind(replaced) == _kind(optimizer) and earlier and earlier[-1] < first:
                    earlier += numbers[index]
                    found[at] = optimizer, earlier
                    break
            else:
                found.append((optimizer, numbers[index]))
        return [each for each in found if not self._has_stopped(each[1])]

    def _has_stopped(self, numbers: list[int]) -> bool:
        gaps = (after - before for before, after in pairwise([-1, *numbers]))
        return bool(numbers) and len(self.steps) - numbers[-1] > max(NUM_STEPS_WITHOUT, *(2 * gap for gap in gaps))

    @property
    def warm_steps(self) -> list[Step]:
        """Return the primary steps from the last warm-up step on.

        Steps on batches that workers of training loaders prefetched before the first step are left out, as are the
        skipped steps in which a GradScaler finds its scale. If the process ended before its step time was steady, or
        soon after, the shortest warm-up is assumed.
        """
        steps, num_warmup = self.primary_steps, self._num_warmup_steps()
        if num_warmup is None and not self.has_ended:
            return []
        if self.has_ended and num_warmup is not None and len(steps) < num_warmup + NUM_WARMUP_STEPS:
            num_warmup = None
        loaders = [self.loaders[index] for index in self.training_loaders if index in self.loaders]
        num_prefetched = max((each.num_workers * (each.prefetch_factor or 0) for each in loaders), default=0)
        num_skips = sum(1 for _ in takewhile(lambda step: step.is_skipped, steps))
        first = max((num_warmup or NUM_WARMUP_STEPS) - 1, min(num_skips, MAX_SKIPS))
        return [step for step in steps[first:] if step.num_batches >= num_prefetched]

    @property
    def warm_losses(self) -> list[tuple[StepLosses, ...]]:
        """Return the losses of the steps after the warm-up, for each optimizer."""
        since = self.warm_steps[0].time if self.warm_steps else math.inf
        return [
            tuple(
                StepLosses(losses=tuple(map(float, step.losses)), is_skipped=step.is_skipped)
                for step in self.steps
                if step.optimizer == index and step.time >= since
            )
            for index in self.optimizers
        ]

    def _num_warmup_steps(self) -> int | None:
        """Return the number of steps until the step time was steady, None while it is not. Steps with compilations are
        ignored, and so is the second one where its operations were counted, which takes several times as long.
        """
        pace, group_seconds, warming_seconds = self.primary_steps, list[float](), 0.0
        for i, j in self._sync_spans(pace):
            if pace[i].num_compilations == pace[j].num_compilations and not (i == 0 and self.flops is not None):
                seconds = pace[j].time - pace[i].time
                group_seconds.append(seconds / (j - i))
                warming_seconds += seconds
            if group_seconds and not should_continue_warmup(
                group_seconds, num_steps=j + 1, warming_seconds=warming_seconds, limits=LIMITS_OF_WARMUP_STEPS
            ):
                return j + 1
        return None

    @property
    def step_seconds(self) -> float | None:
        """Return the duration of the fastest step without compilation in seconds, None before there is one."""
        pace = self.primary_steps
        seconds = [b.time - a.time for a, b in pairwise(pace) if a.num_compilations == b.num_compilations]
        return min(seconds, default=None)

    @property
    def training_loaders(self) -> frozenset[str]:
        """Return the indices of the loaders that yield batches in at least half of the steps; others serve evaluation,
        and so does one of half of the steps that yields its dataset in one of them, beside another. Loaders that are
        created anew in every epoch count as one.
        """
        fetched = [_num_samples_by_loader(a, b) for a, b in pairwise(self.primary_steps)]
        num = Counter(kind for by_loader in fetched for kind in {self._loader_key(name) for name in by_loader})
        evaluated = {
            self._loader_key(name)
            for by_loader in fetched
            if len(by_loader) > 1
            for name, num_samples in by_loader.items()
            if 2 * self.world * num_samples >= self._num_dataset_samples(name)  # a sampler may leave some out
        }
        training = {kind for kind in num if 2 * num[kind] >= len(fetched) + 2 * (kind in evaluated)}
        return frozenset(name for by_loader in fetched for name in by_loader if self._loader_key(name) in training)

    def _num_dataset_samples(self, name: str) -> float:
        loader = self.loaders.get(name)
        return math.inf if loader is None or loader.num_samples is None else loader.num_samples

    def _loader_key(self, name: str) -> tuple[object, ...]:
        loader = self.loaders.get(name)
        return (name,) if loader is None else (loader.maker, loader.num_samples, loader.batch_size, loader.shuffles)

    def intervals(self) -> Iterator[Interval]:
        """Yield the intervals of warm steps, except those in which the rank evaluated or compiled."""
        training, warm = self.training_loaders, self.warm_steps
        entered = self.entered_batches if warm and not training else EnteredBatches()
        for i, j in self._sync_spans(warm):
            before, after = warm[i], warm[j]
            fetched = _num_samples_by_loader(before, after)
            if before.num_compilations != after.num_compilations or not fetched.keys() <= training:
                continue
            num_passes, num_steps = after.num_backward - before.num_backward, j - i
            num_batches: float = after.num_batches - before.num_batches
            tokens = _tokens_between(before, after)
            if not training:
                num_batches = entered.num_batches(num_passes, num_steps)
                tokens = entered.tokens and (num_batches * entered.tokens[0], num_batches * entered.tokens[1])
            yield Interval(
                step_seconds=(after.time - before.time) / num_steps,
                num_steps=num_steps,
                num_samples=sum(fetched.values()) if training else num_batches * entered.batch_size,
                num_batches=num_batches,
                num_passes=num_passes,
                wait_seconds=after.wait_seconds - before.wait_seconds,
                num_skips=sum(step.is_skipped for step in warm[i + 1 : j + 1]),
                tokens=tokens,
            )

    def mean_interval(self) -> tuple[float, float] | None:
        """Return the samples and the seconds of a step, as means over the intervals; None if there are none."""
        intervals = list(self.intervals())
        num_steps = sum(interval.num_steps for interval in intervals)
        if not num_steps:
            return None
        seconds = sum(interval.step_seconds * interval.num_steps for interval in intervals)
        return sum(interval.num_samples for interval in intervals) / num_steps, seconds / num_steps

    @property
    def tokens_per_step(self) -> tuple[float, float] | None:
        """Return the real tokens and all positions of a step, as means over the intervals; None without token ids."""
        counted = [(interval.tokens, interval.num_steps) for interval in self.intervals() if interval.tokens]
        num_steps = sum(num for _, num in counted)
        if not num_steps:
            return None
        return sum(tokens[0] for tokens, _ in counted) / num_steps, sum(tokens[1] for tokens, _ in counted) / num_steps

    @property
    def entered_batches(self) -> EnteredBatches:
        """Return the batches of the latest primary step in which all forwards were recorded."""
        first, steps = 0, list[Step]()
        pace = {id(step) for step in self.primary_steps}
        for number, step in enumerate(self.steps):
            if id(step) in pace:
                group = self.steps[first : number + 1]
                if all(each.forwards for each in group):
                    steps = group
                first = number + 1
        steps = steps or [next((each for each in reversed(self.steps) if each.forwards), self.steps[0])]
        before = self.steps.index(steps[0])
        num_backward = steps[-1].num_backward - (self.steps[before - 1].num_backward if before else 0)
        counts = [step.tokens for step in steps if step.tokens is not None]
        tokens = (sum(num for num, _ in counts), sum(num for _, num in counts)) if counts else None
        forwards = [each for step in steps for each in step.forwards]
        entered = _entered_batches(forwards, tokens, num_backward, len(self.running_optimizers))
        return entered if forwards else self._reused_batch

    @property
    def _reused_batch(self) -> EnteredBatches:
        """Return the batch that was drawn before the first step and is used in all steps, without a call of a module;
        an empty one if no batch was drawn.
        """
        first = self.steps[0]
        size = sum(first.num_samples.values()) // first.num_batches if first.num_batches else 0
        return EnteredBatches(batch_size=size, num=1) if size else EnteredBatches()

    @property
    def num_compiling_steps(self) -> int:
        """Return the number of warm steps left out of the intervals because of a compilation."""
        warm = self.warm_steps
        return sum(j - i for i, j in self._sync_spans(warm) if warm[i].num_compilations != warm[j].num_compilations)

    def _sync_spans(self, steps: Sequence[Step]) -> Iterator[tuple[int, int]]:
        """Yield the pairs of successive step numbers at which the device was synchronized."""
        return pairwise(number for number, step in enumerate(steps) if step.is_settled)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory in bytes: resident on a CPU, allocated on an accelerator; None if unknown."""
        return max((s.peak_memory_bytes for s in self.steps if s.peak_memory_bytes is not None), default=None)

    @property
    def reserved_memory_bytes(self) -> int | None:
        """Return the peak memory reserved on the accelerator in bytes, None without an accelerator."""
        return max((s.reserved_memory_bytes for s in self.steps if s.reserved_memory_bytes is not None), default=None)


def _kind(optimizer: messages.Optimizer) -> tuple[object, ...]:
    return optimizer.name, optimizer.line, optimizer.num_parameters


def _num_samples_by_loader(before: Step, after: Step) -> dict[str, int]:
    return {
        name: num - before.num_samples.get(name, 0)
        for name, num in after.num_samples.items()
        if num != before.num_samples.get(name, 0)
    }


def _tokens_between(before: Step, after: Step) -> tuple[float, float] | None:
    """Return the real tokens and all positions that loaders yielded between two steps, None without token ids."""
    pairs = [(num, before.tokens_by_loader.get(name, (0, 0))) for name, num in after.tokens_by_loader.items()]
    real, positions = (sum(now[i] - then[i] for now, then in pairs) for i in range(2))
    return (real, positions) if real else None

"""The profile's job: precisions side by side in one process, and a few processes of it; plain data and no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any, ClassVar, TypeAlias

import msgspec

from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Precision
from autotune_amp.trial.jobs import Trial

LOW: tuple[Precision, ...] = ("bf16", "fp16")  # what mixed precision means: autocast casts to them
# A precision whose steps take so many times those of fp32, beside which they are run, is left after a few of them.
CUT_RATIO = 5.0


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as torch.profiler saw it, in seconds.

    `operation_seconds` are those of operations by `gap.Kind`: of their kernels on a device that shows them, else of
    the host, each without the operations that it calls. `step_seconds` is the step by the host's clock, slower for
    being profiled. `busy_seconds` is how long the device had any kernel to run, 0 where none was seen.
    """

    operation_seconds: dict[str, float]
    step_seconds: float
    busy_seconds: float = 0.0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The profiled steps of one precision, alike but for what else ran on the machine.

    `largest` names the operations that took most in each kind, over all steps, the largest first. `is_device`: it is
    kernels that were seen.
    """

    steps: tuple[ProfiledStep, ...]
    largest: dict[str, tuple[str, ...]]
    is_device: bool = False


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One precision as it ran beside the others.

    `block_seconds` is a step of each block without the wait for its data, which `data_seconds` are; the child's blocks
    are a few steps each, those of `timed` whole processes. `num_steps` are the steps in all of them. `split` is None
    where it was not profiled. `failure` ended it, after the blocks that are there; `was_cut`: it was left after them as
    hopelessly slow.
    """

    precision: Precision
    block_seconds: tuple[float, ...] = ()
    data_seconds: tuple[float, ...] = ()
    num_steps: int = 0
    split: Split | None = None
    failure: Failure | None = None
    was_cut: bool = False


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="profiled"):
    """What the child found.

    `loads_ahead`: worker processes load while a step computes, so that a step of one precision alone waits longer for
    its data than these did. `split_problem` says why no step was profiled, None where they were or were not to be.
    `flops_per_step` are those of the matrix products of one step, None with a `flops_problem`. `unfused_optimizer` is
    the class of an optimizer that could step in fused kernels and does not, None without one; `is_compiled` says that
    torch.compile was at work. `rates` are those of large matrix products by precision, in FLOP/s, measured right after
    the steps.
    """

    lanes: tuple[Lane, ...] = ()
    loads_ahead: bool = False
    split_problem: str | None = None
    flops_per_step: int | None = None
    flops_problem: str | None = None
    unfused_optimizer: str | None = None
    is_compiled: bool = False
    num_loader_workers: int | None = None
    rates: dict[Precision, float] = {}


class Profile(Job[Profiled], frozen=True, kw_only=True):
    """Precisions to run side by side, a trial for each, over `num_batches` batches that all of them share.

    `num_batches_per_block` are timed between two synchronisations. Where `takes_apart`, steps are profiled after that,
    with the Chrome trace written to `trace_file` (None for none), and operations and the machine's rates are counted.
    `seed` of the trials seeds the model and the order of the batches.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.profile.child:profile"

    trials: tuple[Trial, ...]
    num_batches: int
    num_batches_per_block: int = 1
    takes_apart: bool = True
    trace_file: str | None = None


NUM_ROUNDS = 3
MAX_SETUP_SECONDS = 30.0  # that the rounds after the first may spend on building models and on first steps

Ask: TypeAlias = Callable[[Profile], Profiled | Failure]
Run: TypeAlias = Callable[[Trial], Outcome]
Say: TypeAlias = Callable[[str], None]

_LOADS_AHEAD = "the loader's workers load ahead, which hides the wait that one precision alone has"


def num_rounds(alone: Sequence[Measurement], num_batches: int) -> int:
    """Three, but one where starting again costs more than half a minute, and never more than batches."""
    steps_before = 3  # the warm-up
    setup_seconds = sum(m.build_seconds + m.first_step_seconds + steps_before * m.step_seconds for m in alone)
    return 1 if (NUM_ROUNDS - 1) * setup_seconds > MAX_SETUP_SECONDS else min(NUM_ROUNDS, num_batches)


def timed(ask: Ask, run: Run, spec: Profile, num_rounds: int, say: Say) -> tuple[Profiled, tuple[str, ...]]:
    """Time `spec.num_batches` batches in each precision over `num_rounds` rounds; the notes say what went otherwise.

    The lanes that come back have one block for each process, blocks of one number are of one round, and a lane ends
    with the first round in which its precision failed or was cut. The steps are taken apart in the first round alone.
    """
    parts = [_round_of(spec, number, num_rounds) for number in range(num_rounds)]
    first = ask(parts[0])
    if isinstance(first, Profiled) and not first.loads_ahead:
        return _side_by_side(ask, first, parts)
    notes: tuple[str, ...] = ()
    if len(spec.trials) > 1:
        reason = _LOADS_AHEAD if isinstance(first, Profiled) else first.message
        notes = (f"They were timed in processes of their own, in turns, and not side by side: {reason}.",)
        say(notes[0])
    whole, more = (first, ()) if isinstance(first, Profiled) else _each_taken_apart(ask, spec, first)
    lanes = _in_processes_of_their_own(run, parts)
    return msgspec.structs.replace(whole, lanes=tuple(_with_split(lane, whole) for lane in lanes)), (*notes, *more)


def _round_of(spec: Profile, number: int, num_rounds: int) -> Profile:
    """Its part of the batches, which are other ones than those of the rounds before."""
    return msgspec.structs.replace(
        spec,
        trials=tuple(msgspec.structs.replace(trial, seed=trial.seed + number) for trial in spec.trials),
        num_batches=spec.num_batches // num_rounds + (number < spec.num_batches % num_rounds),
        takes_apart=number == 0,
        trace_file=spec.trace_file if number == 0 else None,
    )


def _side_by_side(ask: Ask, first: Profiled, parts: Sequence[Profile]) -> tuple[Profiled, tuple[str, ...]]:
    found = [first]
    for part in parts[1:]:
        running = {lane.precision for lane in found[-1].lanes if lane.failure is None and not lane.was_cut}
        trials = tuple(trial for trial in part.trials if trial.candidate.precision in running)
        if not trials:
            break
        outcome = ask(msgspec.structs.replace(part, trials=trials))
        if isinstance(outcome, Failure):
            return joined(found), (f"{len(found)} of {len(parts)} processes ran to the end: {outcome.message}.",)
        found.append(outcome)
    return joined(found), ()


def joined(rounds: Sequence[Profiled]) -> Profiled:
    """Rounds side by side as one, with a block for each process; what was taken apart is the first one's."""
    lanes = [lane for profiled in rounds for lane in profiled.lanes]
    names = [lane.precision for lane in rounds[0].lanes]
    return msgspec.structs.replace(
        rounds[0],
        lanes=tuple(_joined([lane for lane in lanes if lane.precision == name]) for name in names),
        is_compiled=any(profiled.is_compiled for profiled in rounds),
    )


def _joined(lanes: Sequence[Lane]) -> Lane:
    """Of each process the median of its steps, and the mean wait: workers deliver in bursts, which a median misses."""
    blocks = [lane for lane in lanes if lane.block_seconds]
    return Lane(
        precision=lanes[0].precision,
        block_seconds=tuple(median(lane.block_seconds) for lane in blocks),
        data_seconds=tuple(fmean(lane.data_seconds) for lane in blocks),
        num_steps=sum(lane.num_steps for lane in lanes),
        split=lanes[0].split,
        failure=lanes[-1].failure,
        was_cut=lanes[-1].was_cut,
    )


def _each_taken_apart(ask: Ask, spec: Profile, why_not_together: Failure) -> tuple[Profiled, tuple[str, ...]]:
    """Each precision taken apart in a process of its own."""
    found: list[Profiled] = []
    notes = []
    for trial in spec.trials:
        name = trial.candidate.precision
        file = None if spec.trace_file is None else f"{spec.trace_file}.{name}"
        part = msgspec.structs.replace(spec, trials=(trial,), num_batches=1, trace_file=file)
        outcome = why_not_together if len(spec.trials) == 1 else ask(part)
        if isinstance(outcome, Profiled):
            found.append(outcome)
        else:
            notes.append(f"{name} could not be taken apart: {outcome.message}.")
    if not found:
        return Profiled(), tuple(notes)
    lanes = tuple(lane for profiled in found for lane in profiled.lanes)
    rates = {name: rate for profiled in found for name, rate in profiled.rates.items()}
    return msgspec.structs.replace(found[0], lanes=lanes, rates=rates), tuple(notes)


def _with_split(lane: Lane, whole: Profiled) -> Lane:
    splits = {taken_apart.precision: taken_apart.split for taken_apart in whole.lanes}
    return msgspec.structs.replace(lane, split=splits.get(lane.precision))


def _in_processes_of_their_own(run: Run, parts: Sequence[Profile]) -> list[Lane]:
    """Each precision as a trial of its own in every round, another one first each time."""
    names = [trial.candidate.precision for trial in parts[0].trials]
    outcomes: dict[Precision, list[Outcome]] = {name: [] for name in names}
    for number, part in enumerate(parts):
        first = number % len(part.trials)
        for trial in (*part.trials[first:], *part.trials[:first]):
            so_far = outcomes[trial.candidate.precision]
            if all(isinstance(outcome, Measurement) and not outcome.was_cut for outcome in so_far):
                num_steps = part.num_batches, part.num_batches
                so_far.append(run(msgspec.structs.replace(trial, num_steps=num_steps, measure_seconds=None)))
    return [_lane(name, outcomes[name]) for name in names]


def _lane(name: Precision, outcomes: Sequence[Outcome]) -> Lane:
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    waits = [min(m.data_seconds, m.step_seconds) for m in measured]
    last = outcomes[-1]
    return Lane(
        precision=name,
        block_seconds=tuple(m.step_seconds - wait for m, wait in zip(measured, waits, strict=True)),
        data_seconds=tuple(waits),
        num_steps=sum(m.num_steps for m in measured),
        failure=last if isinstance(last, Failure) else None,
        was_cut=isinstance(last, Measurement) and last.was_cut,
    )

"""The precisions timed a few times over, each time in fresh processes: what varies most is the process, not the step.

Side by side in one process where that can be, else each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import TypeAlias

import msgspec

from autotune_amp.core.config import Precision
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.profile.spec import Lane, Profiled, ProfileSpec
from autotune_amp.trial.jobs import Trial

NUM_ROUNDS = 3
MAX_SETUP_SECONDS = 30.0  # that the rounds after the first may spend on building models and on first steps

Ask: TypeAlias = Callable[[ProfileSpec], Profiled | Failure]
Run: TypeAlias = Callable[[Trial], Outcome]
Say: TypeAlias = Callable[[str], None]

_LOADS_AHEAD = "the loader's workers load ahead, which hides the wait that one precision alone has"


def num_rounds(alone: Sequence[Measurement], num_batches: int) -> int:
    """Three, but one where starting again costs more than half a minute, and never more than batches."""
    steps_before = 3  # the warm-up
    setup_seconds = sum(m.build_seconds + m.first_step_seconds + steps_before * m.step_seconds for m in alone)
    return 1 if (NUM_ROUNDS - 1) * setup_seconds > MAX_SETUP_SECONDS else min(NUM_ROUNDS, num_batches)


def timed(ask: Ask, run: Run, spec: ProfileSpec, num_rounds: int, say: Say) -> tuple[Profiled, tuple[str, ...]]:
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


def _round_of(spec: ProfileSpec, number: int, num_rounds: int) -> ProfileSpec:
    """Its part of the batches, which are other ones than those of the rounds before."""
    return msgspec.structs.replace(
        spec,
        trials=tuple(msgspec.structs.replace(trial, seed=trial.seed + number) for trial in spec.trials),
        num_batches=spec.num_batches // num_rounds + (number < spec.num_batches % num_rounds),
        takes_apart=number == 0,
        trace_file=spec.trace_file if number == 0 else None,
    )


def _side_by_side(ask: Ask, first: Profiled, parts: Sequence[ProfileSpec]) -> tuple[Profiled, tuple[str, ...]]:
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


def _each_taken_apart(ask: Ask, spec: ProfileSpec, why_not_together: Failure) -> tuple[Profiled, tuple[str, ...]]:
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


def _in_processes_of_their_own(run: Run, parts: Sequence[ProfileSpec]) -> list[Lane]:
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

"""The rounds: what is asked of which process, how they are joined, and that the intervals cover what is true."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import msgspec
from test_profile_rows import measured

from autotune_amp.core.outcome import Failure, Outcome
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.profile.job import Lane, Profile, Profiled, ProfiledStep, Split, joined, num_rounds, timed
from autotune_amp.profile.results import PrecisionRow
from autotune_amp.profile.rows import Found, rows
from autotune_amp.profile.running import write_trace
from autotune_amp.trial.jobs import Trial

SPLIT = Split(steps=(ProfiledStep(operation_seconds={}, step_seconds=1.0),), largest={})
OOM = Failure(kind="oom", message="too much")


def trial(precision: Precision) -> Trial:
    return Trial(candidate=Setting(precision=precision, batch_size=8), device="cpu")


def spec(num_batches: int = 10, *precisions: Precision, **changes: Any) -> Profile:
    names: tuple[Precision, ...] = precisions or ("fp32", "bf16")
    return Profile(device="cpu", trials=tuple(trial(name) for name in names), num_batches=num_batches, **changes)


class Children:
    """Answers for the children: lanes whose steps are the number of the round, and what `changes` says of them."""

    def __init__(self, *answers: Profiled | Failure | None, outcomes: dict[str, list[Outcome]] | None = None) -> None:
        self.answers, self.outcomes = list(answers), outcomes or {}
        self.asked: list[Profile] = []
        self.run_trials: list[Trial] = []

    def ask(self, asked: Profile) -> Profiled | Failure:
        self.asked.append(asked)
        answer = self.answers.pop(0) if self.answers else None
        return answer or side_by_side(asked, len(self.asked))

    def run(self, asked: Trial) -> Outcome:
        self.run_trials.append(asked)
        left = self.outcomes.get(asked.candidate.precision)
        number = sum(t.candidate.precision == asked.candidate.precision for t in self.run_trials)
        return left.pop(0) if left else measured(4.0 * number, data_seconds=number, raw_step_seconds=(1.0,) * 4)

    def timed(self, asked: Profile, num: int = 3) -> tuple[Profiled, tuple[str, ...]]:
        return timed(self.ask, self.run, asked, num, lambda note: None)


def side_by_side(asked: Profile, number: int, **changes: Any) -> Profiled:
    lanes = tuple(
        Lane(
            precision=t.candidate.precision,
            block_seconds=(number, number, 100.0),
            data_seconds=(0.0, 0.0, 3.0),
            num_steps=asked.num_batches,
            split=SPLIT if asked.takes_apart else None,
        )
        for t in asked.trials
    )
    return Profiled(lanes=lanes, rates={"fp32": 1.0} if asked.takes_apart else {}, **changes)


def with_lane(found: Profiled, number: int, **changes: Any) -> Profiled:
    lanes = list(found.lanes)
    lanes[number] = msgspec.structs.replace(lanes[number], **changes)
    return msgspec.structs.replace(found, lanes=tuple(lanes))


def test_the_batches_are_divided_and_a_process_is_a_block() -> None:
    children = Children()
    found, notes = children.timed(spec(10, trace_file="trace"))
    assert [(s.num_batches, s.takes_apart, s.trace_file) for s in children.asked] == [
        (4, True, "trace"),
        (3, False, None),
        (3, False, None),
    ]
    assert [s.trials[1].seed for s in children.asked] == [0, 1, 2], "other batches each time"
    assert children.run_trials == []
    assert notes == ()
    for lane in found.lanes:
        assert lane.block_seconds == (1, 2, 3), "the median of its steps"
        assert lane.data_seconds == (1.0, 1.0, 1.0), "the mean of its waits"
        assert (lane.num_steps, lane.split) == (10, SPLIT)
    assert found.rates == {"fp32": 1.0}


def test_what_failed_or_was_cut_is_in_no_later_round() -> None:
    first = side_by_side(spec(4), 1)
    children = Children(with_lane(first, 1, failure=OOM))
    fp32, bf16 = children.timed(spec(10))[0].lanes
    assert [len(s.trials) for s in children.asked] == [2, 1, 1]
    assert (fp32.failure, len(fp32.block_seconds)) == (None, 3)
    assert (bf16.failure, len(bf16.block_seconds), bf16.num_steps) == (OOM, 1, 4)
    children = Children(with_lane(first, 1, was_cut=True))
    assert children.timed(spec(10))[0].lanes[1].was_cut
    assert [len(s.trials) for s in children.asked] == [2, 1, 1]


def test_a_later_process_that_dies_leaves_the_rounds_before_it_and_is_told() -> None:
    found, notes = Children(None, OOM).timed(spec(10))
    assert [lane.block_seconds for lane in found.lanes] == [(1.0,), (1.0,)]
    assert notes == ("1 of 3 processes ran to the end: too much.",)


def test_where_workers_load_ahead_each_precision_is_timed_alone_with_its_own_wait() -> None:
    children = Children(side_by_side(spec(4), 1, loads_ahead=True))
    found, notes = children.timed(spec(10))
    assert len(children.asked) == 1
    assert [t.candidate.precision for t in children.run_trials] == ["fp32", "bf16", "bf16", "fp32", "fp32", "bf16"]
    assert [t.num_steps for t in children.run_trials] == [(4, 4), (4, 4), (3, 3), (3, 3), (3, 3), (3, 3)]
    assert "the loader's workers load ahead" in notes[0]
    for lane in found.lanes:
        assert lane.block_seconds == (3.0, 6.0, 9.0)
        assert lane.data_seconds == (1.0, 2.0, 3.0)
        assert (lane.num_steps, lane.split) == (12, SPLIT)


def test_where_they_do_not_fit_side_by_side_each_is_timed_and_taken_apart_alone() -> None:
    children = Children(OOM, outcomes={"bf16": [measured(2.0), OOM]})
    found, notes = children.timed(spec(10, trace_file="trace"))
    assert [s.trace_file for s in children.asked] == ["trace", "trace.fp32", "trace.bf16"]
    assert notes == ("They were timed in processes of their own, in turns, and not side by side: too much.",)
    fp32, bf16 = found.lanes
    assert (len(fp32.block_seconds), fp32.split, fp32.failure) == (3, SPLIT, None)
    assert (bf16.block_seconds, bf16.split, bf16.failure) == ((2.0,), SPLIT, OOM)


def test_what_cannot_be_taken_apart_is_timed_all_the_same() -> None:
    found, notes = Children(OOM).timed(spec(10, "fp32"))
    (lane,) = found.lanes
    assert (len(lane.block_seconds), lane.split) == (3, None)
    assert notes == ("fp32 could not be taken apart: too much.",)


def test_one_round_where_starting_again_is_dear() -> None:
    quick, dear = measured(0.1), measured(0.1, build_seconds=20.0)
    assert num_rounds([quick, quick], 10) == 3
    assert num_rounds([quick, quick], 2) == 2
    assert num_rounds([quick, dear], 10) == 1


NUM_PROFILES, SPREAD = 400, 0.05


def second_row(found: Profiled) -> PrecisionRow:
    return rows(("fp32", "bf16"), Found({}, {"fp32": measured(1.0), "bf16": measured(1.0)}, found, {}, "cpu"))[1]


def coverage(truth: float, found: list[Profiled]) -> float:
    intervals = [second_row(profiled).speedup_interval for profiled in found]
    return sum(low < truth < high for low, high in filter(None, intervals)) / len(found)


def test_the_interval_covers_the_truth() -> None:
    dice, num_batches = random.Random(5), 4

    def process() -> Profiled:
        waits = [dice.expovariate(20.0) for _ in range(num_batches)]

        def lane(name: Precision, seconds: float) -> Lane:
            seconds *= math.exp(dice.gauss(0, SPREAD))  # the process's own
            blocks = tuple(seconds * math.exp(dice.gauss(0, 0.03)) for _ in range(num_batches))
            return Lane(precision=name, block_seconds=blocks, data_seconds=tuple(waits))

        return Profiled(lanes=(lane("fp32", 1.3), lane("bf16", 1.0)))

    found = [joined([process() for _ in range(3)]) for _ in range(NUM_PROFILES)]
    assert 0.92 < coverage(1.35 / 1.05, found) < 0.995


def written(path: Path, name: str) -> Path:
    path.write_text(json.dumps({"traceEvents": [{"name": name}], "made": "up"}))
    return path


def test_several_become_one_and_one_stays_as_it_is(tmp_path: Path) -> None:
    parts = [written(tmp_path / name, name) for name in ("fp32", "bf16")]
    trace = tmp_path / "trace.json"
    assert write_trace(parts, trace) is None
    assert json.loads(trace.read_text()) == {"traceEvents": [{"name": "fp32"}, {"name": "bf16"}], "made": "up"}
    assert write_trace(parts[:1], trace) is None
    assert trace.read_text() == parts[0].read_text()


def test_why_there_is_none(tmp_path: Path) -> None:
    part = written(tmp_path / "fp32", "fp32")
    missing = tmp_path / "no" / "trace.json"
    assert "No such file or directory" in (write_trace([part], missing) or "")
    assert "No such file or directory" in (write_trace([part, part], missing) or "")
    assert write_trace([], missing) == "No trace was written: no precision was taken apart."

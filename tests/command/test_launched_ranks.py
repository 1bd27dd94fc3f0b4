"""What the messages of a run amount to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import said
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.command.messages import Exit, Message, Stack
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS


def only(heard: RunEvents) -> Rank:
    (rank,) = heard.ranks.values()
    return rank


@given(num_steps=st.integers(1, 40), compiling=st.sets(st.integers(1, 40)), evaluating=st.sets(st.integers(1, 40)))
def test_intervals_hold_neither_warm_up_nor_compilations_nor_evaluations(
    num_steps: int, compiling: set[int], evaluating: set[int]
) -> None:
    """A step that is compiled or evaluated in takes a hundred times as long. Long steps are steady from the third on,
    and of one that compiled nothing is known."""
    messages: list[Message] = [said.loader(7), said.loader(7, "1", maker="other", shuffles=False), said.optimizer(7)]
    evaluating = {number for number in evaluating if number % 3 == 0}  # not in most steps
    seconds, num_compilations, num_evaluated = 0.0, 0, 0
    for number in range(1, num_steps + 1):
        is_slow = number in compiling or number in evaluating or number <= 2
        seconds += said.STEP_SECONDS * (100 if is_slow else 1)
        num_compilations += number in compiling
        num_evaluated += 64 * (number in evaluating)
        samples = {"0": 8 * number, "1": num_evaluated}
        messages.append(said.step(7, number, time=seconds, num_samples=samples, num_compilations=num_compilations))
    rank = only(said.heard(messages))
    num_warmup = next(number for number in range(2, 43) if number not in compiling)
    expected = set(range(num_warmup + 1, num_steps + 1)) - compiling - evaluating
    found = list(rank.intervals())
    assert len(found) == len(expected)
    assert {(round(one.step_seconds, 6), one.num_samples, one.num_passes) for one in found} <= {(0.5, 8, 1)}
    assert rank.num_compiling_steps == len([n for n in compiling if num_warmup < n <= num_steps])


def test_a_loader_made_anew_for_every_epoch_is_one() -> None:
    messages: list[Message] = [said.optimizer(7)]
    for number in range(1, 17):
        epoch, place = divmod(number - 1, 4)
        if not place:
            messages.append(said.loader(7, str(epoch)))
        samples = {str(e): 32 for e in range(epoch)} | {str(epoch): 8 * (place + 1)}
        messages.append(said.step(7, number, num_samples=samples))
    rank = only(said.heard(messages))
    assert rank.training_loaders == {"0", "1", "2", "3"}
    assert [one.num_samples for one in rank.intervals()] == [8] * 14


@pytest.mark.parametrize(("period", "expected"), [(2, {"0", "1"}), (3, {"0"})])
def test_a_loader_trains_that_at_least_half_of_the_steps_fetch_from(period: int, expected: set[str]) -> None:
    messages: list[Message] = [said.loader(7), said.loader(7, "1", maker="other"), said.optimizer(7)]
    for number in range(13):
        messages.append(said.step(7, number + 1, num_samples={"0": 8 * number, "1": 8 * (number // period)}))
    assert only(said.heard(messages)).training_loaders == expected


def test_steps_between_two_looks_at_the_device_are_one_interval() -> None:
    messages: list[Message] = [said.loader(7), said.optimizer(7)]
    messages += [said.step(7, number, is_settled=number % 4 == 3) for number in range(1, 16)]
    assert [(one.num_steps, one.num_samples, one.step_seconds) for one in only(said.heard(messages)).intervals()] == [
        (4, 32, 0.5)
    ] * 2


FALLING = [1.0, 0.09, 0.07, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]  # seconds of steps


def with_steps(seconds: Sequence[float], *more: Message) -> Rank:
    times = itertools.accumulate(seconds)
    steps = [said.step(7, number, time=time) for number, time in enumerate(times, 1)]
    return only(said.heard([said.loader(7), said.optimizer(7), *steps, *more]))


def test_steps_are_measured_once_they_have_stopped_falling() -> None:
    assert [round(one.step_seconds, 6) for one in with_steps(FALLING).intervals()] == [0.03] * 2
    assert list(with_steps(FALLING[:6]).intervals()) == []


def test_of_a_process_that_ended_before_they_did_what_follows_the_least_warm_up_is_measured() -> None:
    gone = Exit(pid=7, time=9.0, rank=0, world=1)
    assert len(list(with_steps(FALLING[:6], gone).intervals())) == 6 - NUM_WARMUP_STEPS


def test_a_process_that_became_another_program_goes_on() -> None:
    """As `poetry run python train.py` does, by os.execv: the same number, and a new connection."""
    rank = with_steps(FALLING[:6])
    first = said.heard([said.hello(rank.pid), said.closed(rank.pid), *rank.optimizers.values(), *rank.steps])
    assert list(only(first).intervals()) == list(rank.intervals()) == []


def test_long_steps_are_measured_from_the_third_on() -> None:
    assert [one.step_seconds for one in with_steps([9.0, 2.0, 2.0, 2.0]).intervals()] == [2.0, 2.0]


@given(seconds=st.lists(st.floats(0.01, 10), min_size=1, max_size=4))
def test_the_slowest_rank_sets_the_rate(seconds: list[float]) -> None:
    messages: list[Message] = []
    for rank, each in enumerate(seconds):
        messages += [said.loader(rank), said.optimizer(rank, rank, len(seconds))]
        messages += [said.step(rank, number, time=each * number) for number in range(1, 9)]
    assert said.heard(messages).samples_per_second() == pytest.approx(8 * len(seconds) / max(seconds))


@given(st.permutations(range(3)))
def test_nothing_is_rated_before_every_rank_was_heard(order: list[int]) -> None:
    heard = RunEvents()
    for position, rank in enumerate(order):
        assert (heard.samples_per_second(), heard.num_steps) == (None, 0)
        heard.add(said.optimizer(rank, rank, 3))
        for number in range(1, 9):
            heard.add(said.step(rank, number, num_samples={}, forwards=(("Net", 4, "float32"),)))
        assert heard.has_all_ranks is (position == 2)
    assert heard.num_steps == 8
    assert heard.samples_per_second() == pytest.approx(3 * 4 / said.STEP_SECONDS), "of what entered the modules"


def test_ranks_that_wait_are_not_those_that_hang() -> None:
    heard = said.trained([5, 5, 5])
    waits = ("train.py", "/x/torch/distributed/distributed_c10d.py")
    for pid, at in ((100, waits), (101, ("train.py", "/x/torch/utils/data/dataloader.py")), (102, waits)):
        heard.add(Stack(pid=pid, time=0.0, text="", at=at))
    assert heard.silent_pids == [101]
    heard.add(said.step(100, 6))
    heard.add(said.step(101, 6))
    assert heard.silent_pids == [102], "behind the others, wherever it is"


def test_a_rank_is_known_before_its_first_step_and_what_it_starts_is_none() -> None:
    processes = [said.torch(10), *(said.torch(20 + rank, rank, 2, parent=10) for rank in range(2))]
    processes += [said.torch(30, 1, 2, parent=21), said.torch(31, 0, 2, parent=20, worker="Process-1")]
    processes.append(said.torch(41, 0, 2, parent=40, worker="ForkServerProcess-1"))  # its parent has no torch
    random.shuffle(processes)
    heard = said.heard(processes)
    assert heard.rank_by_pid == {20: 0, 21: 1}
    assert heard.world == 2
    heard.add(said.closed(30))
    heard.add(said.closed(21))
    heard.add(said.closed(20))
    assert heard.lost_pids == [21, 20]

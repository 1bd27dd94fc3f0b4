"""Which optimizer steps are measured: messages that no process has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import said

from autotune_amp.command.messages import Flops
from autotune_amp.command.rank_steps import Rank


def rank_of(steps: Sequence[int], lines: str) -> Rank:
    """A rank that took steps of the optimizers with these indices, each of which is named by the letter of its line."""
    rank = Rank(1)
    for number, index in enumerate(steps, 1):
        if index not in rank.optimizers:
            rank.add(said.optimizer(1, index=index, line=f"train.py:{lines[index]}"))
        rank.add(said.step(1, number, optimizer=index))
    return rank


@pytest.mark.parametrize(
    ("steps", "lines", "expected"),
    [
        ([0] * 9, "a", 9),
        ([0, 0, 1, 1, 2, 2], "aaa", 6),  # made anew in each round
        ([0, 0, 1, 0, 0, 1], "ab", 2),
        ([0, 1, 2, 0, 1, 2], "aaa", 2),  # an ensemble
        ([0, 1, 0, 1, 2, 3, 2, 3], "abab", 4),  # a GAN in each fold
        ([0, 1, 0, 1, 2, 3, 2, 3], "aaaa", 4),  # an ensemble in each fold
        ([0] * 10 + [1] * 100, "ab", 100),  # a search for the learning rate
        ([0] * 10 + [1] * 20, "ab", 10),  # it may go on
        (([0] * 50 + [1]) * 3, "ab", 3),
        ([1] + ([0] * 25 + [1]) * 2, "ab", 3),
    ],
)
def test_steps_of_the_optimizer_that_steps_least_often(steps: Sequence[int], lines: str, expected: int) -> None:
    assert len(rank_of(steps, lines).primary_steps) == expected


def test_parameters_of_an_optimizer_that_is_replaced_do_not_count() -> None:
    assert len(rank_of([0, 0, 1, 1, 2, 2], "aaa").running_optimizers) == 1
    assert len(rank_of([0, 1, 2, 0, 1, 2], "aaa").running_optimizers) == 3


def test_a_step_whose_operations_were_counted_does_not_make_the_warm_up_shorter() -> None:
    num_warmup: list[int | None] = []
    for counted_seconds in (0.0, 5.0):
        rank, now = Rank(1), 0.0
        rank.add(said.optimizer(1))
        for number in range(1, 30):
            now += max(0.08, 0.14 - 0.01 * number) + (counted_seconds if number == 2 else 0.0)
            rank.add(said.step(1, number, time=now))
        if counted_seconds:
            rank.add(Flops(pid=1, time=0.0, flops=8, problem=None, num_samples=8, num_positions=0))
        num_warmup.append(rank._num_warmup_steps())
    assert num_warmup[1] is not None
    assert num_warmup[0] is not None
    assert num_warmup[1] >= num_warmup[0] > 2


@pytest.mark.parametrize("num_drawn", [0, 1])  # of the validation loader's batches, before the first step
def test_only_training_loaders_prefetch_the_batches_of_a_warm_up(num_drawn: int) -> None:
    rank = Rank(1)
    rank.add(said.optimizer(1))
    rank.add(said.loader(1, num_workers=4, prefetch_factor=2))
    for number in range(1, 11):
        rank.add(said.step(1, number, num_samples={"0": 8} if num_drawn else {}, num_batches=num_drawn))
    assert list(rank.intervals())


@pytest.mark.parametrize(
    ("loaders_of_steps", "num_samples", "training"),
    [
        (["0", "01"] * 8, 8, {"0"}),  # an evaluation after every second step
        (["01", *["0", "01"] * 8], 8, {"0"}),  # the same, in an odd number of steps
        (["0", "01"] * 8, 64, {"0", "1"}),  # a second loader for every second step
        (["0", "1"] * 8, 8, {"0", "1"}),  # two tasks in turn
        (["01"] * 16, 8, {"0", "1"}),
        (["0", "0", "0", "01"] * 4, 64, {"0"}),
    ],
)
def test_a_loader_that_yields_rarely_or_all_at_once_serves_evaluation(
    loaders_of_steps: list[str], num_samples: int, training: set[str]
) -> None:
    rank, num_yielded = Rank(1), Counter[str]()
    rank.add(said.optimizer(1))
    for index in "01":
        rank.add(said.loader(1, index, maker=index, num_samples=num_samples))
    for number, loaders in enumerate(["0", *loaders_of_steps], 1):
        num_yielded.update(dict.fromkeys(loaders, 8))
        rank.add(said.step(1, number, num_samples=dict(num_yielded)))
    assert rank.training_loaders == training

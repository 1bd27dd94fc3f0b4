"""Which samples are picked so that micro-batches hold unequal shares of what may count."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_amp.trial.unequal import copied, counts, counts_of_samples, inequality, picked


def test_all_that_a_loss_may_average_over_is_counted() -> None:
    batch = {"labels": torch.tensor([[-100, 0, 3, 4]]), "mask": torch.tensor([[True, False]]), "text": ["a b"]}
    assert counts(batch) == {
        "labels != -100": 3,
        "mask != -100": 2,
        "labels != 0": 3,
        "mask != 0": 1,
        "labels": 4,
        "mask": 2,
    }


@pytest.mark.parametrize("other", [3, 40])
@pytest.mark.parametrize("num_unlike", [1, 5, 50])
def test_half_are_unlike_the_most_and_come_first(num_unlike: int, other: int) -> None:
    """Few short ones among full ones, or few long ones among short ones; as many as there are."""
    lengths = [other] * num_unlike + [32] * (1000 - num_unlike)
    random.Random(0).shuffle(lengths)
    positions = picked([{"ids": length} for length in lengths], 16)
    assert len(set(positions)) == 16
    num_first = min(8, num_unlike)
    assert [lengths[position] for position in positions] == [other] * num_first + [32] * (16 - num_first)


def test_the_shorter_half_comes_before_the_longer_one() -> None:
    lengths = random.Random(0).sample(range(1000), 100)
    taken = [lengths[position] for position in picked([{"ids": length} for length in lengths], 16)]
    assert max(taken[:8]) < min(taken[8:])


def test_samples_without_a_label_come_last() -> None:
    """A micro-batch of nothing else would have no mean, and accumulation be withheld for it."""
    seen = [{"labels != -100": 0 if i % 100 == 3 else 5 if i % 10 == 0 else 20, "labels": 20} for i in range(400)]
    labelled = [seen[position]["labels != -100"] for position in picked(seen, 16)]
    assert labelled == [5] * 8 + [20] * 8
    few = [*seen[:4], *[seen[3]] * 4]
    assert [few[position]["labels != -100"] for position in picked(few, 6)] == [5, 20, 20, 0, 0, 0]


def test_every_count_has_its_turn() -> None:
    """By chance the numbers of pixels and of their zeros differ, far more than that of the boxes."""
    rng = random.Random(0)
    seen = [
        {"pixels": rng.randrange(10**5), "zeros": rng.randrange(50), "boxes": 3 - (i % 100 == 7)} for i in range(500)
    ]
    boxes = [seen[position]["boxes"] for position in picked(seen, 16)]
    assert boxes[:8].count(2) >= 2
    assert boxes[8:].count(2) == 0


def test_unequal_micro_batches_are_told_from_equal_ones() -> None:
    mask = torch.ones(2, 8)
    assert inequality([mask, mask]) == 0
    assert inequality([mask, torch.tensor([[1.0] * 8, [0.0] * 8])]) == pytest.approx(0.5)
    assert inequality([mask, mask[:, :4]]) == pytest.approx(3 * 0.5)
    assert inequality([torch.zeros(2), torch.zeros(2)]) == 0


def test_where_all_are_alike_or_few_were_seen_any_will_do() -> None:
    assert picked([{"x": 5}] * 20, 16) == list(range(16))
    assert picked([{"x": 5}, {"x": 4}], 16) == [0, 1]
    assert picked([], 16) == []
    assert picked([{"x": 5}, {}, {"x": 5}], 2) == [1, 0], "a sample may lack what others have"


def test_a_copy_of_a_row_is_not_one_of_the_whole_storage() -> None:
    row = torch.arange(1000)[5:8]
    sample: Any = {"x": row, "more": [row, "text"]}
    copy = copied(sample)
    copy["x"] += 1
    copy["more"].pop()
    assert copy["x"].untyped_storage().nbytes() == 3 * 8
    assert sample["x"].tolist() == [5, 6, 7]
    assert len(sample["more"]) == 2


def test_the_look_ends_by_the_clock_and_where_the_users_code_raises() -> None:
    class Samples:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 50:
                raise ValueError("a broken sample")
            return torch.zeros(index)

    loader: DataLoader[Any] = DataLoader(Samples(), batch_size=2)  # type: ignore[arg-type]  # it has what it takes
    assert [seen["batch"] for seen in counts_of_samples(loader, range(40), 60)] == list(range(40))
    assert len(counts_of_samples(loader, range(40), 0)) == 4
    assert len(counts_of_samples(loader, range(100), 60)) == 48

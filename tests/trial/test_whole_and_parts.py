"""One batch and its micro-batches out of every kind of data: the same samples, each as the loader makes it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune_amp.numerics import batches
from autotune_amp.trial.micro_batches import (
    CannotCutError,
    copied,
    counts,
    counts_of_samples,
    picked,
    whole_and_parts,
)


def numbered(num_samples: int) -> Tensor:
    return torch.arange(num_samples * 3).reshape(num_samples, 3)


class Words(Dataset[Any]):
    """Sample i holds i + 1 tokens, all of them i."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= 40:
            raise IndexError
        return {"ids": [index] * (index + 1), "index": index}

    def __len__(self) -> int:
        return 40


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(len(sample["ids"]) for sample in samples)
    ids = [sample.pop("ids") for sample in samples]  # it takes its samples apart, as many do
    rows = [row + [-100] * (longest - len(row)) for row in ids]
    return {"ids": torch.tensor(rows), "index": torch.tensor([sample["index"] for sample in samples])}


def masked(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {**batch, "ids": torch.where(torch.rand(batch["ids"].shape) < 0.5, -1, batch["ids"])}


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from numbered(100)


class ReadyBatches(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return numbered(16)

    def __len__(self) -> int:
        return 5


def numbers(batch: Any) -> list[int]:
    """Which samples a batch holds, by the first number of its first tensor."""
    first = next(tensor for _, tensor in batches.tensors(batch))
    return [int(row.flatten()[0]) for row in first]


def loader(dataset: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(numbered(40), torch.arange(40)) if dataset is None else dataset, **settings)


@pytest.mark.parametrize(
    "data",
    [
        loader(batch_size=32),
        loader(batch_size=2, shuffle=True, drop_last=True),
        loader(batch_size=30, drop_last=True, sampler=range(20, 40)),
        TensorDataset(numbered(40), torch.arange(40)),
        Stream(),
        loader(Stream(), batch_size=3),
        lambda size: (numbered(size), torch.arange(size)),
        lambda size: iter([{"x": numbered(size)}] * 2),
        lambda size: loader(batch_size=size, shuffle=True),
        lambda size: loader(batch_sampler=[list(range(start, start + 5)) for start in range(0, 40, 5)]),
        lambda size: loader(ReadyBatches(), batch_size=None),
    ],
)
@pytest.mark.parametrize(("num_samples", "sizes"), [(16, [4] * 4), (8, [2] * 4), (6, [3, 3]), (4, [2, 2])])
def test_the_pieces_are_the_whole_in_its_order(data: Any, num_samples: int, sizes: list[int]) -> None:
    whole, *pieces = whole_and_parts(data, num_samples, seed=0)
    assert [len(numbers(piece)) for piece in pieces] == sizes
    assert len(numbers(whole)) == num_samples
    assert numbers(whole) == [number for piece in pieces for number in numbers(piece)]


def test_each_piece_is_padded_as_the_loader_pads_it() -> None:
    for data in (
        loader(Words(), batch_size=4, collate_fn=padded),
        lambda n: loader(Words(), batch_size=n, collate_fn=padded),
    ):
        whole, *pieces = whole_and_parts(data, 8, seed=0, seconds=60)
        lengths = [number + 1 for number in numbers(whole)]
        assert max(lengths[:4]) < min(lengths[4:]), "the micro-batches are unequal"
        assert whole["ids"].shape == (8, max(lengths))
        assert [piece["ids"].shape[1] for piece in pieces] == [max(lengths[i : i + 2]) for i in (0, 2, 4, 6)]


class Texts(Dataset[Tensor]):
    """Of at most 32 tokens, which `share` of them have."""

    def __init__(self, share: float, *, longest_first: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.where(
            torch.rand(1000, generator=generator) < share, 32, torch.randint(4, 32, (1000,), generator=generator)
        )
        self.lengths = (lengths.sort(descending=True).values if longest_first else lengths).tolist()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(self.lengths[index], dtype=torch.long)


def to_full_length(samples: list[Tensor]) -> dict[str, Tensor]:
    """As a tokenizer pads to its maximum: every sample is as large as every other."""
    lengths = torch.tensor([len(sample) for sample in samples])
    labels = torch.where(torch.arange(32) < lengths[:, None], 1, -100)
    return {"ids": torch.ones(len(samples), 32, dtype=torch.long), "labels": labels}


@pytest.mark.parametrize(("share", "longest_first"), [(0.95, False), (0.98, False), (0.998, False), (0.3, True)])
def test_micro_batches_are_unequal_also_where_nearly_all_samples_are_alike(share: float, longest_first: bool) -> None:
    texts = Texts(share, longest_first=longest_first)
    for seed in range(4):
        data = loader(texts, batch_size=32, shuffle=not longest_first, collate_fn=to_full_length)
        _, *pieces = whole_and_parts(data, 16, seed, seconds=60)
        tokens = [int((piece["labels"] != -100).sum()) for piece in pieces]
        assert min(tokens[:2]) < min(tokens[2:])


def test_what_nobody_asked_for_may_raise_and_the_dataset_keeps_what_it_has() -> None:
    def in_pairs(samples: list[dict[str, Any]]) -> Tensor:
        first, second, *others = [sample.pop("x") for sample in samples]
        return torch.stack([first, second, *others])

    def one_batch(size: int) -> Iterator[Tensor]:
        yield numbered(size)
        raise ValueError("no more")

    samples = [{"x": row} for row in numbered(20)]
    for data in (loader(samples, batch_size=4, collate_fn=in_pairs), one_batch):
        whole, *pieces = whole_and_parts(data, 8, seed=0)
        assert numbers(whole) == [number for piece in pieces for number in numbers(piece)]
    assert all("x" in sample for sample in samples)


def test_samples_come_from_a_worker_where_the_loader_has_them() -> None:
    whole, *pieces = whole_and_parts(loader(batch_size=4, num_workers=2, persistent_workers=True), 4, seed=0)
    assert numbers(whole) == numbers(pieces[0]) + numbers(pieces[1])


def test_what_a_collate_function_draws_is_the_same_in_its_pieces() -> None:
    whole, *pieces = whole_and_parts(loader(Words(), batch_size=8, collate_fn=masked), 8, seed=0)
    assert (whole["ids"] == -1).any()
    assert torch.equal(torch.cat([piece["ids"] for piece in pieces]), whole["ids"])


class Graph(NamedTuple):
    nodes: Tensor
    edges: Tensor


@pytest.mark.parametrize(
    ("data", "num_samples", "message"),
    [
        (loader(batch_size=2), 2, "fewer than 4 samples cannot be cut"),
        (TensorDataset(numbered(5)), 8, "the data holds 5 samples, fewer than the 8"),
        (lambda size: Graph(numbered(size * 3), numbered(2)), 8, r"first dimensions \[2, 24\]"),
        (lambda size: numbered(size).T, 8, r"first dimensions \[3\]"),  # time or features first
        (lambda size: ["text"] * size, 8, "no tensors"),
    ],
)
def test_why_there_are_no_pieces(data: Any, num_samples: int, message: str) -> None:
    with pytest.raises(CannotCutError, match=message):
        whole_and_parts(data, num_samples, seed=0)


@dataclass(frozen=True)
class Example:
    x: Tensor
    names: list[str]
    epoch: int = 3


class Loose:
    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.scale = 2.0


def encoding(x: Tensor) -> Any:
    return pytest.importorskip("transformers").BatchEncoding({"input_ids": x, "n": 5})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: Graph(x, x + 1),
        lambda x: MappingProxyType({"x": x}),
        lambda x: Example(x, [str(int(row[0])) for row in x]),
        Loose,
        encoding,
        lambda x: [{"x": x, "y": (x, None)}, "text", x],
    ],
)
def test_batches_of_many_types_are_cut_and_keep_their_type(wrap: Any) -> None:
    batch = wrap(numbered(8))
    pieces = batches.cut(batch, 3)
    assert [numbers(piece) for piece in pieces] == [[0, 3, 6], [9, 12, 15], [18, 21]]
    assert all(isinstance(piece, Mapping if isinstance(batch, Mapping) else type(batch)) for piece in pieces)
    assert numbers(batch) == list(range(0, 24, 3))
    if isinstance(batch, Example):
        assert [piece.names for piece in pieces] == [["0", "3", "6"], ["9", "12", "15"], ["18", "21"]]
        assert {piece.epoch for piece in pieces} == {3}


def test_tensors_are_named_as_the_batch_names_them() -> None:
    x = torch.zeros(2)
    nested = {"inputs": {"ids": x, "rest": [x, (x,)]}, "graph": Graph(x, x), "example": Example(x, [])}
    assert [name for name, _ in batches.tensors(nested)] == [
        "inputs.ids",
        "inputs.rest[0]",
        "inputs.rest[1][0]",
        "graph.nodes",
        "graph.edges",
        "example.x",
    ]
    assert [name for name, _ in batches.tensors((x, [x]))] == ["batch[0]", "batch[1][0]"]


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

"""One batch and its micro-batches out of every kind of data: the same samples, each as the loader makes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune_amp.numerics import batches
from autotune_amp.trial.pieces import CannotCutError, whole_and_pieces


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
    whole, *pieces = whole_and_pieces(data, num_samples, seed=0)
    assert [len(numbers(piece)) for piece in pieces] == sizes
    assert len(numbers(whole)) == num_samples
    assert numbers(whole) == [number for piece in pieces for number in numbers(piece)]


def test_each_piece_is_padded_as_the_loader_pads_it() -> None:
    for data in (
        loader(Words(), batch_size=4, collate_fn=padded),
        lambda n: loader(Words(), batch_size=n, collate_fn=padded),
    ):
        whole, *pieces = whole_and_pieces(data, 8, seed=0, seconds=60)
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
        _, *pieces = whole_and_pieces(data, 16, seed, seconds=60)
        tokens = [int((piece["labels"] != -100).sum()) for piece in pieces]
        assert min(tokens[:2]) < min(tokens[2:])


def test_of_ready_batches_the_most_unequal_is_taken() -> None:
    for position in (0, 5):
        made = [{"x": numbered(16) + 1000 * index, "mask": torch.ones(16)} for index in range(40)]
        made[position]["mask"][:3] = 0
        whole, *_ = whole_and_pieces(lambda size, made=made: iter(made), 16, seed=0, seconds=60)
        assert int(whole["mask"].sum()) == 13
        assert numbers(whole)[0] == 1000 * position


def test_what_nobody_asked_for_may_raise_and_the_dataset_keeps_what_it_has() -> None:
    def in_pairs(samples: list[dict[str, Any]]) -> Tensor:
        first, second, *others = [sample.pop("x") for sample in samples]
        return torch.stack([first, second, *others])

    def one_batch(size: int) -> Iterator[Tensor]:
        yield numbered(size)
        raise ValueError("no more")

    samples = [{"x": row} for row in numbered(20)]
    for data in (loader(samples, batch_size=4, collate_fn=in_pairs), one_batch):
        whole, *pieces = whole_and_pieces(data, 8, seed=0)
        assert numbers(whole) == [number for piece in pieces for number in numbers(piece)]
    assert all("x" in sample for sample in samples)


def test_samples_come_from_a_worker_where_the_loader_has_them() -> None:
    whole, *pieces = whole_and_pieces(loader(batch_size=4, num_workers=2, persistent_workers=True), 4, seed=0)
    assert numbers(whole) == numbers(pieces[0]) + numbers(pieces[1])


def test_what_a_collate_function_draws_is_the_same_in_its_pieces() -> None:
    whole, *pieces = whole_and_pieces(loader(Words(), batch_size=8, collate_fn=masked), 8, seed=0)
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
        whole_and_pieces(data, num_samples, seed=0)


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

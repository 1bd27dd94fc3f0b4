"""One batch and its micro-batches out of every kind of data: the same samples, each as the loader makes it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune_amp import Workload
from autotune_amp.core.outcome import Accumulation, CheckOutcome
from autotune_amp.core.setting import Setting
from autotune_amp.numerics import accumulation
from autotune_amp.precision import torch_state
from autotune_amp.trial import checks
from autotune_amp.trial.checks import CannotCutError, num_counted, whole_and_parts
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check


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


class AtOnce(Dataset[Any]):
    """Makes the batch of some indices at once, as what holds tensors does."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return numbered(40)[index], torch.arange(40)[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return numbered(40)[indices], torch.arange(40)[indices]


class OneByOne(AtOnce):
    """Gives the samples of some indices at once, to be collated."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


def as_it_is(batch: Any) -> Any:
    return batch


def numbers(batch: Any) -> list[int]:
    """Which samples a batch holds, by the first number of its first tensor."""
    first = next(tensor for _, tensor in accumulation.batch_tensors(batch))
    return [int(row.flatten()[0]) for row in first]


def loader(dataset: Any = None, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(numbered(40), torch.arange(40)) if dataset is None else dataset, **settings)


@pytest.mark.parametrize(
    "data",
    [
        loader(batch_size=2, shuffle=True, drop_last=True),
        loader(batch_size=30, drop_last=True, sampler=range(20, 40)),
        loader(batch_size=4, num_workers=2, persistent_workers=True),
        TensorDataset(numbered(40), torch.arange(40)),
        loader(Stream(), batch_size=3),
        lambda size: (numbered(size), torch.arange(size)),
        lambda size: iter([{"x": numbered(size)}] * 2),
        lambda size: loader(batch_sampler=[list(range(start, start + 5)) for start in range(0, 40, 5)]),
        lambda size: loader(ReadyBatches(), batch_size=None),
        loader(AtOnce(), batch_size=4, collate_fn=as_it_is, shuffle=True),
        loader(OneByOne(), batch_size=4),
    ],
)
@pytest.mark.parametrize(("num_samples", "sizes"), [(16, [4] * 4), (6, [3, 3])])
def test_the_micro_batches_are_the_whole_in_its_order(data: Any, num_samples: int, sizes: list[int]) -> None:
    whole, *parts = whole_and_parts(data, num_samples, seed=0)
    assert [len(numbers(part)) for part in parts] == sizes
    assert len(numbers(whole)) == num_samples
    assert numbers(whole) == [number for part in parts for number in numbers(part)]


def test_each_part_is_padded_as_the_loader_pads_it_and_they_are_unequal() -> None:
    for data in (
        loader(Words(), batch_size=4, collate_fn=padded),
        lambda n: loader(Words(), batch_size=n, collate_fn=padded),
    ):
        whole, *parts = whole_and_parts(data, 8, seed=0, seconds=60)
        lengths = [number + 1 for number in numbers(whole)]
        assert max(lengths[:4]) < min(lengths[4:])
        assert whole["ids"].shape == (8, max(lengths))
        assert [part["ids"].shape[1] for part in parts] == [max(lengths[i : i + 2]) for i in (0, 2, 4, 6)]


def test_what_a_collate_function_draws_is_the_same_in_its_parts() -> None:
    whole, *parts = whole_and_parts(loader(Words(), batch_size=8, collate_fn=masked), 8, seed=0)
    assert (whole["ids"] == -1).any()
    assert torch.equal(torch.cat([part["ids"] for part in parts]), whole["ids"])


@pytest.mark.parametrize(
    ("data", "num_samples", "message"),
    [
        (loader(batch_size=2), 2, "fewer than 4 samples"),
        (TensorDataset(numbered(5)), 8, "holds 5 samples"),
        (lambda size: numbered(size).T, 8, r"first dimensions \[3\]"),  # time or features first
        (lambda size: ["text"] * size, 8, "no tensors"),
    ],
)
def test_why_there_are_no_micro_batches(data: Any, num_samples: int, message: str) -> None:
    with pytest.raises(CannotCutError, match=message):
        whole_and_parts(data, num_samples, seed=0)


# -- which samples -----------------------------------------------------------------------------------------------------


def test_what_a_loss_may_average_over_is_counted() -> None:
    ids, image = torch.tensor([[7, 0, 3, 4]]), torch.tensor([[0.0, 1.0]])
    assert (
        num_counted({"ids": ids, "labels": torch.tensor([[-100, 0, 3, 4]]), "image": image, "text": ["a b"]}) == 3 + 2
    )
    assert num_counted({"image": image}) == 1
    assert num_counted({"ids": ids, "labels": torch.full((1, 4), -100)}) == 0


@pytest.mark.parametrize("other", [3, 40])
@pytest.mark.parametrize("num_unlike", [1, 50])
def test_the_smallest_come_first_and_the_largest_next(num_unlike: int, other: int) -> None:
    """Few short ones among full ones, or few long ones among short ones."""
    lengths = [other] * num_unlike + [32] * (1000 - num_unlike)
    random.Random(0).shuffle(lengths)
    data = loader([torch.ones(length) for length in lengths], collate_fn=torch.stack)
    found = [len(sample) for sample in checks._samples(data, 16, 0, 60)]
    assert found.count(other) == min(8, num_unlike)
    assert max(found[:8]) <= min(found[8:])


def test_samples_without_a_label_come_last() -> None:
    """A micro-batch of nothing else would have no mean, and accumulation be withheld for it."""
    rows = [torch.tensor([-100] * 4 if index % 4 == 3 else [1] * 4) for index in range(40)]
    found = checks._samples(loader(rows, collate_fn=torch.stack), 16, 0, 60)
    assert all((row == 1).all() for row in found)
    assert len(checks._samples(loader(rows[3:8], collate_fn=torch.stack), 4, 0, 60)) == 4


# -- the check ---------------------------------------------------------------------------------------------------------


class Texts:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < 64:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 20, (), generator=generator))
        return {"ids": torch.randint(1, 20, (length,), generator=generator)}


def with_labels(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence([sample.pop("ids") for sample in samples], batch_first=True)
    return {"ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


def joined(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    ids = [sample.pop("ids") for sample in samples]
    return {"nodes": torch.cat(ids), "first": torch.tensor([len(part) for part in ids]).cumsum(0)}


class Model(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = norm
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Any:
        hidden = self.words(ids)
        return self.head(self.dropout(self.norm(hidden.flatten(0, -2)).view_as(hidden)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    if "nodes" in batch:
        return model(batch["nodes"]).square().mean()
    labels = batch.pop("labels")  # as many do: the next pass needs them again
    return nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), labels.flatten())


def checked(
    batch_size: int = 32,
    seed: int = 0,
    *,
    norm: Any = nn.LayerNorm,
    collate: Any = with_labels,
) -> CheckOutcome:
    texts: Any = Texts()
    given: DataLoader[Any] = DataLoader(texts, batch_size=32, shuffle=True, collate_fn=collate)
    state = torch_state.capture()
    spec = Check(
        what="accumulation",
        candidate=Setting(precision="fp32", batch_size=batch_size),
        seed=seed,
        device="cpu",
        torch_state=state,
    )
    context = Context(Workload(lambda: Model(norm(16)), loss, given), is_kept=False)
    return checks.check(context, spec, lambda event: None)


def test_padded_texts_are_weighted_by_their_tokens() -> None:
    for seed in range(2):
        found = checked(seed=seed)
        assert isinstance(found, Accumulation)
        assert (found.verdict, found.weighted_by) == ("weighted", "labels != -100"), found.reason
        assert (found.batch_size, found.num_micro_batches) == (16, 4)


def test_batch_norm_is_found_in_the_users_own_model_and_joined_samples_are_cut_before_they_are() -> None:
    found = checked(norm=nn.BatchNorm1d)
    assert isinstance(found, Accumulation)
    assert found.verdict == "inexact"
    assert "(norm)" in found.reason
    found = checked(collate=joined)
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.weighted_by) == ("weighted", "nodes.numel()"), found.reason


def test_what_cannot_be_cut_is_unchecked() -> None:
    found = checked(batch_size=3)
    assert isinstance(found, Accumulation)
    assert (found.verdict, found.batch_size) == ("unchecked", 3)

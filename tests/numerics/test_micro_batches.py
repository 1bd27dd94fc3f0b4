"""Accumulated gradients against the whole batch's: losses and models that keep them equal, and those that do not."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from subjects import compiled, everything_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune_amp.core.outcome import Accumulation
from autotune_amp.numerics import accumulation
from autotune_amp.numerics.accumulation import GradientProducts, check_accumulation, find_weights, split_batch
from autotune_amp.numerics.passes import CheckInputs

Loss = Callable[[Any, Any], Tensor]


def found_of(model: nn.Module, loss: Loss, whole: Any, num_samples: int = 16, seed: int = 0) -> Accumulation:
    """A check, what holds of every one asserted."""
    micro_batches = split_batch(whole, num_samples // accumulation.num_micro_batches(num_samples))
    subject = CheckInputs(
        model=model,
        loss=lambda model, batch: loss(model, copy.deepcopy(batch)),
        batches=[whole, *micro_batches],
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        device=torch.device("cpu"),
        seed=seed,
    )
    before = everything_of(model)
    found = check_accumulation(subject, num_samples)
    torch.testing.assert_close(everything_of(model), before, rtol=0, atol=0)
    assert found.num_passes <= 3 + len(micro_batches)
    assert (found.batch_size, found.num_micro_batches) == (num_samples, len(micro_batches))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Accumulation) == found
    assert found.is_exact == (found.verdict in ("mean", "sum", "weighted"))
    return found


def regression(num_samples: int = 16) -> dict[str, Tensor]:
    x = torch.randn(num_samples, 8)
    return {"x": x, "y": x[:, :1] + 0.1 * torch.randn(num_samples, 1)}


def images(num_samples: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(num_samples, 3, 8, 8), torch.randint(4, (num_samples,))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def convnet(norm: nn.Module) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    return nn.Sequential(*layers)


def mean_square(model: Any, batch: Any) -> Tensor:
    return functional.mse_loss(model(batch.pop("x")), batch.pop("y"))


def classes(model: Any, batch: Any) -> Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True)
class Scene:
    image: Tensor
    name: str


def test_a_dataclass_with_slots_is_cut_as_any_other_batch() -> None:
    image = torch.randn(4, 3)
    assert accumulation.first_dimensions(Scene(image, "park")) == {4}
    first, second = split_batch(Scene(image, "park"), 2)
    assert (first.name, second.name) == ("park", "park")
    assert torch.equal(torch.cat([first.image, second.image]), image)


@pytest.mark.parametrize("num_samples", [6, 16])
def test_the_mean_over_samples_is_what_accumulation_averages(num_samples: int) -> None:
    found = found_of(mlp(), mean_square, regression(num_samples), num_samples)
    assert found.verdict == "mean", found.reason
    assert found.error is not None
    assert found.error == found.mean_error
    assert found.error < 1e-5
    assert "accumulation steps" in found.next_step
    summed = found_of(mlp(), lambda m, b: (m(b["x"]) - b["y"]).square().sum(), regression(num_samples), num_samples)
    assert summed.verdict == "sum", summed.reason
    assert "without dividing" in summed.next_step


def test_batch_norm_is_named_and_in_eval_mode_does_no_harm() -> None:
    model = convnet(nn.BatchNorm2d(8))
    found = found_of(model, classes, images())
    assert found.verdict == "inexact", found.reason
    assert "(1)" in found.reason, "the module is named"
    assert "GroupNorm" in found.next_step
    model.get_submodule("1").eval()
    assert found_of(model, classes, images()).verdict == "mean"
    assert found_of(convnet(nn.GroupNorm(2, 8)), classes, images()).verdict == "mean"


@pytest.mark.parametrize("shift", [0, 1])
def test_a_mean_over_tokens_weighs_micro_batches_by_their_labels(shift: int) -> None:
    """With tied weights; a language model may shift its labels: the first of each sequence counts for nothing."""
    words = nn.Embedding(64, 16)

    def loss(model: Any, batch: Any) -> Tensor:
        logits = model(batch["ids"]) @ words.weight.T
        return functional.cross_entropy(logits[:, : 16 - shift].flatten(0, 1), batch["labels"][:, shift:].flatten())

    lengths = torch.randint(4, 17, (16, 1))
    ids = torch.randint(3, 64, (16, 16))
    labels = ids.masked_fill(torch.arange(16) >= lengths, -100)
    found = found_of(words, loss, {"ids": ids, "labels": labels})
    name = "labels[:, 1:] != -100" if shift else "labels != -100"
    assert (found.verdict, found.weighted_by) == ("weighted", name), found.reason
    assert name in found.next_step
    assert found.mean_error is not None
    assert found.error is not None
    assert found.mean_error > 100 * found.error
    assert found_of(words, loss, {"ids": ids, "labels": ids}).verdict == "mean", "equal numbers of tokens"


@pytest.mark.parametrize(("times", "name"), [(torch.full((5,), 7), "mask != 0"), (torch.arange(1, 6), "mask.sum()")])
def test_a_masked_mean_is_named_after_its_mask(times: Tensor, name: str) -> None:
    kept = torch.rand(16, 5) < torch.linspace(0.2, 1, 16)[:, None]
    kept[:, 0] = True
    batch = torch.randn(16, 5, 8), torch.randn(16, 5), kept.long() * times

    def masked(model: Any, batch: Any) -> Tensor:
        x, y, mask = batch.values() if isinstance(batch, dict) else batch
        weight = mask.float() if name == "mask.sum()" else (mask != 0).float()
        mean: Tensor = (weight * (model(x)[..., 0] - y).square()).sum() / weight.sum()
        return mean

    found = found_of(mlp(), masked, dict(zip(["x", "y", "mask"], batch, strict=True)))
    assert (found.verdict, found.weighted_by) == ("weighted", name), found.reason
    assert found_of(mlp(), masked, batch).weighted_by == name.replace("mask", "batch[2]")


def contrast(model: Any, batch: Any) -> Tensor:
    ours = functional.normalize(model(batch["x"]), dim=1)
    theirs = functional.normalize(model(batch["x"] + 0.1 * batch["y"]), dim=1)
    return functional.cross_entropy(ours @ theirs.T / 0.1, torch.arange(len(ours)))


def penalized(model: Any, batch: Any) -> Tensor:
    summed: Tensor = (model(batch["x"]) - batch["y"]).square().sum()
    return summed + torch.stack([p.square().sum() for p in model.parameters()]).sum()


@pytest.mark.parametrize("loss", [contrast, penalized, lambda m, b: penalized(m, b) / len(b["x"])])
def test_samples_that_are_compared_and_terms_that_are_no_mean_over_samples_are_inexact(loss: Loss) -> None:
    found = found_of(nn.Linear(8, 16), loss, regression())
    assert found.verdict == "inexact", found.reason
    assert "with each other" in found.reason


def test_dropout_is_taken_out_and_other_draws_leave_it_unchecked() -> None:
    model, calls = mlp(), []

    def dropping(x: Tensor) -> Any:
        kept = functional.dropout(torch.ones(64), 0.5)
        calls.append(torch.equal(kept, torch.ones(64)))
        return model(functional.dropout(x, 0.5))

    def loss(_: Any, batch: Any) -> Tensor:
        return functional.mse_loss(checkpoint(dropping, batch["x"], use_reentrant=False), batch["y"])

    found = found_of(model, loss, regression())
    assert found.verdict == "mean", found.reason
    assert calls == [True, True] * 7, "in each of seven passes, and again in its backward pass"
    draws: list[Callable[[Tensor], Tensor]] = [torch.randn_like, lambda x: torch.tensor([[random.random()] for _ in x])]
    for draw in draws:
        noisy = partial(lambda draw, m, b: functional.mse_loss(m(b["x"] * draw(b["x"])), b["y"]), draw)
        found = found_of(mlp(), noisy, regression())
        assert found.verdict == "unchecked", found.reason
        assert "draw" in found.reason


class InBf16(nn.Module):
    """With an autocast of its own inside, which no pin from outside reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).float()


def in_autocast(model: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mean_square(model, batch)


def test_half_precision_of_the_users_own_is_run_in_fp32_or_allowed_its_rounding() -> None:
    for model, loss, most in (
        (mlp().bfloat16(), mean_square, 1e-5),
        (mlp(), in_autocast, 1e-5),
        (InBf16(), mean_square, 1),
    ):
        found = found_of(model, loss, regression())
        assert found.verdict == "mean", found.reason
        assert found.error is not None
        assert found.error < most
    normed = nn.Sequential(InBf16(), nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    assert found_of(normed, mean_square, regression()).verdict == "inexact"


class Words(nn.Module):
    """Sparse gradients, complex weights, and a count of the passes, which no gradient depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.seen: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((len(x), int(self.get_buffer("num_calls"))))
        self.get_buffer("num_calls").add_(1)
        output: Tensor = (self.words(x) * self.turn).abs().sum(-1)
        return output


def test_sparse_and_complex_gradients_and_the_state_that_each_pass_begins_from() -> None:
    model = Words()
    batch = {"x": torch.randint(50, (16, 3)), "y": torch.randn(16, 3)}
    assert found_of(model, mean_square, batch).verdict == "mean"
    assert model.seen == [(16, 0)] * 3 + [(4, 0), (4, 1), (4, 2), (4, 3)]
    assert found_of(compiled(mlp()), mean_square, regression()).verdict == "mean"


def test_numbers_that_are_not_finite_raise_nothing() -> None:
    found = found_of(mlp(), lambda m, b: m(b["x"]).mean() * torch.inf, regression())
    assert found.verdict == "unchecked", found.reason
    assert found_of(mlp(), lambda m, b: 0.0 * m(b["x"]).sum(), regression()).verdict == "unchecked"
    inputs, labels = images()
    labels[4:8] = -100
    found = found_of(convnet(nn.Identity()), classes, (inputs, labels))
    assert found.verdict == "inexact", found.reason
    assert "not finite" in found.reason


@pytest.mark.parametrize(
    ("gradients", "losses", "verdict"),
    [
        ([[2.0], [1.0], [3.0]], [2, 1, 3], "mean"),
        ([[4.0], [1.0], [3.0]], [4, 1, 3], "sum"),
        ([[2.5], [1.0], [3.0]], [2.5, 1, 3], "unchecked"),  # of collinear gradients many weights fit
        ([[1.0, 1.0], [1.0, 0.0], [1.0, 1e-5]], [1e5, 0, 1], "unchecked"),  # one of a hundred thousand is no finding
        ([[1.0, 0.7 * 1.7e-4], [1.0, 0.0], [1.0, 1.7e-4]], [0.7, 0, 1], "unchecked"),  # off by more than a twentieth
        ([[0.3, 0.7], [1.0, 0.0], [0.0, 1.0]], [0.7, 0, 1], "weighted"),
        ([[0.3, 0.7], [1.0, 0.0], [0.0, 1.0]], [0.2, 0, 1], "inexact"),
        ([[0.3, 0.7, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], [0.7, 0, 1], "inexact"),
    ],
)
def test_the_simplest_combination_is_taken_and_none_whose_loss_is_another(
    gradients: list[list[float]], losses: list[float], verdict: str
) -> None:
    rows = torch.tensor(gradients, dtype=torch.float64)
    sums = GradientProducts(gram=rows @ rows.T, losses=tuple(losses), rounding=1e-6, unit_roundoff=2.0**-24)
    assert find_weights(sums, []).verdict == verdict
    if verdict in ("inexact", "unchecked"):
        return
    share = torch.tensor([0.3, 0.7], dtype=torch.float64)
    found = find_weights(sums, [("mask != 0", share)])
    assert (found.verdict, found.share) == (verdict, "mask != 0" if verdict == "weighted" else None)

"""Gradients held against each other: by hand, sparse or dense, missing or huge."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from autotune_amp.numerics.comparison import Comparison, Sums, compare, signals
from autotune_amp.numerics.passes import Gradients


def one(*values: float) -> Gradients:
    return {"w": torch.tensor(values)}


def sums(low: list[Gradients], reference: list[Gradients]) -> Sums:
    return compare(low, reference, {"w"}).whole


def test_by_hand() -> None:
    # Batch A: off by (0.6, -0.8), of length 1; batch B: exact. They are (3, 4) and (6, 8), 5 apart, both ways round.
    found = sums([one(3.6, 3.2), one(6.0, 8.0)], [one(3.0, 4.0), one(6.0, 8.0)])
    assert found.noise_ratio == pytest.approx(math.sqrt(1 / 50))
    assert found.cosine == pytest.approx((3.6 * 3 + 3.2 * 4 + 100) / (math.sqrt(125) * math.sqrt(23.2 + 100)))
    assert found.norm_ratio == pytest.approx(math.sqrt((23.2 + 100) / 125))
    assert found.flushed_share == 0.0


def test_the_noise_is_between_a_batch_and_the_next_of_those_in_fp32() -> None:
    found = sums([one(1.0)], [one(1.5), one(3.5), one(100.0)])
    assert found.noise_ratio == pytest.approx(0.5 / 2)


def test_sums_add_up_over_parameters_and_batches() -> None:
    low = [{"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 3.0])}, {"a": torch.tensor([3.0])}]
    reference = [{"a": torch.tensor([2.0]), "b": torch.tensor([4.0, 4.0])}, {"a": torch.tensor([5.0])}]
    found = compare(low, reference, {"a", "b"})
    total = Sums()
    for part in found.parameters.values():
        total += part
    assert found.whole == total
    assert found.parameters["b"].difference == pytest.approx(4 + 1)
    assert found.parameters["b"].noise == pytest.approx(2 * 32)  # the second batch gave it none: a gradient of zero
    assert found.whole.difference == pytest.approx(1 + 4 + 5)


def comparison_of(*names: str) -> Comparison:
    gradients = {name: torch.tensor([float(number)]) for number, name in enumerate(names, start=1)}
    return compare([gradients], [gradients, {name: 2 * value for name, value in gradients.items()}], set(names))


def test_modules_hold_their_own_parameters_in_the_order_of_the_model() -> None:
    low = {"z.bias": torch.tensor([1.0]), "z.weight": torch.tensor([1.0]), "a.weight": torch.tensor([1.0])}
    low["scale"] = torch.tensor([1.0])
    reference = {name: value + 3.0 for name, value in low.items()}
    other = {name: value + 4.0 for name, value in reference.items()}
    found = {damage.name: damage for damage in compare([low], [reference, other], set(low)).modules(40)}
    assert list(found) == ["z", "a", ""]
    assert found["z"].noise_ratio == pytest.approx(math.sqrt(2 * 9 / (2 * 16)))
    assert found["a"].norm_ratio == pytest.approx(1 / 4)


def test_modules_are_joined_from_the_innermost_on_until_they_are_few() -> None:
    names = [f"model.layers.{layer}.{part}.weight" for layer in range(6) for part in ("query", "key", "value")]
    found = comparison_of("model.embedding.weight", *names, "head.weight")
    few = [damage.name for damage in found.modules(7)]
    assert [damage.name for damage in found.modules(20)][1:3] == ["model.layers.0.query", "model.layers.0.key"]
    assert few == ["model.embedding", "model.layers", "head"]
    assert [d.name for d in found.modules(8)] == ["model.embedding", *(f"model.layers.{n}" for n in range(6)), "head"]
    assert [damage.name for damage in found.modules(1)] == ["model", "head"], "the outermost are not joined"
    assert {damage.noise_ratio for damage in found.modules(1)} == {0.0}


def test_equal_batches_fall_back_to_the_gradient_itself() -> None:
    assert sums([one(3.0, 3.9)], [one(3.0, 4.0), one(3.0, 4.0)]).noise_ratio == pytest.approx(0.1 / 5)


@pytest.mark.parametrize(
    ("low", "reference", "ratio", "cosine"), [(0.0, 0.0, 0.0, 1.0), (1.0, 0.0, math.inf, 0.0), (0.0, 1.0, 1.0, 0.0)]
)
def test_zeros_have_answers(low: float, reference: float, ratio: float, cosine: float) -> None:
    found = sums([one(low)], [one(reference)])
    assert found.noise_ratio == ratio
    assert found.cosine == cosine


def test_a_missing_gradient_is_a_zero_one() -> None:
    whole = one(3.0, 4.0)
    assert sums([{}], [whole]) == sums([one(0.0, 0.0)], [whole])
    assert sums([whole], [{}]) == sums([whole], [one(0.0, 0.0)])
    assert sums([{}], [{}]) == Sums()
    assert sums([{}], [whole]).flushed_share == 1.0


def test_a_sparse_gradient_is_what_it_stands_for() -> None:
    dense = [torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 0.5]]), torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 1.0]])]
    near: list[Gradients] = [{"w": tensor * 1.01} for tensor in dense]
    plain: list[Gradients] = [{"w": tensor} for tensor in dense]
    assert sums(_sparse(near), _sparse(plain)) == sums(near, plain)
    assert signals(_sparse(plain)[0], _sparse(near)[0]) == {"w"}


def _sparse(gradients: list[Gradients]) -> list[Gradients]:
    return [{name: _rows(tensor) for name, tensor in batch.items()} for batch in gradients]


def _rows(tensor: Tensor) -> Tensor:
    """As an embedding's gradient has it, a row given twice."""
    sparse = tensor.to_sparse(1)
    indices = torch.cat([sparse.indices(), sparse.indices()], 1)
    values = torch.cat([sparse.values(), sparse.values()]) / 2
    return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()


def test_flushed_are_entries_that_count_and_are_zero_in_the_low_precision_alone() -> None:
    # 1 and 0.5 count, 1e-5 is too small to, 0 is zero anyway.
    reference = one(1.0, 0.5, 1e-5, 0.0)
    assert sums([one(0.0, 0.5, 0.0, 0.0)], [reference]).flushed_share == 0.5
    assert sums([one(1.0, 0.5, 0.0, 0.0)], [reference]).flushed_share == 0.0
    assert sums([one(0.0, 0.0, 0.0, 0.0)], [reference]).flushed_share == 1.0


def test_huge_and_tiny_values_neither_overflow_nor_vanish() -> None:
    for size in (1e30, 1e-30):
        found = sums([one(0.0, 1.01 * size)], [one(0.0, size), one(0.0, 2 * size)])
        assert found.noise_ratio == pytest.approx(0.01, rel=1e-4)
        assert found.cosine == pytest.approx(1.0)
        assert found.norm_ratio == pytest.approx(1.01)


def test_a_complex_gradient_is_its_real_and_its_imaginary_part() -> None:
    low, reference, other = (torch.tensor([complex(*pair)]) for pair in ((3.0, 4.5), (3.0, 4.0), (3.0, 9.0)))
    assert sums([{"w": low}], [{"w": reference}, {"w": other}]) == sums([one(3.0, 4.5)], [one(3.0, 4.0), one(3.0, 9.0)])


def test_parameters_without_entries_say_nothing() -> None:
    assert sums([one()], [one()]) == Sums()
    assert signals(one(), one()) == set()


def test_a_signal_is_what_another_rounding_leaves_as_it_is() -> None:
    gradients = {"kept": torch.ones(2), "noise": torch.ones(2), "zero": torch.zeros(2), "missing": torch.ones(2)}
    perturbed = {"kept": torch.full((2,), 1.05), "noise": torch.full((2,), 1.5), "zero": torch.zeros(2)}
    assert signals(gradients, perturbed) == {"kept"}


def test_the_worst_come_first() -> None:
    def part(difference: float, num_flushed: float) -> Sums:
        return Sums(difference=difference, noise=1.0, reference=1.0, num_counting=10, num_flushed=num_flushed)

    found = Comparison(Sums(), {"a": part(1.0, 0), "b": part(9.0, 2), "c": part(4.0, 5)})
    assert [damage.name for damage in found.worst(2)] == ["b", "c"]
    assert found.worst(1)[0].noise_ratio == 3.0
    most = found.most_flushed()
    assert most is not None
    assert (most.name, most.flushed_share) == ("c", 0.5)
    assert Comparison(Sums(), {}).most_flushed() is None
    assert Comparison(Sums(), {}).worst(5) == ()

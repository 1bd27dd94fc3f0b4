"""Gradients held against fp32's, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from subjects import storages_on_fake_gpu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from autotune_amp.core.outcome import GradientDamage
from autotune_amp.numerics.comparison import GradientComparer, _products, parameters_with_signal
from autotune_amp.numerics.passes import Gradients


def one(*values: float) -> Gradients:
    return {"w": torch.tensor(values)}


def sums(low: list[Gradients], reference: list[Gradients]) -> GradientDamage:
    comparer = GradientComparer({"w"})
    for low_gradients, reference_gradients in zip(low, reference, strict=True):
        comparer.add(low_gradients, reference_gradients)
    return comparer.compared().whole


def test_by_hand() -> None:
    # Batch A: off by (0.6, -0.8), of length 1; batch B: exact. They are (3, 4) and (6, 8), 5 apart: a variance of 12.5.
    found = sums([one(3.6, 3.2), one(6.0, 8.0)], [one(3.0, 4.0), one(6.0, 8.0)])
    assert found.noise_ratio == pytest.approx(math.sqrt(0.5 / 12.5), rel=0.01)
    assert found.cosine == pytest.approx((3.6 * 3 + 3.2 * 4 + 100) / (math.sqrt(125) * math.sqrt(23.2 + 100)))
    assert found.norm_ratio == pytest.approx(math.sqrt((23.2 + 100) / 125))
    assert found.flushed_share == 0.0
    # Of equal batches, and of one alone, the yardstick is the gradient itself.
    for num in (1, 2, 5, 8):
        found = sums([one(3.0, 3.9)] * num, [one(3.0, 4.0)] * num)
        assert found.noise_ratio == pytest.approx(0.1 / 5, rel=0.01)


@pytest.mark.parametrize("num_batches", [4, 8])
@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
def test_noise_is_not_taken_for_an_error_that_batches_share(num_batches: int, noise: float) -> None:
    def found(shared: float, seed: int) -> GradientDamage:
        generator = torch.Generator().manual_seed(seed)
        bias = torch.randn(4000, generator=generator) * shared
        reference = [{"w": torch.randn(4000, generator=generator)} for _ in range(num_batches)]
        errors = [bias + noise * torch.randn(4000, generator=generator) for _ in range(num_batches)]
        return sums([{"w": one["w"] + error} for one, error in zip(reference, errors, strict=True)], reference)

    least = [(found(0.0, seed).common_error_interval or (1.0, 1.0))[0] for seed in range(40)]
    assert sum(value > 0 for value in least) <= 6, "by chance in one of forty"
    for seed in range(5):
        large = found(3.0, seed)
        assert large.common_error == pytest.approx(3.0, rel=0.2)
        assert large.common_error is not None
        assert large.common_error_interval is not None
        assert 2.0 < large.common_error_interval[0] < large.common_error < large.common_error_interval[1] < 4.5
        assert large.noise_ratio == pytest.approx(math.hypot(3.0, noise), rel=0.1)


def test_fewer_than_three_batches_say_nothing_of_what_they_share() -> None:
    assert sums([one(1.0)] * 2, [one(2.0)] * 2).common_error_interval is None
    assert sums([one(1.0)] * 3, [one(2.0)] * 3).common_error_interval is None, "nor do batches that are alike"
    three = [one(2.0), one(3.0), one(4.0)]
    found = sums([one(1.0), one(2.0), one(3.0)], three).common_error_interval
    assert found == pytest.approx((math.sqrt(3 / 29),) * 2)


def test_gradients_that_are_missing_sparse_complex_empty_huge_or_tiny() -> None:
    whole = one(3.0, 4.0)
    assert sums([{}, whole, {}], [whole] * 3) == sums([one(0.0, 0.0), whole, one(0.0, 0.0)], [whole] * 3)
    assert sums([whole], [{}]) == sums([whole], [one(0.0, 0.0)])
    assert sums([{}], [{}]) == sums([one()], [one()]) == sums([one(0.0)], [one(0.0)])
    assert parameters_with_signal(one(), one()) == set()
    rows = [torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 0.5]]), torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 1.0]])]
    plain: list[Gradients] = [{"w": tensor} for tensor in rows]
    sparse: list[Gradients] = [{"w": tensor.to_sparse(1)} for tensor in rows]
    assert sums(sparse, sparse[::-1]) == sums(plain, plain[::-1])
    low, reference, other = (torch.tensor([complex(*pair)]) for pair in ((3.0, 4.5), (3.0, 4.0), (3.0, 9.0)))
    assert sums([{"w": low}, {"w": other}], [{"w": reference}, {"w": other}]) == sums(
        [one(3.0, 4.5), one(3.0, 9.0)], [one(3.0, 4.0), one(3.0, 9.0)]
    )
    for size in (1e30, 1e-30):
        found = sums([one(0.0, 1.01 * size)], [one(0.0, size)])
        assert (found.noise_ratio, found.norm_ratio) == pytest.approx((0.01, 1.01), rel=0.01)


def test_flushed_are_entries_that_count_and_are_zero_in_the_low_precision_alone() -> None:
    # 1 and 2^-11 count, 2^-13 of the largest is too small to, 0 is zero anyway.
    reference = one(1.0, 2.0**-11, 2.0**-13, 0.0)
    assert sums([one(0.0, 0.5, 0.0, 0.0)], [reference]).flushed_share == 0.5
    assert sums([one(1.0, 0.5, 0.0, 0.0)], [reference]).flushed_share == 0.0
    assert sums([one(0.0, 0.0, 0.0, 0.0)], [reference]).flushed_share == 1.0


def test_a_signal_is_what_another_rounding_leaves_as_it_is() -> None:
    gradients = {"kept": torch.ones(2), "noise": torch.ones(2), "zero": torch.zeros(2), "missing": torch.ones(2)}
    perturbed = {"kept": torch.full((2,), 1.05), "noise": torch.full((2,), 1.2), "zero": torch.zeros(2)}
    assert parameters_with_signal(gradients, perturbed) == {"kept"}, (
        "a parameter that another rounding changes by 20 % is noise"
    )


def test_of_a_sparse_gradient_only_what_it_stores_is_kept() -> None:
    def rows(*numbers: int, value: float) -> Gradients:  # of a parameter that no memory holds
        values = torch.full((len(numbers), 4), value)
        return {
            "w": torch.sparse_coo_tensor(torch.tensor([numbers]), values, (2**40, 4), check_invariants=True)
        }  # no memory holds it

    reference = [rows(0, 2**39, value=1.0), rows(1, 2**39, value=2.0), rows(2, value=3.0)]
    low = [rows(0, 2**39, value=1.5), rows(1, 2**39, value=2.5), rows(2, 3, value=3.5)]
    found = sums(low, reference)
    # Two of the three batches share an error of 0.5 in the four entries of one row: a product of 1, of three pairs.
    assert found.common_error == pytest.approx(math.sqrt(1 / 3 / ((8 + 32 + 36) / 3)))
    assert found.flushed_share == 0.0


class Transfers(TorchFunctionMode):
    """Records the dtypes that copies to a device have there."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            self.dtypes.add(result.dtype)
        return result


def test_errors_in_host_memory_are_sent_to_the_device_as_they_are() -> None:
    with Transfers() as transfers:
        _products(torch.zeros(2, 64, dtype=torch.bfloat16), torch.device("cpu"))
    assert transfers.dtypes == {torch.bfloat16}


def test_of_a_device_nothing_stays_filled_but_small_sums() -> None:
    """A training may fill its device, and the check of its precisions must fit there too."""
    before = storages_on_fake_gpu()
    with FakeTensorMode():
        gradients: Gradients = {"w": torch.zeros(4096, device="cuda"), "v": torch.zeros(4096, device="cuda")}
        comparer = GradientComparer({"w", "v"})
        for _ in range(2):
            comparer.add(gradients, gradients)
        held = storages_on_fake_gpu()
    assert sum(held[address].nbytes() for address in held.keys() - before.keys()) < 2 * 4096 * 4 + 4096, (
        "no more than the two gradients themselves"
    )

"""Whose fault it is, and which module's: real fp16 autocast on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from diagnosis_models import WIDTH, FeedForward, Model, Written, batch, find, find_rerun, square
from torch import Tensor, nn

from autotune_amp.runtime.diagnosis import Finding, flushed_share, probe


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# -- precision's fault -------------------------------------------------------------------------------------------------


def test_a_finite_batch_is_run_once_and_finds_nothing() -> None:
    assert find(Model(FeedForward())) == Finding(False, (), None, (), 1)


def test_the_feed_forward_that_overflows_fp16_is_named_and_pinned() -> None:
    assert find(Model(FeedForward(), FeedForward(66246.0))) == Finding(
        True, ("bf16", "fp32"), "module blocks.1.ff.wo (Linear)", ("blocks.1.ff.wo",), num_passes=4, is_precision=True
    )


@pytest.mark.parametrize("own", [torch.float16, torch.bfloat16])
def test_the_precision_is_forced_on_code_with_an_autocast_of_its_own(own: torch.dtype) -> None:
    model = Model(FeedForward(66246.0))

    def rerun() -> Tensor:
        with torch.autocast("cpu", dtype=own):
            return square(model(batch()))

    finding = find_rerun(model, rerun, already_pinned=True)
    assert (finding.reproduced, finding.finite_in) == (True, ("bf16", "fp32"))


def test_pins_that_are_there_already_are_not_added_to() -> None:
    finding = find(Model(FeedForward(66246.0)), already_pinned=True)
    assert (finding.pins, finding.finite_in, finding.num_passes) == ((), ("bf16", "fp32"), 3)


def test_two_bad_modules_one_behind_the_other_are_both_pinned() -> None:
    finding = find(Model(FeedForward(66246.0), FeedForward(70000.0), num_idle=40))
    assert finding.pins == ("blocks.0.ff.wo", "blocks.1.ff.wo")
    assert finding.culprit == "module blocks.0.ff.wo (Linear)"


def test_more_than_a_twentieth_of_the_modules_is_not_pinned() -> None:
    finding = find(Model(FeedForward(66246.0), FeedForward(70000.0)))
    assert (finding.pins, finding.finite_in) == ((), ("bf16", "fp32"))


def test_an_overflow_between_the_children_of_a_module_is_the_modules() -> None:
    def overflow(hidden: Tensor) -> Tensor:
        large = hidden @ torch.zeros(WIDTH, WIDTH) + 300
        return (large @ large.mT)[:, :1].expand(-1, WIDTH) / 360000

    finding = find(Model(Written(overflow)))
    assert (finding.culprit, finding.pins) == ("module blocks.0.ff (Written)", ("blocks.0.ff",))


def test_a_module_with_weights_in_half_precision_is_never_pinned() -> None:
    ff = FeedForward(66246.0)
    ff.wo.half()
    finding = find(Model(ff), can_run_fp32=False, lower=("bf16",))
    assert (finding.culprit, finding.pins) == ("module blocks.0.ff.wo (Linear)", ())
    assert (finding.finite_in, finding.num_passes) == (("bf16",), 2)  # fp32 was not tried


def test_a_gradient_that_overflows_where_the_loss_casts_it_down_is_precisions_fault() -> None:
    finding = find(Model(FeedForward()), loss_scale=2.0**24)
    assert finding.culprit == "the loss function, in its backward pass"
    assert (finding.pins, finding.finite_in) == ((), ("bf16", "fp32"))  # one pin does not do at such a scale


def test_a_loss_inside_the_model_is_no_different() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
            self.head = nn.Linear(WIDTH, 1, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = self.head(self.layers[1](self.layers[0](hidden)) * 1e-4)
            return output.float().sum()  # the gradient of every output is the loss scale

    finding = find(WithLoss(), loss_fn=lambda loss: loss, loss_scale=2.0**17)
    assert finding.culprit == "the model itself (WithLoss), in its backward pass"
    assert finding.pins == ("head",)


def test_a_module_that_overflows_in_its_backward_pass_alone_is_pinned() -> None:
    class Amplifier(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden * 1e-6) @ (torch.eye(WIDTH) * 3e4)

    finding = find(Model(FeedForward(), Amplifier()), loss_scale=2.0**14)
    assert finding.culprit == "module blocks.1.ff (Amplifier), in its backward pass"
    assert finding.pins == ("blocks.1.ff",)


def test_gradients_that_overflow_where_they_are_added_up_are_laid_on_what_put_out_the_tensor() -> None:
    def add(output: Tensor) -> Tensor:
        return (output * 1.0).sum() + (output * 1.0).sum()

    finding = find(nn.Sequential(nn.Linear(WIDTH, WIDTH)), loss_fn=add, loss_scale=40000.0)
    assert (finding.culprit, finding.pins) == ("module 0 (Linear), in its backward pass", ("0",))


def test_a_precision_that_overflows_as_well_is_left_out() -> None:
    nearly_largest = 3.4e38  # rounds to infinity in bf16

    def wide(hidden: Tensor) -> Tensor:
        return hidden.clamp(-0.5, 0.5) @ (nearly_largest * torch.eye(WIDTH)) / nearly_largest

    assert find(Model(Written(wide)), already_pinned=True).finite_in == ("fp32",)


def test_a_precision_that_does_not_fit_is_told_apart_from_one_that_overflows() -> None:
    model = Model(FeedForward(66246.0))

    def rerun() -> Tensor:
        output = model(batch())
        if output.dtype == torch.float32:
            raise torch.OutOfMemoryError("no room for fp32")
        return square(output)

    finding = find_rerun(model, rerun)
    assert (finding.finite_in, finding.not_run) == (("bf16",), ("fp32",))
    assert finding.pins == ("blocks.0.ff.wo",)


def test_a_verdict_without_any_other_precision_is_left_to_the_pins() -> None:
    finding = find(Model(FeedForward(66246.0)), can_run_fp32=False, lower=())
    assert (finding.finite_in, finding.pins) == ((), ("blocks.0.ff.wo",))


# -- not precision's fault ---------------------------------------------------------------------------------------------


def not_precision(culprit: str, num_passes: int = 2) -> Finding:
    return Finding(True, (), culprit, (), num_passes, is_precision=False)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_batch(value: float) -> None:
    inputs = batch()
    inputs[1, 1] = value
    assert find(Model(FeedForward()), inputs) == not_precision("the input of the model")


def test_a_bad_batch_in_a_rung_of_fp32_needs_no_second_pass() -> None:
    finding = find(Model(FeedForward()), batch() * torch.nan, current="fp32", lower=(), loss_scale=1.0)
    assert finding == not_precision("the input of the model", num_passes=1)


def test_a_bad_parameter() -> None:
    model = Model(FeedForward(), FeedForward())
    with torch.no_grad():
        model.get_parameter("blocks.1.ff.wi.weight")[0, 0] = torch.nan
    assert find(model) == not_precision("parameter blocks.1.ff.wi.weight")


def test_a_leaf_that_makes_nan() -> None:
    class Logarithm(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return torch.log(hidden - 10)

    assert find(Model(FeedForward(), Logarithm())) == not_precision("module blocks.1.ff (Logarithm)")


def test_nan_between_the_children_of_a_module_is_the_modules() -> None:
    model = Model(Written(lambda hidden: (hidden - 10).log()))
    assert find(model) == not_precision("module blocks.0.ff (Written)")


def test_a_square_root_at_zero_is_named_in_the_backward_pass() -> None:
    model = Model(FeedForward(), Written(lambda hidden: (hidden - hidden).sqrt()), FeedForward())
    assert find(model) == not_precision("module blocks.1.ff (Written), in its backward pass")


def test_a_square_root_at_zero_in_a_leaf_with_an_activation_in_place_around_it() -> None:
    class Norm(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            none = hidden - hidden
            output: Tensor = hidden - torch.linalg.vector_norm(none, dim=0) - none.sqrt()
            return output

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), Norm(), nn.ReLU(inplace=True))
    assert find(model) == not_precision("module 2 (Norm), in its backward pass")


def test_a_loss_that_is_not_finite_although_the_model_is() -> None:
    assert find(Model(FeedForward()), loss_fn=lambda output: (output * 0).log().sum()) == not_precision(
        "the loss function"
    )


def test_a_loss_whose_gradient_alone_is_not_finite() -> None:
    assert find(Model(FeedForward()), loss_fn=lambda output: (output * 0).sqrt().sum()) == not_precision(
        "the loss function, in its backward pass"
    )


def test_minus_infinity_made_inside_the_model_is_followed_back_to_its_module() -> None:
    class Logarithm(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden * 0).log()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Logarithm(), nn.Softmax(-1))
    assert find(model) == not_precision("module 1 (Logarithm)")
    assert find(model[:2]) == not_precision("module 1 (Logarithm)")


class Attention(nn.Module):
    def __init__(self, ff: nn.Module) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)
        self.ff = ff

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = self.ff(self.softmax(hidden @ hidden.mT + mask) @ hidden)
        return output / 66246


def test_a_mask_of_minus_infinity_is_innocent() -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)
    finding = find(Attention(FeedForward(66246.0)), batch(), mask)
    assert (finding.culprit, finding.pins) == ("module ff.wo (Linear)", ("ff.wo",))


def test_a_mask_that_hides_everything_is_not() -> None:
    mask = torch.full((3, 3), -torch.inf)
    assert find(Attention(FeedForward()), batch(), mask) == not_precision("the input of module softmax (Softmax)")


# -- several ranks -----------------------------------------------------------------------------------------------------


class OtherRank:
    """A rank whose passes end as told; every pass asks for an error, for memory and for whether it went bad."""

    def __init__(self, *is_bad: bool, names: tuple[str, ...] = ()) -> None:
        self.answers = [answer for bad in is_bad for answer in (False, False, bad)]
        self.names = names

    def agree(self, flag: bool) -> bool:
        return self.answers.pop(0) or flag

    def gather(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return (*names, *(name for name in self.names if name not in names))


def test_a_rank_whose_own_batch_is_fine_goes_along_with_the_other() -> None:
    other = OtherRank(True, False, False, False, names=("blocks.0.ff",))
    finding = find(Model(FeedForward()), agree=other.agree, gather=other.gather)
    assert finding == Finding(True, ("bf16", "fp32"), "blocks.0.ff", ("blocks.0.ff",), num_passes=4, is_precision=True)
    assert other.answers == []


def test_a_bad_batch_on_another_rank_is_not_precisions_fault_here_either() -> None:
    other = OtherRank(True, True)
    assert find(Model(FeedForward(66246.0)), agree=other.agree, gather=other.gather).finite_in == ()
    assert other.answers == []


# -- before a promotion ------------------------------------------------------------------------------------------------


def test_a_probe_tells_how_much_room_there_is() -> None:
    def look(level: float, loss_scale: float) -> tuple[bool, float]:
        model = Model(FeedForward(level))
        found = probe(model, lambda: square(model(batch())), precision="fp16", loss_scale=loss_scale, device_type="cpu")
        return found.is_finite, found.forward_max

    is_finite, forward_max = look(1000.0, 16.0)
    assert is_finite
    assert forward_max == pytest.approx(1000.0, rel=0.01)
    is_finite, forward_max = look(66246.0, 16.0)
    assert not is_finite
    assert not math.isfinite(forward_max)
    assert not look(1000.0, 2.0**40)[0]


# -- what underflows ---------------------------------------------------------------------------------------------------


def test_the_share_of_the_gradient_that_fp16_flushes_depends_on_the_scale() -> None:
    model = nn.Linear(2, 1, bias=False)
    inputs = torch.tensor([[1.0, 2.0**-10]])

    def share(loss_scale: float) -> float:
        return flushed_share(model, lambda: (model(inputs) * 2.0**-26).sum(), loss_scale=loss_scale, device_type="cpu")

    # Gradients of 2^-26 and 2^-36; up to 2^-25 is flushed.
    assert [share(2.0**exponent) for exponent in (1, 2, 11, 12)] == [1.0, 0.5, 0.5, 0.0]
    assert share(1.0) == 1.0
    inputs.mul_(torch.nan)
    assert share(1.0) == 0.0

"""What a calibration says against brute force, a real GradScaler and real fp16 casts; and that it leaves no trace."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import pytest
import torch
from subjects import (
    CPU,
    SUBJECTS,
    Applied,
    Batch,
    brute_force,
    build,
    dense,
    everything_of,
    mean_square,
    mlp,
    subject,
    times,
)
from torch import Tensor, nn

from autotune_amp.core.outcome import Calibration
from autotune_amp.numerics.calibration import (
    MAX_LOG2_SCALE,
    calibrate,
    count_octaves,
    largest_safe_scale,
)
from autotune_amp.numerics.comparison import MIN_RELATIVE_MAGNITUDE
from autotune_amp.numerics.passes import CheckInputs, Passes
from autotune_amp.numerics.scaler_replay import FlushedShares
from autotune_amp.precision.forward_wrapper import watch_forward

# -- the largest safe scale of one batch -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_bisection_agrees_with_brute_force_wherever_it_starts(name: str) -> None:
    passes = Passes(build(name))
    truth = brute_force(passes, 0)
    assert truth is not None
    for start in (12.0, -24.0, 40.0):
        found = largest_safe_scale(passes, 0, start)
        assert found.log2_scale == truth
        assert found.last.is_finite
    before = passes.num_passes
    largest_safe_scale(passes, 0, truth)
    assert passes.num_passes - before <= 2, "where the answer is about known"


def test_what_no_scale_saves_has_none_and_fp32_bears_every_one() -> None:
    for value in (math.nan, math.inf, 1e30):
        passes = Passes(subject(mlp(), x=lambda value=value: torch.full((8, 8), value)))  # type: ignore[misc]
        assert largest_safe_scale(passes, 0).log2_scale is None
        assert passes.num_passes == 1  # its loss is bad, and no scale changes that
    steep = largest_safe_scale(Passes(subject(mlp(), times(2.0**60))), 0)
    assert steep.log2_scale is None
    passes = Passes(build("MLP"))
    with passes.pinned([""]):
        assert largest_safe_scale(passes, 0).log2_scale == MAX_LOG2_SCALE


def test_past_its_deadline_the_search_says_what_it_has_seen() -> None:
    passes = Passes(build("MLP"))
    found = largest_safe_scale(passes, 0, 0.0, deadline=0.0)
    assert (found.log2_scale, found.is_searched, passes.num_passes) == (0.0, False, 1)
    found = largest_safe_scale(passes, 0, 40.0, deadline=0.0)
    assert (found.log2_scale, found.is_searched, passes.num_passes) == (None, False, 2)


# -- over a training stretch -------------------------------------------------------------------------------------------


def shortened(name: str, num_batches: int) -> CheckInputs:
    made = build(name)
    return dataclasses.replace(made, batches=made.batches[:num_batches])


def trained_by_brute_force(made: CheckInputs) -> list[int | None]:
    """The largest safe power of two at each step of the same training, every one tried for real."""
    passes, found = Passes(made), []
    optimizer = made.make_optimizer(made.model)
    for index in range(len(made.batches)):
        found.append(brute_force(passes, index))
        if found[-1] is not None:
            passes.step(optimizer, passes.run(index, "fp16", scale=2.0 ** (found[-1] - 1)).gradients)
            passes.keep()
    return found


@pytest.mark.parametrize("name", ["convnet with BatchNorm", "sparse embedding", "loss of 1e6"])
def test_every_step_and_the_starting_scale_are_those_of_brute_force(name: str) -> None:
    truth = trained_by_brute_force(shortened(name, 5))
    made = shortened(name, 5)
    model = made.model
    before = everything_of(model)
    found = calibrate(made, batch_size=8)
    torch.testing.assert_close(everything_of(model), before, rtol=0, atol=0)
    assert list(found.log2_scales) == truth
    assert found.init_scale is not None
    safe_on_all = min(exponent for exponent in truth if exponent is not None)
    assert safe_on_all - 1 <= math.log2(found.init_scale) <= safe_on_all
    assert found.num_passes <= 2.5 * len(truth) + 14
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


def test_a_batch_that_is_bad_at_every_scale_is_not_trained_on() -> None:
    made = build("convnet with BatchNorm")

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert model.get_buffer("1.running_mean").isfinite().all(), "the bad batch left its mark"
        return mean_square(model, batch)

    bad = made.batches[3]._replace(x=torch.full((8, 2, 6, 6), math.nan))
    found = calibrate(
        dataclasses.replace(made, batches=[*made.batches[:3], bad, *made.batches[4:]], loss=loss), batch_size=8
    )
    assert [log2_scale is None for log2_scale in found.log2_scales] == [index == 3 for index in range(8)]
    assert 0 < found.forward_max < 100, "of the steps that have a safe scale"
    none = calibrate(subject(mlp(), x=lambda: torch.full((8, 8), math.nan)), batch_size=8)
    assert none.log2_scales == (None,) * 8
    assert (none.init_scale, none.gradient_histogram, none.forward_max) == (None, (), 0.0)


def test_an_infinite_output_that_does_no_harm_is_no_largest_activation() -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        Applied(lambda x: torch.cat([x, torch.full_like(x, math.inf)], -1)),
        Applied(lambda x: x.clamp(max=10.0)),
        nn.Linear(16, 4),
    )
    found = calibrate(subject(model), batch_size=8)
    assert None not in found.log2_scales
    assert 0 < found.forward_max < 100


def test_pinned_modules_run_in_fp32() -> None:
    found = calibrate(build("MLP"), batch_size=8, pinned_modules=[""])
    assert (found.log2_scales, found.pinned_modules) == ((40.0,) * 8, ("",))


# -- the histogram -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sparse embedding", "tied weights", "loss of 1e-6"])
def test_the_histogram_counts_what_counts_and_foretells_what_fp16_flushes(name: str) -> None:
    made = shortened(name, 4)  # one step of four is counted
    gradients = Passes(made).run(0, "fp32").gradients.values()
    each = [dense({"": gradient}) for gradient in gradients]
    gradient = torch.cat([g[g.abs() > MIN_RELATIVE_MAGNITUDE * g.abs().max()] for g in each])
    counted = dict(calibrate(made, batch_size=8).gradient_histogram)
    assert list(counted) == sorted(counted)
    few = 2 / len(gradient)  # an entry at the edge may fall to the other side where a CPU rounds the repeated pass anew
    assert sum(counted.values()) == pytest.approx(len(gradient), rel=few)
    shares = FlushedShares(counted)
    found = []
    for log2_scale in range(-24, 25, 4):
        found.append(float(((gradient * 2.0**log2_scale).half() == 0).float().mean()))
        # A power of two has its threshold on the edge of an octave: no interpolation.
        assert shares.at(log2_scale) == pytest.approx(found[-1], abs=few)
    assert max(found) > 0.05


def test_zeros_and_entries_too_small_to_count_are_in_no_octave() -> None:
    gradient = torch.tensor([1.0, -(2.0**-11), 0.75 * 2.0**-12, 0.0, math.inf])
    assert count_octaves([gradient, torch.zeros(3)]) == {0: 1, -11: 1}


def test_the_histogram_needs_no_operator_that_deterministic_algorithms_refuse_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise RuntimeError("_histc_cuda with floating point input does not have a deterministic implementation")

    monkeypatch.setattr(torch, "histc", refuse)
    assert count_octaves([torch.tensor([2.0**-149, 2.0**-148])]) == {-149: 1, -148: 1}
    assert count_octaves([torch.tensor([torch.finfo(torch.float32).max])]) == {127: 1}
    assert count_octaves([torch.zeros(2)]) == count_octaves([]) == {}


# -- what modules put out ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        self.scripted = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call] # torch's
        self.never_called = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_maxima_are_of_outputs_in_half_precision_by_the_names_the_user_gave_them(is_compiled: bool) -> None:
    model = Mixed()
    with torch.no_grad():
        model.get_parameter("inner.0.weight").copy_(torch.tensor([[-3.0, 0.0], [0.0, 2.0]]))
    called = torch.compile(model, backend="aot_eager") if is_compiled else model
    assert isinstance(called, nn.Module)
    # Compiled code keeps in fp32 what holds no weight matrix.
    rest = {} if is_compiled else {"": 4.0, "inner": 4.0, "inner.1": 4.0}
    with watch_forward(called, CPU) as read_maxima:
        called(torch.full((1, 2), 100.0))
        assert set(read_maxima().values()) == {0.0}  # in fp32 there is room enough
        with torch.autocast("cpu", dtype=torch.float16):
            called(torch.ones(1, 2))
            called(2 * torch.ones(1, 2))
            assert read_maxima() == {"inner.0": 6.0, "never_called": 0.0, **rest}
            called(torch.full((1, 2), math.nan))
            assert math.isnan(read_maxima()["inner.0"])
    assert type(model.never_called) is nn.Linear
    torch._dynamo.reset()

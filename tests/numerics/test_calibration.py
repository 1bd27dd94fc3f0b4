"""What a calibration says against brute force, a real GradScaler and real fp16 casts; and that it leaves no trace."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy
import pytest
import torch
from fp16_subjects import CPU, SUBJECTS, Batch, brute_force, build, dense, mean_square, mlp, octave, subject, times
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.fidelity import Calibration
from autotune_amp.numerics.calibration import calibrate, count_octaves, histogram
from autotune_amp.numerics.comparison import COUNTS
from autotune_amp.numerics.modules import watch_forward
from autotune_amp.numerics.passes import Passes, Subject
from autotune_amp.numerics.scaler_replay import FlushedShares
from autotune_amp.precision.mode import is_pinned


def shortened(name: str, num_batches: int) -> Subject:
    made = build(name)
    return dataclasses.replace(made, batches=made.batches[:num_batches])


def trained_by_brute_force(made: Subject) -> list[int | None]:
    """The largest safe power of two at each step of the same training, every one tried for real."""
    passes, found = Passes(made), []
    optimizer = made.make_optimizer(made.model)
    for index in range(len(made.batches)):
        found.append(brute_force(passes, index))
        if found[-1] is not None:
            passes.step(optimizer, passes.run(index, "fp16", scale=2.0 ** (found[-1] - 1)).gradients)
            passes.keep()
    return found


@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_the_model_is_left_as_it_was_bit_for_bit(name: str) -> None:
    made = build(name)
    model = made.model
    before = {n: v.detach().clone() for n, v in (*model.named_parameters(), *model.named_buffers())}
    classes = [type(module) for module in model.modules()]
    found = calibrate(made, batch_size=8)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert [type(module) for module in model.modules()] == classes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


# The others differ from these in what they do at one step, which test_safe_scale.py holds against brute force.
@pytest.mark.parametrize("name", ["MLP", "convnet with BatchNorm", "sparse embedding", "loss of 1e6", "tied weights"])
def test_every_step_and_the_starting_scale_are_those_of_brute_force(name: str) -> None:
    truth = trained_by_brute_force(shortened(name, 5))
    found = calibrate(shortened(name, 5), batch_size=8)
    assert [octave(log2_scale) for log2_scale in found.log2_scales] == truth
    assert found.bisected_log2_scales == {0: truth[0], len(truth) - 1: truth[-1]}
    assert found.init_scale is not None
    safe_on_all = min(exponent for exponent in truth if exponent is not None)
    assert safe_on_all - 1 <= math.log2(found.init_scale) <= safe_on_all
    assert found.num_passes <= 1.6 * len(truth) + 12


def test_buffers_move_on_by_one_pass_a_step_and_weights_by_one_step() -> None:
    seen: dict[int, tuple[int, Tensor]] = {}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tracked = int(model.get_buffer("1.num_batches_tracked"))
        weight = model.get_parameter("0.weight").detach().clone()
        before = seen.setdefault(batch.number, (tracked, weight))
        assert (tracked, True) == (before[0], torch.equal(weight, before[1]))
        return mean_square(model, batch)

    made = dataclasses.replace(build("convnet with BatchNorm"), loss=loss)
    calibrate(made, batch_size=8)
    assert [tracked for tracked, _ in seen.values()] == list(range(len(made.batches)))
    plain = build("convnet with BatchNorm")
    optimizer = plain.make_optimizer(plain.model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for batch in plain.batches:
        torch.testing.assert_close(plain.model.get_parameter("0.weight"), seen[batch.number][1])
        scaled_step(plain, batch, optimizer, scaler)


def scaled_step(made: Subject, batch: Batch, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> bool:
    """One step as users write it; whether it was skipped."""
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = made.loss(made.model, batch)
    torch.autograd.backward(scaler.scale(loss))
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < scale


def num_skips(made: Subject, num_steps: int, **arguments: Any) -> int:
    optimizer = made.make_optimizer(made.model)
    scaler = torch.amp.GradScaler("cpu", **arguments)
    return sum(
        scaled_step(made, made.batches[step % len(made.batches)], optimizer, scaler) for step in range(num_steps)
    )


@pytest.mark.parametrize("make_loss", [lambda: times(300.0), lambda: times(0.1)], ids=["steep", "flat"])
def test_a_real_scaler_that_starts_as_calibrated_skips_nothing(make_loss: Callable[[], Any]) -> None:
    def made() -> Subject:
        torch.manual_seed(0)
        return subject(
            mlp(),
            make_loss(),
            num_batches=12,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        )

    found = calibrate(made(), batch_size=8)
    assert found.init_scale is not None
    assert num_skips(made(), 100, init_scale=found.init_scale) == 0
    by_default = num_skips(made(), 100)
    assert by_default >= 5 if found.init_scale < 2.0**12 else by_default == 0


@pytest.mark.parametrize("position", [0, 3, 7])
def test_a_batch_that_is_bad_at_every_scale_is_not_trained_on(position: int) -> None:
    made, good = build("convnet with BatchNorm"), build("convnet with BatchNorm")
    batches = [*made.batches[:position], made.batches[position]._replace(x=torch.full((8, 2, 6, 6), math.nan))]
    found = calibrate(dataclasses.replace(made, batches=[*batches, *made.batches[position + 1 :]]), batch_size=8)
    assert [log2_scale is None for log2_scale in found.log2_scales] == [index == position for index in range(8)]
    rest = dataclasses.replace(good, batches=[batch for i, batch in enumerate(good.batches) if i != position])
    without = calibrate(rest, batch_size=8)
    assert found.init_scale == without.init_scale
    assert found.log2_scales[:position] == without.log2_scales[:position]
    assert math.isfinite(found.forward_max)


def test_no_step_has_a_safe_scale() -> None:
    found = calibrate(subject(mlp(), x=lambda: torch.full((8, 8), math.nan)), batch_size=8)
    assert found.log2_scales == (None,) * 8
    assert found.bisected_log2_scales == {0: None, 7: None}
    assert (found.init_scale, found.gradient_histogram, found.forward_max) == (None, (), 0.0)


def test_where_the_two_ways_disagree_the_lower_counts_and_the_rest_is_bisected() -> None:
    found = calibrate(build("clamped"), batch_size=8)
    assert found.bisected_log2_scales == dict.fromkeys(range(8), 40.0)
    first = found.log2_scales[0]
    assert first is not None
    assert first < 20
    assert found.log2_scales[1:] == (40.0,) * 7


def test_a_compiled_model_is_calibrated_by_bisection_to_the_same_octaves() -> None:
    made = build("MLP")
    eager = calibrate(made, batch_size=8)
    compiled = torch.compile(made.model, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    found = calibrate(dataclasses.replace(made, model=compiled), batch_size=8)
    torch._dynamo.reset()
    assert found.log2_scales == tuple(map(octave, eager.log2_scales))
    assert found.bisected_log2_scales == dict(enumerate(found.log2_scales))
    assert found.init_scale == eager.init_scale
    assert found.forward_max == pytest.approx(eager.forward_max, rel=1e-2)


def test_pinned_modules_run_in_fp32_and_only_during_the_calibration() -> None:
    made = build("MLP")
    found = calibrate(made, batch_size=8, pinned_modules=[""])
    assert found.log2_scales == (40.0,) * 8
    assert found.pinned_modules == ("",)
    assert not is_pinned(made.model)
    with pytest.raises(InvalidRequestError, match="no module named 'head'"):
        calibrate(made, batch_size=8, pinned_modules=["head"])


# -- the histogram -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MLP", "sparse embedding", "tied weights", "convnet with BatchNorm", "loss of 1e-6"])
def test_the_histogram_counts_what_counts_and_foretells_what_fp16_flushes(name: str) -> None:
    made = shortened(name, 4)  # one step of four is counted
    gradients = Passes(made).run(0, "fp32").gradients.values()
    each = [dense({"": gradient}) for gradient in gradients]
    gradient = torch.cat([g[g.abs() > COUNTS * g.abs().max()] for g in each])
    counted = dict(calibrate(made, batch_size=8).gradient_histogram)
    assert list(counted) == sorted(counted)
    assert sum(counted.values()) == len(gradient)
    shares = FlushedShares(counted)
    flushed_anywhere = False
    for log2_scale in range(-24, 25, 2):
        flushed = float(((gradient * 2.0**log2_scale).half() == 0).float().mean())
        flushed_anywhere |= flushed > 0.05
        # A power of two has its threshold on the edge of an octave: no interpolation.
        assert shares.at(log2_scale) == pytest.approx(flushed, abs=1e-6)
        between = float(((gradient * 2.0 ** (log2_scale + 0.5)).half() == 0).float().mean())
        assert shares.at(log2_scale + 1) - 1e-6 <= between <= shares.at(log2_scale) + 1e-6
    assert flushed_anywhere


FLOAT32 = st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True)


@given(st.lists(FLOAT32, max_size=40), st.booleans())
def test_octaves_are_counted_as_arithmetic_has_them(values: list[float], is_sparse: bool) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    finite = [v for v in values if v and math.isfinite(v)]
    least = numpy.float32(COUNTS) * numpy.float32(max(map(abs, finite), default=0.0))
    expected = collections.Counter(math.frexp(v)[1] - 1 for v in finite if abs(v) > least)
    found = histogram(count_octaves([tensor.to_sparse() if is_sparse else tensor, torch.zeros(3)]))
    assert found == tuple(sorted(expected.items()))


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
        model.inner[0].weight.copy_(torch.tensor([[-3.0, 0.0], [0.0, 2.0]]))  # type: ignore[operator]
    called = torch.compile(model, backend="aot_eager") if is_compiled else model
    assert isinstance(called, nn.Module)
    # Compiled code keeps in fp32 what holds no weight matrix.
    rest = {} if is_compiled else {"": 4.0, "inner": 4.0, "inner.1": 4.0}
    with watch_forward(called, CPU) as watch:
        called(torch.full((1, 2), 100.0))
        assert set(watch.maxima().values()) == {0.0}  # in fp32 there is room enough
        with torch.autocast("cpu", dtype=torch.float16):
            called(torch.ones(1, 2))
            called(2 * torch.ones(1, 2))
            assert watch.maxima() == {"inner.0": 6.0, "never_called": 0.0, **rest}
            watch.reset()
            called(torch.full((1, 2), math.nan))
            assert math.isnan(watch.maxima()["inner.0"])
    assert type(model.never_called) is nn.Linear
    torch._dynamo.reset()


def test_a_second_watch_begins_at_nothing_and_a_model_that_raised_is_not_watched_any_more() -> None:
    model = mlp()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), watch_forward(model, CPU):
        model(torch.ones(1, 3))
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]  # type: ignore[attr-defined]
    with watch_forward(model, CPU) as watch:
        assert set(watch.maxima().values()) == {0.0}


def test_the_forward_maximum_of_a_calibration_is_the_largest_of_its_modules() -> None:
    def x() -> Tensor:
        return torch.randn(8, 8)

    wide = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        wide[0].weight.mul_(1000.0)  # type: ignore[operator]
    made = subject(wide, times(1e-6), x=x)
    found = calibrate(made, batch_size=8).forward_max
    with torch.no_grad():
        largest = max(float(module.abs().max()) for b in made.batches for module in (wide[0](b.x), wide(b.x)))
    assert found == pytest.approx(largest, rel=1e-2)

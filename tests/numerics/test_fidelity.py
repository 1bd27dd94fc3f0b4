"""A whole check: healthy trainings pass, sick ones are caught, located and healed; the model stays as it was."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
import torch
from subjects import (
    SUBJECTS,
    Applied,
    Batch,
    build,
    chain,
    checked,
    compiled,
    mean_square,
    mlp,
    running_sum,
    subject,
    times,
    with_middle,
)
from torch import Tensor, nn
from torch.nn import functional

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host
from autotune_amp.numerics.experiment import NUM_PAIRED_STEPS, Experiment, least_host_bytes
from autotune_amp.numerics.fidelity import check
from autotune_amp.numerics.locate import OUTSIDE
from autotune_amp.numerics.passes import CheckInputs, Passes, stored_values
from autotune_amp.precision.forward_wrapper import is_pinned, pin_fp32


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


# -- healthy trainings, each difficult in a way of its own -------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(SUBJECTS))
def test_healthy_trainings_are_faithful(name: str, precision: Precision) -> None:
    found = checked(build(name), precision)
    assert found.verdict == "faithful", found.reason
    assert found.noise_ratio is not None
    assert found.noise_ratio < 0.1
    assert found.loss_error is not None
    assert found.loss_error < 0.02
    assert found.gradient_cosine == pytest.approx(1, abs=1e-3)
    assert found.gradient_norm_ratio == pytest.approx(1, abs=0.02)
    assert found.forward_max is not None
    assert (found.loss_scale is None) == (precision == "bf16")
    assert 1 <= len(found.worst_parameters) <= 5


def test_fp32_against_itself_has_no_noise_and_a_check_repeats() -> None:
    made = build("transformer with dropout")
    found = checked(made, "fp32")
    assert (found.verdict, found.noise_ratio, found.training_noise_gap) == ("faithful", 0.0, 0.0)
    one, again = (msgspec.structs.replace(checked(made, "bf16"), seconds=0.0, fp32_step_seconds=None) for _ in range(2))
    assert one == again


@pytest.mark.slow
def test_a_deep_network_with_batchnorm_amplifies_rounding_and_is_faithful() -> None:
    """ResNet-50, a quarter as wide: at its first weights two roundings of it are as far apart as two batches."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(num_labels=10, embedding_size=16, hidden_sizes=[64, 128, 256, 512])
    classes = torch.randn(10, 3, 32, 32)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        images = classes[batch.y] + batch.x
        return functional.cross_entropy(model(images).logits, batch.y)

    made = subject(
        transformers.ResNetForImageClassification(config), loss, x=lambda: torch.randn(8, 3, 32, 32),
        y=lambda: torch.randint(10, (8,)), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.02),
    )  # fmt: skip
    found = check(made, "bf16", batch_size=8, find_pins=False)
    assert found.noise_ratio is not None
    assert found.noise_ratio > 0.5
    assert found.verdict == "faithful", found.reason
    assert "smaller" in found.reason


def test_in_less_time_fewer_batches_are_looked_at_and_no_training_is_made() -> None:
    whole = checked(build("convnet with BatchNorm"), "bf16")
    short = check(build("convnet with BatchNorm"), "bf16", batch_size=8, seconds=1e-9)
    assert (short.verdict, short.num_paired_steps, short.common_error_interval) == ("undecided", 0, None)
    assert short.fp32_step_seconds is not None
    assert short.num_passes < whole.num_passes / 3
    assert "no time for a training" in short.reason
    noisy = check(with_middle(lambda x: (x + 150.0) - 150.0), "bf16", batch_size=8, seconds=1e-9)
    assert noisy.verdict == "undecided", noisy.reason


def test_with_less_memory_on_the_host_fewer_batches_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "free_memory_bytes", lambda: 0)
    found = checked(build("MLP"), "bf16")
    assert (found.verdict, found.num_passes) == ("faithful", 2 + 2 * 3 + 2 * NUM_PAIRED_STEPS)
    assert found.common_error_interval is not None


def test_a_table_with_sparse_gradients_takes_no_memory_for_its_errors() -> None:
    tables = [nn.Embedding(1000, 8, sparse=is_sparse) for is_sparse in (False, True)]
    dense, sparse = (least_host_bytes(subject(table, mean_square, x=lambda: torch.zeros(1))) for table in tables)
    assert sparse == 4 * 8000
    assert dense > 2 * sparse


def test_in_less_time_fewer_samples_are_looked_at_where_batches_can_be_cut() -> None:
    sizes: set[int] = set()

    def slow(model: nn.Module, batch: Batch) -> Tensor:
        sizes.add(len(batch.x))
        time.sleep(0.002 * len(batch.x))
        return mean_square(model, batch)

    made = subject(mlp(), slow, x=lambda: torch.randn(16, 8), y=lambda: torch.randn(16, 4))
    found = check(made, "bf16", batch_size=16, seconds=0.5)
    assert (found.batch_size, sizes) == (8, {8})
    sizes.clear()
    together = replace(made, loss=lambda model, batch: slow(model, batch._replace(x=batch.x.view(16, 8))))
    assert check(together, "bf16", batch_size=16, seconds=0.5).batch_size == 16, "its loss wants whole batches"


def test_what_is_sure_after_four_batches_takes_no_more() -> None:
    assert checked(build("MLP"), "bf16").num_passes == 2 + 2 * 4 + 2 * NUM_PAIRED_STEPS


def test_there_may_be_no_time_to_look_for_the_culprit() -> None:
    found = check(with_middle(running_sum), "bf16", batch_size=8, seconds=1e-9)
    assert (found.verdict, found.culprits) == ("unfaithful", ())
    assert "no time to search for the modules" in found.reason


def test_no_loss_scale_may_be_found_in_the_time() -> None:
    found = check(build("MLP"), "fp16", batch_size=8, seconds=1e-9)
    assert found.verdict == "undecided"
    too_steep = subject(mlp(), times(2.0**20))
    found = check(too_steep, "fp16", batch_size=8, seconds=1e-9)
    assert found.verdict == "undecided"
    assert "no time to find a loss scale" in found.reason


def test_what_is_no_longer_finite_only_in_the_longer_training_is_located() -> None:
    calls = itertools.count()

    def breaks_later(x: Tensor) -> Tensor:
        if x.dtype != torch.bfloat16:
            return x * 1.0
        return (x + 0.5 * torch.sin(1e4 * x)) * (math.inf if next(calls) > 40 else 1.0)

    found = checked(with_middle(breaks_later), "bf16", find_pins=True)
    assert (found.verdict, found.culprits) == ("unfaithful", ("middle",)), found.reason
    assert "no longer finite" in found.reason


def test_a_longer_training_goes_over_the_batches_that_were_looked_at_however_many_there_are() -> None:
    made = with_middle(lambda x: x + 0.5 * torch.sin(1e4 * x) if x.dtype == torch.bfloat16 else x * 1.0)
    found = checked(made, "bf16", find_pins=False)
    assert found.num_passes > 200, "it was trained for longer"
    more = replace(made, batches=[*made.batches, *made.batches] * 8)
    again = check(more, "bf16", batch_size=8, find_pins=False)
    assert (again.verdict, again.num_passes) == (found.verdict, found.num_passes)


def shrinks(factor: float) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        if y.dtype == torch.bfloat16:
            y.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call] # torch's
        return y

    return function


def test_a_part_whose_gradients_shrink_is_no_noise() -> None:
    assert checked(with_middle(shrinks(1.0)), "bf16").verdict == "faithful"
    assert checked(with_middle(shrinks(0.1)), "bf16", find_pins=False).verdict in ("doubtful", "unfaithful")


@pytest.mark.parametrize("num_distinct", [1, 2, 4])
def test_batches_that_come_again_share_their_noise_and_are_looked_at_once(num_distinct: int) -> None:
    made = build("convnet with BatchNorm")
    again = replace(made, batches=[made.batches[index % num_distinct] for index in range(8)])
    found = check(again, "bf16", batch_size=8)
    assert found.verdict == "faithful", found.reason
    assert (found.common_error_interval is None) == (num_distinct < 3)


# -- sick ones ---------------------------------------------------------------------------------------------------------


def quiet() -> CheckInputs:
    """One branch whose gradients, 2^-40 of the other's, are flushed at every loss scale."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.loud(x) * 256.0 + self.quiet(x) * 2.0**-20 * 2.0**-20
            return out

    return subject(Branches(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-7))


def near_the_end() -> CheckInputs:
    model = chain(enter=nn.Linear(8, 16), high=nn.Linear(16, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, 4))
    with torch.no_grad():
        model.get_parameter("high.weight").mul_(40_000)
    return subject(model)


def squared(x: Tensor) -> Tensor:
    return x * 1000 * ((x * 1000).square().mean(1, keepdim=True) + 1e-6).rsqrt()


SICK: dict[str, tuple[Callable[[], CheckInputs], tuple[Precision, ...], str]] = {
    "overflow": (lambda: with_middle(lambda x: x * 1e6 * 1e-6), ("fp16",), "middle"),
    "running sum": (lambda: with_middle(running_sum), ("bf16", "fp16"), "middle"),
    "offset": (lambda: with_middle(lambda x: (x + 3000.0) - 3000.0), ("bf16", "fp16"), "middle"),
    "squares": (lambda: with_middle(squared), ("fp16",), "middle"),
    "quiet": (quiet, ("fp16",), "quiet"),
    "activations near the end of fp16": (near_the_end, ("fp16",), "high"),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SICK)
def test_sick_trainings_are_unfaithful_and_healed_by_a_pin_on_the_culprit(name: str, precision: Precision) -> None:
    make, sick_in, culprit = SICK[name]
    made = make()
    made = replace(made, model=compiled(made.model)) if name == "quiet" else made
    unsearched = checked(made, precision, find_pins=False)
    assert unsearched.culprits == unsearched.healing_pins == ()
    assert unsearched.verdict == ("unfaithful" if precision in sick_in else "faithful")
    if precision not in sick_in:
        return
    assert unsearched.num_passes <= 30 or unsearched.num_paired_steps
    told: list[Fidelity] = []
    found = checked(made, precision, on_bad_verdict=told.append)
    assert found.verdict == "unfaithful"
    assert found.culprits == found.healing_pins == (culprit,)
    assert culprit in found.reason
    assert f"pinned_modules=['{culprit}']" in found.next_step
    # The verdict is told before the culprits are looked for, which may take the process with it.
    assert [(early.verdict, early.culprits, early.batch_size) for early in told] == [("unfaithful", (), 8)]
    healed = checked(made, precision, pinned_modules=found.healing_pins)
    assert (healed.verdict, healed.pinned_modules) == ("faithful", (culprit,))


def infinite_gradient_after(num_calls: int) -> Callable[[Tensor], Tensor]:
    calls = itertools.count()

    def function(x: Tensor) -> Tensor:
        y = x * 1.0
        if y.dtype == torch.float16 and next(calls) >= num_calls:
            y.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call] # torch's
        return y

    return function


@pytest.mark.parametrize(("num_calls", "says"), [(0, "every loss scale"), (14, "training steps")])
def test_a_gradient_that_no_scale_saves_at_once_or_later_in_training(num_calls: int, says: str) -> None:
    found = checked(with_middle(infinite_gradient_after(num_calls)), "fp16")
    assert found.verdict == "unfaithful"
    assert says in found.reason
    assert found.culprits == ("middle",)
    assert found.num_paired_steps < NUM_PAIRED_STEPS


class BreaksOnceTrained(nn.Module):
    """Its gradient is infinite in fp16 as soon as its weight has moved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.weight * x
        if y.dtype == torch.float16 and self.weight != 1:
            y.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call] # torch's
        return y


def test_the_culprit_is_looked_for_in_trained_weights_though_random_draws_were_looked_at() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch) + 0 * torch.rand(())

    model = chain(enter=nn.Linear(8, 16), middle=BreaksOnceTrained(), head=nn.Linear(16, 4))
    found = checked(subject(model, loss), "fp16")
    assert "training steps" in found.reason
    assert (found.culprits, found.healing_pins) == (("middle",), ("middle",))


def test_where_the_loss_function_is_responsible_nothing_can_be_pinned() -> None:
    def log_error(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch.x)
        total: Tensor = (100 + output).square().sum(dtype=output.dtype)
        return total.float().log()

    found = checked(subject(mlp(), log_error), "fp16")
    assert (found.verdict, found.culprits, found.healing_pins) == ("unfaithful", (OUTSIDE,), ())
    assert "outside of the model" in found.reason


class Normalizing(nn.Module):
    """Divides by what is 0 in fp16, between its layer and its loss; or adds what bf16 cannot hold."""

    def __init__(self, *, by_zero: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.by_zero = by_zero

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return (y - y) / (y - y + 1e-8) + y if self.by_zero else (y + 3000.0) - 3000.0


@pytest.mark.parametrize(("by_zero", "precision"), [(True, "fp16"), (False, "bf16")])
def test_the_models_own_forward_is_named_as_such(by_zero: bool, precision: Precision) -> None:
    found = checked(subject(Normalizing(by_zero=by_zero)), precision)
    assert found.verdict in ("doubtful", "unfaithful")
    assert (found.culprits, found.healing_pins) == (("",), ())
    assert "own forward (Normalizing)" in found.reason
    assert ("culprits", "the model itself") in found.facts()


def test_a_culprit_whose_pin_does_not_heal_is_still_named() -> None:
    """Two large offsets: at most one module of so few may be pinned, and one does not do."""
    made = with_middle(lambda x: (x + 3000.0) - 3000.0)
    assert isinstance(made.model, nn.Sequential)
    made.model.append(Applied(lambda x: (x + 3000.0) - 3000.0))
    found = checked(made, "bf16", pinned_modules=["body"])
    assert found.verdict in ("doubtful", "unfaithful")
    assert found.culprits
    assert set(found.culprits) <= {"middle", "4"}
    assert (found.healing_pins, found.pinned_modules) == ((), ("body",))


def test_pins_hold_in_every_pass_and_those_of_the_user_stay() -> None:
    made = with_middle(running_sum)
    dtypes: list[torch.dtype] = []
    made.model.get_submodule("body").register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    found = checked(made, "bf16", pinned_modules=["body"])
    assert set(dtypes) == {torch.float32}
    assert (found.verdict, found.pinned_modules, found.culprits) == ("unfaithful", ("body",), ("middle",))
    assert found.healing_pins == ("body", "middle")
    whole = checked(made, "bf16", pinned_modules=[""])
    assert (whole.verdict, whole.noise_ratio) == ("faithful", 0.0)
    middle = made.model.get_submodule("middle")
    pin_fp32(middle, "cpu")
    assert checked(made, "bf16").verdict == "faithful"
    assert checked(made, "bf16", pinned_modules=["middle"]).verdict == "faithful"
    assert is_pinned(middle)


# -- weights kept in low precision -------------------------------------------------------------------------------------


def in_its_dtype(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch.x.to(next(model.parameters()).dtype))
    return functional.cross_entropy(output.float(), batch.y.argmax(1))


class Quantized(nn.Linear):
    """A frozen layer that computes in bf16 whatever its input, as bitsandbytes' Linear4bit."""

    compute_dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Tensor:
        """Compute in `compute_dtype`, and return the dtype of the input."""
        low, weight, bias = (each.to(self.compute_dtype) for each in (x, self.weight, self.bias))
        return torch.nn.functional.linear(low, weight, bias).to(x.dtype)


def test_quantized_layers_compute_in_fp32_in_the_run_that_others_are_compared_with() -> None:
    model = chain(a=Quantized(8, 16).requires_grad_(False), act=nn.ReLU(), head=nn.Linear(16, 4))
    found = checked(subject(model), "fp32")
    assert found.noise_ratio is not None
    assert found.noise_ratio > 1e-3, "it computes in bf16 there"
    assert found.verdict == "faithful"
    assert found.low_weights is None


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_formats_that_layers_compute_in_by_themselves_count_beside_the_precision(dtype: torch.dtype, bits: int) -> None:
    layer = Quantized(8, 16)
    layer.compute_dtype = dtype
    for model in (chain(a=layer, head=nn.Linear(16, 4)), nn.Linear(8, 4).to(dtype)):
        made = Experiment(Passes(subject(model, in_its_dtype)), "fp32", 8, dict, "fp32", 0, math.inf)
        assert made._roundoff == 2.0**-bits
        assert made._format_max == torch.finfo(dtype).max


def adam(lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=lr, eps=1e-8)


@pytest.mark.parametrize(("precision", "lr", "verdict"), [("fp32", 1e-5, "doubtful"), ("bf16", 1e-3, "faithful")])
def test_bf16_weights_lose_small_updates(precision: Precision, lr: float, verdict: str) -> None:
    found = checked(subject(mlp().bfloat16(), in_its_dtype, make_optimizer=adam(lr)), precision)
    assert found.verdict == verdict, found.reason
    assert found.low_weights is not None
    assert found.low_weights.weights == "bf16"
    assert (found.low_weights.lost_share > 0.5) == (verdict == "doubtful")
    assert found.num_paired_steps == NUM_PAIRED_STEPS, "a doubt after one step is trained on too"
    if verdict == "doubtful":
        assert "model.float()" in found.next_step
        assert found.culprits == ()


class MeanTeacher(nn.Module):
    """A model and its copy in bf16, which each forward pass moves a part of the way to the model's weights."""

    def __init__(self, part: float) -> None:
        super().__init__()
        self.part = part
        self.student = nn.Linear(8, 4)
        self.teacher = nn.Linear(8, 4, dtype=torch.bfloat16).requires_grad_(False)
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.copy_(1.1 * ours)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.lerp_(ours.to(theirs.dtype), self.part)
            taught = self.teacher(x.to(next(self.teacher.parameters()).dtype))
        sums: Tensor = self.student(x) + taught.float()
        return sums


@pytest.mark.parametrize(("part", "verdict"), [(0.002, "doubtful"), (0.5, "faithful")])
def test_a_teacher_in_bf16_loses_the_small_steps_of_its_moving_average(part: float, verdict: str) -> None:
    found = checked(subject(MeanTeacher(part), mean_square), "bf16")
    assert found.verdict == verdict, found.reason
    assert found.low_weights is not None
    assert (found.low_weights.lost_share > 0.5) == (verdict == "doubtful")


def test_fp16_weights_under_adam_are_unfaithful_because_of_the_weights() -> None:
    model = chain(a=nn.Linear(8, 16), act=nn.ReLU(), head=nn.Linear(16, 4)).half()
    found = checked(subject(model, in_its_dtype, make_optimizer=adam(1e-3)), "fp32")
    assert found.verdict == "unfaithful"
    assert "no longer finite" in found.reason
    assert "model.float()" in found.next_step
    assert found.format_max == 65504


# -- what is not the precision's fault ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "from_batch"), [(math.nan, 0), (math.inf, 5)])
def test_where_fp32_itself_is_not_finite_the_check_says_nothing(bad: float, from_batch: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_square(model, batch) * (bad if batch.number >= from_batch else 1.0)

    found = checked(subject(mlp(), loss), "bf16")
    assert (found.verdict, found.culprits) == ("unchecked", (OUTSIDE,))
    assert "fp32" in found.reason
    assert "hundred steps" not in found.next_step
    assert "fp32 first" in found.next_step


def test_where_training_in_fp32_does_not_stay_finite_the_next_step_is_to_mend_that() -> None:
    made = subject(mlp(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e12))
    found = checked(made, "bf16")
    assert (found.verdict, found.culprits) == ("unchecked", ())
    assert "learning rate" in found.next_step


def test_where_fp32_is_not_finite_the_module_is_named() -> None:
    made = with_middle(lambda x: (x - x) / (x - x))
    found = checked(made, "bf16")
    assert (found.verdict, found.culprits) == ("unchecked", ("middle",))
    assert "begins in middle" in found.reason


NOTHING_TO_COMPARE: dict[str, Callable[[nn.Module, Batch], Tensor]] = {
    "one class": lambda model, batch: functional.cross_entropy(model(batch.x)[:, :1], torch.zeros(8, dtype=torch.long)),
    "rounding noise": lambda model, batch: model(batch.x).log_softmax(1).exp().sum(1).mean(),
}


@pytest.mark.parametrize("name", NOTHING_TO_COMPARE)
def test_a_loss_without_any_gradient_is_unchecked(name: str) -> None:
    found = checked(subject(mlp(), NOTHING_TO_COMPARE[name]), "bf16")
    assert found.verdict == "unchecked"
    assert "gradient" in found.reason
    assert "data that the model learns from" in found.next_step


def test_a_first_batch_without_gradient_hides_nothing_of_the_others() -> None:
    made = with_middle(running_sum, lambda model, batch: mean_square(model, batch) * (batch.number > 0))
    assert checked(made, "bf16", find_pins=False).verdict == "unfaithful"


# -- weights of every kind ---------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Uses a weight of any kind, which stays frozen unless it is trained, between two layers."""

    def __init__(self, weight: Tensor, use: Callable[[Tensor, Tensor], Tensor], *, is_trained: bool = False) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(weight, requires_grad=is_trained)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        head: Tensor = self.head(self.use(self.enter(x).float(), self.weight))
        return head


def scaled_by(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.float()


def in_full_precision(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        product: Tensor = torch.sparse.mm(weight, x.t())
        return product.t()


def traced(module: nn.Module) -> nn.Module:
    found: nn.Module = torch.jit.trace(module, torch.randn(8, 8))  # type: ignore[no-untyped-call] # torch's
    return found


WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "packed in uint8": lambda: Weighted(torch.randint(1, 3, (8,), dtype=torch.uint8), scaled_by),
    "int8": lambda: Weighted(torch.randint(1, 3, (8,), dtype=torch.int8), scaled_by),
    "bool": lambda: Weighted(torch.ones(8, dtype=torch.bool), scaled_by),
    "float8": lambda: Weighted(torch.randn(8).to(torch.float8_e4m3fn), scaled_by),
    "double": lambda: Weighted(torch.randn(8, dtype=torch.float64), scaled_by, is_trained=True),
    "complex": lambda: Weighted(
        torch.randn(8, dtype=torch.complex64), lambda x, weight: x * (weight.conj() * (1 + 2j)).real, is_trained=True
    ),
    "sparse": lambda: Weighted(torch.eye(8).to_sparse(), in_full_precision),
    "compressed sparse rows": lambda: Weighted(torch.eye(8).to_sparse_csr(), in_full_precision, is_trained=True),
    "no data": lambda: Weighted(torch.empty(8, device="meta"), lambda x, _: x, is_trained=True),
    "parametrized": lambda: chain(a=nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), b=nn.Linear(8, 4)),
    "traced code": lambda: chain(a=traced(nn.Linear(8, 8)), b=nn.Linear(8, 4)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_of_any_kind_are_checked(name: str) -> None:
    model = WEIGHTS[name]()
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    found = check(subject(model), "bf16", batch_size=8)
    assert found.verdict == "faithful", found.reason
    assert found.noise_ratio
    for name, weight in model.named_parameters():
        assert weight.is_meta or torch.equal(stored_values(weight), stored_values(weights[name]))


@pytest.mark.parametrize(("lr", "has_moved"), [(0.0, False), (0.01, True)])
def test_it_is_said_where_training_moves_no_weight(lr: float, has_moved: bool) -> None:
    made = subject(mlp(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr))
    found = checked(made, "bf16")
    assert (found.verdict, found.has_moved) == ("faithful", has_moved)
    assert ("changed no weight" in found.reason) == (not has_moved)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1) @ self.value(x)
        return out


def test_the_bias_of_a_key_carries_no_signal_and_is_no_worst_parameter() -> None:
    made = subject(Attention(), x=lambda: torch.randn(8, 3, 8), y=lambda: torch.randn(8, 3, 8))
    found = checked(made, "bf16")
    assert found.verdict == "faithful", found.reason
    assert {damage.name for damage in found.worst_parameters} == {name for name, _ in made.model.named_parameters()} - {
        "key.bias"
    }

"""A check of sick trainings: the verdict, who is blamed, what heals it; and pins that were there before."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from fidelity_subjects import Applied, chain, checked, compiled, running_sum, with_middle
from fp16_subjects import Batch, mlp, subject
from torch import Tensor, nn

from autotune_amp.core.config import Precision
from autotune_amp.core.fidelity import Fidelity
from autotune_amp.numerics.fidelity import NUM_PAIRED_STEPS, check
from autotune_amp.numerics.passes import Subject
from autotune_amp.precision.mode import is_pinned, pin_fp32


def quiet() -> Subject:
    """One branch whose gradients, 2^-40 of the other's, are flushed at every loss scale."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.quiet = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.loud(x) * 256.0 + self.quiet(x) * 2.0**-20 * 2.0**-20
            return out

    return subject(Branches(), make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-7))


SICK: dict[str, tuple[Callable[[], Subject], tuple[Precision, ...], str]] = {
    "overflow": (lambda: with_middle(lambda x: x * 1e6 * 1e-6), ("fp16",), "middle"),
    "running sum": (lambda: with_middle(running_sum), ("bf16", "fp16"), "middle"),
    "offset": (lambda: with_middle(lambda x: (x + 3000.0) - 3000.0), ("bf16", "fp16"), "middle"),
    "squares": (
        lambda: with_middle(lambda x: x * 1000 * ((x * 1000).square().mean(1, keepdim=True) + 1e-6).rsqrt()),
        ("fp16",),
        "middle",
    ),
    "quiet": (quiet, ("fp16",), "quiet"),
}
SICK_IN = [(name, precision) for name, (_, precisions, _) in SICK.items() for precision in precisions]


@pytest.mark.parametrize(("name", "precision"), SICK_IN)
def test_sick_trainings_are_unfaithful_and_healed_by_a_pin_on_the_culprit(name: str, precision: Precision) -> None:
    torch.manual_seed(0)
    make, _, culprit = SICK[name]
    made = make()
    found = checked(made, precision)
    assert found.verdict == "unfaithful"
    assert found.culprits == (culprit,)
    assert f"it begins in {culprit}." in found.reason
    assert found.healing_pins == (culprit,)
    assert f"pinned_modules=['{culprit}']" in found.next_step
    # And so it is, with that module in fp32.
    healed = checked(made, precision, pinned_modules=found.healing_pins)
    assert healed.verdict == "faithful"
    assert healed.pinned_modules == (culprit,)


@pytest.mark.parametrize("name", [name for name, (_, precisions, _) in SICK.items() if "bf16" not in precisions])
def test_what_is_sick_in_fp16_alone_is_faithful_in_bf16(name: str) -> None:
    torch.manual_seed(0)
    assert checked(SICK[name][0](), "bf16").verdict == "faithful"


@pytest.mark.parametrize(("name", "precision"), SICK_IN)
def test_without_find_pins_nothing_is_looked_for(name: str, precision: Precision) -> None:
    torch.manual_seed(0)
    made = SICK[name][0]()
    found = checked(made, precision, find_pins=False)
    assert found.verdict == "unfaithful"
    assert found.culprits == found.healing_pins == ()
    assert found.next_step.startswith("Train in a precision with less to go wrong")
    assert found.num_passes <= 20


@pytest.mark.parametrize(("name", "precision"), [("running sum", "bf16"), ("offset", "fp16"), ("quiet", "fp16")])
def test_a_sick_compiled_model_is_healed_too(name: str, precision: Precision) -> None:
    torch.manual_seed(0)
    made = SICK[name][0]()
    found = checked(Subject(compiled(made.model), made.loss, made.batches, made.make_optimizer, made.device), precision)
    assert found.verdict == "unfaithful"
    assert found.culprits == found.healing_pins == (SICK[name][2],)


def test_a_gradient_that_no_scale_saves() -> None:
    def with_infinite_gradient(x: Tensor) -> Tensor:
        y = x * 1.0
        if y.dtype == torch.float16:
            y.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call] # torch's
        return y

    torch.manual_seed(0)
    found = checked(with_middle(with_infinite_gradient), "fp16")
    assert found.verdict == "unfaithful"
    assert "not finite at every loss scale" in found.reason
    assert found.culprits == found.healing_pins == ("middle",)


def test_a_failure_later_in_training_is_found_and_costs_no_more() -> None:
    steps = itertools.count()

    def failing_later(x: Tensor) -> Tensor:
        y = x * 1.0
        if y.dtype == torch.float16 and next(steps) > 8:
            y.register_hook(lambda gradient: gradient * math.inf)  # type: ignore[no-untyped-call] # torch's
        return y

    torch.manual_seed(0)
    found = checked(with_middle(failing_later), "fp16")
    assert found.verdict == "unfaithful"
    assert "within a few training steps it is no longer finite" in found.reason
    assert found.culprits == ("middle",)
    assert found.num_paired_steps < NUM_PAIRED_STEPS


def test_where_the_loss_function_is_to_blame_nothing_can_be_pinned() -> None:
    def log_error(model: nn.Module, batch: Batch) -> Tensor:
        output = model(batch.x)
        total: Tensor = (100 + output).square().sum(dtype=output.dtype)
        return total.float().log()

    torch.manual_seed(0)
    found = checked(subject(mlp(), log_error), "fp16")
    assert found.verdict == "unfaithful"
    assert found.culprits == ("",)
    assert "the code outside of the modules" in found.reason
    assert found.healing_pins == ()
    assert "mend the code" in found.next_step


def test_activations_near_the_end_of_fp16_are_no_room_to_grow() -> None:
    torch.manual_seed(0)
    model = chain(enter=nn.Linear(8, 16), high=nn.Linear(16, 16), norm=nn.LayerNorm(16), head=nn.Linear(16, 4))
    with torch.no_grad():
        model.get_parameter("high.weight").mul_(40_000)
    found = checked(subject(model), "fp16")
    assert found.verdict == "unfaithful"
    assert "activations reach" in found.reason
    assert found.forward_max is not None
    assert 0.25 * 65504 < found.forward_max < 65504
    assert found.format_max == 65504
    assert found.healing_pins == ("high",)
    assert checked(subject(model), "bf16").verdict == "faithful"


def test_pins_that_were_passed_in_hold_in_every_pass() -> None:
    torch.manual_seed(0)
    made = with_middle(running_sum)
    dtypes: list[torch.dtype] = []
    made.model.get_submodule("body").register_forward_hook(lambda _, __, output: dtypes.append(output.dtype))
    found = checked(made, "bf16", pinned_modules=["body"])
    assert set(dtypes) == {torch.float32}
    assert found.verdict == "unfaithful"
    assert found.pinned_modules == ("body",)
    assert found.culprits == ("middle",)
    assert found.healing_pins == ("body", "middle")


def test_a_culprit_whose_pin_does_not_heal_is_still_named() -> None:
    """Two large offsets: at most one module of so few may be pinned, and one does not do."""
    torch.manual_seed(0)

    def offset(x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0

    made = with_middle(offset)
    assert isinstance(made.model, nn.Sequential)
    made.model.append(Applied(offset))
    found = checked(made, "bf16", pinned_modules=["body"])
    assert found.verdict in ("doubtful", "unfaithful")
    assert found.culprits
    assert set(found.culprits) <= {"middle", "4"}
    assert found.healing_pins == ()
    assert found.pinned_modules == ("body",)
    assert "fp32" in found.next_step or "less to go wrong" in found.next_step


def test_a_culprit_that_cannot_run_in_fp32_does_not_undo_the_verdict() -> None:
    """As a router does that writes what its experts put out into a tensor in half precision."""
    torch.manual_seed(0)

    def sum_of_half(x: Tensor) -> Tensor:
        out = torch.empty_like(x, dtype=torch.get_autocast_dtype("cpu") if is_low[0] else torch.float32)
        out[torch.arange(len(x))] = running_sum(x)
        return out

    is_low = [False]
    made = with_middle(sum_of_half)
    made.model.register_forward_pre_hook(lambda *_: is_low.__setitem__(0, torch.is_autocast_enabled("cpu")))
    found = checked(made, "bf16")
    assert found.verdict == "unfaithful"
    assert found.healing_pins == ()


def test_a_bad_verdict_is_told_before_the_culprits_are_looked_for() -> None:
    torch.manual_seed(0)
    told: list[Fidelity] = []
    found = check(with_middle(running_sum), "bf16", batch_size=8, on_bad_verdict=told.append)
    assert [first.verdict for first in told] == ["unfaithful"]
    assert (told[0].culprits, found.culprits) == ((), ("middle",))
    assert told[0].batch_size == 8


def test_a_module_without_weights_that_puts_out_what_fp16_hardly_holds_is_seen() -> None:
    torch.manual_seed(0)
    made = with_middle(lambda x: torch.nn.functional.softsign(x) * 50_000.0)
    assert isinstance(made.model, nn.Sequential)
    made.model.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
    found = checked(made, "fp16")
    assert found.verdict == "unfaithful"
    assert "activations reach" in found.reason


def test_the_users_own_pins_stay() -> None:
    torch.manual_seed(0)
    made = with_middle(running_sum)
    pin_fp32(made.model.get_submodule("middle"), "cpu")
    assert checked(made, "bf16").verdict == "faithful"
    assert checked(made, "bf16", pinned_modules=["middle"]).verdict == "faithful"
    assert is_pinned(made.model.get_submodule("middle"))


def test_the_whole_model_can_be_pinned() -> None:
    torch.manual_seed(0)
    found = checked(with_middle(running_sum), "bf16", pinned_modules=[""])
    assert (found.verdict, found.noise_ratio) == ("faithful", 0.0)

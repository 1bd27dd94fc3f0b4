"""A trial trains as a loop written by hand: bit for bit, whatever the model's factory and its optimizers are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graph_samples import replayed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from autotune_amp import LossScale, Workload
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import is_pinned, pin_fp32
from autotune_amp.trial.context import Optimizers, make_model, make_optimizer
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import Training, make_training

Made = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Callable[[int], Any], Callable[[Any], Any] | None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = LossScale(init_scale=256.0, growth_interval=2)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).float().square().mean()
    return result


def points(size: int) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size))


def frozen() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(requires_grad=False)
    return model, mean_square, points, None


def several_optimizers() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 4))

    def optimizers(_: Any) -> list[torch.optim.Optimizer]:  # over two of the three layers
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]

    return model, mean_square, points, optimizers


def hand_written(make: Callable[[], Made], precision: Precision) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, loss, data, make_optimizers = make()
    model.train()
    made = make_optimizers(model.parameters()) if make_optimizers else torch.optim.AdamW(model.parameters())
    optimizers = made if isinstance(made, list) else [made]
    scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2, enabled=precision == "fp16")
    torch.manual_seed(1)
    for _ in range(3):
        dtype = DTYPES.get(precision)
        with torch.autocast("cpu", dtype) if dtype else nullcontext():
            value = loss(model, data(4))
        torch.autograd.backward(scaler.scale(value))
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return model.state_dict()


def training(precision: Precision = "fp32", *, is_loss_sum: bool = False, **given: Any) -> Training:
    """One of a small linear model, unless other parts of a workload or of a setting are given."""
    torch.manual_seed(0)
    parts = {"model": nn.Linear(8, 1), "loss": mean_square, "data": points, "optimizer": torch.optim.SGD}
    workload = Workload(**{name: given.pop(name, part) for name, part in parts.items()})
    spec = Trial(
        candidate=Setting(**{"precision": precision, "batch_size": 4, **given}),
        device="cpu",
        loss_scale=SCALE if precision == "fp16" else None,
        torch_state=torch_state.capture(),
        is_loss_sum=is_loss_sum,
    )
    made = make_training(workload, make_model(workload), spec)
    assert isinstance(made, Training)
    return made


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [frozen, several_optimizers])
def test_a_trial_trains_it_as_a_hand_written_loop_does(make: Callable[[], Made], precision: Precision) -> None:
    torch.manual_seed(0)
    model, loss, data, optimizer = make()
    before = copy.deepcopy(model.state_dict())
    made = training(precision, model=model, loss=loss, data=data, optimizer=optimizer)
    torch.manual_seed(1)
    for _ in range(3):
        made.forward_backward(made.next_batch())
        made.update()
    after = model.state_dict()
    torch.testing.assert_close(after, hand_written(make, precision), rtol=0, atol=0)
    untouched = {"frozen": "0.", "several_optimizers": "3."}[make.__name__]
    assert all(torch.equal(after[name], before[name]) == name.startswith(untouched) for name in before)


def weights_after(trained: Training, num_batches: int) -> Tensor:
    for _ in range(num_batches):
        trained.forward_backward(trained.next_batch())
    trained.update()
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def test_accumulation_takes_the_mean_or_the_sum_over_the_window() -> None:
    one, four = weights_after(training(), 1), weights_after(training(accumulation_steps=4), 4)
    torch.testing.assert_close(one, four)

    def summed(factor: float) -> Any:
        return lambda model, batch: 0.01 * factor * mean_square(model, batch)

    of_a_sum = weights_after(training(accumulation_steps=4, is_loss_sum=True, loss=summed(1.0)), 4)
    torch.testing.assert_close(weights_after(training(loss=summed(4.0)), 1), of_a_sum)


def test_a_loss_stays_when_the_next_pass_writes_over_what_it_returned() -> None:
    static = torch.zeros(()), torch.zeros(())
    ordinary, graphed = training(), training(loss=lambda model, batch: replayed(mean_square(model, batch), *static))
    kept = [graphed.forward_backward(points(size)) for size in (4, 8)]
    assert kept == [ordinary.forward_backward(points(size)).item() for size in (4, 8)]


@pytest.mark.parametrize(("precision", "dtype"), DTYPES.items())
def test_pinned_modules_run_in_fp32_until_the_end_and_what_the_user_pinned_stays_so(
    precision: Precision, dtype: torch.dtype
) -> None:
    seen: list[torch.dtype] = []

    def watching(model: Any, batch: Tensor) -> Tensor:
        output = batch
        for layer in model:
            output = layer(output)
            seen.append(output.dtype)
        return output.float().square().mean()

    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    pin_fp32(model[0], "cpu")
    trained = training(precision, model=model, loss=watching, pinned_modules=("0", "1"))
    weights_after(trained, 1)
    assert seen == [torch.float32, torch.float32, dtype]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert trained.loss_scale() == (SCALE.init_scale if precision == "fp16" else None)
    trained.close()
    assert [is_pinned(layer) for layer in model] == [True, False, False]
    with pytest.raises(InvalidRequestError, match="head"):
        training(precision, pinned_modules=("head",))


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (lambda model, batch: model(batch), r"a tensor of shape \(4, 1\)"),
        (lambda model, batch: 3.0, "a float"),
        (lambda model, batch: model(batch).mean().detach(), "without gradient"),
    ],
)
def test_a_loss_that_is_no_loss(broken: Any, word: str) -> None:
    trained = training(loss=broken)
    with pytest.raises(WorkloadError, match=word):
        trained.forward_backward(trained.next_batch())


@pytest.mark.parametrize("parts", [{"model": lambda: 3}, *({"optimizer": lambda _, g=g: g} for g in (3, [3], []))])
def test_factories_that_make_something_else(parts: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match=r"returned a (int|list)"):
        training(**parts)


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizer_of(given: Any, made_for: Any, model: nn.Module | None = None) -> torch.optim.Optimizer:
    workload = Workload(made_for, mean_square, points, given)
    return make_optimizer(workload, make_model(workload) if model is None else model)


def parameters_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def test_an_optimizer_instance_gives_its_class_groups_and_hyperparameters_for_a_copy_of_its_model_too() -> None:
    model = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 1))
    groups: list[dict[str, Any]] = [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    given = torch.optim.AdamW(groups, lr=0.25, betas=(0.5, 0.6))
    for own in (model, copy.deepcopy(model)):
        made = optimizer_of(given, model, own)
        assert type(made) is torch.optim.AdamW
        assert made is not given
        assert [(group["lr"], group["betas"]) for group in made.param_groups] == [(0.5, (0.5, 0.6)), (0.25, (0.5, 0.6))]
        assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in own[1].parameters()]


def test_optimizers_over_another_models_parameters_are_refused() -> None:
    other = nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 1))
    grouped = torch.optim.SGD([{"params": part.parameters()} for part in other], lr=0.1)
    for given, word in ((grouped, "2 parameter groups"), ([torch.optim.SGD(other.parameters())] * 2, "another model")):
        with pytest.raises(WorkloadError, match=word):
            optimizer_of(given, lambda: nn.Linear(8, 1))


def test_several_optimizers_are_one_whose_groups_are_theirs() -> None:
    model, _, _, optimizers = several_optimizers()
    assert optimizers is not None
    made, twin = optimizer_of(optimizers, model), copy.deepcopy(model)
    assert isinstance(made, Optimizers)
    saved = copy.deepcopy(made.state_dict())
    made.param_groups[0]["lr"] = 0.7
    assert [part.param_groups[0]["lr"] for part in made.parts] == [0.7, 0.01]
    made.load_state_dict(saved)
    made.param_groups[1]["lr"] = 0.25
    assert [part.param_groups[0]["lr"] for part in made.parts] == [0.1, 0.25]
    again = optimizer_of(optimizers(None), model, twin)
    assert isinstance(again, Optimizers)
    assert [type(part) for part in again.parts] == [torch.optim.SGD, torch.optim.Adam]
    assert parameters_of(again) == {id(p) for layer in (twin[0], twin[2]) for p in layer.parameters()}  # type: ignore[index]


@pytest.mark.parametrize(
    ("schedule", "number", "expected"),
    [
        (lambda optimizer: LambdaLR(optimizer, lambda step: step / 100), torch.tensor, 0.05),
        (lambda optimizer: OneCycleLR(optimizer, max_lr=2.0, total_steps=100), float, 0.2),
        (lambda optimizer: optimizer.param_groups[0].update(lr=0.0), float, 0.0),  # by hand
    ],
)
def test_a_rate_below_a_tenth_of_its_schedules_peak_is_that_tenth(schedule: Any, number: Any, expected: float) -> None:
    model = nn.Linear(8, 1)
    lr = number(0.5)
    given = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.75, foreach=True)
    schedule(given)
    (group,) = given.param_groups
    before, rate = dict(group), float(group["lr"])
    made = optimizer_of(given, model)
    assert float(made.param_groups[0]["lr"]) == pytest.approx(expected)
    assert type(made.param_groups[0]["lr"]) is type(lr)
    assert made.param_groups[0]["momentum"] == group["momentum"]
    assert (given.param_groups[0], float(group["lr"])) == (before, rate), "the user's own"

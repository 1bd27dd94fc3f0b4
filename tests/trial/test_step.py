from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from graph_samples import replayed
from torch import nn

from autotune_amp import LossScale, Workload
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import is_pinned, pin_fp32
from autotune_amp.trial import worker
from autotune_amp.trial.context import make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.optimizers import make_optimizer
from autotune_amp.trial.training import Training


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=generator), torch.randn(size, 1, generator=generator)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    result: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
    return result


PARTS: dict[str, Any] = {
    "loss": loss,
    "data": make_batch,
    "optimizer": torch.optim.SGD,
}


def training(
    precision: Precision = "fp32",
    *,
    batch_size: int = 8,
    accumulation_steps: int = 1,
    pinned_modules: tuple[str, ...] = (),
    is_loss_sum: bool = False,
    **parts: Any,
) -> Training:
    torch.manual_seed(0)
    workload = Workload(**{**PARTS, "model": nn.Linear(4, 1), **parts})
    spec = Trial(
        candidate=Setting(
            precision=precision,
            batch_size=batch_size,
            accumulation_steps=accumulation_steps,
            pinned_modules=pinned_modules,
        ),
        device="cpu",
        loss_scale=LossScale(init_scale=8.0) if precision == "fp16" else None,
        torch_state=torch_state.capture(),
        is_loss_sum=is_loss_sum,
    )
    return Training(workload, make_model(workload), spec)


def weights_after(trained: Training, num_batches: int) -> torch.Tensor:
    for _ in range(num_batches):
        trained.forward_backward(trained.next_batch())
    trained.update()
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def test_a_step_is_what_a_hand_written_loop_does() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    loss(model, make_batch(8)).backward()  # type: ignore[no-untyped-call]  # torch does not type it
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(weights_after(training(), 1), expected)


def test_accumulation_takes_the_mean_over_the_window() -> None:
    one, four = weights_after(training(), 1), weights_after(training(accumulation_steps=4), 4)
    assert torch.allclose(one, four, atol=1e-6)


def test_accumulation_of_a_sum_takes_the_sum_over_the_window() -> None:
    def summed(model: nn.Module, batch: Any) -> torch.Tensor:
        return 0.01 * len(batch[0]) * loss(model, batch)

    four = weights_after(training(accumulation_steps=4, is_loss_sum=True, loss=summed), 4)

    def all_four(model: nn.Module, batch: Any) -> torch.Tensor:
        return 4 * summed(model, batch)

    assert torch.allclose(weights_after(training(loss=all_four), 1), four, atol=1e-6)


def test_a_loss_stays_when_the_next_pass_writes_over_what_it_returned() -> None:
    static = torch.zeros(()), torch.zeros(())

    def graphed(model: nn.Module, batch: Any) -> torch.Tensor:
        return replayed(loss(model, batch), *static)

    plain, ours = training(), training(loss=graphed)
    kept = [ours.forward_backward(make_batch(size)) for size in (4, 8)]
    assert kept == [plain.forward_backward(make_batch(size)).item() for size in (4, 8)]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_runs_under_autocast_and_keeps_fp32_weights(precision: Precision, dtype: torch.dtype) -> None:
    seen = []

    def watching(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(model(batch[0]).dtype)
        return loss(model, batch)

    trained = training(precision, loss=watching)
    weights_after(trained, 1)
    assert seen == [dtype]
    assert trained.model.weight.dtype == torch.float32
    assert trained.loss_scale() == (8.0 if precision == "fp16" else None)


def test_pinned_modules_run_in_fp32_until_they_are_unpinned() -> None:
    seen: list[torch.dtype] = []

    def watching(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = model[0](batch[0])  # type: ignore[index]  # a Sequential
        output = model[1](hidden)  # type: ignore[index]  # a Sequential
        seen.extend((hidden.dtype, output.dtype))
        result: torch.Tensor = output.float().square().mean()
        return result

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    trained = training("bf16", model=model, loss=watching, pinned_modules=("0",))
    weights_after(trained, 1)
    assert seen == [torch.float32, torch.bfloat16]
    batch = trained.next_batch()
    trained.close()
    trained.forward_backward(batch)
    assert seen[2:] == [torch.bfloat16, torch.bfloat16]
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_what_the_user_pinned_stays_pinned() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    pin_fp32(model[0], "cpu")
    trained = training("bf16", model=model, pinned_modules=("0", "1"))
    assert is_pinned(model[1])
    trained.close()
    assert [is_pinned(layer) for layer in model] == [True, False]


def test_a_module_to_pin_that_is_not_there() -> None:
    with pytest.raises(InvalidRequestError, match="no module named 'head'"):
        training("fp16", pinned_modules=("head",))


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        (lambda model, batch: model(batch[0]), r"a tensor of shape \(8, 1\)"),
        (lambda model, batch: 3.0, "a float"),
        (lambda model, batch: model(batch[0]).mean().detach(), "without gradient"),
    ],
)
def test_a_loss_that_is_no_loss(broken: Any, word: str) -> None:
    trained = training(loss=broken)
    with pytest.raises(WorkloadError, match=word):
        trained.forward_backward(trained.next_batch())


def test_an_optimizer_instance_gives_its_class_groups_and_hyperparameters() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    groups: list[dict[str, Any]] = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters()}]
    given = torch.optim.AdamW(groups, lr=0.25, betas=(0.5, 0.6))
    workload = Workload(model, loss, make_batch, given)
    made = make_optimizer(workload, make_model(workload))
    assert type(made) is torch.optim.AdamW
    assert made is not given
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert [group["betas"] for group in made.param_groups] == [(0.5, 0.6)] * 2
    assert {id(p) for g in made.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}


def test_an_optimizer_instance_with_groups_is_made_for_a_copy_of_its_model_too() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    groups: list[dict[str, Any]] = [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    given = torch.optim.SGD(groups, lr=0.25)
    twin = copy.deepcopy(model)
    made = make_optimizer(Workload(model, loss, make_batch, given), twin)
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.25]
    assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in twin[1].parameters()]


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta", "ASGD", "Rprop"]
)
def test_every_optimizer_of_torch_can_be_taken_from_an_instance_for_a_model_made_later(kind: str) -> None:
    given = getattr(torch.optim, kind)(nn.Linear(4, 1).parameters(), lr=0.125)
    workload = Workload(lambda: nn.Linear(4, 1), loss, make_batch, given)
    made = make_optimizer(workload, make_model(workload))
    assert type(made) is type(given)
    assert made.param_groups[0]["lr"] == 0.125


def test_groups_over_another_models_parameters_are_refused() -> None:
    other = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 1))
    given = torch.optim.SGD([{"params": part.parameters()} for part in other], lr=0.1)
    workload = Workload(lambda: nn.Linear(4, 1), loss, make_batch, given)
    with pytest.raises(WorkloadError, match="2 parameter groups"):
        make_optimizer(workload, make_model(workload))


@pytest.mark.parametrize("parts", [{"model": lambda: 3}, {"optimizer": lambda parameters: 3}])
def test_factories_that_make_something_else(parts: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="returned a int"):
        training(**parts)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "fp16 batch 8"),
        ({"pinned_modules": ("head",)}, "fp16 batch 8 with 1 module pinned"),
        ({"pinned_modules": ("0", "1"), "accumulation_steps": 4}, "fp16 batch 8 x 4 with 2 modules pinned"),
    ],
)
def test_a_candidates_name(fields: dict[str, Any], name: str) -> None:
    assert str(Setting(precision="fp16", batch_size=8, **fields)) == name


def test_an_optimizer_without_gradients_is_not_stepped_by_the_scaler() -> None:
    def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
        several = list(parameters)
        trained, idle = several[:2], several[2:]
        return [torch.optim.SGD(trained, lr=0.1), torch.optim.SGD(idle, lr=0.1)]

    class Half(nn.Sequential):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self[0](inputs).float()
            return result

    model = Half(nn.Linear(4, 1), nn.Linear(4, 1))
    trained = training("fp16", model=model, optimizer=optimizers)
    before = [p.detach().clone() for p in model.parameters()]
    weights_after(trained, 1)
    assert [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_the_format_that_weights_are_kept_in_is_told(dtype: torch.dtype, name: str) -> None:
    weights = list(nn.Linear(2, 2).to(dtype).parameters())
    assert worker._weights(weights, weights) == name
    if name != "fp32":
        assert worker._weights(weights, []) == "frozen_low"

"""Models train in a trial as the user's factory made them: bit for bit as in a hand-written loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from autotune_amp import LossScale, Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.optimizers import Optimizers, make_optimizer
from autotune_amp.trial.training import Training

Made = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Callable[[int], Any], Callable[[Any], Any] | None]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch).float().square().mean()
    return result


def points(size: int) -> Tensor:
    return torch.randn(size, 8, generator=torch.Generator().manual_seed(size))


def images(size: int) -> Tensor:
    return points(size * 3 * 8).reshape(size, 3, 8, 8).to(memory_format=torch.channels_last)


def frozen() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    model[0].requires_grad_(requires_grad=False)
    return model, mean_square, points, None


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False))
        return output


def checkpointed() -> Made:
    return Checkpointed(), mean_square, points, None


def checkpointed_transformer() -> Made:
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name in newer versions
    (enable or model.gradient_checkpointing_enable)()

    def tokens(size: int) -> Tensor:
        return torch.randint(16, (size, 8), generator=torch.Generator().manual_seed(size))

    def loss(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
        return found

    return model, loss, tokens, None


def channels_last() -> Made:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return model.to(memory_format=torch.channels_last), mean_square, images, None


def several_optimizers() -> Made:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 4))

    def optimizers(_: Any) -> list[torch.optim.Optimizer]:  # over two of the three layers
        return [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters(), lr=0.01)]

    return model, mean_square, points, optimizers


CASES = [frozen, checkpointed, checkpointed_transformer, channels_last, several_optimizers]


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", CASES)
def test_a_trial_trains_it_as_a_hand_written_loop_does(make: Callable[[], Made], precision: Precision) -> None:
    torch.manual_seed(0)
    model, loss, data, optimizer = make()
    workload = Workload(model, loss, data, optimizer)
    before = copy.deepcopy(model.state_dict())
    spec = Trial(
        candidate=Setting(precision=precision, batch_size=4),
        device="cpu",
        loss_scale=LossScale(init_scale=256.0, growth_interval=2) if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )
    training = Training(workload, make_model(workload), spec)
    torch.manual_seed(1)
    for _ in range(3):
        training.forward_backward(training.next_batch())
        training.update()
    after = model.state_dict()
    torch.testing.assert_close(after, hand_written(make, precision), rtol=0, atol=0)
    untouched = {"frozen": "0.", "several_optimizers": "3."}.get(make.__name__, "none")
    assert all(torch.equal(after[name], before[name]) == name.startswith(untouched) for name in before if "." in name)
    if make is channels_last:
        assert all(p.is_contiguous(memory_format=torch.channels_last) for p in model.parameters() if p.dim() == 4)


# -- several optimizers ------------------------------------------------------------------------------------------------


def test_several_optimizers_are_one_whose_groups_are_theirs() -> None:
    model, loss, data, optimizers = several_optimizers()
    made = make_optimizer(Workload(model, loss, data, optimizers), model)
    assert isinstance(made, Optimizers)
    made.param_groups[0]["lr"] = 0.5
    assert [part.param_groups[0]["lr"] for part in made.parts] == [0.5, 0.01]
    saved = copy.deepcopy(made.state_dict())
    made.param_groups[0]["lr"] = 0.7
    made.load_state_dict(saved)
    made.param_groups[1]["lr"] = 0.25
    assert [part.param_groups[0]["lr"] for part in made.parts] == [0.5, 0.25]


def test_instances_in_a_list_are_made_anew_for_the_model_and_its_copies() -> None:
    model, loss, data, optimizers = several_optimizers()
    assert optimizers is not None
    given = optimizers(None)
    twin = copy.deepcopy(model)
    made = make_optimizer(Workload(model, loss, data, given), twin)
    assert isinstance(made, Optimizers)
    assert [type(part) for part in made.parts] == [torch.optim.SGD, torch.optim.Adam]
    trained = {id(p) for group in made.param_groups for p in group["params"]}
    assert trained == {id(p) for layer in (twin[0], twin[2]) for p in layer.parameters()}  # type: ignore[index]
    assert not any(part is old for part in made.parts for old in given)


def test_a_list_over_another_models_parameters_is_refused() -> None:
    _, loss, data, optimizers = several_optimizers()
    assert optimizers is not None
    workload = Workload(lambda: nn.Linear(8, 4), loss, data, optimizers(None))
    with pytest.raises(WorkloadError, match="One optimizer is over another model's"):
        make_optimizer(workload, make_model(workload))


@pytest.mark.parametrize("given", [[], [3], ["adam"]])
def test_a_list_of_something_else_is_refused(given: Any) -> None:
    model, loss, data, _ = several_optimizers()
    with pytest.raises(WorkloadError):
        make_optimizer(Workload(model, loss, data, lambda _: given), model)
    with pytest.raises(WorkloadError):
        Workload(model, loss, data, given)

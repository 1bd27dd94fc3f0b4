"""Loops of their own train in a trial bit for bit as a hand-written loop trains them, and as in a training job."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import loop_samples
import msgspec
import numpy
import pytest
import torch
from loop_samples import LOOPS, batches, build_gan, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autotune_amp import AmpConfig, LossScale, PrecisionController, Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.precision.step_amp import MAX_CALLS_WITHOUT_STEP
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context, LoopState, make_model
from autotune_amp.trial.jobs import Describe, Trial
from autotune_amp.trial.timing import time_steps
from autotune_amp.trial.training import BaseTraining, make_training

NUM_STEPS = 3
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
SCALE = LossScale(init_scale=256.0, growth_interval=2)


def spec(precision: Precision = "fp32", **candidate: Any) -> Trial:
    return Trial(
        candidate=Setting(precision=precision, batch_size=8, **candidate),
        device="cpu",
        loss_scale=SCALE if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )


def training(workload: Workload, precision: Precision = "fp32", **candidate: Any) -> BaseTraining:
    torch.manual_seed(0)
    return make_training(workload, make_model(workload), spec(precision, **candidate))


def trained(made: BaseTraining) -> dict[str, Tensor]:
    torch.manual_seed(1)
    for _ in range(NUM_STEPS):
        made.forward_backward(made.next_batch())
        made.update()
    return everything(made.model)


def everything(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def by_hand(build: Callable[[], Any], step: Callable[[Any, Tensor], None]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    state = build()
    torch.manual_seed(1)
    stream = batches(8)
    for _ in range(NUM_STEPS):
        step(state, next(stream))
    return everything(LoopState(state))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_weights_are_those_of_a_training_job(name: str, precision: Precision) -> None:
    workload = LOOPS[name]()
    made = training(workload, precision)
    found = trained(made)
    scale = SCALE if precision == "fp16" else None
    controller = PrecisionController(AmpConfig(precision=precision, batch_size=8, loss_scale=scale), "cpu")
    build, train_step = workload.build, workload.train_step
    assert build is not None
    assert train_step is not None
    in_a_job = by_hand(build, lambda state, batch: train_step(state, batch, controller))
    torch.testing.assert_close(found, in_a_job, rtol=0, atol=0)
    assert made.loss_scale() == (controller.get_scale() if precision == "fp16" else None)


def test_a_loop_is_described_by_what_it_trains() -> None:
    asked = Describe(device="cpu", torch_state=torch_state.capture())
    found = worker.describe(Context(loop_samples.diffusion(), is_kept=False), asked, lambda event: None)
    num_parameters = sum(p.numel() for p in mlp(9, 8).parameters())
    assert (found.is_loop, found.weights) == (True, "fp32")
    # The average is not trained.
    assert (found.num_parameters, found.num_trainable_parameters) == (2 * num_parameters, num_parameters)


def test_a_kept_worker_trains_each_time_from_the_beginning() -> None:
    context = Context(LOOPS["gan"](), is_kept=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = context.model(torch.device("cpu"))
        runs.append(trained(make_training(context.workload, model, spec())))
    torch.testing.assert_close(runs[0], runs[1], rtol=0, atol=0)


def test_a_kept_worker_restores_the_buffers_of_a_loop_that_no_state_dict_has() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("cache", torch.ones(1), persistent=False)
    context = Context(Workload(build=lambda: {"nets": [net]}, train_step=never, data=batches), is_kept=True)
    context.model(torch.device("cpu"))
    net.cache = torch.zeros(3)
    context.model(torch.device("cpu"))
    assert net.cache.tolist() == [1.0]


def never(*_: Any) -> None:
    raise AssertionError


# -- what is found in a state ------------------------------------------------------------------------------------------


class Holder:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("build", "modules", "optimizers"),
    [
        (lambda: dict(zip(("net", "sgd"), pair(), strict=True)), ["net"], ["sgd"]),
        (lambda: Holder(train=Holder(items=list(pair()))), ["train.items.0"], ["train.items.1"]),
        (build_gan, ["nets.generator", "nets.discriminator"], ["generator_optimizer", "discriminator_optimizer"]),
    ],
)
def test_modules_and_optimizers_are_named_by_their_paths(build: Any, modules: list[str], optimizers: list[str]) -> None:
    state = LoopState(build())
    assert [name for name, _ in state.named_modules() if name in modules] == modules
    assert list(state.optimizers) == optimizers
    assert {id(p) for p in state.trained()} <= {id(p) for p in state.parameters()}


def test_a_shared_module_is_there_once_and_tensors_outside_of_modules_are_too() -> None:
    body = nn.Linear(2, 2)
    latent = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([*body.parameters(), latent], lr=0.1)
    state = LoopState(
        {
            "weights": list(body.parameters()),
            "a": body,
            "b": nn.Sequential(body),
            "noise": torch.ones(2),
            "optimizer": optimizer,
        }
    )
    assert sorted(name for name, _ in state.named_parameters()) == ["a.bias", "a.weight", "optimizer.2"]
    assert [name for name, _ in state.named_buffers()] == ["noise"]


def test_moving_a_state_keeps_the_objects_that_the_loop_knows() -> None:
    net, table = nn.Linear(2, 2), torch.ones(3)
    optimizer = torch.optim.Adagrad(net.parameters())
    weight = net.weight
    state = LoopState({"net": net, "table": table, "optimizer": optimizer})
    state.to(torch.float64)
    assert net.weight is weight
    assert dict(state.named_buffers())["table"] is table
    assert (weight.dtype, table.dtype, optimizer.state[weight]["sum"].dtype) == (torch.float64,) * 3


def test_an_optimizer_that_is_not_in_the_state_is_asked_for() -> None:
    with pytest.raises(WorkloadError, match=r"return the optimizer from build\(\)"):
        LoopState({"net": mlp(8, 1)}).first_optimizer()


def test_steps_can_be_forgotten() -> None:
    first = (torch.zeros(2), 1.0)
    generator = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {
        "net": nn.Linear(2, 2), "replay": deque([first], maxlen=2), "episodes": {7}, "more": Holder(scores=[1.0]),
        "counts": {"train": 1}, "number": 0, "average": torch.zeros(2), "generator": generator,
    }  # fmt: skip
    state, replay, average, scores = LoopState(held), held["replay"], held["average"], held["more"].scores
    drawn = torch.rand(1, generator=generator)
    replay.extend([(torch.ones(2), 2.0)] * 2)
    held["episodes"] |= {8}
    held["average"] = torch.ones(2)
    held["more"].scores = [2.0]
    held["more"].best = 3.0
    held["counts"]["test"] = held["num_steps"] = held["number"] = 1
    state.restore_python_state()
    assert list(replay) == [first]
    assert held["more"].scores is scores
    assert vars(held["more"]) == {"scores": [1.0]}
    assert (held["episodes"], held["counts"], held["number"]) == ({7}, {"train": 1}, 0)
    assert "num_steps" not in held
    assert held["average"] is average
    assert torch.equal(torch.rand(1, generator=generator), drawn)


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (random.Random(0), random.Random.random),
        (numpy.random.default_rng(0), numpy.random.Generator.random),
        (numpy.random.RandomState(0), numpy.random.RandomState.random_sample),
    ],
)
def test_draws_of_every_library_can_be_repeated(generator: Any, draw: Callable[[Any], float]) -> None:
    state = LoopState({"net": nn.Linear(2, 2), "more": Holder(generator=generator)})
    drawn = draw(generator)
    state.restore_python_state()
    assert draw(generator) == drawn


def test_a_generator_without_a_state_stays() -> None:
    LoopState({"net": nn.Linear(2, 2), "random": random.SystemRandom()}).restore_python_state()


def test_the_iterator_of_a_further_loader_goes_on_where_it_was() -> None:
    further = iter(DataLoader([torch.tensor(float(i)) for i in range(12)], batch_size=1, num_workers=1))  # type: ignore[arg-type]
    state = LoopState({"net": nn.Linear(2, 2), "further": further})
    first = [float(next(further)) for _ in range(4)]
    state.restore_python_state()
    assert first + [float(next(further)) for _ in range(4)] == [*range(8)]
    further._shutdown_workers()  # type: ignore[attr-defined]


class OnDisk(dict[str, int]):
    """As a shelf or an HDF5 group, of which a process that is killed in between would leave nothing."""

    def clear(self) -> None:
        raise AssertionError("emptied")


def test_a_mapping_is_put_back_without_being_emptied() -> None:
    held: dict[str, Any] = {"net": nn.Linear(2, 2), "store": OnDisk(kept=1), "seen": Counter(kept=1)}
    state = LoopState(held)
    held["store"] |= {"kept": 2, "new": 3}
    held["seen"].update({"kept": 2, "new": 3})
    state.restore_python_state()
    assert held["store"] == held["seen"] == {"kept": 1}


# -- a train_step that does not train through amp ----------------------------------------------------------------------


def net_and_optimizer() -> dict[str, Any]:
    net = mlp(8, 1)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def faulty_step(*left_out: str) -> Callable[[dict[str, Any], Tensor, Any], None]:
    def step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
        with nullcontext() if "autocast" in left_out else amp.autocast():
            loss = state["net"](batch).float().square().mean()
        if "backward" in left_out:
            torch.autograd.backward(loss)
        else:
            amp.backward(loss)
        if "step" in left_out:
            state["optimizer"].step()
        else:
            amp.step(state["optimizer"])
        if "update" not in left_out:
            amp.update()

    return step


@pytest.mark.parametrize(
    ("call", "num_calls"),
    [("autocast", 1), ("backward", 1), ("step", MAX_CALLS_WITHOUT_STEP), ("update", MAX_CALLS_WITHOUT_STEP)],
)
def test_a_step_that_leaves_a_call_out_says_which(call: str, num_calls: int) -> None:
    made = training(Workload(build=net_and_optimizer, train_step=faulty_step(call), data=batches), "bf16")
    for _ in range(num_calls - 1):
        made.forward_backward(made.next_batch())
    with pytest.raises(WorkloadError, match=rf"did not call amp\.{call}\(") as caught:
        made.forward_backward(made.next_batch())
    assert "with amp.autocast():" in caught.value.next_step


@pytest.mark.parametrize("nothing", [None, {"lr": 0.1}])
def test_a_state_without_modules_and_optimizers(nothing: Any) -> None:
    with pytest.raises(WorkloadError, match="without any module or optimizer") as caught:
        training(Workload(build=lambda: nothing, train_step=lambda *_: None, data=batches))
    assert "Return everything" in caught.value.next_step


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loop_that_steps_every_fourth_call_is_warmed_up_to_its_first_step(precision: Precision) -> None:
    workload = loop_samples.accumulating()
    made = training(workload, precision)
    lengths: list[int] = []
    time_steps(made, lambda number, _: lengths.append(number), lambda _: None)
    assert lengths[:4] == [0] * 4
    held: Any = made.parts[0]
    assert held["num_steps"] == held["num_calls"] // 4 > 0


def penalty_step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
    """A gradient penalty, as PyTorch's examples write it."""
    batch = batch.requires_grad_()
    with amp.autocast():
        output = state["net"](batch).float().square().mean()
    (scaled,) = torch.autograd.grad(amp.scale(1000 * output), batch, create_graph=True)
    gradient = scaled / amp.get_scale()
    with amp.autocast():
        penalty = gradient.square().sum()
    amp.backward(output + penalty)
    amp.step(state["optimizer"])
    amp.update()
    state["optimizer"].zero_grad()


def test_a_penalty_that_overflows_is_a_step_to_skip_and_no_broken_loss() -> None:
    workload = Workload(build=net_and_optimizer, train_step=penalty_step, data=batches)
    made = make_training(
        workload, make_model(workload), msgspec.structs.replace(spec("fp16"), loss_scale=LossScale(init_scale=2.0**16))
    )
    before = everything(made.model)
    loss = made.forward_backward(made.next_batch())
    assert loss.isfinite()
    assert made.loss_scale() == 2.0**15
    torch.testing.assert_close(everything(made.model), before, rtol=0, atol=0)

"""The `amp` of trials and checks takes what a step written for `PrecisionController` calls it with."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.passes import GradientCollectingAmp
from autotune_amp.precision.step_amp import StepAmp
from autotune_amp.precision.torch_state import autocast

# Left out, with the reason; GradScaler's own state_dict and load_state_dict are there.
NOT_IN_A_STEP = {
    "close": "ends the reports and the handling of SIGTERM of a run, which a trial is not",
    "detach": "lets go of a model that is no longer trained",
    "disable": "the precision is what is tried",
    "discard_window": "for a framework that leaves a window early, which a trial never does",
    "enable": "as disable",
    "is_unscaled": "for a framework that takes the steps, which asks it before it unscales",
    "load": "makes a controller, before the loop",
    "open": "as close",
    "save_stats": "writes a file about a run, which a trial is not",
    "set_precision": "the precision is what is tried",
    "windows": "goes around the steps: a trial gives train_step its batches one by one",
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize("kind", [StepAmp, GradientCollectingAmp])
def test_it_has_the_controllers_methods_with_the_same_parameters(kind: type) -> None:
    wanted = public(PrecisionController) - NOT_IN_A_STEP.keys()
    assert wanted <= public(kind)
    for name in wanted:
        theirs = getattr(PrecisionController, name)
        if callable(theirs):
            given, expected = (inspect.signature(owner) for owner in (getattr(kind, name), theirs))
            named = [p.name for p in expected.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
            by_keyword = [p.name for p in expected.parameters.values() if p.kind is p.KEYWORD_ONLY]
            given.bind(*[None] * len(named), **dict.fromkeys(by_keyword))
            assert set(named) <= set(given.parameters) or name == "step", name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_can_read_the_config_and_the_status(precision: Precision) -> None:
    controller, amp = scalers(precision)
    config = controller.config
    for each in (controller, amp, GradientCollectingAmp(nullcontext, "cpu", config, {}, 2.0**14)):
        assert each.config == config
        status = each.status()
        given = vars(status) if isinstance(status, SimpleNamespace) else msgspec.structs.asdict(status)
        assert set(given) == set(controller.status().__struct_fields__)
        assert (status.precision, status.num_updates, status.is_enabled) == (precision, 0, True)
        assert status.scale in (None, each.get_scale())
        assert (status.scale is None) == (precision == "bf16")


def scalers(precision: Precision) -> list[Any]:
    loss_scale = LossScale(init_scale=2.0**14, growth_interval=2) if precision == "fp16" else None
    config = AmpConfig(precision=precision, batch_size=4, loss_scale=loss_scale)
    return [PrecisionController(config, "cpu"), StepAmp(lambda: autocast(precision, "cpu"), "cpu", config)]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_taken_and_skipped_are_the_controllers(precision: Precision) -> None:
    traces = []
    for amp in scalers(precision):
        torch.manual_seed(0)
        nets = [nn.Linear(4, 1) for _ in range(3)]
        first, second, idle = (torch.optim.SGD(net.parameters(), lr=0.1) for net in nets)
        called: list[str] = []
        amp.on_step(lambda called=called: called.append("any"))
        amp.on_step(lambda called=called: called.append("second"), second)
        taken = []
        for factor in (1.0, 1e4, 1.0, 1.0):
            with amp.autocast():
                outputs = [net(torch.ones(4, 4)) for net in nets[:2]]
            amp.scale(outputs[0].float().mean()).backward()
            amp.backward(factor * outputs[1].float().mean(), retain_graph=False)
            taken.append([bool(amp.step(optimizer)) for optimizer in (first, second, idle)])
            amp.update()
            for optimizer in (first, second):
                optimizer.zero_grad()
        with amp.validation():
            dtype = nets[0](torch.ones(1, 4)).dtype
        amp.synchronize()
        weights = [net.weight.detach().clone() for net in nets]
        taken = [verdicts[:2] + ([] if precision != "fp16" else verdicts[2:]) for verdicts in taken]
        traces.append((taken, called, dtype, amp.get_scale(), amp.is_enabled() or precision != "fp16", weights))
    (*trace, weights), (*expected, their_weights) = traces[1], traces[0]
    assert trace == expected
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights, their_weights, strict=True))
    if precision == "fp16":
        assert [True, False, False] in expected[0]


def test_the_loss_of_each_call_is_seen_also_where_the_scale_is_read_before_it() -> None:
    _, amp = scalers("fp16")
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    totals = []
    for factor in (1.0, 2.0):
        amp.begin()
        amp.get_scale()  # to log it
        amp.backward(factor * net(torch.ones(1, 2)).mean())
        amp.get_scale()  # for a penalty on the gradients
        amp.scale(torch.ones(()))
        totals.append(float(amp.total_loss(needs_autocast=False)))
        amp.step(optimizer)
        amp.update()
    assert totals[1] == pytest.approx(2 * totals[0])


def test_optimizers_step_together_or_not_at_all() -> None:
    _, amp = scalers("fp16")
    nets = [nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    before = nets[0].weight.detach().clone()
    for factor, is_taken in ((1e38, False), (1.0, True)):
        for net, times in zip(nets, (1.0, factor), strict=True):
            amp.backward(times * net(torch.ones(1, 2)).mean())
        amp.unscale_(optimizers[0])
        amp.unscale_together(optimizers)
        assert {bool(amp.step(optimizer)) for optimizer in optimizers} == {is_taken}
        amp.update()
        assert torch.equal(nets[0].weight, before) is not is_taken
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_call_a_step_trains_as_the_controllers_does(precision: Precision) -> None:
    seen = []
    for amp in scalers(precision):
        torch.manual_seed(0)
        nets = [nn.Linear(4, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        taken = []
        for factor in (1.0, 1e4, 1.0, 1.0):
            stepped = amp.train_step(
                lambda: factor * sum(net(torch.ones(4, 4)).float().mean() for net in nets),  # noqa: B023
                optimizers,
                clip_norm=0.5,
            )
            taken.append((bool(stepped), stepped.loss, stepped.grad_norm))
        amp.epoch(1)
        amp.reset_stats()
        with amp.validation(precision="fp32"):
            assert nets[0](torch.ones(1, 4)).dtype == torch.float32
        seen.append((taken, [net.weight.detach().clone() for net in nets]))
    (mine, weights), (expected, their_weights) = seen
    assert all(torch.equal(one, other) for one, other in zip(weights, their_weights, strict=True))
    assert [step for step, *_ in mine] == [step for step, *_ in expected]
    for (_, loss, norm), (_, their_loss, their_norm) in zip(mine, expected, strict=True):
        assert torch.equal(loss, their_loss)
        assert torch.equal(norm, their_norm)

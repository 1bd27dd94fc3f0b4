"""Behind a fused optimizer on an accelerator verdicts come late: nothing is lost by it. Tried on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Literal, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from training import timeless

from autotune_amp import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.scaler import LAG_UPDATES, GradientCheck

Kind: TypeAlias = Literal["clean", "overflow", "bad loss"]
CLEAN: list[Kind] = ["clean"]
OVERFLOW: list[Kind] = ["overflow"]
BAD_LOSS: list[Kind] = ["bad loss"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are treated as if they were on an accelerator."""
    monkeypatch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))


def fp16(*, growth_interval: int = 2000, hysteresis: int = 1, fallback: Iterable[Precision] = ()) -> AmpConfig:
    # The floor is deeper than any sequence here descends: what to do at the floor is the policy's own matter.
    loss_scale = LossScale(
        growth_interval=growth_interval, hysteresis=hysteresis, min_scale=2.0**-24, max_scale=2.0**60
    )
    return AmpConfig(precision="fp16", batch_size=1, loss_scale=loss_scale, fallback=tuple(fallback))


class Training:
    """Two weights with an optimizer each, the first one fused. Sums of products: exact at any power of two's scale."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.weights = [nn.Parameter(torch.tensor([1.0, -2.0, 0.5])) for _ in range(2)]
        self.optimizers = [
            torch.optim.SGD(self.weights[:1], lr=0.125, fused=True),
            torch.optim.SGD(self.weights[1:], lr=0.125),
        ]
        self.num_updates = 0

    def loss(self, kind: Kind, which: int) -> Tensor:
        weight = self.weights[which]
        loss = (weight * torch.tensor([0.3, 1.7, -0.2]) * (1 + self.num_updates % 7)).sum()
        if kind == "overflow":
            loss = loss + (weight - weight.detach()).sqrt().sum()  # 0, with an infinite gradient
        return loss * float("nan") if kind == "bad loss" else loss

    def step(self, kind: Kind, which: int = 0) -> tuple[float, Tensor]:
        """The scale that was used and the weights afterwards."""
        optimizer = self.optimizers[which]
        optimizer.zero_grad()
        loss, scale = self.scaler.scale([self.loss(kind, which), torch.ones(())])
        loss.backward()  # type: ignore[no-untyped-call]
        self.scaler.step(optimizer)
        self.scaler.update()
        self.num_updates += 1
        return float(scale), torch.cat([weight.detach() for weight in self.weights])

    def run(self, kinds: Iterable[Kind]) -> list[tuple[float, Tensor]]:
        return [self.step(kind) for kind in kinds]


def steered(config: AmpConfig) -> tuple[PrecisionController, Training]:
    controller = PrecisionController(config, device="cpu")
    return controller, Training(controller)


def taken_plainly(kinds: Iterable[Kind]) -> Tensor:
    """The weights after a plain loop that leaves out what is not clean."""
    training = Training(torch.amp.GradScaler("cpu", enabled=False))
    for kind in kinds:
        if kind == "clean":
            training.optimizers[0].zero_grad()
            training.loss(kind, 0).backward()  # type: ignore[no-untyped-call]
            training.optimizers[0].step()
        training.num_updates += 1
    return torch.cat([weight.detach() for weight in training.weights])


def assert_same(got: list[tuple[float, Tensor]], expected: list[tuple[float, Tensor]]) -> None:
    assert [scale for scale, _ in got] == [scale for scale, _ in expected]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(got, expected, strict=True))


steps_of_two = st.lists(st.tuples(st.sampled_from([*CLEAN, *CLEAN, *OVERFLOW]), st.integers(0, 1)), max_size=36)


@given(steps=steps_of_two, growth_interval=st.integers(1, 5), hysteresis=st.integers(1, 2))
@settings(max_examples=60)
def test_late_verdicts_and_those_at_hand_take_turns_as_if_none_was_late(
    steps: list[tuple[Kind, int]], growth_interval: int, hysteresis: int
) -> None:
    """The first optimizer is fused; the second is not, so that the host has to know at once whether it stepped."""
    config = fp16(growth_interval=growth_interval, hysteresis=hysteresis)
    here, training = steered(config)
    expected = [training.step(kind, which) for kind, which in steps]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
        there, training = steered(config)
        assert_same([training.step(kind, which) for kind, which in steps], expected)
        there.synchronize()
        assert timeless(there.state_dict()) == timeless(here.state_dict())
    if hysteresis == 1:
        plain = Training(torch.amp.GradScaler("cpu", growth_interval=growth_interval))
        assert_same(expected, [plain.step(kind, which) for kind, which in steps])


def test_the_device_keeps_to_the_rule_while_the_host_is_behind(late: None) -> None:
    """A bad loss does not lower the scale, and overflows lower it to the floor at most."""
    loss_scale = LossScale(init_scale=1024.0, min_scale=512.0)
    training = steered(AmpConfig(precision="fp16", batch_size=1, loss_scale=loss_scale))[1]
    used = [scale for scale, _ in training.run([*BAD_LOSS, *CLEAN, *OVERFLOW * 2, *CLEAN])]
    assert used == [1024.0, 1024.0, 1024.0, 512.0, 512.0]


@pytest.mark.parametrize("ending", ["status", "synchronize", "windows", "copy"])
def test_no_callback_is_lost_at_the_end(ending: str, late: None) -> None:
    kinds = [*CLEAN * 5, *OVERFLOW, *BAD_LOSS, *CLEAN]
    controller, training = steered(fp16())
    calls: list[int] = []
    controller.on_step(lambda: calls.append(0), training.optimizers[0])
    controller.on_step(lambda: calls.append(1), training.optimizers[1])
    if ending == "windows":
        for kind, _ in controller.windows(kinds):
            training.step(kind)
    else:
        training.run(kinds)
        assert len(calls) == kinds[:-LAG_UPDATES].count("clean")
        copied = copy.deepcopy(controller) if ending == "copy" else getattr(controller, ending)()
        assert ending != "copy" or copied.status().num_steps == 6
    assert calls == [0] * kinds.count("clean")
    assert torch.equal(torch.cat([w.detach() for w in training.weights]), taken_plainly(kinds))


@given(
    kinds=st.lists(st.sampled_from([*CLEAN, *CLEAN, *OVERFLOW]), min_size=2, max_size=30),
    cut=st.integers(1, 29),
    growth_interval=st.integers(1, 5),
)
@settings(max_examples=60)
def test_a_checkpoint_holds_what_is_on_its_way_and_asking_changes_nothing(
    kinds: list[Kind], cut: int, growth_interval: int
) -> None:
    """One rank of several may save alone: the others do not know of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
        config = fp16(growth_interval=growth_interval)
        uninterrupted, training = steered(config)
        calls: list[int] = []
        uninterrupted.on_step(lambda: calls.append(training.num_updates))
        expected = training.run(kinds)

        controller, first = steered(config)
        made: list[int] = []
        controller.on_step(lambda: made.append(first.num_updates), first.optimizers[0])
        trace = first.run(kinds[:cut])
        saved = controller.state_dict()
        assert controller.state_dict() == saved
        resumed, second = steered(config)
        resumed.on_step(lambda: made.append(second.num_updates), second.optimizers[0])
        second.num_updates = first.num_updates
        for mine, theirs in zip(second.weights, first.weights, strict=True):
            mine.data.copy_(theirs)
        resumed.load_state_dict(saved)
        assert resumed.state_dict() == saved
        assert_same(trace + second.run(kinds[cut:]), expected)
        assert made == calls
        for ended in (uninterrupted, resumed):
            ended.synchronize()
        assert len(made) == len(calls) == kinds.count("clean")
        assert timeless(resumed.state_dict()) == timeless(uninterrupted.state_dict())


def test_a_restored_scale_waits_on_the_host_until_the_first_loss_tells_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(GradientCheck, "is_on_host", staticmethod(lambda tensor: False))
        controller, training = steered(fp16())
        training.run([*CLEAN, *OVERFLOW])
        saved = controller.state_dict()
    resumed, _ = steered(fp16())
    resumed._ranks.device = torch.device("meta")  # assumed, and unable to hold a number
    resumed.load_state_dict(saved)
    assert (resumed.get_scale(), resumed.state_dict()) == (saved["scale"], saved)
    assert saved["scale"] < saved["autotune_amp"]["steering"]["loss_scale"]["scale"], "the device is ahead"
    assert resumed.scale(torch.ones((), device="meta")).device == resumed._scale.device == torch.device("meta")


def test_a_scale_set_by_hand_and_a_state_loaded_leave_no_verdict_from_before(late: None) -> None:
    controller, training = steered(fp16())
    saved = controller.state_dict()
    training.run([*CLEAN * 4, *OVERFLOW * 2])
    controller.update(8.0)
    assert [scale for scale, _ in training.run([*CLEAN * 6])] == [8.0] * 6
    training.run([*CLEAN * 5, *OVERFLOW])
    controller.load_state_dict(saved)
    assert controller.state_dict() == saved


def test_a_fused_first_step_that_is_skipped_leaves_no_momentum_that_nobody_wrote(late: None) -> None:
    _, training = steered(fp16())
    training.optimizers[0] = optimizer = torch.optim.SGD(training.weights[:1], lr=0.125, momentum=0.5, fused=True)
    training.step("overflow")
    assert not optimizer.state


# -- moves -------------------------------------------------------------------------------------------------------------


def test_a_trip_leads_to_the_same_rung_and_its_burst_is_not_judged_there(late: None) -> None:
    """As many bad steps as are known late: in the new rung they would undo the move (it would not have helped)."""
    controller, training = steered(fp16(fallback=["bf16", "fp32"]))
    controller.attach(nn.Linear(1, 1))
    num_bad = LAG_UPDATES + 1
    kinds = [*CLEAN * 9, *BAD_LOSS * num_bad, *CLEAN * 9]
    trace = training.run(kinds)
    status = controller.status()
    assert status.precision == "bf16"
    assert [(record.kind, record.after) for record in status.history] == [("demotion", "bf16")]
    assert (status.num_updates, status.num_skips) == (len(kinds), num_bad)
    assert torch.equal(trace[-1][1], taken_plainly(kinds))
    assert trace[-1][0] == 1.0


def test_a_trip_before_a_wish_of_the_users_comes_first_and_the_wish_stands(late: None) -> None:
    controller, training = steered(fp16(fallback=["bf16", "fp32"]))
    controller.attach(nn.Linear(1, 1))
    training.run([*CLEAN * 9, *BAD_LOSS * 2])  # nobody knows yet
    controller.set_precision("fp32")
    assert [(record.kind, record.after) for record in controller.status().history] == [
        ("demotion", "bf16"),
        ("by_hand", "fp32"),
    ]
    controller.set_precision("fp16")
    assert training.step("clean")[0] == 65536.0

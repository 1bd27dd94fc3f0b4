"""Hard runs, and code with an autocast of its own: who is at fault, how far a move reaches, what weights became."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from resumable import NAN, FeedForward
from torch import Tensor, nn
from training import MODES, Batch, Loop, batches, fp16, same, weights

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError, NotPrecisionError
from autotune_amp.runtime.controller import PrecisionController


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def controller(config: AmpConfig | None = None, **options: Any) -> PrecisionController:
    return PrecisionController(config or fp16(), device="cpu", **options)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


@pytest.mark.parametrize(
    ("mode", "reruns", "own_autocast"),
    [
        ("eager", True, torch.float16),
        ("eager", False, None),
        ("attached then compiled", False, torch.float16),
        ("compiled then attached", True, None),
    ],
)
def test_forward_overflow_is_survived(mode: str, reruns: bool, own_autocast: torch.dtype | None) -> None:
    model = FeedForward()
    twin = copy.deepcopy(model)
    given = batches(60)
    steered = controller()
    loop = Loop(model, steered, mode=mode, reruns=reruns, own_autocast=own_autocast)
    assert not loop.step(given[0])
    assert not loop.step(given[1])
    assert same(model, twin)  # nothing was taken from the two bad steps
    status = steered.status()
    (move,) = status.history
    expected = ("pin", "fp16", ("wo",)) if reruns else ("demotion", "bf16", ())
    assert (move.kind, status.precision, status.pinned_modules) == expected
    loop.run(given[2:])
    plain = Loop(twin).run(given[2:])
    assert steered.status().num_skips == 2
    assert loop.losses[-1] == pytest.approx(plain.losses[-1], rel=0.1, abs=0.02)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_batch_is_a_skip_and_a_burst_of_them_is_not_precision(mode: str) -> None:
    model = small()
    twin = copy.deepcopy(model)
    given = batches(20)
    steered = controller(halt=False)
    loop = Loop(model, steered, mode=mode).run(given[:10])
    before, scale = weights(model), steered.get_scale()
    assert not loop.step(NAN)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())  # BatchNorm's too
    status = steered.status()
    assert (status.num_skips, status.scale, status.history) == (1, scale, ())
    loop.run([NAN] * 200)
    status = steered.status()
    assert status.precision == "fp16"
    assert {record.kind for record in status.history} == {"not_precision", "stop"}
    assert "the input of the model" in status.history[0].reason
    assert steered.get_scale() == scale
    loop.run(given[10:])
    Loop(twin, controller(), mode=mode).run(given)
    assert same(model, twin)  # as if the burst had never been


class RootOfZero(nn.Module):
    """sqrt has an infinite slope at 0, and infinity times the 0 behind it is NaN, in every precision."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * 0.0).sqrt()


class WithRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.root = RootOfZero()
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        return self.head(hidden + self.root(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mode", "precision"), list(zip(MODES, ["fp16", "bf16", "fp32"], strict=True)))
def test_a_nan_gradient_in_every_precision_halts_naming_the_module(mode: str, precision: str) -> None:
    model = WithRoot()
    before = weights(model)
    configs = {
        "fp16": fp16(),
        "bf16": AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]),
        "fp32": AmpConfig(precision="fp32", batch_size=4),
    }
    steered = controller(configs[precision])
    loop = Loop(model, steered, mode=mode)
    with pytest.raises(NotPrecisionError, match="root"):
        loop.run(batches(60))
    assert steered.status().precision == precision
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())


def half_weights() -> nn.Module:
    return nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)


def quantized() -> Any:
    """A layer that converts its inputs to half precision, as those of 4 bit do."""
    layer: Any = nn.Linear(8, 8).requires_grad_(False)
    layer.compute_dtype = torch.float16
    return layer


@pytest.mark.parametrize("make_base", [half_weights, quantized])
def test_a_frozen_low_precision_base_is_not_offered_fp32(make_base: Callable[[], nn.Module]) -> None:
    base = make_base()
    adapter = nn.Linear(8, 1)
    model = nn.Sequential(base, adapter)
    steered = controller()
    loop = Loop(model, steered, reruns=False)
    before = weights(model)
    with pytest.raises(NotPrecisionError):
        loop.run([NAN] * 200)
    moves = [(record.kind, record.after) for record in steered.status().history]
    assert ("demotion", "bf16") in moves
    assert all(after != "fp32" for _, after in moves)
    assert all(torch.equal(before[name], value) for name, value in weights(model).items())
    steered = controller(AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]), halt=False)
    Loop(model, steered, reruns=True).run([NAN] * 5)
    assert steered.status().precision == "bf16"


@pytest.mark.parametrize("attaches", [True, False])
def test_trained_weights_in_half_precision_are_not_stepped_down_to_fp32(attaches: bool) -> None:
    steered = controller(AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]), halt=False)
    loop = Loop(nn.Linear(8, 1).to(torch.bfloat16), steered, attaches=attaches, reruns=False)
    loop.run([NAN] * 3 + batches(3))
    assert steered.status().precision == "bf16"
    with pytest.raises(InvalidRequestError, match="half precision"):
        steered.set_precision("fp32")


# -- code with an autocast of its own, and where it is not reached -----------------------------------------------------


class Method(nn.Module):
    """As Lightning's modules: the loop calls a method, not forward, and the autocast is inside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def run(module: Method, controller: PrecisionController, given: list[Batch], current: list[Batch]) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for batch in given:
        current[:] = [batch]
        optimizer.zero_grad()
        controller.backward(module.training_step(batch))
        controller.step(optimizer)
        controller.update()


@pytest.mark.parametrize("reruns", [True, False])
@pytest.mark.parametrize("what", ["the module", "what it wraps"])
def test_a_method_that_is_not_forward(what: str, reruns: bool) -> None:
    module = Method(FeedForward())
    current: list[Batch] = []
    controller = PrecisionController(fp16(), device="cpu")
    rerun = (lambda: module.training_step(current[0])) if reruns else None
    controller.attach(module if what == "the module" else module.net, rerun)
    before = weights(module)
    is_told = what == "the module" and not reruns
    with pytest.raises(NoRungFitsError, match="10 steps in a row") if is_told else nullcontext():
        run(module, controller, batches(30), current)
    status = controller.status()
    moves = [(record.kind, record.after) for record in status.history]
    if reruns:  # a pin reaches its module whatever calls it
        assert moves == [("pin", "fp16")]
        assert status.num_steps == 28
    elif what == "what it wraps":
        assert moves == [("demotion", "bf16")]
        assert status.num_steps == 28
    else:  # seen at the layers after one window: scaled as the loop is written, said, and stopped in the end
        assert moves[:2] == [("demotion", "bf16"), ("advice", "fp16")]
        assert (status.precision, status.scale, status.is_advisory) == ("fp16", 1024.0, True)
        assert all(torch.equal(before[name], value) for name, value in weights(module).items())
        with pytest.raises(InvalidRequestError, match="advisory"):
            controller.set_precision("bf16")


def test_a_rerun_in_another_precision_than_asked_for_decides_nothing() -> None:
    """Two modules overflow, too many to pin; "fp32" would run in fp16, and be called not precision's fault."""
    module = Method(nn.Sequential(FeedForward(), nn.Linear(1, 8), FeedForward()))
    current: list[Batch] = []
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(module, lambda: module.training_step(current[0]))
    run(module, controller, batches(4), current)
    assert "not_precision" not in {record.kind for record in controller.status().history}


def test_a_loop_in_another_precision_than_the_config_is_brought_into_it() -> None:
    """As after a restart with the config of a DemotedError."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    module = Method(net)
    seen: list[Any] = []
    net[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    controller = PrecisionController(AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]), device="cpu")
    controller.attach(net)
    run(module, controller, batches(4), [])
    assert seen == [torch.float16, *3 * [torch.bfloat16]]
    assert not controller.status().is_advisory


def test_a_layer_that_the_user_keeps_in_fp32_is_no_sign_of_anything() -> None:
    class Island(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(inputs.float())

    module = Method(nn.Sequential(nn.Linear(8, 8), Island(8, 1)))
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(module.net)
    controller.set_precision("bf16")
    run(module, controller, batches(3), [])
    status = controller.status()
    assert (status.precision, status.is_advisory) == ("bf16", False)


def failing() -> Tensor:
    raise NameError("inputs")


def healthy() -> Tensor:
    return nn.Linear(8, 1)(torch.zeros(1, 8)).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("rerun", "num_skips"), [(failing, 2), (healthy, 12)])
def test_a_closure_that_fails_or_does_not_show_what_does_keeps_no_run_from_moving(
    rerun: Callable[[], Tensor], num_skips: int
) -> None:
    model = FeedForward()
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(model, rerun)
    run(Method(model), controller, batches(20), [])
    status = controller.status()
    assert (status.precision, status.num_steps, status.num_skips) == ("bf16", 20 - num_skips, num_skips)


class OnlyInHalf(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.dtype == torch.float32:
            raise TypeError("no kernel for fp32")
        return inputs


def test_a_run_is_not_moved_to_a_precision_in_which_its_model_raises() -> None:
    steered = controller(AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"]))
    loop = Loop(nn.Sequential(nn.Linear(8, 8), OnlyInHalf(), nn.Linear(8, 1)), steered).run(batches(4))
    with pytest.raises(NoRungFitsError, match="no kernel"):
        loop.run([NAN, NAN])
    assert steered.status().precision == "bf16"


def test_what_the_model_cannot_run_in_is_refused_by_hand_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False), nn.Linear(8, 1))
    controller = PrecisionController(fp16(), device="cpu")
    controller.attach(model)
    with pytest.raises(InvalidRequestError, match="half precision"):
        controller.set_precision("fp32")
    with pytest.raises(InvalidRequestError, match="half precision"):
        controller.disable()
    controller.set_precision("bf16")


def test_an_attached_model_can_be_copied_and_pickled_and_attached_anew() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    first = PrecisionController(fp16(pinned_modules=("0",)), device="cpu")
    first.attach(model, lambda: model(torch.zeros(2, 8)).sum())
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), _saved_and_loaded(model)):
        made.load_state_dict(model.state_dict())
        assert same(made, model)
    averaged = torch.optim.swa_utils.AveragedModel(nn.parallel.DataParallel(model).module)
    averaged.update_parameters(model)
    PrecisionController(fp16(), device="cpu").attach(model)  # the pins of the first are not the second's
    assert model[0](torch.zeros(2, 8)).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert model[0](torch.zeros(2, 8)).dtype == torch.float16


def test_a_model_saved_while_it_is_attached_is_loaded_without_this_package() -> None:
    model = small()
    steered = controller()
    steered.attach(model)
    assert b"autotune_amp" not in pickle.dumps(model)
    loaded = pickle.loads(pickle.dumps(model))
    loaded.load_state_dict(model.state_dict())  # runs what was a hook of the controller
    assert same(loaded, model)


def _saved_and_loaded(model: nn.Module) -> Any:
    written = io.BytesIO()
    torch.save(model, written)
    return torch.load(io.BytesIO(written.getvalue()), weights_only=False)


def test_a_detached_controller_leaves_flags_as_found_and_never_runs_the_closure_again() -> None:
    flags = torch.backends.cuda.matmul
    flags.fp32_precision = "tf32"
    model, reruns = nn.Linear(8, 1), []
    controller = PrecisionController(AmpConfig(precision="fp32", batch_size=4, as_found=True), "cpu", halt=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train(num_updates: int) -> None:
        for _ in range(num_updates):
            controller.backward(model(torch.full((4, 8), torch.nan)).sum())
            controller.step(optimizer)
            controller.update()

    controller.attach(model, lambda: reruns.append(1) or model(torch.ones(4, 8)).sum())  # type: ignore[func-returns-value]
    train(2)
    assert len(reruns) == 1
    controller.disable()
    assert flags.fp32_precision == "ieee"
    controller.detach()
    assert flags.fp32_precision == "tf32"
    controller.enable()
    train(400)
    assert len(reruns) == 1


def test_a_model_detached_while_its_diagnosis_waits_is_trained_on() -> None:
    model = small()
    steered = controller()
    loop = Loop(model, steered)
    for _ in range(2):
        with steered.autocast():
            loop.step(NAN)
    steered.detach()
    loop.run(batches(5))
    assert (steered.status().num_steps, steered.status().history) == (5, ())


def test_pins_that_a_diagnosis_found_outlast_a_detached_model() -> None:
    model = FeedForward()
    steered = controller()
    Loop(model, steered).run(batches(4))
    assert steered.status().pinned_modules == ("wo",)
    steered.detach()
    assert type(model.wo) is nn.Linear
    assert steered.config.pinned_modules == tuple(steered.state_dict()["autotune_amp"]["pinned"]) == ("wo",)
    steered.attach(model)
    assert steered.status().pinned_modules == ("wo",)
    steered.detach()
    steered.attach(nn.Sequential(nn.Linear(2, 2)))
    assert steered.status().pinned_modules == (), "its modules have other names"

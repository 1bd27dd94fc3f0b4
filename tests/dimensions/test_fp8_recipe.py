"""Linear layers in fp8 by torchao, emulated where there is no card: on live objects, in trials, checks and a run."""

from __future__ import annotations

import copy
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import fp8_samples
import pytest
import torch
from model_zoo import ZOO, assert_trains_as_prepared, workload
from torch import Tensor, nn
from torch.nn.utils import prune

from autotune_amp import AmpConfig, PrecisionController, Workload, prepare
from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Fidelity, Measurement
from autotune_amp.core.setting import Fp8Recipe, Setting
from autotune_amp.dimensions import FP8_RECIPE
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import fp8, torch_state
from autotune_amp.precision.forward_wrapper import pin_fp32, unpin
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.worker import supported_values

CPU = torch.device("cpu")
RECIPES: tuple[Fp8Recipe, ...] = ("rowwise", "tensorwise")


@pytest.fixture(autouse=True, scope="module")
def _torchao() -> None:
    pytest.importorskip("torchao")


def config(recipe: Fp8Recipe = "rowwise", **fields: Any) -> AmpConfig:
    return AmpConfig(precision="fp8", batch_size=fp8_samples.NUM_SAMPLES, fp8_recipe=recipe, **fields)


def gradients(model: nn.Module, batch: Any, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = fp8_samples.loss(model, batch)
    torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def in_fp8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Fp8Linear"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_middle_layers_multiply_in_fp8_and_come_back_as_they_were(recipe: Fp8Recipe) -> None:
    model, batch = fp8_samples.model(), fp8_samples.batch()
    before, layers, names = list(model.parameters()), list(model), list(model.state_dict())
    exact, around = gradients(model, batch, None), gradients(model, batch)
    optimizer = torch.optim.AdamW(model.parameters())
    assert prepare(config(recipe), model, optimizer) == (model, optimizer)
    assert in_fp8(model) == ["2", "4"]
    assert [a is b for a, b in zip(model.parameters(), before, strict=True)] == [True] * len(before)
    assert list(model) == layers, "the objects stay, and with them their hooks"
    assert list(model.state_dict()) == names
    found = gradients(model, batch)
    assert 0.01 < distance(found, exact) < 0.5, "four bits of a significand"
    assert distance(gradients(model, batch, None), exact) == 0, "without autocast they are what they were"
    prepare(config(recipe), model, optimizer)  # a second time does nothing
    assert distance(gradients(model, batch), found) == 0
    prepare(config("tensorwise" if recipe == "rowwise" else "rowwise"), model, optimizer)
    assert distance(gradients(model, batch), found) > 0, "the other recipe takes its place"
    fp8.set_recipe([model], None, CPU)
    assert [type(layer) for layer in model] == [type(layer) for layer in fp8_samples.model()]
    assert [layer.__dict__.keys() for layer in model] == [layer.__dict__.keys() for layer in fp8_samples.model()]
    assert distance(gradients(model, batch), around) == 0


def test_copies_pickles_pins_and_checkpoints_go_on() -> None:
    model, batch = fp8_samples.model(), fp8_samples.batch()
    exact = gradients(model, batch, None)
    fp8_samples.model().load_state_dict(prepare(config(), model, None)[0].state_dict())
    found = gradients(model, batch)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert in_fp8(other) == ["2", "4"]
        assert distance(gradients(other, batch), found) == 0
    pin_fp32(model, "cpu")
    assert distance(gradients(model, batch), exact) == 0, "what is pinned is in fp32, its fp8 layers too"
    fp8.set_recipe([model], None, CPU)
    fp8.set_recipe([model], "rowwise", CPU)
    assert distance(gradients(model, batch), exact) == 0, "under a pin of before"
    unpin(model)
    assert distance(gradients(model, batch), found) == 0


def test_which_models_can_have_it() -> None:
    found = {name: supported_values(LiveTraining([ZOO[name][0]()], [], CPU))["fp8_recipe"]["rowwise"] for name in ZOO}
    assert {name for name, why in found.items() if why is None} == {"t5", "vit"}
    assert all("multiples of 16" in str(found[name]) for name in ("convnet", "gpt2", "lstm"))
    odd = nn.Sequential(nn.Linear(32, 40), nn.Linear(40, 40), nn.Linear(40, 32), nn.Linear(32, 32))
    with pytest.raises(InvalidRequestError, match="multiples of 16"):
        prepare(config(), odd, None)
    half = fp8_samples.model()
    half[2].bfloat16(), half[4].bfloat16()
    with pytest.raises(InvalidRequestError, match="fp32 weights"):
        prepare(config(), half, None)
    assert in_fp8(odd) == in_fp8(half) == []


def test_without_torchao_the_line_to_install_it_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torchao>=0.18" in str(
        FP8_RECIPE.unsupported_reason("rowwise", LiveTraining([fp8_samples.model()], [], CPU))
    )


def test_layers_of_the_users_own_are_known() -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = fp8_samples.model()
    assert supported_values(LiveTraining([model], [], CPU))["fp8_recipe"] == dict.fromkeys(RECIPES)
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    found = supported_values(LiveTraining([model], [], CPU))["fp8_recipe"]
    assert found == dict.fromkeys(RECIPES, "it is so already")
    fp8.set_recipe([model], None, CPU)
    assert type(model[2]).__name__ == "Float8Linear", "only ours are taken off"


def test_what_something_else_computes_is_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(*fp8_samples.model(), nn.Linear(fp8_samples.NUM_CLASSES, 16), Own(16, 16), nn.Linear(16, 4))
    prune.l1_unstructured(model[2], "weight", 0.5)  # type: ignore[no-untyped-call] # torch does not type it
    model[4].__dict__["forward"] = model[4].forward  # as Accelerate's hooks do
    assert "multiples of 16" in str(FP8_RECIPE.unsupported_reason("rowwise", LiveTraining([model], [], CPU)))
    model.insert(3, nn.Linear(64, 64))
    prepare(config(), model, None)
    assert in_fp8(model) == ["3"]


def test_of_each_model_the_first_and_the_last_layer_stay() -> None:
    together, apart = ([fp8_samples.model(), fp8_samples.model()] for _ in range(2))
    FP8_RECIPE.change("rowwise", LiveTraining(together, [], CPU))
    for model in apart:
        prepare(config(), model, None)
    assert [in_fp8(model) for model in together] == [in_fp8(model) for model in apart] == [["2", "4"]] * 2


def test_any_number_of_samples_will_do() -> None:
    model = prepare(config(), fp8_samples.model(), None)[0]
    batch = fp8_samples.batch(7)
    assert 0.01 < distance(gradients(model, batch), gradients(model, batch, None)) < 0.5


@pytest.mark.parametrize("name", ["t5", "vit"])
def test_a_trial_trains_bit_for_bit_what_prepare_sets_up(name: str) -> None:
    assert in_fp8(assert_trains_as_prepared(name, Setting(precision="fp8", batch_size=4, fp8_recipe="tensorwise")))


def checked(setting: Setting, workload: Workload | None = None) -> Fidelity:
    context = Context(workload or fp8_samples.workload(), is_kept=False)
    context.open("here")
    spec = Check(what="fidelity", candidate=setting, device="cpu", torch_state=torch_state.capture())
    found = checks.check(context, spec, lambda _: None)
    assert isinstance(found, Fidelity), found
    return found


def test_it_is_held_against_fp32_and_is_noisier_than_what_is_around_it() -> None:
    bf16 = checked(Setting(precision="bf16", batch_size=16))
    found = [checked(Setting(precision="fp8", batch_size=16, fp8_recipe=recipe)) for recipe in RECIPES]
    for each in found:
        assert each.precision == "fp8"
        assert each.verdict != "unchecked", each.reason
        assert each.noise_ratio is not None
        assert bf16.noise_ratio is not None
        assert each.noise_ratio > 2 * bf16.noise_ratio
        assert each.num_paired_steps > 0, "a training too"


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        *(("t5", beside) for beside in ({"activation_checkpointing": "blocks"}, {"optimizer_impl": "fused"})),
        *(("vit", beside) for beside in ({"activation_checkpointing": "blocks"}, {"memory_format": "channels_last"})),
        ("vit", {"optimizer_impl": "foreach"}),
    ],
)
def test_beside_each_other_dimension_it_gives_the_gradient_of_fp32(name: str, beside: dict[str, Any]) -> None:
    setting = Setting(precision="fp8", batch_size=4, fp8_recipe="tensorwise", **beside)
    found = checked(setting, workload(name))
    assert found.verdict == "faithful", found.reason
    assert found.gradient_cosine is not None
    assert found.gradient_cosine > 0.95, "four bits of a significand, in models of two layers"


# -- a run that is under way -------------------------------------------------------------------------------------------


class Run:
    """A model in fp8 under a controller that can run its batch again."""

    def __init__(self, *, rerun: bool = True, **fields: Any) -> None:
        self.model = fp8_samples.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = fp8_samples.batch()
        plans = [FallbackPlan(precision=name, batch_size=fp8_samples.NUM_SAMPLES) for name in ("bf16", "fp32")]
        self.controller = PrecisionController(config(fallback=plans, **fields), "cpu")
        self.controller.attach(self.model, self.loss if rerun else None)

    def loss(self) -> Tensor:
        return fp8_samples.loss(self.model, self.batch)

    def step(self) -> float:
        with self.controller.autocast():
            loss = self.loss()
        self.controller.backward(loss)
        self.controller.step(self.optimizer)
        self.controller.update()
        self.optimizer.zero_grad()
        return float(loss.detach())


def test_the_controller_steps_down_over_the_same_parameters_and_up_again() -> None:
    run = Run()
    weights = list(run.model.parameters())
    seen = []
    for precision in ("bf16", "fp32", "fp8"):
        run.step()
        seen.append((run.controller.status().precision, in_fp8(run.model)))
        run.controller.set_precision(precision)
    run.step()
    seen.append((run.controller.config.precision, in_fp8(run.model)))
    assert seen == [("fp8", ["2", "4"]), ("bf16", []), ("fp32", []), ("fp8", ["2", "4"])]
    assert run.controller.config.fp8_recipe == "rowwise"
    assert all(a is b for a, b in zip(weights, run.model.parameters(), strict=True))
    assert len(run.optimizer.state) == len(weights), "each was trained all the while"
    run.controller.detach()
    assert in_fp8(run.model) == [], "as it was before it was attached"


def test_where_the_layers_in_fp8_fail_the_diagnosis_finds_bf16_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune_amp.precision.fp8_linear import Fp8Linear

    run = Run()
    run.step()
    real = Fp8Linear.forward
    monkeypatch.setattr(Fp8Linear, "forward", lambda self, x: real(self, x) * float("nan"))  # as a scale of 0 gives
    for _ in range(12):
        run.step()
        if run.controller.status().precision != "fp8":
            break
    (move,) = run.controller.status().history
    assert (move.kind, move.before, move.after) == ("demotion", "fp8", "bf16")
    assert in_fp8(run.model) == []
    assert torch.isfinite(torch.tensor(run.step()))


def test_a_loop_that_attaches_no_model_is_told_before_it_trains_in_something_else() -> None:
    model = fp8_samples.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    controller = PrecisionController(config(), "cpu")
    with controller.autocast():
        loss = fp8_samples.loss(model, fp8_samples.batch())
    controller.backward(loss)
    with pytest.raises(InvalidRequestError, match="no model is attached") as raised:
        controller.step(optimizer)
    assert "attach(model)" in raised.value.next_step


def test_a_model_that_cannot_be_in_fp8_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
    controller = PrecisionController(config(), "cpu")
    with pytest.raises(InvalidRequestError, match="multiples of 16"):
        controller.attach(plain)
    assert [type(layer) for layer in plain] == [nn.Linear, nn.Linear]
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InvalidRequestError, match="torchao"):
            controller.attach(fp8_samples.model())
    model = fp8_samples.model()
    controller.attach(model)
    assert in_fp8(model) == ["2", "4"]


def test_a_run_that_goes_on_below_fp8_cannot_be_moved_up_without_its_model() -> None:
    run = Run()
    run.step()
    run.controller.set_precision("bf16")
    saved = run.controller.state_dict()
    model = fp8_samples.model()
    optimizer = torch.optim.AdamW(model.parameters())
    controller = PrecisionController(config(fallback=["bf16", "fp32"]), "cpu")
    controller.load_state_dict(saved)
    with controller.autocast():
        loss = fp8_samples.loss(model, run.batch)
    controller.backward(loss)
    controller.step(optimizer)
    controller.update()
    with pytest.raises(InvalidRequestError, match="no model is attached"):
        controller.set_precision("fp8")
    controller.attach(model)
    controller.set_precision("fp8")
    assert in_fp8(model) == ["2", "4"]


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_it_is_measured_and_checked(recipe: Fp8Recipe) -> None:
    # In a process of its own, as a search has it: the compiler leaves threads behind.
    path = (str(Path(__file__).parent), *sys.path)
    payload = Payload(target=f"{Path(fp8_samples.__file__)}:workload", path=path)
    setting = Setting(precision="fp8", batch_size=16, fp8_recipe=recipe, compile="default")
    with LocalBackend(payload, "kept", Watcher()) as backend:
        state = backend.load(120)
        backend.open("cpu", None, 120)
        found = backend.submit(Trial(candidate=setting, device="cpu", torch_state=state)).result()
        assert isinstance(found, Measurement), found
        judged = backend.submit(Check(what="fidelity", candidate=setting, device="cpu", torch_state=state)).result()
    assert isinstance(judged, Fidelity), judged
    assert judged.verdict != "unchecked", judged.reason
    eager = checked(Setting(precision="fp8", batch_size=16, fp8_recipe=recipe))
    assert judged.noise_ratio == pytest.approx(eager.noise_ratio, rel=0.5)

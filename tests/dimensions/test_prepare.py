"""prepare() on live objects: what it sets up, what it leaves alone, what it refuses; trials run the same code."""

from __future__ import annotations

import copy
import shutil
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import loop_samples
import pytest
import torch
from model_zoo import ZOO, Recurrent, assert_trains_as_prepared, convnet, gpt2, workload
from torch import nn

from autotune_amp import AmpConfig, prepare
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import COMPILE
from autotune_amp.dimensions.compile import compile_in_place
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.precision import torch_state
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial import checks
from autotune_amp.trial.context import Context, LoopState, make_model
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.timing import CompileWatch
from autotune_amp.trial.training import make_training
from autotune_amp.trial.worker import supported_values

CPU = torch.device("cpu")
NEEDS_CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")
VALUES: dict[str, Any] = {
    "weights": "bf16",
    "memory_format": "channels_last",
    "activation_checkpointing": "blocks",
    "optimizer_impl": "fused",
    "compile": "default",
}
# What a model cannot have, with a word of the reason.
ILLEGAL = {
    ("convnet", "activation_checkpointing"): "BatchNorm",
    ("lstm", "memory_format"): "convolution",
    ("gpt2", "memory_format"): "convolution",
    ("t5", "memory_format"): "convolution",
    ("lstm", "activation_checkpointing"): "repeated blocks",
}
# What some CPUs cannot run: oneDNN's LSTM in bf16.
NOT_HERE = {("lstm", "weights")}


def config(**values: Any) -> AmpConfig:
    return AmpConfig(precision="bf16", batch_size=4, **values)


def legal(model: str, names: tuple[str, ...]) -> bool:
    return not any((model, name) in ILLEGAL or (model, name) in NOT_HERE for name in names)


def live_training(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> LiveTraining:
    return LiveTraining([model], [kind(model.parameters(), **options)], CPU)


def one_step(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=name != "lstm"):
        loss = ZOO[name][1](model, ZOO[name][2](4))
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ZOO)
def test_the_objects_stay_and_a_checkpoint_loads_with_and_without(name: str) -> None:
    names = tuple(n for n in VALUES if n != "compile" and legal(name, (n,)))
    model = ZOO[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5)
    one_step(name, model, optimizer)  # its state is carried over
    keys, shapes = list(model.state_dict()), [p.shape for p in model.parameters()]
    parameters = list(model.parameters())
    found = prepare(config(**{n: VALUES[n] for n in names}), model, optimizer)
    assert found[0] is model
    assert found[1] is optimizer
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [p.shape for p in model.parameters()] == shapes
    assert list(model.state_dict()) == keys
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.5}
    assert all(group["fused"] for group in optimizer.param_groups)
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    one_step(name, model, optimizer)
    schedule.step()
    plain = ZOO[name][0]()
    plain.load_state_dict(model.state_dict())
    torch.optim.AdamW(plain.parameters()).load_state_dict(optimizer.state_dict())
    model.load_state_dict(ZOO[name][0]().state_dict())
    prepare(config(**{n: VALUES[n] for n in names}), model, optimizer)  # is so already
    one_step(name, model, optimizer)


def test_each_dimension_is_set_up() -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.autograd.backward(model(torch.randn(2, 3, 8, 8)).sum())
    optimizer.step()
    prepare(config(weights="bf16", memory_format="channels_last", optimizer_impl="foreach"), model, optimizer)
    weight = model[0].weight
    momentum = optimizer.state[weight]["momentum_buffer"]
    assert (weight.dtype, momentum.dtype, model[1].weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert momentum.is_contiguous(memory_format=torch.channels_last), "a fused step wants both alike"
    assert optimizer.param_groups[0]["foreach"]
    assert model[1].running_mean.dtype == torch.float32
    model.compile(backend="eager")
    prepare(config(compile="default"), model, optimizer)  # is so already


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_checkpoint_from_before_keeps_the_implementation_and_goes_on_under_a_scaler(kind: Any) -> None:
    model = nn.Linear(4, 2)
    before = kind(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    before.step()
    saved = copy.deepcopy(before.state_dict())
    optimizer = kind(model.parameters(), lr=0.01)
    prepare(config(optimizer_impl="fused"), model, optimizer)
    optimizer.load_state_dict(saved)
    assert all(group["fused"] for group in optimizer.param_groups)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    weight = model.weight.detach().clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(model.weight, weight)


class Wrapped(nn.Module):
    """As PEFT's: it answers for the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.base = gpt2()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class Hostile(nn.Linear):
    @property
    def supports_gradient_checkpointing(self) -> bool:
        raise KeyError("who asks?")


def test_a_look_at_any_model_ends_with_an_answer() -> None:
    assert supported_values(live_training(Wrapped()))["activation_checkpointing"]["blocks"] is None
    assert "who asks?" in str(supported_values(live_training(Hostile(2, 2)))["activation_checkpointing"]["blocks"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("kind", ["torch's own", "the user's"])
def test_a_model_of_any_class_is_compiled_in_place(kind: str) -> None:
    net, batch = Recurrent(), torch.ones(2, 4, dtype=torch.long)
    model = net if kind == "the user's" else nn.Sequential(net.embed, nn.Flatten(), nn.Linear(64, 2))
    names = list(model.state_dict())
    compile_in_place(model, backend="eager")
    with CompileWatch(lambda: None) as watch:
        model(batch)
    assert watch.count() > 0
    assert list(model.state_dict()) == names


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # the compiler's own
def test_of_a_lightning_module_the_parts_are_compiled_that_its_step_calls() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss, self.heads = nn.Linear(2, 2), nn.MSELoss(), nn.ModuleList([nn.Linear(2, 1)])

        def training_step(self, batch: Any) -> Any:
            return self.loss(self.heads[0](self.net(batch)), batch)

    module = Module()
    COMPILE.change_once("default", LiveTraining([module], [], CPU))
    compiled = [name for name, part in module.named_modules() if part._compiled_call_impl is not None]
    assert compiled == ["net", "heads.0"]


def test_checkpointed_blocks_compute_again_and_give_the_same_gradient() -> None:
    torch.manual_seed(0)
    plain: Any = nn.ModuleDict({"own": nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.3) for _ in range(2)))})
    shared = plain["own"][0]
    plain["own"].append(shared)  # a block may stand in several places
    model = copy.deepcopy(plain)
    passes = []
    model["own"][1].register_forward_pre_hook(lambda *_: passes.append(1))
    prepare(config(activation_checkpointing="blocks"), model, None)
    x = torch.randn(3, 2, 8)
    gradients = []
    for one in (plain, model):
        torch.manual_seed(1)
        one["own"](x).square().mean().backward()
        gradients.append([p.grad for p in one.parameters()])
    assert len(passes) == 2
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_module_alone_of_its_class_is_no_repeated_block() -> None:
    body = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.TransformerEncoderLayer(4, 2, 8)]
    assert "repeated blocks" in str(
        supported_values(live_training(nn.Sequential(*body)))["activation_checkpointing"]["blocks"]
    )
    blocks = [nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2)]
    model = nn.Sequential(*body[:1], *blocks)
    prepare(config(activation_checkpointing="blocks"), model, None)
    assert [type(module).__name__ for module in model] == ["Sequential", "CheckpointWrapper", "CheckpointWrapper"]


def test_what_cannot_be_is_said_before_anything_is_changed() -> None:
    for (name, dimension), word in ILLEGAL.items():
        model = ZOO[name][0]()
        before = copy.deepcopy(model.state_dict())
        asked = config(weights="bf16", **{dimension: VALUES[dimension]})
        with pytest.raises(InvalidRequestError, match=word):
            prepare(asked, model, None)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert all(p.dtype == torch.float32 for p in model.parameters())
    net = Recurrent()
    found = supported_values(live_training(net, torch.optim.Rprop))
    assert "fused" in str(found["optimizer_impl"]["fused"])
    assert found["optimizer_impl"]["foreach"] is None

    class Own(torch.optim.SGD):
        """A custom optimizer: nobody knows what its step does beside."""

    assert "Own" in str(supported_values(live_training(net, Own))["optimizer_impl"]["fused"])
    momentum = supported_values(live_training(net, torch.optim.SGD, momentum=0.9))["optimizer_impl"]
    assert ("uninitialised" in str(momentum["fused"]), momentum["foreach"]) == (True, None)
    assert found["compile"]["reduce-overhead"] is not None, "CUDA's alone"
    net.compile(backend="eager")
    assert supported_values(live_training(net))["compile"]["default"] == "it is so already"
    checkpointing: Any = gpt2()
    checkpointing.activation_checkpointing_enable()
    assert supported_values(live_training(checkpointing))["activation_checkpointing"]["blocks"] == "it is so already"
    for value in ("foreach", "fused"):
        assert supported_values(live_training(net, **{value: True}))["optimizer_impl"][value] == "it is so already"


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler++")
    assert "no-such-compiler++" in str(supported_values(live_training(convnet()))["compile"]["default"])


@pytest.mark.parametrize("name", ["convnet", "lstm"])
def test_a_trial_trains_bit_for_bit_what_prepare_sets_up(name: str) -> None:
    names = [n for n in VALUES if n not in ("compile", "weights") and (name, n) not in ILLEGAL]
    setting = Setting(precision="fp32", batch_size=4, **{n: VALUES[n] for n in names})
    assert_trains_as_prepared(name, setting)


def test_a_kept_process_sets_up_copies(tmp_path: Any) -> None:
    context = Context(workload("convnet"), is_kept=True)
    context.open("here")
    plain = Setting(precision="fp32", batch_size=4)
    first = context.model_for(plain, CPU)
    changed = context.model_for(Setting(precision="fp32", batch_size=4, memory_format="channels_last"), CPU)
    assert changed is not first
    torch.testing.assert_close(changed.state_dict(), first.state_dict())
    assert context.model_for(plain, CPU) is first


def test_the_models_and_optimizers_of_a_loop_are_set_up_and_checked() -> None:
    loop = loop_samples.LOOPS["gan"]()
    setting = Setting(precision="fp32", batch_size=8, optimizer_impl="foreach")
    model = make_model(loop)
    assert isinstance(model, LoopState)
    training = make_training(loop, model, Trial(candidate=setting, device="cpu"))
    assert len(model.optimizers) == 2
    model.first_optimizer()  # as a check begins anew
    assert all(group["foreach"] for one in model.optimizers.values() for group in one.param_groups)
    training.close()
    context = Context(loop, is_kept=False)
    context.open("here")
    spec = Check(what="fidelity", candidate=setting, device="cpu", torch_state=torch_state.capture())
    found = checks.check(context, spec, lambda _: None)
    assert isinstance(found, Fidelity), found
    faithful(found)


def checking(names: tuple[str, ...], **fields: Any) -> Check:
    precision: Precision = "bf16" if "weights" in names else "fp32"
    setting = Setting(precision=precision, batch_size=4, **{n: VALUES[n] for n in names})
    return Check(what="fidelity", candidate=setting, device="cpu", **fields)


def checked(name: str, names: tuple[str, ...]) -> Fidelity:
    context = Context(workload(name), is_kept=False)
    context.open("here")
    found = checks.check(context, checking(names, torch_state=torch_state.capture()), lambda _: None)
    assert isinstance(found, Fidelity), found
    return found


# What is compiled takes half a minute each: low weights, then every other dimension at once.
COMPILED = [
    ("convnet", ("compile", "weights")),
    ("gpt2", ("compile", "weights")),
    ("vit", ("compile", "memory_format", "activation_checkpointing", "optimizer_impl")),
    ("lstm", ("compile", "optimizer_impl")),
]
EAGER = [name for name in VALUES if name != "compile"]
PAIRS = [(model, pair) for model in ZOO for pair in combinations(EAGER, 2) if legal(model, pair)]


def faithful(found: Fidelity) -> None:
    has_low_weights = found.low_weights is not None
    assert found.verdict == "faithful" or (has_low_weights and "round away" in found.reason), found.reason
    assert found.gradient_cosine is not None
    assert found.gradient_cosine > (0.98 if has_low_weights else 0.9999)


@pytest.mark.parametrize(("name", "pair"), PAIRS, ids=["-".join((name, *pair)) for name, pair in PAIRS])
def test_each_pair_gives_the_gradient_of_fp32(name: str, pair: tuple[str, str]) -> None:
    faithful(checked(name, pair))


@NEEDS_CXX
@pytest.mark.slow
@pytest.mark.parametrize(("name", "names"), COMPILED, ids=["-".join((name, *names)) for name, names in COMPILED])
def test_what_is_compiled_gives_the_gradient_of_fp32(name: str, names: tuple[str, ...]) -> None:
    # In a process of its own, as a search has it: the compiler leaves threads behind.
    payload = Payload(target=f"{Path(__file__).with_name('model_zoo.py')}:{name}_workload", path=tuple(sys.path))
    with LocalBackend(payload, "kept", Watcher()) as backend:
        state = backend.load(60)
        backend.open("cpu", None, 60)
        found = backend.submit(checking(names, deadline_seconds=250.0, torch_state=state)).result()
    assert isinstance(found, Fidelity), found
    faithful(found)

"""DeepSpeed's engine: its steps and skips are observed, its config is set. In most tests a stand-in with the methods
that are hooked takes its place, and steps as the engine does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from commands import INJECTED, run
from forked_python import ForkServer

from autotune_amp.command.agent.outside import deepspeed_engine
from autotune_amp.command.agent.outside.frameworks import FrameworkHooks
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.command.frozen_pair import pair_steps
from autotune_amp.command.measure import precision_of, samples_per_step, todays_precision
from autotune_amp.command.messages import Gradient
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.settable import unsettable
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.job import Deadlines
from autotune_amp.core.setting import Setting
from autotune_amp.processes.process import Watcher

# `step` is stage_1_and_2.py's: not at all after a gradient that is not finite, else once for each group of parameters.
ENGINE = """
import torch

class Wrapper:
    def __init__(self, optimizer, masters):
        self.optimizer, self.masters, self.overflow = optimizer, masters, False

    def step(self):
        for weight, master in self.masters:
            master.grad = weight.grad.float()
        self.overflow = not all(bool(master.grad.isfinite().all()) for _, master in self.masters)
        groups = self.optimizer.param_groups
        for group in [] if self.overflow else groups:
            self.optimizer.param_groups = [group]
            self.optimizer.step()
        self.optimizer.param_groups = groups
        for weight, master in self.masters:
            weight.data, weight.grad = master.data.to(weight.dtype), None


class DeepSpeedEngine:
    def __init__(self, args, model, config):
        self.config, self.global_rank, self.skipped_steps, self.global_steps, self.num_passes = config, 0, 0, 0, 0
        self.module = model.to(torch.bfloat16 if config.is_bf16 else torch.float32)
        masters = [(weight, weight.detach().float().requires_grad_()) for weight in model.parameters()]
        groups = [{"params": [master]} for _, master in masters]
        self.basic_optimizer = torch.optim.SGD(groups, lr=0.01)
        self.optimizer = Wrapper(self.basic_optimizer, masters)
        self.basic_optimizer.step()  # as BF16_Optimizer does, for the optimizer's state

    def fp16_enabled(self):
        return False

    def backward(self, loss):
        (loss / self.config.gradient_accumulation_steps).backward()

    def step(self):
        self.num_passes += 1
        if self.num_passes % self.config.gradient_accumulation_steps == 0:
            self._take_model_step(None)

    def _take_model_step(self, lr_kwargs):
        self.optimizer.step()
        self.skipped_steps += self.optimizer.overflow
        self.global_steps += 1
"""
CONFIG = """
import copy

class DeepSpeedConfig:
    def __init__(self, config):
        self._param_dict, self.world_size = config, 1
        self._initialize_params(copy.copy(config))
        self._configure_train_batch_size()

    def _initialize_params(self, param_dict):
        self.train_batch_size = param_dict.get("train_batch_size")
        self.train_micro_batch_size_per_gpu = param_dict.get("train_micro_batch_size_per_gpu")
        self.gradient_accumulation_steps = param_dict.get("gradient_accumulation_steps")
        self.is_bf16 = param_dict.get("bf16", param_dict.get("bfloat16"))["enabled"]

    def _configure_train_batch_size(self):
        if self.train_micro_batch_size_per_gpu is None:
            self.train_micro_batch_size_per_gpu = self.train_batch_size // self.gradient_accumulation_steps
        if self.gradient_accumulation_steps is None:
            total = self.train_batch_size or self.train_micro_batch_size_per_gpu
            self.gradient_accumulation_steps = total // self.train_micro_batch_size_per_gpu
"""
SCRIPT = """
import torch
from torch import nn
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
config = DeepSpeedConfig(
    {"train_batch_size": 8, "gradient_accumulation_steps": 2, "bf16": {"enabled": True}, "steps_per_print": 9}
)
engine = DeepSpeedEngine(None, nn.Linear(8, 1), config)
size = config.train_micro_batch_size_per_gpu
for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=size)):
    loss = (engine.module(x.to(engine.module.weight.dtype)).float() - y).pow(2).mean()
    engine.backward(loss * (float("inf") if number in (12, 14) else 1.0))
    engine.step()
"""
Train = Callable[..., RunEvents]


@pytest.fixture
def train(fork_server: ForkServer, tmp_path: Path) -> Train:
    """Run SCRIPT with the stand-in and settings of the agent."""
    package = tmp_path / "deepspeed" / "runtime"
    package.mkdir(parents=True)
    for path, text in (("__init__.py", ""), ("runtime/__init__.py", ""), ("runtime/engine.py", ENGINE)):
        (tmp_path / "deepspeed" / path).write_text(text)
    (package / "config.py").write_text(CONFIG)
    (tmp_path / "train.py").write_text(SCRIPT)
    return lambda **settings: run([sys.executable, "train.py"], tmp_path, server=fork_server, **settings)


def only(events: RunEvents) -> Rank:
    (rank,) = events.ranks.values()
    return rank


def test_a_step_of_the_engine_is_one_and_one_that_it_skips_is_counted(train: Train) -> None:
    rank = only(train(outside={}))
    assert [number for number, step in enumerate(rank.steps) if step.is_skipped] == [6, 7]
    assert len(rank.steps) == 256 // 8
    assert samples_per_step(rank) == 8
    assert rank.steps[0].losses[0] == pytest.approx(1.0, rel=1), "before DeepSpeed divides it"
    assert (precision_of(rank), todays_precision(rank)) == ("bf16", "bf16")
    (switch,) = rank.switches
    assert switch.today == {"batch_size": 4, "accumulation_steps": 2, "precision": "bf16"}
    assert not unsettable(CommandTemplate.of("python train.py"), rank).keys() & {"fp16", "accumulation_steps"}


def test_its_config_is_set(train: Train) -> None:
    rank = only(train(outside={"precision": "fp32", "batch_size": 2, "accumulation_steps": 4}))
    assert precision_of(rank) == "fp32"
    assert {(interval.num_samples, interval.num_passes) for interval in rank.intervals()} == {(8, 4)}
    assert {each.name for each in rank.sets} == {"precision", "batch_size", "accumulation_steps"}


def test_what_it_derives_stays_when_another_value_is_set(train: Train, tmp_path: Path) -> None:
    derived = SCRIPT.replace('"gradient_accumulation_steps": 2', '"train_micro_batch_size_per_gpu": 4')
    (tmp_path / "train.py").write_text(derived.replace('"bf16"', '"bfloat16"'))
    rank = only(train(outside={"batch_size": 8}))
    assert {(interval.num_samples, interval.num_passes) for interval in rank.intervals()} == {(16, 2)}
    assert rank.switches[0].today == {"batch_size": 4, "accumulation_steps": 2, "precision": "bf16"}


def test_its_precisions_are_compared_at_the_same_weights(train: Train) -> None:
    low, reference = (
        train(
            outside={"precision": precision},
            frozen={"num_steps": 3, "max_entries": 1000, "in_fp32": precision == "fp32", "precision": "bf16"},
        ).of(Gradient)
        for precision in ("bf16", "fp32")
    )
    steps = pair_steps(low, reference)
    assert [[step.sizes for step in batch] for batch in steps if isinstance(batch, tuple)] == [[(8,), (1,)]] * 3


@pytest.mark.usefixtures("train")
def test_the_real_run_tells_of_its_silent_skips(fork_server: ForkServer, tmp_path: Path) -> None:
    settings = {"outside": {}, "controller": {"path": "none.json", "device": "cpu"}}
    environment = {**os.environ, "AUTOTUNE_AMP_AGENT": json.dumps(settings), "PYTHONPATH": str(INJECTED)}
    done = fork_server.run(["train.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0
    assert done.stderr.count("DeepSpeed has skipped 1 of 7 steps") == 1


REAL = """
import argparse, deepspeed, torch
from torch import nn
parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
torch.manual_seed(0)
model = nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
engine, _, loader, _ = deepspeed.initialize(
    parser.parse_args(), model, model_parameters=[{"params": [each]} for each in model.parameters()], training_data=data
)
for number, (x, y) in enumerate(loader):
    loss = (engine(x.to(model.weight.dtype)).float() - y).pow(2).mean()
    engine.backward(loss * (float("inf") if number in (12, 14) else 1.0))
    engine.step()
"""
SETTINGS = """{
  "train_micro_batch_size_per_gpu": {batch_size=4}, "gradient_accumulation_steps": {accumulation_steps=1},
  "bf16": {"enabled": {precision=fp32:bf16=true|fp32=false}}, "zero_optimization": {"stage": 2},
  "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": true}}
}"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_a_deepspeed_command_is_one_trial_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (tmp_path / "train.py").write_text(REAL)
    (tmp_path / "ds.json").write_text(SETTINGS)
    launch = ["deepspeed", "--num_accelerators", "2", "--master_port", "{port}", "train.py"]
    line = CommandTemplate.of([*launch, "--deepspeed", "--deepspeed_config", "ds.json"], files=["ds.json"])
    completed = Command(line).run(
        RunRequest.of(Setting(precision="bf16", batch_size=2, accumulation_steps=2)),
        Deadlines(whole_seconds=200.0),
        lambda events: events.num_steps >= 12,
        Watcher(),
    )
    assert completed.verdict == "measured"
    assert len(completed.events.ranks) == 2
    for rank in completed.events.ranks.values():
        assert [number for number, step in enumerate(rank.steps[:12]) if step.is_skipped] == [6, 7]
        assert samples_per_step(rank) == 4
        assert precision_of(rank) == "bf16"


class TrainerConfig:
    """Stand-in for Transformers' config of DeepSpeed: fills in ``auto``, and notes numbers that differ."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.mismatches = config, list[str]()

    def find_config_node(self, name: str) -> tuple[Any, str]:
        *sections, key = name.split(".")
        section: Any = self.config
        for each in sections:
            section = None if section is None else section.get(each)
        return section, key

    def fill_match(self, name: str, value: Any, argument: str | None = None, must_match: bool = True) -> None:
        section, key = self.find_config_node(name)
        if section is not None and section.get(key) == "auto":
            section[key] = value
        elif section is not None and must_match and section.get(key) not in (None, value):
            self.mismatches.append(f"{name} {argument}")


def test_a_trainers_own_numbers_are_set_in_its_config_and_others_must_still_match() -> None:
    class Config(TrainerConfig):
        pass

    values = {"batch_size": 2, "precision": "fp32"}
    hooks = FrameworkHooks(SimpleNamespace(values=values))
    hooks._hook_deepspeed_values(SimpleNamespace(HfTrainerDeepSpeedConfig=Config))
    config = Config({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 8, "bf16": {"enabled": True}, "lr": 0.1})
    config.fill_match("train_micro_batch_size_per_gpu", 2)
    config.fill_match("train_batch_size", 4)
    config.fill_match("gradient_accumulation_steps", 2)
    config.fill_match("bf16.enabled", False)
    config.fill_match("fp16.enabled", False)
    config.fill_match("lr", 0.2, "learning_rate")
    assert config.config == {
        "train_micro_batch_size_per_gpu": 2, "train_batch_size": 4, "bf16": {"enabled": False}, "lr": 0.1
    }  # fmt: skip
    assert config.mismatches == ["lr learning_rate"]


class Plugin(TrainerConfig):
    """Stand-in for Accelerate's plugin of DeepSpeed: a precision other than the config's is refused, fp32 ignored."""

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        return self.config

    def set_mixed_precision(self, precision: str) -> None:
        for name in ("fp16", "bf16"):
            if self.config[name]["enabled"] is True and precision not in ("no", name):
                raise ValueError(name)
            self.fill_match(f"{name}.enabled", precision == name, must_match=False)


class Accelerator:
    """Stand-in for Accelerate's class, which takes the accumulation of the config when it prepares the engine."""

    def __init__(self, plugin: Plugin, mixed_precision: str = "no") -> None:
        self.state = SimpleNamespace(deepspeed_plugin=plugin)
        self.gradient_accumulation_steps, self.mixed_precision = 1, mixed_precision
        plugin.set_mixed_precision(mixed_precision)

    def accumulate(self) -> None:
        self.gradient_accumulation_steps = self.state.deepspeed_plugin.config["gradient_accumulation_steps"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_numbers_in_the_config_of_accelerates_plugin_are_set(precision: str) -> None:
    class OwnPlugin(Plugin):
        pass

    class OwnAccelerator(Accelerator):
        pass

    hooks = FrameworkHooks(Mock(values={"precision": precision, "accumulation_steps": 3}))
    hooks._hook_deepspeed_plugin(SimpleNamespace(DeepSpeedPlugin=OwnPlugin))
    hooks._hook_accelerator(SimpleNamespace(Accelerator=OwnAccelerator))
    own = {"enabled": True}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    plugin = OwnPlugin({"gradient_accumulation_steps": 1, **sizes, "fp16": own, "bf16": {"enabled": False}})
    accelerator = OwnAccelerator(plugin)
    accelerator.accumulate()
    assert plugin.config["train_micro_batch_size_per_gpu"] * 3 == plugin.config.get("train_batch_size", 24)
    assert accelerator.gradient_accumulation_steps == 3
    assert [plugin.config[name]["enabled"] for name in ("fp16", "bf16")] == [False, precision == "bf16"]


@pytest.mark.parametrize("caller", ["train", "accelerate.accelerator"])
def test_of_accelerates_engine_the_accumulation_is_left_to_accelerate(
    caller: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it tells the engine at each backward pass whether to take a step."""
    definitions: dict[str, Any] = {}
    exec(CONFIG, definitions)
    settings = Mock(values={"batch_size": 2, "accumulation_steps": 3})
    monkeypatch.setattr(deepspeed_engine, "after_import", lambda _, __: None)
    deepspeed_engine.hook_config(settings, settings.values, report := Mock())
    settings.channel.shield.call_args.args[0](SimpleNamespace(**definitions))
    document = {"train_batch_size": 4, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
    calling = {"__name__": caller, "make": definitions["DeepSpeedConfig"], "document": document}
    config = eval("make(document)", calling)
    is_settable = caller == "train"
    assert config.gradient_accumulation_steps == (3 if is_settable else 1)
    assert config.train_micro_batch_size_per_gpu == 2
    assert ("accumulation_steps" in report.call_args.args[1]) is is_settable

"""What is set from outside in the arguments of Transformers, Accelerate and Lightning, and told of them."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mode
from unittest.mock import Mock

import pytest
import torch
from commands import TORCHRUN, run

from autotune_amp.command.agent.outside import frameworks
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.command.measure import precision_of
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.settable import unsettable
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.job import Deadlines
from autotune_amp.core.setting import Setting
from autotune_amp.processes.process import Watcher

PREAMBLE = """
import torch
from torch import nn
torch.manual_seed(0)
data = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(96)]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)
    def forward(self, x, labels=None):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}
"""
TRANSFORMERS = """
from transformers import HfArgumentParser, Trainer, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model=Model(), args=args, train_dataset=data, eval_dataset=data).train()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
model = Model()
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
"""
LIGHTNING = """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()
    def training_step(self, batch, index):
        return self.model(**batch)["loss"]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                            enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
"""
ARGUMENTS = "--output_dir out --use_cpu --report_to none --save_strategy no --num_train_epochs 1 --disable_tqdm true"
SCRIPTS = {
    "TrainingArguments": (TRANSFORMERS, [*ARGUMENTS.split(), "--per_device_train_batch_size", "4"], "HfArgumentParser"),
    "Accelerator": (ACCELERATE, [], ""),
    "Trainer": (LIGHTNING, [], ""),
}


def ran(folder: Path, owner: str, **outside: object) -> Rank:
    script, arguments, _ = SCRIPTS[owner]
    (folder / "train.py").write_text(PREAMBLE + script)
    heard = run([sys.executable, "train.py", *arguments], folder, outside=outside)
    (rank,) = heard.ranks.values()
    return rank


@pytest.mark.slow
@pytest.mark.parametrize("owner", SCRIPTS)
def test_a_framework_is_set_in_its_arguments(tmp_path: Path, owner: str) -> None:
    today = ran(tmp_path, owner)
    assert precision_of(today) == "fp32"
    assert mode(one.num_samples for one in today.intervals()) == 4  # the last of an epoch was fetched a step before
    cannot = unsettable(CommandTemplate.of("python train.py"), today)
    assert not cannot.keys() & {"fp16", "batch_size", "accumulation_steps"}
    switch = next(each for each in today.switches if each.owner == owner)
    assert (switch.today["precision"], switch.parser) == ("fp32", SCRIPTS[owner][2])

    assert switch.today.get("n_gpu") == (0 if owner == "TrainingArguments" else None)

    maker = next(iter(today.loaders[index].maker for index in today.training_loaders))
    rank = ran(tmp_path, owner, precision="bf16", batch_size=8, maker=maker, accumulation_steps=2)
    assert precision_of(rank) == "bf16"
    assert mode((one.num_samples, one.num_passes) for one in rank.intervals()) == (16, 2)
    assert {one.name for one in rank.sets} == {"precision", "batch_size", "accumulation_steps"}
    assert owner in next(one.what for one in rank.sets if one.name == "precision")


SECOND = (
    PREAMBLE
    + """
from transformers import Trainer, TrainingArguments
class Own(TrainingArguments): pass
common = dict(use_cpu=True, report_to=[], save_strategy="no", num_train_epochs=1, disable_tqdm=True)
before = TrainingArguments("unused")
arguments = Own("out", per_device_train_batch_size=4, learning_rate=0.5, **common)
arguments.learning_rate = 0.25
if {positional}:
    trainer = Trainer(Model(), arguments, train_dataset=data)
else:
    trainer = Trainer(args=arguments, model=Model(), train_dataset=data)
assert not before.bf16 and before.per_device_train_batch_size == 8 and before.gradient_accumulation_steps == 1
assert before.mixed_precision == "no"
assert arguments.bf16 and trainer.args is arguments and arguments.learning_rate == 0.25
trainer.train()
"""
)


def test_the_gpus_of_a_trainer_are_counted_once_it_is_made() -> None:
    """As a Trainer counts one for a model with a device map."""

    class Arguments:
        per_device_train_batch_size, gradient_accumulation_steps, n_gpu = 4, 1, 2
        bf16, fp16, optim, gradient_checkpointing = False, False, "adamw_torch", False

    class Trainer:
        def __init__(self, args: Arguments) -> None:
            args.n_gpu, args.per_device_train_batch_size = 1, 5
            self.model = Mock(config=Mock(_attn_implementation="eager"))

    settings = Mock(values={})
    frameworks.FrameworkHooks(settings)._hook_transformers_trainer(Mock(Trainer=Trainer, TrainingArguments=Arguments))
    Trainer(Arguments())
    today = settings.channel.add.call_args.kwargs["today"]
    assert (today["n_gpu"], today["batch_size"], today["attn_implementation"]) == (1, 4, "eager")


def test_arguments_of_the_command_line_are_set_before_others_are_derived_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Arguments:
        bf16, fp16, tf32, device, use_cpu = True, False, True, Mock(type="cpu"), False
        per_device_train_batch_size = gradient_accumulation_steps = 1

        def __post_init__(self) -> None:
            self.samples = self.per_device_train_batch_size * self.gradient_accumulation_steps

    class Own(Arguments):  # as GRPOConfig
        def __post_init__(self) -> None:
            super().__post_init__()
            self.generated = 2 * self.samples

    settings = Mock(values={"precision": "fp16", "batch_size": 4, "accumulation_steps": 2})
    frameworks.FrameworkHooks(settings)._hook_post_init(Mock(TrainingArguments=Arguments))

    def made(parser: str) -> tuple[int, bool, bool, bool]:
        monkeypatch.setattr(frameworks, "_parser_of_arguments", lambda: parser)
        arguments = Own()
        arguments.__post_init__()
        return arguments.generated, arguments.bf16, arguments.fp16, arguments.tf32

    assert made("") == (2, True, False, True)
    assert made("HfArgumentParser") == (16, False, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("positional", [True, False])
def test_only_the_arguments_that_a_trainer_receives_are_set(tmp_path: Path, positional: bool) -> None:
    (tmp_path / "train.py").write_text(SECOND.replace("{positional}", str(positional)))
    outside = {"precision": "bf16", "batch_size": 8, "accumulation_steps": 2}
    (rank,) = run([sys.executable, "train.py"], tmp_path, outside=outside).ranks.values()
    assert precision_of(rank) == "bf16"
    assert mode((one.num_samples, one.num_passes) for one in rank.intervals()) == (16, 2)
    (switch,) = (each for each in rank.switches if each.owner == "TrainingArguments")
    assert {"batch_size": 4, "accumulation_steps": 1, "precision": "fp32"}.items() <= switch.today.items()
    assert str(switch.today["optim"]).startswith("adamw_torch")
    assert switch.today["gradient_checkpointing"] == "False"
    line = next(number for number, text in enumerate(SECOND.split("\n"), 1) if text.startswith("arguments = "))
    assert {one.line.rpartition(":")[2] for one in rank.sets} == {str(line)}


LAUNCHED = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 2
num_machines: 1
machine_rank: 0
main_process_port: {port}
use_cpu: false
mixed_precision: {precision=fp32:bf16='bf16'|fp32='no'}
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: NO_WRAP}
"""
# Of torch itself: on a CPU Accelerate uses DDP, whatever its file says.
FSDP2 = """
import sys
from torch.distributed import init_device_mesh, init_process_group
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
init_process_group("gloo")
model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if sys.argv[1] == "bf16" else None)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
assert isinstance(model, FSDPModule)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True):
    model(**batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def in_bf16(line: CommandTemplate) -> list[str | None]:
    """The precision that each rank of the command runs in when bf16 is asked for."""
    completed = Command(line).run(
        RunRequest.of(Setting(precision="bf16", batch_size=4)),
        Deadlines(whole_seconds=200.0),
        lambda events: events.num_steps >= 8,
        Watcher(),
    )
    assert completed.verdict == "measured", completed.verdict
    return [precision_of(rank) for rank in completed.events.ranks.values()]


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate would give each rank a device of its own")
def test_accelerates_file_starts_two_ranks_in_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PREAMBLE + ACCELERATE)
    (tmp_path / "launch.yaml").write_text(LAUNCHED)
    line = CommandTemplate.of("accelerate launch --config_file launch.yaml train.py", files=["launch.yaml"])
    assert in_bf16(line) == ["bf16", "bf16"]


@pytest.mark.slow
def test_two_ranks_of_fsdp2_run_in_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PREAMBLE + FSDP2)
    assert in_bf16(CommandTemplate.of([*TORCHRUN, "train.py", "{precision=fp32}"])) == ["bf16", "bf16"]


@pytest.mark.parametrize(
    ("typed", "parsed", "parser"),
    [
        (["--lr", "1"], ["--lr", "1"], "HfArgumentParser"),
        (["--config", "own.yaml", "--lr", "1"], ["--lr", "1"], "HfArgumentParser"),
        (["--lr", "1", "--config=own.yaml"], ["--lr", "1"], "HfArgumentParser"),
        (["--lr", "1", "--config=own.yaml"], ["--lr", "2"], ""),
    ],
)
def test_arguments_are_of_the_command_line_without_the_file_that_a_parser_read_before(
    typed: list[str], parsed: list[str], parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse_args_into_dataclasses(args: list[str]) -> str:  # as HfArgumentParser's method, which makes the arguments
        return frameworks._parser_of_arguments() if args else ""

    monkeypatch.setattr(sys, "argv", ["train.py", *typed])
    assert parse_args_into_dataclasses(parsed) == parser

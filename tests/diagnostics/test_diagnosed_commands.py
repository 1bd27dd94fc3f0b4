"""A training command is diagnosed as the Workload of the same model is: one file holds both."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import TORCHRUN
from unisolated import run_jobs_here

from autotune_amp import CommandTemplate, check_fidelity, check_workload, profile_amp, profile_memory
from autotune_amp.cli import run
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure, Profiled
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.check.findings import CheckReport
from autotune_amp.diagnostics.memory.results import MemoryBreakdown, MemoryJob
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = """
import argparse, contextlib, os, sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.is_picky = False

    def forward(self, x):
        scores = self.query(x) @ x.transpose(1, 2)
        if self.is_picky:
            assert scores.dtype == torch.float32, "only fp32"
        scores = scores.masked_fill(scores > 1, -1e9)
        return scores.softmax(-1) @ x

def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), Attention())

def loss(model, batch):
    out = model(batch)
    return (out * out).mean()

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)

def loader(size, num_tokens=4):
    data = torch.randn(512, num_tokens, 16, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(data, batch_size=size, shuffle=True)

def workload():
    from autotune_amp import Workload
    return Workload(make_model, loss, loader(8), optimizer)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--be", default="")
    parser.add_argument("--tokens", type=int, default=4)
    options = parser.parse_args()
    if options.be == "without the package":
        sys.modules["autotune_amp"] = None
    if options.be == "ranked":
        torch.distributed.init_process_group("gloo")
    model = made = make_model()
    model[1].is_picky = options.be == "picky"
    if options.be == "ranked":
        model = nn.parallel.DistributedDataParallel(model)
    step, num_steps = optimizer(made.parameters()), 0
    is_low = options.precision == "bf16"
    for epoch in range(1000):
        made_here = (torch.randn(8, 4, 16) for _ in range(64))
        for batch in made_here if options.be == "without a loader" else loader(options.batch, options.tokens):
            region = torch.autocast("cpu", torch.bfloat16, enabled=is_low)
            def closure():
                step.zero_grad()
                with contextlib.nullcontext() if options.be in ("plain", "picky") else region:
                    value = loss(model, batch)
                value.backward()
                return value
            if options.be == "closure":
                step.step(closure)
            else:
                closure()
                step.step()
            num_steps += 1
            if options.be == "saving":
                torch.save(made.state_dict(), "snapshot.pt")
            if options.be == "short" and num_steps == 5:
                sys.exit()
"""
PRECISION = ("--precision", "{precision=fp32}")


class Both(NamedTuple):
    """The script, and a backend for the Workload in it with the state of torch that its jobs begin with."""

    script: str
    workload: LocalBackend
    torch_state: dict[str, Any]

    def command(self, *arguments: str) -> CommandBackend:
        template = CommandTemplate.of([sys.executable, self.script, *arguments])
        return CommandBackend(Command(template), self.workload, Watcher())


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    payload = Payload(target=f"{path}:workload", path=tuple(sys.path))
    with LocalBackend(payload, "kept", Watcher()) as backend:
        backend.load(200.0)
        yield Both(str(path), backend, backend.open("cpu", None, 200.0).torch_state)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run_jobs_here(monkeypatch)
    monkeypatch.chdir(tmp_path)


def template(both: Both, *arguments: str) -> CommandTemplate:
    return CommandTemplate.of([sys.executable, both.script, *arguments])


def found(report: CheckReport) -> list[tuple[Any, ...]]:
    return [(f.rule, f.severity, f.precisions, f.line, f.modules, f.mend) for f in report.findings]


def memory_job(both: Both, precision: Any = "fp32") -> MemoryJob:
    return MemoryJob(device="cpu", trial=trial(both, precision), deadline_seconds=200.0)


def trial(both: Both, precision: Any = "fp32") -> Trial:
    setting = Setting(precision=precision, batch_size=8)
    return Trial(candidate=setting, device="cpu", deadline_seconds=200.0, torch_state=both.torch_state)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("arguments", [(), ("--precision", "bf16"), ("--be", "plain"), ("--be", "closure")])
def test_a_check_finds_the_same_lines(both: Both, arguments: tuple[str, ...]) -> None:
    """Wherever the script has its autocast: behind a flag, on, or nowhere."""
    expected = check_workload(f"{both.script}:workload", batch_size=8, quiet=True)
    report = check_workload(template(both, *arguments), quiet=True)
    assert found(report) == found(expected) != []
    assert (report.workload, report.batch_size, report.will_break) == ("train", 8, True)
    assert both.script in report.files
    assert report.problem is None
    (note,) = report.notes
    assert ("own autocast regions" in note) is (arguments != ("--be", "plain"))
    assert not list(Path().iterdir())


@pytest.mark.usefixtures("here")
def test_a_check_whose_recording_the_script_does_not_bear_says_so(both: Both) -> None:
    report = check_workload(template(both, "--be", "picky"), quiet=True)
    assert "only fp32" in (report.problem or "")
    assert report.num_calls > 0


@pytest.mark.usefixtures("here")
def test_a_check_on_the_command_line(both: Both, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "--json", "--quiet", "--", sys.executable, both.script]) == 4
    document = json.loads(capfd.readouterr().out)
    assert (document["format"], document["workload"], document["findings"][0]["rule"]) == (1, "train", "large_constant")
    assert run(["check", "--quiet", "--batch-size", "4", "--", sys.executable, both.script]) == 2
    assert "{batch_size=N}" in capfd.readouterr().err
    sized = [sys.executable, both.script, "--batch", "{batch_size=8}"]
    assert run(["check", "--json", "--quiet", "--batch-size", "4", "--", *sized]) == 4
    assert json.loads(capfd.readouterr().out)["batch_size"] == 4


@pytest.mark.usefixtures("here")
def test_what_a_diagnosis_needs_of_a_command(both: Both) -> None:
    job = ProfileJob(device="cpu", trial=trial(both), trace_file="trace.json", deadline_seconds=200.0)
    with pytest.raises(WorkloadError, match="5 optimizer steps"):
        both.command("--be", "short").submit(job)
    ignored = both.command("--be", "{precision=fp32}").submit(memory_job(both, "bf16")).result()
    assert isinstance(ignored, Failure), ignored
    assert "{precision} does not reach" in ignored.message
    with pytest.raises(WorkloadError, match="cannot be imported") as raised:
        check_workload(template(both, "--be", "without the package"), quiet=True)
    assert f"{sys.executable} -m pip install" in raised.value.next_step
    with pytest.raises(InvalidRequestError, match="today"):
        check_fidelity(template(both), batch_size=4, quiet=True)
    with pytest.raises(InvalidRequestError, match="snapshot"):
        profile_memory(template(both), device="cuda", snapshot="memory.pickle", quiet=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_has_the_same_parts(both: Both, precision: str) -> None:
    job = memory_job(both, precision)
    expected, answer = both.workload.submit(job).result(), both.command(*PRECISION).submit(job).result()
    assert isinstance(expected, MemoryBreakdown), expected
    assert isinstance(answer, MemoryBreakdown), answer
    for part in ("parameters", "buffers", "gradients", "optimizer_state", "batch", "cast_weights", "activations"):
        assert getattr(answer, f"{part}_bytes") == getattr(expected, f"{part}_bytes"), part
    assert (answer.modules, answer.optimizers) == (expected.modules, expected.optimizers)
    assert answer.taken_bytes > expected.taken_bytes  # of the whole process


@pytest.mark.parametrize("be", ["", "closure"])
def test_a_profile_has_the_same_parts(both: Both, be: str, tmp_path: Path) -> None:
    trace_file = str(tmp_path / "trace.json")
    job = ProfileJob(device="cpu", trial=trial(both), trace_file=trace_file, deadline_seconds=200.0)
    expected = both.workload.submit(job).result()
    answer = both.command("--be", be).submit(job).result()
    assert isinstance(expected, Profiled), expected
    assert isinstance(answer, Profiled), answer
    assert expected.split is not None
    assert answer.split is not None
    assert answer.flops_per_step == expected.flops_per_step is not None
    assert answer.unfused_optimizer == expected.unfused_optimizer == "AdamW"
    kinds = [
        {kind for step in split.steps for kind in step.operation_seconds} for split in (expected.split, answer.split)
    ]
    assert kinds[0] == kinds[1]
    for step in answer.split.steps:
        assert sum(step.operation_seconds.values()) <= 1.001 * step.step_seconds
        assert step.operation_seconds["matrix_products"] > 0


@pytest.mark.slow
def test_fidelity_has_the_same_verdict_and_leftovers_are_moved(
    both: Both, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = check_fidelity(f"{both.script}:workload", "bf16", quiet=True)
    answer = check_fidelity(template(both, *PRECISION, "--be", "saving"), "bf16", quiet=True)
    assert answer.verdict == expected.verdict == "faithful"
    assert Path("studies/train/trial_leftovers/snapshot.pt").exists()
    assert not Path("snapshot.pt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_whole_reports_of_a_command(both: Both) -> None:
    command = template(both, *PRECISION)
    memory = profile_memory(command, precision="fp32", fit="64GiB", quiet=True)
    (row,) = memory.rows
    assert row.breakdown is not None
    assert row.largest is not None
    assert (row.largest.batch_size, row.largest.is_all_data) == (512, True)
    assert any("whole process" in note for note in memory.notes)
    profile = profile_amp(command, 2, precision="bf16", quiet=True)
    assert profile.is_command
    assert profile.row("bf16").speedup is not None
    assert profile.gap is not None
    assert any("first steps" in note for note in profile.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_memory_of_each_value_of_the_commands_own_arguments(both: Both) -> None:
    command = template(both, *PRECISION, "--tokens", "{seq=4:64|many}")
    memory = profile_memory(command, precision="fp32", quiet=True)
    today, longer, refused = memory.rows
    assert [row.label for row in memory.rows] == ["fp32", "fp32 seq=64", "fp32 seq=many"]
    assert today.breakdown is not None
    assert longer.breakdown is not None
    assert longer.breakdown.batch_bytes == 16 * today.breakdown.batch_bytes
    assert longer.breakdown.activations_bytes > today.breakdown.activations_bytes
    assert "invalid int value" in (refused.reason or "")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_batch_size_that_cannot_be_set_is_not_pretended(both: Both) -> None:
    command = template(both, "--be", "without a loader")
    memory = profile_memory(command, precision="fp32", fit="64GiB", quiet=True)
    assert memory.row("fp32").breakdown is not None
    assert "{batch_size}" in (memory.row("fp32").reason or "")
    with pytest.raises(InvalidRequestError, match="cannot be set") as raised:
        profile_amp(command, batch_size=4, precision="fp32", quiet=True)
    assert "{batch_size=N}" in raised.value.next_step


TRAINER = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2))
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(96)]
arguments = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=40, use_cpu=True,
    save_strategy="no", report_to=[])
if __name__ == "__main__":
    Trainer(model=model, args=arguments, train_dataset=rows).train()
"""


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_trainer(both: Both, tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    command = CommandTemplate.of([sys.executable, str(script), "{trial_dir}"])
    report = check_workload(command, quiet=True)
    assert (report.findings, report.problem, report.batch_size) == ((), None, 4)
    assert report.num_modules > 10
    backend = CommandBackend(Command(command), both.workload, Watcher())
    memory = backend.submit(memory_job(both)).result()
    assert isinstance(memory, MemoryBreakdown), memory
    assert memory.parameters_bytes == memory.gradients_bytes
    assert memory.optimizer_state_bytes > 2 * memory.parameters_bytes
    assert 0 <= memory.batch_bytes - 2 * 4 * 16 * 8 <= 8  # ids and labels, and perhaps their number
    assert memory.checkpointable_modules == ("transformer.h.0", "transformer.h.1")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_the_first_of_two_ranks_is_diagnosed_and_said(both: Both) -> None:
    command = CommandTemplate.of([*TORCHRUN, both.script, "--be", "ranked"])
    report = check_workload(command, quiet=True)
    assert found(report) == found(check_workload(f"{both.script}:workload", batch_size=8, quiet=True))
    assert any("rank 0 of 2" in note for note in report.notes)
    job = memory_job(both)
    answer = CommandBackend(Command(command), both.workload, Watcher()).submit(job).result()
    expected = both.workload.submit(job).result()
    assert isinstance(answer, MemoryBreakdown), answer
    assert isinstance(expected, MemoryBreakdown), expected
    assert answer.modules == expected.modules

"""A command as a backend: what of it can be set, whether it follows, and the jobs that it answers."""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import said
from backend_contract import BackendContract, Made
from described_commands import SECONDS, described, fidelity, local_backend, trial
from msgspec.structs import replace
from profile_samples import HARDWARE

from autotune_amp.command import backend as command_backend
from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.command.messages import Gradient
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CompletedRun
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import BudgetTooSmallError, DeviceError, RunnerError, WorkloadError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import CountedFlops, Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import ProbeJob

pytestmark = pytest.mark.usefixtures("forked_processes")

SCRIPT = """
import argparse, os, sys, time
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--be", default="")
options = parser.parse_args()
if options.be == "unseeded":
    torch.seed()
else:
    torch.manual_seed(0)
if options.be == "broken":
    raise KeyError("the moon is full")
if options.be == "finished":
    sys.exit(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = 8 if options.be == "ignoring" else options.batch
for epoch in range(1000):
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True)):
        if options.be == "slow in bf16" and options.precision == "bf16":
            time.sleep(600)
        if options.be == "slow":
            time.sleep(4)
        if len(x) == 3:
            raise ValueError("three")
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = (model(x) - y).square().mean()
        if options.be == "not finite in bf16" and options.precision == "bf16":
            loss = loss * float("nan")
        loss.backward()
        if number % options.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
BATCH, PRECISION = ("--batch", "{batch_size=8}"), ("--precision", "{precision=fp32}")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


local = pytest.fixture(scope="module")(local_backend)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """The settings that commands are run with, as they come."""
    found: list[Setting] = []
    run = Command.run

    def noted(self: Command, request: RunRequest, *args: Any, **fields: Any) -> Any:
        found.append(request.setting)
        return run(self, request, *args, **fields)

    monkeypatch.setattr(Command, "run", noted)
    return found


@pytest.fixture(scope="module")
def described_once(script: str, local: LocalBackend) -> Made:
    backend, found = described([sys.executable, script, *BATCH, *PRECISION], local)
    assert isinstance(found, Description), found
    return Made(
        backend,
        trial(Setting(precision="fp32", batch_size=4)),
        trial(Setting(precision="fp32", batch_size=3)),
        "workload_error",
        fidelity(Setting(precision="bf16", batch_size=8)),
    )


@pytest.mark.slow
class TestContract(BackendContract):
    @pytest.fixture
    def made(self, described_once: Made) -> Made:
        return described_once


def test_a_command_with_placeholders_is_described_followed_and_measured(script: str, local: LocalBackend) -> None:
    line = [sys.executable, script, *BATCH, *PRECISION, "--accumulate", "{accumulation_steps=2}"]
    backend, found = described(line, local)
    assert isinstance(found, Description), found
    assert (found.name, found.batch_size, found.accumulation_steps) == ("train", 8, 2)
    assert (found.num_samples, found.num_parameters, found.as_found_precision) == (4096, 9, "fp32")
    assert "train.py:" in found.data
    assert found.build_seconds > 0
    assert found.unsettable == {}
    setting = Setting(precision="bf16", batch_size=4, accumulation_steps=4)
    measured = backend.submit(trial(setting)).result()
    assert isinstance(measured, Measurement), measured
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(16)
    assert measured.counted_flops is None, "those of today's arguments were counted in the description"
    judged = backend.submit(fidelity(Setting(precision="bf16", batch_size=8))).result()
    assert isinstance(judged, Fidelity)
    assert judged.verdict != "unchecked", judged.reason
    assert (judged.noise_ratio or 0) > 0


def test_operations_are_counted_in_trials_of_other_arguments(script: str, local: LocalBackend) -> None:
    backend, _ = described([sys.executable, script, *BATCH, "--be", "{be=plain:other}"], local)
    setting = Setting(precision="fp32", batch_size=8, arguments=(("be", "other"),))
    measured = backend.submit(trial(setting)).result()
    assert isinstance(measured, Measurement), measured
    assert measured.counted_flops == CountedFlops(flops=2 * 2 * 8 * 8, num_samples=8)
    confirming = trial(setting, purpose="confirm", round=0)
    again = backend.submit(confirming).result()
    assert isinstance(again, Measurement), again
    assert again.counted_flops is None, "nothing slows a run that is compared with today's"


RECURRENT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
model = torch.nn.RNN(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(0)
words = torch.randn(7, parser.parse_args().batch, 4)
while True:
    model(words)[0].square().mean().backward()
    optimizer.step()
"""


def test_samples_are_found_along_the_second_dimension(tmp_path: Path, local: LocalBackend) -> None:
    (tmp_path / "train.py").write_text(RECURRENT)
    backend, found = described([sys.executable, str(tmp_path / "train.py"), *BATCH], local)
    assert isinstance(found, Description), found
    assert found.batch_size == 8
    assert any("second dimension" in note for note in found.notes)
    measured = backend.submit(trial(Setting(precision="fp32", batch_size=4))).result()
    assert isinstance(measured, Measurement), measured
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(4)


ACCUMULATING = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--be", default="")
options = parser.parse_args()
torch.manual_seed(0)
class Line(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        assert y.dtype == torch.float32 or "not in bf16" not in options.be, "no bf16"
        return y
model = Line(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
step = 0
is_picky = options.be.startswith("picky")
if is_picky:
    assert options.batch == 8, "only eight"
def batches():
    while True:
        if options.be == "without a loader":
            yield (torch.randn(options.batch, 8),)
        else:
            yield from torch.utils.data.DataLoader(data, batch_size=options.batch, shuffle=True)
for number, (x,) in enumerate(batches(), 1):
    num = 4 if is_picky else min(4, 1 + step // 5) if options.be == "ramping" else 32 // options.batch
    (model(x).square().mean() / num).backward()
    if number % num == 0:
        step += 1
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def accumulating(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(ACCUMULATING)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize("be", ["with a loader", "without a loader"])
def test_a_script_that_keeps_its_total_is_tried_at_other_batches(
    accumulating: str, local: LocalBackend, be: str
) -> None:
    backend, found = described([sys.executable, accumulating, *BATCH, "--be", be], local, is_batch_free=False)
    assert isinstance(found, Description), found
    assert (found.batch_size, found.accumulation_steps, found.keeps_effective_batch_size) == (8, 4, True)
    assert "accumulation_steps" not in found.unsettable
    assert any("accumulates to 32 samples" in note for note in found.notes)
    measured = backend.submit(trial(Setting(precision="fp32", batch_size=2, accumulation_steps=16))).result()
    assert isinstance(measured, Measurement), measured
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(32)
    other = backend.submit(trial(Setting(precision="fp32", batch_size=16, accumulation_steps=4))).result()
    assert isinstance(other, Failure)
    assert "2 batches of 16" in other.message


def test_a_batch_of_the_scripts_own_is_told_from_its_passes(accumulating: str, local: LocalBackend) -> None:
    _, found = described([sys.executable, accumulating, "--be", "without a loader"], local)
    assert isinstance(found, Description), found
    assert (found.batch_size, found.accumulation_steps) == (8, 4)


def test_a_script_that_ramps_its_accumulation_up_is_followed(accumulating: str, local: LocalBackend) -> None:
    backend, found = described([sys.executable, accumulating, *BATCH, "--be", "ramping"], local, is_batch_free=False)
    assert isinstance(found, Description), found
    assert (found.batch_size, found.keeps_effective_batch_size) == (8, False)
    for precision in ("fp32", "bf16"):
        outcome = backend.submit(trial(Setting(precision=precision, batch_size=8))).result()
        assert isinstance(outcome, Measurement), outcome


def test_a_command_that_would_change_what_was_there_is_told_so_whichever_run_would(
    tmp_path: Path, local: LocalBackend
) -> None:
    old, train = tmp_path / "old.pt", tmp_path / "train.py"
    old.write_text("the user's")
    saves = f"torch.save({{}}, {str(old)!r}) if options.batch == 4 else None\noptimizer = "
    train.write_text(ACCUMULATING.replace("optimizer = ", saves))
    with pytest.raises(WorkloadError, match=r"A trial was stopped.*old\.pt") as raised:
        described([sys.executable, str(train), *BATCH], local)
    assert "{trial_dir}" in raised.value.next_step
    assert old.read_text() == "the user's"


def test_a_batch_that_a_script_does_not_take_is_no_error_where_none_is_needed(
    accumulating: str, local: LocalBackend
) -> None:
    _, found = described([sys.executable, accumulating, *BATCH, "--be", "picky"], local, is_batch_free=False)
    assert isinstance(found, Description), found
    assert "only eight" in found.unsettable["batch_size"]
    assert "bf16" not in found.unsettable


@pytest.mark.parametrize(
    ("be", "unsettable"), [("not in bf16", {"bf16"}), ("picky, not in bf16", {"batch_size", "bf16"})]
)
def test_where_both_changes_fail_each_is_tried_alone(
    accumulating: str, local: LocalBackend, settings: list[Setting], be: str, unsettable: set[str]
) -> None:
    _, found = described([sys.executable, accumulating, *BATCH, "--be", be], local, is_batch_free=False)
    assert isinstance(found, Description), found
    assert found.unsettable.keys() & {"bf16", "batch_size"} == unsettable
    assert "no bf16" in found.unsettable["bf16"]
    assert [(setting.precision, setting.batch_size) for setting in settings] == [
        ("fp32", 8),
        ("bf16", 4),
        ("bf16", 8),
        ("fp32", 4),
    ]


def test_each_trial_has_a_settings_file_of_its_own(tmp_path: Path, local: LocalBackend) -> None:
    own, train = tmp_path / "batch.txt", tmp_path / "train.py"
    own.write_text("{batch_size=8}")
    train.write_text(SCRIPT.replace("parse_args()", "parse_args(['--batch', open(sys.argv[1]).read()])"))
    backend, found = described([sys.executable, str(train), str(own)], local, files=[str(own)])
    assert isinstance(found, Description), found
    assert found.batch_size == 8
    measured = backend.submit(trial(Setting(precision="fp32", batch_size=4))).result()
    assert isinstance(measured, Measurement), measured
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(4)
    assert own.read_text() == "{batch_size=8}"


@pytest.mark.slow
def test_each_trial_of_several_ranks_has_a_port_of_its_own(tmp_path: Path, local: LocalBackend) -> None:
    ranks = """optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
assert os.environ["MASTER_PORT"] != "29500"  # torchrun's own
torch.distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(model)
"""
    (tmp_path / "train.py").write_text(SCRIPT.replace(ranks.partition("\n")[0], ranks))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}"]
    backend, found = described([*torchrun, str(tmp_path / "train.py"), *BATCH], local)
    assert isinstance(found, Description), found
    assert (found.batch_size, found.num_ranks) == (8, 2)
    assert isinstance(backend.submit(trial(Setting(precision="fp32", batch_size=4))).result(), Measurement)


def test_without_placeholders_it_is_set_from_outside(script: str, local: LocalBackend) -> None:
    backend, found = described([sys.executable, script], local)
    assert isinstance(found, Description), found
    assert (found.batch_size, found.as_found_precision, found.accumulation_steps) == (8, "fp32", 1)
    assert set(found.unsettable) == {"fp16", "fp8", "accumulation_steps"}
    measured = backend.submit(trial(Setting(precision="bf16", batch_size=4))).result()
    assert isinstance(measured, Measurement), measured
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(4)


def test_a_precision_whose_losses_are_not_finite_is_followed_and_no_measurement(
    script: str, local: LocalBackend
) -> None:
    command = [sys.executable, script, *BATCH, *PRECISION, "--be", "not finite in bf16"]
    backend, found = described(command, local)
    assert isinstance(found, Description), found
    assert "bf16" not in found.unsettable
    outcome = backend.submit(trial(Setting(precision="bf16", batch_size=8))).result()
    assert isinstance(outcome, Failure)
    assert (outcome.kind, outcome.message) == ("nonfinite", "the loss became nan")
    assert isinstance(backend.submit(trial(Setting(precision="fp32", batch_size=8))).result(), Measurement)


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found: 12345"), OSError("No username set")])
def test_a_user_without_a_name_is_none_the_worse(
    script: str, local: LocalBackend, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(getpass, "getuser", Mock(side_effect=error))
    assert isinstance(described([sys.executable, script], local)[1], Description)


@pytest.mark.slow
def test_a_precision_that_the_command_refuses_cannot_be_set(script: str, local: LocalBackend) -> None:
    _, found = described(
        [sys.executable, script, *BATCH, "--precision", "{precision=fp32:fp32=fp32|bf16=--nonsense}"], local
    )
    assert isinstance(found, Description), found
    assert "did not run in it" in found.unsettable["bf16"]
    assert found.notes[0].startswith("bf16 is not tried: ")
    assert "no arguments" in found.unsettable["fp16"]


def test_a_precision_that_takes_for_ever_costs_the_search_little(
    script: str, local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_backend, "FOLLOWING_SHARE", 0.01)
    _, found = described([sys.executable, script, "--be", "slow in bf16", *BATCH, *PRECISION], local)
    assert isinstance(found, Description), found
    assert "too slow" in found.unsettable["bf16"]
    assert found.notes[0].startswith("bf16 is not tried: ")


@pytest.mark.slow
def test_batches_that_are_drawn_anew_say_nothing_of_fidelity(script: str, local: LocalBackend) -> None:
    backend, _ = described([sys.executable, script, "--be", "unseeded", *PRECISION], local)
    judged = backend.submit(fidelity(Setting(precision="bf16", batch_size=8))).result()
    assert isinstance(judged, Fidelity)
    assert judged.verdict == "unchecked"
    assert "differ" in judged.reason
    assert "eed" in judged.next_step


def test_what_is_held_against_a_run_in_a_low_precision_says_nothing_of_fidelity(
    tmp_path: Path, local: LocalBackend
) -> None:
    ignoring = SCRIPT.replace('enabled=options.precision == "bf16"', "enabled=IS_LOW")
    in_low = 'IS_LOW = options.precision == "bf16" or "AUTOTUNE_AMP_TEST" in os.environ\n'
    (tmp_path / "train.py").write_text(ignoring.replace("batch = 8 if", f"{in_low}batch = 8 if"))
    backend, found = described([sys.executable, str(tmp_path / "train.py"), *PRECISION], local)
    assert isinstance(found, Description), found
    backend._environment = {"AUTOTUNE_AMP_TEST": "1"}
    judged = backend.submit(fidelity(Setting(precision="bf16", batch_size=8))).result()
    assert isinstance(judged, Fidelity)
    assert judged.verdict == "unchecked"
    assert "fp32 used bf16" in judged.reason


@pytest.mark.parametrize("num_skips", [0, 5, 8])
def test_gradients_are_compared_at_the_steps_that_a_scaler_does_not_skip(num_skips: int) -> None:
    def run(request: RunRequest, _: Any, is_enough: Callable[[RunEvents], bool], *__: Any) -> CompletedRun:
        settings, is_low = json.loads(request.agent)["frozen"], request.setting.precision == "fp16"
        events = said.heard([said.optimizer(1)])
        while not is_enough(events):
            number = len(events.ranks[1].steps)
            if number < settings["num_steps"] and (number >= num_skips or not is_low):
                events.add(recorded(number, request.setting.precision))
            events.add(said.step(1, number + 1, regions=("cpu:float16",) if is_low else ()))
        return CompletedRun(0.0, events, Mock(), "measured")

    def recorded(number: int, path: str) -> Gradient:
        of_rank: dict[str, Any] = {"pid": 1, "time": 0.0, "rank": 0, "world": 1, "optimizer": 0, "sizes": (3,)}
        return Gradient(**of_rank, number=number, path=f"{path} {number}", weights="w", batch=str(number))

    command, local = Command(CommandTemplate.of(["train"])), Mock()
    command.today = Setting(precision="fp32", batch_size=8)
    backend = CommandBackend(command, local, Watcher())
    with patch.multiple(command, run=run, load_together=Mock()):
        backend.submit(fidelity(Setting(precision="fp16", batch_size=8)))
    (pair,) = local.submit.call_args.args
    assert [[(step.low, step.reference) for step in batch] for batch in pair.steps] == [
        [(f"fp16 {number}", f"fp32 {number}")] for number in range(num_skips, num_skips + 6)
    ]


# As a model that is loaded in bf16; autocast is the script's switch.
IN_BF16 = SCRIPT.replace("nn.Linear(8, 1)", "nn.Linear(8, 1).bfloat16()").replace("model(x)", "model(x.bfloat16())")
CONVERTING = IN_BF16.replace(
    ".bfloat16()", ".to(getattr(torch, {'fp32': 'float32'}.get(options.precision, 'bfloat16')))"
)


@pytest.mark.parametrize("placeholders", [(*BATCH, *PRECISION), ()], ids=["placeholders", "from outside"])
def test_a_model_in_bf16_is_searched_and_its_fidelity_judged(
    tmp_path: Path, local: LocalBackend, placeholders: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(IN_BF16)
    backend, found = described([sys.executable, str(tmp_path / "train.py"), *placeholders], local)
    assert isinstance(found, Description), found
    assert (found.as_found_precision, found.weights) == ("fp32", "bf16")
    assert not found.unsettable.keys() & {"fp32", "bf16"}
    for precision in ("fp32", "bf16"):
        setting = Setting(precision=precision, batch_size=8)
        assert isinstance(backend.submit(trial(setting)).result(), Measurement)
        judged = backend.submit(fidelity(setting)).result()
        assert isinstance(judged, Fidelity)
        assert judged.verdict != "unchecked", judged.reason
        assert (judged.noise_ratio or 0) > 0, "what it is held against has its weights in fp32"


def test_weights_that_the_precision_converts_are_its_own(tmp_path: Path, local: LocalBackend) -> None:
    (tmp_path / "train.py").write_text(CONVERTING.replace("enabled=", "enabled=False and "))
    _, found = described([sys.executable, str(tmp_path / "train.py"), "--precision", "{precision=bf16}"], local)
    assert isinstance(found, Description), found
    assert (found.as_found_precision, found.weights) == ("bf16", "fp32")


def test_a_precision_that_shows_nowhere_is_not_taken_for_the_weights(tmp_path: Path, local: LocalBackend) -> None:
    (tmp_path / "train.py").write_text(IN_BF16.replace("enabled=", "enabled=False and "))
    with pytest.raises(WorkloadError, match="does not reach"):
        described([sys.executable, str(tmp_path / "train.py"), *PRECISION], local)


def test_an_ignored_placeholder_is_an_error_that_names_both_values(script: str, local: LocalBackend) -> None:
    with pytest.raises(WorkloadError, match=r"8 samples.*but 4 were requested") as raised:
        described([sys.executable, script, "--be", "ignoring", *BATCH], local)
    assert "--dry-run" in raised.value.next_step


OWN_SIZE = """
import torch
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from range(4096)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Stream(), 8, shuffle=False, collate_fn=lambda _: torch.randn(8, 4))
for number, x in enumerate(loader):
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_batch_size_that_is_set_from_outside_without_effect_is_left_out(tmp_path: Path, local: LocalBackend) -> None:
    (tmp_path / "train.py").write_text(OWN_SIZE)
    backend, found = described([sys.executable, str(tmp_path / "train.py")], local)
    assert isinstance(found, Description), found
    assert "8 samples" in found.unsettable["batch_size"]
    assert "bf16" not in found.unsettable
    assert isinstance(backend.submit(trial(Setting(precision="bf16", batch_size=8))).result(), Measurement)


OWN_ACCUMULATION = """
import accelerate, torch
accelerator = accelerate.Accelerator(cpu=True)
accelerator.gradient_accumulation_steps = 1  # whatever is asked for
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.randn(4096, 4), 8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
def test_an_accumulation_that_is_set_from_outside_without_effect_leaves_the_batch_size(
    tmp_path: Path, local: LocalBackend
) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(OWN_ACCUMULATION)
    _, found = described([sys.executable, str(tmp_path / "train.py")], local)
    assert isinstance(found, Description), found
    assert found.unsettable.keys() & {"batch_size", "accumulation_steps", "bf16"} == {"accumulation_steps"}


@pytest.mark.slow
def test_a_batch_size_that_is_set_from_outside_without_effect_leaves_the_accumulation(
    tmp_path: Path, local: LocalBackend, settings: list[Setting]
) -> None:
    pytest.importorskip("accelerate")
    prepares = "model, optimizer = accelerator.prepare(model, optimizer)\nloader = "
    text = OWN_SIZE.replace(
        "loader = ", f"import accelerate\naccelerator = accelerate.Accelerator(cpu=True)\n{prepares}"
    )
    text = text.replace("    model(x)", "  with accelerator.accumulate(model):\n    model(x)")
    (tmp_path / "train.py").write_text(text)
    _, found = described([sys.executable, str(tmp_path / "train.py")], local)
    assert isinstance(found, Description), found
    assert found.unsettable.keys() & {"batch_size", "accumulation_steps", "bf16"} == {"batch_size"}
    assert [setting.batch_size for setting in settings] == [8, 4, 8]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["{python}", "{script}", "--be", "broken"], "KeyError: 'the moon is full'"),
        (["{python}", "{script}", "--be", "finished"], "checkpoint"),
        pytest.param(["{python}", "-E", "{script}"], "-E", marks=pytest.mark.slow),
        (["{python}", "-c", "print(1)"], "torch"),
    ],
)
def test_what_is_not_seen_to_train_says_why(script: str, local: LocalBackend, command: list[str], named: str) -> None:
    filled = [part.replace("{python}", sys.executable).replace("{script}", script) for part in command]
    _, found = described(filled, local, 30.0 if "-E" in command else SECONDS)
    assert isinstance(found, Failure), found
    assert named in f"{found.message} {found.details}"


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_training_of_too_few_steps_is_told_to_train_on(tmp_path: Path, local: LocalBackend, num_steps: int) -> None:
    text = SCRIPT.replace("range(1000)", "range(1)").replace("4096", str(8 * num_steps))
    (tmp_path / "train.py").write_text(text)
    with pytest.raises(WorkloadError, match=f"after {num_steps} optimizer step") as raised:
        described([sys.executable, str(tmp_path / "train.py")], local)
    assert "more epochs" in raised.value.next_step


def test_a_command_that_never_imports_torch_is_told_so_and_not_to_wait_longer(local: LocalBackend) -> None:
    with pytest.raises(WorkloadError, match="imported torch") as raised:
        described([sys.executable, "-c", "import time; time.sleep(1000)", *BATCH], local, seconds=3.0)
    assert "torch.optim" in raised.value.next_step


def test_a_budget_for_less_than_a_search_says_what_would_do(
    script: str, local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_backend, "MIN_NUM_RUNS", 1_000_000)
    with pytest.raises(BudgetTooSmallError, match="until its steps are measured") as raised:
        described([sys.executable, script], local)
    assert "--budget" in raised.value.next_step


def test_what_described_the_command_measured_the_first_trials_of_both_settings(
    script: str, local: LocalBackend, settings: list[Setting]
) -> None:
    backend, found = described([sys.executable, script, *BATCH, *PRECISION], local, is_batch_free=False)
    assert isinstance(found, Description)
    both = [Setting(precision="fp32", batch_size=8), Setting(precision="bf16", batch_size=8)]
    assert settings == both, "nothing makes up for another batch size, so none is tried"
    for setting in both:
        assert isinstance(backend.submit(trial(setting)).result(), Measurement)
    assert settings == both
    for setting in (both[0], replace(both[1], batch_size=4)):
        assert isinstance(backend.submit(trial(setting)).result(), Measurement)
    assert len(settings) == 4, "it counts once, and for what it ran alone"


def test_a_trial_in_an_environment_of_its_own_is_run(
    script: str, local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, found = described([sys.executable, script], local)
    assert isinstance(found, Description), found
    monkeypatch.setattr(Command, "run", lambda *_, **__: pytest.fail("it is run"))
    with pytest.raises(pytest.fail.Exception, match="it is run"):
        backend.submit(replace(trial(Setting(precision="fp32", batch_size=8)), environment={"HELD": "1"}))


@pytest.mark.parametrize(("device", "seen"), [("cuda:1", "GPU-b"), ("cuda", "GPU-a,GPU-b")])
def test_a_command_sees_only_the_gpu_that_was_asked_for_by_its_number(
    device: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    identity = replace(HARDWARE.identity, uuid="GPU-b")
    local = Mock(**{"submit.return_value.result.return_value": replace(HARDWARE, identity=identity)})
    command = Command(CommandTemplate.of("printenv CUDA_VISIBLE_DEVICES"))
    CommandBackend(command, local, Watcher()).submit(ProbeJob(device=device)).result()
    completed = command.run(
        RunRequest.of(Setting(precision="fp32", batch_size=8)), Deadlines(), lambda _: False, Watcher()
    )
    assert completed.state.printed == f"{seen}\n"


@pytest.mark.parametrize("uuid", [None, "6e7cc4d0"], ids=["ROCm", "XPU"])
def test_a_gpu_that_a_command_cannot_be_given_by_its_number_is_an_error(uuid: str | None) -> None:
    name = "xpu" if uuid else "cuda"
    identity = replace(HARDWARE.identity, type=name, uuid=uuid)
    local = Mock(**{"submit.return_value.result.return_value": replace(HARDWARE, identity=identity)})
    command = Command(CommandTemplate.of("true"))
    backend = CommandBackend(command, local, Watcher())
    backend.submit(ProbeJob(device=f"{name}:0"))
    with pytest.raises(DeviceError, match=f"{name}:1"):
        backend.submit(ProbeJob(device=f"{name}:1"))
    assert command.environment == {}


def test_steps_that_a_search_has_no_time_for_are_found_out_by_the_second(script: str, local: LocalBackend) -> None:
    slow = [sys.executable, script, "--be", "slow", *PRECISION]
    with pytest.raises(BudgetTooSmallError, match="until its steps are measured"):
        described(slow, local, seconds=15.0)


@pytest.mark.slow
def test_a_run_leaves_nothing_in_the_working_directory(
    script: str, local: LocalBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    described([sys.executable, script], local)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_a_failure_of_the_agent_is_not_called_the_commands(tmp_path: Path, local: LocalBackend) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
class Odd(torch.utils.data.SequentialSampler):
    sampler = property(lambda self: 1 / 0)
data = torch.utils.data.TensorDataset(torch.ones(64, 1))
torch.utils.data.DataLoader(data, batch_size=8, sampler=Odd(data))
"""
    )
    with pytest.raises(RunnerError, match="defect of autotune_amp") as raised:
        described([sys.executable, str(script)], local)
    assert "ZeroDivisionError" in raised.value.message

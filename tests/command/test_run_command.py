"""`autotune-amp run`: the real training in this process's place, set from outside."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from forked_python import ForkServer
from msgspec.structs import replace
from torch import nn

from autotune_amp.command.agent.real import _convert_to_controller, _SettingReport
from autotune_amp.command.run import command_to_start, start
from autotune_amp.command.running import INJECTED
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError, StudyError, WorkloadError
from autotune_amp.core.evidence import BaselineEvidence, Evidence
from autotune_amp.core.hardware import DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import Description
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary

MIB = 2**20
LOOP = """
import sys, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
{before}
for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
    {step}
print("size", len(x), "dtype", model(x).dtype)
"""
PLAIN = "nn.functional.mse_loss(model(x), y).backward(); optimizer.step()"


def recommendation(
    precision: Any = "bf16", batch_size: int = 16, line: CommandTemplate | None = None, **config: Any
) -> Recommendation:
    """One for a command that trains in fp32 with batches of 8."""
    return Recommendation(
        config=AmpConfig(precision=precision, batch_size=batch_size, **config),
        evidence=Evidence(
            samples_per_second=2.0,
            samples_per_second_interval=(2.0, 2.0),
            step_seconds=1.0,
            peak_memory_bytes=MIB,
            baseline=BaselineEvidence(
                config=AmpConfig(precision="fp32", batch_size=8),
                samples_per_second=1.0,
                samples_per_second_interval=(1.0, 1.0),
                step_seconds=1.0,
                peak_memory_bytes=MIB,
            ),
            speedup=2.0,
            speedup_interval=(2.0, 2.0),
            num_processes=3,
            is_confirmed=True,
            data_share=0.0,
        ),
        reason="",
        warnings=(),
        excluded=(),
        candidates=(),
        search=SearchSummary(study="train", num_trials=1, num_failures=0, seconds=1.0),
        hardware=Hardware(
            device="cpu",
            identity=DeviceIdentity(type="cpu", name="", num_cpus=2, total_memory_bytes=MIB),
            memory=DeviceMemory(total=MIB, free=MIB, available=MIB, container_limit=None),
            precisions={},
            notes=(),
        ),
        versions={},
        fingerprint=Fingerprint(digest="", parts={}),
        workload=Description(
            name="train",
            batch_size=8,
            num_samples=64,
            data="",
            num_parameters=9,
            num_trainable_parameters=9,
            weights="fp32",
            as_found_precision="fp32",
            is_as_found_strict=True,
            build_seconds=0.0,
            context_seconds=0.0,
        ),
        command_template=line,
    )


Run = Callable[..., subprocess.CompletedProcess[str]]
PROGRAM = Path(__file__).with_name("forked_run.py")


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    """`autotune-amp run study -- python train.py`, forked from a process that has imported torch."""

    def run(script: str, found: Recommendation | None = None) -> subprocess.CompletedProcess[str]:
        (tmp_path / "train.py").write_text(script)
        _, _, _, *arguments = command(tmp_path, found or recommendation())
        return fork_server.run([str(PROGRAM), *arguments], cwd=tmp_path, env=dict(os.environ))

    return run


def command(folder: Path, found: Recommendation) -> list[str]:
    (folder / "study").mkdir()
    (folder / "study" / "recommendation.json").write_text(found.to_json())
    ours = [sys.executable, "-c", "from autotune_amp.cli import main; main()", "run", "study", "--"]
    return [*ours, sys.executable, "train.py"]


def test_one_line_says_what_was_set_and_where(run: Run, tmp_path: Path) -> None:
    done = run(LOOP.format(before="", step=PLAIN))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["size", "16", "dtype", "torch.float32"]
    (line,) = done.stderr.splitlines()
    lines = (tmp_path / "train.py").read_text().splitlines()
    made = next(number for number, text in enumerate(lines, 1) if "DataLoader" in text)
    assert line.startswith("autotune-amp: batch size 16 (was 8) in DataLoader at train.py:")
    assert f"train.py:{made};" in line
    assert f"bf16 in the forward of Linear at train.py:{made + 1}" in line


def test_what_could_not_be_set_is_said(run: Run) -> None:
    script = LOOP.format(before="", step=PLAIN).replace("batch_size=8, shuffle=True", "batch_sampler=[[1] * 8] * 4")
    done = run(script, recommendation("fp16", loss_scale=LossScale(), memory_format="channels_last"))
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "NOT set: batch size 16" in line
    assert "NOT set: precision fp16, since no GradScaler" in line
    assert "left to the script: channels_last" in line


def test_that_a_trainer_multiplies_its_batch_by_the_gpus_is_said() -> None:
    for num_gpus in (0, 1, 2):
        report = _SettingReport({})
        report.add("switch", owner="TrainingArguments", today={"n_gpu": num_gpus})
        assert ("torchrun" in "".join(report._problems)) is (num_gpus == 2)


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    """In a process whose place the command takes."""
    (tmp_path / "train.py").write_text("import sys; sys.exit(3)")
    line = command(tmp_path, recommendation())
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (3, "")


def test_signals_reach_the_commands_own_handler(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import signal, sys
def end(*_):
    print("ended by itself", flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
""")
    started = subprocess.Popen(
        command(tmp_path, recommendation()), cwd=tmp_path, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGTERM)
    out, _ = started.communicate(timeout=100)
    assert (out, started.returncode) == ("ended by itself\n", 5)


SCALED = LOOP.format(
    before="scaler = {scaler}\nprint(type(scaler).__name__, isinstance(scaler, torch.amp.GradScaler))",
    step="""
    with torch.autocast("cpu", torch.float16, enabled=False):
        output = model(x)
        loss = nn.functional.mse_loss(output.float(), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(output.dtype, scaler.get_scale())
    optimizer.zero_grad()
    {after}
""",
)


@pytest.mark.parametrize("scaler", ["torch.amp.GradScaler('cpu', enabled=False)", "torch.cuda.amp.GradScaler(2.0**16)"])
def test_the_controller_in_the_scalers_place(run: Run, scaler: str) -> None:
    done = run(SCALED.replace("{scaler}", scaler).replace("{after}", ""))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["PrecisionController True", "torch.bfloat16 1.0"]
    assert "PrecisionController in GradScaler's place" in done.stderr
    assert "bf16 in autocast" in done.stderr


FOLDS = """
import torch
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        self.is_cast = torch.is_autocast_enabled("cpu")
        return super().forward(x)
for fold in range(2):
    critic, generator = Net(8, 1), Net(8, 8)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (critic, generator)]
    scalers = [torch.amp.GradScaler("cpu", enabled=False) for _ in range(2)]
    for number in range(12):
        x, is_last = torch.randn(4, 8), number % 6 == 5
        with torch.set_grad_enabled(is_last):
            fake = generator(x)
        scalers[is_last].scale(critic(fake).sum()).backward()
        scalers[is_last].step(optimizers[is_last])
        scalers[is_last].update()
    print(critic.is_cast, generator.is_cast, *(type(each).__name__ for each in scalers))
"""


def test_models_and_scalers_that_are_made_later_are_set_too(run: Run) -> None:
    done = run(FOLDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True True PrecisionController GradScaler"] * 2
    assert done.stderr.count("second GradScaler") == 1


def test_models_of_an_optimizer_that_was_pickled_are_set_in_the_first_steps(run: Run, tmp_path: Path) -> None:
    models = nn.Linear(8, 1), nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(each.parameters()) for each in models]
    (tmp_path / "state").write_bytes(pickle.dumps((models, optimizers)))
    done = run("""
import pickle, torch
models, optimizers = pickle.load(open("state", "rb"))
for model, optimizer in zip(models, optimizers):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    print("forward" in vars(model))
""")
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


def test_records_do_not_grow_while_a_script_makes_its_optimizers_anew(run: Run) -> None:
    count = """
import gc
[recorder] = [each for each in gc.get_objects() if type(each).__name__ == "PassRecorder"]
print("records", len(recorder.pop_record()["forwards"]))
"""
    done = run(LOOP.format(before="", step=f"optimizer = torch.optim.SGD(model.parameters()); {PLAIN}") + count)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] in ("records 0", "records 1")


def test_regions_follow_the_controller_down(run: Run) -> None:
    plan = FallbackPlan(precision="fp32", batch_size=16)
    found = recommendation("fp16", fallback=(plan,), loss_scale=LossScale(init_scale=256.0))
    script = SCALED.replace("{scaler}", "torch.amp.GradScaler('cpu', enabled=False)")
    done = run(script.replace("{after}", "scaler.set_precision('fp32')"), found)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:3] == ["torch.float16 256.0", "torch.float32 1.0"]


def test_a_scripts_own_scale_and_tf32_flags_stay_as_the_trials_of_a_command_had_them(run: Run) -> None:
    script = SCALED.replace("{scaler}", "torch.amp.GradScaler('cpu', 2.0**10, growth_interval=1)").replace(
        "{after}", ""
    )
    found = recommendation("fp16", line=CommandTemplate.of("python train.py"), loss_scale=LossScale())
    done = run(f"{script}\nprint('cudnn', torch.backends.cudnn.allow_tf32)", found)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("PrecisionController True", "torch.float16 2048.0", "cudnn True")


def test_flags_stay_as_the_trials_of_a_command_had_them_where_fp32_is_set_from_outside(run: Run) -> None:
    found = recommendation("fp32", line=CommandTemplate.of("python train.py"))
    assert found.workload is not None
    found = replace(found, workload=replace(found.workload, as_found_precision="bf16"))
    script = SCALED.replace("torch.float16, enabled=False", "torch.bfloat16").replace("{after}", "")
    script = script.replace("{scaler}", "torch.amp.GradScaler('cpu', enabled=False)")
    done = run(f"{script}\nprint('cudnn', torch.backends.cudnn.allow_tf32)", found)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines[0], lines[1], lines[-1]) == ("PrecisionController True", "torch.float32 1.0", "cudnn True")
    assert "fp32 (was bf16) in autocast" in done.stderr


def test_a_scripts_own_scale_may_begin_above_our_limit(tmp_path: Path) -> None:
    found = recommendation("fp16", line=CommandTemplate.of("python train.py"), loss_scale=LossScale())
    (tmp_path / "recommendation.json").write_text(found.to_json())
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**25, growth_interval=1e3)  # type: ignore[arg-type]
    path = str(tmp_path / "recommendation.json")
    assert _convert_to_controller(_SettingReport({}), scaler, path=path, device="cpu") is scaler
    assert scaler.get_scale() == 2.0**25


def test_what_the_command_says_itself_is_not_set_from_outside() -> None:
    path = Path("study/recommendation.json")
    line = CommandTemplate.of("python train.py --bs {batch_size=8}")
    found = recommendation(line=line)
    assert command_to_start(["python", "train.py", "--bs", "{batch_size}"], found, path) == (
        ("python", "train.py", "--bs", "16"),
        {"precision": "bf16"},
        {},
        (),
    )
    words = recommendation(
        line=CommandTemplate.of("python train.py {precision=32-true}", values={"bf16": "bf16-mixed", "fp32": "32-true"})
    )
    assert command_to_start(["python", "train.py", "{precision=32-true}"], words, path)[0][-1] == "bf16-mixed"
    assert command_to_start(["python", "train.py", "--bs", "16"], found, path)[1] == {"precision": "bf16"}
    plain, outside, *_ = command_to_start(["python", "train.py"], found, path)
    assert (plain, outside) == (("python", "train.py"), {"precision": "bf16", "batch_size": 16})
    with pytest.raises(InvalidRequestError, match="trial_dir"):
        command_to_start(["python", "train.py", "{trial_dir}"], found, path)


def test_what_only_a_line_of_the_script_can_set_is_named_and_fp8_refused() -> None:
    path = Path("study/recommendation.json")
    found = recommendation(compile="default", num_workers=4, pinned_modules=["norm"], allocator="expandable_segments")
    named = command_to_start(["python", "train.py"], found, path).left_out
    assert [word in "; ".join(named) for word in ("pinned", "4 loader workers", "compiled")] == [True] * 3
    assert len(named) == 3
    _, outside, _, named = command_to_start(["python", "train.py"], recommendation("fp8"), path)  # of a workload
    assert (outside, named) == ({"batch_size": 16}, ("fp8",))
    line = CommandTemplate.of("python train.py --amp {precision=fp32}")
    with pytest.raises(InvalidRequestError, match=r"fp8(.|\n)*prepare"):
        command_to_start(["python", "train.py"], recommendation("fp8", line=line), path)
    assert command_to_start(["python", "train.py", "--amp", "fp8"], recommendation("fp8", 8, line), path).outside == {}


def test_a_command_that_sets_the_path_of_python_is_set_from_outside_too() -> None:
    command = ["env", "PYTHONPATH=src", "python", "train.py"]
    arguments, *_ = command_to_start(command, recommendation(), Path("study/recommendation.json"))
    assert arguments == ("env", f"PYTHONPATH={INJECTED}:src", "python", "train.py")


def test_a_recommended_argument_is_filled_in_or_has_to_be_in_the_command() -> None:
    path, placeholder = Path("study/recommendation.json"), "{ckpt=off:on=--gc 2|off=}"
    line = CommandTemplate.of(["python", "train.py", placeholder])
    found = recommendation(line=line, arguments=(("ckpt", "on"),))
    for words in ([placeholder], ["--gc", "2"]):
        assert command_to_start(["python", "train.py", *words], found, path)[0] == ("python", "train.py", "--gc", "2")
    with pytest.raises(InvalidRequestError, match=r"ckpt=on(.|\n)*--gc 2"):
        command_to_start(["python", "train.py"], found, path)
    with pytest.raises(InvalidRequestError, match="ckpt=on"):  # the words apart are others
        command_to_start(["python", "train.py", "--gc", "20"], found, path)
    line = CommandTemplate.of(["python", "train.py", "{ckpt=on:on=--gc|off=}", "--seq={seq=2048:1024}"])
    off = recommendation(line=line, arguments=(("ckpt", "off"), ("seq", "1024")))
    assert command_to_start(["python", "train.py", "--seq=1024"], off, path)[0][-1] == "--seq=1024"
    for words in (["--gc", "--seq=1024"], ["--seq=2048", "--max_steps", "10240"]):
        with pytest.raises(InvalidRequestError):
            command_to_start(["python", "train.py", *words], off, path)


@pytest.mark.parametrize(
    ("words", "is_set"),
    [
        ("train.py 16 --seed 1", False),
        ("-u train.py 16", False),
        ("src/train.py 16", False),  # another word before it, at the same position
        ("train.py 8 --seed 16", True),
        ("train.py --seed 1 16", True),
    ],
)
def test_a_positional_value_is_in_its_place(words: str, is_set: bool) -> None:
    found = recommendation("fp32", line=CommandTemplate.of("python train.py {batch_size=8}"))
    outside = command_to_start(["python", *words.split()], found, Path("study/recommendation.json")).outside
    assert ("batch_size" in outside) is is_set


@pytest.mark.parametrize(
    ("line", "value", "words", "is_there"),
    [
        (["bash", "-c", "python t.py {ckpt=on:on=--gc 2|off=}"], "off", ["bash", "-c", "python t.py --more"], True),
        (["bash", "-c", "python t.py {ckpt=on:on=--gc 2|off=}"], "off", ["bash", "-c", "python t.py --gc 2"], False),
        (["bash", "-c", "python t.py {ckpt=off:on=--gc 2|off=}"], "on", ["bash", "-c", "python t.py --gc=2 -x"], True),
        (["python", "t.py", "model.ckpt={ckpt=off:on}"], "on", ["python", "t.py", "+model.ckpt=on"], True),
        (["python", "t.py", "model.ckpt={ckpt=off:on}"], "on", ["python", "t.py", "+model.ckpt=off"], False),
    ],
)
def test_an_argument_is_found_inside_of_other_words(line: Any, value: str, words: list[str], is_there: bool) -> None:
    found = recommendation(line=CommandTemplate.of(line), arguments=(("ckpt", value),))
    with nullcontext() if is_there else pytest.raises(InvalidRequestError, match="ckpt"):
        command_to_start(words, found, Path("study/recommendation.json"))


@pytest.fixture
def searched_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recommendation:
    """One for a command whose settings file has placeholders of a setting, of a trial and of the user's own."""
    monkeypatch.chdir(tmp_path)
    Path("study").mkdir()
    Path("c.yaml").write_text("loss: {loss=mse:huber}\nbs: {batch_size=8}\nout: {trial_dir}\n")
    line = CommandTemplate.of("python train.py --port {port} --cfg c.yaml", files=["c.yaml"])
    return recommendation("fp32", line=line, arguments=(("loss", "huber"),))


def test_the_command_that_is_printed_starts_as_it_is_and_with_more_words(searched_file: Recommendation) -> None:
    path = Path("study/recommendation.json")
    printed, files = searched_file.filled_command(path.parent)
    assert printed == ("python", "train.py", "--port", "29500", "--cfg", "study/c.yaml")
    assert files == {"study/c.yaml": "loss: huber\nbs: 16\nout: OUTPUT_DIR\n"}
    for words in (
        printed,
        (*printed, "--epochs", "100"),
        [*printed[:2], "--port=1", "--seed=16", "--cfg=study/c.yaml"],
    ):
        assert command_to_start(words, searched_file, path) == (tuple(words), {}, {}, ())
    with pytest.raises(InvalidRequestError, match="loss=huber"):  # another file of this name
        command_to_start(["python", "train.py", "--cfg", "prod/c.yaml"], searched_file, path)


def test_a_settings_file_is_filled_from_its_text_of_today(
    searched_file: Recommendation, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched_file.save("study/recommendation.json")
    Path("c.yaml").write_text("loss: {loss=mse:huber}\nbs: {batch_size=8}\nout: mine\n")
    Path("study/c.yaml").write_text("as the search wrote it")
    monkeypatch.setattr(os, "execvpe", Mock(side_effect=OSError))
    with pytest.raises(WorkloadError):
        start(["python", "train.py", "--cfg", "c.yaml"], Path("study/recommendation.json"))
    assert Path("study/c.yaml").read_text() == "loss: huber\nbs: 16\nout: mine\n"

    written = Mock(side_effect=StudyError("c.yaml cannot be written.", "Choose another folder with --out."))
    monkeypatch.setattr("autotune_amp.command.run.write_atomically", written)
    with pytest.raises(WorkloadError):  # the file has this text already
        start(["python", "train.py", "--cfg", "c.yaml"], Path("study/recommendation.json"))
    Path("study/c.yaml").unlink()
    with pytest.raises(StudyError) as raised:
        start(["python", "train.py", "--cfg", "c.yaml"], Path("study/recommendation.json"))
    assert "--out" not in raised.value.next_step


@pytest.mark.parametrize("keeps", [False, True])
def test_the_batch_of_each_rank_and_a_total_that_the_script_keeps(keeps: bool) -> None:
    path = Path("study/recommendation.json")
    line = CommandTemplate.of("torchrun --master_port {port} train.py --bs {batch_size=8}")
    found = recommendation("fp32", line=replace(line, keeps_effective_batch_size=keeps), accumulation_steps=2)
    assert found.workload is not None
    found = replace(found, workload=replace(found.workload, num_sharing=2, num_ranks=2))
    accumulation = {} if keeps else {"accumulation_steps": 2}
    for words in ("torchrun --master_port 1 train.py --bs 16", "torchrun train.py --seed 1 --bs=16"):
        assert command_to_start(words.split(), found, path).outside == accumulation
    for words in ("torchrun train.py --seed 16", "torchrun train.py --bs 32"):
        assert command_to_start(words.split(), found, path).outside == {"batch_size": 8, **accumulation}

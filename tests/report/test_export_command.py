from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from msgspec.structs import replace
from report_samples import recommendation
from scripted_backend import described

from autotune_amp.cli import run
from autotune_amp.command.run import command_to_start
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.bridge import config_and_options
from autotune_amp.integrations.export import export, export_source


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recommendation:
    """The latest of two recommendations below ./studies."""
    config = AmpConfig(precision="bf16", batch_size=64, accumulation_steps=2, fallback=("fp32",))
    best = recommendation(config=config)
    for name, one in (("older", recommendation()), ("latest", best)):
        folder = tmp_path / "studies" / name
        folder.mkdir(parents=True)
        one.save(folder / "recommendation.json")
    monkeypatch.chdir(tmp_path)
    return best


def test_export_prints_text_and_notes(saved: Recommendation, capsys: pytest.CaptureFixture[str]) -> None:
    origin = "studies/latest: bf16 batch 64 x 2, measured at 412 samples/s"
    assert run(["export", "--to", "torch"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == f"# autotune-amp export of {origin}"
    assert "loader = DataLoader(dataset, batch_size=64)" in captured.out
    assert captured.err == ""
    assert run(["export", "studies/latest", "--to", "deepspeed"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["gradient_accumulation_steps"] == saved.config.accumulation_steps
    assert "the fallback to fp32" in captured.err
    assert run(["export", "--to", "deepspeed", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["to"], document["text"]) == (1, "deepspeed", captured.out)
    assert document["notes"][0] == f"{origin}."


def test_a_commands_own_tf32_flags_and_loss_scale_are_kept(saved: Recommendation) -> None:
    config = AmpConfig(precision="fp16", batch_size=64, loss_scale=LossScale())
    line = CommandTemplate.of("python train.py")
    for template in (None, line):
        hardware = replace(saved.hardware, identity=replace(saved.hardware.identity, type="cuda"))
        found = replace(saved, config=config, command_template=template, hardware=hardware)
        text = export(export_source(found, "a study"), "torch").text
        assert ("allow_tf32" in text, "init_scale=" in text, "max_scale=" in text) == (template is None,) * 3
        assert ("loss scale" in dict(found.facts())) is (template is None)
        assert config_and_options(found)[0].as_found is (template is not None)


def test_a_recommendation_of_eight_ranks_is_exported_for_as_many(
    saved: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = described(num_ranks=8, num_sharing=8)
    plan = FallbackPlan(precision="fp32", batch_size=32)
    config = AmpConfig(precision="bf16", batch_size=64, fallback=(plan,))
    replace(saved, config=config, workload=workload).save("studies/latest/recommendation.json")
    texts = {}
    for target, out in (("torch", "l.py"), ("accelerate", "l.py"), ("accelerate", "a.yaml"), ("deepspeed", "d.json")):
        assert run(["export", "--to", target, "--out", out]) == 0
        texts[f"{target} {out}"] = Path(out).read_text() + capsys.readouterr().err
    assert all("of all 8 ranks" in text and "8 processes" in text for text in texts.values())
    assert "batch_size=8)" in texts["torch l.py"]
    assert 'FallbackPlan(precision="fp32", batch_size=4)' in texts["accelerate l.py"]
    for script in ("accelerate l.py", "accelerate a.yaml"):  # on a CPU `accelerate launch` starts one
        assert "torchrun --nproc_per_node 8" in texts[script]
        assert "# accelerate launch" not in texts[script]
        assert "accelerate launch --num" not in texts[script]
    assert "num_processes: 8\n" in texts["accelerate a.yaml"]
    assert 'distributed_type: "MULTI_CPU"\n' in texts["accelerate a.yaml"]
    assert '"train_micro_batch_size_per_gpu": 8' in texts["deepspeed d.json"]


def test_the_training_job_of_slurm_has_a_folder_in_place_of_that_of_a_trial(
    saved: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("studies/latest/recommendation.json")
    line = "torchrun --master_port {port} t.py --out {trial_dir}/x --x '{{port}} ${port}' --bs {batch_size=4}"
    found = replace(saved, command_template=CommandTemplate.of(line))
    found.save(path)
    assert run(["export", "--to", "slurm"]) == 0
    jobs = capsys.readouterr().out.splitlines()
    job = next(each for each in jobs if each.startswith("srun autotune-amp run")).removesuffix(" &")
    assert any(each.startswith("# Replace OUTPUT_DIR") for each in jobs)
    command = shlex.split(job)[5:]
    assert command_to_start(command, found, path).arguments == tuple(
        shlex.split("torchrun --master_port 29500 t.py --out OUTPUT_DIR/x --x '{port} ${port}' --bs 64")
    )


def test_the_jobs_of_slurm_say_which_values_a_settings_file_lacks(
    saved: Recommendation, capsys: pytest.CaptureFixture[str]
) -> None:
    path, file = Path("studies/latest/recommendation.json"), Path("c.yaml")
    for text, is_ready in (("out: {trial_dir}\nbs: {batch_size=4}\n", False), ("out: {trial_dir=mine}\n", True)):
        file.write_text(text)
        found = replace(saved, command_template=CommandTemplate.of("python t.py --cfg c.yaml", files=["c.yaml"]))
        found.save(path)
        assert run(["export", "--to", "slurm"]) == 0
        assert (
            any("c.yaml replace {trial_dir}" in each for each in capsys.readouterr().out.splitlines()) is not is_ready
        )
    _, _, files, _ = command_to_start(["python", "t.py", "--cfg", "c.yaml"], found, path)
    assert files == {"studies/latest/c.yaml": "out: mine\n"}


@pytest.mark.usefixtures("saved")
def test_export_writes_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--to", "accelerate", "--out", "loop.py"]) == 0
    assert "AutotuneAccelerator(config, cpu=True)" in Path("loop.py").read_text()
    assert run(["export", "--to", "accelerate", "--out", "accelerate.yaml"]) == 0
    assert 'mixed_precision: "bf16"\n' in Path("accelerate.yaml").read_text()
    assert capsys.readouterr().out == "loop.py\naccelerate.yaml\n"


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("target", ["transformers", "env", "deepspeed"])
def test_export_writes_over_exports_and_over_nothing_else(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    mine = Path("train.py")
    mine.write_text("# everything that I have\n")
    assert run(["export", "--to", target, "--out", "train.py"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, mine.read_text()) == ("", "# everything that I have\n")
    assert ("train.py exists" in captured.err, "--out" in captured.err) == (True, True)
    mine.unlink()
    assert run(["export", "studies/older", "--to", target, "--out", "train.py"]) == 0
    older = mine.read_text()
    assert run(["export", "studies/latest", "--to", target, "--out", "train.py"]) == 0
    assert mine.read_text() != older
    capsys.readouterr()
    assert run(["export", "--to", "keras", "--json"]) == 2
    assert "'keras'" in json.loads(capsys.readouterr().out)["error"]["message"]

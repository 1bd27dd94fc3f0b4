"""A script's own mode or address of an experiment tracker does not count in a trial."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from running_commands import run_command


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_mode_that_a_script_gives_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "swanlab.py").write_text("def init(project, mode): return f'{project} {mode}'")
    (tmp_path / "neptune.py").write_text("def init_run(project, mode): return f'{project} {mode}'")
    (tmp_path / "wandb.py").write_text("")  # another module of that name
    (tmp_path / "train.py").write_text("""
import neptune, wandb
from swanlab import init
print(init("mine", mode="cloud"), neptune.init_run(project="mine", mode="async"))
""")
    assert "mine disabled mine debug" in run_command([sys.executable, "train.py"]).state.printed


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_records_nothing(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import wandb
with wandb.init(project="mine", mode="offline") as run:
    print("disabled is", run.disabled)
""")
    assert "disabled is True" in run_command([sys.executable, "train.py"]).state.printed
    assert not (tmp_path / "wandb").exists()


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
@pytest.mark.slow
def test_mlflow_keeps_the_trials_address(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os
kept = os.environ["MLFLOW_TRACKING_URI"]
os.environ["MLFLOW_TRACKING_URI"] = "http://mine:1"
import mlflow
mlflow.set_tracking_uri("http://mine:1")
client = mlflow.MlflowClient(tracking_uri="http://mine:1")
print("kept is", mlflow.get_tracking_uri() == client.tracking_uri == kept)
""")
    assert "kept is True" in run_command([sys.executable, "train.py"]).state.printed

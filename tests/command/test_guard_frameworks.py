"""Trials of Transformers' and Lightning's scripts in a folder where an earlier real run has written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from running_commands import run_command

from autotune_amp.core.outcome import Failure

pytestmark = pytest.mark.slow

TRANSFORMERS = """
import sys, torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

class Model(PreTrainedModel):
    config_class = PretrainedConfig
    def __init__(self, config):
        super().__init__(config)
        self.linear = nn.Linear(8, 1)
        self.post_init()
    def forward(self, x, labels=None):
        out = self.linear(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

data = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(64)]
arguments = TrainingArguments("out", max_steps=int(sys.argv[1]), save_steps=int(sys.argv[2]), logging_steps=1,
                              per_device_train_batch_size=4, push_to_hub="--push" in sys.argv, hub_model_id="me/model")
Trainer(Model(PretrainedConfig()), arguments, train_dataset=data).train()
"""

LIGHTNING = """
import sys, torch, lightning
from torch import nn

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.linear = nn.Linear(8, 1)
    def training_step(self, batch, _):
        loss = self.linear(batch[0]).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
trainer = lightning.Trainer(max_epochs=1, limit_train_batches=int(sys.argv[1]), log_every_n_steps=1,
                            enable_progress_bar=False, accelerator="cpu")
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=4))
"""


def snapshot(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha1(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_transformers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRANSFORMERS)
    subprocess.run([sys.executable, str(script), "4", "4"], check=True, capture_output=True)
    before = snapshot(tmp_path)
    assert any("checkpoint-4/model" in path for path in before)

    ran = run_command([sys.executable, "train.py", "1000", "500"])
    assert ran.verdict == "measured", ran.verdict
    assert ran.files.kept == ()
    assert snapshot(tmp_path) == before

    ran = run_command([sys.executable, "train.py", "1000", "4"])
    assert isinstance(ran.verdict, Failure)
    assert "out/checkpoint-4" in ran.verdict.message
    assert "{trial_dir}" in (ran.verdict.details or "")
    assert f"{script}:" in ran.verdict.message
    assert snapshot(tmp_path) == before

    ran = run_command([sys.executable, "train.py", "1000", "500", "--push"])
    assert isinstance(ran.verdict, Failure)
    assert "me/model" in ran.verdict.message


def test_lightning(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    aside = tmp_path_factory.mktemp("study") / "aside"
    script = tmp_path / "train.py"
    script.write_text(LIGHTNING)
    subprocess.run([sys.executable, str(script), "4"], check=True, capture_output=True)
    before = snapshot(tmp_path)
    assert any(path.endswith(".ckpt") for path in before)

    ran = run_command([sys.executable, "train.py", "1000"], aside=aside)
    assert ran.verdict == "measured", ran.verdict
    assert snapshot(tmp_path) == before
    moved = snapshot(aside)
    assert any(path.startswith("lightning_logs/version_1/") for path in moved)
    assert not [path for path in moved if path.endswith(".ckpt")]

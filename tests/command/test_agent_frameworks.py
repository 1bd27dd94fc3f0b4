"""What the agent sees of trainings that a framework runs, in the form that their users write them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import run

from autotune_amp.command.measure import precision_of
from autotune_amp.command.rank_steps import Rank
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS

pytestmark = pytest.mark.slow

TRANSFORMERS = """
import sys, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)} for _ in range(96)]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=20, use_cpu=True,
    eval_on_start=True, eval_strategy="steps", eval_steps=5, save_strategy="no", report_to=[],
    bf16=sys.argv[1] == "bf16")
Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:32]).train()
"""

LIGHTNING = """
import sys, torch, lightning.pytorch as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, _):
        return self.layer(batch[0]).float().pow(2).mean()
    def validation_step(self, batch, _):
        self.layer(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(256, 8))
trainer = pl.Trainer(
    max_steps=20, accumulate_grad_batches=2, precision=sys.argv[1], accelerator="cpu", logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, val_check_interval=16)
train = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
trainer.fit(Model(), train, torch.utils.data.DataLoader(data, batch_size=32))
"""

ACCELERATE = """
import sys, torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision=sys.argv[1], gradient_accumulation_steps=2)
model = torch.nn.Linear(8, 1)
data = torch.utils.data.TensorDataset(torch.randn(256, 8))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.AdamW(model.parameters()), torch.utils.data.DataLoader(data, batch_size=8, shuffle=True))
for _ in range(2):
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).float().pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def trained(script: str, argument: str, folder: Path) -> Rank:
    (folder / "train.py").write_text(script)
    (rank,) = run([sys.executable, "train.py", argument], folder).ranks.values()
    return rank


@pytest.mark.parametrize(
    ("script", "argument", "precision", "num_samples", "num_steps", "num_intervals"),
    [
        # Of 17 intervals after the warm-up three hold an evaluation, of Lightning's two; the one at its end no step.
        (TRANSFORMERS, "fp32", "fp32", 8, 20, 14),
        (TRANSFORMERS, "bf16", "bf16", 8, 20, 14),
        (LIGHTNING, "32-true", "fp32", 16, 20, 15),
        (LIGHTNING, "bf16-mixed", "bf16", 16, 20, 15),
        (LIGHTNING, "bf16-true", "bf16", 16, 20, 15),
        (ACCELERATE, "no", "fp32", 16, 32, 29),
        (ACCELERATE, "bf16", "bf16", 16, 32, 29),
    ],
)
def test_a_framework(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    argument: str,
    precision: str,
    num_samples: int,
    num_steps: int,
    num_intervals: int,
) -> None:
    monkeypatch.setattr(Rank, "_num_warmup_steps", lambda _: NUM_WARMUP_STEPS)  # as of steps that are steady at once
    rank = trained(script, argument, tmp_path)
    assert len(rank.primary_steps) == num_steps
    assert {(one.num_samples, one.num_passes) for one in rank.intervals()} == {(num_samples, 2)}
    assert len(list(rank.intervals())) == num_intervals
    assert [rank.loaders[name].shuffles for name in rank.training_loaders] == [True]
    assert precision_of(rank) == precision


def test_bf16_is_set_on_a_host_without_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").write_text(TRANSFORMERS.replace(" use_cpu=True,", ""))
    heard = run([sys.executable, "train.py", "fp32"], tmp_path, outside={"precision": "bf16"})
    (rank,) = heard.ranks.values()
    assert precision_of(rank) == "bf16"

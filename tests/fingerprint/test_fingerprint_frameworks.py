"""Models of Transformers and Lightning: what these keep on them beside the model itself is no other model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, logging, os
import lightning, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from autotune_amp import Workload
from autotune_amp.fingerprint import workload_parts

logging.disable()
torch.manual_seed(0)  # what a trained Trainer keeps of its loss is of its draws

def trained():
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (256, 16))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    folder = os.path.join(os.getcwd(), "out")
    today = TrainingArguments(
        folder, per_device_train_batch_size=8, gradient_accumulation_steps=2, use_cpu=True, max_steps=1,
        save_strategy="no", disable_tqdm=True)
    made = Trainer(model, today, train_dataset=rows)
    made.train()
    return made

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fitted():
    module, data = Module(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8, 4)), 4)
    lightning.Trainer(
        max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False).fit(module, data)
    return Workload.from_lightning(module, data)

workloads = {
    "trained": Workload.from_trainer(trained()),
    "fitted": fitted(),
}
print(json.dumps({name: workload_parts(workload)[:2] for name, workload in workloads.items()}))
"""


@pytest.mark.slow
def test_another_process_folder_and_hash_seed_find_the_same_parts(tmp_path: Path) -> None:
    started = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TMPDIR": str(folder)}
        (folder / "train.py").write_text(SCRIPT)
        command = [sys.executable, "train.py"]
        started.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    for name in first:
        assert first[name] == second[name], name
    assert {unknown for _, unknown in first.values() for unknown in unknown} == set()

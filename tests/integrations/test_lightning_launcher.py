"""A script that searches, which leaves its module alone, and trains on two devices: Lightning runs it a second time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from conftest import CommandLine

from autotune_amp.distributed.ranks import is_from_launcher

SCRIPT = """
import json, os, sys
import lightning, torch
from torch import nn
from autotune_amp import Workload, recommend_config
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.integrations.lightning import trainer_arguments

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

class Data(lightning.LightningDataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.samples = torch.utils.data.TensorDataset(torch.randn(64, 8))

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.samples, self.batch_size)

options = dict(budget=40, precision="fp32", batch_size=(4, 4), trials=1, device="cpu", fresh=True)

model = Net()
before = [value.numpy().tobytes() for value in (*model.state_dict().values(), torch.get_rng_state())]
workload = Workload.from_lightning(model, Data())
found = recommend_config(workload, **options)
assert before == [value.numpy().tobytes() for value in (*model.state_dict().values(), torch.get_rng_state())]
said = [int(os.environ.get("LOCAL_RANK", "0")), found.to_json()]
if "LOCAL_RANK" in os.environ:
    try:
        recommend_config(workload, **options, seed=1)
    except AutotuneAmpError as error:
        said.append(f"{type(error).__name__}: {error}")
trainer = lightning.Trainer(**trainer_arguments(
    found.config, max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False))
trainer.fit(model, Data(found.config.batch_size))
with open(f"rank{said[0]}.json", "w") as file:
    json.dump([*said, trainer.world_size, [parameter.tolist() for parameter in model.parameters()]], file)
"""


@pytest.mark.slow
def test_the_processes_that_lightning_starts_take_the_answer_of_the_first(cli: CommandLine) -> None:
    (cli.folder / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in cli.environment.items() if not is_from_launcher(name)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=cli.folder, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((cli.folder / f"rank{rank}.json").read_text()) for rank in (0, 1))
    rank, found, num_processes, weights = first
    assert (rank, num_processes) == (0, 2)
    assert json.loads(found)["search"]["num_trials"] > 0
    assert [second[0], second[1], *second[3:]] == [1, found, num_processes, weights]
    assert second[2].startswith("InvalidRequestError: LOCAL_RANK is '1' without a RANK")
    assert "option seed changed from 0 to 1" in second[2]
    assert done.stderr.count("Study studies") == 1, "the second process searched as well"

"""Search one training as a user of its framework would. Usage: search.py NAME FOLDER BUDGET_SECONDS."""

import sys
import tempfile

import lightning
import with_lightning
import with_transformers
from lightning.pytorch.loggers import CSVLogger

from autotune_amp import Workload, recommend_config


def workload(name, folder):
    if name in with_transformers.TRAININGS:
        return Workload.from_trainer(with_transformers.TRAININGS[name](folder, use_cpu=True))
    module, data, arguments = with_lightning.TRAININGS[name]
    trainer = lightning.Trainer(
        accelerator="cpu", enable_checkpointing=False, max_epochs=3, logger=CSVLogger(folder), **arguments
    )
    return Workload.from_lightning(module(), data(), trainer)


if __name__ == "__main__":
    name, out, budget = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = recommend_config(workload(name, folder), budget=float(budget), out=out, study=name, fresh=True)
    print(found.config)

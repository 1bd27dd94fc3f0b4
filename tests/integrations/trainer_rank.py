"""One of two ranks with an AutotuneTrainer; the odd batches, rank 1's, overflow fp16 from the sixth on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks import main, seen
from trainer_samples import BATCH, fp16, rows, trainer
from transformers.trainer_pt_utils import AcceleratorConfig


def train(rank: int, folder: Path) -> dict[str, Any]:
    data = rows(16 * BATCH)
    for number in (5, 7, 9):
        for row in data[number * BATCH : (number + 1) * BATCH]:
            row["inputs"] *= 1e6
    run = trainer(fp16(), folder, data, max_steps=8, accelerator_config=AcceleratorConfig())
    run.train()
    dtypes = [str(run.model.dtypes(0, 2)), str(run.model.dtypes(5, 8))]
    return {**seen(run.controller, run.model), "dtypes": dtypes, "num_processes": run.accelerator.num_processes}


if __name__ == "__main__":
    main(train)

"""Two ranks, plain child processes joined by gloo, that train with one framework after another: run as a script.

Batches that overflow fp16 come to rank 1 alone; what each rank saw is in its JSON file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate_training
import lightning_samples
import torch
import torch.distributed as dist
import trainer_samples
from torch import nn
from torch.utils.data import DataLoader

from autotune_amp.integrations.accelerate import AutotuneAccelerator
from autotune_amp.runtime.controller import PrecisionController

NUM_RANKS = 2
OVERFLOWING = (5, 7, 9)  # batches: the odd ones are rank 1's


def seen(controller: PrecisionController, model: nn.Module, dtypes: list[Any], num_processes: int) -> dict[str, Any]:
    """What both ranks are to have alike."""
    return {
        "moves": [[move.update, move.kind, move.before, move.after] for move in controller.status().history],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "dtypes": [str(dtypes[0]), str(dtypes[-1])],
        "num_processes": num_processes,
    }


def accelerate(folder: Path) -> dict[str, Any]:
    net, samples = accelerate_training.Net(), accelerate_training.inputs(16)
    for number in OVERFLOWING:
        samples[4 * number : 4 * number + 4] *= 1e6
    config = trainer_samples.fp16()
    accelerator = AutotuneAccelerator(config, cpu=True, rerun=lambda: accelerate_training.loss_of(model, batch))
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    given: Any = samples
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(given, batch_size=4))
    for batch in accelerator.windows(loader):
        with accelerator.accumulate(model):
            accelerator.backward(accelerate_training.loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return seen(accelerator.controller, net, net.dtypes, accelerator.num_processes)


def trainer(folder: Path) -> dict[str, Any]:
    from transformers.trainer_pt_utils import AcceleratorConfig

    size = trainer_samples.BATCH
    data = trainer_samples.rows(16 * size)
    for number in OVERFLOWING:
        for row in data[number * size : (number + 1) * size]:
            row["inputs"] *= 1e6
    options = {"max_steps": 8, "accelerator_config": AcceleratorConfig()}
    run = trainer_samples.trainer(trainer_samples.fp16(), folder, data, **options)
    run.train()
    dtypes = [run.model.dtypes(0, 2), run.model.dtypes(5, 8)]
    return seen(run.controller, run.model, dtypes, run.accelerator.num_processes)


def lightning(folder: Path) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    from autotune_amp.integrations.lightning import trainer_arguments

    net = lightning_samples.Net(first_large=2 if dist.get_rank() == 1 else lightning_samples.NUM_BATCHES)
    arguments = trainer_arguments(
        lightning_samples.fp16(), devices=NUM_RANKS, strategy=DDPStrategy(process_group_backend="gloo")
    )
    run: Any = lightning_samples.trainer(folder, **arguments)
    run.fit(net, lightning_samples.loader(16))
    return seen(run.precision_plugin.controller, net, net.dtypes, run.world_size)


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw, by framework."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(NUM_RANKS)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def main(folder: Path, rank: int) -> None:
    """The launcher's variables are torchrun's."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    found = {}
    for train in (accelerate, trainer, lightning):
        with accelerate_training.fresh_accelerate():
            found[train.__name__] = train(folder)
    (folder / f"{rank}.json").write_text(json.dumps(found, allow_nan=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

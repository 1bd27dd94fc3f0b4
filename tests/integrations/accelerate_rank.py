"""One of two ranks that train with Accelerate, joined by gloo; batches that overflow fp16 come to rank 1 alone."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate_training import Net, inputs, loss_of
from torch.utils.data import DataLoader

from autotune_amp.config import AmpConfig, LossScale
from autotune_amp.integrations.accelerate import AutotuneAccelerator

NUM_RANKS = 2


def train(folder: Path) -> None:
    config = AmpConfig(
        precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=1024.0), fallback=["bf16", "fp32"]
    )
    net = Net()
    samples: Any = inputs(16)
    for number in (5, 7, 9):  # the odd ones are rank 1's
        samples[4 * number : 4 * number + 4] *= 1e6
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    accelerator = AutotuneAccelerator(config, cpu=True, rerun=lambda: loss_of(model, batch))
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(samples, batch_size=4))
    for batch in accelerator.windows(loader):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    history = accelerator.controller.status().history
    document = {
        "num_processes": accelerator.num_processes,
        "moves": [[move.update, move.kind, move.before, move.after] for move in history],
        "dtypes": [str(net.dtypes[0]), str(net.dtypes[-1])],
        "weights": [parameter.tolist() for parameter in net.parameters()],
    }
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(document, allow_nan=False))


if __name__ == "__main__":
    _folder, _rank = Path(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(_rank), "LOCAL_RANK": str(_rank)}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{_folder}/store",
        rank=_rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    train(_folder)
    dist.destroy_process_group()

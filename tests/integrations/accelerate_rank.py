"""One of two ranks that train with Accelerate, joined by gloo; batches that overflow fp16 come to rank 1 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate_training import Net, inputs, loss_of
from ranks import main, seen
from torch.utils.data import DataLoader

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.integrations.accelerate import AutotuneAccelerator


def train(rank: int, folder: Path) -> dict[str, Any]:
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
    dtypes = [str(net.dtypes[0]), str(net.dtypes[-1])]
    return {**seen(accelerator.controller, net), "dtypes": dtypes, "num_processes": accelerator.num_processes}


if __name__ == "__main__":
    main(train)

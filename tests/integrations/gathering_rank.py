"""One of two ranks that gather the numbers of their samples: in the plain loop, in `windows`, and in pieces there."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from autotune_amp.core.config import AmpConfig, FallbackPlan
from autotune_amp.integrations.accelerate import AutotuneAccelerator

NUM_RANKS, NUM_SAMPLES = 2, 20  # of the last two batches 4 samples are the data's own, all on rank 0


def gather(folder: Path) -> None:
    plan = FallbackPlan(precision="fp32", batch_size=4, accumulation_steps=6)
    config = AmpConfig(precision="bf16", batch_size=8, accumulation_steps=3, fallback=[plan])
    accelerator = AutotuneAccelerator(config, cpu=True)
    samples: Any = torch.arange(NUM_SAMPLES)
    loader = accelerator.prepare(DataLoader(samples, batch_size=8))

    def numbers(passes: Iterable[torch.Tensor]) -> list[int]:
        return [number for batch in passes for number in accelerator.gather_for_metrics(batch).tolist()]

    found = {"plain": numbers(loader), "windows": numbers(accelerator.windows(loader))}
    for _ in accelerator.windows(loader):  # a window is not split once it was begun
        accelerator.controller.set_precision("fp32")
    found["pieces"] = numbers(accelerator.windows(loader))
    found["passes"] = [len(batch) for batch in accelerator.windows(loader)]
    found["objects"] = [
        number
        for batch in accelerator.windows(loader)
        for number in accelerator.gather_for_metrics(batch.tolist(), use_gather_object=True)
    ]
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))


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
    gather(_folder)
    dist.destroy_process_group()

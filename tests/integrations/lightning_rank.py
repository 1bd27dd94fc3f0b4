"""One of two ranks under Lightning's DDP; the batches of rank 1 overflow fp16 from the third on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning_samples import NUM_BATCHES, Net, fp16, loader, trainer
from ranks import NUM_RANKS, main, seen

from autotune_amp.integrations.lightning import trainer_arguments


def train(rank: int, folder: Path) -> dict[str, Any]:
    net = Net(first_large=2 if rank == 1 else NUM_BATCHES)
    strategy = DDPStrategy(process_group_backend="gloo")
    run: Any = trainer(folder, **trainer_arguments(fp16(), devices=NUM_RANKS, strategy=strategy))
    run.fit(net, loader(16))
    dtypes = [str(net.dtypes[0]), str(net.dtypes[-1])]
    return {**seen(run.precision_plugin.controller, net), "dtypes": dtypes, "num_processes": run.world_size}


if __name__ == "__main__":
    main(train)

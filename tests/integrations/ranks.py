"""Two ranks that train with a framework, each a plain child process, joined by gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from autotune_amp.runtime.controller import PrecisionController

NUM_RANKS = 2


def run(script: Path, folder: Path) -> list[dict[str, Any]]:
    """What each rank of the script, which calls `main`, saw."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(folder), str(rank)], env=environment)
        for rank in range(NUM_RANKS)
    ]
    try:
        assert [rank.wait(timeout=200) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


def main(train: Callable[[int, Path], dict[str, Any]]) -> None:
    """In a rank: join the other, train, and write what is to be seen. The launcher's variables are torchrun's."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    (folder / f"{rank}.json").write_text(json.dumps(train(rank, folder), allow_nan=False))
    dist.destroy_process_group()


def seen(controller: PrecisionController, model: nn.Module) -> dict[str, Any]:
    """What both ranks are to have alike."""
    return {
        "moves": [[move.update, move.kind, move.before, move.after] for move in controller.status().history],
        "weights": [parameter.tolist() for parameter in model.parameters()],
    }

"""Each framework in a training that overflows fp16: on a CUDA device, and on two ranks, one of which alone sees it.

The ranks are this file run as a script: plain processes joined by gloo; what each saw is in its JSON file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate_training
import pytest
import torch
import torch.distributed as dist
from framework_samples import BATCH, QUIET, fp16
from torch import nn
from torch.utils.data import DataLoader

from autotune_amp.precision import torch_state
from autotune_amp.runtime.controller import PrecisionController

NUM_RANKS, NUM_BATCHES = 2, 16
pytestmark = QUIET
ON_SECOND_RANK = (5, 7, 9)  # batches that overflow: the odd ones are rank 1's


def seen(
    controller: PrecisionController, model: nn.Module, dtypes: Sequence[Any], num_processes: int
) -> dict[str, Any]:
    """What all ranks are to have alike."""
    return {
        "moves": [[move.kind, move.before, move.after] for move in controller.status().history],
        "reasons": [move.reason for move in controller.status().history],
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "dtypes": [str(dtypes[0]), str(dtypes[-1])],
        "num_processes": num_processes,
    }


def accelerate(folder: Path, device: str, overflowing: Sequence[int]) -> dict[str, Any]:
    from autotune_amp.integrations.accelerate import AutotuneAccelerator

    net, samples = accelerate_training.Net(), accelerate_training.inputs(NUM_BATCHES)
    for number in overflowing:
        samples[4 * number : 4 * number + 4] *= 1e6
    accelerator = AutotuneAccelerator(
        fp16(), cpu=device == "cpu", rerun=lambda: accelerate_training.loss_of(model, batch)
    )
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05)
    given: Any = samples
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(given, batch_size=4))
    for batch in accelerator.windows(loader):
        with accelerator.accumulate(model):
            accelerator.backward(accelerate_training.loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    return seen(accelerator.controller, net, net.dtypes, accelerator.num_processes)


def trainer(folder: Path, device: str, overflowing: Sequence[int]) -> dict[str, Any]:
    import trainer_samples
    from transformers.trainer_pt_utils import AcceleratorConfig

    size = BATCH
    data = trainer_samples.rows(NUM_BATCHES * size)
    for number in overflowing:
        for row in data[number * size : (number + 1) * size]:
            row["inputs"] *= 1e6
    options = {"num_train_epochs": 1, "accelerator_config": AcceleratorConfig(), "use_cpu": device == "cpu"}
    run = trainer_samples.trainer(fp16(), folder, data, **options)
    run.train()
    dtypes = [next(iter(run.model.runs[step]))[0] for step in (0, max(run.model.runs))]
    return seen(run.controller, run.model, dtypes, run.accelerator.num_processes)


def lightning(folder: Path, device: str, overflowing: Sequence[int]) -> dict[str, Any]:
    import lightning_samples

    from autotune_amp.integrations.lightning import trainer_arguments

    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    is_last = num_ranks == 1 or dist.get_rank() == num_ranks - 1
    net = lightning_samples.Net(first_large=overflowing[0] // num_ranks if is_last else NUM_BATCHES)
    options: dict[str, Any] = {"accelerator": "cpu" if device == "cpu" else "gpu", "devices": num_ranks}
    if num_ranks > 1:
        from lightning.pytorch.strategies import DDPStrategy

        options["strategy"] = DDPStrategy(process_group_backend="gloo")
    run: Any = lightning_samples.trainer(folder, **trainer_arguments(fp16(), **options))
    run.fit(net, lightning_samples.loader(NUM_BATCHES))
    return seen(run.precision_plugin.controller, net, net.dtypes, run.world_size)


FRAMEWORKS: dict[str, Callable[[Path, str, Sequence[int]], dict[str, Any]]] = {
    train.__name__: train for train in (accelerate, trainer, lightning)
}


@pytest.mark.gpu
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_overflow_on_a_card_is_diagnosed_and_demotes(
    tmp_path: Path, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 1)  # where there are more it would use nn.DataParallel
    before = torch_state.capture()  # the controller and Transformers set TF32 flags
    with accelerate_training.fresh_accelerate():
        found = FRAMEWORKS[framework](tmp_path, "cuda", range(5, NUM_BATCHES))
    torch_state.apply(before)
    assert found["moves"] == [["demotion", "fp16", "bf16"]]
    assert "first in module" in found["reasons"][0], "the batch was not run again"
    assert found["dtypes"] == ["torch.float16", "torch.bfloat16"], "of the autocast for where the inputs are"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by framework."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(folder)]
    started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(NUM_RANKS)]
    try:
        assert [rank.wait(timeout=300) for rank in started] == [0] * NUM_RANKS
    finally:
        for one in started:
            one.kill()
            one.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_overflow_on_one_rank_demotes_both(ranks: list[dict[str, Any]], framework: str) -> None:
    first, second = (rank[framework] for rank in ranks)
    assert {**first, "reasons": ()} == {**second, "reasons": ()}
    assert first["num_processes"] == NUM_RANKS
    assert first["moves"] == [["demotion", "fp16", "bf16"]]
    assert first["dtypes"] == ["torch.float16", "torch.bfloat16"]


def main(folder: Path, rank: int) -> None:
    """The launcher's variables are torchrun's."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60)
    )
    found = {}
    for name, train in FRAMEWORKS.items():
        with accelerate_training.fresh_accelerate():
            found[name] = train(folder, "cpu", ON_SECOND_RANK)
    (folder / f"{rank}.json").write_text(json.dumps(found, allow_nan=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

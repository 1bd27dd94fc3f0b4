"""Trainings of cases.py that can be written as a Workload: `autotune-amp search in_process.py:NAME`, in their folder.

Models, losses and data are the script's own: it is loaded under another name than `__main__`, which trains nothing.
"""

import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from autotune_amp import Workload


def _script(*arguments: str) -> dict[str, Any]:
    sys.argv = ["main.py", *arguments]
    return runpy.run_path("main.py", run_name="script")


def _images(**arguments: Any) -> DataLoader:
    from torchvision import datasets, transforms

    steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    return DataLoader(datasets.MNIST("../data", transform=transforms.Compose(steps)), batch_size=64, **arguments)


def _classified(model: Any, batch: Any) -> torch.Tensor:
    return functional.nll_loss(model(batch[0]), batch[1])


def mnist() -> Workload:
    return Workload(_script()["Net"], _classified, _images(), partial(torch.optim.Adadelta, lr=1.0))


def mnist_rnn() -> Workload:
    return Workload(_script()["Net"], _classified, _images(shuffle=True), partial(torch.optim.Adadelta, lr=0.1))


def vae() -> Workload:
    script = _script("--no-accel")

    def loss(model: Any, batch: Any) -> torch.Tensor:
        reconstructed, mean, log_variance = model(batch[0])
        return script["loss_function"](reconstructed, batch[0], mean, log_variance)

    return Workload(script["VAE"], loss, script["train_loader"], partial(torch.optim.Adam, lr=1e-3))


def nanogpt() -> Workload:
    sys.path.insert(0, str(Path.cwd()))
    from model import GPT, GPTConfig

    config = GPTConfig(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, dropout=0.0, bias=False)

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap("data/shakespeare_char/train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(tokens) - 64, (size,))
        x, y = (
            torch.stack([torch.from_numpy(tokens[at + ahead : at + ahead + 64].astype(np.int64)) for at in starts])
            for ahead in (0, 1)
        )
        return x, y

    def loaded(size: int) -> Any:
        while True:
            yield batch(size)

    return Workload(
        lambda: GPT(config),
        lambda model, xy: model(*xy)[1],
        loaded,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.99)),
        clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    )

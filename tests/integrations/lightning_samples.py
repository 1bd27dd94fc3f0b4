"""A small LightningModule that notes what runs inside it, and Trainers without output, for the tests of the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from framework_samples import ambient
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

NUM_BATCHES = 24
QUIET = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers which may be a bottleneck"),  # tiny data on purpose
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),  # Lightning under this torch
    pytest.mark.filterwarnings("ignore:GPU available but not used"),  # as asked for here
    pytest.mark.filterwarnings("ignore:The number of training batches"),  # and fewer than its logging interval
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),  # as meant here
]


def loader(num_batches: int = NUM_BATCHES, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_batches * batch_size, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=batch_size)


class Net(lightning.LightningModule):
    """Trains on its inputs times `factor` in the batches from `first_large` on: past fp16's range, not fp32's.

    `dtypes` are those that autocast gave inside the first layer, one for each pass.
    """

    def __init__(self, first_large: int = NUM_BATCHES, factor: float = 1e6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.first_large, self.factor = first_large, factor
        self.mean = MeanMetric(nan_strategy="ignore")
        self.dtypes: list[torch.dtype | None] = []
        self.validated: list[torch.dtype | None] = []
        self.net[0].register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        (self.dtypes if self.training else self.validated).append(ambient(inputs[0].device.type))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        factor = self.factor if batch_idx >= self.first_large else 1.0
        loss = nn.functional.mse_loss(self(inputs * factor).float() / factor, targets)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Validated(Net):
    """Validates too; `validated` are the dtypes inside the first layer then."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self(batch[0])


def trainer(folder: Path, **arguments: Any) -> lightning.Trainer:
    """One that writes nothing but what `arguments` ask for."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    if not any(isinstance(callback, ModelCheckpoint) for callback in arguments.get("callbacks", ())):
        quiet["enable_checkpointing"] = False
    return lightning.Trainer(**(quiet | arguments))

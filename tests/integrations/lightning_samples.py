"""A small LightningModule that notes what runs inside it, and Trainers without output, for the tests of the adapter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

import lightning
import torch
from framework_samples import ambient
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

NUM_BATCHES = 24


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


class Drawing(Net):
    """Draws its batches from the loader by itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override] # Lightning's other signature
        (inputs, targets), batch_idx, _ = next(dataloader_iter)
        factor = self.factor if batch_idx >= self.first_large else 1.0
        return nn.functional.mse_loss(self(inputs * factor).float() / factor, targets)


class Validated(Net):
    """Validates too; `validated` are the dtypes inside the first layer then."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self(batch[0])


class Pair(lightning.LightningModule):
    """Two optimizers by hand, both backward passes before the steps; the second's gradient is clipped to norm 0.1."""

    def __init__(self, first_large: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(8, 1), nn.Linear(8, 1)
        self.first_large = first_large
        self.dtypes: list[torch.dtype | None] = []
        self.stepped: list[tuple[bool, bool]] = []
        self.moved: list[float] = []  # by the second

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        optimizers: Any = self.optimizers()
        first, second = optimizers
        self.dtypes.append(ambient())
        factor = 3e3 if batch_idx >= self.first_large else 1.0
        for optimizer, layer, scaling in ((first, self.one, 1.0), (second, self.other, factor)):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(layer(inputs * scaling), targets))
        self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        before = self.other.weight.detach().clone()
        self.stepped.append((bool(first.step()), bool(second.step())))
        self.moved.append(float((self.other.weight.detach() - before).norm()))

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.one, self.other)]


class Data(lightning.LightningDataModule):
    """Doubles the inputs after their transfer."""

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
        self.samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.samples, batch_size=4, shuffle=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class Scheduled(Net):
    """Asks the Trainer how long it trains, and uses its logger."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.trainer.current_epoch == 0
        self.logger.experiment.add_scalar("batch", batch_idx)  # type: ignore[union-attr] # TensorBoard's
        return super().training_step(batch, batch_idx)


class Counted(Data):
    """Knows after its setup how many inputs there are, and augments in training alone."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.num_inputs = self.samples[0][0].numel()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        assert self.trainer.training
        return super().on_after_batch_transfer(batch, dataloader_idx)


class Asking(Net):
    """Asks its Trainer for the DataModule."""

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        self.num_inputs = trainer.datamodule.num_inputs

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)]


class Heard(lightning.Callback):
    """Takes 50 ms of every batch, and notes how the Trainer is."""

    seen: ClassVar[list[Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        time.sleep(0.05)
        self.seen.append((trainer.accumulate_grad_batches, trainer.precision, trainer.gradient_clip_val))

    def on_exception(self, *_: Any) -> None:
        self.seen.append("exception")

    def on_train_end(self, *_: Any) -> None:
        self.seen.append("end")


class Watched(Net):
    """Validates, waits for a plateau of what it finds there, and stops early on it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise AssertionError("a trial validates nothing")

    def configure_callbacks(self) -> Any:
        return [EarlyStopping("val_loss"), ModelCheckpoint()]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Logging(Net):
    """Notes whether what it logs arrives."""

    arrived: ClassVar[set[bool]] = set()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.arrived.add("loss_step" in self.trainer.callback_metrics)


class Clipped(Net):
    """Notes whether the optimizer that steps is fused."""

    fused: ClassVar[list[bool]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fused.append(bool(optimizer.param_groups[0]["fused"]))


class Peaked(Net):
    """Its schedule ends after four steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


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

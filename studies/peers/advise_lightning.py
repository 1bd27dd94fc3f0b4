"""Lightning: BatchSizeFinder by the Tuner, with bf16-mixed."""

import tempfile

import lightning as L
from lightning.pytorch.tuner import Tuner
from user import User, advise


class Module(L.LightningModule):
    def __init__(self, user: User) -> None:
        super().__init__()
        self.user, self.model, self.batch_size = user, user.model, user.part.todays_batch_size

    def training_step(self, batch, _):
        return self.user.loss(self.model, batch)

    def configure_optimizers(self):
        return self.user.optimizer

    def train_dataloader(self):
        return self.user.loader(self.batch_size)


def seek(user: User):
    module = Module(user)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            accelerator="cpu",
            precision="bf16-mixed",
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        tuner = Tuner(trainer)
        tuner.scale_batch_size(module)
    return {"setting": {"precision": "bf16", "batch_size": module.batch_size, "accumulation_steps": 1}}


if __name__ == "__main__":
    advise(seek)

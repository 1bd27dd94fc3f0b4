"""Six trainings with a Lightning Trainer, as their users have them, with random data.

``TRAININGS[name]`` is the LightningModule's class, its LightningDataModule's class and its Trainer's arguments. Imports
nothing of autotune_amp.
"""

import lightning
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

NUM_SAMPLES, NUM_IMAGES, VOCABULARY = 4000, 2000, 500


class Data(lightning.LightningDataModule):
    """Subclasses say what there is, and today's batch size."""

    today = 32
    collate = None

    def __init__(self, batch_size=None, num_workers=0):
        super().__init__()
        self.batch_size, self.num_workers = batch_size or self.today, num_workers

    def setup(self, stage):
        self.samples = self.made(torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(
            self.samples, self.batch_size, shuffle=True, num_workers=self.num_workers, collate_fn=self.collate
        )


class Rows(Data):
    def made(self, generator):
        inputs = torch.randn(NUM_SAMPLES, 64, generator=generator)
        return TensorDataset(inputs, torch.randint(10, (NUM_SAMPLES,), generator=generator))


class Images(Data):
    def made(self, generator):
        inputs = torch.randn(NUM_IMAGES, 3, 32, 32, generator=generator)
        return TensorDataset(inputs, torch.randint(10, (NUM_IMAGES,), generator=generator))


class Augmented(Images):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        images, labels = batch
        return images.flip(3) if torch.rand(()) < 0.5 else images, labels


class Tokens(Data):
    today = 16

    def made(self, generator):
        return TensorDataset(torch.randint(VOCABULARY, (NUM_SAMPLES, 65), generator=generator))


class Listed(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def padded(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([int(row[0]) % 4 for row in rows])


class Ragged(Data):
    today = 16
    collate = staticmethod(padded)

    def made(self, generator):
        lengths = torch.randint(10, 81, (NUM_SAMPLES,), generator=generator).tolist()
        return Listed([torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths])


class Mlp(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def block(width_in, width_out):
    convolution = nn.Conv2d(width_in, width_out, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width_out), nn.ReLU())


class Convnet(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(block(3, 32), block(32, 64), block(64, 128), nn.Flatten(), nn.Linear(2048, 10))

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            *(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width)),
        )

    def forward(self, x):
        return functional.relu(x + self.inner(x))


class Resnet(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(block(3, 32), Residual(32), block(32, 64), Residual(64)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Lstm(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 4)

    def training_step(self, batch, batch_idx):
        states, _ = self.lstm(self.embedding(batch[0]))
        loss = functional.cross_entropy(self.head(states[:, -1]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Transformer(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, VOCABULARY)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch[0][:, :-1], batch[0][:, 1:]
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1])
        logits = self.head(self.layers(self.embedding(inputs), mask=mask, is_causal=True))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-4)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Autoencoder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.GELU(), nn.Linear(256, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 3072))

    def training_step(self, batch, batch_idx):
        codes = self.encoder(batch[0])
        loss = functional.mse_loss(self.decoder(codes), batch[0].flatten(1))
        self.log_dict({"loss": loss, "spread": codes.std(), "size": codes.abs().mean()})
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


TRAININGS = {
    "mlp": (Mlp, Rows, {}),
    "convnet": (Convnet, Images, {"gradient_clip_val": 0.5}),
    "resnet_metrics": (Resnet, Augmented, {"log_every_n_steps": 10, "callbacks": [LearningRateMonitor()]}),
    "lstm": (Lstm, Ragged, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}),
    "transformer": (Transformer, Tokens, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}),
    "autoencoder": (Autoencoder, Images, {"enable_progress_bar": False}),
}

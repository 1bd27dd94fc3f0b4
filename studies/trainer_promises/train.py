"""Train by the framework's own Trainer with a recommended config. Usage: train.py NAME CONFIG_JSON NUM_STEPS.

Prints one JSON line: samples per second over NUM_STEPS optimizer steps after ten. Imports nothing of autotune_amp.
"""

import json
import sys
import tempfile
import time

import lightning
import with_lightning
import with_transformers
from lightning.pytorch.loggers import CSVLogger
from transformers import TrainerCallback

NUM_WARMUP = 10


class Clock:
    """Told of each optimizer step and of the samples taken by then."""

    def __init__(self):
        self.marks = []

    def tick(self, num_samples):
        self.marks.append((time.perf_counter(), num_samples))

    def rate(self):
        (began, before), (ended, after) = self.marks[NUM_WARMUP - 1], self.marks[-1]
        return (after - before) / (ended - began)


class TransformersClock(TrainerCallback):
    def __init__(self, clock, num_rows):
        self.clock, self.num_rows = clock, num_rows

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.tick(state.epoch * self.num_rows)


class LightningClock(lightning.Callback):
    def __init__(self, clock):
        self.clock, self.num_samples, self.num_steps = clock, 0, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.num_samples += len(batch[0])
        if trainer.global_step > self.num_steps:
            self.num_steps = trainer.global_step
            self.clock.tick(self.num_samples)


def train_transformers(name, config, num_steps, folder, clock):
    assert not config["pinned_modules"], "this script pins no modules"
    arguments = {
        "per_device_train_batch_size": config["batch_size"],
        "gradient_accumulation_steps": config["accumulation_steps"],
        "bf16": config["precision"] == "bf16",
        "dataloader_num_workers": config["num_workers"] or 0,
        "max_steps": num_steps,
        "use_cpu": True,
    }
    trainer = with_transformers.TRAININGS[name](folder, **arguments)
    trainer.add_callback(TransformersClock(clock, len(trainer.train_dataset)))
    trainer.train()


def train_lightning(name, config, num_steps, folder, clock):
    assert not config["pinned_modules"], "this script pins no modules"
    module, data, arguments = with_lightning.TRAININGS[name]
    arguments = {**arguments, "accumulate_grad_batches": config["accumulation_steps"]}
    arguments["callbacks"] = [*arguments.get("callbacks", ()), LightningClock(clock)]
    trainer = lightning.Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        precision="bf16-mixed" if config["precision"] == "bf16" else "32-true",
        max_epochs=1000,
        max_steps=num_steps,
        logger=CSVLogger(folder),
        **arguments,
    )
    trainer.fit(module(), data(config["batch_size"], config["num_workers"] or 0))


if __name__ == "__main__":
    name, config, num_steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    assert config["precision"] in ("fp32", "bf16"), f"this script trains in no {config['precision']}"
    clock = Clock()
    train = train_transformers if name in with_transformers.TRAININGS else train_lightning
    with tempfile.TemporaryDirectory() as folder:
        train(name, config, NUM_WARMUP + num_steps, folder, clock)
    found = {"num_steps": len(clock.marks) - NUM_WARMUP, "samples_per_second": clock.rate()}
    print("\n" + json.dumps(found))

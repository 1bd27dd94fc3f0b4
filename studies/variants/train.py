"""A training as one would write it by hand, with a recommended config; imports nothing of autotune_amp.

Usage: train.py NAME CONFIG_JSON NUM_STEPS; prints one JSON line. Optimizer steps after three warm-up steps, which
compile, and on until MIN_SECONDS are over.
"""

import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from trainings import TRAININGS

NUM_WARMUP, MIN_SECONDS = 3, 8.0


def peak_bytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def endless(loader):
    while True:
        yield from loader


def trained_steps(part, config):
    """Optimizer steps, one for each `next`; gives the loss."""
    assert not config["pinned_modules"], "this script pins no modules"
    assert not config["num_workers"], "this script starts no workers"
    assert config["precision"] in ("fp32", "bf16"), "this script has no scaler"
    torch.set_float32_matmul_precision("highest")
    model = part.model().train()
    if config["weights"] == "bf16":
        model.bfloat16()
    if config["activation_checkpointing"] == "blocks":  # only Transformers' models are run so here
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = torch.channels_last if config["memory_format"] == "channels_last" else torch.contiguous_format
    model.to(memory_format=layout)
    which = config["optimizer_impl"]
    optimizer = part.optimizer(model.parameters(), **({} if which == "as_found" else {which: True}))
    if config["compile"] != "off":
        model = torch.compile(model, mode=None if config["compile"] == "default" else config["compile"])
    loader = DataLoader(part.data(), batch_size=config["batch_size"], shuffle=True, drop_last=True)
    batches = endless(loader)
    autocast = torch.autocast("cpu", torch.bfloat16) if config["precision"] == "bf16" else contextlib.nullcontext()
    while True:
        for _ in range(config["accumulation_steps"]):
            batch = [t.to(memory_format=layout) if t.dim() == 4 else t for t in next(batches)]
            with autocast:
                loss = part.loss(model, batch)
            (loss / config["accumulation_steps"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def train(steps, config, num_steps):
    began = time.perf_counter()
    for _ in range(NUM_WARMUP):
        next(steps).item()
    started = last = time.perf_counter()
    step_seconds = []
    while len(step_seconds) < num_steps or last - started < MIN_SECONDS:
        loss = next(steps)
        now = time.perf_counter()
        step_seconds.append(now - last)
        last = now
    return {
        "samples_per_second": config["batch_size"]
        * config["accumulation_steps"]
        * len(step_seconds)
        / (last - started),
        "num_steps": len(step_seconds),
        "warmup_seconds": started - began,
        "step_seconds_quartiles": statistics.quantiles(step_seconds),
        "peak_memory_bytes": peak_bytes(),
        "last_loss": loss.item(),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    config = json.loads(sys.argv[2])
    print(json.dumps(train(trained_steps(TRAININGS[sys.argv[1]], config), config, int(sys.argv[3]))))

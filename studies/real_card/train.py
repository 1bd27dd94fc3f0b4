"""A training by hand with a recommended config, after the search that recommended it; nothing of autotune_amp in it.

Usage: train.py NAME CONFIG_JSON; prints one JSON line. Torch's own switches stand where the config names them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import time

import torch
from torch.utils.data import DataLoader
from workloads import PARTS

NUM_WARMUP, SECONDS = 10, 6.0


def main(name: str, config: dict) -> dict:
    torch.manual_seed(0)
    part, precision = PARTS[name], config["precision"]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    if config["as_found"]:  # torch's own defaults
        torch.backends.cudnn.allow_tf32 = True
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    assert precision != "fp8"
    assert not config["pinned_modules"]
    assert config["weights"] == "as_found"
    assert config["memory_format"] == "contiguous"
    assert config["activation_checkpointing"] == "off"
    scale = config["loss_scale"] or {"init_scale": 65536.0, "growth_interval": 2000}
    scaler = torch.amp.GradScaler(
        "cuda",
        enabled=precision == "fp16",
        init_scale=scale["init_scale"],
        growth_interval=scale["growth_interval"],
    )
    model = part.model().cuda().train()
    optimizer = part.optimizer(model.parameters())
    if config["optimizer_impl"] != "as_found":
        known = inspect.signature(type(optimizer)).parameters
        given = {name: value for name, value in optimizer.defaults.items() if name in known}
        optimizer = type(optimizer)(model.parameters(), **{**given, config["optimizer_impl"]: True})
    if config["compile"] != "off":
        model = torch.compile(model, mode=None if config["compile"] == "default" else config["compile"])
    loader = DataLoader(
        part.data(),
        batch_size=config["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=config["num_workers"] or 0,
    )

    def batches():
        while True:
            yield from loader

    feed = batches()

    def step() -> None:
        for _ in range(config["accumulation_steps"]):
            batch = [tensor.cuda() for tensor in next(feed)]
            with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
                loss = part.loss(model, batch)
            scaler.scale(loss / config["accumulation_steps"]).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(NUM_WARMUP):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began, num_steps = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
        num_steps += 4
    seconds = time.perf_counter() - began
    samples = num_steps * config["batch_size"] * config["accumulation_steps"]
    return {
        "samples_per_second": samples / seconds,
        "num_steps": num_steps,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))

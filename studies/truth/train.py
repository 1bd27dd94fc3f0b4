"""A training of one part as one would write it by hand, with a recommended config; imports nothing of autotune_amp.

Usage: train.py NAME CONFIG_JSON DEVICE NUM_STEPS MEMORY_LIMIT_BYTES|-; prints one JSON line.

NUM_STEPS optimizer steps after three warm-up steps, and on until MIN_SECONDS are over; fewer where they would take more
than MAX_SECONDS. The limit is what the training may take beyond what Python with its libraries and the data holds.
"""

import contextlib
import json
import math
import resource
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import PARTS, of_transformers

NUM_WARMUP, MIN_SECONDS, MAX_SECONDS = 3, 6.0, 40.0


def status_bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def stolen_and_total():
    """Jiffies that the hypervisor gave to others, and all jiffies."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return fields[7], sum(fields)


def endless(loader):
    while True:
        yield from loader


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def trained_steps(part, dataset, config, device):
    """Optimizer steps, one for each `next`; gives the loss."""
    precision, accumulation = config["precision"], config["accumulation_steps"]
    assert not config["pinned_modules"], "this script pins no modules"
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scale = config["loss_scale"] or {"init_scale": 65536.0, "growth_interval": 2000}
    scaler = torch.amp.GradScaler(
        device.type,
        enabled=precision == "fp16",
        init_scale=scale["init_scale"],
        growth_interval=scale["growth_interval"],
    )
    model = part.model().to(device).train()
    optimizer = part.optimizer(model.parameters())
    loader = DataLoader(
        dataset,
        batch_size=config["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=config["num_workers"] or 0,
    )
    batches = endless(loader)
    while True:
        for _ in range(accumulation):
            batch = [tensor.to(device) for tensor in next(batches)]
            with torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext():
                loss = part.loss(model, batch)
            scaler.scale(loss / accumulation).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach()


def train(steps, config, device, num_steps):
    began = time.perf_counter()
    first_loss = next(steps).item()
    for _ in range(NUM_WARMUP - 1):
        next(steps)
    wait(device)
    before = stolen_and_total()
    started = last = time.perf_counter()
    step_seconds = []
    while last - started < MAX_SECONDS and (len(step_seconds) < num_steps or last - started < MIN_SECONDS):
        loss = next(steps)
        now = time.perf_counter()
        step_seconds.append(now - last)
        last = now
    wait(device)
    seconds = time.perf_counter() - started
    last_loss = loss.item()
    after = stolen_and_total()
    effective_batch_size = config["batch_size"] * config["accumulation_steps"]
    is_cuda = device.type == "cuda"
    return {
        "num_steps": len(step_seconds),
        "seconds": seconds,
        "warmup_seconds": started - began,
        "samples_per_second": effective_batch_size * len(step_seconds) / seconds,
        "step_seconds_quartiles": statistics.quantiles(step_seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if is_cuda else status_bytes("VmHWM"),
        "stolen_share": (after[0] - before[0]) / max(1, after[1] - before[1]),
        "first_loss": first_loss,
        "last_loss": last_loss if math.isfinite(last_loss) else None,
    }


if __name__ == "__main__":
    name, config, device, limit = sys.argv[1], json.loads(sys.argv[2]), torch.device(sys.argv[3]), sys.argv[5]
    torch.manual_seed(0)
    dataset = PARTS[name].data()
    if PARTS[name].loss is of_transformers:  # its code is no part of the training's memory
        import_module(f"transformers.models.{name}.modeling_{name}")
    if limit != "-":
        allowed = status_bytes("VmData") + int(limit)
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    try:
        steps = trained_steps(PARTS[name], dataset, config, device)
        print(json.dumps(train(steps, config, device, int(sys.argv[4]))))
    except (MemoryError, RuntimeError) as error:
        print(json.dumps({"failure": f"{type(error).__name__}: {error}".splitlines()[0]}))

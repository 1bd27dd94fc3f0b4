"""One training with what a tool advised, as one would write it by hand; imports nothing of any tool, ours included.

Usage: attain.py NAME SETTING_JSON SECONDS; prints one JSON line. SECONDS are measured after the warm-up. The loss is
that of fixed samples in fp32 without autocast, in the first pause after NUM_LOSS_SAMPLES trained, outside of the time.
"""

import contextlib
import copy
import inspect
import json
import math
import sys
import time

import torch
from torch.utils.data import DataLoader
from user import PARTS, limit_memory, status_bytes

NUM_WARMUP, MAX_WARMUP_SECONDS = 3, 10.0
NUM_LOSS_SAMPLES, NUM_HELD, HELD_CHUNK = 512, 256, 16


def steps(part, dataset, setting, model):
    """Optimizer steps, one for each `next`; gives the loss of the last pass."""
    precision, accumulation = setting["precision"], setting["accumulation_steps"]
    if precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    is_channels_last = setting.get("channels_last") or setting.get("memory_format") == "channels_last"
    if is_channels_last:
        model.to(memory_format=torch.channels_last)
    if setting.get("activation_checkpointing"):  # only Transformers' models are run so here
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = part.optimizer(model.parameters())
    if implementation := setting.get("optimizer_impl"):
        named = {**optimizer.defaults, "foreach": implementation == "foreach", "fused": implementation == "fused"}
        taken = inspect.signature(type(optimizer)).parameters.keys()
        options = {name: value for name, value in named.items() if name in taken}
        optimizer = type(optimizer)(model.parameters(), **options)
    mode = setting.get("compile", "off")
    run = model if mode == "off" else torch.compile(model, mode=None if mode == "default" else mode)
    scale = setting.get("loss_scale") or {"init_scale": 65536.0, "growth_interval": 2000}
    scaler = torch.amp.GradScaler(
        "cpu",
        enabled=precision == "fp16",
        init_scale=scale["init_scale"],
        growth_interval=scale["growth_interval"],
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    autocast = (lambda: torch.autocast("cpu", dtype=dtype)) if dtype else contextlib.nullcontext
    batches = endless(dataset, setting["batch_size"])
    while True:
        for _ in range(accumulation):
            batch = next(batches)
            if is_channels_last and batch[0].dim() == 4:
                batch[0] = batch[0].to(memory_format=torch.channels_last)
            with autocast():
                loss = part.loss(run, batch)
            scaler.scale(loss / accumulation).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss.detach()


def endless(dataset, batch_size):
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    while True:
        yield from loader


@torch.no_grad()
def held_loss(part, dataset, model):
    """On a copy in training mode: running statistics lag behind after a few large batches."""
    judged = copy.deepcopy(model)
    chunks = DataLoader(torch.utils.data.Subset(dataset, range(NUM_HELD)), batch_size=HELD_CHUNK)
    losses = [part.loss(judged, batch).item() for batch in chunks]
    return sum(losses) / len(losses)


def train(part, dataset, setting, seconds):
    model = part.model()
    loss_at_start = held_loss(part, dataset, model)
    stream, per_step = steps(part, dataset, setting, model), setting["batch_size"] * setting["accumulation_steps"]
    began, num_trained = time.perf_counter(), 0
    while num_trained < NUM_WARMUP * per_step and time.perf_counter() - began < MAX_WARMUP_SECONDS:
        next(stream)
        num_trained += per_step
    warmup_seconds = time.perf_counter() - began
    started, num_steps, paused, loss_after, loss = time.perf_counter(), 0, 0.0, None, None
    while not num_steps or (time.perf_counter() - started - paused) < seconds:
        if loss_after is None and num_trained >= NUM_LOSS_SAMPLES:
            pause = time.perf_counter()
            loss_after = held_loss(part, dataset, model), num_trained
            paused += time.perf_counter() - pause
        loss = next(stream)
        num_steps += 1
        num_trained += per_step
    elapsed = time.perf_counter() - started - paused
    peak_memory_bytes = status_bytes("VmHWM")
    while loss_after is None:
        if num_trained >= NUM_LOSS_SAMPLES:
            loss_after = held_loss(part, dataset, model), num_trained
        else:
            next(stream)
            num_trained += per_step
    return {
        "num_steps": num_steps,
        "seconds": elapsed,
        "warmup_seconds": warmup_seconds,
        "samples_per_second": num_steps * per_step / elapsed,
        "peak_memory_bytes": peak_memory_bytes,
        "loss_at_start": loss_at_start,
        "loss_after": loss_after[0] if math.isfinite(loss_after[0]) else None,
        "num_samples_of_loss_after": loss_after[1],
        "is_loss_finite": math.isfinite(loss.item()),
    }


if __name__ == "__main__":
    part, setting = PARTS[sys.argv[1]], json.loads(sys.argv[2])
    dataset = part.data()
    limit_memory()
    torch.manual_seed(0)
    try:
        print(json.dumps(train(part, dataset, setting, float(sys.argv[3]))))
    except (MemoryError, RuntimeError) as error:
        print(json.dumps({"failure": str(error).splitlines()[0], "peak_memory_bytes": status_bytes("VmHWM")}))

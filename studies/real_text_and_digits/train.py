"""A hand-written training of 300 steps that imports nothing of autotune_amp: what does a config really reach?

Usage: train.py characters|digits PRECISION BATCH ACCUMULATION [DEVICE]; one JSON line on standard output.
"""

import contextlib
import json
import math
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

name, precision, batch_size, accumulation = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
device = torch.device(sys.argv[5] if len(sys.argv) > 5 else "cpu")
NUM_STEPS, NUM_WARMUP = 300, 3


class Text(Dataset):
    def __init__(self):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def __len__(self):
        return (len(self.data) - 1) // 32

    def __getitem__(self, i):
        return self.data[i * 32 : i * 32 + 33].long()


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(256, 64)
        self.pos = nn.Parameter(torch.zeros(32, 64))
        block = nn.TransformerEncoderLayer(64, 4, 256, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.out = nn.Linear(64, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32))

    def forward(self, x):
        return self.out(self.blocks(self.emb(x) + self.pos, mask=self.mask, is_causal=True))


torch.manual_seed(0)
if name == "characters":
    dataset, model = Text(), Transformer()
    optimizer_class, settings = torch.optim.AdamW, {"lr": 3e-4}
else:
    from sklearn.datasets import load_digits

    raw = load_digits()
    dataset = TensorDataset(torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target))
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    optimizer_class, settings = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}

if precision in ("fp32", "tf32"):
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
model.to(device)
optimizer = optimizer_class(model.parameters(), **settings)
scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None


def autocast():
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def batches():
    while True:
        yield from DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()


def stolen_and_total():
    """Jiffies that the hypervisor gave to others, and all jiffies."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return fields[7], sum(fields)


stream, loss = batches(), torch.tensor(math.nan)
first_loss = None
for step in range(NUM_WARMUP + NUM_STEPS):
    if step == NUM_WARMUP:
        wait()
        stolen_before = stolen_and_total()
        started = time.perf_counter()
    for _ in range(accumulation):
        batch = next(stream)
        if name == "characters":
            batch = batch.to(device)
            with autocast():
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        else:
            images, labels = (part.to(device) for part in batch)
            with autocast():
                loss = F.cross_entropy(model(images), labels)
        scaled = loss / accumulation if accumulation > 1 else loss
        (scaler.scale(scaled) if scaler else scaled).backward()
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if first_loss is None:
        first_loss = loss.item()
wait()
seconds = time.perf_counter() - started
stolen = stolen_and_total()
peak = (
    torch.cuda.max_memory_allocated()
    if device.type == "cuda"
    else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
)
print(
    json.dumps(
        {
            "workload": name,
            "precision": precision,
            "batch_size": batch_size,
            "accumulation_steps": accumulation,
            "num_steps": NUM_STEPS,
            "samples_per_second": NUM_STEPS * batch_size * accumulation / seconds,
            "peak_memory_bytes": peak,
            "stolen_share": (stolen[0] - stolen_before[0]) / max(1, stolen[1] - stolen_before[1]),
            "first_loss": first_loss,
            "last_loss": loss.item(),
            "is_recommended_environment": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        }
    )
)

"""Each training as one would write it by hand, with a recommended config; imports nothing of autotune_amp.

Usage: train.py NAME CONFIG_JSON [DEVICE]; trains for SECONDS and prints one JSON line.
"""

import contextlib
import copy
import json
import math
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import parts
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

name, config = sys.argv[1], json.loads(sys.argv[2])
device = torch.device(sys.argv[3] if len(sys.argv) > 3 else "cpu")
SECONDS, NUM_WARMUP = 25.0, 3
precision, batch_size = config["precision"], config["batch_size"]
accumulation, num_workers = config["accumulation_steps"], config["num_workers"] or 0

torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
torch.backends.cudnn.allow_tf32 = precision == "tf32"
scale = config["loss_scale"]
scaler = torch.amp.GradScaler(
    device.type,
    enabled=precision == "fp16",
    init_scale=scale["init_scale"] if scale else 65536.0,
    growth_interval=scale["growth_interval"] if scale else 2000,
)


def autocast():
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else contextlib.nullcontext()


def batches(dataset, **options):
    loader = DataLoader(
        dataset, batch_size=batch_size, shuffle=True, drop_last=True, num_workers=num_workers, **options
    )
    while True:
        yield from loader


def to_device(batch):
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return [value.to(device) for value in batch]


def one_model(model, compute_loss, stream, optimizer, weigh=None):
    """Steps over `accumulation` micro-batches each; `weigh` counts what the loss is a mean over."""
    while True:
        window = [to_device(next(stream)) for _ in range(accumulation)]
        shares = [1 / accumulation] * accumulation
        if weigh is not None:
            counts = [float(weigh(batch)) for batch in window]
            shares = [count / sum(counts) for count in counts]
        for batch, share in zip(window, shares, strict=True):
            with autocast():
                loss = compute_loss(model, batch)
            scaler.scale(loss * share).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss, sum(len(batch["labels"] if isinstance(batch, dict) else batch[0]) for batch in window)


def lengths():
    model = parts.language_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    steps = one_model(
        model,
        lambda model, batch: model(**batch).loss,
        batches(parts.Docstrings(), collate_fn=parts.pad),
        optimizer,
        weigh=lambda batch: (batch["labels"] != -100).sum(),
    )

    def at_the_end():
        with torch.no_grad():
            model(**to_device(parts.pad([parts.Docstrings()[index] for index in range(16)])))
        with tempfile.TemporaryDirectory() as folder:
            torch.save([model.state_dict(), optimizer.state_dict()], Path(folder) / "checkpoint.pt")

    return steps, at_the_end


def slow_images():
    model = parts.convnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return one_model(
        model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), batches(parts.StoredImages()), optimizer
    ), None


def gan():
    made, judge = parts.generator().to(device), parts.discriminator().to(device)
    of_made = torch.optim.Adam(made.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=2e-4, betas=(0.5, 0.999))

    def steps():
        for (real,) in batches(parts.small_images()):
            real = real.to(device)
            with autocast():
                images = made(torch.randn(batch_size, parts.NOISE, device=device))
                loss = F.softplus(-judge(real)).mean() + F.softplus(judge(images.detach())).mean()
            of_judge.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(of_judge)
            with autocast():
                second = F.softplus(-judge(images)).mean()
            of_made.zero_grad()
            scaler.scale(second).backward()
            scaler.step(of_made)
            scaler.update()
            yield loss, len(real)

    return steps(), None


def diffusion():
    model = parts.Denoiser().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def steps():
        for (batch,) in batches(parts.small_images()):
            images, noise, how_far = parts.noised(batch.to(device))
            optimizer.zero_grad()
            with autocast():
                loss = F.mse_loss(model(images, how_far).float(), noise)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
            yield loss, len(batch)

    return steps(), None


def adapters():
    model = parts.adapted_classifier().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    compute_loss = lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss  # noqa: E731 - beside its use
    return one_model(model.train(), compute_loss, batches(parts.sentences()), optimizer), None


def compiled():
    model = parts.compiled_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    compute_loss = lambda model, batch: parts.next_byte_loss(model, batch[0])  # noqa: E731 - beside its use
    return one_model(model, compute_loss, batches(parts.source_text()), optimizer), None


def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()


def stolen_and_total():
    """Jiffies that the hypervisor gave to others, and all jiffies."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    return fields[7], sum(fields)


torch.manual_seed(0)
steps, at_the_end = globals()[name]()
for _ in range(NUM_WARMUP):
    first_loss = next(steps)[0].item()
wait()
before, started, num_steps, num_samples = stolen_and_total(), time.perf_counter(), 0, 0
while time.perf_counter() - started < SECONDS:
    loss, num_trained = next(steps)
    num_steps += 1
    num_samples += num_trained
wait()
seconds, after = time.perf_counter() - started, stolen_and_total()
if at_the_end:
    at_the_end()
peak = (
    torch.cuda.max_memory_allocated()
    if device.type == "cuda"
    else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
)
last_loss = loss.item()
print(
    json.dumps(
        {
            "workload": name,
            "device": str(device),
            "effective_batch_size": num_samples / num_steps,
            "num_steps": num_steps,
            "samples_per_second": num_samples / seconds,
            "peak_memory_bytes": peak,
            "stolen_share": (after[0] - before[0]) / max(1, after[1] - before[1]),
            "first_loss": first_loss,
            "last_loss": last_loss if math.isfinite(last_loss) else None,
            "is_recommended_environment": "MALLOC_TRIM_THRESHOLD_" in os.environ,
        }
    )
)

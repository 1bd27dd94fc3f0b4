"""A training as one would write it by hand, for so many steps, and the peak of its memory; nothing of autotune_amp.

Usage: train.py NAME CONFIG_JSON NUM_STEPS; prints one JSON line.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

STUDIES = Path(__file__).parents[1]


def parts_of(study):
    spec = importlib.util.spec_from_file_location(f"{study}_parts", STUDIES / study / "parts.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_real_training(name):
    """Model, loss, dataset, optimizer and collate function."""
    parts = parts_of("real_training")
    adamw = lambda rate: lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)  # noqa: E731
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
    classify = torch.nn.functional.cross_entropy
    if name == "lengths":
        return parts.language_model(), lambda m, b: m(**b).loss, parts.Docstrings(), adamw(3e-4), parts.pad
    if name == "adapters":
        loss = lambda m, b: m(input_ids=b[0], labels=b[1]).loss  # noqa: E731
        return parts.adapted_classifier(), loss, parts.sentences(), adamw(1e-3), None
    return parts.convnet(), lambda m, b: classify(m(b[0]), b[1]), parts.StoredImages(), sgd, None


def of_landscapes(name):
    part = parts_of("landscapes").PARTS[name]
    return part.model(), part.loss, part.data(), lambda model: part.optimizer(model.parameters()), None


def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def heap():
    """Bytes of the heap, and those of them that are free: its holes."""

    class Mallinfo2(ctypes.Structure):
        _fields_ = [(f"field_{number}", ctypes.c_size_t) for number in range(10)]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    found = libc.mallinfo2()
    return found.field_0, found.field_8  # arena, fordblks


name, config, num_steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
make = of_real_training if name in ("lengths", "adapters", "slow_images") else of_landscapes
model, compute_loss, dataset, make_optimizer, collate = make(name)
model.train()
optimizer = make_optimizer(model)
loader = DataLoader(
    dataset,
    config["batch_size"],
    shuffle=True,
    drop_last=True,
    num_workers=config.get("num_workers") or 0,
    collate_fn=collate,
)
dtype = {"bf16": torch.bfloat16}.get(config["precision"])


def forever():
    while True:
        yield from loader


batches, accumulation, peaks = forever(), config.get("accumulation_steps", 1), []
for step in range(1, num_steps + 1):
    for _ in range(accumulation):
        batch = next(batches)
        with torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext():
            loss = compute_loss(model, batch) / accumulation
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step & (step - 1) == 0 or step == num_steps:
        peaks.append((step, status("VmHWM")))
heap_bytes, hole_bytes = heap()
print(
    json.dumps(
        {
            "workload": name,
            "config": config,
            "is_recommended_environment": "MALLOC_TRIM_THRESHOLD_" in os.environ,
            "peaks": peaks,
            "resident_bytes": status("VmRSS"),
            "file_bytes": status("RssFile"),
            "heap_bytes": heap_bytes,
            "hole_bytes": hole_bytes,
        }
    )
)

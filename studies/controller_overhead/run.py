"""What the controller costs: its loop against bare GradScaler's and against a plain one, interleaved in one process.

Usage: run.py [--device cpu] [--rounds 40] [--threads 1]; writes <device>.jsonl and that device's table into README.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale
from autotune_amp.precision.torch_state import autocast
from autotune_amp.runtime.controller import PrecisionController

HERE = Path(__file__).parent
BLOCK_SECONDS = 0.1


# `train_step` attaches the model by itself. Each is held against the one before it, too.
CALLS = ["controller, attached", "controller, train_step", "controller, train_step and a sink"]


class Empty(nn.Module):
    """One parameter: a step of it is nothing but overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * inputs


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "empty": (Empty, ()),
    "MLP": (mlp, (64, 128)),
    "transformer": (transformer, (8, 64, 128)),
}
# fp16 on a CPU without its instructions takes seconds for what fp32 does in milliseconds: smaller inputs there.
SMALL_SHAPES = {"MLP": (4, 128), "transformer": (1, 8, 128)}


class Plain:
    """GradScaler's interface around nothing: the plain loop."""

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()

    def update(self) -> None:
        """Nothing to do."""


def make(kind: str, precision: str, device: str) -> tuple[Any, Callable[[], Any]]:
    """A scaler of this kind, and the autocast that its loop uses."""

    def own() -> Any:
        return autocast(precision, device)

    if kind == "plain":
        return Plain(), own
    if kind == "GradScaler":
        return torch.amp.GradScaler(device), own
    config = AmpConfig(precision=precision, batch_size=1, loss_scale=LossScale() if precision == "fp16" else None)
    sinks = [lambda _: None] if kind.endswith("a sink") else []
    controller = PrecisionController(config, device, guard=kind != "controller, guard=False", sinks=sinks)
    return controller, controller.autocast


class Contestant:
    def __init__(self, kind: str, model_name: str, precision: str, is_fused: bool, device: str) -> None:
        torch.manual_seed(0)
        build, shape = MODELS[model_name]
        if precision == "fp16" and device == "cpu":
            shape = SMALL_SHAPES.get(model_name, shape)
        self.kind = kind
        self.device = device
        self.model = build().to(device)
        self.inputs = torch.randn(shape, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=is_fused)
        self.scaler, self.autocast = make(kind, precision, device)
        if kind == "controller, attached":
            self.scaler.attach(self.model)

    def loss(self) -> Tensor:
        return self.model(self.inputs).float().square().mean()

    def steps(self, num_steps: int) -> float:
        """Seconds for so many steps, the device's end included."""
        started = time.perf_counter()
        for _ in range(num_steps):
            if "train_step" in self.kind:
                self.scaler.train_step(self.loss, self.optimizer)
                continue
            self.optimizer.zero_grad()
            with self.autocast():
                loss = self.loss()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def contest(model: str, precision: str, is_fused: bool, device: str, num_rounds: int) -> list[dict[str, Any]]:
    kinds = ["plain", "controller", *CALLS]
    kinds.insert(1, "GradScaler" if precision == "fp16" else "controller, guard=False")
    contestants = [Contestant(kind, model, precision, is_fused, device) for kind in kinds]
    for contestant in contestants:
        contestant.steps(20)
    num_steps = max(1, int(BLOCK_SECONDS / (contestants[0].steps(10) / 10)))
    lines = []
    for round_number in range(num_rounds):
        # Every contestant follows each of the others equally often.
        order = [contestants[(round_number + i) % len(kinds)] for i in range(len(kinds))]
        order = order if round_number % 2 else order[::-1]
        seconds = {contestant.kind: contestant.steps(num_steps) / num_steps for contestant in order}
        what = {"model": model, "precision": precision, "fused": is_fused, "round": round_number}
        lines.append({**what, "num_steps": num_steps, "step_seconds": seconds})
    return lines


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def table(lines: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| model | precision | optimizer | step of the reference, ms | what | added, µs: median (quartiles) "
        "| added, %: median (quartiles) |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, bool], list[dict[str, float]]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["precision"], line["fused"]), []).append(line["step_seconds"])
    for (model, precision, is_fused), rounds in groups.items():
        pairs = [("plain", "GradScaler")] if precision == "fp16" else []
        reference = "GradScaler" if precision == "fp16" else "plain"
        pairs += [(reference, kind) for kind in rounds[0] if kind.startswith("controller")]
        pairs += [(base, kind) for base, kind in pairwise(CALLS) if kind in rounds[0]]
        for base, kind in pairs:
            added = quartiles([1e6 * (seconds[kind] - seconds[base]) for seconds in rounds])
            share = quartiles([100 * (seconds[kind] / seconds[base] - 1) for seconds in rounds])
            step = 1e3 * statistics.median(seconds[base] for seconds in rounds)
            rows.append(
                f"| {model} | {precision} | AdamW{', fused' if is_fused else ''} | {step:.3g} | {kind} over {base} "
                f"| {added[1]:.1f} ({added[0]:.1f} to {added[2]:.1f}) "
                f"| {share[1]:+.2f} ({share[0]:+.2f} to {share[2]:+.2f}) |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = arguments.device
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    about = {
        "device": name,
        "torch": torch.__version__,
        "threads": arguments.threads,
        "python": platform.python_version(),
    }
    lines: list[dict[str, Any]] = []
    for model in arguments.models:
        for precision in ("fp16", "bf16", "fp32"):
            for is_fused in (False, True):
                lines += contest(model, precision, is_fused, device, arguments.rounds)
                print(*table(lines[-arguments.rounds :])[2:], sep="\n", flush=True)
    raw = [json.dumps(about), *map(json.dumps, lines)]
    (HERE / f"{device}.jsonl").write_text("\n".join(raw) + "\n")
    text = (HERE / "README.md").read_text()
    begin, end = f"<!-- table: run.py --device {device} -->", f"<!-- end of {device} table -->"
    head, rest = text.split(begin)
    rows = [f"{about}", "", *table(lines)]
    (HERE / "README.md").write_text(f"{head}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    main()

"""Every case under every policy with every seed; writes results.jsonl and the tables into README.md.

Usage: run.py [--device cuda] [--table]; with --table only the tables, from the results that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import psutil
import rules
import tables
import torch
from cases import Case
from torch import Tensor

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import TrainingStoppedError
from autotune_amp.runtime.controller import PrecisionController

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
NUM_SEEDS = 5
VERDICTS = {
    **dict.fromkeys(("demotion", "pin", "rescale"), "precision"),
    **dict.fromkeys(("not_precision", "revert"), "not precision"),
}


def steered(device: str, start_scale: float | None, *, halt: bool = True) -> PrecisionController:
    loss_scale = LossScale() if start_scale is None else LossScale(init_scale=start_scale)
    config = AmpConfig(precision="fp16", batch_size=cases.NUM_SAMPLES, loss_scale=loss_scale, fallback=["bf16", "fp32"])
    return PrecisionController(config, device, halt=halt)


def grad_scaler(device: str, start_scale: float | None) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, init_scale=start_scale or 2.0**16)


POLICIES: dict[str, Callable[[str, float | None], Any]] = {
    "fp32": lambda *_: None,
    "GradScaler": grad_scaler,
    "DeepSpeed": lambda _, start_scale: rules.DeepSpeed(start_scale),
    "fairseq": lambda _, start_scale: rules.Fairseq(start_scale),
    "Megatron": lambda _, start_scale: rules.Megatron(start_scale),
    "controller": steered,
    "controller, no rerun": steered,
    "controller, halt=False": lambda device, start_scale: steered(device, start_scale, halt=False),
}


class Run:
    """One training: the case's loop in fp16 under `policy`, or in fp32 where it is None."""

    def __init__(self, case: Case, policy: Any, seed: int, device: str, *, reruns: bool = True) -> None:
        torch.manual_seed(seed)
        self.case, self.policy, self.device = case, policy, device
        self.model = case.model().to(device)
        self.optimizer = case.optimizer(self.model)
        self.num_updates = self.num_steps = 0
        self.first_bad_update: int | None = None
        self.batch: tuple[Tensor, Tensor] | None = None
        self.optimizer.register_step_post_hook(self._stepped)
        batches, (inputs, targets) = case.data(seed)
        self.batches = [(given.to(device), target.to(device)) for given, target in batches]
        self.held_out = inputs.to(device), targets.to(device)
        if isinstance(policy, PrecisionController):
            policy.attach(self.model, self.loss if reruns else None)

    def _stepped(self, *_: object) -> None:
        self.num_steps += 1

    def loss(self) -> Tensor:
        assert self.batch is not None
        inputs, targets = self.batch
        return self.case.loss(self.model(inputs), targets)

    def train(self) -> str:
        """How it ended: "" at its end, or the exception."""
        for step, (inputs, targets) in enumerate(self.batches):
            self.case.before_step(self.optimizer, step)
            poisoned = torch.full_like(inputs, math.nan) if self.case.is_poisoned(step) else inputs
            self.batch = poisoned, targets
            try:
                self.step()
            except (RuntimeError, FloatingPointError, TrainingStoppedError) as error:
                return f"{type(error).__name__}: {error}"
        return ""

    def step(self) -> None:
        policy = self.policy
        self.num_updates += 1
        self.optimizer.zero_grad()
        if policy is None:
            self.loss().backward()
            self.optimizer.step()
            return
        if isinstance(policy, PrecisionController):
            autocast = policy.autocast()
        else:
            autocast = torch.autocast(self.device, dtype=torch.float16)
        num_steps = self.num_steps
        with autocast:
            loss = self.loss()
        policy.scale(loss).backward()
        policy.step(self.optimizer)
        if num_steps == self.num_steps and self.first_bad_update is None:
            self.first_bad_update = self.num_updates
        policy.update()

    def held_out_loss(self) -> float:
        """In fp32, on a fresh model with the trained weights and buffers."""
        twin = self.case.model().to(self.device)
        twin.load_state_dict(self.model.state_dict())
        inputs, targets = self.held_out
        with torch.no_grad():
            return float(self.case.loss(twin.eval()(inputs), targets))


def is_finite(tensors: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def moves_of(policy: Any) -> list[dict[str, Any]]:
    if not isinstance(policy, PrecisionController):
        return []
    return [
        {"update": move.update, "kind": move.kind, "before": move.before, "after": move.after, "reason": move.reason}
        for move in policy.status().history
    ]


def verdicts_of(policy: Any, moves: list[dict[str, Any]], ended: str) -> list[str] | None:
    """What the policy said is at fault, in order; None for a policy that never says."""
    if isinstance(policy, rules.Fairseq):
        return ["not precision"] if ended else None  # "Your loss is probably exploding"
    if not isinstance(policy, PrecisionController):
        return None
    said = [VERDICTS[move["kind"]] for move in moves if move["kind"] in VERDICTS]
    return said or ["nothing"]


def judged(said: list[str] | None, at_fault: str) -> str:
    if said is None:
        return "none"
    if said[-1] != at_fault:
        return "wrong"
    return "right" if set(said) == {at_fault} else "right in the end"


def one(case: Case, name: str, seed: int, device: str, reference: float) -> dict[str, Any]:
    started = time.perf_counter()
    policy = POLICIES[name](device, case.start_scale)
    run = Run(case, policy, seed, device, reruns=name != "controller, no rerun")
    ended = run.train()
    moves = moves_of(policy)
    said = verdicts_of(policy, moves, ended)
    held_out = run.held_out_loss()
    has_finite_weights, has_finite_buffers = is_finite(run.model.parameters()), is_finite(run.model.buffers())
    status = policy.status() if isinstance(policy, PrecisionController) else None
    return {
        "case": case.title,
        "at_fault": case.at_fault,
        "policy": name,
        "seed": seed,
        "survived": not ended and has_finite_weights and has_finite_buffers,
        "has_finite_weights": has_finite_weights,
        "has_finite_buffers": has_finite_buffers,
        "ended": ended,
        "num_updates": run.num_updates,
        "num_skips": run.num_updates - run.num_steps,
        "first_bad_update": run.first_bad_update,
        "largest_weight": finite_or_none(max(float(weight.abs().max()) for weight in run.model.parameters())),
        "held_out_loss": finite_or_none(held_out),
        "fp32_held_out_loss": finite_or_none(reference),
        "ratio": finite_or_none(held_out / reference),
        "scale": policy.get_scale() if policy is not None else None,
        "precision": status.precision if status else "fp32" if policy is None else "fp16",
        "pinned_modules": list(status.pinned_modules) if status else [],
        "moves": moves,
        "verdicts": said,
        "verdict": judged(said, case.at_fault),
        "seconds": round(time.perf_counter() - started, 3),
    }


def reference(case: Case, seed: int, device: str) -> float:
    """fp32's loss on held-out data, without poisoned batches and without the mistake in the learning rate."""
    run = Run(case, None, seed, device)
    for step, batch in enumerate(run.batches):
        if not case.is_poisoned(step):
            run.batch = batch
            run.step()
    return run.held_out_loss()


def hardware(device: str) -> str:
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{name}, {torch.get_num_threads()} thread of {psutil.cpu_count()} cores, {memory_gib:.0f} GiB, "
        f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"torch {torch.__version__}."
    )


def measure(device: str) -> None:
    with RESULTS.open("w") as file:
        file.write(json.dumps({"hardware": hardware(device)}) + "\n")
        for case in cases.CASES:
            for seed in range(NUM_SEEDS):
                against = reference(case, seed, device)
                for name in POLICIES:
                    file.write(json.dumps(one(case, name, seed, device, against), allow_nan=False) + "\n")
            file.flush()
            print(case.title, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    if not given.table:
        torch.set_num_threads(1)  # the models are too small for more
        measure(given.device)
    first, *rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    tables.write(HERE / "README.md", first["hardware"], rows, list(POLICIES))


if __name__ == "__main__":
    main()

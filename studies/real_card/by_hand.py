"""Measures ten training runs by hand, in plain PyTorch, with a fixed list of settings that a competent person tries.

Usage: by_hand.py --minutes 8 --out FOLDER [--only NAME ...] [--device cpu --tiny] | --out FOLDER --table.

FOLDER/by_hand.jsonl gets a header for each start and one outcome for each setting, as it is measured. Settings that it
already holds for this device are skipped. Weights are fp32 in every setting. Each setting cycles through four batches
in pinned memory, copied with `non_blocking=True`: a competent person's loader is never the bottleneck. A group is four
steps, hence every batch once, followed by a synchronization. The first step is timed alone, and groups follow from the
second step on: first the warm-up, until their times stop falling or for 1.5 s, then one second that counts. Steps below
10 ms are also timed without synchronizations between them (`unbroken_samples_per_second`). The settings in their order:

1. Every training run in fp32 (PyTorch's defaults: TF32 convolutions, fp32 matmuls), tf32, bf16 and fp16 at today's
   batch size, then in tf32, bf16 and fp16 at four times that.
2. bf16 at both batch sizes with the fused optimizer, channels_last, both, and cudnn.benchmark, where they apply.
3. The fastest bf16 setting so far with torch.compile, at both batch sizes, and in mode "reduce-overhead" where a step
   at four times the batch size takes less than twice the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

IMPORT_BEGAN = time.perf_counter()
import torch  # noqa: E402 # its import is timed

IMPORT_TORCH_SECONDS = time.perf_counter() - IMPORT_BEGAN

from measurer import Measurer, Setting  # noqa: E402 # these import torch too
from trainings import Training, trainings  # noqa: E402

EAGER_SECONDS = 6.0  # expected for a setting without torch.compile


class Outcomes:
    """The outcomes on one device, read from and appended to by_hand.jsonl."""

    def __init__(self, path: Path, device_name: str) -> None:
        self.path, self.device_name = path, device_name
        lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        self.lines = [one for one in lines if one["kind"] == "outcome" and one["device"] == device_name]

    def append(self, line: dict[str, Any]) -> None:
        line = {"kind": line.pop("kind", "outcome"), "device": self.device_name, **line}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if line["kind"] == "outcome":
            self.lines.append(line)

    def find(self, training: Training, setting: Setting) -> dict[str, Any] | None:
        key = training.name, setting.label, setting.batch_size
        return next((one for one in self.lines if (one["training"], one["setting"], one["batch_size"]) == key), None)

    def step_ms(self, training: Training, setting: Setting) -> float | None:
        """Return the milliseconds of a step, or None where the setting failed or was not measured."""
        found = self.find(training, setting)
        return found["step_ms"] if found and is_success(found) else None


def is_success(outcome: dict[str, Any]) -> bool:
    return "failure" not in outcome and bool(outcome["is_loss_finite"])


def batch_sizes(training: Training) -> tuple[int, int]:
    return training.batch_size, 4 * training.batch_size


def precisions(training: Training, _: Outcomes) -> Iterator[Setting]:
    """Yield the settings of pass 1."""
    today, large = batch_sizes(training)
    yield from (Setting(precision, today) for precision in ("fp32", "tf32", "bf16", "fp16"))
    yield from (Setting(precision, large) for precision in ("tf32", "bf16", "fp16"))


def flagged(training: Training, batch_size: int) -> list[Setting]:
    """Return the settings of pass 2 at one batch size."""
    plain = Setting("bf16", batch_size)
    found = [replace(plain, is_fused=True)] if training.has_fused_optimizer else []
    if training.has_convolutions:
        found.append(replace(plain, is_channels_last=True))
        if training.has_fused_optimizer:
            found.append(replace(plain, is_channels_last=True, is_fused=True))
        found.append(replace(plain, is_benchmark=True))
    return found


def flags(training: Training, outcomes: Outcomes) -> Iterator[Setting]:
    """Yield the settings of pass 2, at the batch sizes at which bf16 alone was successful."""
    for batch_size in batch_sizes(training):
        if outcomes.step_ms(training, Setting("bf16", batch_size)):
            yield from flagged(training, batch_size)


def compiled(training: Training, outcomes: Outcomes) -> Iterator[Setting]:
    """Yield the settings of pass 3."""
    best: list[Setting] = []
    for batch_size in batch_sizes(training):
        settings = [Setting("bf16", batch_size), *flagged(training, batch_size)]
        timed = [(ms, place) for place, one in enumerate(settings) if (ms := outcomes.step_ms(training, one))]
        best += [settings[min(timed)[1]]] if timed else []
    yield from (replace(one, compile_mode="default") for one in best)
    today, large = (outcomes.step_ms(training, Setting("bf16", size)) for size in batch_sizes(training))
    if today and large and large < 2 * today:
        yield from (replace(one, compile_mode="reduce-overhead") for one in best)


def measure_all(
    chosen: list[Training], measurer: Measurer, outcomes: Outcomes, deadline: float, compile_estimate: float | None
) -> int:
    """Measure what the time allows and return the number of settings that it did not allow."""
    num_left_out = 0
    for settings_of in (precisions, flags, compiled):
        for training in chosen:
            compile_seconds = compile_estimate or training.compile_seconds
            for setting in settings_of(training, outcomes):
                if outcomes.find(training, setting):
                    continue
                if time.monotonic() + (compile_seconds if setting.compile_mode else EAGER_SECONDS) > deadline:
                    num_left_out += 1
                    continue
                found = measurer.outcome(training, setting)
                outcomes.append(found)
                if setting.compile_mode and compile_estimate is None:
                    compile_seconds = 1.2 * found["seconds"] + 3.0
                speed = f"{found.get('samples_per_second', 0):,.1f} samples/s"
                said = found["failure"]["kind"] if "failure" in found else speed
                print(
                    f"{training.name} {setting.label} batch {setting.batch_size}: {said}, {found['seconds']:.1f} s",
                    flush=True,
                )
                if not measurer.is_usable():
                    raise SystemExit("The device no longer answers. The same command goes on in a new process.")
    return num_left_out


def header(device: torch.device) -> dict[str, Any]:
    """Describe the machine, and time the imports and the CUDA context in the order of the fields."""
    seconds: dict[str, float | str] = {"import torch": round(IMPORT_TORCH_SECONDS, 3)}

    def timed(name: str, call: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            call()
            seconds[name] = round(time.perf_counter() - began, 3)
        except Exception as error:
            seconds[name] = f"{type(error).__name__}: {error}"[:300]

    timed("device context", lambda: torch.ones(1, device=device).add_(1).item())
    timed("import torch._dynamo", lambda: import_module("torch._dynamo"))
    timed("import torchvision", lambda: import_module("torchvision"))
    timed("import transformers", lambda: import_module("transformers"))
    timed("import transformers' Llama", lambda: import_module("transformers").LlamaForCausalLM)
    versions = {}
    for name in ("torch", "torchvision", "transformers", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    tool = shutil.which("nvidia-smi") if device.type == "cuda" else None
    query = [tool, "--query-gpu=driver_version,memory.total", "--format=csv,noheader"] if tool else ["echo", "none"]
    return {
        "kind": "header",
        "driver_and_memory": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "versions": versions,
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "seconds": seconds,
    }


def summary(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return ""
    return f"{outcome['setting']} batch {outcome['batch_size']}: {outcome['samples_per_second']:,.1f}"


def table(path: Path) -> str:
    """Return a Markdown table for each device: fp32 today, the best by hand at today's batch size and at any."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = [one for one in lines if one["kind"] == "outcome"]
    rows = []
    for device in dict.fromkeys(one["device"] for one in found):
        rows += ["", f"{device}:", "", "| training | fp32 today, samples/s | best at today's batch size | gain "]
        rows[-1] += "| best by hand | gain | failed |"
        rows.append("|---|---|---|---|---|---|---|")
        for name in dict.fromkeys(one["training"] for one in found if one["device"] == device):
            of_name = [one for one in found if (one["device"], one["training"]) == (device, name)]
            today = next((one for one in of_name if one["setting"] == "fp32" and is_success(one)), None)
            cells = [name, f"{today['samples_per_second']:,.1f}" if today else "failed"]
            for sizes in ({today["batch_size"]} if today else set(), {one["batch_size"] for one in of_name}):
                fit = [one for one in of_name if is_success(one) and one["batch_size"] in sizes]
                best = max(fit, key=lambda one: one["samples_per_second"], default=None)
                cells.append(summary(best))
                gain = best["samples_per_second"] / today["samples_per_second"] if best and today else None
                cells.append(f"{gain:.2f}" if gain else "")
            failed = [f"{one['setting']} batch {one['batch_size']}" for one in of_name if not is_success(one)]
            rows.append("| " + " | ".join([*cells, ", ".join(failed)]) + " |")
    return "\n".join(rows).strip()


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of by_hand.jsonl")
    parser.add_argument("--minutes", type=float, default=8.0, help="no setting starts that would end after this")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names of training runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to rehearse on a CPU")
    parser.add_argument("--compile-estimate", type=float, metavar="SECONDS", help="expected for a compiled setting")
    parser.add_argument("--table", action="store_true", help="print the table of what was measured")
    options = parser.parse_args()
    path = options.out / "by_hand.jsonl"
    if options.table:
        print(table(path))
        return
    deadline = began - IMPORT_TORCH_SECONDS + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    outcomes = Outcomes(path, f"{name}, tiny shapes" if options.tiny else name)
    outcomes.append(header(device))
    chosen = [one for one in trainings(options.tiny) if not options.only or one.name in options.only]
    num_left_out = measure_all(chosen, Measurer(device), outcomes, deadline, options.compile_estimate)
    print(f"{num_left_out} settings had no time in {time.monotonic() - began:.0f} s.")
    print(table(path))


if __name__ == "__main__":
    main()

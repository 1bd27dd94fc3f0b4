"""Compare the two ways in which a trial of a command is measured: after a switch in one start, and in its own start.

Writes `results/switching.jsonl` (raw outcomes) and prints the table: ``python studies/launch/switching.py``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from autotune_amp.command.backend import CommandBackend
from autotune_amp.command.command import Command
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Describe, Trial

START = """
import time, torch
from torch import nn
time.sleep(5)  # stands for the start of a large training
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(8192, 256), torch.randint(10, (8192,)))
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
"""
PLAIN = """
while True:
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
SCALER = """
scaler = torch.amp.GradScaler("cpu", enabled=False)
while True:
    for x, y in loader:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
COMMANDS = {"plain loop": START + PLAIN, "GradScaler": START + SCALER}
SETTINGS = [Setting(precision="fp32", batch_size=size) for size in (32, 128)]
OUTCOMES = Path(__file__).parent / "results" / "switching.jsonl"


def measure(name: str, local: LocalBackend, folder: Path) -> list[dict[str, object]]:
    """Measure each setting of a command in both ways, one right after the other, and return the outcomes."""
    script = folder / "train.py"
    script.write_text(COMMANDS[name])
    backend = CommandBackend(Command(CommandTemplate.of([sys.executable, str(script)])), local, Watcher())
    backend.submit(Describe(device="cpu", baseline_batch_size=64, deadline_seconds=600.0, is_batch_free=True)).result()
    outcomes = []
    for setting in SETTINGS:
        trial = Trial(candidate=setting, device="cpu", deadline_seconds=300.0, num_steps=(20, 40))
        switched = backend.submit(trial).result()
        backend._command.end_live()
        for outcome in (switched, backend.submit(trial).result()):
            assert isinstance(outcome, Measurement), outcome
            way = "switched" if outcome.is_build_shared else "own start"
            low, high = outcome.step_seconds_interval
            outcomes.append(
                {
                    "command": name,
                    "setting": str(setting),
                    "way": way,
                    "seconds_to_first_step": outcome.build_seconds,
                    "step_milliseconds": [1000 * low, 1000 * outcome.step_seconds, 1000 * high],
                    "peak_mebibytes": outcome.peak_memory_bytes / 2**20,
                }
            )
    backend._command.end_live()
    return outcomes


def main() -> None:
    """Measure all commands, write the outcomes and print the table."""
    payload = Payload(target="autotune_amp.workloads:workload", path=tuple(sys.path))
    outcomes = []
    with LocalBackend(payload, "kept", Watcher()) as local, tempfile.TemporaryDirectory() as folder:
        for name in COMMANDS:
            outcomes += measure(name, local, Path(folder))
    OUTCOMES.write_text("".join(json.dumps(outcome) + "\n" for outcome in outcomes))
    print("| command | setting | way | to the first step | step (95 %) | peak |\n|---|---|---|---|---|---|")
    for each in outcomes:
        low, middle, high = each["step_milliseconds"]  # type: ignore[misc]
        print(
            f"| {each['command']} | {each['setting']} | {each['way']} | {each['seconds_to_first_step']:.1f} s "
            f"| {middle:.1f} ms ({low:.1f} to {high:.1f}) | {each['peak_mebibytes']:.0f} MiB |"
        )


if __name__ == "__main__":
    main()

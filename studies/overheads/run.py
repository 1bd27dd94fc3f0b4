"""What the tool itself costs: a forked trial beyond the user's own seconds, and a cached answer beyond importing torch.

Usage: run.py; writes raw.jsonl and the table into README.md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial

HERE = Path(__file__).parent
NUM_TRIALS, NUM_ANSWERS = 30, 15

CACHED = """
import torch, time
from torch import nn
started = time.perf_counter()
from autotune_amp import Workload, recommend_config
imported = time.perf_counter()
layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
data = torch.utils.data.TensorDataset(torch.randn(512, 8, 64))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
def loss(model, batch):
    return model(batch[0]).square().mean()
optimizer = torch.optim.AdamW(model.parameters())
built = time.perf_counter()
workload = Workload(model, loss, loader, optimizer)
recommend_config(workload, budget=25, precision="fp32", batch_size=(4, 8), quiet=True)
answered = time.perf_counter()
print(answered - built + imported - started)
"""


def trials() -> list[dict[str, Any]]:
    """A trial of one tiny step after the warm-up: what is not the user's building and stepping is ours."""
    payload = Payload(target="tiny:workload", path=(str(HERE), *sys.path))
    lines = []
    with LocalBackend(payload, "forked", Watcher()) as runner:
        runner.load(60)
        state, *_ = runner.open("cpu", None, 60)
        for number in range(NUM_TRIALS):
            spec = Trial(
                candidate=Setting(precision="fp32", batch_size=4), device="cpu", torch_state=state, num_steps=(8, 8)
            )
            started = time.perf_counter()
            outcome = runner.submit(spec).result()
            seconds = time.perf_counter() - started
            assert isinstance(outcome, Measurement), outcome
            users = outcome.build_seconds + outcome.first_step_seconds + 2 * outcome.step_seconds
            users += outcome.num_steps * outcome.step_seconds
            lines.append({"what": "trial", "number": number, "seconds": seconds, "own_seconds": seconds - users})
    return lines


def answers() -> list[dict[str, Any]]:
    """Whole scripts, each in a process of its own; the first one searches."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(CACHED)
        for number in range(NUM_ANSWERS + 1):
            done = subprocess.run([sys.executable, str(script)], cwd=folder, check=True, capture_output=True, text=True)
            lines.append({"what": "answer" if number else "search", "number": number, "seconds": float(done.stdout)})
    return lines


def main() -> None:
    lines = trials() + answers()
    (HERE / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = ["| what | n | median ms | largest ms |", "|---|---|---|---|"]
    for what, key, title in (
        ("trial", "own_seconds", "a forked trial, beyond the user's building, warm-up and steps"),
        ("answer", "seconds", "a cached answer, beyond importing torch (our own imports included)"),
    ):
        values = [1000 * line[key] for line in lines if line["what"] == what]
        table.append(f"| {title} | {len(values)} | {statistics.median(values):.1f} | {max(values):.1f} |")
    text = (HERE / "README.md").read_text()
    begin, end = "<!-- table: run.py -->", "<!-- end of table -->"
    head, rest = text.split(begin)
    (HERE / "README.md").write_text(f"{head}{begin}\n" + "\n".join(table) + f"\n{end}{rest.split(end)[1]}")
    print("\n".join(table))


if __name__ == "__main__":
    main()

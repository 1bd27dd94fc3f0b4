"""What the agent costs a step: the CPU time of the main thread for each step of about 20 ms, in interleaved runs.

`python overhead.py [ROUNDS]` appends a line of JSON for each run to overhead.jsonl, and prints the table of all in it.
The step is a small training with everything that the agent hooks into (a loader, an autocast region, a scaler), and
sleeps for 20 ms: the time of the thread itself shows what the agent takes also where other programs are running.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
NUM_STEPS, NUM_WARMUP_STEPS, STEP_SECONDS = 250, 20, 0.02
VARIANTS = ("bare", "not observing", "observing")


def train() -> None:
    """The training that is measured; prints what its steps took."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    data = torch.utils.data.TensorDataset(torch.randn(8 * NUM_STEPS, 16), torch.randn(8 * NUM_STEPS, 1))
    cpu, wall = [], []
    began, cpu_began = time.perf_counter(), time.thread_time()
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        time.sleep(STEP_SECONDS)
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - cpu_began)
        began, cpu_began = time.perf_counter(), time.thread_time()
    warm = slice(NUM_WARMUP_STEPS, None)
    print(json.dumps({"cpu_us": 1e6 * median(cpu[warm]), "wall_us": 1e6 * median(wall[warm])}))


def measured(variant: str) -> dict[str, float | str]:
    """Run the training once, and say what it printed, and what the agent says of itself."""
    from autotune_amp.launch.listening import Gone, Listener
    from autotune_amp.launch.messages import Step
    from autotune_amp.launch.running import INJECTED

    with tempfile.TemporaryDirectory() as folder:
        listener = Listener(f"{folder}/socket")
        environment = dict(os.environ)
        if variant != "bare":
            settings = {"socket": f"{folder}/socket", "folder": folder, "observes": variant == "observing"}
            environment |= {"AUTOTUNE_AMP_AGENT": json.dumps(settings), "PYTHONPATH": str(INJECTED)}
        done = subprocess.run(
            [sys.executable, __file__, "train"], env=environment, capture_output=True, text=True, check=True
        )
        listener.close()
        found: dict[str, float | str] = {"variant": variant, **json.loads(done.stdout)}
        steps = []
        while not listener.heard.empty():
            message = listener.heard.get()
            if not isinstance(message, Gone) and isinstance(message, Step) and message.overhead_seconds:
                steps.append(message)
        if variant == "observing":
            first, last = steps[NUM_WARMUP_STEPS], steps[-1]
            num = len(steps) - NUM_WARMUP_STEPS - 1
            found["own_us"] = 1e6 * (last.overhead_seconds - first.overhead_seconds) / num
        return found


def main() -> None:
    """Run the rounds, and print the table."""
    raw = HERE / "overhead.jsonl"
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        for variant in VARIANTS:
            with raw.open("a") as file:
                file.write(json.dumps({**measured(variant), "load": os.getloadavg()[0]}) + "\n")
    runs = [json.loads(line) for line in raw.read_text().splitlines()]
    bare = median(run["cpu_us"] for run in runs if run["variant"] == "bare")
    for variant in VARIANTS:
        cpu = [run["cpu_us"] for run in runs if run["variant"] == variant]
        own = [run["own_us"] for run in runs if "own_us" in run and run["variant"] == variant]
        says = f", says {median(own):.0f} of itself" if own else ""
        print(
            f"{variant:14} {median(cpu):6.0f} us a step ({min(cpu):.0f} to {max(cpu):.0f}), "
            f"{median(cpu) - bare:+5.0f} = {1e-4 * (median(cpu) - bare) / STEP_SECONDS:.2f} % of 20 ms{says}"
        )


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()

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
    """Run the training once; says what it printed, and of a run that is heard, what the agent says of itself and what
    this process took in the meantime: to hear it, and to look at its processes and their memory."""
    command = [sys.executable, __file__, "train"]
    if variant == "bare":
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return {"variant": variant, **json.loads(done.stdout)}
    from autotune_amp.command.ranks import RunEvents
    from autotune_amp.command.running import run
    from autotune_amp.core.job import Deadlines
    from autotune_amp.processes.process import Watcher

    marks: list[tuple[int, float]] = []

    def goes_on(heard: RunEvents) -> bool:
        if heard.num_steps > NUM_WARMUP_STEPS:
            marks.append((heard.num_steps, time.process_time()))
        return False

    ran = run(
        command,
        environment=os.environ,
        agent={"observes": variant == "observing"},
        deadlines=Deadlines(whole_seconds=120),
        is_enough=goes_on,
        watcher=Watcher(),
    )
    printed = json.loads(ran.state.printed.splitlines()[-1])
    if variant != "observing":
        return {"variant": variant, **printed}
    (rank,) = ran.events.ranks.values()
    first, last = (rank.steps[at].overhead_seconds or 0.0 for at in (NUM_WARMUP_STEPS, -1))
    own = (last - first) / (len(rank.steps) - 1 - NUM_WARMUP_STEPS)
    (num_before, began), (num_after, ended) = marks[0], marks[-1]
    parents = (ended - began) / (num_after - num_before)
    return {"variant": variant, **printed, "own_us": 1e6 * own, "parents_us": 1e6 * parents}


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
        says = ""
        if variant == "observing":
            heard = [run for run in runs if "own_us" in run]
            own, parents = (median(run[key] for run in heard) for key in ("own_us", "parents_us"))
            says = f"; says {own:.0f} of itself; the search's process took {parents:.0f} beside it"
        print(
            f"{variant:14} {median(cpu):6.0f} us a step ({min(cpu):.0f} to {max(cpu):.0f}), "
            f"{median(cpu) - bare:+5.0f} = {1e-4 * (median(cpu) - bare) / STEP_SECONDS:.2f} % of 20 ms{says}"
        )


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()

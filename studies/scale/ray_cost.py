"""What Ray costs a job, and how many jobs more slots run: trials of a fixed length on nodes that are processes here.

Usage: ray_cost.py run | table. Raw outcomes: results/ray.jsonl. The nodes are held by a process of their own
(`ray_cost.py nodes N`), as a cluster is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Backend, LocalBackend, Payload, Slot
from autotune_amp.processes.on_ray.cluster import Cluster
from autotune_amp.processes.on_ray.slots import RayDevices
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial

HERE = Path(__file__).parent
RAY = HERE / "results/ray.jsonl"
NUM_SLOTS = (1, 2, 4, 8)
NUM_JOBS, SECONDS, NUM_ROUNDS = 30, 30.0, 3
SLEEP_SECONDS = 1.0  # of a trial on several slots: eight of them leave two cores idle then
BEGIN, END = "<!-- ray_cost.py table -->\n", "<!-- end of the table of ray_cost.py -->"


def nodes(number: int) -> None:
    """Hold so many nodes of one CPU until standard input ends."""
    import ray.cluster_utils

    with tempfile.TemporaryDirectory(prefix="r") as folder:
        Path(folder, "ray").mkdir()  # where Ray writes the cluster's address
        os.environ["RAY_TMPDIR"] = folder
        cluster = ray.cluster_utils.Cluster()
        cluster.add_node(num_cpus=1, temp_dir=folder, include_dashboard=False)
        for _ in range(number - 1):
            cluster.add_node(num_cpus=1)
        print(cluster.address, flush=True)
        sys.stdin.read()
        cluster.shutdown()


def run() -> None:
    """Seconds of a job here and on one node, in turn; then jobs in a given time on more and more nodes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with RAY.open("w") as file:

        def write(**row: Any) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        for number in NUM_SLOTS:
            with subprocess.Popen(
                [sys.executable, __file__, "nodes", str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            ) as held:
                assert held.stdin is not None
                assert held.stdout is not None
                cluster = Cluster(held.stdout.readline().strip(), sends_directory=True, excludes=[])
                payload = Payload(target=f"{Path(__file__).name}:workload", path=())
                devices = RayDevices(cluster, "cpu", 1, payload, lambda _: Watcher(), print)
                began = time.monotonic()
                with closing(devices), devices.backend() as there:
                    there.load(120)
                    state = there.open("cpu", 1, 120).torch_state
                    there.open_others(120)
                    write(what="open", slots=number, seconds=time.monotonic() - began)
                    assert len(there.slots) == number
                    if number == 1:
                        with local() as here:
                            for _ in range(NUM_ROUNDS):
                                for name, backend in (("here", here), ("Ray", there)):
                                    write(what="job", where=name, seconds=seconds_of_jobs(backend, state))
                    write(what="jobs", slots=number, number=num_jobs(there, there.slots, state), seconds=SECONDS)
                held.stdin.close()


def local() -> LocalBackend:
    backend = LocalBackend(Payload(target=f"{__file__}:workload", path=tuple(sys.path)), None, Watcher())
    backend.load(120)
    backend.open("cpu", 1, 120)
    return backend


def trial(batch_size: int, state: dict[str, Any]) -> Trial:
    setting = Setting(precision="fp32", batch_size=batch_size)
    return Trial(candidate=setting, device="cpu", torch_state=state, num_steps=(1, 1))


def seconds_of_jobs(backend: Backend, state: dict[str, Any]) -> list[float]:
    found = []
    for _ in range(NUM_JOBS):
        began = time.perf_counter()
        assert isinstance(backend.submit(trial(1, state)).result(), Measurement)
        found.append(time.perf_counter() - began)
    return found


def num_jobs(backend: Backend, slots: Sequence[Slot], state: dict[str, Any]) -> int:
    """How many trials that sleep end in the time, one after the other on each slot."""
    until, number = time.monotonic() + SECONDS, 0
    running = {backend.submit(trial(2, state), slot): slot for slot in slots}
    while time.monotonic() < until:
        handle = backend.wait(list(running))
        assert isinstance(handle.result(), Measurement)
        slot = running.pop(handle)
        number += 1
        running[backend.submit(trial(2, state), slot)] = slot
    return number


def workload() -> Any:
    import torch
    from torch import nn

    from autotune_amp import Workload

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) == 2:
            time.sleep(SLEEP_SECONDS / 10)
        squares: torch.Tensor = model(batch).square().mean()
        return squares

    return Workload(lambda: nn.Linear(4, 1), loss, lambda size: torch.ones(size, 4))


def table() -> str:
    found = [json.loads(line) for line in RAY.read_text().splitlines()]
    jobs = {
        name: median(s for row in found if row["what"] == "job" and row["where"] == name for s in row["seconds"])
        for name in ("here", "Ray")
    }
    lines = [
        "| a trial of one step, seconds in the median | here | on a node | Ray's part |",
        "|---|---|---|---|",
        f"| {NUM_ROUNDS * NUM_JOBS} jobs each, in turn | {jobs['here']:.4f} | {jobs['Ray']:.4f} "
        f"| {jobs['Ray'] - jobs['here']:.4f} |",
        "",
        "| Ray's slots | jobs ended, of trials that sleep | times those of one | seconds until all had loaded |",
        "|---|---|---|---|",
    ]
    opened = {row["slots"]: row["seconds"] for row in found if row["what"] == "open"}
    ended = {row["slots"]: row["number"] for row in found if row["what"] == "jobs"}
    lines += [f"| {n} | {ended[n]} | {ended[n] / ended[1]:.2f} | {opened[n]:.0f} |" for n in NUM_SLOTS]
    return "\n".join(lines) + "\n"


def write_table() -> None:
    path = HERE / "README.md"
    before, after = path.read_text().split(BEGIN)
    path.write_text(before + BEGIN + table() + END + after.split(END)[1])


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    os.chdir(HERE)
    work: dict[str, Callable[..., None]] = {
        "run": run,
        "table": write_table,
        "nodes": lambda number: nodes(int(number)),
    }
    work[what](*given)

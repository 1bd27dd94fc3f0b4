"""What clients that poll a service do to the search that it runs.

Usage: run.py [SECONDS [lowered]] runs one search of that budget (300), appends its steps to raw.jsonl and writes the
table into README.md; run.py table only does the latter. With "lowered" the service's session has the lowest
priority. Clients poll every other half a second, so that each process of the search has steps with and without them;
they have the lowest priority.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent
RAW = HERE / "raw.jsonl"
BEGIN, END = "<!-- run.py table -->\n", "<!-- end of table -->"
NUM_CLIENTS, PHASE_SECONDS = 200, 0.5  # each asks once in a phase
MIN_STEPS = 10  # of a process with and without clients
LEAD_SECONDS = 0.1  # of a phase, in which answers to the one before may be on their way

WORKLOAD = """
import os, time
import torch
from torch import nn
from autotune_amp import Workload

steps = open(os.environ["SERVICE_LOAD_STEPS"], "a", buffering=1)
before = None

def workload():
    def loss(model, batch):
        global before
        now = time.monotonic()
        if before is not None:
            steps.write(f"{os.getpid()} {len(batch[0])} {before} {now}\\\\n")
        before = now
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def batch(size):
        return torch.randn(size, 512), torch.randint(10, (size,))

    def model():
        return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    return Workload(model, loss, batch, lambda parameters: torch.optim.SGD(parameters, lr=0.01))
""".replace("\\\\n", "\\n")
SETTINGS = """
port = 0
requests_per_minute = 1000000
[targets.mlp]
workload = "train.py:workload"
device = "cpu"
budget = 3600
"""
OPTIONS = {"precision": "fp32", "batch_size": "64:128", "effective_batch_size": "free", "try": "none"}


async def poll(address: str, path: str, until: float, seconds: list[float]) -> None:
    """Ask once, at a moment of its own within the phase; without an answer where this process was too slow to ask."""
    with contextlib.suppress(ConnectionError):
        await answered(address, path, seconds)
    await asyncio.sleep(max(0.0, until - time.monotonic()))


async def answered(address: str, path: str, seconds: list[float]) -> None:
    host, port = address.split(":")
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    if answer:
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        seconds.append(time.monotonic() - began)


async def poll_while_running(url: str, id_: str) -> tuple[list[tuple[float, float]], list[float]]:
    """Poll in every other phase until the search is over; return these phases and the seconds of each answer."""
    phases, seconds = [], list[float]()
    while True:
        begin = time.monotonic()
        end = begin + PHASE_SECONDS

        async def client(number: int, begin: float = begin, end: float = end) -> None:
            await asyncio.sleep(begin + PHASE_SECONDS * number / NUM_CLIENTS - time.monotonic())
            await poll(url.removeprefix("http://"), f"/searches/{id_}", end, seconds)

        await asyncio.gather(*map(client, range(NUM_CLIENTS)))
        phases.append((begin, time.monotonic()))
        await asyncio.sleep(phases[-1][1] - begin)  # as long as that, which is more than PHASE_SECONDS for slow clients
        if ask("GET", f"{url}/searches/{id_}")["state"] not in ("queued", "running"):
            return phases, seconds


def ask(method: str, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)  # noqa: S310 - http
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - http
        found: dict[str, Any] = json.load(answer)
        return found


def lower_priority(pid: int) -> None:
    """Give the lowest priority to a process, and to its session, among which Linux may share the processors.

    See sched(7), "The autogroup feature": a nice value holds only within a session.
    """
    os.setpriority(os.PRIO_PROCESS, pid, 19)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("19")


def run(budget_seconds: float, *, is_lowered: bool) -> dict[str, Any]:
    """Search with a service whose session has the lowest priority too, or has that of every other session."""
    with tempfile.TemporaryDirectory(prefix="load-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(WORKLOAD)
        (folder / "serve.toml").write_text(SETTINGS)
        steps = folder / "steps"
        steps.touch()
        command = [sys.executable, "-m", "autotune_amp", "serve", "--config", "serve.toml", "--json"]
        environment = {**os.environ, "SERVICE_LOAD_STEPS": str(steps)}
        service = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        lower_priority(os.getpid())  # of the clients, which stand for other machines
        try:
            assert service.stdout is not None
            url = json.loads(service.stdout.readline())["url"]
            if is_lowered:
                lower_priority(service.pid)
            body = {"target": "mlp", "options": {**OPTIONS, "budget": budget_seconds}}
            id_ = ask("POST", f"{url}/searches", body)["id"]
            cpu = psutil.Process(service.pid).cpu_times()
            cpu_before = cpu.user + cpu.system
            phases, seconds = asyncio.run(poll_while_running(url, id_))
            state = ask("GET", f"{url}/searches/{id_}")
            cpu = psutil.Process(service.pid).cpu_times()
        finally:
            service.terminate()
            service.wait()
        assert state["state"] == "done", state
        return {
            "is_lowered": is_lowered,
            "cores": len(os.sched_getaffinity(0)),
            "load_average": os.getloadavg()[0],
            "num_clients": NUM_CLIENTS,
            "answer_seconds": [round(each, 4) for each in sorted(seconds)[:: max(1, len(seconds) // 200)]],
            "num_requests": NUM_CLIENTS * len(phases),
            "num_answers": len(seconds),
            "service_cpu_seconds": cpu.user + cpu.system - cpu_before,
            "processes": split(steps.read_text(), phases),
        }


def split(text: str, phases: list[tuple[float, float]]) -> list[dict[str, list[float]]]:
    """The seconds of each process's steps, at one batch size, with clients and without."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in text.splitlines():
        pid, size, begin, end = line.split()
        first, last = float(begin), float(end)
        if any(b + LEAD_SECONDS <= first and last <= e for b, e in phases):
            kind = "with"
        elif all(last <= b or first >= e + LEAD_SECONDS for b, e in phases):
            kind = "without"
        else:
            continue
        found.setdefault((pid, size), {"with": [], "without": []})[kind].append(round(last - first, 6))
    return [each for each in found.values() if min(map(len, each.values())) >= MIN_STEPS]


def table() -> str:
    columns = (
        "run",
        "session lowered",
        "cores",
        "load",
        "clients",
        "answers",
        "answer, median",
        "the service's CPU for one",
        "processes",
    )
    rows = [
        f"| {' | '.join(columns)} | steps with, without | change of the median step, 95 % |",
        "|---" * 11 + "|",
    ]
    pooled: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number, line in enumerate(RAW.read_text().splitlines(), start=1):
        run = json.loads(line)
        is_lowered = run["is_lowered"] if "is_lowered" in run else run.get("leads_session") is not None
        changes = [change_of(process) for process in run["processes"]]
        pooled[is_lowered] += changes
        num = {kind: sum(len(p[kind]) for p in run["processes"]) for kind in ("with", "without")}
        cells = (
            *(
                number,
                "yes" if is_lowered else "no",
                run["cores"],
                f"{run['load_average']:.1f}",
                run["num_clients"],
            ),
            f"{run['num_answers']:,} of {run['num_requests']:,}",
            f"{1000 * statistics.median(run['answer_seconds']):.0f} ms",
            f"{1000 * run['service_cpu_seconds'] / run['num_answers']:.2f} ms",
            *(len(changes), f"{num['with']:,}, {num['without']:,}", interval(changes)),
        )
        rows.append(f"| {' | '.join(map(str, cells))} |")
    for is_lowered, changes in pooled.items():
        together = ("all", "yes" if is_lowered else "no", *[""] * 6, len(changes), "", interval(changes))
        rows.append(f"| {' | '.join(map(str, together))} |")
    return "\n".join(rows)


def change_of(process: dict[str, list[float]]) -> tuple[float, float]:
    """The change of the median step of a process, as a logarithm, and its weight, which grows with the steps seen."""
    change = math.log(statistics.median(process["with"]) / statistics.median(process["without"]))
    return change, 1 / sum(1 / len(steps) for steps in process.values())


def interval(changes: list[tuple[float, float]]) -> str:
    """The weighted mean change in percent with its interval, of changes as logarithms with their weights."""
    if len(changes) < 2:
        return "too few processes"
    total = sum(weight for _, weight in changes)
    mean = sum(weight * change for change, weight in changes) / total
    variance = sum((weight * (change - mean)) ** 2 for change, weight in changes) / total**2
    error = 1.96 * math.sqrt(variance * len(changes) / (len(changes) - 1))
    low, mid, high = (100 * math.expm1(value) for value in (mean - error, mean, mean + error))
    return f"{mid:+.1f} % ({low:+.1f} to {high:+.1f})"


def main() -> None:
    if sys.argv[1:] != ["table"]:
        seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
        found = run(seconds, is_lowered=sys.argv[2:] == ["lowered"])
        with RAW.open("a") as file:
            file.write(json.dumps(found) + "\n")
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}{table()}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

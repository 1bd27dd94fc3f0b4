"""Two ranks, each in a process of its own, joined by gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_training import NUM_RANKS, Outcome, Scenario, train

START_SECONDS, RUN_SECONDS, GROUP_SECONDS = 120.0, 60.0, 20.0


class Ranks:
    """Runs scenarios one after the other; starts new processes after one that failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def run(self, scenario: Scenario) -> list[Outcome]:
        """What each rank saw. Raises `AssertionError` with the tracebacks where a rank failed, died or hung."""
        answers = self.answers(scenario)
        outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
        assert len(outcomes) == NUM_RANKS, "\n".join(map(str, answers))
        return outcomes

    def answers(self, scenario: Scenario) -> list[Outcome | str]:
        """Each rank's outcome, or else the traceback of what ended it, "died" or "hung"."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(scenario)
        answers = [_answer(pipe, RUN_SECONDS) for pipe in self._pipes]
        if any(isinstance(answer, str) for answer in answers):
            self.end()
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp(dir=self._folder)) / "store"
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, str(store)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            assert _answer(pipe, START_SECONDS) == "ready"

    def end(self) -> None:
        """Ranks that wait for a scenario end by themselves, others are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            process.kill()
            process.join()
            process.close()
        self._pipes.clear()
        self._processes.clear()


def _answer(pipe: Connection, limit_seconds: float) -> Outcome | str:
    if not wait([pipe], limit_seconds):
        return "hung"
    try:
        answer: Outcome | str = pipe.recv()
    except (EOFError, ConnectionResetError):
        return "died"
    return answer


def _serve(pipe: Connection, rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )
    pipe.send("ready")
    while True:
        try:
            scenario = pipe.recv()
        except (EOFError, ConnectionResetError):
            break
        try:
            pipe.send(train(scenario, rank))
        except Exception:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()

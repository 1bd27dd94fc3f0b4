"""Two ranks, each in a process of its own, joined by gloo."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rank_training import NUM_RANKS, Outcome, Scenario, train

if TYPE_CHECKING:
    from forked_python import ForkedProcess, ForkServer

START_SECONDS, RUN_SECONDS, GROUP_SECONDS = 120.0, 60.0, 20.0


class Ranks:
    """Runs scenarios one after the other; starts new processes after one that failed."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self._folder = folder
        self._server = server
        self._pipes: list[Connection] = []
        self._processes: list[ForkedProcess] = []

    def run(self, scenario: Scenario) -> list[Outcome]:
        """What each rank saw. Raises `AssertionError` with the tracebacks where a rank failed, died or hung."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(scenario)
        answers = [_answer(pipe, RUN_SECONDS) for pipe in self._pipes]
        outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
        if len(outcomes) < NUM_RANKS:
            self.end()
        assert len(outcomes) == NUM_RANKS, "\n".join(map(str, answers))
        return outcomes

    def _start(self) -> None:
        # Not through `multiprocessing`: its resource tracker would outlive the tests.
        folder = tempfile.mkdtemp(dir=self._folder)
        for rank in range(NUM_RANKS):
            with Listener(f"{folder}/{rank}", "AF_UNIX") as listener:
                program = [__file__, f"{folder}/{rank}", str(rank), f"{folder}/store"]
                self._processes.append(self._server.popen(program))
                self._pipes.append(listener.accept())
        for pipe in self._pipes:
            assert _answer(pipe, START_SECONDS) == "ready"

    def end(self) -> None:
        """Ranks that wait for a scenario end by themselves, others are killed."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
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


if __name__ == "__main__":
    _address, _rank, _store = sys.argv[1:]
    with Client(_address, "AF_UNIX") as _pipe:
        _serve(_pipe, int(_rank), _store)

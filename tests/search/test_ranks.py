"""Many ranks: one searches, all get its answer or its error, and torch's process group is left as it would be."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from conftest import CommandLine

from autotune_amp import Workload, recommend_config
from autotune_amp import distributed as ranks
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, RunnerError, WorkloadError
from autotune_amp.core.recommendation import Exclusion, NothingWorksError, Recommendation, SearchInterruptedError
from autotune_amp.distributed import OwnRank, alone, answer_on_first, is_from_launcher, place

TRAIN = """
import json, os, sys
import torch
import torch.distributed as dist
from autotune_amp import Workload, recommend_config
from autotune_amp.core.errors import AutotuneAmpError

def workload():
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")  # in a trial it would wait for the other ranks
    return Workload(lambda: torch.nn.Linear(4, 1), lambda model, batch: model(batch).pow(2).mean(),
                    lambda n: torch.randn(n, 4), torch.optim.SGD)

def find(**options):
    options = {"budget": 30, "precision": "fp32", "batch_size": (4, 8), "trials": 2, "device": "cpu", **options}
    try:
        return recommend_config(workload, **options).to_json()
    except AutotuneAmpError as error:
        return f"{type(error).__name__}: {error}"

def num_records():
    return len(open("studies/workload/outcomes.jsonl").readlines())

def exchanged():
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()
"""
AROUND_THE_GROUP = """
said = [find(), num_records(), exchanged(), find(), num_records()]
dist.destroy_process_group()
said.append(find(precision="fp13"))
print(json.dumps([int(os.environ["RANK"]), said]), flush=True)
"""
WITHOUT_AN_AGENT = """
workload = "missing.py:workload"
print(json.dumps([int(os.environ["RANK"]), [find(), exchanged()]]), flush=True)
if os.environ["RANK"] == "0":
    os._exit(0)
print(json.dumps([2, find()]), flush=True)
os._exit(0)  # the group cannot be destroyed any more
"""


def said_by(out: str) -> list[Any]:
    return [said for _, said in sorted(json.loads(line) for line in out.splitlines() if line.startswith("["))]


@pytest.mark.slow
def test_under_torchrun_one_rank_searches_before_and_after_the_process_group(cli: CommandLine) -> None:
    cli.write("train.py", TRAIN + AROUND_THE_GROUP)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--log-dir", "logs", "train.py"]
    done = subprocess.run(
        [sys.executable, *command], cwd=cli.folder, env=cli.environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    first, second = said_by(done.stdout)
    assert first == second
    found, num_measured, exchanged, again, num_measured_then, error = first
    assert json.loads(found)["search"]["num_trials"] > 0
    document = json.loads(found)
    said = (*document["warnings"], *document["notes"])  # a busy machine has warnings of its own
    assert any("Measured on one of 2 ranks" in text for text in said)
    assert (exchanged, again, num_measured_then) == (2.0, found, num_measured)
    assert error.startswith("InvalidRequestError: precision")
    assert done.stderr.count("Study studies") == 1


@pytest.mark.slow
def test_without_an_agent_too_and_an_error_or_a_death_on_rank_0_reaches_the_other(cli: CommandLine) -> None:
    cli.write("train.py", TRAIN + WITHOUT_AN_AGENT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    clean = {name: value for name, value in cli.environment.items() if not is_from_launcher(name)}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=cli.folder,
            env={**clean, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second, after_the_death = said_by("".join(out for out, _ in outputs))
    assert first == second
    error, exchanged = first
    assert error.startswith("WorkloadError: There is no file missing.py.")
    assert exchanged == 2.0
    assert after_the_death.startswith("RunnerError: Rank 0 ended without an answer")


# Keeps what srun promises: as many tasks as asked for, each with its place in the environment, the highest exit code.
SRUN = """
import os, subprocess, sys
number = int(sys.argv[1].removeprefix("--ntasks="))
step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": sys.argv[2], "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": str(number), "SLURM_NTASKS": str(number)}
places = [{**os.environ, **step, "SLURM_PROCID": str(rank)} for rank in range(number)]
tasks = [subprocess.Popen(sys.argv[3:], env=place) for place in places]
sys.exit(max(task.wait() for task in tasks))
"""
UNDER_SRUN = """
rank = int(os.environ["SLURM_PROCID"])
print(json.dumps([rank, find(budget=60)]), flush=True)
"""


@pytest.mark.slow
def test_under_plain_srun_one_rank_searches(cli: CommandLine) -> None:
    cli.write("train.py", TRAIN + UNDER_SRUN)
    cli.write("srun.py", SRUN)
    clean = {name: value for name, value in cli.environment.items() if not is_from_launcher(name)}
    command = [sys.executable, "srun.py", "--ntasks=2", str(os.getpid()), sys.executable, "train.py"]
    done = subprocess.run(command, cwd=cli.folder, env=clean, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    first, second = said_by(done.stdout)
    assert first == second
    assert json.loads(first)["search"]["num_trials"] > 0
    assert done.stderr.count("Study studies") == 1


# --- without processes


SEARCHING = Mock(side_effect=AssertionError("it searched"))


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], Recommendation]], Recommendation]:
    """One call of each rank, one rank after the other in this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # its stubs do not export it
    monkeypatch.setattr(ranks, "_store", lambda *_: store)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # rank 0 waits for nobody

    def call(rank: int, find: Callable[[], Recommendation]) -> Recommendation:
        monkeypatch.setattr(ranks, "_num_calls", 0)
        return answer_on_first(find, OwnRank(rank, 2), 1.0)

    return call


NOWHERE = (Exclusion(precision="fp32", batch_size=8, reason="oom"),)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkloadError("no workload", "give one"), None),
        (NothingWorksError("nothing works", "buy another", NOWHERE), None),
        (SearchInterruptedError("Ctrl-C", "go on", NOWHERE, None), None),
        (
            ZeroDivisionError("by 0"),
            RunnerError("Rank 0 failed: ZeroDivisionError: by 0", "See the traceback of rank 0."),
        ),
    ],
)
def test_an_error_of_rank_0_is_the_same_on_every_rank(
    as_rank: Any, error: Exception, expected: AutotuneAmpError | None
) -> None:
    with pytest.raises(type(error)):
        as_rank(0, Mock(side_effect=error))
    with pytest.raises(AutotuneAmpError) as heard:
        as_rank(1, SEARCHING)
    wanted = expected or error
    assert type(heard.value) is type(wanted)
    assert (vars(heard.value), str(heard.value)) == (vars(wanted), str(wanted))


@pytest.mark.parametrize("error", [SearchInterruptedError("SIGTERM", "go on", NOWHERE, None), KeyboardInterrupt()])
def test_interrupted_rank_0_does_not_wait_long_for_others_that_were_too(
    as_rank: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE")
    now = iter(range(1000))
    monkeypatch.setattr("autotune_amp.distributed.time", Mock(monotonic=lambda: next(now)))
    with pytest.raises(type(error)):
        as_rank(0, Mock(side_effect=error))
    assert next(now) < ranks._HEARD_SECONDS / 2


def test_waiting_for_rank_0_has_an_end_and_can_be_interrupted(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_amp.distributed.time.sleep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SearchInterruptedError, match="Rank 1 was interrupted"):
        as_rank(1, SEARCHING)
    monkeypatch.setattr("autotune_amp.distributed._LATE_SECONDS", -2.0)
    with pytest.raises(RunnerError, match="Rank 0 gave no answer"):
        as_rank(1, SEARCHING)


def test_the_answer_of_a_service_is_waited_for_as_long_as_its_queue_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]  # its stubs do not export it
    meet = Mock(return_value=store)
    monkeypatch.setattr(ranks, "_store", meet)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("autotune_amp.distributed._LATE_SECONDS", -2000.0)
    monkeypatch.setattr("autotune_amp.distributed.time.sleep", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SearchInterruptedError, match="Rank 1 was interrupted"):
        recommend_config("mlp", server="http://127.0.0.1:1", quiet=True)
    assert meet.call_args.args[2] == -2000.0  # though not to meet rank 0
    with pytest.raises(RunnerError, match="Rank 0 gave no answer"):
        recommend_config("mlp", quiet=True)


def test_ranks_that_cannot_meet_are_told_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(InvalidRequestError, match=r"rank 1 of 2(.|\n)*Call init_process_group\(\) before"):
        answer_on_first(SEARCHING, OwnRank(1, 2), 1.0)


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, OwnRank(0, 1)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, OwnRank(0, 1)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, OwnRank(3, 4)),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1", "NODE_RANK": "0"}, OwnRank(0, 1, is_rerun=True)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "RANK": "3"}, OwnRank(3, 4)),
        ({"WORLD_SIZE": "4"}, None),
        ({"WORLD_SIZE": "4", "RANK": "4"}, None),
        ({"WORLD_SIZE": "many", "RANK": "0"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, OwnRank(3, 4)),
        ({"SLURM_STEP_NUM_TASKS": "4"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, OwnRank(0, 1)),  # a batch script, which no srun started
        ({"WORLD_SIZE": "2", "RANK": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, OwnRank(1, 2)),
    ],
)
def test_the_place_is_what_the_launcher_says(
    environment: dict[str, str], found: OwnRank | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", environment)
    if found is not None:
        assert place() == found
        return
    with pytest.raises(InvalidRequestError, match=r"(WORLD_SIZE|SLURM_STEP_NUM_TASKS) is"):
        place()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("gpu1", "gpu1"), ("node[03-06,9],gpu1", "node03"), ("node[7,9-12]-ib", "node7-ib"), ("a,b[1-2]", "a")],
)
def test_the_ranks_of_srun_meet_on_the_first_host_of_the_step(
    hosts: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"SLURM_STEP_NODELIST": hosts, "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2"}
    monkeypatch.setattr(os, "environ", step)
    found = ranks._meeting_place()
    assert found is not None
    address, port, name = found
    assert (address, port in range(1024, 32768), name) == (first, True, "4711.2")
    step["SLURM_STEP_ID"] = "3"
    assert ranks._meeting_place() == (first, port + 1, "4711.3")
    step |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert ranks._meeting_place() == ("10.0.0.1", 29500, None)


@pytest.mark.parametrize(
    "workload", [Workload(lambda: None, lambda model, batch: None, lambda size: None), "train.py:workload"]
)
def test_a_rerun_of_the_script_never_searches(workload: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(InvalidRequestError, match=r"LOCAL_RANK is '1' without a RANK"):
        recommend_config(workload, device="cpu", out=str(tmp_path / "studies"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_what_one_rank_cannot_measure_is_said() -> None:
    (on_cpu,), (on_gpu,), (of_trainer,) = alone(2, 1, "cpu"), alone(2, 2, "cuda:0"), alone(1, 2, "cuda:0")
    assert alone(1, 1, "cpu") == ()
    assert ("price" in on_gpu, "price" in of_trainer) == (False, True)
    assert "gradients were not exchanged, and their load was not on the CPU" in on_cpu
    assert "gradients were not exchanged." in on_gpu


def test_a_trial_sees_nothing_of_the_launcher_and_all_that_only_looks_like_it() -> None:
    ranks = ["RANK", "LOCAL_RANK", "MASTER_PORT", "ROLE_NAME", "TORCHELASTIC_RUN_ID", "PMI_RANK"]
    others = ["CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "RANKED", "MASTER_KEY", "ROLE_ARN", "PMIX_MCA_gds"]
    assert [name for name in (*ranks, *others) if is_from_launcher(name)] == ranks

"""The jobs that a recommendation makes for Slurm, run by stand-ins for its commands that keep its contract."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune_amp.core.text import shell_line
from autotune_amp.integrations.export import is_exported
from autotune_amp.integrations.slurm import slurm

ORIGIN = "studies/my train: bf16 batch 64, measured at 100 samples/s"
# sbatch: options, then a script from standard input; with --parsable the number of the job alone; it returns at once.
# Here jobs are written down, for `Cluster.run`.
SBATCH = """
import json, os, pathlib, sys
number = len(list(pathlib.Path("jobs").iterdir())) + 1
job = {"options": sys.argv[1:], "script": sys.stdin.read()}
pathlib.Path("jobs", str(number)).write_text(json.dumps(job))
print(f"{number};cluster")
"""
# srun kills its tasks where it is terminated itself; scancel --signal reaches the tasks, and not the job's script.
SRUN = """
import itertools, os, pathlib, signal, subprocess, sys
command = list(itertools.dropwhile(lambda word: word.startswith("--"), sys.argv[1:]))
step = subprocess.Popen(command, env={**os.environ, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})
signal.signal(signal.SIGTERM, lambda *_: step.kill())
pathlib.Path("step").write_text(str(step.pid))
sys.exit(step.wait())
"""
SCANCEL = """
import os, pathlib, signal, sys
assert sys.argv[1] == "--signal=TERM", sys.argv
os.kill(int(pathlib.Path("step").read_text()), signal.SIGTERM)
"""
# What a job runs: it notes its arguments, and lasts until SIGTERM where it is told to.
PROGRAM = """
import os, pathlib, signal, sys, time
def end(*_):
    pathlib.Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
with open("ran", "a") as file:
    file.write(repr(sys.argv[1:]) + "\\n")
if os.path.exists("lasts"):
    time.sleep(100)
"""
# symmetric-run: on the head it starts what follows -- once all nodes are there.
RAY = """
import os, sys
with open("ray", "a") as file:
    file.write(" ".join(sys.argv[1:sys.argv.index("--")]) + "\\n")
command = sys.argv[sys.argv.index("--") + 1 :]
os.execvp(command[0], [word.replace("infinity", "3") for word in command])
"""
NOTES = 'import sys; open("requeued", "a").write(" ".join(sys.argv[1:]))'


class Cluster:
    """A folder with programs of these names first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = {
            "sbatch": SBATCH,
            "srun": SRUN,
            "scancel": SCANCEL,
            "scontrol": NOTES,
            "autotune-amp": PROGRAM,
            "my train": PROGRAM,
            "ray": RAY,
        }
        for name, text in programs.items():
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!{sys.executable}\n{text}")
            path.chmod(0o755)
        (folder / "jobs").mkdir()
        self.environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def submit(self, text: str, *options: str) -> list[list[str]]:
        """The options of each job that the script submits, in order."""
        (self.folder / "jobs.sh").write_text(text)
        subprocess.run(["bash", "jobs.sh", *options], cwd=self.folder, env=self.environment, check=True)
        return [json.loads(path.read_text())["options"] for path in sorted((self.folder / "jobs").iterdir())]

    def run(self, number: int) -> subprocess.Popen[bytes]:
        """Starts a job as Slurm does: its script from a file, its number in the environment."""
        script = self.folder / f"slurm_script_{number}"
        script.write_text(json.loads((self.folder / "jobs" / str(number)).read_text())["script"])
        script.chmod(0o755)
        environment = {**self.environment, "SLURM_JOB_ID": str(number)}
        return subprocess.Popen([script], cwd=self.folder, env=environment)

    def ran(self) -> list[list[str]]:
        path = self.folder / "ran"
        return [eval(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


TRAINING = ("my train", "--bs", "{batch_size=4}", "it's")
SEARCHING = ("--budget", "60.0", "--study", "my train", "--", *TRAINING)


def text(
    searching: Sequence[str] | None = SEARCHING,
    training: Sequence[str] | None = TRAINING,
    *,
    can_use_ray: bool = False,
) -> str:
    made = slurm(searching, training, name="my study", study="studies/my train", origin=ORIGIN, can_use_ray=can_use_ray)
    assert made.to == "slurm"
    assert is_exported(made.text)
    return made.text


@pytest.mark.parametrize("searching", [SEARCHING, None])
@pytest.mark.parametrize("training", [TRAINING, None])
@pytest.mark.parametrize("can_use_ray", [True, False])
def test_it_is_sound_for_the_shell(
    searching: Sequence[str] | None, training: Sequence[str] | None, can_use_ray: bool, tmp_path: Path
) -> None:
    script = tmp_path / "jobs.sh"
    script.write_text(text(searching, training, can_use_ray=can_use_ray))
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    inner = script.read_text().split("<<'JOB'\n")[1:]
    for number, job in enumerate(inner):
        (tmp_path / f"{number}.sh").write_text(job.partition("\nJOB\n")[0] + "\n")
    checker = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert checker is not None
    found = subprocess.run([checker, *tmp_path.glob("*.sh")], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_training_waits_for_the_search_and_takes_its_answer(cluster: Cluster) -> None:
    search, training = cluster.submit(text(), "--partition=gpu", "--gpus=1")
    for options in (search, training):
        assert options[:3] == ["--parsable", "--partition=gpu", "--gpus=1"]
        assert {"--requeue", "--signal=B:TERM@60"} <= set(options)
    assert "--job-name=my study-search" in search
    assert "--dependency=afterok:1" in training, "a search that fails starts no training"
    assert [cluster.run(number).wait(60) for number in (1, 2)] == [0, 0]
    assert cluster.ran() == [["search", *SEARCHING], ["run", "studies/my train", "--", *TRAINING]]
    assert not (cluster.folder / "requeued").exists()


@pytest.mark.parametrize("number", [1, 2])
def test_when_time_is_up_what_runs_saves_and_the_job_is_queued_again(cluster: Cluster, number: int) -> None:
    cluster.submit(text())
    (cluster.folder / "lasts").touch()
    job = cluster.run(number)
    until = time.monotonic() + 60
    while not cluster.ran() and time.monotonic() < until:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)  # to the shell alone, as --signal=B: has it
    try:
        assert job.wait(60) != 0
    finally:
        job.kill()
    assert (cluster.folder / "saved").exists()
    assert (cluster.folder / "requeued").read_text() == f"requeue Incomplete {number}"


def test_a_script_that_searches_itself_is_one_job(cluster: Cluster) -> None:
    (options,) = cluster.submit(text(searching=None))
    assert not any(option.startswith("--dependency") for option in options)
    assert cluster.run(1).wait(60) == 0
    assert cluster.ran() == [[*TRAINING[1:]]]


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_a_search_runs_on_all_nodes_of_its_job(cluster: Cluster, num_nodes: int) -> None:
    searching = ("--budget", "60.0", "train.py:workload")
    search, _ = cluster.submit(text(searching, can_use_ray=True), f"--nodes={num_nodes}")
    assert [option for option in search if option.startswith("--nodes")] == [f"--nodes={num_nodes}"]
    cluster.environment["SLURM_JOB_NUM_NODES"] = str(num_nodes)
    assert cluster.run(1).wait(60) == 0
    (searched,) = [words for words in cluster.ran() if words[0] == "search"]
    if num_nodes == 1:
        assert searched == ["search", *searching]
        return
    assert searched[0] == "search"
    assert searched[1] == "--ray"
    assert searched[3:] == [*searching]
    started = (cluster.folder / "ray").read_text().splitlines()
    assert started == [f"symmetric-run --address {searched[2]} --min-nodes 3"]


def test_a_job_that_fails_fails(cluster: Cluster) -> None:
    cluster.submit(text())
    (cluster.folder / "bin/autotune-amp").write_text("#!/bin/sh\nexit 3\n")
    assert cluster.run(1).wait(60) == 3


@pytest.mark.parametrize("word", ["a\nJOB\ntouch mine\ncat <<'JOB'\n", "JOB", "\rJOB", "$(touch mine)", "\x1b[31m"])
def test_no_word_of_the_command_reaches_the_submitting_shell(tmp_path: Path, word: str) -> None:
    cluster = Cluster(tmp_path)
    training = ["my train", word]
    made = slurm([word], training, name="my study", study=f"studies/{word}", origin=word)
    assert not {c for c in made.text if not c.isprintable()} - {"\n"}
    subprocess.run(["bash", "-c", made.text], cwd=tmp_path, env=cluster.environment, timeout=60, check=True)
    assert not (tmp_path / "mine").exists()
    jobs = [json.loads((tmp_path / "jobs" / number).read_text()) for number in ("1", "2")]
    assert all(shell_line([word]) in job["script"] for job in jobs)

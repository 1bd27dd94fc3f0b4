"""A search of a training command, through the command line: what it says and keeps."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import CommandLine, SharedOnce
from forked_python import ForkServer
from real_searches import Searched, searched
from unisolated import run_jobs_here

from autotune_amp import CommandTemplate, recommend_config
from autotune_amp.cli import run

# A step takes as long for any batch, so that the largest is the fastest on any machine.
SCRIPT = """
import argparse, os, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--workers", type=int)
options = parser.parse_args()
assert not os.path.exists("snapshot.pt"), "it would resume"
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1000):
    for x, y in torch.utils.data.DataLoader(data, batch_size=options.batch, shuffle=True):
        time.sleep(0.02)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(model.state_dict(), "snapshot.pt")
"""
COMMAND = ("--", sys.executable, "train.py", "--batch", "{batch_size=4}")
OPTIONS = (
    "--device",
    "cpu",
    "--precision",
    "fp32",
    "--effective-batch-size",
    "free",
    "--batch-size",
    "4:16",
    "--trials",
    "4",
)


DRY_RUN = ("search", "--dry-run", "--value", "bf16=half")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, without a process of its own for what is probed."""
    monkeypatch.chdir(tmp_path)
    run_jobs_here(monkeypatch)


@pytest.fixture
def found(shared_once: SharedOnce) -> Searched:
    """A search that recommends batch 16 over batch 4."""
    arguments = (*OPTIONS, "--budget", "600", *COMMAND)
    return shared_once("found_command", lambda folder: searched(None, folder, SCRIPT, *arguments))  # all truly started


@pytest.fixture
def copied(found: Searched, cli: CommandLine) -> CommandLine:
    shutil.copytree(found.folder, cli.folder, dirs_exist_ok=True)
    return cli


@pytest.mark.slow
def test_the_document(found: Searched) -> None:
    assert found.done.code == 0, found.done.err
    document = json.loads((found.study / "recommendation.json").read_text())
    assert found.study.name == "train"
    assert document["config"]["batch_size"] == 16
    assert document["evidence"]["speedup"] > 1.5
    assert document["evidence"]["baseline"]["config"]["batch_size"] == 4
    assert document["launch_line"]["arguments"][-1] == "{batch_size=4}"
    assert document["command"] == f"{sys.executable} train.py --batch 16"
    assert any("first steps" in note for note in document["notes"]), "what a command cannot tell is said"
    assert {record["outcome"]["outcome"] for record in found.records} == {"measurement"}
    assert {path.name for path in found.folder.iterdir()} == {"train.py", "studies"}, "trials leave nothing"
    assert (found.study / "trial_leftovers/snapshot.pt").exists()
    assert any("snapshot.pt" in text and "trial_leftovers" in text for text in document["search"]["files"])


@pytest.mark.slow
def test_the_answer_is_the_filled_command(found: Searched, copied: CommandLine) -> None:
    command = f"{sys.executable} train.py --batch 16"
    assert command in copied("show").out
    assert command in (found.study / "report.html").read_text()


@pytest.mark.slow
def test_the_same_command_is_answered_from_the_cache_and_an_edited_script_is_not(copied: CommandLine) -> None:
    before = (copied.folder / "studies/train/outcomes.jsonl").read_bytes()
    again = copied.search(*OPTIONS, "--budget", "600", *COMMAND)
    assert again.code == 0, again.err
    assert again.document["config"]["batch_size"] == 16
    assert (copied.folder / "studies/train/outcomes.jsonl").read_bytes() == before
    (copied.folder / "train.py").write_text(SCRIPT.replace("0.02", "0.01"))
    edited = copied.search(*OPTIONS, "--budget", "20", *COMMAND)
    assert "train.py" in edited.err, "what changed is named"


# In bf16 its steps are the faster ones, and from the tenth on, which no check of the first weights sees, its losses are
# not finite.
NOT_FINITE = (
    SCRIPT.replace("options = ", 'parser.add_argument("--precision")\noptions = ')
    .replace("for epoch in", 'is_low, numbers = options.precision == "bf16", iter(range(10**9))\nfor epoch in')
    .replace("time.sleep(0.02)", "time.sleep(0.002 if is_low else 0.02)")
    .replace(
        "        (model(x) - y).square().mean().backward()\n",
        '        with torch.autocast("cpu", torch.bfloat16, enabled=is_low):\n'
        "            loss = (model(x) - y).square().mean()\n"
        '        (loss * (float("nan") if is_low and next(numbers) >= 9 else 1.0)).backward()\n',
    )
)


@pytest.mark.slow
def test_a_precision_whose_losses_are_not_finite_is_not_recommended(
    cli_server: ForkServer | None, tmp_path: Path
) -> None:
    options = ("--device", "cpu", "--precision", "fp32", "--precision", "bf16")
    limits = ("--batch-size", "4:4", "--trials", "2", "--budget", "100")
    found = searched(cli_server, tmp_path, NOT_FINITE, *options, *limits, *COMMAND, "--precision", "{precision=fp32}")
    assert found.done.code == 0, found.done.err
    assert found.done.document["config"]["precision"] == "fp32"
    outcomes = [record["outcome"] for record in found.records if record["candidate"]["precision"] == "bf16"]
    assert "nonfinite" in {outcome.get("kind") for outcome in outcomes}
    assert "measurement" not in {outcome["outcome"] for outcome in outcomes}


@pytest.mark.slow
def test_a_job_of_slurm_searches_the_same(copied: CommandLine) -> None:
    before = (copied.folder / "studies/train/outcomes.jsonl").read_bytes()
    jobs = copied("export", "--to", "slurm").out
    command = next(line for line in jobs.splitlines() if line.startswith("autotune-amp search"))
    again = copied(*shlex.split(command.removesuffix(" &"))[1:])
    assert again.code == 0, again.err
    assert (copied.folder / "studies/train/outcomes.jsonl").read_bytes() == before, "answered from the cache"
    assert f"srun autotune-amp run studies/train -- {sys.executable} train.py --batch '{{batch_size=4}}' &" in jobs


@pytest.mark.slow
def test_in_python_it_is_the_same_search(copied: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied.folder)
    before = (copied.folder / "studies/train/outcomes.jsonl").read_bytes()
    answer = recommend_config(
        CommandTemplate.of(COMMAND[1:]),
        device="cpu",
        precision="fp32",
        effective_batch_size="free",
        batch_size="4:16",
        trials=4,
        budget=600,
        quiet=True,
    )
    assert answer.config.batch_size == 16
    assert answer.command == f"{sys.executable} train.py --batch 16"
    assert (copied.folder / "studies/train/outcomes.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_terminated_or_killed_it_leaves_nothing_and_goes_on(cli: CommandLine, number: signal.Signals) -> None:
    (cli.folder / "train.py").write_text("open('log', 'w').close()\n" + SCRIPT)
    outcomes = cli.folder / "studies/train/outcomes.jsonl"
    arguments = (*OPTIONS, "--budget", "600", *COMMAND)
    process = cli.start("search", *arguments)
    until = time.monotonic() + 150
    while not (outcomes.exists() and outcomes.read_text().count("\n")) and time.monotonic() < until:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    if number == signal.SIGTERM:
        cli.terminate_all(process)
    else:
        process.send_signal(number)
    process.communicate(timeout=60)
    assert '"outcome":"failure"' not in outcomes.read_text()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    assert cli.wait_until_alone(60) == []
    assert (cli.folder / "studies/train/trial_leftovers/log").exists()
    assert not (cli.folder / "log").exists()
    known = outcomes.read_text()
    again = cli.start("search", *arguments)
    until = time.monotonic() + 150
    while len(outcomes.read_text()) <= len(known) and again.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    again.send_signal(signal.SIGINT)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 130, err
    assert "Continuing" in err
    assert outcomes.read_text().startswith(known)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("search", "train.py:workload", *COMMAND), "train.py:workload"),
        (("search", "--value", "bf16=x"), "--value"),
        (("search", "--value", "bf16", *COMMAND), "PRECISION=WORD"),
        (("search", "--file", "cfg.yaml", *COMMAND), "cfg.yaml"),
        (("search", "--dry-run"), "--dry-run"),
        (("search", "--"), "empty"),
        (("search", "--", sys.executable, "nope.py"), "nope.py"),
        (("search", "--", sys.executable, "train.py", "{batchsize=32}"), "{batch_size=32}"),
        (("search", "--objective", "energy", *COMMAND), "energy"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_request_that_cannot_be_meant_names_what_was_given(
    arguments: tuple[str, ...], named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").touch()
    assert run(list(arguments)) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert named in said.err


@pytest.mark.usefixtures("here")
def test_a_dry_run_prints_what_would_be_started_and_starts_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*DRY_RUN, "--", "no-such-program", "{batch_size=4}", "{precision=fp32}"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["no-such-program 4 fp32", "no-such-program 4 half", "no-such-program 2 fp32"]


@pytest.mark.usefixtures("here")
def test_a_command_that_is_not_there_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--device", "cpu", "--", "no-such-program", "{batch_size=4}"]) == 2
    assert "no-such-program" in capfd.readouterr().err
    assert not Path("studies").exists(), "it was looked for before anything was begun"

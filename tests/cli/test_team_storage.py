"""A team's storage, in a real PostgreSQL: a search there, its answer for others, and what it says of the password."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator

import postgresql
import pytest
from conftest import CommandLine

from autotune_amp.search.storage.database import open_storage

# A step takes as long for any batch, so that the largest is the fastest on any machine.
SCRIPT = """
import time
import torch
from autotune_amp import Workload

def loss(model, batch):
    time.sleep(0.02)
    return model(batch).pow(2).mean()

def workload():
    return Workload(lambda: torch.nn.Linear(4, 1), loss, lambda n: torch.randn(n, 4), torch.optim.SGD)
"""
OPTIONS = ("--device", "cpu", "--precision", "fp32", "--effective-batch-size", "free", "--try", "none")


@pytest.fixture(scope="module")
def server() -> Iterator[postgresql.Server]:
    with postgresql.server() as started:
        yield started


@pytest.mark.slow
def test_others_are_answered_from_it_or_begin_with_what_was_best(cli: CommandLine, server: postgresql.Server) -> None:
    target = cli.write("train.py", SCRIPT)
    cli.environment["PGPASSWORD"] = postgresql.PASSWORD
    bare = server.url().replace(f":{postgresql.PASSWORD}", "")

    def search(out: str, batch_sizes: str, url: str = bare) -> tuple[dict[str, object], str]:
        asked = ("--batch-size", batch_sizes, "--budget", "25", "--storage", url, "--out", out)
        done = cli.search(target, *OPTIONS, *asked)
        assert done.code == 0, done.err
        assert postgresql.PASSWORD not in done.out + done.err
        return done.document, done.err

    mine, _ = search("mine", "4:32", server.url())
    theirs, said = search("theirs", "4:32")
    assert (theirs["config"], theirs["evidence"]) == (mine["config"], mine["evidence"])
    assert "Answered from the storage" in said
    assert not (cli.folder / "theirs/train/outcomes.jsonl").exists(), "nothing was run"
    assert (cli.folder / "theirs/train/report.html").exists()
    assert cli("show", "theirs/train").code == 0

    _, said = search("wider", "4:64")
    assert "Starting from what was measured" in said
    lines = (cli.folder / "wider/train/outcomes.jsonl").read_text().splitlines()
    tried = [r["candidate"]["batch_size"] for r in map(json.loads, lines) if r["purpose"] == "search"]
    best = json.loads((cli.folder / "mine/train/recommendation.json").read_text())["config"]["batch_size"]
    assert best in tried[:2], "after today's"
    with open_storage(server.url()) as storage:
        studies = storage.get_all_studies()
        assert {study.study_name for study in studies} >= {"train"}
        trials = [storage.get_all_trials(study._study_id) for study in studies]
        assert postgresql.PASSWORD not in repr((trials, [study.user_attrs for study in studies]))
    dashboard = cli.start("dashboard", "--storage", bare, "--port", "0", "--no-browser", "--json")
    assert dashboard.stdout is not None
    address = json.loads(dashboard.stdout.readline())["url"]
    with urllib.request.urlopen(f"{address.removesuffix('dashboard/')}api/studies", timeout=30) as reply:
        listed = {summary["study_name"] for summary in json.load(reply)["study_summaries"]}
    dashboard.send_signal(signal.SIGINT)
    dashboard.communicate(timeout=60)
    assert listed == {study.study_name for study in studies}
    for path in cli.folder.rglob("*"):
        assert not path.is_file() or postgresql.PASSWORD.encode() not in path.read_bytes()

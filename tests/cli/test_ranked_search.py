"""Real searches whose trials two processes train together, by command line: whole, interrupted and gone on with."""

from __future__ import annotations

import signal
import statistics
from pathlib import Path

import pytest
from conftest import CommandLine, SharedOnce, needs_two_cpus
from forked_python import ForkServer
from real_searches import CHECKS, WORKLOADS, Searched, end_by, lines, searched, wait_for_lines

pytestmark = [pytest.mark.real_time, pytest.mark.slow, needs_two_cpus]

ON_CPU = ("--device", "cpu", "--try", "none", "--ranks", "2")
SEARCH = ("train.py:plain", *ON_CPU, "--precision", "fp32", "--effective-batch-size", "free", "--baseline", "fp32:4")
FP16 = """
def halves():
    def loss(model, batch):
        time.sleep(0.02)
        return 2.0 ** -30 * squares(model, batch)
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, sgd)
"""


@pytest.fixture
def found(shared_once: SharedOnce, cli_server: ForkServer | None) -> Searched:
    def search(folder: Path) -> Searched:
        return searched(
            cli_server, folder, WORKLOADS, *SEARCH, "--batch-size", "1:32", "--trials", "5", "--budget", "240"
        )

    return shared_once("searched with ranks", search)


def test_what_is_measured_and_promised_is_that_of_both_together(found: Searched) -> None:
    assert found.done.code == 0, found.done.err
    assert [r["outcome"] for r in found.records if r["outcome"]["outcome"] == "failure"] == []
    config, evidence = found.document["config"], found.document["evidence"]
    assert config["batch_size"] == 32
    (alone,) = (record for record in found.records if record["purpose"] == "one_rank")
    together = [r for r in found.records if r["purpose"] == "confirm" and r["candidate"] == alone["candidate"]]
    for record in (alone, *together):  # whatever the machine, a step sleeps
        num_ranks = 1 if record is alone else 2
        assert record["outcome"]["samples_per_second"] < num_ranks * 32 / 0.02
    ranks, reached = evidence["ranks"], statistics.fmean(r["outcome"]["samples_per_second"] for r in together)
    assert ranks["num_ranks"] == 2
    assert ranks["efficiency"] == pytest.approx(reached / (2 * alone["outcome"]["samples_per_second"]), rel=0.3)


def test_the_effective_batch_size_is_kept_over_both_and_fp16s_loss_scale_is_that_of_the_run(
    cli_server: ForkServer | None, tmp_path: Path
) -> None:
    arguments = ("train.py:halves", *ON_CPU, "--precision", "fp16", "--baseline", "fp32:16", "--steps", "1000")
    limits = ("--effective-batch-size", "64", "--trials", "4", "--budget", "240")
    search = searched(cli_server, tmp_path, WORKLOADS + FP16, *arguments, *limits)
    assert search.done.code == 0, search.done.err
    config = search.document["config"]
    assert 2 * config["batch_size"] * config["accumulation_steps"] == 64
    assert config["precision"] == "fp16"
    runs = [r for r in search.records if r["purpose"] in ("confirm", "one_rank") and r["loss_scale"] is not None]
    assert {r["purpose"] for r in runs} == {"confirm", "one_rank"}
    assert {r["loss_scale"]["init_scale"] for r in runs} == {config["loss_scale"]["init_scale"]}


def test_terminated_or_killed_nothing_is_lost_and_nothing_left(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    num_known = 0
    for way in (signal.SIGTERM, signal.SIGKILL):
        process = cli.start("search", *SEARCH, "--budget", "150", "--json")
        wait_for_lines(cli, process, num_known + 2)
        end_by(cli, process, way)
        found = lines(cli)
        assert len(found) >= num_known + 2
        assert [line["outcome"] for line in found if line["outcome"]["outcome"] == "failure"] == []
        num_known = len(found)
    done = cli.search(*SEARCH, "--budget", "150")
    assert done.code == 0, done.err
    assert done.document["search"]["num_trials"] == sum(line["purpose"] not in CHECKS for line in lines(cli))

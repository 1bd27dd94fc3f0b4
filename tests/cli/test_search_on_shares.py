"""A real search on two shares of the CPU, by command line: read by many tests, interrupted, killed and gone on with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import CommandLine, SharedOnce, needs_two_cpus
from forked_python import ForkServer
from real_searches import CHECKS, FP32, WORKLOADS, Searched, end_by, lines, searched, wait_for_lines

pytestmark = [pytest.mark.real_time, needs_two_cpus]

SEARCH = ("train.py:plain", *FP32, "--baseline", "fp32:4", "--batch-size", "1:64", "--slots", "2", "--try", "none")
BUDGET = ("--budget", "90")  # of which loading takes half on a busy machine


@pytest.fixture
def found(shared_once: SharedOnce) -> Searched:
    def search(folder: Path) -> Searched:
        return searched(folder, WORKLOADS, *SEARCH, *BUDGET)

    return shared_once("searched on shares", search)


def of(found: Searched, *purposes: str) -> list[dict[str, Any]]:
    return [record for record in found.records if record["purpose"] in purposes]


@pytest.mark.slow
def test_trials_run_on_both_at_the_same_time_and_what_is_promised_is_confirmed_with_all(found: Searched) -> None:
    trials, confirmed = of(found, "search"), of(found, "confirm")
    assert len({record["slot"] for record in trials}) == 2
    assert any(record["num_beside"] for record in trials)
    assert all(record["has_share"] for record in trials)
    assert {(r["slot"], r["num_beside"], r["has_share"]) for r in confirmed} == {(None, 0, False)}
    slots = found.document["evidence"]["slots"]
    assert (len(slots["names"]), slots["slowdown"], slots["is_confirmed_beside"]) == (2, None, False)


@pytest.mark.slow
def test_it_finds_what_it_measured(found: Searched) -> None:
    """Which is the fastest is for clocks that no other process moves: see `test_search_on_slots`."""
    batch_size = found.document["config"]["batch_size"]
    ours = [r["outcome"] for r in of(found, "search", "confirm") if r["candidate"]["batch_size"] == batch_size]
    speeds = [outcome["samples_per_second"] for outcome in ours if outcome["outcome"] != "failure"]
    assert min(speeds) <= found.document["evidence"]["samples_per_second"] <= max(speeds)


@pytest.mark.slow
def test_the_report_the_progress_and_the_options_say_where(found: Searched) -> None:
    (first, *_) = sorted({record["slot"] for record in of(found, "search")})
    assert f"on {first}" in found.done.err
    assert first in (found.study / "report.html").read_text()
    assert found.document["options"]["slots"] == 2


@pytest.mark.slow
def test_the_answer_holds_for_any_number_of_slots(found: Searched, cli: CommandLine, fork_server: ForkServer) -> None:
    arguments = [word for word in SEARCH if word not in ("--slots", "2")]
    command = ["-m", "autotune_amp", "search", *arguments, *BUDGET, "--json"]
    process = fork_server.run(command, cwd=found.folder, env=cli.environment)
    assert json.loads(process.stdout) == found.document, process.stderr


@pytest.mark.slow
def test_interrupted_terminated_or_killed_nothing_is_lost_and_nothing_left(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    known: list[dict[str, Any]] = []
    for way in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = cli.start("search", *SEARCH, "--budget", "60", "--json")
        wait_for_lines(cli, process, len(known) + 3)
        end_by(cli, process, way)
        found = lines(cli)
        assert found[: len(known)] == known
        assert len({line["number"] for line in found}) == len(found)
        assert [line["outcome"] for line in found if line["outcome"]["outcome"] == "failure"] == []
        known = found
    done = cli.search(*SEARCH, "--budget", "60")
    assert done.code == 0, done.err
    assert lines(cli)[: len(known)] == known
    assert done.document["search"]["num_trials"] == sum(line["purpose"] not in CHECKS for line in lines(cli))


def test_slots_are_for_a_cpu_and_no_more_than_it_has(cli: CommandLine) -> None:
    (cli.folder / "train.py").touch()
    for options, said in (
        (("--slots", "100000"), "CPUs"),
        (("--slots", "2", "--devices", "all"), "--devices"),
        (("--devices", "0,x"), "--devices"),
        (("--device", "cpu", "--devices", "all"), "--devices"),
        (("--slots", "2", "--objective", "energy"), "--objective"),
        (("--slots", "2", "--", "python", "train.py"), "--slots"),
        (("--ranks", "2", "--", "python", "train.py"), "--ranks"),
        (("--ranks", "2", "--slots", "2"), "--ranks"),
    ):
        done = cli.search(*options)
        assert (done.code, done.document["error"]["kind"]) == (2, "invalid_request")
        assert said in done.document["error"]["message"] + done.document["error"]["next_step"]

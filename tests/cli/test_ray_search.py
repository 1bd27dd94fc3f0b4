"""Whole searches on a real Ray cluster of processes, by command line; nodes, head, coordinator are killed meanwhile."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import CommandLine
from ray_nodes import RayCluster, RayNodes
from real_searches import FP32, WORKLOADS, lines, wait_for_lines

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

# Its trials outlast the coming of a node.
SLOWLY = """
def slowly():
    def loss(model, batch):
        time.sleep(0.2)
        return squares(model, batch)
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, sgd)
"""
OPTIONS = (
    *FP32,
    "--baseline",
    "fp32:4",
    "--batch-size",
    "1:64",
    "--try",
    "none",
    "--budget",
    "60",
    "--study",
    "train-plain",
)


@pytest.fixture(autouse=True)
def _workloads(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS + SLOWLY)


@pytest.fixture
def nodes(ray_cluster: RayCluster) -> Iterator[RayNodes]:
    """One node."""
    with RayNodes(ray_cluster) as made:
        made.add()
        yield made


def start(cli: CommandLine, nodes: RayNodes | RayCluster, target: str = "plain") -> subprocess.Popen[str]:
    return cli.start("search", f"train.py:{target}", *OPTIONS, "--ray", nodes.address, "--json")


def ended(process: subprocess.Popen[str], code: int) -> tuple[dict[str, Any], str]:
    out, err = process.communicate(timeout=180)
    assert process.returncode == code, err
    return json.loads(out) if out else {}, err


def test_a_node_is_killed_and_another_one_comes(cli: CommandLine, nodes: RayNodes) -> None:
    second = nodes.add()
    process = start(cli, nodes, "slowly")
    wait_for_lines(cli, process, 2)
    nodes.kill(second)
    nodes.add()
    document, err = ended(process, 0)
    found = lines(cli)
    assert len({line["number"] for line in found}) == len(found)
    failed = [(r["slot"], r["outcome"]) for r in found if r["outcome"]["outcome"] == "failure"]
    assert failed == [], err
    assert len({line["slot"] for line in found}) >= 2
    assert set(document["evidence"]["devices"]) == {line["slot"] for line in found}
    lost = [note for note in document["notes"] if "is left out" in note]
    assert len(lost) == 1, document["notes"]
    assert lost[0] in err
    assert all(f"on {line['slot']}" in err for line in found)
    again, _ = ended(start(cli, nodes, "slowly"), 0)
    assert again == document, "answered from the cache"
    assert lines(cli) == found
    assert nodes.trials() == []


def test_the_head_is_killed_and_what_was_measured_is_kept(cli: CommandLine, nodes: RayNodes) -> None:
    cli.environment["RAY_gcs_rpc_server_reconnect_timeout_s"] = "5"
    with RayCluster() as cluster:
        process = start(cli, cluster)
        wait_for_lines(cli, process, 4)
        cluster.kill(cluster.head)
        document, err = ended(process, 130)
        assert document["best"] is not None, "the best so far"
        assert "lost" in document["error"]["message"], err
        known = lines(cli)
        assert len(known) >= 4
        document, err = ended(start(cli, cluster), 2)
        assert "ray start" in document["error"]["next_step"], err
    ended(start(cli, nodes), 0)
    found = lines(cli)
    assert found[: len(known)] == known
    assert len({line["number"] for line in found}) == len(found)
    assert len(found) > len(known)


def test_the_coordinator_is_killed_and_the_same_command_goes_on(cli: CommandLine, nodes: RayNodes) -> None:
    process = start(cli, nodes)
    wait_for_lines(cli, process, 4)
    process.kill()
    ended(process, -9)
    until = time.monotonic() + 30
    while nodes.trials():
        assert time.monotonic() < until, "they outlive the search"
        time.sleep(0.1)
    known = lines(cli)
    ended(start(cli, nodes), 0)
    found = lines(cli)
    assert found[: len(known)] == known
    assert len({line["number"] for line in found}) == len(found)

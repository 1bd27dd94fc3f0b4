"""A real Ray cluster whose nodes are processes of this host, in a process of its own that starts and kills them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_SERVER = """
import json, os, sys
from ray.cluster_utils import Cluster

temporary, nodes = sys.argv[1], {}
cluster = Cluster()
for line in sys.stdin:
    what = json.loads(line)
    if "end" in what:
        cluster.remove_node(nodes.pop(what["end"]), allow_graceful=what["in_peace"])
        said = None
    else:
        environment, affinity = dict(os.environ), os.sched_getaffinity(0)
        os.environ.update(what["environment"])
        os.sched_setaffinity(0, what["cpus"] or affinity)
        # As each on its host: nodes that share one remove what another needs.
        options = {"temp_dir": f"{temporary}/{what['number']}", **({} if nodes else {"include_dashboard": False})}
        node = cluster.add_node(num_cpus=what["num_cpus"], num_gpus=0, include_log_monitor=False, **options)
        os.sched_setaffinity(0, affinity)
        os.environ.clear()
        os.environ.update(environment)
        nodes[node.node_id] = node
        said = {"node": node.node_id, "address": cluster.address}
    print(json.dumps(said), flush=True)
cluster.shutdown()
"""


class RayCluster:
    """A cluster of one node, the head; as a context manager it ends all nodes."""

    def __init__(self, folder: str | None = None, **head: Any) -> None:
        # The paths of sockets allow for about a hundred characters.
        self._temporary = tempfile.mkdtemp(prefix="r", dir=folder or tempfile.gettempdir())
        Path(self._temporary, "ray").mkdir()
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _SERVER, self._temporary],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_TMPDIR": self._temporary,
                "TMPDIR": self._temporary,
            },
            start_new_session=True,
            text=True,
        )
        self.address = ""
        self._num_added = 0
        try:
            self.head = self.add(**head)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The number of the process whose children are the nodes."""
        return self._popen.pid

    def add(
        self, environment: Mapping[str, str] | None = None, num_cpus: int = 1, cpus: Sequence[int] | None = None
    ) -> str:
        """Starts a node with these variables, on these CPUs; returns its number."""
        self._num_added += 1
        asked = {"environment": environment or {}, "num_cpus": num_cpus, "cpus": cpus, "number": self._num_added}
        said = self._say(asked)
        self.address = said["address"]
        return str(said["node"])

    def kill(self, node: str) -> None:
        """As a host that is switched off."""
        self._say({"end": node, "in_peace": False})

    def remove(self, node: str) -> None:
        """As a host whose administrator takes it out of the cluster."""
        self._say({"end": node, "in_peace": True})

    def trials(self) -> list[psutil.Process]:
        """The processes of searches that run on the nodes."""
        found = []
        for process in psutil.Process(self._popen.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "AUTOTUNE_AMP_TRIAL" in process.environ():
                    found.append(process)
        return found

    def close(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
            self._popen.stdout.close()
            shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _say(self, what: dict[str, Any]) -> Any:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(what) + "\n")
        self._popen.stdin.flush()
        line = self._popen.stdout.readline()
        assert line, "the process that has the nodes died"
        return json.loads(line)


class RayNodes:
    """The nodes of one test on a cluster that other tests use too; as a context manager it removes them."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self.address = cluster.address
        self._nodes: list[str] = []

    def add(self, *arguments: Any, **options: Any) -> str:
        """Starts a node, as `RayCluster.add` does."""
        self._nodes.append(self._cluster.add(*arguments, **options))
        return self._nodes[-1]

    def kill(self, node: str) -> None:
        """As a host that is switched off."""
        self._nodes.remove(node)
        self._cluster.kill(node)

    def trials(self) -> list[psutil.Process]:
        """The processes of searches that run on the cluster."""
        return self._cluster.trials()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            self._cluster.remove(node)


def with_module(folder: Path, name: str, text: str) -> dict[str, str]:
    """The variables of a node on which a module of this name is found first."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(text)
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}

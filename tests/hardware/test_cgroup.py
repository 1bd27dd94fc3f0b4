from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from autotune_amp.hardware import host
from autotune_amp.hardware.host import ContainerMemory, container_cpus, container_memory

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(folder: str, limit: int | str, usage: int, inactive_file: int = 0, active_file: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive_file}\nactive_file {active_file}\n",
    }


def v1(folder: str, limit: int, usage: int, inactive_file: int = 0, active_file: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{usage}\n",
        f"{base}/memory.stat": (
            f"cache 5\ninactive_file 0\ntotal_inactive_file {inactive_file}\ntotal_active_file {active_file}\n"
        ),
    }


def own(group: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::/{group}\n"}


def own_v1(group: str) -> dict[str, str]:
    """As Slurm and older Docker have it: a hierarchy for each controller, and one of version 2 without any."""
    lines = f"5:cpu,cpuacct:/{group}\n4:memory:/{group}\n1:name=systemd:/a:b\n0::/system.slice/slurmd.service\n"
    return {"proc/self/cgroup": lines}


UNLIMITED = 2**63 - 4096  # as version 1 says


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "total_memory_bytes", lambda: 64 * GIB)


@pytest.mark.parametrize(
    ("files", "limit_and_available"),
    [
        ({}, None),
        (own("job/step") | v2("job/step", 4 * GIB, GIB), (4, 3)),
        (own("slice/job") | v2("slice", 8 * GIB, 6 * GIB) | v2("slice/job", "max", GIB), (8, 2)),
        (own("slice/job") | v2("slice", 8 * GIB, 7 * GIB) | v2("slice/job", 4 * GIB, GIB), (4, 1)),
        (own("") | v2("", 2 * GIB, GIB), (2, 1)),  # inside a container the limit stands at the top
        (own("job") | v2("job", 4 * GIB, 4 * GIB, inactive_file=3 * GIB), (4, 3)),  # page cache can be dropped
        (own("job") | v2("job", 4 * GIB, 4 * GIB, GIB, active_file=2 * GIB), (4, 3)),  # also what was read twice
        (own_v1("job") | v1("job", 4 * GIB, 4 * GIB, GIB, active_file=2 * GIB), (4, 3)),
        (own_v1("uid/job") | v1("uid/job", 4 * GIB, GIB) | v1("", UNLIMITED, 9 * GIB), (4, 3)),
        (own_v1("uid/job") | v1("uid", 8 * GIB, 7 * GIB, 2 * GIB) | v1("uid/job", UNLIMITED, GIB), (8, 3)),
        (own_v1("docker/1") | v1("", 4 * GIB, GIB), (4, 3)),
        (own_v1("job") | v1("job", 64 * GIB, GIB), None),
    ],
)
def test_what_the_groups_of_a_process_leave_it(
    tmp_path: Path, files: dict[str, str], limit_and_available: tuple[int, int] | None
) -> None:
    found = container_memory(write(tmp_path, files))
    expected = None if limit_and_available is None else ContainerMemory(*(GIB * size for size in limit_and_available))
    assert found == expected


def test_the_least_share_of_cpu_time_above_this_process_binds(tmp_path: Path) -> None:
    assert container_cpus(tmp_path) is None
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/slice/job/cpu.max": "800000 100000\n",
        },
    )
    assert container_cpus(tmp_path) == 2.5


@pytest.mark.parametrize("name", ["cpu", "cpu,cpuacct"])
def test_the_least_share_of_cpu_time_binds_in_version_1_too(tmp_path: Path, name: str) -> None:
    folder = f"sys/fs/cgroup/{name}"
    job = {f"{folder}/uid/job/cpu.cfs_quota_us": "-1\n", f"{folder}/uid/job/cpu.cfs_period_us": "100000\n"}
    assert container_cpus(write(tmp_path, own_v1("uid/job") | job)) is None
    write(tmp_path, {f"{folder}/uid/cpu.cfs_quota_us": "250000\n", f"{folder}/uid/cpu.cfs_period_us": "100000\n"})
    assert container_cpus(tmp_path) == 2.5

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

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


def v2(folder: str, limit: int | str, usage: int, inactive_file: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.current": f"{usage}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {inactive_file}\n",
    }


def own(group: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::/{group}\n"}


@pytest.mark.parametrize(
    ("files", "limit_and_available"),
    [
        ({}, None),
        (own("job/step") | v2("job/step", 4 * GIB, GIB), (4, 3)),
        (own("slice/job") | v2("slice", 8 * GIB, 6 * GIB) | v2("slice/job", "max", GIB), (8, 2)),
        (own("slice/job") | v2("slice", 8 * GIB, 7 * GIB) | v2("slice/job", 4 * GIB, GIB), (4, 1)),
        (own("") | v2("", 2 * GIB, GIB), (2, 1)),  # inside a container the limit stands at the top
        (own("job") | v2("job", 4 * GIB, 4 * GIB, inactive_file=3 * GIB), (4, 3)),  # page cache can be dropped
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

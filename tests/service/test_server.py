"""The server's share of the process' file descriptors, and its priority."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from autotune_amp.service import server

UNLIMITED = resource.RLIM_INFINITY
AUTOGROUP = Path("/proc/self/autogroup")
LOWER = """
import os
from autotune_amp.service.server import lower_priority
lower_priority()
print(os.getpriority(os.PRIO_PROCESS, 0), open("/proc/self/autogroup").read())
"""


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"),
    [
        (1024, 1 << 20, 8192, 4096),
        (1024, 3000, 3000, 1500),
        (1024, 1024, None, 512),
        (1024, UNLIMITED, 8192, 4096),
        (1 << 16, 1 << 20, None, 4096),
        (UNLIMITED, UNLIMITED, None, 4096),
    ],
)
def test_connections_leave_half_of_the_descriptors_free(
    soft: int, hard: int, raised: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    assert server._max_connections() == most
    assert limits == ([] if raised is None else [(raised, hard)])


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="the kernel does not share its processors among sessions")
@pytest.mark.parametrize("leads_session", [True, False])
def test_its_priority_is_the_lowest_and_so_is_that_of_a_session_of_its_own(*, leads_session: bool) -> None:
    before = AUTOGROUP.read_text().split()[-1]
    found = subprocess.run(
        [sys.executable, "-c", LOWER], start_new_session=leads_session, capture_output=True, text=True, check=True
    )
    own, *_, of_session = found.stdout.split()
    assert own == "19"
    assert of_session == ("19" if leads_session else before), "other programs of a terminal keep theirs"
    assert AUTOGROUP.read_text().split()[-1] == before

"""The server's share of the process' file descriptors."""

from __future__ import annotations

import resource

import pytest

from autotune_amp.service import server

UNLIMITED = resource.RLIM_INFINITY


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

"""What a speed-up is called, at and around every threshold."""

from __future__ import annotations

import pytest

from autotune_amp.profile.verdict import verdict, verdicts


@pytest.mark.parametrize(
    ("speedup", "expected"),
    [
        (2.0, "excellent"),
        (1.501, "excellent"),
        (1.5, "significant"),
        (1.2, "significant"),
        (1.199, "modest"),
        (1.05, "modest"),
        (1.049, "negligible"),
        (0.95, "negligible"),
        (0.949, "slower"),
        (0.02, "slower"),
    ],
)
def test_thresholds(speedup: float, expected: str) -> None:
    assert verdict(speedup) == expected


def test_an_interval_has_the_verdicts_of_its_ends() -> None:
    assert verdicts((1.15, 1.31)) == ("modest", "significant")
    assert verdicts((1.6, 1.7)) == ("excellent", "excellent")

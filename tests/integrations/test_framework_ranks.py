"""Two ranks in each framework: an overflow on one of them moves both."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import NUM_RANKS, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("framework", ["accelerate", "trainer", "lightning"])
def test_an_overflow_on_one_rank_demotes_both(found: list[dict[str, Any]], framework: str) -> None:
    first, second = (rank[framework] for rank in found)
    assert first == second
    assert first["num_processes"] == NUM_RANKS
    assert first["moves"] == [[4, "demotion", "fp16", "bf16"]]
    assert "float16" in first["dtypes"][0]
    assert "bfloat16" in first["dtypes"][1]

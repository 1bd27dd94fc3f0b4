from __future__ import annotations

from pathlib import Path

import pytest
from ranks import NUM_RANKS, run


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["accelerate", "trainer", "lightning"])
def test_an_overflow_on_one_rank_demotes_both(framework: str, tmp_path: Path) -> None:
    first, second = run(Path(__file__).with_name(f"{framework}_rank.py"), tmp_path)
    assert first == second
    assert first["num_processes"] == NUM_RANKS
    assert first["moves"] == [[4, "demotion", "fp16", "bf16"]]
    assert "float16" in first["dtypes"][0]
    assert "bfloat16" in first["dtypes"][1]

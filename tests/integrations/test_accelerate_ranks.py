from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

NUM_RANKS = 2


@pytest.mark.slow
def test_an_overflow_on_one_rank_demotes_both(tmp_path: Path) -> None:
    script = Path(__file__).with_name("accelerate_rank.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path), str(rank)], env=environment)
        for rank in range(NUM_RANKS)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0] * NUM_RANKS
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(NUM_RANKS))
    assert first == second
    assert first["num_processes"] == NUM_RANKS
    assert first["moves"] == [[4, "demotion", "fp16", "bf16"]]
    assert first["dtypes"] == ["torch.float16", "torch.bfloat16"]

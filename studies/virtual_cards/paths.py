"""Puts the study of landscapes, which holds the replay, and the table of named cards on the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
VIRTUAL_GPU = HERE.parents[1] / "tests" / "virtual_gpu"
sys.path[1:1] = [str(HERE.parent / "landscapes"), str(VIRTUAL_GPU / "site")]

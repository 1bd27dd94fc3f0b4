"""Puts the study of landscapes, which holds the replay, and the virtual machine on the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TESTS = HERE.parents[1] / "tests"
sys.path[1:1] = [str(HERE.parent / "landscapes"), str(TESTS)]

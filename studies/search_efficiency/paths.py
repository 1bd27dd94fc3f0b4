"""Puts the study of landscapes, which holds the replay, on the import path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LANDSCAPES = HERE.parent / "landscapes"
sys.path.insert(0, str(LANDSCAPES))

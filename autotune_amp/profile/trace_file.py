"""The traces that children wrote, put where the user wants them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_trace(parts: Sequence[Path], trace: Path) -> str | None:
    """Put `parts` into one trace, whose processes tell them apart; returns why there is none, None where there is."""
    if not parts:
        return "No trace was written: no precision was taken apart."
    try:
        if len(parts) == 1:
            shutil.copyfile(parts[0], trace)
        else:
            trace.write_text(json.dumps(_joined(parts)))
    except (OSError, json.JSONDecodeError) as error:
        return f"No whole trace was written to {trace}: {error}."
    return None


def _joined(parts: Sequence[Path]) -> dict[str, Any]:
    traces = [json.loads(part.read_text()) for part in parts]
    events = [event for trace in traces for event in trace["traceEvents"]]
    return {**traces[0], "traceEvents": events}

"""Output of an error: a JSON document for programs, and text for people."""

from __future__ import annotations

import json
from typing import Any

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.recommendation import NothingWorksError, SearchInterruptedError


def error_document(error: AutotuneAmpError) -> str:
    """Return `error` as a JSON document, which is printed in place of the result."""
    excluded = error.excluded if isinstance(error, (NothingWorksError, SearchInterruptedError)) else ()
    best = error.best if isinstance(error, SearchInterruptedError) else None
    document: dict[str, Any] = {
        "format": 1,
        "error": {"kind": error.kind, "message": error.message, "next_step": error.next_step},
        "excluded": [{"precision": e.precision, "batch_size": e.batch_size, "reason": e.reason} for e in excluded],
        "best": None if best is None else json.loads(best.to_json()),
    }
    return json.dumps(document, indent=2) + "\n"


def error_text(error: AutotuneAmpError) -> str:
    """Return `error` as text for people: its message, the reason for each excluded candidate, and the next step."""
    lines = [f"Error: {error.message}"]
    if isinstance(error, NothingWorksError):
        for exclusion in error.excluded:
            batch = "" if exclusion.batch_size is None else f" batch {exclusion.batch_size}"
            lines.append(f"  {exclusion.precision}{batch}: {exclusion.reason}")
    return "\n".join([*lines, f"Next step: {error.next_step}", ""])

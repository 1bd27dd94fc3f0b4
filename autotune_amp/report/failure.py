"""What an error is to the outside: an exit code, a JSON document, or a few lines to read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autotune_amp.core.errors import AutotuneAmpError

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Exclusion, Recommendation


def error_document(error: AutotuneAmpError) -> str:
    """`error` as the JSON document that takes the result's place on standard output."""
    # The command line imports this file before it knows whether it needs a recommendation.
    from autotune_amp.core.recommendation import NothingWorksError, SearchInterruptedError

    excluded: tuple[Exclusion, ...] = ()
    best: Recommendation | None = None
    if isinstance(error, (NothingWorksError, SearchInterruptedError)):
        excluded = error.excluded
    if isinstance(error, SearchInterruptedError):
        best = error.best
    document: dict[str, Any] = {
        "format": 1,
        "error": {"kind": error.kind, "message": error.message, "next_step": error.next_step},
        "excluded": [{"precision": e.precision, "batch_size": e.batch_size, "reason": e.reason} for e in excluded],
        "best": None if best is None else json.loads(best.to_json()),
    }
    return json.dumps(document, indent=2) + "\n"


def error_text(error: AutotuneAmpError) -> str:
    """`error` as people read it: what happened, the reason of each candidate, what to do."""
    from autotune_amp.core.recommendation import NothingWorksError

    lines = [f"Error: {error.message}"]
    if isinstance(error, NothingWorksError):
        for exclusion in error.excluded:
            batch = "" if exclusion.batch_size is None else f" batch {exclusion.batch_size}"
            lines.append(f"  {exclusion.precision}{batch}: {exclusion.reason}")
    return "\n".join([*lines, f"Next step: {error.next_step}", ""])

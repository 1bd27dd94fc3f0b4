"""The command that says a recommendation in a framework's own words, and which frameworks take it. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.export import TARGETS, Target, export, setting_of

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation


def export_command(recommendation: Recommendation, path: str | None = None) -> tuple[str, str]:
    """What the command is for, and the command; `path` as in `summary.python_lines`."""
    targets = [target for target in TARGETS if _takes(target, recommendation)]
    file = Path(path or f"studies/{recommendation.search.study}")
    study = file.parent if file.name == "recommendation.json" else file
    command = f"autotune-amp export {shlex.quote(study.as_posix())} --to {'torch' if 'torch' in targets else 'env'}"
    return f"In the words of a framework, --to {', '.join(targets)}", command


def _takes(target: Target, recommendation: Recommendation) -> bool:
    try:
        export(setting_of(recommendation, ""), target)
    except InvalidRequestError:
        return False
    return True

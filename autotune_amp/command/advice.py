"""Advice for a command that failed by itself, derived from its error and its output. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure
from autotune_amp.trial.judge import printed_error

_STEPS = {
    r"address already in use|EADDRINUSE": (
        "Its port is taken. Give each run a port of its own, as in `--master_port {port}`, or torchrun --standalone."
    ),
    r"EOFError: EOF when reading a line": (
        "It asks for something on standard input, which is empty in a trial. Give it as an argument."
    ),
}


def advised(failure: Failure) -> Failure:
    """Return the failure with the error that the command ended with in its message and, if the cause is known, the next
    step before the printed output.
    """
    details = failure.details or ""
    if failure.kind == "crash":
        named = printed_error(details)
        failure = replace(failure, message=f"{failure.message}: {named[:300]}" if named else failure.message)
    for pattern, step in _STEPS.items():
        if re.search(pattern, f"{failure.message}\n{details}", re.IGNORECASE):
            return replace(failure, details=f"{step}\n{details}".rstrip())
    return failure

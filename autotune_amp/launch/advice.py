"""What to do about a command that failed by itself, where what it said tells. Pure."""

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
    """The failure, naming the error that a command ended with, and the next step before what it printed."""
    details = failure.details or ""
    if failure.kind == "crash":
        named = printed_error(details)
        failure = replace(failure, message=f"{failure.message}: {named[:300]}" if named else failure.message)
    for pattern, step in _STEPS.items():
        if re.search(pattern, f"{failure.message}\n{details}", re.IGNORECASE):
            return replace(failure, details=f"{step}\n{details}".rstrip())
    return failure

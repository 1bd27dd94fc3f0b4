"""Advice on the failure of a command, from its error and its output. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure
from autotune_amp.trial.judge import printed_error

_ADVICE_BY_PATTERN = {
    r"address already in use|EADDRINUSE": (
        "Its port is taken. Give each run a port of its own, as in `--master_port {port}`, or torchrun --standalone."
    ),
    r"EOFError: EOF when reading a line": (
        "It reads from standard input, which is empty in a trial. Give the value as an argument."
    ),
}


def with_advice(failure: Failure) -> Failure:
    """Return the failure with the error from the command's output added to its message and, if the cause is known, the
    next step added before the output in its details.
    """
    details = failure.details or ""
    if failure.kind == "crash":
        error_text = printed_error(details)
        failure = replace(failure, message=f"{failure.message}: {error_text[:300]}" if error_text else failure.message)
    for pattern, step in _ADVICE_BY_PATTERN.items():
        if re.search(pattern, f"{failure.message}\n{details}", re.IGNORECASE):
            return replace(failure, details=f"{step}\n{details}".rstrip())
    return failure

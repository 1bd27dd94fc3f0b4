"""What to do about a command that failed by itself, where what it said tells. Pure."""

from __future__ import annotations

import re

from msgspec.structs import replace

from autotune_amp.core.outcome import Failure

_STEPS = {
    r"address already in use|EADDRINUSE": (
        "Its port is taken. Give each run a port of its own, as in `--master_port {port}`, or torchrun --standalone."
    ),
    r"EOFError: EOF when reading a line": (
        "It asks for something on standard input, which is empty in a trial. Give it as an argument."
    ),
}
# The last line of a traceback but a launcher's, which says only that a rank failed; what argparse says.
_ERROR = re.compile(r"^(?:(?!.*ChildFailed)[\w.]*(?:Error|Exception|Interrupt)\b|\S+: error:).*$", re.MULTILINE)


def advised(failure: Failure) -> Failure:
    """The failure, naming the error that a command ended with, and the next step before what it printed."""
    details = failure.details or ""
    if failure.kind == "crash":
        printed = _ERROR.findall(details)
        named = f": {printed[-1].strip()[:300]}" if printed else ""
        failure = replace(failure, message=failure.message + named)
    for pattern, step in _STEPS.items():
        if re.search(pattern, f"{failure.message}\n{details}", re.IGNORECASE):
            return replace(failure, details=f"{step}\n{details}".rstrip())
    return failure

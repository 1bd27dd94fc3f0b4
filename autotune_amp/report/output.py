"""Standard output: documents and tables as bytes, and a reader who leaves before the end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def json_document(document: object) -> bytes:
    """A struct or builtin data as one JSON document."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def rendered(show: Callable[[Console], None]) -> bytes:
    """What `show` prints to a console as wide and as colourful as standard output, as bytes for it."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    with console.capture() as capture:
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def emit(result: bytes) -> None:
    """Write to standard output."""
    with reader_may_leave(sys.stdout):
        sys.stdout.buffer.write(result)


@contextmanager
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """Do what writes to the stream; somebody who stops reading is no error."""
    try:
        yield
    except BrokenPipeError:
        # ``| head -1``: no error of ours, and the interpreter must not flush in vain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""Standard output: documents and tables as bytes, and a reader who leaves before the end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def json_document(document: object) -> bytes:
    """A struct or builtin data as one JSON document."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def rendered(show: Callable[[Console], None]) -> bytes:
    """What `show` prints to a console as wide and as colourful as standard output, as bytes for it."""
    from rich.console import Console

    class PrintableConsole(Console):
        """Escapes control characters of foreign text, in whatever table or panel it stands."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = PrintableConsole(file=sys.stdout)
    with reader_may_leave(sys.stdout), console.capture() as capture:  # which writes nothing to it in the end
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def emit(result: bytes) -> None:
    """Write to standard output; raises `InvalidRequestError` where that cannot be written."""
    with reader_may_leave(sys.stdout):
        sys.stdout.buffer.write(result)
        sys.stdout.flush()


def tell(text: str) -> None:
    """Write foreign text to standard error; where that cannot be written, nobody is told."""
    with suppress(OSError):
        sys.stderr.write(printable(text))
        sys.stderr.flush()


@contextmanager
def reader_may_leave(stream: TextIO) -> Iterator[None]:
    """Do what writes to the stream; somebody who stops reading is no error.

    Raises `InvalidRequestError` where the stream cannot be written for another reason, such as a full disk.
    """
    try:
        yield
    except OSError as error:
        # What is left in the buffer must not be flushed in vain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):  # ``| head -1``
            return
        raise InvalidRequestError(
            f"The output cannot be written to {stream.name}: {error.strerror}.",
            "Free some space, or send the output elsewhere.",
        ) from error

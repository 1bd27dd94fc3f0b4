"""Standard output and error: documents and tables as bytes, written to a pipe that may close before the end."""

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
    """Encode a msgspec struct or builtin data as one indented JSON document."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def render_to_bytes(show: Callable[[Console], None]) -> bytes:
    """Call `show` with a console as wide and colourful as standard output; return the printed text as bytes."""
    from rich.console import Console

    class PrintableConsole(Console):
        """Console that escapes control characters, also in tables and panels."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = PrintableConsole(file=sys.stdout)
    with ignore_closed_reader(sys.stdout), console.capture() as capture:  # at its end, capture writes an empty text
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def write_output(result: bytes) -> None:
    """Write bytes to standard output. Raises `InvalidRequestError` if that fails, except for a closed pipe."""
    with ignore_closed_reader(sys.stdout):
        sys.stdout.buffer.write(result)
        sys.stdout.flush()


def write_message(text: str) -> None:
    """Write text to standard error with control characters escaped; ignore errors."""
    with suppress(OSError):
        sys.stderr.write(printable(text))
        sys.stderr.flush()


@contextmanager
def ignore_closed_reader(stream: TextIO) -> Iterator[None]:
    """Suppress the error of writing to a pipe that its reader has closed, as in ``| head -1``.

    Raises `InvalidRequestError` if the stream cannot be written for another reason, such as a full disk.
    """
    try:
        yield
    except OSError as error:
        # Flushing the rest of the buffer at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):
            return
        raise InvalidRequestError(
            f"The output cannot be written to {stream.name}: {error.strerror}.",
            "Free some space, or send the output elsewhere.",
        ) from error

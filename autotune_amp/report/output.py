"""Standard output: documents and tables as bytes, for a reader that may stop reading before the end."""

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
    """Return a struct or builtin data as one JSON document."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def render_to_bytes(show: Callable[[Console], None]) -> bytes:
    """Return the output of `show` as bytes for standard output; the console passed to it has that width and colours."""
    from rich.console import Console

    class PrintableConsole(Console):
        """Console that escapes control characters of foreign text, also in tables and panels."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    console = PrintableConsole(file=sys.stdout)
    with ignore_closed_reader(sys.stdout), console.capture() as capture:  # at its end, this writes an empty text
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def write_output(result: bytes) -> None:
    """Write bytes to standard output. Raises `InvalidRequestError` if that cannot be written."""
    with ignore_closed_reader(sys.stdout):
        sys.stdout.buffer.write(result)
        sys.stdout.flush()


def write_message(text: str) -> None:
    """Write foreign text to standard error, and ignore that it cannot be written."""
    with suppress(OSError):
        sys.stderr.write(printable(text))
        sys.stderr.flush()


@contextmanager
def ignore_closed_reader(stream: TextIO) -> Iterator[None]:
    """Suppress the error of a context that writes to a stream whose reader has stopped reading.

    Raises `InvalidRequestError` if the stream cannot be written for another reason, such as a full disk.
    """
    try:
        yield
    except OSError as error:
        # The rest of the buffer must not be flushed at exit, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, BrokenPipeError):  # ``| head -1``
            return
        raise InvalidRequestError(
            f"The output cannot be written to {stream.name}: {error.strerror}.",
            "Free some space, or send the output elsewhere.",
        ) from error

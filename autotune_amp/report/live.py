"""The live display: the user's output and finished trials scroll by above it."""

from __future__ import annotations

import sys
import textwrap
import time
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.text import clock, duration, size
from autotune_amp.report.progress import Screen, View, measured

_DRAW_SECONDS = 0.1
_MAX_HELD = 65536


class LiveScreen(Screen):
    """A `Screen` with a few lines at the bottom that are redrawn in place, at most ten times a second.

    The user's text is gathered between two drawings, so that many small prints cost no more than one large one. An
    unfinished line is held back, for the display begins on a line of its own; one without end is broken.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._held: list[str] = []
        self._num_held = 0
        self._drawn_at = -_DRAW_SECONDS
        self._console = Console(file=cast("TextIO", _Terminal(self, stream)), force_terminal=True, highlight=False)
        # No refresh thread: `tick` comes often enough, and rich does not wait for its thread when it stops.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=stream is sys.stderr,
        )
        self._live.start()

    def line(self, text: str, style: str = "", is_cut: bool = False) -> None:
        """One line of ours above the display, cut or wrapped to the terminal's width."""
        self._release(everything=True)
        if not is_cut:
            text = textwrap.fill(text, self._console.width, subsequent_indent="    ", break_on_hyphens=False)
        self._console.print(Text(text, style), no_wrap=True, overflow="ellipsis")

    def output(self, text: str) -> None:
        """The user's own text above the display, unchanged."""
        self._held.append(text)
        self._num_held += len(text)
        if self._num_held >= _MAX_HELD:
            self._release()
        if self._num_held >= _MAX_HELD:
            self._release(everything=True)

    def draw(self, view: View) -> None:
        """Draw the display, unless it was drawn a moment ago."""
        now = time.monotonic()
        if now - self._drawn_at >= _DRAW_SECONDS:
            self._drawn_at = now
            self._release()
            self._live.update(_display(view), refresh=True)

    def close(self) -> None:
        """Take the display down and show the cursor again."""
        self._release(everything=True)
        self._live.stop()

    def _release(self, everything: bool = False) -> None:
        if not self._held:
            return
        text = "".join(self._held)
        if everything and not text.endswith("\n"):
            text += "\n"
        whole, newline, rest = text.rpartition("\n")
        self._held, self._num_held = [rest] if rest else [], len(rest)
        if newline:
            # A bare segment: nothing wraps, measures or interprets it.
            self._console.print(Segments([Segment(whole + newline)]), crop=False)


class _Terminal:
    """What rich writes to: the screen's own `write`, which takes any character and outlives the reader."""

    def __init__(self, screen: Screen, stream: TextIO) -> None:
        self.write = screen.write
        self.flush = stream.flush
        self.isatty = stream.isatty
        self.encoding = stream.encoding


def _display(view: View) -> RenderableType:
    top = Table.grid(padding=(0, 2, 0, 0), expand=True)
    top.add_column(no_wrap=True)
    top.add_column(ratio=1)
    top.add_column(no_wrap=True)
    bar = ProgressBar(
        total=view.budget_seconds, completed=view.elapsed_seconds, complete_style="cyan", pulse_style="cyan"
    )
    top.add_row(Text(view.phase, "bold"), bar, Text(_time(view)))
    lines = []
    if view.is_search or view.candidate is not None:
        lines.append(_line("now ", _now(view)))
    if view.is_search:
        lines.append(_line("best", _best(view), "green"))
    if view.highest_memory_bytes and view.available_memory_bytes is not None:
        lines.append(_line("mem ", _memory(view.highest_memory_bytes, view.available_memory_bytes)))
    return Group(Text(""), top, *lines)


def _line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (text, style), no_wrap=True, overflow="ellipsis")


def _time(view: View) -> str:
    if view.budget_seconds is None:
        return clock(view.elapsed_seconds)
    left = view.budget_seconds - view.elapsed_seconds
    return f"{clock(left)} left of {clock(view.budget_seconds)}" if left > 0 else "time is up, finishing"


def _now(view: View) -> str:
    if view.candidate is None:
        return "-"
    steps = f"step {view.num_steps}, {duration(view.step_seconds)} each" if view.num_steps else "setting up"
    return f"{view.candidate!s:<18}  trial {view.number}: {steps}"


def _best(view: View) -> str:
    best = view.best
    if best is None or not isinstance(best.outcome, Measurement):
        return "-"
    return f"{best.candidate!s:<18}  {measured(best.outcome)}"


def _memory(highest_bytes: int, available_bytes: int) -> str:
    return f"{size(highest_bytes)} at the highest peak, {size(available_bytes)} available"

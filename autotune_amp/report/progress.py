"""Display of a running search: redrawn in place on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, cast

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Failure, Measurement, Purpose, Record
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import clock, duration, one_line, printable, rate, size, token_rate
from autotune_amp.report.rows import outcome_line
from autotune_amp.search.progress import Progress

if TYPE_CHECKING:
    from IPython.display import DisplayHandle
    from rich.console import RenderableType


# Rich is imported in functions: a search that returns a saved recommendation draws nothing and need not wait for it.
_DRAW_SECONDS = 0.1  # between two drawings of the display
_LINE_SECONDS = 10.0  # between two lines about the activity of a job, on a screen that cannot redraw
_MAX_PENDING_CHARACTERS = 65536  # of output, which is printed before the next drawing if it is longer


class TextScreen:
    """Screen of plain lines, for files, pipes and dumb terminals. Errors of writing are ignored."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_mid_line = False
        self._last_line_at = time.monotonic()

    def line(self, text: str, style: str = "", is_cut: bool = False) -> None:  # noqa: ARG002 - used by LiveScreen
        """Print a line of the search; first end an unfinished line of the user's. `is_cut`: it may be shortened."""
        self.end_line()
        self.write(printable(text) + "\n")

    def output(self, text: str) -> None:
        """Print text from the user's own code."""
        self.write(text)
        self._is_mid_line = not text.endswith("\n")

    def draw(self, display: Callable[[], RenderableType]) -> None:
        """Redraw the display; do nothing on a screen of plain lines."""

    def activity(self, text: str) -> None:
        """Print a line about the activity of a job, once every ten seconds at most."""
        if time.monotonic() - self._last_line_at >= _LINE_SECONDS:
            self._last_line_at = time.monotonic()
            self.line(f"  {text}")

    def close(self) -> None:
        """End an unfinished line, and restore the stream."""
        self.end_line()

    def end_line(self) -> None:
        """End the user's last line, if it is unfinished."""
        if self._is_mid_line:
            self.write("\n")
            self._is_mid_line = False

    def write(self, text: str) -> None:
        """Write to the stream with characters that its encoding lacks escaped; ignore errors."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(OSError):
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()


class LiveScreen(TextScreen):
    """Screen of a terminal: a few lines at the bottom are redrawn in place, at most ten times a second.

    The user's text is collected and printed before the next drawing, which makes many small prints cheap. An unfinished
    line waits for its end, since the display needs a line of its own; one of more than 65,536 characters is broken.
    """

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream)
        self._pending_text = ""
        self._drawn_at = -_DRAW_SECONDS
        # Rich writes through this screen, whose `write` escapes characters and ignores errors.
        self.flush, self.isatty, self.encoding = stream.flush, stream.isatty, stream.encoding
        self._console = Console(file=cast("TextIO", self), force_terminal=True, highlight=False)
        # No refresh thread: `tick` is called often enough, and rich would stop without waiting for the thread.
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=stream is sys.stderr,
        )
        self._live.start()

    def line(self, text: str, style: str = "", is_cut: bool = False) -> None:
        """Print a line of the search above the display, cut or wrapped to the terminal's width."""
        from rich.text import Text

        self._print_pending(everything=True)
        text = printable(text)
        if not is_cut:
            text = textwrap.fill(text, self._console.width, subsequent_indent="    ", break_on_hyphens=False)
        self._console.print(Text(text, style), no_wrap=True, overflow="ellipsis")

    def output(self, text: str) -> None:
        """Print text from the user's own code above the display."""
        self._pending_text += text
        if len(self._pending_text) >= _MAX_PENDING_CHARACTERS:
            self._print_pending(everything="\n" not in self._pending_text)

    def draw(self, display: Callable[[], RenderableType]) -> None:
        """Redraw the display, unless it was drawn less than a tenth of a second ago."""
        now = time.monotonic()
        if now - self._drawn_at >= _DRAW_SECONDS:
            self._drawn_at = now
            self._print_pending()
            self._live.update(display(), refresh=True)

    def close(self) -> None:
        """Remove the display and show the cursor again."""
        self._print_pending(everything=True)
        self._live.stop()

    def activity(self, text: str) -> None:
        """Print nothing: the display shows the activity."""

    def _print_pending(self, everything: bool = False) -> None:
        from rich.segment import Segment, Segments

        text = self._pending_text
        if everything and text and not text.endswith("\n"):
            text += "\n"
        whole, newline, self._pending_text = text.rpartition("\n")
        if newline:
            # A bare segment, so that rich does not wrap, measure or interpret the text.
            self._console.print(Segments([Segment(whole + newline)]), crop=False)


class NotebookScreen(TextScreen):
    """Screen of a notebook's cell: a display that is redrawn in place, and plain lines below it.

    It writes to standard output, since notebooks highlight standard error as a failure.
    """

    def __init__(self) -> None:
        super().__init__(sys.stdout)
        self._drawn_at = -_DRAW_SECONDS
        self._handle: DisplayHandle | None = None

    def draw(self, display: Callable[[], RenderableType]) -> None:
        """Redraw the display, unless it was drawn less than a tenth of a second ago."""
        from IPython.display import DisplayHandle
        from rich.padding import Padding  # unlike a group, a padding has a representation for notebooks

        now = time.monotonic()
        if now - self._drawn_at >= _DRAW_SECONDS:
            self._drawn_at = now
            padded_display = Padding(display(), 0)
            if self._handle is None:
                self._handle = DisplayHandle()
                self._handle.display(padded_display)
            else:
                self._handle.update(padded_display)

    def activity(self, text: str) -> None:
        """Print nothing: the display shows the activity."""

    def close(self) -> None:
        """Empty the display; it cannot be removed from the cell."""
        from IPython.display import HTML

        super().close()
        if self._handle is not None:
            self._handle.update(HTML(""))


def _is_in_notebook() -> bool:
    from rich.console import Console

    return Console().is_jupyter


class TerminalProgress(Progress):
    """Display of a search: redrawn on a terminal or in a notebook, else a line on `stream` per phase and trial."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._screen = TextScreen(stream)
        self._phase = ""
        self._budget_seconds: float | None = None
        self._elapsed_seconds = 0.0
        self._best = "-"
        self._trial_labels: dict[str, str] = {}  # the running trial of each slot, without its progress
        self._trial_lines: dict[str, str] = {}  # the running trial of each slot, with its progress
        self._shown_details: set[str] = set()

    def started(self, study: str, folder: str, budget_seconds: float | None) -> None:  # noqa: ARG002
        """Print the study's folder and the budget, and begin the live display.

        Without a budget (None) the search lasts until it is decided and confirmed.
        """
        self.work_started(budget_seconds)
        how_long = "until it is decided and confirmed" if budget_seconds is None else duration(budget_seconds)
        stop = "The stop button" if isinstance(self._screen, NotebookScreen) else "Ctrl-C"
        self._screen.line(f"Study {folder}: {how_long}. {stop} keeps the best so far.")

    def work_started(self, budget_seconds: float | None) -> None:
        """Begin the live display if this is a terminal or notebook; `ended` removes it."""
        self._budget_seconds = budget_seconds
        if _is_in_notebook():
            self._screen.close()
            self._screen = NotebookScreen()
        elif self._stream.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._screen.close()
            self._screen = LiveScreen(self._stream)

    def phase(self, text: str) -> None:
        """Print a phase of the search as a heading."""
        self._phase = text
        self._screen.line(text[:1].upper() + text[1:], "bold")
        self._screen.draw(self._display)

    def found_hardware(self, hardware: Hardware) -> None:
        """Print the device that the search runs on, with its memory and usable precisions."""
        usable = [name for name, capability in hardware.precisions.items() if capability.level != "unsupported"]
        device = f"{hardware.device}: {one_line(hardware.identity.name)}"
        self._screen.line(f"  {device}, {size(hardware.memory.available)} available, {', '.join(usable)}")

    def trial_started(self, number: int, candidate: Setting, purpose: Purpose, slot: str | None = None) -> None:  # noqa: ARG002
        """Show the running trial."""
        self._trial_labels[slot or "now"] = f"{candidate!s:<18}  trial {number}: "
        self._show(slot, "setting up")

    def step(self, num_steps: int, step_seconds: float, slot: str | None = None) -> None:
        """Show the progress of the trial."""
        self._show(slot, f"step {num_steps}, {duration(step_seconds)} each")

    def activity(self, text: str, slot: str | None = None) -> None:
        """Show the activity of a job; on a screen that cannot redraw, as a line every ten seconds at most."""
        self._trial_labels.setdefault(slot or "now", "")
        self._show(slot, text)
        self._screen.activity(self._trial_lines[slot or "now"])

    def _show(self, slot: str | None, text: str) -> None:
        self._trial_lines[slot or "now"] = f"{self._trial_labels[slot or 'now']}{text}"
        self._screen.draw(self._display)

    def trial_ended(self, record: Record, best: Record | None) -> None:
        """Print one line for the trial, and the traceback of an error in the user's code, once for each traceback."""
        self._trial_lines.pop(record.slot or "now", None)
        if best is not None and isinstance(best.outcome, Measurement):
            self._best = f"{best.candidate!s:<18}  {_measurement_columns(best.outcome)}"
        outcome = record.outcome
        failed = isinstance(outcome, Failure)
        style = "yellow" if failed else "green" if record == best else ""
        self._screen.line(trial_line(record), style, is_cut=failed)  # the summary at the end has the failures in full
        if isinstance(outcome, Failure) and outcome.kind in ("crash", "workload_error"):
            details = outcome.details or ""
            if details.strip() and details not in self._shown_details:
                self._shown_details.add(details)
                self._screen.output("".join(f"       {line}\n" for line in printable(details).splitlines()))
        self._screen.draw(self._display)

    def tick(self, elapsed_seconds: float) -> None:
        """Update the elapsed time and its bar."""
        self._elapsed_seconds = elapsed_seconds
        self._screen.draw(self._display)

    def output(self, text: str) -> None:
        """Print text from the user's own code above the display."""
        if text:
            self._screen.output(text)

    def trial_lost(self, number: int, slot: str | None) -> None:
        """Print that a trial was lost with its slot, and runs again."""
        self._trial_lines.pop(slot or "now", None)
        self.note(f"Trial {number} was lost with {slot}, and runs again elsewhere.")

    def note(self, text: str) -> None:
        """Print a note as one line."""
        self._screen.line(f"  {one_line(text)}")

    def ended(self) -> None:
        """Remove the live display; later output is plain lines again."""
        self._screen.close()
        self._screen = TextScreen(self._stream)

    def _display(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        elapsed, budget = self._elapsed_seconds, self._budget_seconds
        time = clock(elapsed)
        if budget is not None:
            time = f"{clock(budget - elapsed)} left of {clock(budget)}" if elapsed < budget else "time is up, finishing"
        top = Table.grid(padding=(0, 2, 0, 0), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True)
        bar = ProgressBar(total=budget, completed=elapsed, complete_style="cyan", pulse_style="cyan")
        top.add_row(Text(self._phase, "bold"), bar, Text(time))
        running = [(label, text, "") for label, text in (sorted(self._trial_lines.items()) or [("now", "-")])]
        width = max(5, *(len(label) + 1 for label, _, _ in running))
        below = [
            Text.assemble((f"{label:<{width}}", "dim"), (text, style), no_wrap=True, overflow="ellipsis")
            for label, text, style in (*running, ("best", self._best, "green"))
        ]
        return Group(Text(""), top, *below)


def trial_line(record: Record) -> str:
    """Return a finished trial in one line: number, candidate, outcome, seconds, purpose and slot."""
    outcome = record.outcome
    result = _measurement_columns(outcome) if isinstance(outcome, Measurement) else outcome_line(outcome)
    purpose = "" if record.purpose == "search" else record.purpose
    where = "" if record.slot is None else f"  on {record.slot}"
    line = f"{record.number:>3}  {record.candidate!s:<18}  {result}  {duration(record.seconds):>6}  {purpose}{where}"
    return line.rstrip()


def _measurement_columns(outcome: Measurement) -> str:
    """Return throughput, step time and memory, in columns."""
    tokens = "" if outcome.tokens_per_second is None else f"  {token_rate(outcome.tokens_per_second):>16}"
    columns = f"{rate(outcome.samples_per_second):>17}{tokens}  {duration(outcome.step_seconds):>8}"
    return f"{columns}  {size(outcome.peak_memory_bytes):>8}" + "  cut" * outcome.was_cut

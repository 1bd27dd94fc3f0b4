"""Interface for displaying a search. The base class ignores every call, for `--quiet` and for tests."""

from __future__ import annotations

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Purpose, Record
from autotune_amp.core.setting import Setting


class Progress:
    """Interface for displaying a search. Methods are called from the search's thread, in order.

    `tick` is called at least four times a second.
    """

    def started(self, study: str, folder: str, budget_seconds: float | None) -> None:
        """Handle the start of a search in `folder`. `budget_seconds` is None unless the user set a budget."""

    def work_started(self, budget_seconds: float | None) -> None:
        """Handle the start of a single check, or of a profile, whose `budget_seconds` is None."""

    def phase(self, text: str) -> None:
        """Handle a new phase: ``loading the workload``, ``searching``, ``checking bf16 against fp32`` ..."""

    def found_hardware(self, hardware: Hardware) -> None:
        """Handle the result of probing the hardware."""

    def trial_started(self, number: int, candidate: Setting, purpose: Purpose, slot: str | None = None) -> None:
        """Handle the start of a trial or check. `slot` is the name of its slot if there are several."""

    def step(self, num_steps: int, step_seconds: float, slot: str | None = None) -> None:
        """Handle a finished training step of the trial on `slot`."""

    def activity(self, text: str, slot: str | None = None) -> None:
        """Show the activity of the job on `slot`, such as ``1,240 calls recorded, now in layers.3``."""

    def trial_ended(self, record: Record, best: Record | None) -> None:
        """Handle the end of a trial or check. `best` is the fastest trial so far."""

    def trial_lost(self, number: int, slot: str | None) -> None:
        """Handle the loss of the slot that a trial ran on. The trial runs again elsewhere."""

    def tick(self, elapsed_seconds: float) -> None:
        """Update the elapsed time."""

    def output(self, text: str) -> None:
        """Handle text that the user's code printed on stdout or stderr."""

    def note(self, text: str) -> None:
        """Show a line: that the search is resumed or answered from the cache, or why a candidate is left out."""

    def ended(self) -> None:
        """Handle the end of the search, whether it succeeded or not."""

"""What a search tells whoever watches it. The base class ignores everything: the tests' and --quiet's progress."""

from __future__ import annotations

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Purpose, Record
from autotune_amp.core.setting import Setting


class Progress:
    """Called from the search's own thread, in order; `tick` at least four times a second."""

    def started(self, study: str, folder: str, budget_seconds: float | None) -> None:
        """The search has its folder and its budget."""

    def work_started(self, budget_seconds: float | None) -> None:
        """Work that is no search begins: a check on its own, or a profile, which has no budget."""

    def phase(self, text: str) -> None:
        """A new phase: ``loading the workload``, ``searching``, ``checking bf16 against fp32``, ``confirming`` ..."""

    def found_hardware(self, hardware: Hardware) -> None:
        """The probe is back."""

    def trial_started(self, number: int, candidate: Setting, purpose: Purpose, slot: str | None = None) -> None:
        """A trial or a check begins, on one of several slots."""

    def step(self, num_steps: int, step_seconds: float, slot: str | None = None) -> None:
        """The running trial, that on the slot, finished a step."""

    def activity(self, text: str, slot: str | None = None) -> None:
        """What runs, that on the slot, says what it does now, as ``1,240 calls recorded, now in layers.3``."""

    def trial_ended(self, record: Record, best: Record | None) -> None:
        """A trial or a check ended; `best` is the fastest measured so far."""

    def trial_lost(self, number: int, slot: str | None) -> None:
        """The slot on which it ran is there no more; it runs again elsewhere."""

    def tick(self, elapsed_seconds: float) -> None:
        """Time passes."""

    def output(self, text: str) -> None:
        """What the user's own code printed, on either stream."""

    def note(self, text: str) -> None:
        """Something worth a line: resumed, cached, what changed, why a candidate is left out."""

    def ended(self) -> None:
        """The search is over, however it ended."""

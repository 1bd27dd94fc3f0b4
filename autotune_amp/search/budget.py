"""Budget: the seconds that a search may take, and what of them is whose."""

from __future__ import annotations

import math
import time

from autotune_amp.core.errors import BudgetTooSmallError

# The confirmation takes at most this share of the budget, unless the device asks for more (`confirm.reserved_seconds`).
CONFIRM_SHARE = 0.4
CHECK_SHARE = 0.1  # kept back for the checks that follow the trials, where there is something to check


class Budget:
    """The budget in wall-clock seconds, from the moment the search was asked for.

    `confirm_seconds` of it are the confirmation's.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.confirm_seconds = CONFIRM_SHARE * seconds
        self._started = time.monotonic()

    def elapsed(self) -> float:
        """Seconds used."""
        return time.monotonic() - self._started

    def left(self) -> float:
        """Seconds left for everything."""
        return self.seconds - self.elapsed()

    def left_for_search(self) -> float:
        """Seconds left before the confirmation's share begins."""
        return self.left() - self.confirm_seconds

    def too_small(self, last_step_seconds: float | None) -> BudgetTooSmallError:
        """The error of a budget that ended before anything was measured.

        Twice the shortest trial there is, with what came before it, must fit in the search's share.
        """
        used_seconds, step_seconds = self.elapsed(), last_step_seconds or 0.0
        share = 1 - self.confirm_seconds / self.seconds - CHECK_SHARE
        needed = (2 * used_seconds + 12 * step_seconds) / share
        return BudgetTooSmallError(
            f"The budget of {self.seconds:g} s ended before anything was measured; "
            f"{used_seconds:.0f} s had gone into loading, probing and building the workload and its first trials.",
            f"Give --budget {math.ceil(needed / 10) * 10} or more.",
        )

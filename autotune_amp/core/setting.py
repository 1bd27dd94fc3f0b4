"""Setting: one value for every dimension; what can be tried and recommended."""

from __future__ import annotations

import msgspec

from autotune_amp.core.config import Precision


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that can be tried.

    `as_found` keeps the caller's own TF32 flags and autocast instead of the strict flags of `precision`: only the
    baseline is run so, and only where the two differ. `pinned_modules` run in fp32 whatever the precision.
    `num_workers` is the DataLoader's number of worker processes, None for the user's own number.
    """

    precision: Precision
    batch_size: int
    accumulation_steps: int = 1
    as_found: bool = False
    pinned_modules: tuple[str, ...] = ()
    num_workers: int | None = None

    @property
    def effective_batch_size(self) -> int:
        """Samples behind one optimizer step on this device."""
        return self.batch_size * self.accumulation_steps

    def __str__(self) -> str:
        name = f"{self.precision} batch {self.batch_size}"
        if self.accumulation_steps > 1:
            name += f" x {self.accumulation_steps}"
        if self.pinned_modules:
            num_pinned = len(self.pinned_modules)
            name += f" with {num_pinned} module{'s' if num_pinned > 1 else ''} pinned"
        if self.num_workers is not None:
            name += f" with {self.num_workers} loader worker{'' if self.num_workers == 1 else 's'}"
        return name + (" as found" if self.as_found else "")

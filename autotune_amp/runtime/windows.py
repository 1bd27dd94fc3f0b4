"""Accumulation windows: the passes of one optimizer step, at the batch size that fits the current rung."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.accumulation import first_dimensions, split_batch

Batch = TypeVar("Batch")


class WindowPosition:
    """Position of the loop in its accumulation window. `shares` are empty if it does not loop over `windows`."""

    def __init__(self, shares: Sequence[float] = (), index: int = 0, *, is_weighed: bool = False) -> None:
        self.shares = shares
        self.index = index
        self._is_weighed = is_weighed

    @property
    def is_first(self) -> bool:
        """Whether the pass is the first of its window, so that gradients are zero before it."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the pass is the last of its window."""
        return self.index >= len(self.shares) - 1

    @property
    def share(self) -> float | None:
        """Return the pass's share of the window's total weight, or None outside of `windows`."""
        return self.shares[self.index] if self.shares else None

    def share_of(self, loss: Tensor) -> Tensor:
        """Return the part that the pass's loss has in the window's: exactly ``loss / num_passes`` without weights."""
        if len(self.shares) < 2:
            return loss
        return loss * self.shares[self.index] if self._is_weighed else loss / len(self.shares)


def passes(
    batches: Iterator[Batch], next_shape: Callable[[], tuple[int, int]], weigh: Callable[[Batch], float | Tensor] | None
) -> Iterator[tuple[Batch, WindowPosition]]:
    """Yield (batch, position) for every pass. The last window may be shorter. `next_shape` returns each window's
    `shape`.
    """
    while True:
        num_batches, num_micro_batches = next_shape()
        whole = list(islice(batches, num_batches))
        window = whole if num_micro_batches == 1 else [part for one in whole for part in split(one, num_micro_batches)]
        if not window:
            return
        weights = [1.0 if weigh is None else float(weigh(batch)) for batch in window]
        shares = [weight / (sum(weights) or 1.0) for weight in weights]  # if all are 0: a loss of 0 instead of NaN
        for index, batch in enumerate(window):
            yield batch, WindowPosition(shares, index, is_weighed=weigh is not None)


def split(batch: Any, num_micro_batches: int) -> Iterable[Any]:
    """Return `batch` cut along its tensors' first dimension into `num_micro_batches` of equal size, or a smaller last
    one.

    Raises `InvalidRequestError` if its tensors differ in their first dimension.
    """
    sizes = first_dimensions(batch)
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidRequestError(
            f"A {type(batch).__name__} whose tensors have first dimensions {sorted(sizes)} cannot be split into the "
            "smaller batches that the new precision needs.",
            'Pass on_demotion="checkpoint_and_stop" and start again with the batch size in the error\'s config.',
        )
    return split_batch(batch, -(-sizes.pop() // num_micro_batches))


def shape(loader_batch: int, batch: int, steps: int) -> tuple[int, int]:
    """Return (loader batches per window, parts of each) that give `steps` passes of `batch` samples.

    Raises `InvalidRequestError` if the plan's window is not a whole number of the loader's batches.
    """
    num_batches, rest = divmod(batch * steps, loader_batch)
    num_parts = -(-loader_batch // batch)
    if rest or num_batches * num_parts != steps:
        raise InvalidRequestError(
            f"{steps} x {batch} samples cannot be made from a loader's batches of {loader_batch}.",
            'Pass on_demotion="checkpoint_and_stop" and start again with the new batch size.',
        )
    return num_batches, num_parts

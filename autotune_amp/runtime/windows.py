"""Accumulation windows: the passes of one optimizer step, in the batch size that the current rung can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.accumulation import cut, first_dimensions

Batch = TypeVar("Batch")


class Pass:
    """Which pass of its accumulation window the loop is in; `shares` are none where it does not loop over `windows`."""

    def __init__(self, shares: Sequence[float] = (), index: int = 0, *, is_weighed: bool = False) -> None:
        self.shares = shares
        self.index = index
        self._is_weighed = is_weighed

    @property
    def is_first(self) -> bool:
        """Whether gradients are zero before it."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether the window is over after it."""
        return self.index >= len(self.shares) - 1

    @property
    def share(self) -> float | None:
        """Its part of what is weighed in the window; None outside of `windows`."""
        return self.shares[self.index] if self.shares else None

    def share_of(self, loss: Tensor) -> Tensor:
        """The loss's part in that of the window: exactly ``loss / num_passes`` where nothing is weighed."""
        if len(self.shares) < 2:
            return loss
        return loss * self.shares[self.index] if self._is_weighed else loss / len(self.shares)


class Windows:
    """Where a loop over accumulation windows stands."""

    def __init__(self) -> None:
        self.current = Pass()

    def over(
        self,
        batches: Iterator[Batch],
        next_shape: Callable[[], tuple[int, int]],
        weigh: Callable[[Batch], float | Tensor] | None,
    ) -> Iterator[tuple[Batch, bool]]:
        """(batch, is_last) for every pass of `passes`; `current` follows."""
        shares: Sequence[float] = ()
        try:
            for batch, shares, index in passes(batches, next_shape, weigh):
                self.current = Pass(shares, index, is_weighed=weigh is not None)
                yield batch, self.current.is_last
        finally:
            if self.current.shares is shares:  # another loop may have begun since
                self.current = Pass()


def passes(
    batches: Iterator[Batch], next_shape: Callable[[], tuple[int, int]], weigh: Callable[[Batch], float | Tensor] | None
) -> Iterator[tuple[Batch, list[float], int]]:
    """(batch, shares, index) for every pass, the last window shorter. `next_shape` gives the `shape` of each window.

    `shares` are the parts of a window's passes of what is weighed in it; the batch is that of pass `index`.
    """
    while True:
        num_batches, num_micro_batches = next_shape()
        whole = list(islice(batches, num_batches))
        window = whole if num_micro_batches == 1 else [part for one in whole for part in split(one, num_micro_batches)]
        if not window:
            return
        weights = [1.0 if weigh is None else float(weigh(batch)) for batch in window]
        shares = [weight / (sum(weights) or 1.0) for weight in weights]  # all 0: no loss, and no NaN
        for index, batch in enumerate(window):
            yield batch, shares, index


def split(batch: Any, num_micro_batches: int) -> Iterable[Any]:
    """`batch` cut along the first dimension of its tensors into `num_micro_batches` of one size at most, the last less.

    Raises `InvalidRequestError` where its tensors do not agree on a first dimension.
    """
    sizes = first_dimensions(batch)
    if len(sizes) != 1 or 0 in sizes:
        raise InvalidRequestError(
            f"A {type(batch).__name__} whose tensors have first dimensions {sorted(sizes)} cannot be split into the "
            "smaller batches that the new precision needs.",
            'Pass on_demotion="checkpoint_and_stop" and start again with the batch size in the error\'s config.',
        )
    return cut(batch, -(-sizes.pop() // num_micro_batches))


def shape(loader_batch: int, batch: int, steps: int) -> tuple[int, int]:
    """(loader batches in a window, parts of each) for `steps` passes of `batch` samples out of a loader's batches.

    Raises `InvalidRequestError` where the plan's window is not a whole number of the loader's batches.
    """
    num_batches, rest = divmod(batch * steps, loader_batch)
    num_parts = -(-loader_batch // batch)
    if rest or num_batches * num_parts != steps:
        raise InvalidRequestError(
            f"{steps} x {batch} samples cannot be made from a loader's batches of {loader_batch}.",
            'Pass on_demotion="checkpoint_and_stop" and start again with the new batch size.',
        )
    return num_batches, num_parts

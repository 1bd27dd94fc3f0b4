"""What Accelerate says of a loader at each of its batches, kept until that batch is trained on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from accelerate.state import GradientState
from accelerate.utils import recursively_apply

from autotune_amp.numerics.batches import first_dimensions


class _Fetched(NamedTuple):
    """A batch, the prepared loader that it came of (None without one), and what that said when it handed it out."""

    batch: Any
    loader: Any
    is_end: bool
    remainder: int


class FetchedBatches:
    """The batches of a loader that were fetched ahead of their turn.

    The passes of a window are fetched before the first of them is trained on. Accelerate asks the loader whether the
    current batch is its last, and how many samples of that are the data's own and do not only fill it up: by then the
    loader speaks of the window's last batch, or has ended and no longer counts.
    """

    def __init__(self, state: GradientState) -> None:
        self._state = state
        self._fetched: deque[_Fetched] = deque()
        self._num_trained = 0  # samples of the first of them, where it is cut
        self._filled: Any = None  # the loader in whose turn no sample is the data's own

    def of(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, with what it says of each of them."""
        for batch in loader:
            state = self._state
            self._fetched.append(_Fetched(batch, state.active_dataloader, state.end_of_dataloader, state.remainder))
            yield batch

    @contextmanager
    def turn(self, passed: Any) -> Iterator[None]:
        """Let the loader say again what it said at `passed`, the next of the batches or a piece of it."""
        fetched = self._fetched[0]
        remainder, is_over = self._remainder(fetched, passed)
        if is_over:
            self._fetched.popleft()
        loader = fetched.loader
        if loader is None:
            yield
            return
        before = loader.end_of_dataloader, loader.remainder
        has_ended = loader not in self._state.dataloader_references
        if has_ended:
            self._state._add_dataloader(loader)
        loader.end_of_dataloader, loader.remainder = fetched.is_end, remainder
        self._filled = loader if fetched.is_end and remainder == 0 < fetched.remainder else None
        try:
            yield
        finally:
            self._filled = None
            loader.end_of_dataloader, loader.remainder = before
            if has_ended:
                self._state._remove_dataloader(loader)

    def _remainder(self, fetched: _Fetched, passed: Any) -> tuple[int, bool]:
        """What the loader's remainder comes to in this pass, and whether it is the batch's last."""
        if passed is fetched.batch:
            return fetched.remainder, True
        (batch_size,), (size,) = first_dimensions(fetched.batch), first_dimensions(passed)
        piece = range(self._num_trained, self._num_trained + size)
        is_over = piece.stop >= batch_size
        self._num_trained = 0 if is_over else piece.stop
        return num_own(fetched.remainder, batch_size, piece) if fetched.remainder > 0 else fetched.remainder, is_over

    def without_filler(self, gathered: Any, are_objects: bool) -> Any:
        """What ``gather_for_metrics`` has in this turn, but nothing where no sample is the data's own.

        To Accelerate a remainder of 0 is that of a whole batch.
        """
        if self._filled is None or self._filled is not self._state.active_dataloader:
            return gathered
        if are_objects:
            return gathered[:0]
        try:
            return recursively_apply(lambda tensor: tensor[:0], gathered, error_on_other_type=True)
        except TypeError:  # a list of objects all the same
            return gathered[:0]


def num_own(remainder: int, batch_size: int, piece: range) -> int:
    """The data's own samples in a piece gathered from all ranks, where whole batches have `remainder` of them. Pure.

    They come first, rank by rank, and every rank cuts the same piece out of its `batch_size` samples.
    """
    num_whole_ranks, rest = divmod(remainder, batch_size)
    return num_whole_ranks * len(piece) + min(max(rest - piece.start, 0), len(piece))

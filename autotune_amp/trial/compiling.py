"""Compilations of the user's code, seen as they happen: torch.compile compiles in the first step, and again for shapes
and modes that it has not met."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.convert_frame import input_codes


class CompileWatch:
    """Counts compilations while it is entered, deferred backward passes and CUDA graph recordings among them.

    `started` is called as each begins, on whatever thread it does.
    """

    def __init__(self, started: Callable[[], None]) -> None:
        self._started = started
        self._num_compilations = 0

    def __enter__(self) -> CompileWatch:
        callback_handler.register_start_callback(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # the user's code called torch.compiler.reset(), which clears them all
            callback_handler.remove_start_callback(self._note)

    def count(self) -> int:
        """How many there were so far."""
        return self._num_compilations

    def _note(self, _: CallbackArgs) -> None:
        self._num_compilations += 1
        self._started()


def forget_compiled() -> None:
    """Drop what was compiled in this process: after other batch sizes a kept worker would compile for shapes that
    vary, which is slower, and at last not at all. The compiler's cache on disk stays."""
    if input_codes.seen:  # else it is nothing but an import of the compiler on CUDA, which takes seconds
        torch.compiler.reset()

"""What a test hears of the processes that jobs run in."""

from __future__ import annotations

import itertools

from autotune_amp.processes.process import Watcher


class Listener(Watcher):
    """Keeps what they print."""

    def __init__(self) -> None:
        self.text = ""

    def output(self, text: str) -> None:
        self.text += text

    def words(self, name: str) -> list[str]:
        """What was printed after `name`."""
        return [value for word, value in itertools.pairwise(self.text.split()) if word == name]

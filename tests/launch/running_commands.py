"""The type of the fixture that runs a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from autotune_amp.launch.running import Ran

RunCommand: TypeAlias = Callable[..., Ran]

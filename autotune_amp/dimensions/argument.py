"""Arguments of a training command that the user wrote as placeholders: one dimension for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.dimension import AnySetting, Choices, Dimension


class _Arguments(Dimension[tuple[tuple[str, str], ...]]):
    """Field of a setting that holds the values of all arguments. Fewer changes of the user's command are preferred."""

    name = "arguments"
    found_by = None

    def risk(self, value: tuple[tuple[str, str], ...]) -> int:
        return len(value)


ARGUMENTS = _Arguments()


class Argument(Dimension[str]):
    """Dimension of one placeholder, such as ``{attn=sdpa:eager}``: a name and `values`, today's first.

    A name that begins with ``!`` says that the argument does not affect numerics.
    """

    def __init__(self, placeholder: str, values: Sequence[str]) -> None:
        self.name = placeholder.lstrip("!")
        if placeholder.startswith("!"):
            self.affects = frozenset({"speed", "memory"})
        self._placeholder = placeholder
        self._today, *others = values
        self._others = tuple(others)

    @property
    def default(self) -> str:
        """Return today's value."""
        return self._today

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:  # noqa: ARG002 - Dimension's
        """Return the values besides today's, none of them with ``--try none``."""
        if options.variants == ():
            return Choices((), dict.fromkeys(self._others, "--try none"))
        return Choices(self._others)

    def read(self, setting: Setting) -> str:  # noqa: D102 - see Dimension
        return dict(setting.arguments).get(self._placeholder, self._today)

    def write(self, setting: AnySetting, value: str) -> AnySetting:  # noqa: D102 - see Dimension
        values = {**dict(setting.arguments), self._placeholder: value}
        if value == self._today:
            del values[self._placeholder]
        return replace(setting, arguments=tuple(sorted(values.items())))

    def value_in(self, setting: Setting) -> str | None:  # noqa: D102 - see Dimension
        return dict(setting.arguments).get(self._placeholder)

    def risk(self, value: str) -> int:  # noqa: D102 - see Dimension
        return int(value != self._today)


def arguments_of(values: Mapping[str, Sequence[str]]) -> tuple[Argument, ...]:
    """Return a dimension for each placeholder in `values`, which maps its name to its values, today's first."""
    return tuple(Argument(name, each) for name, each in values.items())

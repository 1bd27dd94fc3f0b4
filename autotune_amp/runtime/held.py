"""Attributes of GradScaler's that a part of the controller holds, within the ranges that a saved state may have."""

from __future__ import annotations

import operator
import sys
from typing import Annotated, Any

import msgspec

from autotune_amp.core.errors import InvalidRequestError

GrowthFactor = Annotated[float, msgspec.Meta(ge=1, le=sys.float_info.max)]
BackoffFactor = Annotated[float, msgspec.Meta(gt=0, le=1)]
GrowthInterval = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]


def held(part: str, name: str, kind: Any = None) -> Any:
    """An attribute of GradScaler's that a part of the controller holds, of this kind only: what a state may hold."""

    def set_it(controller: Any, value: Any) -> None:
        try:
            setattr(getattr(controller, part), name, value if kind is None else msgspec.convert(value, kind))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"The {name} given is {value!r}: {error}.", "Growth is by 1 or more, backing off by 1 or less."
            ) from error

    return property(operator.attrgetter(f"{part}.{name}"), set_it)

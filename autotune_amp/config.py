"""AmpConfig and LossScale: what a training run is to use, validated, as plain JSON.

msgspec rather than pydantic: a cached recommendation must be read within 50 ms, and importing pydantic alone
takes 160 ms where msgspec takes 4 (measured, Python 3.11).
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from autotune_amp.errors import InvalidRequestError

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# From the one with least to go wrong at run time to the one with most.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")


def _require(condition: bool, message: str, next_step: str) -> None:
    if not condition:
        raise InvalidRequestError(message, next_step)


class LossScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss scaler's parameters; the defaults are those of ``torch.amp.GradScaler``.

    `growth_interval` is in optimizer steps. `min_scale` and `max_scale` bound the scale: a scale of 0 or infinity
    destroys the weights (pytorch#99640). Raises `InvalidRequestError` when a value cannot work.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 16777216.0

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            _require(
                isinstance(value, (int, float)) and math.isfinite(value) and value > 0,
                f"LossScale.{name} is {value!r}; it must be a finite number above 0.",
                f"Leave {name} out to use the default.",
            )
        _require(
            self.growth_factor > 1,
            f"LossScale.growth_factor is {self.growth_factor!r}; it must be above 1.",
            "Use 2.0, the default.",
        )
        _require(
            self.backoff_factor <= 1,
            f"LossScale.backoff_factor is {self.backoff_factor!r}; it must be at most 1.",
            "Use 0.5, the default.",
        )
        _require(
            isinstance(self.growth_interval, int) and self.growth_interval >= 1,
            f"LossScale.growth_interval is {self.growth_interval!r}; it must be a whole number of steps from 1 up.",
            "Use 2000, the default.",
        )
        _require(
            self.min_scale <= self.init_scale <= self.max_scale,
            f"LossScale.init_scale is {self.init_scale!r}, outside [min_scale, max_scale] = "
            f"[{self.min_scale!r}, {self.max_scale!r}].",
            "Move init_scale inside the bounds, or widen them.",
        )


def _require_plan(owner: str, precision: str, batch_size: int, accumulation_steps: int) -> None:
    _require(
        precision in PRECISIONS,
        f"{owner}.precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}.",
        "Pick one of the names given.",
    )
    for name, value in (("batch_size", batch_size), ("accumulation_steps", accumulation_steps)):
        _require(
            isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            f"{owner}.{name} is {value!r}; it must be a whole number from 1 up.",
            f"Pass {name}=1 or more.",
        )


class FallbackPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting with less to go wrong that was measured to fit; throughput in samples per second."""

    precision: Precision
    batch_size: int
    accumulation_steps: int = 1
    peak_memory_bytes: int | None = None
    samples_per_second: float | None = None

    def __post_init__(self) -> None:
        _require_plan("FallbackPlan", self.precision, self.batch_size, self.accumulation_steps)


class AmpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training run is to use.

    `batch_size` is the number of samples in one forward pass on one device; `accumulation_steps` such passes make
    one optimizer step. `loss_scale` belongs to fp16 and to nothing else. `fallback` is ordered, first choice first.
    `environment` holds variables to set before Python starts. Raises `InvalidRequestError` when a value cannot work.
    """

    precision: Precision
    batch_size: int
    accumulation_steps: int = 1
    loss_scale: LossScale | None = None
    fallback: tuple[FallbackPlan, ...] = ()
    pinned_modules: tuple[str, ...] = ()
    environment: dict[str, str] = {}

    def __post_init__(self) -> None:
        _require_plan("AmpConfig", self.precision, self.batch_size, self.accumulation_steps)
        _require(
            (self.loss_scale is not None) == (self.precision == "fp16"),
            f"AmpConfig.loss_scale is {self.loss_scale!r} under precision {self.precision!r}; "
            "fp16 needs a loss scale and no other precision takes one.",
            "Pass loss_scale=LossScale() with fp16 and leave it out otherwise.",
        )

    def to_json(self) -> str:
        """This config as a JSON document."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> AmpConfig:
        """The config in a JSON document; raises `InvalidRequestError` naming what is wrong with it."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                f"This is not an AmpConfig: {error}.", "Compare it with AmpConfig.json_schema()."
            ) from error

    @staticmethod
    def json_schema() -> dict[str, object]:
        """The JSON schema of an AmpConfig document."""
        return msgspec.json.schema(AmpConfig)

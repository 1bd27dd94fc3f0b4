"""What each precision is: one `Mode` for each, plain facts without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from autotune_amp.core.config import FP16_MAX
from autotune_amp.core.dimensions import AROUND_FP8, Precision


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One precision.

    `autocast_dtype` is the name below torch of what autocast casts to, None where there is no autocast.
    `significand_bits` counts the leading one. `format_max` is the largest number of the format that activations and
    gradients are kept in: in tf32 that is fp32's. `next_down` is the precision with less to go wrong that a run steps
    down to.
    """

    precision: Precision
    significand_bits: int
    format_max: float = 3.4028234663852886e38
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    uses_tf32: bool = False
    takes_scaler: bool = False
    next_down: Precision | None = "fp32"

    @property
    def uses_autocast(self) -> bool:
        """Whether it is what mixed precision means: autocast casts to it."""
        return self.autocast_dtype is not None

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding."""
        return 2.0**-self.significand_bits

    @property
    def rungs_below(self) -> tuple[Precision, ...]:
        """What a run can step down to, in order."""
        return () if self.next_down is None else (self.next_down, *MODES[self.next_down].rungs_below)


_FP32 = Mode(precision="fp32", significand_bits=24, next_down=None)
_TF32 = Mode(precision="tf32", significand_bits=11, uses_tf32=True)
_BF16 = Mode(precision="bf16", significand_bits=8, format_max=3.3895313892515355e38, autocast_dtype="bfloat16")
_FP16 = Mode(
    precision="fp16",
    significand_bits=11,
    format_max=FP16_MAX,
    autocast_dtype="float16",
    takes_scaler=True,
    next_down="bf16",
)
_FP8 = Mode(  # e4m3's bits; between the layers that scale what they multiply in it, all is bf16
    precision="fp8",
    significand_bits=4,
    format_max=_BF16.format_max,
    autocast_dtype=_BF16.autocast_dtype,
    next_down=AROUND_FP8,
)
MODES: Final[dict[Precision, Mode]] = {mode.precision: mode for mode in (_FP32, _TF32, _BF16, _FP16, _FP8)}


def mode_of_dtype(autocast_dtype: str | None) -> Mode:
    """The mode whose autocast casts to the dtype of this name below torch; fp32's for None."""
    return next((mode for mode in MODES.values() if mode.autocast_dtype == autocast_dtype), MODES["fp32"])

"""Properties of the precisions as plain data, one `Mode` for each. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from autotune_amp.core.config import FP16_MAX
from autotune_amp.core.precisions import AROUND_FP8, Precision, autocast_precision


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Properties of one precision.

    `autocast_dtype` is the name of the torch dtype that autocast casts to, None without autocast. `significand_bits`
    includes the leading one. `format_max` is the largest number of the dtype in which activations and gradients are
    kept: for tf32 that is fp32. `takes_scaler` is True if a GradScaler is needed. `next_down` is the safer precision
    that a training run steps down to.
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
        """Return whether the precision is a mixed precision, in which autocast is on."""
        return self.autocast_dtype is not None

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of one rounding."""
        return 2.0**-self.significand_bits

    @property
    def rungs_below(self) -> tuple[Precision, ...]:
        """Return the precisions that a training run can step down to, in order."""
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
_FP8 = (
    Mode(  # significand of e4m3; the rest is bf16's, since fp8 layers scale their operands and other code runs in bf16
        precision="fp8",
        significand_bits=4,
        format_max=_BF16.format_max,
        autocast_dtype=_BF16.autocast_dtype,
        next_down=AROUND_FP8,
    )
)
MODES: Final[dict[Precision, Mode]] = {mode.precision: mode for mode in (_FP32, _TF32, _BF16, _FP16, _FP8)}
# Precisions of autocast itself: without fp8, which linear layers use inside bf16 autocast.
MIXED_PRECISIONS: Final = tuple(
    name for name in MODES if MODES[name].uses_autocast and autocast_precision(name) == name
)


def mode_of_dtype(autocast_dtype: str | None) -> Mode:
    """Return the mode whose autocast casts to the torch dtype of this name; fp32's for None."""
    return next((mode for mode in MODES.values() if mode.autocast_dtype == autocast_dtype), MODES["fp32"])

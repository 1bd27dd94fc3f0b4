"""Rates of matrix products that NVIDIA's data sheets promise, to put beside the measured ones. No torch."""

from __future__ import annotations

import re

from autotune_amp.core.precisions import Precision

_TERA = 1e12


def _rates(fp32: float, tf32: float, half: float, fp8: float | None = None) -> dict[Precision, float]:
    by_name: dict[Precision, float | None] = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp8": fp8}
    return {name: _TERA * rate for name, rate in by_name.items() if rate is not None}


# Dense rates in TFLOP/s with fp32 accumulation, by the name that the driver reports. Sheets that print rates "with
# sparsity" print twice these. Sources: NVIDIA's data sheets of the A100 (June 2021), H100 (2024; its PCIe form is not
# in that sheet: 2023), H200 (2024), L4 (2023), L40S (2023) and HGX B200 (2025, an eighth of the board's), and
# for the RTX 4090 the Ada GPU architecture whitepaper (v2.02, table 2).
_SHEETS: dict[str, dict[Precision, float]] = {
    r"A100-(SXM4|PCIE)-\d+GB|A100 80GB PCIe": _rates(19.5, 156, 312),
    r"H100 80GB HBM3": _rates(67, 494.5, 989.5, 1979),
    r"H100 PCIe": _rates(51, 378, 756, 1513),
    r"H100 NVL": _rates(60, 417.5, 835.5, 1670.5),
    r"H200": _rates(67, 494.5, 989.5, 1979),
    r"H200 NVL": _rates(60, 417.5, 835.5, 1670.5),
    r"L4": _rates(30.3, 60, 121, 242.5),
    r"L40S": _rates(91.6, 183, 362.05, 733),
    r"GeForce RTX 4090": _rates(82.6, 82.6, 165.2, 330.3),
    r"B200": _rates(75, 1125, 2250, 4500),
}


def data_sheet_flops_per_second(name: str, precision: Precision) -> float | None:
    """Return the data sheet's dense rate of a GPU called `name`, in FLOP/s; None for a GPU or precision not in it.

    The name must match whole: a laptop's chip or a part of a GPU (MIG) is slower than the card of nearly the same name.
    """
    for pattern, rates in _SHEETS.items():
        if re.fullmatch(rf"NVIDIA (?:{pattern})", name):
            return rates.get(precision)
    return None

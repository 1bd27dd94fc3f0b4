"""Device names: what a user may write."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias, cast

from autotune_amp.core.errors import DeviceError

Kind: TypeAlias = Literal["auto", "cuda", "xpu", "mps", "cpu"]

_NAME = re.compile(r"(?P<kind>auto|cuda|xpu|mps|cpu)(:(?P<index>\d+))?")


def parse(device: str) -> tuple[Kind, int | None]:
    """The kind and the index, None where none is given; raises `DeviceError` for what is no device name."""
    match = _NAME.fullmatch(device)
    if match is None or (match["kind"] == "auto" and match["index"] is not None):
        raise DeviceError(
            f"{device!r} is no device that can be measured; it must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps.",
            "Pass one of these names, or 'auto' for the first accelerator that can be used.",
        )
    return cast("Kind", match["kind"]), None if match["index"] is None else int(match["index"])


def only(kind: str, index: int | None) -> str:
    """The name of a kind of which a machine has one; raises `DeviceError` for any index but 0."""
    if index:
        raise DeviceError(
            f"{kind}:{index} was asked for, but there is only one {kind} device.", f"Pass device={kind!r}."
        )
    return kind


def numbered(kind: str, index: int, num_devices: int) -> str:
    """The name of device `index` out of `num_devices`; raises `DeviceError`, saying how many there are."""
    if index >= num_devices:
        last = f"{kind}:0" if num_devices == 1 else f"{kind}:0 to {kind}:{num_devices - 1}"
        raise DeviceError(
            f"{kind}:{index} was asked for, but PyTorch sees {num_devices} {kind} "
            f"device{'s' if num_devices > 1 else ''} here.",
            f"Pass {last}, or check the variables that hide devices (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK).",
        )
    return f"{kind}:{index}"

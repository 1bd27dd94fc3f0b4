"""What every backend answers. The modules cuda, xpu, mps and cpu each have these functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autotune_amp.core.config import Precision
    from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory


class Backend(Protocol):
    """One kind of device; a `device` given to it is a name that its `resolve` returned."""

    def is_built(self) -> bool:
        """Whether this PyTorch was built for it."""

    def resolve(self, index: int | None) -> str:
        """The device string of an index, None being the current one; raises `DeviceError` with the reason."""

    def identity(self, device: str) -> DeviceIdentity:
        """What the device is."""

    def compute_capability(self, device: str) -> str | None:
        """The maker's version of the instruction set, where there is one."""

    def memory(self, device: str) -> DeviceMemory:
        """The device's memory now, in bytes."""

    def capabilities(self, device: str) -> dict[Precision, Capability]:
        """Every precision with its level and reason, the rates not yet measured."""

    def notes_before(self, device: str) -> tuple[str, ...]:
        """What a user should know, read before the micro-benchmark makes the device busy."""

    def notes_after(self, device: str) -> tuple[str, ...]:
        """What a user should know, read while the device is warm."""

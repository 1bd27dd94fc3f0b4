"""Hardware: the capabilities and the load of this machine as plain data."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core import markup
from autotune_amp.core.documents import Count, NotNegative, Number, Positive, Whole
from autotune_amp.core.precisions import Precision
from autotune_amp.core.text import count, flops, one_line, size

Level: TypeAlias = Literal["native", "emulated", "unsupported"]


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """Level of support of a device for one precision, always with the reason.

    `matmul_flops_per_second` is the measured rate of matrix products, None if it could not be measured.
    """

    level: Level
    reason: str
    matmul_flops_per_second: NotNegative | None = None

    @property
    def peak_flops_per_second(self) -> float | None:
        """Return the measured rate of matrix products if no training can be faster, else None.

        Products of an emulated precision may be faster in other sizes than the one that was measured.
        """
        return self.matmul_flops_per_second if self.level == "native" else None


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes. `available` is the least of device, container limit and memory free of other processes.

    `container_limit` is the cgroup's limit (CPU only), None without one. `held_by_caller` is the memory that the
    calling process and its ancestors hold on the device.
    """

    total: Whole
    free: Whole
    available: Whole
    container_limit: Whole | None = None
    held_by_caller: Whole = 0


MIN_MEMORY_SHARE = 0.95  # for two devices to count as equal: no two hosts report the same memory to the byte


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Static identity of a device, read without touching it. Part of the fingerprint of a recommendation.

    `allowed_cpus` is the CPU time that the container allows, in CPUs, None without a limit.
    """

    type: str
    name: str
    index: Whole | None = None
    uuid: str | None = None
    driver: str | None = None
    num_cpus: Count
    allowed_cpus: Positive | None = None
    total_memory_bytes: Whole


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """One device of this machine and its capabilities. `device` is a torch device string such as ``cuda:0``."""

    device: str
    identity: DeviceIdentity
    compute_capability: str | None = None
    memory: DeviceMemory
    precisions: dict[Precision, Capability]
    notes: tuple[str, ...] = ()

    def has(self, precision: Precision) -> bool:
        """Return whether the device computes in `precision`, natively or emulated."""
        return precision in self.precisions and self.precisions[precision].level != "unsupported"

    @property
    def has_tf32(self) -> bool:
        """Return whether torch's TF32 flags have an effect on the device."""
        return self.has("tf32")

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs that describe the device and its memory."""
        identity, memory = self.identity, self.memory
        limit = "no container limit"
        if memory.container_limit is not None:
            limit = f"container limit {size(memory.container_limit)}"
        lines = [
            ("device", f"{self.device}: {one_line(identity.name)}"),
            ("compute", self.compute_capability or "-"),
            ("driver", identity.driver or "none"),
            (
                "memory",
                f"{size(memory.available)} available: {size(memory.free)} free of {size(memory.total)}, {limit}",
            ),
            ("host", count(identity.num_cpus, "CPU")),
        ]
        if memory.held_by_caller:
            lines.append(("held", f"{size(memory.held_by_caller)} by the calling process itself"))
        return lines + [("warning", one_line(note)) for note in self.notes]

    def precision_rows(self) -> list[tuple[str, str, str, str]]:
        """Return a row for each precision: name, measured rate of matrix products, level and reason."""
        return [
            (
                precision,
                "-" if capability.matmul_flops_per_second is None else flops(capability.matmul_flops_per_second),
                capability.level,
                one_line(capability.reason),
            )
            for precision, capability in self.precisions.items()
        ]

    def to_html(self) -> str:
        """Return an HTML description for reports and notebooks."""
        columns = ("precision", "matrix products", "level", "reason")
        return markup.definition_list(self.facts()) + markup.table(columns, self.precision_rows(), num_numeric=1)

    def _repr_html_(self) -> str:
        return markup.notebook_box("Hardware", self.to_html())


class BusyProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process outside of the search and the CPU cores that it used, averaged over the observed time."""

    pid: int
    name: str
    num_cores: NotNegative


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process outside of the search that uses the GPU. `name` is None if it cannot be seen, as from a container."""

    pid: int
    name: str | None
    memory_bytes: Whole | None


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load by other processes, averaged over `seconds`; None for numbers that the system does not report.

    `others_num_cores` is the CPU time, in cores, of all processes that do not descend from the calling one,
    `own_num_cores` that of those that do; `busiest` are the other processes that used most. `stolen_share` is the share
    of the requested CPU time that a hypervisor gave to others, `gpu_slowdowns` holds the reasons why the GPU lowered
    its clocks. Saved documents call the GPU's fields by the `name` given.
    """

    seconds: NotNegative
    num_cpus: Count
    others_num_cores: Number | None = None
    own_num_cores: Number | None = None
    busiest: tuple[BusyProcess, ...] = ()
    stolen_share: Number | None = None
    gpu_processes: tuple[GpuProcess, ...] | None = msgspec.field(default=None, name="card_processes")
    gpu_slowdowns: tuple[str, ...] | None = msgspec.field(default=None, name="card_slowdowns")


class LoadEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Load by other processes while a throughput was measured, averaged over the measuring processes.

    Fields as in `MachineLoad`. `is_busy`, `is_stolen`: other processes, or the hypervisor, took enough to warn about.
    The ends of the throughput's interval were multiplied by `interval_factors` to account for the load.
    """

    num_cpus: Count
    others_num_cores: Number | None = None
    busiest: tuple[BusyProcess, ...] = ()
    stolen_share: Number | None = None
    gpu_processes: tuple[GpuProcess, ...] = msgspec.field(default=(), name="card_processes")
    gpu_slowdowns: tuple[str, ...] = msgspec.field(default=(), name="card_slowdowns")
    is_busy: bool = False
    is_stolen: bool = False
    interval_factors: tuple[Positive, Positive] = (1.0, 1.0)

"""Hardware: what the machine can do, and what others do on it, as plain data."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core import pieces
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.documents import Count, NotNegative, Number, Positive, Whole
from autotune_amp.core.text import count, flops, one_line, size

Level: TypeAlias = Literal["native", "emulated", "unsupported"]


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What a device can do in one precision: never a bare yes or no, always with the reason.

    `matmul_flops_per_second` is a measured matrix-product rate, None where nothing could be measured.
    """

    level: Level
    reason: str
    matmul_flops_per_second: NotNegative | None = None


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory in bytes. `available` is the least of the device, the container's limit and what others leave free.

    `container_limit` is the cgroup's limit (CPU only), None where there is none. `held_by_caller` is what the
    calling process, and those that wait for it, hold on the device.
    """

    total: Whole
    free: Whole
    available: Whole
    container_limit: Whole | None = None
    held_by_caller: Whole = 0


LEAST_MEMORY_SHARE = 0.95  # of another's, for a device to be of its kind: no two hosts have the same to the byte


class DeviceIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two machines the same for a measurement: enters the fingerprint. Read without touching the device.

    `allowed_cpus` is how many CPUs' time the container allows, None without a limit.
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
    """One device of this machine and what it can do. `device` is a torch device string such as ``cuda:0``."""

    device: str
    identity: DeviceIdentity
    compute_capability: str | None = None
    memory: DeviceMemory
    precisions: dict[Precision, Capability]
    notes: tuple[str, ...] = ()

    def has(self, precision: Precision) -> bool:
        """Whether the device computes in it, emulated or not."""
        return precision in self.precisions and self.precisions[precision].level != "unsupported"

    @property
    def has_tf32(self) -> bool:
        """Whether torch's TF32 flags mean anything here."""
        return self.has("tf32")

    def facts(self) -> list[tuple[str, str]]:
        """Label and text of the device and its memory."""
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
        """Each precision with its measured matrix rate, its level and the reason for that."""
        return [
            (
                precision,
                "-" if found.matmul_flops_per_second is None else flops(found.matmul_flops_per_second),
                found.level,
                one_line(found.reason),
            )
            for precision, found in self.precisions.items()
        ]

    def to_html(self) -> str:
        """What a page and a notebook show of it."""
        columns = ("precision", "matrix products", "level", "reason")
        return pieces.facts(self.facts()) + pieces.table(columns, self.precision_rows(), num_numeric=1)

    def _repr_html_(self) -> str:
        return pieces.fragment("Hardware", self.to_html())


class BusyProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of others and the CPU cores that it used, averaged over the time looked at."""

    pid: int
    name: str
    num_cores: NotNegative


class CardProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of others on the card; `name` is None where it cannot be seen from here, as from a container."""

    pid: int
    name: str | None
    memory_bytes: Whole | None


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What others did during `seconds`, averaged over them; None is what the system does not say.

    `others_num_cores` is the CPU time, in cores, of all processes that do not descend from the calling one,
    `own_num_cores` of those that do; `busiest` are the others that used most. `stolen_share` is the share of the CPU
    time wanted that a hypervisor gave away, `card_slowdowns` says why the card lowered its clocks.
    """

    seconds: NotNegative
    num_cpus: Count
    others_num_cores: Number | None = None
    own_num_cores: Number | None = None
    busiest: tuple[BusyProcess, ...] = ()
    stolen_share: Number | None = None
    card_processes: tuple[CardProcess, ...] | None = None
    card_slowdowns: tuple[str, ...] | None = None


class LoadEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What others did while the processes behind a throughput's interval ran; None is what the system does not say.

    Numbers are means over these. `is_busy`, `is_stolen`: others, or the hypervisor, took enough to be worth a word. The
    interval's ends were multiplied by `interval_factors` for it. The others are as in `MachineLoad`.
    """

    num_cpus: Count
    others_num_cores: Number | None = None
    busiest: tuple[BusyProcess, ...] = ()
    stolen_share: Number | None = None
    card_processes: tuple[CardProcess, ...] = ()
    card_slowdowns: tuple[str, ...] = ()
    is_busy: bool = False
    is_stolen: bool = False
    interval_factors: tuple[Positive, Positive] = (1.0, 1.0)

"""Kinds of devices: what a user may write, what each answers, and how it is recognised and probed without torch.

Another kind is a module with the functions of `Device` and an entry in `DEVICES`.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import DeviceError, RunnerError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.hardware import host, nvml

# The module of each kind, in the order in which `auto` tries them.
DEVICES = {kind: f"autotune_amp.hardware.{kind}" for kind in ("cuda", "xpu", "mps", "cpu")}


class Device(Protocol):
    """One kind of device: its module has these functions. A `device` is a name that `resolve` returned."""

    def is_built(self) -> bool:
        """Whether this PyTorch was built for it."""

    def resolve(self, index: int | None) -> str:
        """The device string of an index, None being the current one; raises `DeviceError` with the reason."""

    def identity(self, device: str, /) -> DeviceIdentity:
        """What the device is."""

    def compute_capability(self, device: str, /) -> str | None:
        """The maker's version of the instruction set, where there is one."""

    def memory(self, device: str, /) -> DeviceMemory:
        """The device's memory now, in bytes."""

    def capabilities(self, device: str, /) -> dict[Precision, Capability]:
        """Every precision with its level and reason, the rates not yet measured."""

    def notes(self, device: str, /) -> tuple[str, ...]:
        """What a user should know, read before the micro-benchmark makes the device busy."""


def native(reason: str) -> Capability:
    """The device computes in the precision itself."""
    return Capability(level="native", reason=reason)


def emulated(reason: str) -> Capability:
    """PyTorch computes in another precision and converts."""
    return Capability(level="emulated", reason=reason)


def unsupported(reason: str) -> Capability:
    """The precision cannot be trained in."""
    return Capability(level="unsupported", reason=reason)


def device_of(kind: str) -> Device:
    """What answers for the devices of a kind; imports torch."""
    module: Any = import_module(DEVICES[kind])
    found: Device = module
    return found


def parse(device: str) -> tuple[str, int | None]:
    """The kind, ``auto`` or one of `DEVICES`, and the index, None where none is given.

    Raises `DeviceError` for what is no device name.
    """
    match = re.fullmatch(rf"(?P<kind>auto|{'|'.join(DEVICES)})(:(?P<index>\d+))?", device)
    if match is None or (match["kind"] == "auto" and match["index"] is not None):
        raise DeviceError(
            f"{device!r} is no device that can be measured; it must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps.",
            "Pass one of these names, or 'auto' for the first accelerator that can be used.",
        )
    return match["kind"], None if match["index"] is None else int(match["index"])


def only(kind: str, index: int | None) -> str:
    """The name of a kind of which a machine has one; raises `DeviceError` for any index but 0."""
    if index:
        numbered(kind, index, 1)
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


def identify(device: str = "auto") -> DeviceIdentity:
    """The static identity of a device, without importing torch and without touching an accelerator.

    A device that cannot be seen this way (no NVML, ROCm, XPU) is named "unknown" with 0 bytes: what can be used is
    `measure`'s business. `auto` is the NVIDIA card that this PyTorch is built for and that is visible, else Apple's,
    else the CPU; ROCm and XPU must be named. A fingerprint is to be made of this on both sides, not of
    `Hardware.identity`. Raises `DeviceError` only for what is no device name.
    """
    kind, index = parse(device)
    if kind == "auto":
        kind = _auto()
    if kind in ("cpu", "mps"):
        return _host_identity(kind)
    is_nvidia = kind == "cuda" and not _torch_is_built_for("hip")
    uuids = nvml.visible_uuids() if is_nvidia else ()
    index = index or 0
    found = nvml.identity(index, uuids[index]) if index < len(uuids) else None
    # What nothing but its own runtime can see.
    return found or DeviceIdentity(
        type=kind, name="unknown", index=index, num_cpus=host.num_cpus(), total_memory_bytes=0
    )


def _host_identity(kind: str) -> DeviceIdentity:
    """The CPU with the memory that this process may use; or Apple's GPU, which has the CPU's name and memory."""
    is_cpu = kind == "cpu"
    container = host.container_memory() if is_cpu else None
    total = host.total_memory_bytes()
    return DeviceIdentity(
        type=kind,
        name=host.cpu_name(),
        driver=None if is_cpu else platform.mac_ver()[0] or None,
        num_cpus=host.num_cpus(),
        allowed_cpus=host.container_cpus() if is_cpu else None,
        total_memory_bytes=total if container is None else min(total, container.limit),
    )


def _auto() -> str:
    if _torch_is_built_for("cuda") and nvml.visible_uuids():
        return "cuda"
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps"
    return "cpu"


def _torch_is_built_for(toolkit: str) -> bool:
    """By torch's own version file: a CPU build beside an NVIDIA card measures the CPU."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get(toolkit) is not None


DEADLINE_SECONDS = 120.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a probing child writes: what the device can do, or the message and next step of a `DeviceError`."""

    hardware: Hardware | None = None
    no_device: tuple[str, str] | None = None


def probe(device: str = "auto", *, deadline_seconds: float = DEADLINE_SECONDS) -> Hardware:
    """What a device can do, measured in a child process: seconds on a CPU, up to a minute where drivers are slow.

    Raises `DeviceError` where the device cannot be used, with its reason, and `RunnerError` where the child dies or
    gives no answer within `deadline_seconds`, with the end of what it wrote to its standard error.
    """
    parse(device)
    busy = host.load_notes()  # before the child adds to it
    with TemporaryDirectory(prefix="autotune_amp-") as folder:
        # A file of its own: neither prints nor anything that holds an inherited pipe open can spoil it.
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        how = _run(
            [sys.executable, "-m", "autotune_amp.hardware.measuring", device, str(answer)], log, deadline_seconds
        )
        if not answer.exists():
            raise RunnerError(
                "\n".join(
                    [f"The process that probes the device {how}.", *log.read_text(errors="replace").splitlines()[-20:]]
                ),
                "Check that `import torch` works in a fresh Python and that the device's driver answers (nvidia-smi).",
            )
        reply = msgspec.json.decode(answer.read_bytes(), type=Answer)
    if reply.no_device is not None:
        raise DeviceError(*reply.no_device)
    assert reply.hardware is not None, "the child answers one of the two"
    return msgspec.structs.replace(reply.hardware, notes=(*busy, *reply.hardware.notes))


def _run(command: list[str], log: Path, deadline_seconds: float) -> str:
    """Run it where and as this process could have; returns how it ended."""
    with log.open("wb") as output:
        try:
            status = subprocess.run(  # noqa: S603  # our own interpreter and module
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)},
                cwd=log.parent,  # "-m" searches the working directory first: it must hold no module of that name
                timeout=deadline_seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"gave no answer within {deadline_seconds:g} seconds"
        except OSError as error:
            return f"could not be started ({error})"
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status} and without an answer"

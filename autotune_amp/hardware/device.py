"""Device kinds: parsing of device names, the interface of each kind, and identifying and probing devices without torch.

To add a kind, write a module with the functions of `Device` and an entry in `DEVICES`.
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

from autotune_amp.core.errors import DeviceError, RunnerError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host, nvml

# Module of each kind, in the order in which `auto` tries them.
DEVICES = {kind: f"autotune_amp.hardware.{kind}" for kind in ("cuda", "xpu", "mps", "cpu")}


class Device(Protocol):
    """Interface of a module for one kind of device. A `device` is a name that `resolve` returned."""

    def is_built(self) -> bool:
        """Return whether this PyTorch was built for this kind of device."""

    def resolve(self, index: int | None) -> str:
        """Return the device string for an index (None: the current device). Raises `DeviceError` with the reason."""

    def identity(self, device: str, /) -> DeviceIdentity:
        """Return the static identity of the device."""

    def compute_capability(self, device: str, /) -> str | None:
        """Return the maker's version of the instruction set, None if there is none."""

    def memory(self, device: str, /) -> DeviceMemory:
        """Return the device's present memory in bytes."""

    def capabilities(self, device: str, /) -> dict[Precision, Capability]:
        """Return every precision with its level and reason, without measured rates."""

    def notes(self, device: str, /) -> tuple[str, ...]:
        """Return notes for the user, read before the micro-benchmark makes the device busy."""


def native(reason: str) -> Capability:
    """Return the capability of a device that computes in the precision itself."""
    return Capability(level="native", reason=reason)


def emulated(reason: str) -> Capability:
    """Return the capability of a device on which PyTorch computes in another precision and converts."""
    return Capability(level="emulated", reason=reason)


def unsupported(reason: str) -> Capability:
    """Return the capability of a device that cannot train in the precision."""
    return Capability(level="unsupported", reason=reason)


def load_device_module(kind: str) -> Device:
    """Import and return the module for a kind of device; imports torch."""
    module: Any = import_module(DEVICES[kind])
    device_module: Device = module
    return device_module


def parse_device_name(device: str) -> tuple[str, int | None]:
    """Split a device name into its kind, ``auto`` or one of `DEVICES`, and its index, None if not given.

    Raises `DeviceError` for an invalid name.
    """
    match = re.fullmatch(rf"(?P<kind>auto|{'|'.join(DEVICES)})(:(?P<index>\d+))?", device)
    if match is None or (match["kind"] == "auto" and match["index"] is not None):
        raise DeviceError(
            f"{device!r} is no device that can be measured; it must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps.",
            "Pass one of these names, or 'auto' for the first accelerator that can be used.",
        )
    return match["kind"], None if match["index"] is None else int(match["index"])


def name_of_single_device(kind: str, index: int | None) -> str:
    """Return the name of a device whose kind exists once in a machine. Raises `DeviceError` for an index above 0."""
    if index:
        name_of_numbered_device(kind, index, 1)
    return kind


def name_of_numbered_device(kind: str, index: int, num_devices: int) -> str:
    """Return the name of device `index`. Raises `DeviceError`, with the number of devices, if it is too large."""
    if index >= num_devices:
        last = f"{kind}:0" if num_devices == 1 else f"{kind}:0 to {kind}:{num_devices - 1}"
        raise DeviceError(
            f"{kind}:{index} does not exist: PyTorch sees {num_devices} {kind} "
            f"device{'s' if num_devices > 1 else ''} here.",
            f"Pass {last}, or check the variables that hide devices (CUDA_VISIBLE_DEVICES, ZE_AFFINITY_MASK).",
        )
    return f"{kind}:{index}"


def identify(device: str = "auto") -> DeviceIdentity:
    """Return the static identity of a device, without importing torch and without touching an accelerator.

    A device that cannot be seen this way (no NVML, ROCm, XPU) is named "unknown" with 0 bytes: only `measure` finds out
    whether it can be used. `auto` is the visible NVIDIA GPU if this PyTorch is built for CUDA, else Apple's GPU, else
    the CPU; ROCm and XPU must be named. A fingerprint must use this identity on both sides, not `Hardware.identity`.
    Raises `DeviceError` only for an invalid device name.
    """
    kind, index = parse_device_name(device)
    if kind == "auto":
        kind = _default_kind()
    if kind in ("cpu", "mps"):
        return _host_identity(kind)
    is_nvidia = kind == "cuda" and not _torch_is_built_for("hip")
    uuids = nvml.visible_uuids() if is_nvidia else ()
    index = index or 0
    nvml_identity = nvml.identity(index, uuids[index]) if index < len(uuids) else None
    # Without an identity the device is visible only to its own runtime.
    return nvml_identity or DeviceIdentity(
        type=kind, name="unknown", index=index, num_cpus=host.num_cpus(), total_memory_bytes=0
    )


def _host_identity(kind: str) -> DeviceIdentity:
    """Return the identity of the CPU with the memory limit of this process, or of Apple's GPU with the CPU's name."""
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


def _default_kind() -> str:
    """Return the kind of device that ``auto`` stands for, without importing torch."""
    if _torch_is_built_for("cuda") and nvml.visible_uuids():
        return "cuda"
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps"
    return "cpu"


def _torch_is_built_for(toolkit: str) -> bool:
    """Return whether torch's version file lists the toolkit: a CPU build cannot use an NVIDIA GPU."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get(toolkit) is not None


DEADLINE_SECONDS = 120.0  # for probing a device: slow drivers take up to a minute to start


class ProbeReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of the probing child process: the hardware, or message and next step of a `DeviceError`."""

    hardware: Hardware | None = None
    no_device: tuple[str, str] | None = None


def probe(device: str = "auto", *, deadline_seconds: float = DEADLINE_SECONDS) -> Hardware:
    """Measure a device in a child process. Takes seconds on a CPU, up to a minute with slow drivers.

    Raises `DeviceError` with the reason if the device cannot be used, and `RunnerError`, with the end of the child's
    standard error, if the child dies or does not answer within `deadline_seconds`.
    """
    parse_device_name(device)
    load_notes = host.load_notes()  # before the child process adds its own load
    with TemporaryDirectory(prefix="autotune_amp-") as folder:
        # The reply is a file: unlike a pipe it is safe from printed text and from processes that inherit it.
        reply_file, log = Path(folder, "answer.json"), Path(folder, "log")
        ending = _run(
            [sys.executable, "-m", "autotune_amp.hardware.measuring", device, str(reply_file)], log, deadline_seconds
        )
        if not reply_file.exists():
            log_lines = log.read_text(errors="replace").splitlines()
            raise RunnerError(
                "\n".join([f"The process that probes the device {ending}.", *log_lines[-20:]]),
                "Check that `import torch` works in a fresh Python and that the device's driver answers (nvidia-smi).",
            )
        reply = msgspec.json.decode(reply_file.read_bytes(), type=ProbeReply)
    if reply.no_device is not None:
        raise DeviceError(*reply.no_device)
    assert reply.hardware is not None, "the child answers one of the two"
    return msgspec.structs.replace(reply.hardware, notes=(*load_notes, *reply.hardware.notes))


def _run(command: list[str], log: Path, deadline_seconds: float) -> str:
    """Run `command` with this process's import path, its output in `log`; return how it ended."""
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

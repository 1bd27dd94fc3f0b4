"""NVIDIA GPUs, and AMD GPUs through ROCm, which PyTorch calls ``cuda`` too.

The thresholds are those of CUDA's table of compute capabilities: fp16 arithmetic 5.3, fp16 tensor cores 7.0, bf16 and
TF32 tensor cores 8.0, fp8 tensor cores 8.9.
"""

from __future__ import annotations

import os
import re
import warnings

import torch

from autotune_amp.core.errors import DeviceError
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host, nvml
from autotune_amp.hardware.device import emulated, name_of_numbered_device, native, unsupported

_GET_STARTED = "https://pytorch.org/get-started/locally/"


def decide(
    compute_capability: tuple[int, int], name: str, hip: str | None, *, is_bf16_native: bool, is_tf32_supported: bool
) -> dict[Precision, Capability]:
    """Return the capability of every precision from the properties of the GPU and of this PyTorch; pure.

    Whether this PyTorch has kernels for the GPU is not checked here: `measure` runs a matrix product.
    """
    if hip is not None:
        return _decide_rocm(f"ROCm {hip}", is_tf32_supported=is_tf32_supported)
    has = f"compute capability {'.'.join(map(str, compute_capability))}"
    return {
        "fp32": native("Every CUDA GPU computes in fp32."),
        "tf32": native(f"TF32 tensor cores ({has}).")
        if is_tf32_supported
        else unsupported(f"TF32 tensor cores begin with 8.0; this GPU has {has}."),
        "bf16": native(f"bf16 tensor cores ({has}).")
        if is_bf16_native
        else emulated(f"bf16 arithmetic begins with 8.0; this GPU has {has} and computes in fp32 with conversions."),
        "fp16": _decide_fp16(compute_capability, name),
        "fp8": native(f"fp8 tensor cores ({has}), for linear layers that torchao makes.")
        if compute_capability >= (8, 9)
        else unsupported(f"fp8 tensor cores begin with 8.9; this GPU has {has}."),
    }


def _decide_fp16(compute_capability: tuple[int, int], name: str) -> Capability:
    if re.search(r"\bGTX 16\d\d", name):
        return unsupported(f"{name}: GPUs of the GTX 16 series give NaN in fp16 convolutions.")
    if compute_capability >= (7, 0):
        return native("fp16 tensor cores.")
    if compute_capability >= (5, 3):
        return native("fp16 arithmetic without tensor cores: it saves memory and may be no faster than fp32.")
    return emulated("fp16 arithmetic begins with compute capability 5.3.")


def _decide_rocm(rocm: str, *, is_tf32_supported: bool) -> dict[Precision, Capability]:
    return {
        "fp32": native(f"Every GPU under {rocm} computes in fp32."),
        "tf32": native(f"{rocm} has TF32 on this architecture (gfx94x, gfx95x).")
        if is_tf32_supported
        else unsupported("TF32 on AMD GPUs begins with gfx94x."),
        "bf16": native(f"{rocm} reports bf16 for every GPU, emulated or not; the measured rate shows which."),
        "fp16": native(f"Every GPU under {rocm} computes in fp16."),
        "fp8": unsupported("fp8 is not probed under ROCm."),
    }


def is_built() -> bool:
    """Return whether this PyTorch was built for CUDA or ROCm."""
    return torch.version.cuda is not None or torch.version.hip is not None


def resolve(index: int | None) -> str:
    """Return ``cuda:N``. Raises `DeviceError` with the driver's own reason, or with the number of devices."""
    if not is_built():
        raise DeviceError(
            f"No CUDA device: this PyTorch ({torch.__version__}) was built without CUDA.",
            f"Install a CUDA build of PyTorch ({_GET_STARTED}), or pass device='cpu'.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `decide` reports the same as torch's warning, with a next step
            # Not is_available(): it may ask NVML, which does not know the driver version that this build needs.
            torch.cuda.init()  # type: ignore[no-untyped-call] # torch does not type it
    except RuntimeError as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" CUDA_VISIBLE_DEVICES is {visible!r}."
        raise DeviceError(
            f"No CUDA device: {str(error).splitlines()[0]}{hidden}",
            "Run nvidia-smi to see whether the driver works, or do without a GPU: pass device='cpu' (--device cpu).",
        ) from error
    return name_of_numbered_device(
        "cuda", torch.cuda.current_device() if index is None else index, torch.cuda.device_count()
    )


def uuid(device: str | torch.device) -> str | None:
    """Return the UUID by which NVML knows the GPU; None under ROCm, whose GPUs NVML does not know."""
    return None if torch.version.hip else str(torch.cuda.get_device_properties(device).uuid)


def identity(device: str) -> DeviceIdentity:
    """Return the GPU's identity, from NVML if it knows the UUID that torch reports, otherwise from torch."""
    index, gpu = torch.device(device).index, uuid(device)
    nvml_identity = None if gpu is None else nvml.identity(index, gpu)
    if nvml_identity is not None:
        return nvml_identity
    properties = torch.cuda.get_device_properties(device)
    return DeviceIdentity(
        type="cuda",
        name=properties.name,
        index=index,
        uuid=None if gpu is None else f"GPU-{gpu}",
        driver=f"ROCm {torch.version.hip}" if torch.version.hip else None,
        num_cpus=host.num_cpus(),
        total_memory_bytes=properties.total_memory,
    )


def compute_capability(device: str) -> str | None:
    """Return the compute capability, e.g. ``8.9``, or the architecture's name under ROCm."""
    properties = torch.cuda.get_device_properties(device)
    return properties.gcnArchName if torch.version.hip else f"{properties.major}.{properties.minor}"


def memory(device: str) -> DeviceMemory:
    """Return the GPU's memory in bytes as the driver counts it: memory of other processes is not free."""
    free, total = torch.cuda.mem_get_info(device)
    gpu = uuid(device)
    caller_bytes = 0 if gpu is None else nvml.held_by_caller(gpu)
    return DeviceMemory(total=total, free=free, available=free, held_by_caller=caller_bytes)


def is_bf16_native(device: str | torch.device) -> bool:
    """Return whether the GPU multiplies in bf16 without emulation."""
    with torch.cuda.device(device):  # torch's own test looks at the current device
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def capabilities(device: str) -> dict[Precision, Capability]:
    """Return the capability of every precision for this GPU; see `decide`."""
    properties = torch.cuda.get_device_properties(device)
    with torch.cuda.device(device):  # torch's own test looks at the current device
        is_tf32_supported = torch.cuda.is_tf32_supported()
    return decide(
        (properties.major, properties.minor),
        properties.name,
        torch.version.hip,
        is_bf16_native=is_bf16_native(device),
        is_tf32_supported=is_tf32_supported,
    )


def notes(device: str) -> tuple[str, ...]:
    """Return a warning for each other process on the GPU, read before this process has a context of its own there."""
    gpu = uuid(device)
    return () if gpu is None else nvml.process_notes(gpu)

"""The Python side of the card: what torch.cuda asks of its C part is answered by the extension.

torch.cuda's own code stays wherever it can: its lazy initialisation, its device count, its memory statistics and its
random numbers run as they do with a card. What is replaced is the C functions under it, streams and events, and
storages that PyTorch makes without the dispatcher.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import virtual_gpu_native as native
from named_cards import CARDS

MIB = 1 << 20
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)

cuda: Any = torch.cuda
c_part: Any = torch._C


class Machine:
    """The cards that the environment describes, and what this process has done to CUDA."""

    def __init__(self) -> None:
        self.num_cards = int(os.environ["VIRTUAL_GPU_NUM"])
        self.bytes = int(os.environ["VIRTUAL_GPU_MIB"]) * MIB
        self.context_bytes = int(os.environ["VIRTUAL_GPU_CONTEXT_MIB"]) * MIB
        self.name = os.environ["VIRTUAL_GPU_NAME"]
        self.named = CARDS.get(os.environ.get("VIRTUAL_GPU_CARD", ""))
        # Of each card; the last stands for those after it.
        self.capabilities = os.environ["VIRTUAL_GPU_CC"].split(",")
        self.is_broken = "VIRTUAL_GPU_BROKEN" in os.environ
        self.is_exclusive = "VIRTUAL_GPU_EXCLUSIVE" in os.environ
        self.is_poisoned = False
        self.is_bad_fork = False

    def capability(self, card: int) -> tuple[int, int]:
        major, minor = self.capabilities[min(card, len(self.capabilities) - 1)].split(".")
        return int(major), int(minor)

    def uuid(self, card: int) -> str:
        """As the NVML library names it, without its GPU-."""
        return f"{0xA0 + card:08x}-1111-2222-3333-444444444444"

    def visible(self) -> list[int]:
        """The cards that CUDA_VISIBLE_DEVICES leaves, by torch's reading of it; a MIG instance is a part of card 0."""
        named = cuda._parse_visible_devices()
        if named and isinstance(named[0], str):
            if named[0].startswith("MIG-"):
                return [0]
            named = cuda._transform_uuid_to_ordinals(named, [f"GPU-{self.uuid(i)}" for i in range(self.num_cards)])
        unknown = next((place for place, card in enumerate(named) if card >= self.num_cards), len(named))
        return list(named[:unknown])

    def touch(self) -> int:
        """As cuInit: it reads what is visible, and from here on no forked child can use CUDA. The number of devices."""
        self.is_poisoned = True
        visible = self.visible()
        native.set_visible(visible)
        return len(visible)

    def forked(self) -> None:
        self.is_bad_fork = self.is_poisoned
        native.forked()


def install() -> None:
    """Called once torch has been imported."""
    machine = Machine()
    with _silent_registration():
        native.install(os.environ["VIRTUAL_GPU_LEDGER"], machine.bytes, machine.context_bytes, machine.is_exclusive)
    native.set_visible(list(range(machine.num_cards)))
    if machine.named:
        native.name_card(machine.named.numbers(float(os.environ.get("VIRTUAL_GPU_MAGNIFICATION", "1"))))
    os.register_at_fork(after_in_child=machine.forked)
    _replace_initialisation(machine)
    _replace_devices(machine)
    _replace_memory()
    _replace_streams()
    _replace_accelerator()
    _replace_storages()


@contextmanager
def _silent_registration() -> Iterator[None]:
    """torch's C++ warns on standard error that kernels are registered over others, as they are on purpose."""
    standard_error = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(standard_error, 2)
        os.close(standard_error)
        os.close(nowhere)


def _replace_initialisation(machine: Machine) -> None:
    def init() -> None:
        num_devices = machine.touch()
        if machine.is_broken:
            raise RuntimeError(TOO_OLD)
        if num_devices == 0:
            raise RuntimeError("No CUDA GPUs are available")
        if settings := os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
            c_part._accelerator_setAllocatorSettings(settings)  # CUDA's allocator refuses wrong ones as it starts
        cuda.default_generators = tuple(native.default_generator(device) for device in range(num_devices))

    def num_devices() -> int:
        num_devices = machine.touch()
        if not machine.is_broken:
            return num_devices
        warnings.warn(f"CUDA initialization: {TOO_OLD}", stacklevel=2)
        return 0

    c_part._cuda_init = init
    c_part._cuda_getDeviceCount = num_devices
    c_part._cuda_isInBadFork = cuda._is_in_bad_fork = lambda: machine.is_bad_fork


def _replace_devices(machine: Machine) -> None:
    def exchange(device: int) -> int:
        cuda._lazy_init()
        before: int = native.device()
        native.set_device(device)
        return before

    def maybe_exchange(device: int) -> int:  # a function of its own, as torch.compile asks of each that it knows
        return -1 if device < 0 else exchange(device)

    def properties(device: int) -> SimpleNamespace:
        card = machine.visible()[device]
        major, minor = machine.capability(card)
        return SimpleNamespace(
            name=machine.name,
            major=major,
            minor=minor,
            total_memory=machine.bytes,
            uuid=machine.uuid(card),
            multi_processor_count=machine.named.num_multiprocessors if machine.named else 108,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=49152,
            shared_memory_per_block_optin=166912,
            L2_cache_size=40 * MIB,
            warp_size=32,
            is_integrated=0,
            is_multi_gpu_board=0,
            gcnArchName="",
        )

    c_part._cuda_getDevice = native.device
    c_part._cuda_setDevice = native.set_device
    c_part._cuda_exchangeDevice = cuda._exchange_device = exchange
    c_part._cuda_maybeExchangeDevice = cuda._maybe_exchange_device = maybe_exchange
    c_part._cuda_synchronize = native.synchronize
    c_part._cuda_hasPrimaryContext = native.has_context
    c_part._cuda_canDeviceAccessPeer = lambda device, peer: False
    c_part._cuda_ipc_collect = lambda: None
    if machine.named:  # by whichever build has kernels for it: CUDA 13 dropped the V100
        c_part._cuda_getArchFlags = lambda: "sm_" + machine.named.compute_capability.replace(".", "")
    c_part._cuda_set_sync_debug_mode = native.set_sync_debug_mode
    c_part._cuda_get_sync_debug_mode = native.sync_debug_mode
    cuda._get_device_properties = properties


def _replace_memory() -> None:
    def stats(device: int) -> dict[str, Any]:
        found = native.memory_stats(device)
        allocated = {"all": {"current": found["allocated"], "peak": found["peak_allocated"]}}
        return {
            "allocated_bytes": allocated,
            "active_bytes": allocated,
            "requested_bytes": allocated,
            "reserved_bytes": {"all": {"current": found["reserved"], "peak": found["peak_reserved"]}},
            "num_alloc_retries": found["num_retries"],
            "num_ooms": found["num_ooms"],
        }

    c_part._cuda_memoryStats = stats
    c_part._cuda_resetPeakMemoryStats = native.reset_peaks
    c_part._cuda_resetAccumulatedMemoryStats = lambda device: None
    c_part._cuda_emptyCache = native.empty_cache
    c_part._cuda_setMemoryFraction = native.set_memory_fraction
    c_part._cuda_getMemoryFraction = native.memory_fraction
    cuda._cudart = SimpleNamespace(cudaMemGetInfo=native.memory_info)


class Stream(torch.Stream):
    """torch.cuda.Stream's arguments on torch's own stream, which asks the guard."""

    cuda_stream = 0

    def __new__(cls, device: Any = None, priority: int = 0, **identity: int) -> Stream:
        if identity:
            return super().__new__(cls, **identity)
        index = cuda._utils._get_device_index(device, optional=True)
        return super().__new__(cls, device=torch.device("cuda", index), priority=priority)


class Event:
    """torch.cuda.Event's arguments; what comes is torch's own event, since torch compares no subclass of it."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> torch.Event:
        return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)


def _replace_streams() -> None:
    def stream(device: int) -> tuple[int, int, int]:
        found = torch.Stream.__new__(torch.Stream, device=torch.device("cuda", device))
        return found.stream_id, found.device_index, found.device_type

    c_part._cuda_getCurrentStream = c_part._cuda_getDefaultStream = stream
    c_part._cuda_setStream = lambda stream_id, device_index, device_type: native.set_device(device_index)
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    c_part._cuda_isCurrentStreamCapturing = lambda: False
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: False


def _replace_accelerator() -> None:
    """torch.accelerator goes past torch.cuda to the C++ of a device type that was never set up."""
    accelerator: Any = torch.accelerator
    accelerator.empty_cache = accelerator.memory.empty_cache = cuda.empty_cache


def _replace_storages() -> None:
    """Storages made without the dispatcher: copy.deepcopy, and torch.load to a card."""
    replaced: Any = torch.UntypedStorage
    clone_on_host, to_host = replaced.clone, replaced.to

    def copy_to(storage: Any, device: torch.device) -> Any:
        copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        copy.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
        return copy.untyped_storage()

    def clone(storage: Any) -> Any:
        return copy_to(storage, storage.device) if storage.device.type == "cuda" else clone_on_host(storage)

    def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
        device = torch.device(device)
        if device.type != "cuda":
            return to_host(storage, device=device, non_blocking=non_blocking)
        return copy_to(storage, torch.device("cuda", cuda._utils._get_device_index(device, optional=True)))

    replaced.clone = clone
    replaced.to = to

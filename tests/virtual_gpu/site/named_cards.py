"""Cards by name: what their data sheets say, for a program that looks at the card and for the card's clock."""

from __future__ import annotations

from typing import NamedTuple

# What eager PyTorch takes of the host for one operator, the launch of its kernel included: 5 to 10 us are usual.
LAUNCH_SECONDS = 8e-6


class NamedCard(NamedTuple):
    """One card.

    `fp32` to `fp16` are FLOP/s of dense matrix products, on tensor cores that add in fp32 where the card has them.
    Without those of a precision, TF32 is fp32, and bf16 (None) is reckoned in fp32. `host_link` is one direction of the
    PCI Express link, in bytes per second as `memory` is.
    """

    name: str
    compute_capability: str
    num_multiprocessors: int
    memory_mib: int
    memory: float
    host_link: float
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float
    source: str

    def variables(self) -> dict[str, str]:
        """The machine's variables that this card sets."""
        return {
            "VIRTUAL_GPU_NAME": self.name,
            "VIRTUAL_GPU_CC": self.compute_capability,
            "VIRTUAL_GPU_MIB": str(self.memory_mib),
        }

    def numbers(self, magnification: float) -> dict[str, float]:
        """What the clock reckons with."""
        return {
            "fp32": self.fp32,
            "tf32": self.tf32 or 0.0,
            "bf16": self.bf16 or self.fp32,
            "fp16": self.fp16,
            "memory": self.memory,
            "host_link": self.host_link,
            "num_multiprocessors": self.num_multiprocessors,
            "launch_seconds": LAUNCH_SECONDS,
            "magnification": magnification,
        }


CARDS = {
    "T4": NamedCard(
        name="Tesla T4",
        compute_capability="7.5",
        num_multiprocessors=40,
        memory_mib=16 << 10,
        memory=320e9,
        host_link=16e9,
        fp32=8.1e12,
        tf32=None,
        bf16=None,
        fp16=65e12,
        source="NVIDIA T4 data sheet and product brief (PB-09256-001); Turing architecture white paper",
    ),
    "V100": NamedCard(
        name="Tesla V100-SXM2-16GB",
        compute_capability="7.0",
        num_multiprocessors=80,
        memory_mib=16 << 10,
        memory=900e9,
        host_link=16e9,
        fp32=15.7e12,
        tf32=None,
        bf16=None,
        fp16=125e12,
        source="NVIDIA V100 data sheet, NVLink version; Volta architecture white paper",
    ),
    "A100": NamedCard(
        name="NVIDIA A100-SXM4-40GB",
        compute_capability="8.0",
        num_multiprocessors=108,
        memory_mib=40 << 10,
        memory=1555e9,
        host_link=32e9,
        fp32=19.5e12,
        tf32=156e12,
        bf16=312e12,
        fp16=312e12,
        source="NVIDIA A100 data sheet, 40 GB SXM; Ampere (GA100) architecture white paper",
    ),
    "H100": NamedCard(
        name="NVIDIA H100 80GB HBM3",
        compute_capability="9.0",
        num_multiprocessors=132,
        memory_mib=80 << 10,
        memory=3350e9,
        host_link=64e9,
        fp32=67e12,
        tf32=494.5e12,
        bf16=989.5e12,
        fp16=989.5e12,
        source="NVIDIA H100 data sheet, SXM, halved where it counts sparsity; Hopper architecture white paper",
    ),
    "RTX4090": NamedCard(
        name="NVIDIA GeForce RTX 4090",
        compute_capability="8.9",
        num_multiprocessors=128,
        memory_mib=24 << 10,
        memory=1008e9,
        host_link=32e9,
        fp32=82.6e12,
        tf32=82.6e12,
        bf16=165.2e12,
        fp16=165.2e12,
        source="NVIDIA Ada GPU architecture white paper, appendix A, without sparsity",
    ),
}

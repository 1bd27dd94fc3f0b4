from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from autotune_amp.hardware import identify, probe

if TYPE_CHECKING:
    from autotune_amp.core.hardware import Hardware

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.hip is not None, reason="needs an NVIDIA GPU, and this is a ROCm build of torch"),
]


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return probe("cuda")


def test_the_probed_card_is_the_one_that_torch_sees(hardware: Hardware) -> None:
    properties = torch.cuda.get_device_properties(0)
    assert hardware.device == "cuda:0"
    assert hardware.compute_capability == f"{properties.major}.{properties.minor}"
    assert hardware.identity.name == properties.name
    assert hardware.identity.uuid == f"GPU-{properties.uuid}"
    memory = hardware.memory
    assert 0 < memory.available <= memory.free <= memory.total <= hardware.identity.total_memory_bytes


def test_identify_says_the_same_without_touching_the_card(hardware: Hardware) -> None:
    if hardware.identity.driver is None:
        pytest.skip("needs NVML (libnvidia-ml), which this machine does not show")
    assert identify("cuda:0") == identify("cuda") == identify("auto") == hardware.identity


@pytest.mark.real_gpu("speed of its own")
def test_every_native_precision_is_as_fast_as_a_card(hardware: Hardware) -> None:
    for precision, capability in hardware.precisions.items():
        if capability.level == "native":
            assert (capability.matmul_flops_per_second or 0) > 1e9, precision

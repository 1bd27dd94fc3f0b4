"""Rates of the data sheets, by the names that drivers report."""

from __future__ import annotations

import pytest

from autotune_amp.hardware.data_sheets import data_sheet_flops_per_second


@pytest.mark.parametrize(
    ("name", "bf16_tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H200", 989.5),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_a_card_has_its_dense_rate(name: str, bf16_tera: float) -> None:
    assert data_sheet_flops_per_second(name, "bf16") == pytest.approx(bf16_tera * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 SXM5 MIG 1g.10gb",
        "Intel(R) Xeon(R) Processor",
    ],
)
def test_another_chip_of_nearly_the_same_name_has_none(name: str) -> None:
    assert data_sheet_flops_per_second(name, "bf16") is None


def test_a_precision_that_a_card_lacks_has_none() -> None:
    assert data_sheet_flops_per_second("NVIDIA A100-SXM4-80GB", "fp8") is None

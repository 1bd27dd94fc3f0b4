from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.errors import DeviceError
from autotune_amp.hardware.device import numbered, only, parse


@pytest.mark.parametrize(
    ("device", "parsed"),
    [
        ("auto", ("auto", None)),
        ("cpu", ("cpu", None)),
        ("cuda", ("cuda", None)),
        ("cuda:12", ("cuda", 12)),
        ("xpu:1", ("xpu", 1)),
        ("mps:0", ("mps", 0)),
    ],
)
def test_names_are_parsed(device: str, parsed: tuple[str, int | None]) -> None:
    assert parse(device) == parsed


@pytest.mark.parametrize("device", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "auto:0", "tpu:0"])
def test_what_is_no_name_is_refused_with_the_names_that_are(device: str) -> None:
    with pytest.raises(DeviceError, match=r"must be auto, cpu, cuda, cuda:N, xpu, xpu:N or mps"):
        parse(device)


def test_there_is_one_cpu() -> None:
    assert only("cpu", None) == only("cpu", 0) == "cpu"
    with pytest.raises(DeviceError, match="only one cpu"):
        only("cpu", 1)


@given(index=st.integers(0, 20), num_devices=st.integers(1, 16))
def test_an_index_out_of_range_says_how_many_there_are(index: int, num_devices: int) -> None:
    if index < num_devices:
        assert numbered("cuda", index, num_devices) == f"cuda:{index}"
    else:
        with pytest.raises(DeviceError, match=rf"cuda:{index} was asked for, but PyTorch sees {num_devices} cuda dev"):
            numbered("cuda", index, num_devices)

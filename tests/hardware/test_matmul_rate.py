from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from autotune_amp.hardware import measuring

if TYPE_CHECKING:
    from autotune_amp.core.precisions import Precision


class MadeDevice:
    """A device on a clock of its own: a product takes `overhead_seconds` and its arithmetic at `rate`."""

    def __init__(self, rate: float, overhead_seconds: float) -> None:
        self.rate, self.overhead_seconds = rate, overhead_seconds
        self.now = 0.0
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def product(self, device: str, precision: Precision, size: int) -> int:
        del device, precision
        self.sizes.append(size)
        return size

    def time(self, size: int, device: str) -> float:
        del device
        seconds: float = self.overhead_seconds + 2 * size**3 / self.rate
        self.now += seconds
        return seconds

    def measured(self, *, seconds: float, max_bytes: int) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "perf_counter", self.clock)
            patch.setattr(measuring, "_product", self.product)
            patch.setattr(measuring, "_time_product", self.time)
            return measuring.flops_per_second("cpu", "fp16", seconds=seconds, max_bytes=max_bytes)


def test_it_takes_its_time_and_little_more_and_keeps_within_the_memory_given() -> None:
    for rate in (1e8, 1e16):
        device = MadeDevice(rate, overhead_seconds=0)
        assert device.measured(seconds=0.2, max_bytes=2**40) == pytest.approx(rate)
        assert 0.2 <= device.now <= 0.3
    device = MadeDevice(rate=2e11, overhead_seconds=0.004)  # a core shared with another process
    assert device.measured(seconds=0.2, max_bytes=2**40) > 0.4 * device.rate
    device = MadeDevice(rate=1e16, overhead_seconds=0)
    device.measured(seconds=0.2, max_bytes=3 * 4 * 1024**2)
    assert device.sizes == [128, 256, 512, 1024]


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_product_is_computed_in_its_precision_and_has_a_rate(precision: Precision, dtype: torch.dtype) -> None:
    result = measuring._product("cpu", precision, 16)()
    assert result.dtype is dtype
    assert result.float().std() > 1  # random data, not zeros
    assert measuring.flops_per_second("cpu", precision, seconds=0.02, max_bytes=2**20) > 0


@pytest.mark.parametrize(("precision", "mode"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_fp32_mode_is_set_and_put_back_after_an_error_too(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, mode: str
) -> None:
    flags = torch.backends.cuda.matmul
    before = flags.fp32_precision
    seen: list[str] = []

    def refuse(*_: object) -> None:
        seen.append(flags.fp32_precision)
        raise RuntimeError("not implemented")

    monkeypatch.setattr(measuring, "_product", refuse)
    with pytest.raises(RuntimeError, match="not implemented"):
        measuring.flops_per_second("cpu", precision, seconds=0.0, max_bytes=0)
    assert (seen, flags.fp32_precision) == ([mode], before)

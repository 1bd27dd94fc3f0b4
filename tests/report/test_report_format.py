from __future__ import annotations

import pytest

from autotune_amp.core.text import clock, count, duration, exact, flops, number, one_line, printable, size, times

MIB = 2**20


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (number(12345.6), "12,346"),
        (number(41.52), "41.5"),
        (number(0.08523), "0.0852"),
        (exact(2.0**20), "1048576"),
        (exact(2.0**-10), "2^-10"),
        (exact(0.3), "0.3"),
        (size(1023), "1,023 B"),
        (size(612 * MIB), "612 MiB"),
        (size(1.52 * 1024 * MIB), "1.52 GiB"),
        (duration(0.0776), "77.6 ms"),
        (duration(3.14), "3.1 s"),
        (duration(59.6), "1 min 00 s"),
        (duration(7500), "2 h 05 min"),
        (clock(65.9), "1:05"),
        (flops(1.24e12), "1.24 TFLOP/s"),
        (flops(8e5), "0.8 MFLOP/s"),
        (times(1.344), "1.34x"),
        (count(1, "trial"), "1 trial"),
        (count(2, "process", "processes"), "2 processes"),
        (one_line(" a\n\tb\x1b[0m\udcff "), "a b [0m"),
        (printable("a\n\tb\x1b[0m\udcff"), "a\n\tb\\x1b[0m\\udcff"),
    ],
)
def test_numbers_and_foreign_text_are_legible(shown: str, text: str) -> None:
    assert shown == text

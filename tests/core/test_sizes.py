"""Sizes as people give them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_amp.core.text import parse_size, size

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_a_size_with_its_unit_is_so_many_bytes(figure: int, unit: str, space: str, is_lower: bool) -> None:
    given = f"{figure}{space}{unit}"
    assert parse_size(given.lower() if is_lower else given) == figure * UNITS[unit]


@given(st.integers(1, 2**62))
def test_plain_bytes_stay_what_they_are(num_bytes: int) -> None:
    assert parse_size(num_bytes) == parse_size(str(num_bytes)) == num_bytes


@given(st.integers(1024, 2**50))
def test_what_is_shown_can_be_given_again(num_bytes: int) -> None:
    shown = size(num_bytes).replace(",", "")
    assert parse_size(shown) == pytest.approx(num_bytes, rel=0.01)


def test_a_part_of_a_unit() -> None:
    assert parse_size("1.5 GiB") == 3 * 2**29


@pytest.mark.parametrize(
    "given", ["", "GiB", "-1GiB", "0", "0.1B", "1.5", "16G", "16 gigs", "16GiB ", "16iB", "1e9", "²GiB"]
)
def test_what_is_no_size(given: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its message is who asks' to make
        parse_size(given)


@pytest.mark.parametrize("given", [None, True, 1.5, -1, 0, [16]])
def test_what_is_no_size_and_no_text(given: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - as above
        parse_size(given)

"""Memory against the batch size: the model that a search and a memory profile share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def fit_memory(points: Iterable[tuple[int, int]]) -> Callable[[float], float] | None:
    """Bytes that count against the limit at any batch size, M(b) = max(m0, m1 + m2·b), of (batch size, bytes) points.

    The smallest batches sit on the optimizer's plateau m0 (studies/README.md), so the line is that through the two
    largest; memory never falls with the batch size. None with fewer than two sizes.
    """
    at = sorted(dict(points).items())
    if len(at) < 2:
        return None
    (b1, m1), (b2, m2) = at[-2:]
    slope = max(0.0, (m2 - m1) / (b2 - b1))
    m0 = min(m for _, m in at)
    return lambda size: max(m0, m2 + slope * (size - b2))

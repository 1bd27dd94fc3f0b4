"""The weights with which the gradients of micro-batches add up to that of the whole batch; pure arithmetic.

With g of the whole batch and g_i of its micro-batches, |g - sum w_i g_i|^2 is asked for the plain mean, the sum and the
shares of what can be counted in the batch, and then minimised over w. It is held against what rounding in fp32 does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autotune_amp.core.fidelity import AccumulationVerdict
from autotune_amp.numerics.batches import tensors

IGNORED_LABEL = -100  # torch's own, in cross_entropy
# Moved weights round anew in every operation, as a batch cut in pieces does; this many times that is still rounding.
ROUNDING_MARGIN = 8.0
_MAX_LOSS_ERROR = 1e-3
_MAX_WEIGHT_ERROR = 0.1  # of 1/k: weights found less exactly are no finding


@dataclass(frozen=True)
class Sums:
    """Scalar products of the gradients, in fp64: `gram[0, 0]` is |g|^2, `gram[0, i]` of g and g_i, and so on.

    `rounding` is what another rounding does to g, relative to it; `unit_roundoff` that of one operation.
    """

    gram: Tensor
    losses: tuple[float, ...]
    rounding: float
    unit_roundoff: float

    def error(self, weights: Tensor) -> float:
        """|g - sum w_i g_i| over |g|."""
        coefficients = torch.cat([torch.ones(1, dtype=torch.float64), -weights])
        return math.sqrt(max(0.0, float(coefficients @ self.gram @ coefficients)) / float(self.gram[0, 0]))

    def tolerance(self, weights: Tensor) -> float:
        """The error that rounding explains."""
        norms = self.gram.diagonal().sqrt()
        parts = float((weights.abs() * norms[1:]).sum() / norms[0])
        return ROUNDING_MARGIN * self.rounding + 2 * self.unit_roundoff * (1 + parts)

    def fits(self, weights: Tensor) -> bool:
        """Whether these weights give the whole batch's gradient."""
        return self.error(weights) <= self.tolerance(weights)

    def best(self) -> tuple[Tensor, float]:
        """The weights of least error, and how far off they may be: endlessly where micro-batches are too much alike."""
        parts = self.gram[1:, 1:]
        weights = torch.linalg.pinv(parts, rtol=1e-12, hermitian=True) @ self.gram[0, 1:]
        least = float(torch.linalg.eigvalsh(parts)[0])
        blur = self.tolerance(weights) * math.sqrt(float(self.gram[0, 0]) / least) if least > 0 else math.inf
        return weights, blur

    def do_losses_fit(self, weights: Tensor) -> bool:
        """Whether these weights give the whole batch's loss too."""
        parts = torch.tensor(self.losses[1:], dtype=torch.float64) * weights
        size = max(abs(self.losses[0]), float(parts.abs().sum()))
        return abs(self.losses[0] - float(parts.sum())) <= _MAX_LOSS_ERROR * size


@dataclass(frozen=True)
class Finding:
    """`weights` are those found; of *inexact*, the best there are. `share` is what they are proportional to."""

    verdict: AccumulationVerdict
    weights: Tensor
    share: str | None = None


def judge(sums: Sums, shares: Sequence[tuple[str, Tensor]]) -> Finding:
    """The simplest combination that fits: of few or collinear gradients many do."""
    num = len(sums.gram) - 1
    ones = torch.ones(num, dtype=torch.float64)
    if sums.fits(ones / num):
        return Finding("mean", ones / num)
    if sums.fits(ones):
        return Finding("sum", ones)
    for name, weights in shares:
        if sums.fits(weights):
            return Finding("weighted", weights, name)
    best, blur = sums.best()
    if not sums.fits(best):
        return Finding("inexact", best)
    if blur > _MAX_WEIGHT_ERROR / num:
        return Finding("unchecked", best)
    return Finding("weighted" if sums.do_losses_fit(best) else "inexact", best)


def counted_shares(pieces: Sequence[object]) -> list[tuple[str, Tensor]]:
    """What a loss may average over, and each micro-batch's share of it: entries of the batch's tensors that count.

    `[:, 1:]` stands where the first of each sequence is left out, as a language model does that shifts its labels.
    """
    by_piece = [dict(tensors(piece)) for piece in pieces]
    names = [name for name in by_piece[0] if all(name in of_piece for of_piece in by_piece)]
    shares = []
    for text, count in _COUNTS.items():
        for name in names:
            columns = [of_piece[name] for of_piece in by_piece]
            for place, kept in (("", columns), ("[:, 1:]", [column[:, 1:] for column in columns if column.dim() > 1])):
                counts = torch.tensor([count(column) for column in kept], dtype=torch.float64)
                is_known = len(counts) == len(columns) and bool(counts.isfinite().all()) and float(counts.sum()) > 0
                all_count = text != _ALL and counts.tolist() == [column.numel() for column in kept]
                if is_known and not all_count:
                    shares.append((f"{name}{place}{text}", counts / counts.sum()))
    return shares


def _entries_where(column: Tensor, counts: Tensor) -> float:
    """NaN, which no share is made of, where there are no whole numbers."""
    is_whole = not (column.is_floating_point() or column.is_complex())
    return float(counts.sum()) if is_whole else math.nan


def _sum(column: Tensor) -> float:
    return math.nan if column.is_complex() or bool((column < 0).any()) else float(column.cpu().double().sum())


_ALL = ".numel()"
# In the order of how telling they are.
_COUNTS: dict[str, Callable[[Tensor], float]] = {
    f" != {IGNORED_LABEL}": lambda column: _entries_where(column, column != IGNORED_LABEL),
    " == 1": lambda column: _entries_where(column, column == 1),
    " != 0": lambda column: _entries_where(column, column != 0),
    _ALL: lambda column: float(column.numel()),
    ".sum()": _sum,
}

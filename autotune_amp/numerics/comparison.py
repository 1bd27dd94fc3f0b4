"""Comparison of low-precision gradients with fp32 ones, per parameter, in units of the noise between batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from autotune_amp.core.intervals import t_quantile
from autotune_amp.core.outcome import GradientDamage
from autotune_amp.numerics.grading import least_common_error
from autotune_amp.numerics.passes import Gradients, wide_dtype

# Smaller entries, relative to the largest of their parameter, are negligible: not worth a loss scale.
COUNTS = 2.0**-12
# A gradient that different rounding in fp32 changes by more than this share is rounding noise, not a signal: the
# gradient of a key's bias in attention, for one, is zero in exact arithmetic.
MAX_OWN_NOISE = 0.1
_MAX_MODULES = 40  # rows of a chart
MIN_VARIANCE = 1e-6  # share of a gradient's square: less variance between batches is rounding of the sums
_STRETCH = 2**24  # entries of a gradient that are processed at a time

K = TypeVar("K")


@dataclass
class GradientSums:
    """Sums over the entries of parameters and over batches; `+` adds those of further parameters.

    `errors` [batch, batch] holds the scalar products of the rounding errors of each two batches' gradients, `total` is
    the squared length of the sum of all fp32 gradients, the others are sums of squares and products, and counts.
    """

    errors: Tensor
    total: float = 0.0
    reference: float = 0.0
    low: float = 0.0
    product: float = 0.0
    num_counting: float = 0.0
    num_flushed: float = 0.0

    def __add__(self, other: GradientSums) -> GradientSums:
        return GradientSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def damage(self, name: str) -> GradientDamage:
        """Return the errors in the gradient of the parameter or module `name`.

        Rounding's variance is relative to the variance between batches, or to the gradient itself if all batches are
        alike. The cosine is 1 if both gradients are zero.
        """
        num_batches = len(self.errors)
        square = self.reference / num_batches
        between = (num_batches * self.reference - self.total) / (num_batches * max(1, num_batches - 1))
        are_alike = num_batches < 2 or between <= MIN_VARIANCE * square
        yardstick = square if are_alike else between
        norms = math.sqrt(self.reference) * math.sqrt(self.low)
        common, half = common_error(self.errors)
        half = None if are_alike else half  # for batches that are alike the noise is alike too
        least, most = (_root(_ratio(common + side * (half or 0.0), square)) for side in (-1, 1))
        return GradientDamage(
            name=name,
            noise_ratio=math.sqrt(_ratio(float(self.errors.trace()) / num_batches, yardstick)),
            common_error=_root(_ratio(common, square)),
            common_error_interval=None if half is None else (least, most),
            cosine=min(1.0, self.product / norms) if norms else float(self.reference == self.low),
            norm_ratio=math.sqrt(self.low / self.reference) if self.reference else 1.0,
            flushed_share=self.num_flushed / self.num_counting if self.num_counting else 0.0,
        )


def common_error(errors: Tensor) -> tuple[float, float | None]:
    """Return the squared length of the error common to all batches, and half the width of its 95 % interval.

    `errors` [K, K] holds the scalar products of the errors of K batches. The mean product of two different batches
    contains no noise: the rest is common. The interval is the jackknife's, over batches: None for fewer than three.
    """
    num_batches = len(errors)
    if num_batches < 2:
        return 0.0, None
    pairs = errors - torch.diag(errors.diagonal())
    common = float(pairs.sum()) / (num_batches * (num_batches - 1))
    if num_batches < 3:
        return common, None
    left_out = (pairs.sum() - 2 * pairs.sum(1)) / ((num_batches - 1) * (num_batches - 2))
    variance = (num_batches - 1) / num_batches * float((left_out - left_out.mean()).square().sum())
    return common, t_quantile(num_batches - 1) * math.sqrt(variance)


class Comparison(NamedTuple):
    """Gradient errors of the whole model, over the parameters with a signal, and per parameter, in the model's order.

    `modules` are the modules that hold these parameters, only the noisiest if there are many.
    """

    whole: GradientDamage
    parameters: list[GradientDamage]
    modules: list[GradientDamage]

    def findings(self) -> dict[str, Any]:
        """Return the fields of `Findings` that a comparison fills, by name."""
        whole, parameters = self.whole, self.parameters
        return {
            "noise_ratio": whole.noise_ratio,
            "common_error": whole.common_error,
            "common_error_interval": whole.common_error_interval,
            "norm_ratio": whole.norm_ratio,
            "flushed_share": whole.flushed_share,
            "most_flushed": max(parameters, key=attrgetter("flushed_share"), default=None),
            "most_common": max(parameters, key=least_common_error, default=None),
            "shortest": min(parameters, key=attrgetter("norm_ratio"), default=None),
        }


class GradientComparer:
    """Accumulator of gradients in the low precision and in fp32, batch by batch, over the parameters in `names`.

    Only the errors of a batch are kept, in bf16, which changes no scalar product by more than its rounding; for a
    sparse gradient only those of the stored entries. A parameter without a gradient counts as zero.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._groups: list[_Group] = []
        self._order: list[str] = []
        self._num_batches = 0

    def add(self, low: Gradients, reference: Gradients) -> None:
        """Add a batch; for dense gradients without a synchronisation with the device."""
        given = {name: gradient for name, gradient in (low | reference).items() if name in self._names}
        new = {name: gradient for name, gradient in given.items() if name not in self._order}
        self._order += new
        self._groups += [_Group(some, self._num_batches) for some in side_by_side(new)]
        for group in self._groups:
            group.add(low, reference)
        self._num_batches += 1

    def compared(self) -> Comparison:
        """Compare the gradients of all added batches, of which there must be one at least."""
        found = {name: sums for group in self._groups for name, sums in group.sums().items()}
        parameters = {name: found[name] for name in self._order if name in found}  # all but empty parameters
        modules: dict[str, GradientSums] = {}
        nothing = torch.zeros(self._num_batches, self._num_batches, dtype=torch.float64)
        whole = GradientSums(nothing)
        for name, sums in parameters.items():
            whole = whole + sums
            module = name.rpartition(".")[0]
            modules[module] = modules.get(module, GradientSums(nothing)) + sums
        damages = [sums.damage(name) for name, sums in modules.items()]
        noisiest = sorted(damages, key=attrgetter("noise_ratio"), reverse=True)[:_MAX_MODULES]
        return Comparison(
            whole=whole.damage(""),
            parameters=[sums.damage(name) for name, sums in parameters.items()],
            modules=[damage for damage in damages if damage in noisiest],
        )


class _Group:
    """Sums over batches for the gradients of a group of parameters made by `side_by_side`.

    The gradients were zero in the first `num_before` batches. A sparse gradient has a group of its own, dense in the
    stored entries.
    """

    def __init__(self, like: Gradients, num_before: int) -> None:
        self._zeros = {name: _zero_like(gradient) for name, gradient in like.items()}
        self._num_before = num_before
        self._errors: list[Tensor] = []  # per batch: flat, or [entry, column] if sparse
        self._indices: list[Tensor] = []  # per batch: [dimension, entry], if sparse
        self._total: Tensor | None = None
        self._numbers: Tensor | None = None  # [field of Sums, parameter], from `reference` on

    def add(self, low: Gradients, reference: Gradients) -> None:
        """Add a batch."""
        ours, theirs = ([each.get(name, zero) for name, zero in self._zeros.items()] for each in (low, reference))
        total: Tensor | None = None
        if theirs[0].is_sparse:  # each with the stored entries of both
            one, total = (ours[0] + 0 * theirs[0]).coalesce(), (theirs[0] + 0 * ours[0]).coalesce()
            self._indices.append(total.indices())
            ours, theirs = [one.values()], [total.values()]
        sizes = [_real(each).numel() for each in theirs]
        low_flat, flat = (torch.cat([_real(each).flatten() for each in some]) for some in (ours, theirs))
        numbers = _numbers(low_flat, flat, sizes)
        total = flat if total is None else total
        self._total = total if self._total is None else self._total + total
        self._numbers = numbers if self._numbers is None else self._numbers + numbers
        error = (low_flat - flat).bfloat16()
        if self._indices:
            num_entries = self._indices[-1].shape[1]
            error = error.reshape(num_entries, sizes[0] // max(1, num_entries))
        self._errors.append(error)

    def sums(self) -> dict[str, GradientSums]:
        """Return the sums of each parameter; synchronizes with the device."""
        assert self._total is not None
        assert self._numbers is not None
        if self._indices:
            total, errors = _real(self._total.coalesce().values()).flatten(), [*_at_all(self._indices, self._errors)]
            sizes = [len(total)]
        else:
            total, errors = self._total, self._errors
            sizes = [_real(zero).numel() for zero in self._zeros.values()]
        # A single parameter may be large: a copy of all of its errors would double their memory.
        parts = [errors] if len(sizes) == 1 else torch.split(torch.stack(errors), sizes, dim=1)
        products = torch.stack([_products(part) for part in parts]).cpu().double()
        products = functional.pad(products, (self._num_before, 0, self._num_before, 0))
        totals = _norms(total, sizes).square().tolist()
        found = zip(self._zeros, products, totals, self._numbers.T.tolist(), strict=True)
        return {name: GradientSums(errors, square, *others) for name, errors, square, others in found}


def side_by_side(tensors: Mapping[K, Tensor]) -> list[dict[K, Tensor]]:
    """Group tensors to be processed as one flat tensor: of one device, and up to `_STRETCH` entries.

    A larger tensor has a group of its own, and so has a sparse one; empty tensors are left out.
    """
    groups: list[dict[K, Tensor]] = []
    latest: dict[torch.device, tuple[dict[K, Tensor], int]] = {}
    for key, tensor in tensors.items():
        if tensor.is_sparse:
            groups.append({key: tensor})
        elif num_entries := tensor.numel():
            group, num_before = latest.get(tensor.device, ({}, 0))
            if group and num_before + num_entries > _STRETCH:
                group, num_before = {}, 0
            if not group:
                groups.append(group)
            group[key] = tensor
            latest[tensor.device] = group, num_before + num_entries
    return groups


def signals(gradients: Gradients, perturbed: Gradients) -> set[str]:
    """Return the parameters whose fp32 gradient is stable under different rounding, so that it can be compared."""
    names: set[str] = set()
    for some in side_by_side({name: gradient for name, gradient in gradients.items() if name in perturbed}):
        group = _Group(some, 0)
        group.add(perturbed, some)
        squares = {name: (float(sums.errors.trace()), sums.reference) for name, sums in group.sums().items()}
        names |= {name for name, (noise, square) in squares.items() if noise < MAX_OWN_NOISE**2 * square}
    return names


def compare(low: Sequence[Gradients], reference: Sequence[Gradients], names: Collection[str]) -> Comparison:
    """Compare gradients of the same batches in the low precision and in fp32, over the parameters in `names`."""
    comparer = GradientComparer(names)
    for ours, theirs in zip(low, reference, strict=True):
        comparer.add(ours, theirs)
    return comparer.compared()


def counting(magnitudes: Tensor, sizes: list[int]) -> Tensor:
    """Return a mask of the entries of a flat tensor that are significant (`COUNTS`) in their parameter of `sizes`."""
    parts = [part if part.numel() else part.new_zeros(1) for part in torch.split(magnitudes, sizes)]
    limits = COUNTS * torch.stack(torch._foreach_norm(parts, math.inf))
    return magnitudes > limits.repeat_interleave(torch.tensor(sizes, device=limits.device), output_size=sum(sizes))


def _numbers(low: Tensor, reference: Tensor, sizes: list[int]) -> Tensor:
    """Return the fields of `GradientSums` from `reference` on, [field, parameter], for flat gradients with `sizes`."""
    theirs, ours, errors = (_norms(each, sizes).square() for each in (reference, low, low - reference))
    is_counted = counting(reference.abs(), sizes)
    counts = (
        torch.stack(torch._foreach_norm(torch.split(each.float(), sizes), 1)).to(theirs)
        for each in (is_counted, is_counted & (low == 0))
    )
    return torch.stack([theirs, ours, (theirs + ours - errors) / 2, *counts])


def _products(errors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the scalar products [K, K] of the rows of [K, entry] in double precision, computed in pieces."""
    if isinstance(errors, Tensor):
        stacked: Iterable[Tensor] = torch.split(errors, _STRETCH, dim=1)
    else:
        stacked = map(torch.stack, zip(*(torch.split(row, _STRETCH) for row in errors), strict=True))
    stretches = map(_wide, stacked)
    return sum((stretch @ stretch.T for stretch in stretches), _wide(errors[0].new_zeros(len(errors), len(errors))))


def _at_all(indices: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the `values` [entry, column] of K sparse tensors as [K, entry that any of them stores]."""
    found, places = torch.unique(torch.cat(list(indices), dim=1), dim=1, return_inverse=True)
    num_columns = max(each.shape[1] for each in values)  # none in empty ones
    rows = values[0].new_zeros(len(values), found.shape[1], num_columns)
    for row, place, each in zip(rows, torch.split(places, [len(each) for each in values]), values, strict=True):
        row[place] = each.reshape(-1, num_columns)
    return rows.flatten(1)


def _zero_like(gradient: Tensor) -> Tensor:
    """Return a zero gradient that takes no memory."""
    if not gradient.is_sparse:
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    indices, values = gradient._indices()[:, :0], gradient._values()[:0]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True)


def _real(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense, real fp32 tensor."""
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).float()


def _norms(flat: Tensor, sizes: list[int]) -> Tensor:
    """Return the length of each part in double precision, whose squares do not overflow."""
    return torch.stack(torch._foreach_norm(torch.split(flat, sizes), 2, dtype=wide_dtype(flat.device)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.device))


def _root(share: float) -> float:
    """Return the square root, 0 for a share that is negative by chance."""
    return math.sqrt(max(0.0, share))


def _ratio(distance: float, yardstick: float) -> float:
    return distance / yardstick if yardstick else (math.inf if distance else 0.0)

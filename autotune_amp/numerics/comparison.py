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

# Gradient entries below this share of the largest in their parameter are negligible: flushing them does no harm.
MIN_RELATIVE_MAGNITUDE = 2.0**-12
# A gradient that changes by more than this share if fp32 rounds differently is rounding noise. For example, the
# gradient of the key projection's bias in attention is zero in exact arithmetic.
MAX_OWN_NOISE = 0.1
_NUM_WORST = 5  # parameters in the result
_MAX_MODULES = 40  # modules in the result, the rows of a chart
MIN_VARIANCE = 1e-6  # variance between batches over the squared gradient; less is rounding error of the sums
_CHUNK_ENTRIES = 2**24  # number of gradient entries that are processed at a time, to bound memory
ERROR_BYTES, SUM_BYTES = 2, 4  # host memory for each gradient entry: the errors of a batch in bf16, the sum in fp32

K = TypeVar("K")


@dataclass
class GradientSums:
    """Sums over the entries of parameters and over batches; `+` adds those of further parameters.

    `errors` [batch, batch] holds the scalar products of two batches' rounding errors. `total` is the squared length of
    the sum of all fp32 gradients. `reference` and `low` are sums of the squared fp32 and low-precision gradients,
    `product` of their products. `num_counting` counts the significant fp32 entries, `num_flushed` those that are zero
    in the low precision.
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

        The noise ratio is relative to the noise between batches, or to the gradient itself if all batches are equal.
        The cosine is 1 if both gradients are zero.
        """
        num_batches = len(self.errors)
        square = self.reference / num_batches
        between = (num_batches * self.reference - self.total) / (num_batches * max(1, num_batches - 1))
        are_equal = num_batches < 2 or between <= MIN_VARIANCE * square
        scale = square if are_equal else between
        norms = math.sqrt(self.reference) * math.sqrt(self.low)
        common, half_width = common_error(self.errors)
        half_width = None if are_equal else half_width  # equal batches have equal noise
        least, most = (_root(ratio(common + side * (half_width or 0.0), square)) for side in (-1, 1))
        return GradientDamage(
            name=name,
            noise_ratio=math.sqrt(ratio(float(self.errors.trace()) / num_batches, scale)),
            common_error=_root(ratio(common, square)),
            common_error_interval=None if half_width is None else (least, most),
            cosine=min(1.0, self.product / norms) if norms else float(self.reference == self.low),
            norm_ratio=math.sqrt(self.low / self.reference) if self.reference else 1.0,
            flushed_share=self.num_flushed / self.num_counting if self.num_counting else 0.0,
        )


def common_error(errors: Tensor) -> tuple[float, float | None]:
    """Return the squared length of the error common to all batches, and half the width of its 95 % interval.

    `errors` [K, K] holds the scalar products of the errors of K batches. In the mean over
    pairs of different batches the noise averages out, and the common error remains. The interval is the jackknife's
    over batches, None for fewer than three.
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
    """Gradient errors of the whole model, of each compared parameter, and of the modules that hold these parameters.

    `modules` has at most 40, those with the most rounding noise.
    """

    whole: GradientDamage
    parameters: list[GradientDamage]
    modules: list[GradientDamage]

    def findings(self) -> dict[str, Any]:
        """Return the fields of `Findings` that come from this comparison, by name."""
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

    def fidelity_fields(self) -> dict[str, Any]:
        """Return the fields of `Fidelity` that are not in `Findings`, by name, without the modules."""
        worst = sorted(self.parameters, key=attrgetter("noise_ratio"), reverse=True)[:_NUM_WORST]
        return {
            "gradient_cosine": self.whole.cosine,
            "gradient_norm_ratio": self.whole.norm_ratio,
            "worst_parameters": tuple(worst),
        }


class GradientComparer:
    """Accumulator of gradients in the low precision and in fp32, batch by batch, for the parameters in `names`.

    Of each batch only the errors are kept, in bf16 to save memory; they and the sum of the fp32 gradients are in host
    memory, since a training may fill that of its device. A parameter without a gradient counts as zero.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._groups: list[_Group] = []
        self._order: list[str] = []
        self._num_batches = 0

    def add(self, low: Gradients, reference: Gradients) -> None:
        """Add the gradients of a batch. Synchronizes with the device."""
        gradients = {name: gradient for name, gradient in (low | reference).items() if name in self._names}
        new = {name: gradient for name, gradient in gradients.items() if name not in self._order}
        self._order += new
        self._groups += [_Group(some, self._num_batches) for some in groups_to_concatenate(new)]
        for group in self._groups:
            group.add(low, reference)
        self._num_batches += 1

    def compared(self) -> Comparison:
        """Return the comparison over all added batches, at least one."""
        sums_by_name = {name: sums for group in self._groups for name, sums in group.sums().items()}
        # Empty parameters have no sums.
        parameters = {name: sums_by_name[name] for name in self._order if name in sums_by_name}
        modules: dict[str, GradientSums] = {}
        zeros = torch.zeros(self._num_batches, self._num_batches, dtype=torch.float64)
        whole = GradientSums(zeros)
        for name, sums in parameters.items():
            whole = whole + sums
            module = name.rpartition(".")[0]
            modules[module] = modules.get(module, GradientSums(zeros)) + sums
        damages = [sums.damage(name) for name, sums in modules.items()]
        noisiest = sorted(damages, key=attrgetter("noise_ratio"), reverse=True)[:_MAX_MODULES]
        return Comparison(
            whole=whole.damage(""),
            parameters=[sums.damage(name) for name, sums in parameters.items()],
            modules=[damage for damage in damages if damage in noisiest],
        )


class _Group:
    """Sums over batches for a group of parameters that are processed as one flat tensor; see `groups_to_concatenate`.

    `like` are gradients with the parameters' shapes. All gradients were zero in the first `num_before` batches. A
    sparse gradient is a group of its own, of which the stored entries are processed.
    """

    def __init__(self, like: Gradients, num_before: int) -> None:
        self._zeros = {name: _zero_like(gradient) for name, gradient in like.items()}
        self._num_before = num_before
        self._device = next(iter(like.values())).device
        # In host memory:
        self._errors: list[Tensor] = []  # per batch: flat, or [entry, column] if sparse
        self._indices: list[Tensor] = []  # per batch: [dimension, entry], if sparse
        self._total: Tensor | None = None
        # On the device:
        self._sums_by_field: Tensor | None = None  # [field of GradientSums, parameter], from `reference` on

    def add(self, low: Gradients, reference: Gradients) -> None:
        """Add the gradients of a batch."""
        low_parts, reference_parts = (
            [each.get(name, zero) for name, zero in self._zeros.items()] for each in (low, reference)
        )
        total: Tensor | None = None
        if reference_parts[0].is_sparse:  # both get the entries stored in either
            low_sum = (low_parts[0] + 0 * reference_parts[0]).coalesce()
            total = (reference_parts[0] + 0 * low_parts[0]).coalesce()
            self._indices.append(total.indices().cpu())
            low_parts, reference_parts = [low_sum.values()], [total.values()]
        sizes = [_real_fp32(each).numel() for each in reference_parts]
        low_flat, flat = (
            torch.cat([_real_fp32(each).flatten() for each in some]) for some in (low_parts, reference_parts)
        )
        numbers = _sums_by_field(low_flat, flat, sizes)
        total = flat if total is None else total
        self._total = (total if self._total is None else self._total.to(self._device) + total).cpu()
        self._sums_by_field = numbers if self._sums_by_field is None else self._sums_by_field + numbers
        error = (low_flat - flat).bfloat16()
        if self._indices:
            num_entries = self._indices[-1].shape[1]
            error = error.reshape(num_entries, sizes[0] // max(1, num_entries))
        self._errors.append(error.cpu())

    def sums(self) -> dict[str, GradientSums]:
        """Return the sums of each parameter; synchronizes with the device."""
        assert self._total is not None
        assert self._sums_by_field is not None
        if self._indices:
            total = _real_fp32(self._total.coalesce().values()).flatten()
            errors = [*_aligned_values(self._indices, self._errors)]
            sizes = [len(total)]
        else:
            total, errors = self._total, self._errors
            sizes = [_real_fp32(zero).numel() for zero in self._zeros.values()]
        # A group of one parameter may be large: stacking its errors would double their memory.
        parts = [errors] if len(sizes) == 1 else torch.split(torch.stack(errors), sizes, dim=1)
        products = torch.stack([_products(part, self._device) for part in parts])
        products = functional.pad(products, (self._num_before, 0, self._num_before, 0))
        totals = _part_norms(total.to(self._device), sizes).square().tolist()
        rows = zip(self._zeros, products, totals, self._sums_by_field.T.tolist(), strict=True)
        return {name: GradientSums(errors, square, *others) for name, errors, square, others in rows}


def groups_to_concatenate(tensors: Mapping[K, Tensor]) -> list[dict[K, Tensor]]:
    """Group tensors that can be concatenated: on one device, and with up to `_CHUNK_ENTRIES` entries together.

    A larger tensor has a group of its own, and so has a sparse one; empty tensors are left out.
    """
    groups: list[dict[K, Tensor]] = []
    open_groups: dict[torch.device, tuple[dict[K, Tensor], int]] = {}
    for key, tensor in tensors.items():
        if tensor.is_sparse:
            groups.append({key: tensor})
        elif num_entries := tensor.numel():
            group, group_size = open_groups.get(tensor.device, ({}, 0))
            if group and group_size + num_entries > _CHUNK_ENTRIES:
                group, group_size = {}, 0
            if not group:
                groups.append(group)
            group[key] = tensor
            open_groups[tensor.device] = group, group_size + num_entries
    return groups


def parameters_with_signal(gradients: Gradients, perturbed: Gradients) -> set[str]:
    """Return the parameters whose fp32 gradient exceeds rounding noise, so that it can be compared.

    `perturbed` are the gradients of the same batch in fp32 with different rounding.
    """
    names: set[str] = set()
    for batch_gradients in groups_to_concatenate(
        {name: gradient for name, gradient in gradients.items() if name in perturbed}
    ):
        group = _Group(batch_gradients, 0)
        group.add(perturbed, batch_gradients)
        squares = {name: (float(sums.errors.trace()), sums.reference) for name, sums in group.sums().items()}
        names |= {name for name, (noise, square) in squares.items() if noise < MAX_OWN_NOISE**2 * square}
    return names


def significant_entries(magnitudes: Tensor, sizes: list[int]) -> Tensor:
    """Return a mask of the significant entries of a flat tensor, the concatenation of parameters with these `sizes`.

    An entry is significant above `MIN_RELATIVE_MAGNITUDE` times the largest magnitude in its parameter.
    """
    parts = [part if part.numel() else part.new_zeros(1) for part in torch.split(magnitudes, sizes)]
    limits = MIN_RELATIVE_MAGNITUDE * torch.stack(torch._foreach_norm(parts, math.inf))
    return magnitudes > limits.repeat_interleave(torch.tensor(sizes, device=limits.device), output_size=sum(sizes))


def _sums_by_field(low: Tensor, reference: Tensor, sizes: list[int]) -> Tensor:
    """Return the fields of `GradientSums` from `reference` on, [field, parameter], for flat gradients with `sizes`."""
    reference_squares, low_squares, error_squares = (
        _part_norms(each, sizes).square() for each in (reference, low, low - reference)
    )
    is_counted = significant_entries(reference.abs(), sizes)
    counts = (
        torch.stack(torch._foreach_norm(torch.split(each.float(), sizes), 1)).to(reference_squares)
        for each in (is_counted, is_counted & (low == 0))
    )
    return torch.stack([reference_squares, low_squares, (reference_squares + low_squares - error_squares) / 2, *counts])


def _products(errors: Tensor | Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the scalar products [K, K] of the rows of `errors` [K, entry], computed on `device` chunk by chunk."""
    if isinstance(errors, Tensor):
        parts: Iterable[Tensor] = torch.split(errors, _CHUNK_ENTRIES, dim=1)
    else:
        parts = map(torch.stack, zip(*(torch.split(row, _CHUNK_ENTRIES) for row in errors), strict=True))
    chunks = (part.to(device).to(wide_dtype(device)) for part in parts)  # in one call the host would convert
    zeros = torch.zeros(len(errors), len(errors), dtype=torch.float64)
    return sum(((chunk @ chunk.T).cpu().double() for chunk in chunks), zeros)


def _aligned_values(indices: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Return the `values` [entry, column] of K sparse tensors as K rows over all entries that any of them stores."""
    all_indices, positions = torch.unique(torch.cat(list(indices), dim=1), dim=1, return_inverse=True)
    num_columns = max(each.shape[1] for each in values)  # tensors without entries have none
    rows = values[0].new_zeros(len(values), all_indices.shape[1], num_columns)
    for row, position, each in zip(rows, torch.split(positions, [len(each) for each in values]), values, strict=True):
        row[position] = each.reshape(-1, num_columns)
    return rows.flatten(1)


def _zero_like(gradient: Tensor) -> Tensor:
    """Return a zero gradient with the shape of `gradient` that takes no memory."""
    if not gradient.is_sparse:
        return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    indices, values = gradient._indices()[:, :0], gradient._values()[:0]
    return torch.sparse_coo_tensor(indices, values, gradient.shape, check_invariants=True)


def _real_fp32(gradient: Tensor) -> Tensor:
    """Return the gradient as a dense, real fp32 tensor."""
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    return (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).float()


def _part_norms(flat: Tensor, sizes: list[int]) -> Tensor:
    """Return the L2 norm of each part of `flat` in double precision, so that squares do not overflow."""
    return torch.stack(torch._foreach_norm(torch.split(flat, sizes), 2, dtype=wide_dtype(flat.device)))


def _root(value: float) -> float:
    """Return the square root, or 0 if an estimate is negative by chance."""
    return math.sqrt(max(0.0, value))


def ratio(distance: float, yardstick: float) -> float:
    """Return the distance in units of the yardstick. If that is zero: infinity, or 0 if the distance is zero too."""
    return distance / yardstick if yardstick else (math.inf if distance else 0.0)

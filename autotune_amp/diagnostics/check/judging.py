"""Findings of one recorded call, from its name, its numbers and the dtypes that it would have under autocast."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autotune_amp.core.config import FP16_MAX
from autotune_amp.diagnostics.check import fixes
from autotune_amp.diagnostics.check.findings import CodeLocation, Finding, make_finding
from autotune_amp.diagnostics.check.operands import NOT_IN_BF16
from autotune_amp.precision import rules
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.precision.torch_state import HALF_DTYPES

# Autocast dtype of a recording. Code that breaks in bf16 breaks in fp16 too, whose range is smaller.
LOW: Final = torch.float16
FLUSHED: Final = 2.0**-25  # magnitudes up to this are zero in fp16
# A large size that is no multiple of 8 wastes part of a tile; a classifier's ten classes fill no tile anyway.
LEAST_SIZE: Final = 64

CASTS: Final = {"to", "type", "half", "bfloat16", "type_as", "double", "float"}
PRODUCTS: Final = {"linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
# Calls that convert a number to the tensor's dtype, and raise if it is out of range.
_WRITES: Final = {
    *("masked_fill", "masked_fill_", "fill_", "fill_diagonal_", "index_fill", "index_fill_"),
    *("full", "full_like", "new_full", "pad"),
}
_CLAMPS: Final = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}  # likewise, on the CPU alone
# Calls that compute with a number, and round the result.
_SUMS: Final = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_ADDS: Final = _SUMS | {"sub", "sub_", "__sub__", "__isub__", "where", "__setitem__"}
_PRODUCTS_BY_NUMBERS: Final = {"mul", "mul_", "__mul__", "__rmul__", "__imul__"}
_GUARDS: Final = _SUMS | _CLAMPS | {"maximum"}
_HALF_BY_NAME = re.compile(r"\b(float16|half|bfloat16)\b")
_DECOMPOSITIONS: Final = re.compile(
    r"(linalg_)?(cholesky(_ex|_solve|_inverse)?|eigh?|eigvalsh?|svd(vals)?|qr|geqrf|lstsq|solve(_ex|_triangular)?"
    r"|triangular_solve|inv(_ex|erse)?|pinv(erse)?|det|slogdet|logdet|matrix_rank|lu(_factor|_solve)?|ldl_\w+|tensorinv"
    r"|tensorsolve|ormqr|orgqr|linalg_householder_product)"
)
# Transforms of real or complex signals; an inverse to a real signal takes complex numbers, which autocast never casts.
_FFTS: Final = re.compile(r"fft_i?r?fft[2n]?|stft")


class Call(NamedTuple):
    """Recorded call of a torch function, with the dtypes that it would have on the device under autocast.

    `arguments` are the positional and the keyword arguments, `given` the tensors among them, with dtypes
    `dtypes_given`. `made` are the resulting tensors, with dtypes `dtypes_made`; without a result, that of the first
    tensor given, which the call changes. `error` is the message that the call raises on the device, or None. `place` is
    the line of the call, `made_at` the line that made the first tensor given. `kept_in` are the half-precision dtypes
    of the model's weights.
    """

    name: str
    arguments: tuple[Any, dict[str, Any]]
    given: Sequence[Tensor]
    made: Sequence[Tensor]
    dtypes_given: Sequence[torch.dtype]
    dtypes_made: Sequence[torch.dtype]
    error: str | None
    place: CodeLocation
    made_at: CodeLocation
    kept_in: frozenset[torch.dtype]

    @property
    def makes_half(self) -> bool:
        """Whether a result is in half precision."""
        return any(dtype in HALF_DTYPES for dtype in self.dtypes_made)


def call_findings(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield the findings of a call under the autocast of `device`."""
    for finding in (
        *_errors(call),
        *_numbers(call, device),
        *_casts(call, device),
        *_decompositions(call, device),
        *_transforms(call),
        *_complex_numbers(call),
        *_sizes(call),
    ):
        if device in next(rule for rule in rules.RULES if rule.name == finding.rule).devices:
            yield finding


def _errors(call: Call) -> Iterator[Finding]:
    rule = None if call.error is None else rules.rule_of(call.error)
    if call.name == "__setitem__" and _puts_another_dtype(call):
        rule = rules.MIXED_OPERANDS
    if rule is rules.BINARY_CROSS_ENTROPY:
        sigmoid = call.made_at.line if "sigmoid" in call.made_at.code.lower() else None
        yield make_finding(rule, call.place, mend=fixes.of_binary_cross_entropy(call.place.code, sigmoid))
    elif rule is not None and rule not in (rules.LINEAR_ALGEBRA, rules.FFT):
        is_in_fp16 = call.error is not None and NOT_IN_BF16 in call.error
        yield make_finding(rule, call.place, precisions=("fp16",) if is_in_fp16 else None)


def _puts_another_dtype(call: Call) -> bool:
    """Whether an assignment indexed by a tensor writes another dtype. Torch casts the values for slices only."""
    target, index, value = call.arguments[0]
    by_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves(index))
    is_tensor = isinstance(value, Tensor) and value.dim() > 0 and target.is_floating_point()
    return by_tensor and is_tensor and call.dtypes_given[0] != call.dtypes_given[-1]


def _decompositions(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield a finding for a decomposition or solver in half precision.

    It is recognised by the error that it raises, on the CPU that of the CPU's own kernels, and on accelerators also by
    its name.
    """
    takes_half = any(dtype in HALF_DTYPES for dtype in call.dtypes_given)
    has_error = call.error is not None and rules.rule_of(call.error) is rules.LINEAR_ALGEBRA
    is_named = device != "cpu" and _DECOMPOSITIONS.fullmatch(call.name) is not None
    if has_error or (is_named and takes_half and call.makes_half):
        yield make_finding(rules.LINEAR_ALGEBRA, call.place, mend=fixes.of_linear_algebra(call.place.code))


def _transforms(call: Call) -> Iterator[Finding]:
    """Yield a finding for a Fourier transform in half precision. On CUDA, fp16 works for powers of two as lengths."""
    is_refused = call.error is not None and rules.rule_of(call.error) is rules.FFT
    if not is_refused and not (_FFTS.fullmatch(call.name) and torch.float16 in call.dtypes_given[:1]):
        return
    if is_refused or torch.complex32 in call.dtypes_made:
        is_in_fp16 = not is_refused and all(length & (length - 1) == 0 for length in _lengths(call))
        mend = fixes.of_linear_algebra(call.place.code)
        yield make_finding(rules.FFT, call.place, mend=mend, precisions=("bf16",) if is_in_fp16 else None)


def _complex_numbers(call: Call) -> Iterator[Finding]:
    """Yield a finding for complex numbers made from half precision: fp16 has a complex dtype, bf16 has none."""
    if call.name in ("complex", "polar", "view_as_complex") and torch.complex32 in call.dtypes_made:
        why = "There are no complex numbers of bf16, and those of fp16 have hardly any operations."
        yield make_finding(rules.HALF_KERNELS, call.place, why=why, precisions=("bf16",))


def _lengths(call: Call) -> list[int]:
    """Return the lengths that a call of torch.fft or torch.stft transforms."""
    (_, *rest), named = call.arguments
    size, dims = [*rest, None, None][:2]
    size = named.get("n_fft", named.get("n", named.get("s", size)))
    if size is not None:
        return [size] if isinstance(size, int) else list(size)
    kind = call.name[-1]
    dims = named.get("dim", dims if dims is not None else {"2": (-2, -1), "n": None}.get(kind, -1))
    shape = call.given[0].shape
    return list(shape) if dims is None else [shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)]


def _numbers(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    if LOW not in call.dtypes_made:
        return
    arguments, named = call.arguments
    if call.name in ("full", "new_full", "__setitem__"):  # sizes and indices are not numbers written
        arguments = arguments[-1:]
    writes = _WRITES | _CLAMPS if device == "cpu" else _WRITES
    for leaf in tree_leaves((arguments, named)):
        number, code = _number(leaf), call.place.code
        is_large = FP16_MAX < abs(number) < math.inf
        if is_large and call.name in writes:
            yield make_finding(rules.LARGE_CONSTANT, call.place, mend=fixes.of_constant(code, number))
        elif is_large and (call.name in _ADDS or (call.name in _PRODUCTS_BY_NUMBERS and _overflows(call))):
            yield make_finding(rules.LARGE_CONSTANT, call.place, "hurts")
        elif 0 < abs(number) <= FLUSHED and call.name in _GUARDS:
            yield make_finding(rules.SMALL_EPSILON, call.place, mend=fixes.of_epsilon(code, number))


def _overflows(call: Call) -> bool:
    return any(_largest(tensor) > FP16_MAX for tensor in call.made)


def _number(leaf: Any) -> float:
    """Return an argument's value if it is a number or an untrained floating-point tensor without dimensions, else 0."""
    if isinstance(leaf, Tensor):
        is_number = leaf.dim() == 0 and leaf.is_floating_point() and not leaf.requires_grad
        return float(leaf) if is_number else 0.0
    return float(leaf) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else 0.0


def _casts(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    if call.name not in CASTS:
        return
    code = call.place.code
    asked = [leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES]
    # A dtype that is neither autocast's nor the weights' is fixed in the code, not taken from a tensor.
    is_fixed = any(dtype != LOW and dtype not in call.kept_in for dtype in asked)
    if call.name in ("half", "bfloat16") or is_fixed or (asked and _HALF_BY_NAME.search(code)):
        yield make_finding(rules.MANUAL_CAST, call.place, mend=fixes.without_cast(code))
    if device == "mps" and torch.float64 in call.dtypes_made:
        why = "MPS has no float64: a cast to it raises."
        yield make_finding(rules.MANUAL_CAST, call.place, "breaks", why=why, mend=fixes.in_fp32(code))
    if LOW in call.dtypes_made and LOW not in call.dtypes_given[:1] and call.given[0].is_floating_point():
        largest = _largest(call.given[0])
        if largest > FP16_MAX:
            why = f"Numbers of up to {largest:.3g} are cast to fp16, which ends at 65504: they become infinite."
            yield make_finding(rules.LARGE_CONSTANT, call.place, "hurts", why=why)


def _largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor, 0 if it has none."""
    finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def _sizes(call: Call) -> Iterator[Finding]:
    if not call.makes_half or call.name not in PRODUCTS or len(call.given) < 2:
        return
    weight = call.given[1].shape[:2]
    large = {size for size in weight if size >= LEAST_SIZE}
    if odd := sorted(size for size in large if size % 8):
        yield make_finding(rules.SIZES, call.place, mend=fixes.of_sizes(odd, 8), precisions=("fp16", "bf16"))
    elif call.name == "linear" and min(weight) >= LEAST_SIZE and (odd := sorted(size for size in large if size % 16)):
        yield make_finding(rules.SIZES, call.place, mend=fixes.of_sizes(odd, 16), precisions=("fp8",))

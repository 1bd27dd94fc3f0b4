"""Derives findings from one recorded call: its name, its numbers, and its dtypes under autocast."""

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
from autotune_amp.diagnostics.check.operands import WORKS_IN_BF16
from autotune_amp.precision import rules
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.precision.torch_state import HALF_DTYPES

# Autocast dtype of the recorded step. Code that breaks in bf16 breaks in fp16 too, whose range is smaller.
AUTOCAST_DTYPE: Final = torch.float16
FLUSHED_TO_ZERO: Final = 2.0**-25  # magnitudes up to this are zero in fp16
# Sizes below this get no advice: a classifier's ten classes fill no tile of a tensor core anyway.
MIN_TILED_SIZE: Final = 64

CAST_METHODS: Final = {"to", "type", "half", "bfloat16", "type_as", "double", "float"}
MATRIX_PRODUCTS: Final = {
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
}
# Calls that convert a number to the tensor's dtype, and raise if it is out of range.
_WRITES: Final = {
    *("masked_fill", "masked_fill_", "fill_", "fill_diagonal_", "index_fill", "index_fill_"),
    *("full", "full_like", "new_full", "pad"),
}
_CLAMPS: Final = {"clamp", "clamp_", "clip", "clip_", "clamp_min", "clamp_min_"}  # these raise on the CPU only
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

    `arguments` are the positional and the keyword arguments, `inputs` the tensors among them, `outputs` the resulting
    tensors. `output_dtypes` holds the first input's dtype if there are no outputs, since the call changes that input.
    `error` is the message that the call raises on the device, or None. `location` is the line of the call,
    `input_created_at` the line that created the first input. `weight_dtypes` are the half-precision dtypes of the
    model's weights.
    """

    name: str
    arguments: tuple[Any, dict[str, Any]]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    input_dtypes: Sequence[torch.dtype]
    output_dtypes: Sequence[torch.dtype]
    error: str | None
    location: CodeLocation
    input_created_at: CodeLocation
    weight_dtypes: frozenset[torch.dtype]

    @property
    def has_half_output(self) -> bool:
        """Whether a result is in half precision."""
        return any(dtype in HALF_DTYPES for dtype in self.output_dtypes)


def call_findings(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield the findings of a call under the autocast of `device`."""
    for finding in (
        *_error_findings(call),
        *_number_findings(call, device),
        *_cast_findings(call, device),
        *_decomposition_findings(call, device),
        *_fourier_findings(call),
        *_complex_findings(call),
        *_size_findings(call),
    ):
        if device in next(rule for rule in rules.RULES if rule.name == finding.rule).devices:
            yield finding


def _error_findings(call: Call) -> Iterator[Finding]:
    """Yield a finding for the error that the call raises on the device; see also the two functions below."""
    rule = None if call.error is None else rules.rule_of(call.error)
    if call.name == "__setitem__" and _is_mixed_assignment(call):
        rule = rules.MIXED_OPERANDS
    if rule is rules.BINARY_CROSS_ENTROPY:
        sigmoid = call.input_created_at.line if "sigmoid" in call.input_created_at.code.lower() else None
        yield make_finding(rule, call.location, mend=fixes.fix_binary_cross_entropy(call.location.code, sigmoid))
    elif rule is not None and rule not in (rules.LINEAR_ALGEBRA, rules.FFT):
        is_in_fp16 = call.error is not None and WORKS_IN_BF16 in call.error
        yield make_finding(rule, call.location, precisions=("fp16",) if is_in_fp16 else None)


def _is_mixed_assignment(call: Call) -> bool:
    """Whether an assignment indexed by a tensor has values of another dtype, which torch casts for slices only."""
    target, index, value = call.arguments[0]
    by_tensor = any(isinstance(leaf, Tensor) for leaf in tree_leaves(index))
    is_tensor = isinstance(value, Tensor) and value.dim() > 0 and target.is_floating_point()
    return by_tensor and is_tensor and call.input_dtypes[0] != call.input_dtypes[-1]


def _decomposition_findings(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield a finding for a decomposition or solver in half precision.

    It is recognised by its error and, on accelerators, also by its name: fake tensors may not raise there.
    """
    has_half_input = any(dtype in HALF_DTYPES for dtype in call.input_dtypes)
    has_error = call.error is not None and rules.rule_of(call.error) is rules.LINEAR_ALGEBRA
    is_named = device != "cpu" and _DECOMPOSITIONS.fullmatch(call.name) is not None
    if has_error or (is_named and has_half_input and call.has_half_output):
        yield make_finding(rules.LINEAR_ALGEBRA, call.location, mend=fixes.cast_argument_to_fp32(call.location.code))


def _fourier_findings(call: Call) -> Iterator[Finding]:
    """Yield a finding for a Fourier transform in half precision. CUDA has fp16 ones for powers of 2 as lengths."""
    is_refused = call.error is not None and rules.rule_of(call.error) is rules.FFT
    if not is_refused and not (_FFTS.fullmatch(call.name) and torch.float16 in call.input_dtypes[:1]):
        return
    if is_refused or torch.complex32 in call.output_dtypes:
        is_in_fp16 = not is_refused and all(length & (length - 1) == 0 for length in _transform_lengths(call))
        mend = fixes.cast_argument_to_fp32(call.location.code)
        yield make_finding(rules.FFT, call.location, mend=mend, precisions=("bf16",) if is_in_fp16 else None)


def _complex_findings(call: Call) -> Iterator[Finding]:
    """Yield a finding for complex numbers built from half precision: torch has complex32 for fp16, none for bf16."""
    if call.name in ("complex", "polar", "view_as_complex") and torch.complex32 in call.output_dtypes:
        why = "PyTorch has no complex bf16, and complex fp16 supports hardly any operation."
        yield make_finding(rules.HALF_KERNELS, call.location, why=why, precisions=("bf16",))


def _transform_lengths(call: Call) -> list[int]:
    """Return the lengths that a call of torch.fft or torch.stft transforms."""
    arguments, keywords = call.arguments
    size, dims = [*arguments[1:], None, None][:2]
    size = keywords.get("n_fft", keywords.get("n", keywords.get("s", size)))
    if size is not None:
        return [size] if isinstance(size, int) else list(size)
    kind = call.name[-1]
    dims = keywords.get("dim", dims if dims is not None else {"2": (-2, -1), "n": None}.get(kind, -1))
    shape = call.inputs[0].shape
    return list(shape) if dims is None else [shape[dim] for dim in ([dims] if isinstance(dims, int) else dims)]


def _number_findings(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield findings for numbers in the call that overflow in fp16 or are rounded to zero."""
    if AUTOCAST_DTYPE not in call.output_dtypes:
        return
    arguments, keywords = call.arguments
    if call.name in ("full", "new_full", "__setitem__"):  # the others are sizes and indices
        arguments = arguments[-1:]
    checked_calls = _WRITES | _CLAMPS if device == "cpu" else _WRITES
    for leaf in tree_leaves((arguments, keywords)):
        number, code = _number_value(leaf), call.location.code
        is_large = FP16_MAX < abs(number) < math.inf
        if is_large and call.name in checked_calls:
            yield make_finding(rules.LARGE_CONSTANT, call.location, mend=fixes.fix_constant(code, number))
        elif is_large and (call.name in _ADDS or (call.name in _PRODUCTS_BY_NUMBERS and _has_overflow(call))):
            yield make_finding(rules.LARGE_CONSTANT, call.location, "hurts")
        elif 0 < abs(number) <= FLUSHED_TO_ZERO and call.name in _GUARDS:
            yield make_finding(rules.SMALL_EPSILON, call.location, mend=fixes.fix_epsilon(code, number))


def _has_overflow(call: Call) -> bool:
    return any(_largest_magnitude(tensor) > FP16_MAX for tensor in call.outputs)


def _number_value(leaf: Any) -> float:
    """Return an argument's value if it is a number or an untrained floating-point tensor without dimensions, else 0."""
    if isinstance(leaf, Tensor):
        is_number = leaf.dim() == 0 and leaf.is_floating_point() and not leaf.requires_grad
        return float(leaf) if is_number else 0.0
    return float(leaf) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool) else 0.0


def _cast_findings(call: Call, device: AutocastDevice) -> Iterator[Finding]:
    """Yield findings for explicit casts: to half precision, to float64 on MPS, and of numbers too large for fp16."""
    if call.name not in CAST_METHODS:
        return
    code = call.location.code
    half_dtypes = [
        leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, torch.dtype) and leaf in HALF_DTYPES
    ]
    # A dtype that neither autocast nor the weights have is written in the code, not read from a tensor.
    is_fixed = any(dtype != AUTOCAST_DTYPE and dtype not in call.weight_dtypes for dtype in half_dtypes)
    if call.name in ("half", "bfloat16") or is_fixed or (half_dtypes and _HALF_BY_NAME.search(code)):
        yield make_finding(rules.MANUAL_CAST, call.location, mend=fixes.remove_cast(code))
    if device == "mps" and torch.float64 in call.output_dtypes:
        why = "MPS has no float64: a cast to it raises."
        yield make_finding(rules.MANUAL_CAST, call.location, "breaks", why=why, mend=fixes.use_fp32(code))
    if (
        AUTOCAST_DTYPE in call.output_dtypes
        and AUTOCAST_DTYPE not in call.input_dtypes[:1]
        and call.inputs[0].is_floating_point()
    ):
        largest = _largest_magnitude(call.inputs[0])
        if largest > FP16_MAX:
            why = (
                f"Numbers of up to {largest:.3g} are cast to fp16, whose largest number is 65504: they become infinite."
            )
            yield make_finding(rules.LARGE_CONSTANT, call.location, "hurts", why=why)


def _largest_magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor, 0 if it has none."""
    finite = torch.nan_to_num(tensor.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max()) if finite.numel() else 0.0


def _size_findings(call: Call) -> Iterator[Finding]:
    """Yield a finding for weights whose large sizes are no multiple of 8 (fp8: 16), which tensor cores need."""
    if not call.has_half_output or call.name not in MATRIX_PRODUCTS or len(call.inputs) < 2:
        return
    weight_sizes = call.inputs[1].shape[:2]
    large_sizes = {size for size in weight_sizes if size >= MIN_TILED_SIZE}
    if wasteful_sizes := sorted(size for size in large_sizes if size % 8):
        yield make_finding(
            rules.SIZES, call.location, mend=fixes.sizes_advice(wasteful_sizes, 8), precisions=("fp16", "bf16")
        )
    elif (
        call.name == "linear"
        and min(weight_sizes) >= MIN_TILED_SIZE
        and (wasteful_sizes := sorted(size for size in large_sizes if size % 16))
    ):
        yield make_finding(rules.SIZES, call.location, mend=fixes.sizes_advice(wasteful_sizes, 16), precisions=("fp8",))

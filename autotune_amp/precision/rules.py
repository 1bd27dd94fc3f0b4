"""Rules for code that fails or loses accuracy under autocast, each with reason, fix and source. No torch."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from autotune_amp.core.precisions import Precision

Severity: TypeAlias = Literal["breaks", "hurts"]
AutocastDevice: TypeAlias = Literal["cuda", "cpu", "mps"]

AUTOCAST_DEVICES: Final[tuple[AutocastDevice, ...]] = ("cuda", "cpu", "mps")
_HALF_PRECISIONS: Final[tuple[Precision, ...]] = ("fp16", "bf16")

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_EXAMPLES = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_FORMATS = "https://docs.pytorch.org/docs/stable/type_info.html"
_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"


class Rule(NamedTuple):
    """Rule for one kind of code that fails or loses accuracy under autocast or in half precision.

    `severity` is the worst effect; a finding may be milder. `why` and `fix` are sentences, `source` is the address of
    the documentation. `error` is a pattern that matches torch's message if such code raises a specific one, else None.
    """

    name: str
    severity: Severity
    precisions: tuple[Precision, ...]
    devices: tuple[AutocastDevice, ...]
    why: str
    fix: str
    source: str
    error: str | None = None


BINARY_CROSS_ENTROPY = Rule(
    "binary_cross_entropy",
    "breaks",
    _HALF_PRECISIONS,
    ("cuda",),
    "binary_cross_entropy raises under CUDA's autocast: its gradients exceed fp16's range.",
    "Remove the sigmoid and use binary_cross_entropy_with_logits, or BCEWithLogitsLoss.",
    f"{_AMP}#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy",
    error=r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
)
LARGE_CONSTANT = Rule(
    "large_constant",
    "breaks",
    ("fp16",),
    AUTOCAST_DEVICES,
    "fp16 ends at 65504: writing a larger constant into an fp16 tensor raises, and adding one gives infinity.",
    "Use a constant of the tensor's own dtype: torch.finfo(x.dtype).min.",
    _FORMATS,
    error=r"value cannot be converted to type (at::|c10::)?Half without overflow",
)
SMALL_EPSILON = Rule(
    "small_epsilon",
    "hurts",
    ("fp16",),
    AUTOCAST_DEVICES,
    "fp16 rounds numbers up to 2^-25, about 3e-8, to zero: this epsilon no longer prevents a division by zero.",
    "Compute this in fp32 with .float(), or use an epsilon of 1e-6 or more.",
    _FORMATS,
)
AUTOGRAD_FUNCTION = Rule(
    "autograd_function",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "Autocast is on in this Function's forward and off in its backward, which therefore mixes two precisions.",
    "Decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd.",
    f"{_EXAMPLES}#autocast-and-custom-autograd-functions",
)
MIXED_OPERANDS = Rule(
    "mixed_operands",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "This operation wants tensors of one precision, and autocast does not cast for it.",
    "Cast one to the other's dtype: y.to(x.dtype).",
    f"{_AMP}#autocast-op-reference",
    error=r"[Ee]xpected (object of )?scalar type|expected dtype [\w:.]+ for|dtypes? match|same (scalar type|dtypes?)"
    r"|equal to src\.dtype|[Ii]nput (d?types|type \S+ and (weight|bias) type \S+) (must|should) be the same"
    r"|to have the same type as tensor for argument|Type promoting not supported|Found dtype \w+ but expected"
    r"|expect parameter to have scalar type|must be same dtype|(Half|BFloat16|Float) did not match"
    r"|tensors with different dtypes|dtype \S+ does not match|attn_mask dtype to be",
)
LINEAR_ALGEBRA = Rule(
    "linear_algebra",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "torch.linalg's decompositions and solvers have no half-precision kernels, and autocast casts their inputs only on "
    "a CPU.",
    "Cast its inputs to fp32 with .float().",
    "https://docs.pytorch.org/docs/stable/generated/torch.linalg.cholesky.html",
    error=r"Low precision dtypes not supported|expected a tensor with 2 or more dimensions of float"
    r"|types other than float and double"
    r"|\"(linalg_|cholesky|lu_|eig|svd|geqrf|orgqr|triangular|inverse|ldl_)\w*\" not implemented for '(Half|BFloat16)'",
)
FFT = Rule(
    "fft",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "Fourier transforms have no half-precision kernels, except fp16 on CUDA for lengths that are powers of two, and "
    "autocast casts their inputs only on a CPU.",
    "Cast its inputs to fp32 with .float().",
    "https://docs.pytorch.org/docs/stable/generated/torch.fft.fft.html",
    error=r"Unsupported dtype (Half|BFloat16)|cuFFT only supports dimensions whose sizes are powers of two"
    r"|MKL FFT doesn't support tensors of type",
)
HALF_KERNELS = Rule(
    "half_kernels",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "This operation has no half-precision kernel on this device, and autocast does not cast its inputs.",
    "Cast its inputs to fp32 with .float().",
    f"{_AMP}#autocast-op-reference",
    error=r"not implemented for '(Half|BFloat16|ComplexHalf)'|must be either float or double|Half, Float or Double"
    r"|only supported for half, float and double",
)
MANUAL_CAST = Rule(
    "manual_cast",
    "hurts",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "A cast to a fixed dtype applies in every precision, also to tensors that autocast would keep in fp32.",
    "Remove the cast, since autocast casts itself, or cast to the dtype of another tensor: y.to(x.dtype).",
    f"{_AMP}#torch.autocast",
)
WEIGHTS = Rule(
    "weights",
    "breaks",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "Autocast expects weights in fp32: GradScaler refuses to unscale fp16 gradients, small updates of half-precision "
    "weights round away, and float64 weights are not cast at all.",
    "Keep the weights in fp32 with model.float(), and let autocast cast them.",
    f"{_AMP}#torch.autocast",
    error=r"Attempting to unscale FP16 gradients",
)
CLIPPING = Rule(
    "clipping",
    "hurts",
    ("fp16",),
    AUTOCAST_DEVICES,
    "Gradients are clipped while still multiplied by the loss scale, so that clipping makes them far too small.",
    "Call scaler.unscale_(optimizer) before clipping.",
    f"{_EXAMPLES}#gradient-clipping",
)
NESTED_AUTOCAST = Rule(
    "nested_autocast",
    "hurts",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "An autocast inside the model overrides the one around the training step, whatever precision that has.",
    "Remove it. To keep a part in fp32, torch.autocast(..., enabled=False) is right.",
    f"{_AMP}#torch.autocast",
)
OLD_INTERFACE = Rule(
    "old_interface",
    "hurts",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "torch.cuda.amp is deprecated, and its autocast has no effect on other devices.",
    "Use torch.amp with the device type.",
    f"{_AMP}#torch.cuda.amp.autocast",
)
SCALER = Rule(
    "scaler",
    "hurts",
    ("bf16",),
    AUTOCAST_DEVICES,
    "bf16 has fp32's range, so a GradScaler is not needed: it costs a synchronisation, and steps skipped after growth.",
    "Remove it under bf16, or disable it with enabled=False.",
    f"{_AMP}#gradient-scaling",
)
SIZES = Rule(
    "sizes",
    "hurts",
    (*_HALF_PRECISIONS, "fp8"),
    ("cuda",),
    "Tensor cores need multiples of 8 in half precision and of 16 in fp8: other sizes are padded, or do not use them.",
    "Round the size up to such a multiple.",
    f"{_TENSOR_CORES}#requirements-tc",
)
LOSS = Rule(
    "loss",
    "hurts",
    _HALF_PRECISIONS,
    AUTOCAST_DEVICES,
    "The loss is computed in half precision: in fp16 its gradient, the loss scale, may exceed 65504, and bf16 keeps "
    "only two or three digits of the loss.",
    "Compute the loss in fp32: cast the model's output with .float().",
    f"{_AMP}#gradient-scaling",
)

RULES: Final = (
    *(BINARY_CROSS_ENTROPY, LARGE_CONSTANT, SMALL_EPSILON, AUTOGRAD_FUNCTION, MIXED_OPERANDS, LINEAR_ALGEBRA, FFT),
    *(HALF_KERNELS, MANUAL_CAST, WEIGHTS, CLIPPING, NESTED_AUTOCAST, OLD_INTERFACE, SCALER, SIZES, LOSS),
)


def rule_of(error: str) -> Rule | None:
    """Return the rule whose error pattern matches the message `error`, or None."""
    return next((rule for rule in RULES if rule.error is not None and re.search(rule.error, error)), None)

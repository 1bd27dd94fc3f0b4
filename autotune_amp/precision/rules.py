"""Rules for code that breaks or hurts under autocast, each with its reason, fix and source. Plain data, no torch."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from autotune_amp.core.precisions import Precision

Severity: TypeAlias = Literal["breaks", "hurts"]
AutocastDevice: TypeAlias = Literal["cuda", "cpu", "mps"]

AUTOCAST_DEVICES: Final[tuple[AutocastDevice, ...]] = ("cuda", "cpu", "mps")
_HALF: Final[tuple[Precision, ...]] = ("fp16", "bf16")

_AMP = "https://docs.pytorch.org/docs/stable/amp.html"
_EXAMPLES = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html"
_FORMATS = "https://docs.pytorch.org/docs/stable/type_info.html"
_TENSOR_CORES = "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"


class Rule(NamedTuple):
    """Rule for one kind of code that fails under autocast, or in the format that autocast computes in.

    `severity` is the worst effect; a finding may be milder. `why` is the reason and `mend` the fix, both as sentences;
    `source` is the address of the documentation. `error` is a pattern of torch's message if such code raises one of its
    own, else None.
    """

    name: str
    severity: Severity
    precisions: tuple[Precision, ...]
    devices: tuple[AutocastDevice, ...]
    why: str
    mend: str
    source: str
    error: str | None = None


BINARY_CROSS_ENTROPY = Rule(
    "binary_cross_entropy",
    "breaks",
    _HALF,
    ("cuda",),
    "CUDA's autocast raises for binary_cross_entropy on probabilities: its gradients leave fp16's range.",
    "Take the sigmoid out and use binary_cross_entropy_with_logits, or BCEWithLogitsLoss.",
    f"{_AMP}#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy",
    error=r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast",
)
LARGE_CONSTANT = Rule(
    "large_constant",
    "breaks",
    ("fp16",),
    AUTOCAST_DEVICES,
    "fp16 ends at 65504: writing a larger constant into an fp16 tensor raises, and adding one gives infinity.",
    "Take the constant from the tensor's own format: torch.finfo(x.dtype).min.",
    _FORMATS,
    error=r"value cannot be converted to type (at::|c10::)?Half without overflow",
)
SMALL_EPSILON = Rule(
    "small_epsilon",
    "hurts",
    ("fp16",),
    AUTOCAST_DEVICES,
    "fp16 rounds numbers up to 2^-25, about 3e-8, to zero: this epsilon no longer keeps anything from zero.",
    "Compute this in fp32 with .float(), or take an epsilon of 1e-6 or more.",
    _FORMATS,
)
AUTOGRAD_FUNCTION = Rule(
    "autograd_function",
    "breaks",
    _HALF,
    AUTOCAST_DEVICES,
    "Autocast is on in this Function's forward and off in its backward, which so meets tensors of two precisions.",
    "Decorate forward with torch.amp.custom_fwd and backward with torch.amp.custom_bwd.",
    f"{_EXAMPLES}#autocast-and-custom-autograd-functions",
)
MIXED_OPERANDS = Rule(
    "mixed_operands",
    "breaks",
    _HALF,
    AUTOCAST_DEVICES,
    "This operation wants tensors of one precision, and autocast does not cast for it.",
    "Cast the one to the other's precision: y.to(x.dtype).",
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
    _HALF,
    AUTOCAST_DEVICES,
    "torch.linalg's decompositions and solvers have no half-precision kernels, and autocast casts for them on the CPU "
    "alone.",
    "Give it fp32: cast what goes in with .float().",
    "https://docs.pytorch.org/docs/stable/generated/torch.linalg.cholesky.html",
    error=r"Low precision dtypes not supported|expected a tensor with 2 or more dimensions of float"
    r"|types other than float and double"
    r"|\"(linalg_|cholesky|lu_|eig|svd|geqrf|orgqr|triangular|inverse|ldl_)\w*\" not implemented for '(Half|BFloat16)'",
)
FFT = Rule(
    "fft",
    "breaks",
    _HALF,
    AUTOCAST_DEVICES,
    "There are no Fourier transforms in half precision, but for fp16 on CUDA with lengths that are powers of two, and "
    "autocast casts for them on the CPU alone.",
    "Give it fp32: cast what goes in with .float().",
    "https://docs.pytorch.org/docs/stable/generated/torch.fft.fft.html",
    error=r"Unsupported dtype (Half|BFloat16)|cuFFT only supports dimensions whose sizes are powers of two"
    r"|MKL FFT doesn't support tensors of type",
)
HALF_KERNELS = Rule(
    "half_kernels",
    "breaks",
    _HALF,
    AUTOCAST_DEVICES,
    "This operation has no kernel for half precision here, and autocast does not cast for it.",
    "Give it fp32: cast what goes in with .float().",
    f"{_AMP}#autocast-op-reference",
    error=r"not implemented for '(Half|BFloat16|ComplexHalf)'|must be either float or double|Half, Float or Double"
    r"|only supported for half, float and double",
)
MANUAL_CAST = Rule(
    "manual_cast",
    "hurts",
    _HALF,
    AUTOCAST_DEVICES,
    "A cast to a fixed format holds in every precision, and takes from autocast what it would keep in fp32.",
    "Leave the cast to autocast, or cast to the precision of another tensor: y.to(x.dtype).",
    f"{_AMP}#torch.autocast",
)
WEIGHTS = Rule(
    "weights",
    "breaks",
    _HALF,
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
    "Gradients are clipped while they are still multiplied by the loss scale, so that all but nothing is left of them.",
    "Call scaler.unscale_(optimizer) before clipping.",
    f"{_EXAMPLES}#gradient-clipping",
)
NESTED_AUTOCAST = Rule(
    "nested_autocast",
    "hurts",
    _HALF,
    AUTOCAST_DEVICES,
    "An autocast of the model's own overrides the one around the training, whatever precision that one has.",
    "Take it out; torch.autocast(..., enabled=False) is right where a part has to stay in fp32.",
    f"{_AMP}#torch.autocast",
)
OLD_INTERFACE = Rule(
    "old_interface",
    "hurts",
    _HALF,
    AUTOCAST_DEVICES,
    "torch.cuda.amp is deprecated, and its autocast does nothing on other devices.",
    "Use torch.amp with the device's name.",
    f"{_AMP}#torch.cuda.amp.autocast",
)
SCALER = Rule(
    "scaler",
    "hurts",
    ("bf16",),
    AUTOCAST_DEVICES,
    "bf16 has fp32's range: a GradScaler only costs a synchronisation and skips steps after each growth.",
    "Leave it out under bf16, or switch it off with enabled=False.",
    f"{_AMP}#gradient-scaling",
)
SIZES = Rule(
    "sizes",
    "hurts",
    (*_HALF, "fp8"),
    ("cuda",),
    "Tensor cores take multiples of 8 in half precision and of 16 in fp8: other sizes are padded, or run without them.",
    "Round the size up.",
    f"{_TENSOR_CORES}#requirements-tc",
)
LOSS = Rule(
    "loss",
    "hurts",
    _HALF,
    AUTOCAST_DEVICES,
    "The loss comes out in half precision: fp16's first gradient is the loss scale itself, which is past 65504, and "
    "bf16 keeps two or three digits of it.",
    "Compute the loss in fp32: cast the model's output with .float().",
    f"{_AMP}#gradient-scaling",
)

RULES: Final = (
    *(BINARY_CROSS_ENTROPY, LARGE_CONSTANT, SMALL_EPSILON, AUTOGRAD_FUNCTION, MIXED_OPERANDS, LINEAR_ALGEBRA, FFT),
    *(HALF_KERNELS, MANUAL_CAST, WEIGHTS, CLIPPING, NESTED_AUTOCAST, OLD_INTERFACE, SCALER, SIZES, LOSS),
)


def rule_of(error: str) -> Rule | None:
    """Return the rule whose error pattern matches a message, or None."""
    return next((rule for rule in RULES if rule.error is not None and re.search(rule.error, error)), None)

"""Variants: the dimensions besides precision and batch size that affect a step's speed or memory.

`autotune_amp.variants` applies them to a model and an optimizer, and finds the values that these support.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

import msgspec

from autotune_amp.core.dimensions import AROUND_FP8, PRECISION, Choices, Dimension

# For each type the default comes first, then the other values in order of rising risk.
Weights: TypeAlias = Literal["as_found", "bf16"]
MemoryFormat: TypeAlias = Literal["contiguous", "channels_last", "channels_last_3d"]
CudnnBenchmark: TypeAlias = Literal["as_found", "on"]
Fp8Recipe: TypeAlias = Literal["rowwise", "tensorwise"]  # granularity of the scale: per row or per tensor
Allocator: TypeAlias = Literal["as_found", "expandable_segments"]
ActivationCheckpointing: TypeAlias = Literal["off", "blocks"]
OptimizerImpl: TypeAlias = Literal["as_found", "foreach", "fused"]
Compile: TypeAlias = Literal["off", "default", "max-autotune-no-cudagraphs", "reduce-overhead"]


SO_ALREADY = "it is so already"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older name last; torch reads both


class Variant(Dimension[str]):
    """Dimension whose values are tried on the leading setting, each compared with the setting without it.

    `kind` is the type that lists the values. If `why_not_auto` is given, they are tried only if the user names the
    dimension, with that reason.
    """

    affects = frozenset({"speed", "memory", "numerics"})

    def __init__(self, name: str, kind: Any, label: str, why_not_auto: str | None = None) -> None:
        self.name, self.values, self.why_not_auto = name, get_args(kind), why_not_auto
        self.default = self.values[0]
        self._label = label

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:  # noqa: ARG002
        """Return the values that the workload supports, or those of them that the user named."""
        named, found = options.variants, dict[str, str | None](description.variants.get(self.name, {}))
        if named and not description.variants:
            found = dict.fromkeys(self.others, "a command's settings are those that it has placeholders for")
        if named is not None:
            found = {value: why for value, why in found.items() if self.name in named or value in named}
        why_not_auto = self.why_not_auto if named is None else None
        left_out = {value: reason for value, why in found.items() if (reason := why or why_not_auto) is not None}
        return Choices(tuple(value for value in found if value not in left_out), left_out)

    def apply(self, training: Any, value: str) -> None:  # noqa: D102 - see Dimension
        if value != self.default:
            training.set_up(self.name, value)

    @property
    def others(self) -> tuple[str, ...]:
        """Return the values other than the default."""
        return self.values[1:]

    def risk(self, value: str) -> int:  # noqa: D102 - see Dimension
        return int(self.values.index(value))

    def label(self, value: str) -> str:  # noqa: D102 - see Dimension
        return "" if value == self.default else self._label.format(value)


class _Written(Variant):
    """Variant that a single line of plain PyTorch sets."""

    def __init__(self, name: str, kind: Any, label: str, line: str) -> None:
        super().__init__(name, kind, label)
        self._line = line

    def export(self, value: str, target: str) -> Sequence[str] | None:
        return [self._line.format(value)] if target == "torch" and value != self.default else None


class _CudnnBenchmark(_Written):
    """Variant in which cuDNN times its algorithms for each shape and takes the fastest, instead of using heuristics.

    Not checked against fp32: without it cuDNN may choose any of the same algorithms.
    """

    affects = frozenset({"speed", "memory"})

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        found = super().choices(hardware, description, options)
        varies = description.sample_sizes or description.batch_sizes_seen or description.has_worst_batch
        if options.variants is not None or not varies:
            return found
        reason = f"batches have several shapes, and each would be timed anew; --try {self.name} tries it all the same"
        return Choices((), {**found.left_out, **dict.fromkeys(found.values, reason)})


class _Compile(_Written):
    """Variant for the mode of torch.compile. The mode that times every kernel is tried only if the user names it."""

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        found, slow = super().choices(hardware, description, options), "max-autotune-no-cudagraphs"
        if options.variants is not None or slow not in found.values:
            return found
        why = "it times every kernel for minutes, more than 100 s of a model of 125 million parameters on an H200: "
        left_out = {**found.left_out, slow: f"{why}--try {slow} tries it"}
        return Choices(tuple(value for value in found.values if value != slow), left_out)


class _Weights(Variant):
    def fits(self, value: str, setting: Any) -> bool:
        return value in (self.default, setting.precision)


class _Allocator(Variant):
    """Variant for the mode of CUDA's memory allocator, which an environment variable can set before Python starts."""

    affects = frozenset({"speed", "memory"})

    def environment(self, value: str, found: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variable that sets `value`, merged with its value in the environment `found`."""
        if value == self.default:
            return {}
        name = next((name for name in ALLOCATOR_VARIABLES if name in found), ALLOCATOR_VARIABLES[0])
        others = [part for part in found.get(name, "").split(",") if part and not part.startswith(value)]
        return {name: ",".join((*others, f"{value}:True"))}


Of = TypeVar("Of", bound=Any)  # a Setting, defined in a higher layer


class _Fp8Recipe(Variant):
    """Variant for the scaling of linear layers in fp8. Settings in other precisions have none."""

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        found = super().choices(hardware, description, options)
        reason = None
        if options.precisions is not None and "fp8" not in options.precisions:
            reason = "--precision leaves fp8 out"
        elif description.weights != "fp32":
            reason = f"the weights are kept in {description.weights}, and fp8 is checked for those in fp32 alone"
        elif options.variants is None and not hardware.has("fp8"):
            reason = str(PRECISION.why_not("fp8", hardware, description))
            if not found.values:  # whatever else speaks against it, this holds for all that is trained here
                return Choices((), {v: why if why == SO_ALREADY else reason for v, why in found.left_out.items()})
            reason += f" --try {self.name} emulates it"
        elif why := description.variants.get(COMPILE.name, {}).get("default"):
            reason = None if why == SO_ALREADY else f"fp8 pays when it is compiled: {why}"
        if reason is None:
            return found
        return Choices((), {**found.left_out, **dict.fromkeys(found.values, reason)})

    @property
    def others(self) -> tuple[str, ...]:
        return self.values

    def apply(self, training: Any, value: str) -> None:
        if training.spec.candidate.precision == "fp8":
            training.set_up(self.name, value)

    def fits(self, value: str, setting: Any) -> bool:
        return bool(value == self.default or setting.precision == "fp8")

    def value_in(self, setting: Any) -> str | None:
        return getattr(setting, self.name) if setting.precision == "fp8" else None

    def on(self, setting: Any, value: str) -> Any:
        compiled = setting.compile if setting.is_compiled else "default"
        return msgspec.structs.replace(setting, precision="fp8", fp8_recipe=value, compile=compiled)

    def off(self, setting: Of) -> Of:
        """Return an fp8 setting as a bf16 setting with the default recipe, and any other setting unchanged."""
        if setting.precision != "fp8":
            return setting
        return msgspec.structs.replace(setting, precision=AROUND_FP8, fp8_recipe=self.default)


WEIGHTS: Final = _Weights(
    "weights",
    Weights,
    "{} weights",
    why_not_auto="small updates of a plain optimizer round away on weights in bf16; --try weights tries it, as for an "
    "optimizer that rounds stochastically or keeps fp32 copies",
)
MEMORY_FORMAT: Final = _Written(
    "memory_format", MemoryFormat, "{}", "model = model.to(memory_format=torch.{})  # a convolution's output follows"
)
CUDNN_BENCHMARK: Final = _CudnnBenchmark(
    "cudnn_benchmark", CudnnBenchmark, "cudnn benchmark", "torch.backends.cudnn.benchmark = True"
)
FP8_RECIPE: Final = _Fp8Recipe("fp8_recipe", Fp8Recipe, "{}")
ALLOCATOR: Final = _Allocator("allocator", Allocator, "{}")
ACTIVATION_CHECKPOINTING: Final = Variant("activation_checkpointing", ActivationCheckpointing, "checkpointed {}")
OPTIMIZER_IMPL: Final = _Written(
    "optimizer_impl", OptimizerImpl, "{} optimizer", "# Make the optimizer with {}=True beside its other arguments."
)
COMPILE: Final = _Compile(
    "compile",
    Compile,
    "compiled ({})",
    'model.compile(mode="{0}")  # of a bare nn.Sequential, before torch 2.15: torch.compile(model, mode="{0}")',
)
FREES_MEMORY: Final = (ALLOCATOR, ACTIVATION_CHECKPOINTING)
# In the order of setting up: the allocator first, since the others allocate; the optimizer after the weights have their
# format; compilation last.
VARIANTS: Final = (
    ALLOCATOR,
    WEIGHTS,
    MEMORY_FORMAT,
    CUDNN_BENCHMARK,
    FP8_RECIPE,
    ACTIVATION_CHECKPOINTING,
    OPTIMIZER_IMPL,
    COMPILE,
)

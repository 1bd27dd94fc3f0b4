"""The dimensions beside precision and batch size that decide a step's speed or memory.

`autotune_amp.variants` sets them up on a model and an optimizer, and knows which of their values these can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from autotune_amp.core.dimensions import Choices, Dimension

# Of each the default comes first, and then the others, those with less to go wrong before those with more.
Weights: TypeAlias = Literal["as_found", "bf16"]
MemoryFormat: TypeAlias = Literal["contiguous", "channels_last", "channels_last_3d"]
ActivationCheckpointing: TypeAlias = Literal["off", "blocks"]
OptimizerImpl: TypeAlias = Literal["as_found", "foreach", "fused"]
Compile: TypeAlias = Literal["off", "default", "max-autotune-no-cudagraphs", "reduce-overhead"]


class Variant(Dimension[str]):
    """One whose values are tried on the setting that would win, each against the one without it.

    `kind` names the values. With `why_not_auto`, a reason, they are tried only where the user names the dimension.
    """

    affects = frozenset({"speed", "memory", "numerics"})

    def __init__(self, name: str, kind: Any, label: str, why_not_auto: str | None = None) -> None:
        self.name, self.values, self.why_not_auto = name, get_args(kind), why_not_auto
        self.default = self.values[0]
        self._label = label

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:  # noqa: ARG002
        """Those of its values that the workload can have, where the user does not ask for others alone."""
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
        """The values beside the default."""
        return self.values[1:]

    def risk(self, value: str) -> int:  # noqa: D102 - see Dimension
        return int(self.values.index(value))

    def label(self, value: str) -> str:  # noqa: D102 - see Dimension
        return "" if value == self.default else self._label.format(value)


class _Written(Variant):
    """One that plain PyTorch has a line for."""

    def __init__(self, name: str, kind: Any, label: str, line: str) -> None:
        super().__init__(name, kind, label)
        self._line = line

    def export(self, value: str, target: str) -> Sequence[str] | None:
        return [self._line.format(value)] if target == "torch" and value != self.default else None


class _Weights(Variant):
    def fits(self, value: str, setting: Any) -> bool:
        return value in (self.default, setting.precision)


# In the order in which they are set up: the optimizer is over weights as they are kept, and all of it is compiled.
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
ACTIVATION_CHECKPOINTING: Final = Variant("activation_checkpointing", ActivationCheckpointing, "checkpointed {}")
OPTIMIZER_IMPL: Final = _Written(
    "optimizer_impl", OptimizerImpl, "{} optimizer", "# Make the optimizer with {}=True beside its other arguments."
)
COMPILE: Final = _Written(
    "compile",
    Compile,
    "compiled ({})",
    'model.compile(mode="{0}")  # of a bare nn.Sequential, before torch 2.15: torch.compile(model, mode="{0}")',
)
VARIANTS: Final = (WEIGHTS, MEMORY_FORMAT, ACTIVATION_CHECKPOINTING, OPTIMIZER_IMPL, COMPILE)

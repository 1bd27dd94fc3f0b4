"""Setting: one value for every dimension; the unit that is tried and recommended."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from autotune_amp.core import variants
from autotune_amp.core.dimensions import (
    ACCUMULATION_STEPS,
    AS_FOUND,
    BATCH_SIZE,
    NUM_WORKERS,
    PINNED_MODULES,
    PRECISION,
    Dimension,
    Precision,
    autocast_precision,
)
from autotune_amp.core.documents import Count, Whole
from autotune_amp.core.variants import (
    ActivationCheckpointing,
    Allocator,
    Compile,
    CudnnBenchmark,
    Fp8Recipe,
    MemoryFormat,
    OptimizerImpl,
    Weights,
)

if TYPE_CHECKING:
    from typing_extensions import Self

# One for each field of `Setting`, in the order of a setting's name; risks are compared in this order too.
DIMENSIONS: Final[tuple[Dimension[Any], ...]] = (
    PRECISION,
    BATCH_SIZE,
    ACCUMULATION_STEPS,
    PINNED_MODULES,
    NUM_WORKERS,
    *variants.VARIANTS,
    AS_FOUND,
)
NUMERIC: Final = tuple(dimension for dimension in DIMENSIONS if "numerics" in dimension.affects)
ON_THE_WINNER: Final = tuple(dimension for dimension in DIMENSIONS if dimension.found_by == "variants")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A value for every dimension. Configs, fallback plans and table rows inherit its fields.

    `batch_size` is the number of samples in one forward pass on one device; `accumulation_steps` such passes make one
    optimizer step. `as_found` keeps the caller's own TF32 flags and autocast instead of the strict flags of
    `precision`: only the baseline uses it, and only if the two differ. `pinned_modules` run in fp32 whatever the
    precision. `num_workers` is the DataLoader's number of worker processes, None for the user's own number. `allocator`
    is the mode of CUDA's memory allocator, `weights` the format of fp32 parameters, `cudnn_benchmark` makes cuDNN time
    its algorithms, `fp8_recipe` is the scaling of fp8 linear layers, `optimizer_impl` the implementation of the
    optimizer's step, `compile` a mode of ``torch.compile``; with `activation_checkpointing` the model's repeated blocks
    recompute their activations in the backward pass.
    """

    precision: Precision
    batch_size: Count
    accumulation_steps: Count = 1
    as_found: bool = False
    pinned_modules: tuple[str, ...] = ()
    num_workers: Whole | None = None
    allocator: Allocator = "as_found"
    weights: Weights = "as_found"
    memory_format: MemoryFormat = "contiguous"
    cudnn_benchmark: CudnnBenchmark = "as_found"
    fp8_recipe: Fp8Recipe = "rowwise"
    activation_checkpointing: ActivationCheckpointing = "off"
    optimizer_impl: OptimizerImpl = "as_found"
    compile: Compile = "off"

    @classmethod
    def of(cls, setting: Setting, **others: Any) -> Self:
        """Make an instance of this class with every dimension of `setting`, and `others` for its further fields.

        ``Setting.of(config)`` is the config's bare setting: structs of two classes are never equal.
        """
        return cls(**{name: getattr(setting, name) for name in Setting.__struct_fields__}, **others)

    @property
    def ordinary(self) -> Setting:
        """Return the setting with this precision, batch size and accumulation, and defaults for all else."""
        return Setting(precision=self.precision, batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)

    @property
    def is_ordinary(self) -> bool:
        """Return whether every dimension besides precision, batch size and accumulation is at its default."""
        return Setting.of(self) == self.ordinary

    @property
    def numerics(self) -> Setting:
        """Return the setting reduced to the dimensions that affect numerics; equal results compute the same numbers."""
        return msgspec.structs.replace(self.ordinary, **{d.name: getattr(self, d.name) for d in NUMERIC})

    @property
    def set_up(self) -> dict[str, str]:
        """Return the non-default variants by name, in the order in which they are set up on model and optimizer."""
        found = {variant.name: variant.value_in(self) for variant in variants.VARIANTS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def autocast_precision(self) -> Precision:
        """Return the precision that autocast runs in."""
        return autocast_precision(self.precision)

    @property
    def is_compiled(self) -> bool:
        """Return whether the model is compiled."""
        return self.compile != "off"

    @property
    def with_nothing_set_up(self) -> Setting:
        """Return the setting with all variants at their defaults, so that model and optimizer are unchanged."""
        defaults = {variant.name: variant.default for variant in variants.VARIANTS}
        return msgspec.structs.replace(variants.FP8_RECIPE.off(self), **defaults)

    @property
    def scaling(self) -> Setting:
        """Return the part of the setting that the loss scale depends on: the ordinary setting and its pins."""
        return msgspec.structs.replace(self.ordinary, pinned_modules=self.pinned_modules)

    @property
    def with_own_workers(self) -> Setting:
        """Return the setting with the user's own number of loader workers."""
        return msgspec.structs.replace(self, num_workers=None)

    @property
    def effective_batch_size(self) -> int:
        """Return the number of samples per optimizer step on this device."""
        return self.batch_size * self.accumulation_steps

    @property
    def risks(self) -> tuple[int, ...]:
        """Return the risk of each dimension's value; among settings of similar speed the least tuple wins."""
        return tuple(dimension.risk(getattr(self, dimension.name)) for dimension in DIMENSIONS)

    def labelled(self, dimensions: Iterable[Dimension[Any]]) -> str:
        """Return the labels of the values of these dimensions, separated by blanks."""
        return " ".join(filter(None, (dimension.label(getattr(self, dimension.name)) for dimension in dimensions)))

    def __str__(self) -> str:
        return self.labelled(DIMENSIONS)

"""Setting: one value for every dimension; what can be tried and recommended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from typing_extensions import Self

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# From the one with least to go wrong at run time to the one with most.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that can be tried. Configs, fallback plans and table rows are settings with more to say.

    `batch_size` is the number of samples in one forward pass on one device; `accumulation_steps` such passes make one
    optimizer step.
    `as_found` keeps the caller's own TF32 flags and autocast instead of the strict flags of `precision`: only the
    baseline is run so, and only where the two differ. `pinned_modules` run in fp32 whatever the precision.
    `num_workers` is the DataLoader's number of worker processes, None for the user's own number.
    """

    precision: Precision
    batch_size: int
    accumulation_steps: int = 1
    as_found: bool = False
    pinned_modules: tuple[str, ...] = ()
    num_workers: int | None = None

    @classmethod
    def of(cls, setting: Setting, **others: Any) -> Self:
        """One of this class with every dimension of `setting`, and `others` for its further fields.

        ``Setting.of(config)`` is the config's bare setting: structs of two classes are never equal.
        """
        return cls(**{name: getattr(setting, name) for name in Setting.__struct_fields__}, **others)

    @property
    def ordinary(self) -> Setting:
        """The setting of this precision, batch size and accumulation with every other dimension at its default."""
        return Setting(precision=self.precision, batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)

    @property
    def is_ordinary(self) -> bool:
        """Whether every dimension beside precision, batch size and accumulation is at its default."""
        return Setting.of(self) == self.ordinary

    @property
    def with_own_workers(self) -> Setting:
        """The setting with the user's own number of loader workers."""
        return msgspec.structs.replace(self, num_workers=None)

    @property
    def effective_batch_size(self) -> int:
        """Samples behind one optimizer step on this device."""
        return self.batch_size * self.accumulation_steps

    def __str__(self) -> str:
        name = f"{self.precision} batch {self.batch_size}"
        if self.accumulation_steps > 1:
            name += f" x {self.accumulation_steps}"
        if self.pinned_modules:
            num_pinned = len(self.pinned_modules)
            name += f" with {num_pinned} module{'s' if num_pinned > 1 else ''} pinned"
        if self.num_workers is not None:
            name += f" with {self.num_workers} loader worker{'' if self.num_workers == 1 else 's'}"
        return name + (" as found" if self.as_found else "")

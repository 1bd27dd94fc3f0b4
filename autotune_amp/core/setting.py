"""Setting: a value for every dimension. A search tries settings and recommends one.

Each field declares a dimension's values, default and label. How a dimension is applied and searched is defined in
`autotune_amp.dimensions`.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from autotune_amp.core.documents import Count, Whole
from autotune_amp.core.precisions import AROUND_FP8, Precision, autocast_precision
from autotune_amp.core.text import count

if TYPE_CHECKING:
    from typing_extensions import Self

Fp8Recipe: TypeAlias = Literal["rowwise", "tensorwise"]  # granularity of the scale: per row or per tensor


class Label(NamedTuple):
    """Function that formats a dimension's value in the name of a setting. Default values are left out of the name."""

    text: Callable[[Any], str]


def _pinned_label(names: tuple[str, ...]) -> str:
    return f"with {count(len(names), 'module')} pinned"


def _workers_label(num: int) -> str:
    return f"with {count(num, 'loader worker')}"


def arguments_label(arguments: tuple[tuple[str, str], ...]) -> str:
    """Return the label of a command's arguments, such as ``attn=eager seq=1024``; empty without any."""
    return " ".join(f"{name.lstrip('!')}={value}" for name, value in arguments)


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """A value for every dimension. Configs, fallback plans and table rows inherit its fields.

    `batch_size` is the number of samples in one forward pass on one device; `accumulation_steps` such passes make one
    optimizer step. `as_found` keeps the caller's own TF32 flags and autocast instead of the strict flags of
    `precision`: only the baseline uses it, and only if the two differ. `pinned_modules` run in fp32 whatever the
    precision, where ``*`` in a name stands for any text. `num_workers` is the DataLoader's number of worker processes,
    None for the user's own number; `pin_memory` and `prefetch_factor` are further arguments of it. `allocator` is the
    mode of CUDA's memory allocator, `weights` the format of fp32 parameters, `cudnn_benchmark` makes cuDNN time its
    algorithms, `attention` is the preferred backend of ``scaled_dot_product_attention``, `fp8_recipe` is the scaling of
    fp8 linear layers, `optimizer_impl` the implementation of the optimizer's step, `compile` a mode of
    ``torch.compile``; with `activation_checkpointing` the model's repeated blocks recompute their activations in the
    backward pass. `arguments` are the values of a command's own placeholders that differ from today's, sorted by name;
    a name that begins with ``!`` is of an argument that does not affect numerics.
    """

    precision: Annotated[Precision, Label(str)]
    batch_size: Annotated[Count, Label("batch {}".format)]
    accumulation_steps: Annotated[Count, Label("x {}".format)] = 1
    as_found: Annotated[bool, Label("as found".format)] = False
    pinned_modules: Annotated[tuple[str, ...], Label(_pinned_label)] = ()
    num_workers: Annotated[Whole | None, Label(_workers_label)] = None
    pin_memory: Annotated[Literal["as_found", "on"], Label("pinned memory".format)] = "as_found"
    prefetch_factor: Annotated[Literal["as_found", "4"], Label("prefetching {}".format)] = "as_found"
    # Variants: dimensions whose type lists their values, in the order of rising risk. They are set up in this order:
    # the allocator first, since the others allocate; the optimizer after the weights have their format; compilation
    # last.
    allocator: Annotated[Literal["as_found", "expandable_segments"], Label(str)] = "as_found"
    weights: Annotated[Literal["as_found", "bf16"], Label("{} weights".format)] = "as_found"
    memory_format: Annotated[Literal["contiguous", "channels_last", "channels_last_3d"], Label(str)] = "contiguous"
    cudnn_benchmark: Annotated[Literal["as_found", "on"], Label("cudnn benchmark".format)] = "as_found"
    attention: Annotated[Literal["as_found", "flash", "efficient", "math", "cudnn"], Label("{} attention".format)] = (
        "as_found"
    )
    fp8_recipe: Annotated[Fp8Recipe, Label(str)] = "rowwise"
    activation_checkpointing: Annotated[Literal["off", "blocks"], Label("checkpointed {}".format)] = "off"
    optimizer_impl: Annotated[Literal["as_found", "foreach", "fused"], Label("{} optimizer".format)] = "as_found"
    compile: Annotated[
        Literal["off", "default", "max-autotune-no-cudagraphs", "reduce-overhead"], Label("compiled ({})".format)
    ] = "off"
    arguments: Annotated[tuple[tuple[str, str], ...], Label(arguments_label)] = ()

    @classmethod
    def of(cls, setting: Setting, **others: Any) -> Self:
        """Make an instance of this class with every dimension of `setting`, and `others` for its further fields.

        ``Setting.of(config)`` is the config's bare setting: structs of two classes are never equal.
        """
        return cls(**{name: getattr(setting, name) for name in Setting.__struct_fields__}, **others)

    @property
    def ordinary(self) -> Setting:
        """Return the setting with this precision, batch size and accumulation, and all other dimensions at defaults."""
        return Setting(precision=self.precision, batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)

    @property
    def is_ordinary(self) -> bool:
        """Return whether every dimension besides precision, batch size and accumulation is at its default."""
        return Setting.of(self) == self.ordinary

    @property
    def active_variants(self) -> dict[str, str]:
        """Return the variants that change model, optimizer or process, by name, in the order of their set-up."""
        names = (name for name in VARIANT_VALUES if name not in LOADER_ARGUMENTS)
        return {name: getattr(self, name) for name in names if self.uses(name)}

    @property
    def loader_arguments(self) -> dict[str, int]:
        """Return the arguments of a DataLoader that this setting decides, without its batch size."""
        workers = {} if self.num_workers is None else {"num_workers": self.num_workers}
        pins = {"pin_memory": True} if self.uses("pin_memory") else {}
        prefetch = {"prefetch_factor": int(self.prefetch_factor)} if self.uses("prefetch_factor") else {}
        return {**workers, **pins, **prefetch}

    def with_workers_of(self, num_workers: int | None) -> Setting:
        """Return the setting with the loader's own number of workers if it has an argument that only workers take."""
        needs_workers = self.uses("prefetch_factor") and self.num_workers is None
        return msgspec.structs.replace(self, num_workers=num_workers) if needs_workers else self

    @property
    def has_variants(self) -> bool:
        """Return whether a variant or a command's own argument has another value than today's."""
        return any(map(self.uses, VARIANT_VALUES)) or bool(self.arguments)

    @property
    def numeric_arguments(self) -> tuple[tuple[str, str], ...]:
        """Return the arguments that affect numerics."""
        return tuple(argument for argument in self.arguments if not argument[0].startswith("!"))

    def uses(self, name: str) -> bool:
        """Return whether the dimension `name` changes the training: it has another value than the default.

        The fp8 recipe does so in fp8 with any value, and only in fp8.
        """
        if name == "fp8_recipe":
            return self.precision == "fp8"
        return bool(getattr(self, name) != DEFAULTS[name])

    @property
    def misfits(self) -> dict[str, str]:
        """Return the fields whose values this precision does not allow, by name with the values that it allows."""
        allowed = {}
        if self.weights not in ("as_found", self.precision):
            allowed["weights"] = f"as_found with {self.precision}: only bf16 can have bf16 weights"
        if self.precision != "fp8" and self.fp8_recipe != DEFAULTS["fp8_recipe"]:
            allowed["fp8_recipe"] = "left out: only fp8 has recipes"
        return allowed

    @property
    def autocast_precision(self) -> Precision:
        """Return the precision that autocast runs in."""
        return autocast_precision(self.precision)

    @property
    def is_compiled(self) -> bool:
        """Return whether the model is compiled."""
        return self.uses("compile")

    @property
    def without_fp8(self) -> Self:
        """Return the setting with bf16 in place of fp8; a setting without fp8 is returned unchanged."""
        if self.precision != "fp8":
            return self
        return msgspec.structs.replace(self, precision=AROUND_FP8, fp8_recipe=DEFAULTS["fp8_recipe"])

    @property
    def without_variants(self) -> Self:
        """Return the setting with all variants and arguments at their defaults, so that the training is unchanged."""
        names = (*VARIANT_VALUES, "arguments")
        return msgspec.structs.replace(self.without_fp8, **{name: DEFAULTS[name] for name in names})

    @property
    def scaling(self) -> Setting:
        """Return the part of the setting that the loss scale depends on: the ordinary setting and its pins."""
        return msgspec.structs.replace(self.ordinary, pinned_modules=self.pinned_modules)

    @property
    def with_own_workers(self) -> Self:
        """Return the setting with the user's own number of loader workers."""
        return msgspec.structs.replace(self, num_workers=None)

    @property
    def effective_batch_size(self) -> int:
        """Return the number of samples per optimizer step on this device."""
        return self.batch_size * self.accumulation_steps

    def labelled(self, names: Container[str]) -> str:
        """Return the labels of these dimensions' values in the order of the fields, separated by blanks."""
        values = ((name, getattr(self, name)) for name in Setting.__struct_fields__ if name in names)
        return " ".join(_LABELS[name](value) for name, value in values if value != DEFAULTS[name])

    def __str__(self) -> str:
        return self.labelled(Setting.__struct_fields__)


LOADER_ARGUMENTS: Final = ("pin_memory", "prefetch_factor")
DEFAULTS: Final[dict[str, Any]] = {field.name: field.default for field in msgspec.structs.fields(Setting)}
_KINDS: Final = {name: get_args(kind) for name, kind in get_type_hints(Setting, include_extras=True).items()}
_LABELS: Final = {name: label.text for name, (*_, label) in _KINDS.items()}
VARIANT_VALUES: Final[dict[str, tuple[str, ...]]] = {
    name: get_args(kind) for name, (kind, *_) in _KINDS.items() if name != "precision" and get_origin(kind) is Literal
}

"""Recipe of torchao for fp8 linear layers: a scale per tensor or per row. Used with precision fp8 only."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.compile import COMPILE
from autotune_amp.dimensions.dimension import APPLIED_ALREADY, AnySetting, Choices, Variant
from autotune_amp.dimensions.precision import PRECISION

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining

_PRODUCTS_SHARE = 0.5  # largest share of a bf16 matrix product's time that fp8 tensor cores save


class _Fp8Recipe(Variant):
    """Variant that sets precision fp8 and compiles too. Both recipes are tried on the best other setting."""

    name = "fp8_recipe"
    sets_also = (COMPILE.name,)
    extra_seconds = COMPILE.extra_seconds
    # Convolutions count as matrix products in the profile, but do not run in fp8.
    removable: ClassVar[Mapping[str, float]] = {
        "matrix_products": _PRODUCTS_SHARE,
        "slow_matrix_products": _PRODUCTS_SHARE,
        "convolutions": -_PRODUCTS_SHARE,
    }

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:
        supported = super().choices(hardware, description, options)
        reason = None
        if options.precisions is not None and "fp8" not in options.precisions:
            reason = "--precision leaves fp8 out"
        elif description.weights != "fp32":
            reason = f"the weights are kept in {description.weights}, and fp8 is supported only for fp32 weights"
        elif options.variants is None and not hardware.has("fp8"):
            reason = str(PRECISION.unsupported_reason("fp8", hardware, description))
            if not supported.values:  # the hardware is the first reason, whatever the model supports
                return Choices(
                    (), {v: why if why == APPLIED_ALREADY else reason for v, why in supported.left_out.items()}
                )
            reason += f" --try {self.name} emulates it"
        elif why := description.variants.get(COMPILE.name, {}).get("default"):
            reason = None if why == APPLIED_ALREADY else f"fp8 is faster only if it is compiled: {why}"
        if reason is None:
            return supported
        return Choices((), {**supported.left_out, **dict.fromkeys(supported.values, reason)})

    @property
    def others(self) -> tuple[str, ...]:
        return self.values

    def apply(self, training: Any, value: str) -> None:
        if training.spec.candidate.precision == "fp8":
            training.apply_variant(self, value)

    def on(self, setting: AnySetting, value: str) -> AnySetting:
        compiled = setting if setting.is_compiled else COMPILE.on(setting, "default")
        return super().on(PRECISION.on(compiled, "fp8"), value)

    def is_without(self, other: Setting, setting: Setting) -> bool:
        return other.precision != setting.precision  # the leading setting before may have any other precision

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether a layer already multiplies in fp8, by this recipe or converted by the user."""
        from autotune_amp.precision import fp8

        return fp8.is_converted(live.modules, value)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - alike for all
        from autotune_amp.precision import fp8

        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed: pip install 'torchao>=0.18'"
        if not fp8.has_convertible_linears(live.models):
            return (
                "between its first and last Linear the model has no Linear with fp32 weights and sizes that are "
                f"multiples of {fp8.MULTIPLE}"
            )
        return None

    def change(self, value: str, live: LiveTraining) -> None:
        """Make the Linear layers multiply in fp8 where autocast is on."""
        from autotune_amp.precision import fp8

        fp8.set_recipe(live.models, value, live.device)


FP8_RECIPE = _Fp8Recipe()

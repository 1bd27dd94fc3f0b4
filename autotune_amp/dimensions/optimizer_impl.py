"""Implementation of an optimizer's step: one kernel per tensor, one for many tensors, or one for the whole update."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.dimensions.dimension import Leader, Variant

if TYPE_CHECKING:
    import torch

    from autotune_amp.dimensions.live_training import LiveTraining

MIN_OPTIMIZER_SHARE = (
    0.03  # of a step, that the optimizer must take: a smaller gain than 3 % decides nothing (ranking.PLATEAU)
)


class _OptimizerImpl(Variant):
    name = "optimizer_impl"
    removable: ClassVar[Mapping[str, float]] = {
        "optimizer": 1.0,
        "idle": 1.0,
    }  # includes the time in which the host launches its kernels
    line = "# Make the optimizer with {}=True beside its other arguments."

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether all optimizers use this implementation already."""
        groups = [group for optimizer in live.optimizers for group in optimizer.param_groups]
        return bool(groups) and all(_implementation(group, live.device) == value for group in groups)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        import torch

        if not live.optimizers:
            return "no optimizer is known"
        for optimizer in live.optimizers:
            kind, groups = type(optimizer), optimizer.param_groups
            if not kind.__module__.startswith("torch.optim.") or value not in inspect.signature(kind).parameters:
                return f"{kind.__module__}.{kind.__qualname__} offers no {value} implementation"
            if value == "fused" and kind is torch.optim.SGD and any(group["momentum"] for group in groups):
                return "where a loss scaler skips its first step, torch's fused SGD goes on from uninitialised momentum"
        try:
            for optimizer in live.optimizers:
                _checked(value, optimizer)
        except (RuntimeError, ValueError) as error:
            return str(error).split("\n")[0]
        return None

    def change(self, value: str, live: LiveTraining) -> None:
        """Switch the optimizers to this implementation, keeping their state and hyperparameters.

        Passes on torch's errors. A checkpoint contains an implementation, which may be another: after loading one the
        switch is repeated.
        """
        for optimizer in live.optimizers:
            _checked(value, optimizer)
            _set(optimizer, value)
            optimizer.register_load_state_dict_post_hook(partial(_set, value=value))

    def reason_against(self, value: str, leader: Leader) -> str | None:  # noqa: ARG002 - alike for all
        timed = [m for m in leader.measurements[leader.setting] if m.update_seconds is not None]
        shares = [(m.update_seconds or 0.0) / m.step_seconds for m in timed]
        if leader.effect == "speed" and shares and max(shares) < MIN_OPTIMIZER_SHARE:
            return f"the optimizer takes {100 * max(shares):.1f} % of a step"
        return None


def _set(optimizer: Any, value: str) -> None:
    import torch

    offered = inspect.signature(type(optimizer)).parameters.keys() & {"foreach", "fused"}
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update({name: value == name for name in offered})
    # Checked by GradScaler before it leaves unscaling and skipping to the optimizer; torch sets it on construction.
    optimizer._step_supports_amp_scaling = value == "fused"
    for parameter, state in optimizer.state.items():  # a fused step counts on the device, others on the host
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(parameter.device if value == "fused" else "cpu", torch.float32)


def _implementation(group: dict[str, Any], device: torch.device) -> str | None:
    if group.get("fused"):
        return "fused"
    # If not set, torch uses it on an accelerator (torch.optim.optimizer._default_to_fused_or_foreach).
    is_default = group.get("foreach") is None and device.type != "cpu"
    return "foreach" if group.get("foreach") or is_default else None


def _checked(value: str, optimizer: Any) -> None:
    """Call torch's constructor with the optimizer's hyperparameters and a dummy parameter, to raise its errors."""
    import torch

    kind = type(optimizer)
    chosen = {**optimizer.defaults, "foreach": value == "foreach", "fused": value == "fused"}
    options = {name: chosen[name] for name in inspect.signature(kind).parameters.keys() & chosen.keys()}
    some = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    alike = torch.zeros(1, dtype=some.dtype, device=some.device, requires_grad=True)
    kind([alike], **options)


OPTIMIZER_IMPL = _OptimizerImpl()

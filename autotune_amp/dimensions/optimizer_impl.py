"""Implementation of the optimizer's step: a kernel per tensor, foreach (for many tensors), or fused (all in one)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from autotune_amp.dimensions.dimension import Leader, Variant

if TYPE_CHECKING:
    import torch

    from autotune_amp.dimensions.live_training import LiveTraining

# Least share of a step that the optimizer takes, since no smaller gain than 3 % counts (ranking.MIN_GAIN).
MIN_OPTIMIZER_SHARE = 0.03


class _OptimizerImpl(Variant):
    name = "optimizer_impl"
    # Idle time can be that in which the host launches the optimizer's kernels.
    removable: ClassVar[Mapping[str, float]] = {"optimizer": 1.0, "idle": 1.0}
    line = "# Create the optimizer with {}=True in addition to its other arguments."

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether all optimizers already use this implementation."""
        groups = [group for optimizer in live.optimizers for group in optimizer.param_groups]
        return bool(groups) and all(_implementation(group, live.device) == value for group in groups)

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        import torch

        if not live.optimizers:
            return "no optimizer is known"
        for optimizer in live.optimizers:
            kind, groups = type(optimizer), optimizer.param_groups
            if not kind.__module__.startswith("torch.optim.") or value not in inspect.signature(kind).parameters:
                return f"{kind.__module__}.{kind.__qualname__} has no {value} implementation"
            if value == "fused" and kind is torch.optim.SGD and any(group["momentum"] for group in groups):
                return "torch's fused SGD has uninitialised momentum after a loss scaler skips its first step"
        try:
            for optimizer in live.optimizers:
                _raise_if_unsupported(value, optimizer)
        except (RuntimeError, ValueError) as error:
            return str(error).split("\n")[0]
        return None

    def change(self, value: str, live: LiveTraining) -> None:
        """Switch the optimizers to this implementation, keeping their state and hyperparameters.

        The switch is repeated after `load_state_dict`, since a checkpoint may contain another implementation. Errors of
        torch's constructor pass through.
        """
        for optimizer in live.optimizers:
            _raise_if_unsupported(value, optimizer)
            _set_implementation(optimizer, value)
            optimizer.register_load_state_dict_post_hook(partial(_set_implementation, value=value))

    def reason_against(self, value: str, leader: Leader) -> str | None:  # noqa: ARG002 - alike for all
        timed = [m for m in leader.measurements[leader.setting] if m.update_seconds is not None]
        shares = [(m.update_seconds or 0.0) / m.step_seconds for m in timed]
        if leader.effect == "speed" and shares and max(shares) < MIN_OPTIMIZER_SHARE:
            return f"the optimizer takes {100 * max(shares):.1f} % of a step"
        return None


def _set_implementation(optimizer: Any, value: str) -> None:
    """Set the implementation in the optimizer's options, and move its step counts to the device that it needs."""
    import torch

    implementations = inspect.signature(type(optimizer)).parameters.keys() & {"foreach", "fused"}
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update({name: value == name for name in implementations})
    # GradScaler reads this attribute: if True, the optimizer itself unscales and skips. torch's constructor sets it.
    optimizer._step_supports_amp_scaling = value == "fused"
    for parameter, state in optimizer.state.items():  # fused keeps its step count on the device, the others on the host
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(parameter.device if value == "fused" else "cpu", torch.float32)


def _implementation(group: dict[str, Any], device: torch.device) -> str | None:
    """Return the implementation that a parameter group uses; None for a kernel per tensor."""
    if group.get("fused"):
        return "fused"
    # By default torch uses foreach on an accelerator (torch.optim.optimizer._default_to_fused_or_foreach).
    is_default = group.get("foreach") is None and device.type != "cpu"
    return "foreach" if group.get("foreach") or is_default else None


def _raise_if_unsupported(value: str, optimizer: Any) -> None:
    """Raise the errors of torch's constructor for this implementation, called with a dummy parameter."""
    import torch

    kind = type(optimizer)
    arguments = {**optimizer.defaults, "foreach": value == "foreach", "fused": value == "fused"}
    options = {name: arguments[name] for name in inspect.signature(kind).parameters.keys() & arguments.keys()}
    some = next(parameter for group in optimizer.param_groups for parameter in group["params"])
    dummy = torch.zeros(1, dtype=some.dtype, device=some.device, requires_grad=True)
    kind([dummy], **options)


OPTIMIZER_IMPL = _OptimizerImpl()

"""Activation checkpointing: blocks of the model recompute activations in the backward pass instead of storing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from autotune_amp.dimensions.dimension import Variant

if TYPE_CHECKING:
    from torch import nn

    from autotune_amp.dimensions.live_training import LiveTraining

# Names of the methods and the properties in Transformers, those of versions before 5.23 last.
_ENABLE_METHODS = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_STATE_PROPERTIES = ("is_activation_checkpointing", "is_gradient_checkpointing")


class _ActivationCheckpointing(Variant):
    name = "activation_checkpointing"
    frees_memory = True

    def is_applied(self, value: str, live: LiveTraining) -> bool:  # noqa: ARG002 - the only value
        """Return whether blocks are already checkpointed by torch's wrapper or by Transformers."""
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

        return any(isinstance(module, CheckpointWrapper) for module in live.modules) or any(
            getattr(model, next((name for name in _STATE_PROPERTIES if hasattr(model, name)), ""), False)
            for model in _transformers_models(live)
        )

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:  # noqa: ARG002 - the only value
        blocks = _transformers_models(live) or [block for _, _, block in repeated_blocks(live)]
        if not blocks:
            return "the model has no repeated blocks: two or more modules of one class in a ModuleList or Sequential"
        if any(_has_running_statistics(module) for block in blocks for module in block.modules()):
            return "its blocks contain BatchNorm, whose running statistics the second forward pass would update again"
        return None

    def change(self, value: str, live: LiveTraining) -> None:  # noqa: ARG002 - the only value
        """Make each block recompute its forward pass in the backward pass, with the same random draws.

        Transformers' own method is used if the model has it. The names in a ``state_dict`` do not change.
        """
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        for model in (models := _transformers_models(live)):
            enable = next(getattr(model, name) for name in _ENABLE_METHODS if hasattr(model, name))
            enable({"use_reentrant": False})
        if models:
            return
        wrapped: dict[nn.Module, nn.Module] = {}  # a block may occur in several places
        for container, name, block in list(repeated_blocks(live)):
            if block not in wrapped:
                wrapped[block] = checkpoint_wrapper(block)
            container._modules[name] = wrapped[block]


def _transformers_models(live: LiveTraining) -> list[Any]:
    """Return the models that Transformers can checkpoint itself."""
    models: list[Any] = live.own_models
    return [model for model in models if getattr(model, "supports_gradient_checkpointing", False)]


def repeated_blocks(live: LiveTraining) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the repeated blocks of the outermost containers: the container, the block's name in it, and the block.

    A block has submodules and shares its class with another element of its container.
    """
    from torch import nn

    inner_modules: set[nn.Module] = set()
    for container in live.modules:
        if container in inner_modules or not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            continue
        counts = Counter(type(element) for element in container._modules.values())
        for name, element in container._modules.items():
            if element is not None and counts[type(element)] > 1 and next(element.children(), None) is not None:
                inner_modules.update(element.modules())
                yield container, name, element


def _has_running_statistics(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None


ACTIVATION_CHECKPOINTING = _ActivationCheckpointing()

"""Puts code around one module's forward by swapping the class of that instance for a subclass.

Hooks would not do: they break fullgraph compilation, and those registered after compiling are silently ignored. A
changed class is guarded on, so a compiled model recompiles once, and goes back to its old graph for free.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, SupportsIndex

import torch
from torch import nn

from autotune_amp.core.errors import InvalidRequestError


class Player(Protocol):
    """What to do around a forward: a plain instance attribute of the module, so that compiled graphs guard on it."""

    def play(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `forward`, with whatever belongs before, around and after it."""
        ...

    def for_copy(self) -> Player | None:
        """What a copied or unpickled module keeps."""
        ...


_PLAYER = "_autotune_amp_player"


def player_of(module: nn.Module) -> Player | None:
    """The player set on `module`."""
    player: Player | None = _uncompiled(module).__dict__.get(_PLAYER)
    return player


def set_player(module: nn.Module, player: Player | None) -> None:
    """Have `player` play around the forward of `module`; None gives back the original class and leaves nothing."""
    module = _uncompiled(module)
    if player is None:
        _restore(module)
        return
    if isinstance(module, torch.jit.ScriptModule):
        raise InvalidRequestError(
            "A TorchScript module cannot be pinned, overridden or observed: its forward is compiled in.",
            "Give the model as it was before torch.jit.script or torch.jit.trace; torch.compile is supported.",
        )
    _swap(module)
    state = module.__dict__
    if "forward" in state and not isinstance(state["forward"], _OwnForward):
        state["forward"] = _OwnForward(module, state["forward"])
    state[_PLAYER] = player


def _uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile wrapped, so that the player stands inside the compiled graph."""
    inner: nn.Module = getattr(module, "_orig_mod", module)
    return inner


def _swap(module: nn.Module) -> None:
    if not isinstance(module, _Swapped):
        module.__class__ = _swapped_class(type(module))  # type: ignore[arg-type] # mypy takes a module's own hash for its class's


def _restore(module: nn.Module) -> None:
    state = module.__dict__
    state.pop(_PLAYER, None)
    if isinstance(state.get("forward"), _OwnForward):
        state["forward"] = state["forward"].__wrapped__
    # A class made from ours since, as FSDP2's fully_shard does, stays: without a player its forward is the original's.
    if (original := type(module).__dict__.get("_original")) is not None:
        module.__class__ = original


class _Swapped:
    """First base of every swapped class."""

    _original: type[nn.Module]

    def __init_subclass__(cls) -> None:
        """End here: a registry kept by the original's own __init_subclass__ must not see the swapped class."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copies and pickles name the original class: the swapped one has no name to be imported by."""
        swapped = next(base for base in type(self).__mro__ if "_original" in base.__dict__)
        # Protocol 2 and later would have pickle insist that the class rebuilt is type(self); 1 does the same without.
        reduced: Any = super().__reduce_ex__(min(protocol.__index__(), 1))
        build, arguments, state, *rest = reduced
        arguments = tuple(self._original if argument is swapped else argument for argument in arguments)
        state = dict(state)
        player = state.pop(_PLAYER).for_copy()
        if player is not None:
            return _rebuild, (build, arguments), state | {_PLAYER: player}, *rest
        if isinstance(state.get("forward"), _OwnForward):
            state["forward"] = state["forward"].__wrapped__
        return build, arguments, state, *rest


def _rebuild(build: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    module = build(*arguments)
    _swap(module)
    return module


@functools.cache
def _swapped_class(original: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _play(self, original.forward, (self, *args), kwargs)

    body = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    make_class: Any = type(original)
    swapped: type[nn.Module] = make_class(
        original.__name__, (_Swapped, original), {**body, "forward": forward, "_original": original}
    )
    return swapped


class _OwnForward:
    """Plays around a forward that was set on the instance, as Accelerate does: it hides the one of the class."""

    __wrapped__: Callable[..., Any]

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module = module
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _play(self.module, self.__wrapped__, args, kwargs)


def _play(module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Without a player: someone, as Accelerate's wrappers do, kept this forward, and the last role ended since.
    player = module.__dict__.get(_PLAYER)
    return forward(*args, **kwargs) if player is None else player.play(module, forward, args, kwargs)

"""Which modules a precision harms: how wrong each is on the inputs that it really gets, and where numbers blow up.

Hooks, so compiled models run eagerly here; nothing else of a check depends on what is found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from autotune_amp.core.setting import Precision
from autotune_amp.numerics.draws import Generators, generators, set_generators
from autotune_amp.numerics.modules import modules_by_name
from autotune_amp.numerics.nonfinite import Recorder
from autotune_amp.numerics.passes import Passes
from autotune_amp.precision.mode import HALF_DTYPES, has_half_weights

OUTSIDE = ""  # the code around the modules: the loss function, as a rule
# A child that is wrong by so large a share of its parent's error explains the parent.
_EXPLAINS = 0.3


class _Begun(NamedTuple):
    """A call: what to repeat it with, in fp32."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generators: Generators


class LocalErrors:
    """The error that each module makes itself: its output against that of fp32 on the same inputs.

    Relative to how its output differs between samples: an offset that all samples share says nothing of them, and a
    later module may take it away.
    """

    def __init__(self, modules: dict[str, nn.Module], device: torch.device) -> None:
        self.by_module: dict[str, float] = {}
        self._modules = modules
        self._device = device
        self._begun: list[_Begun] = []
        self._is_recomputing = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Measure during the forward pass inside."""
        with ExitStack() as hooks:
            for name, module in self._modules.items():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                hooks.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(self._after(name)).remove)
            yield

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_recomputing:
            args, kwargs = tree_map(_as_fp32, (args, kwargs))  # copies, so that an in-place module does no harm
            self._begun.append(_Begun(module, args, kwargs, generators(self._device)))

    def _recomputed(self, begun: _Begun) -> list[Tensor] | None:
        self._is_recomputing = True
        here = generators(self._device)
        set_generators(self._device, begun.generators)
        try:
            off = torch.autocast(self._device.type, enabled=False, cache_enabled=False)
            with torch.no_grad(), off:
                return list(_floating(begun.module(*begun.args, **begun.kwargs)))
        except Exception:  # one that cannot run in fp32, or twice, stays unknown; naming it is all this is for
            return None
        finally:
            self._is_recomputing = False
            set_generators(self._device, here)

    def _after(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            if self._is_recomputing:
                return
            # A call that raised, inside a module that caught it, never ended.
            while (begun := self._begun.pop()).module is not module:
                pass
            expected = self._recomputed(begun)
            if expected is None:
                return
            pairs = zip(_floating(output), expected, strict=False)
            error = max((_error(given, wanted) for given, wanted in pairs if given.shape == wanted.shape), default=0.0)
            self.by_module[name] = max(error, self.by_module.get(name, 0.0))

        return after

    def own(self) -> dict[str, float]:
        """Without the modules whose error one inside them explains, the model itself, and those without error."""
        return {
            name: error
            for name, error in self.by_module.items()
            if name and error > 0 and not any(self.by_module[i] >= _EXPLAINS * error for i in self._inside(name))
        }

    def _inside(self, name: str) -> Iterable[str]:
        return (other for other in self.by_module if other.startswith(name + "."))


def local_errors(passes: Passes, index: int, precision: Precision) -> LocalErrors:
    """One forward and backward pass from the first weights, watched; about as costly as the model is deep, forward."""
    errors = LocalErrors(modules_by_name(passes.model), passes.subject.device)
    with torch.compiler.set_stance("force_eager"):
        passes.run(index, precision, around_forward=errors.watching())
    return errors


def blown_up(passes: Passes, index: int, precision: Precision, scale: float) -> tuple[str, ...]:
    """The modules where this pass, from the weights as they are, turns non-finite and fp32's does not.

    `OUTSIDE` where no module does.
    """
    healthy = None if has_half_weights(passes.model) else _recorded(passes, index, "fp32", 1.0)
    damaged, _ = _recorded(passes, index, precision, scale).damaged(healthy)
    return tuple(filter(None, damaged)) or (OUTSIDE,)


def _recorded(passes: Passes, index: int, precision: Precision, scale: float) -> Recorder:
    recorder = Recorder(modules_by_name(passes.model))
    with torch.compiler.set_stance("force_eager"):
        passes.run(
            index,
            precision,
            scale=scale,
            restores=False,
            around_forward=recorder.watching_forward(),
            before_backward=recorder.watch_backward,
        )
    return recorder


def _as_fp32(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    is_half = leaf.dtype in HALF_DTYPES
    return leaf.detach().float() if is_half else leaf.detach().clone()


def _floating(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())


def _error(given: Tensor, wanted: Tensor) -> float:
    given, wanted = given.detach().float(), wanted.float()
    usable = wanted.isfinite()
    if not bool(given.isfinite().where(usable, True).all()):
        return math.inf
    wanted, given = wanted.where(usable, 0), given.where(usable, 0)
    difference = float(torch.linalg.vector_norm(given - wanted))
    spread = wanted - wanted.mean(0) if wanted.dim() and len(wanted) > 1 else wanted
    size = float(torch.linalg.vector_norm(spread))
    whole = float(torch.linalg.vector_norm(wanted))
    size = size if size > 1e-6 * whole else whole  # the same for every sample, as positions are
    return difference / size if size else (math.inf if difference else 0.0)

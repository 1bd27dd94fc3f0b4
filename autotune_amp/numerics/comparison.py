"""Gradients of one precision against those of fp32, parameter by parameter, in units of the noise between batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain

import torch
from torch import Tensor

from autotune_amp.core.fidelity import GradientDamage
from autotune_amp.numerics.passes import Gradients

# Entries so much smaller than the largest of their parameter move nothing: not worth a loss scale.
COUNTS = 2.0**-12
# A gradient that another rounding in fp32 changes by more than this share of itself is rounding noise, not a signal:
# that of a key's bias in attention, for one, is zero on paper.
MAX_OWN_NOISE = 0.1


@dataclass
class Sums:
    """Sums of squares over entries and batches, and counts; `+=` adds another's."""

    difference: float = 0.0
    reference: float = 0.0
    low: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    num_counting: float = 0.0
    num_flushed: float = 0.0

    def __iadd__(self, other: Sums) -> Sums:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def noise_ratio(self) -> float:
        """Rounding noise over batch noise; over the gradient itself where the batches are all alike."""
        yardstick = self.noise if self.noise > 1e-12 * self.reference else self.reference
        return math.sqrt(self.difference / yardstick) if yardstick else (math.inf if self.difference else 0.0)

    @property
    def cosine(self) -> float:
        """Of the angle between the two gradients; 1 where both are zero."""
        norms = math.sqrt(self.reference) * math.sqrt(self.low)
        return min(1.0, self.product / norms) if norms else float(self.reference == self.low)

    @property
    def norm_ratio(self) -> float:
        """Low precision over fp32."""
        return math.sqrt(self.low / self.reference) if self.reference else 1.0

    @property
    def flushed_share(self) -> float:
        """Of the entries that count."""
        return self.num_flushed / self.num_counting if self.num_counting else 0.0


@dataclass(frozen=True)
class Comparison:
    """`whole` sums over all parameters that carry a signal; `parameters` holds each of those, in the model's order."""

    whole: Sums
    parameters: dict[str, Sums]

    def worst(self, num: int) -> tuple[GradientDamage, ...]:
        """The parameters whose rounding noise is largest against their batch noise."""
        return self._ranked(lambda damage: damage.noise_ratio)[:num]

    def most_flushed(self) -> GradientDamage | None:
        """The parameter of which the largest share is flushed; None where there is none at all."""
        return next(iter(self._ranked(lambda damage: damage.flushed_share)), None)

    def modules(self, max_modules: int) -> tuple[GradientDamage, ...]:
        """The modules with parameters of their own, in the order of the model.

        Modules are joined from the innermost level on, until there are at most `max_modules` or the outermost are left.
        """
        paths = {name: name.split(".")[:-1] for name in self.parameters}
        depth = max(map(len, paths.values()), default=0)
        while depth > 1 and len({tuple(path[:depth]) for path in paths.values()}) > max_modules:
            depth -= 1
        joined: dict[str, Sums] = {}
        for name, sums in self.parameters.items():
            module = joined.setdefault(".".join(paths[name][:depth]), Sums())
            module += sums
        return _damages(joined)

    def _ranked(self, key: Callable[[GradientDamage], float]) -> tuple[GradientDamage, ...]:
        return tuple(sorted(_damages(self.parameters), key=key, reverse=True))


def _damages(named: Mapping[str, Sums]) -> tuple[GradientDamage, ...]:
    return tuple(
        GradientDamage(
            name=name,
            noise_ratio=sums.noise_ratio,
            cosine=sums.cosine,
            norm_ratio=sums.norm_ratio,
            flushed_share=sums.flushed_share,
        )
        for name, sums in named.items()
    )


def signals(gradients: Gradients, perturbed: Gradients) -> set[str]:
    """The parameters whose fp32 gradient survives another rounding, so that it can be held against."""
    kept = set()
    for name, gradient in gradients.items():
        reference = _norm(_dense(gradient))
        if name in perturbed and _norm(_dense(gradient) - _dense(perturbed[name])) < MAX_OWN_NOISE * reference:
            kept.add(name)
    return kept


def compare(low: Sequence[Gradients], reference: Sequence[Gradients], names: Collection[str]) -> Comparison:
    """Gradients of the same batches in the low precision and in fp32, over the parameters in `names`.

    The noise is that between each batch and the next in fp32; `reference` may hold more batches than `low`. A parameter
    without a gradient has a zero one.
    """
    parameters: dict[str, Sums] = {}
    whole = Sums()
    for name in (name for name in dict.fromkeys(chain(*reference, *low)) if name in names):
        sums = Sums()
        for index, gradients in enumerate(low):
            following = reference[(index + 1) % len(reference)]
            sums += _sums(gradients.get(name), reference[index].get(name), following.get(name))
        parameters[name] = sums
        whole += sums
    return Comparison(whole, parameters)


def _sums(low: Tensor | None, reference: Tensor | None, other: Tensor | None) -> Sums:
    some = next((tensor for tensor in (reference, low, other) if tensor is not None), None)
    if some is None:
        return Sums()
    ours, theirs, others = (torch.zeros_like(_dense(some)) if t is None else _dense(t) for t in (low, reference, other))
    counts = (
        theirs.abs() > COUNTS * theirs.abs().amax() if theirs.numel() else torch.zeros_like(theirs, dtype=torch.bool)
    )
    return Sums(
        difference=_norm(ours - theirs) ** 2,
        reference=_norm(theirs) ** 2,
        low=_norm(ours) ** 2,
        product=float((ours * theirs).sum()),
        noise=_norm(theirs - others) ** 2,
        num_counting=float(counts.sum()),
        num_flushed=float((counts & (ours == 0)).sum()),
    )


def _dense(gradient: Tensor) -> Tensor:
    """In double precision, whose squares do not overflow; MPS has none."""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense if dense.device.type == "mps" else dense.double()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) if tensor.numel() else 0.0

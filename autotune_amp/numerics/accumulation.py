"""Check whether gradients accumulated over micro-batches equal that of the whole batch, and with which weights.

With g the whole batch's gradient and g_i those of its micro-batches, |g - sum w_i g_i|^2 is computed for the plain
mean, the sum and the shares of countable items in the batch, and then minimised over w. The error is compared with that
of rounding in fp32.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from autotune_amp.core.outcome import Accumulation, AccumulationVerdict
from autotune_amp.numerics.comparison import signals
from autotune_amp.numerics.draws import without_dropout
from autotune_amp.numerics.paired_runs import REROUNDING, perturb
from autotune_amp.numerics.passes import CheckInputs, Gradients, Pass, Passes, in_fp32
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    clear_override,
    has_half_weights,
    modules_by_name,
    override,
    unwrap,
    watch_forward,
)
from autotune_amp.precision.modes import MODES

IGNORED_LABEL = -100  # default ignore_index of torch's cross_entropy
_MAX_SAMPLES = 16
_MAX_ENTRIES = 2**16  # per parameter: a relation between whole gradients holds for a subset of their entries too
# Changed weights round differently in every operation, like a batch cut in parts; this many times that is rounding.
_ROUNDING_MARGIN = 8.0
_MAX_TOLERANCE = 0.05  # if rounding alone changes a gradient by more than this, the check is meaningless
_MAX_LOSS_ERROR = 1e-3
_MAX_WEIGHT_ERROR = 0.1  # relative to 1/k: weights that are less exact are not reported


# -- batches of any type that the user's code takes
# -----------------------------------------------------------------------


def tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in a batch with its place: a name such as ``labels``, or ``batch[1]`` for unnamed parts."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    prefix = "" if name == "batch" else f"{name}."
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors(value, f"{prefix}{key}")
    elif isinstance(batch, (list, tuple)):
        fields = getattr(batch, "_fields", None)
        for index, value in enumerate(batch):
            yield from tensors(value, f"{prefix}{fields[index]}" if fields else f"{name}[{index}]")
    elif dataclasses.is_dataclass(batch) or (hasattr(batch, "__dict__") and not callable(batch)):
        for attribute, value in vars(batch).items():
            yield from tensors(value, f"{prefix}{attribute}")


def first_dimensions(batch: Any) -> set[int]:
    """Return the first dimensions of the batch's tensors, 0 for scalars. A batch can be cut if there is one, not 0."""
    return {tensor.shape[0] if tensor.dim() else 0 for _, tensor in tensors(batch)}


def cut(batch: Any, size: int) -> list[Any]:
    """Cut `batch` into parts of `size` samples, the last with the rest.

    All of its tensors must have the same first dimension. Other objects are copied to every part, except lists with one
    entry per sample, which are cut too.
    """
    (num_samples,) = first_dimensions(batch)
    return [_rebuilt(batch, slice(start, start + size), num_samples) for start in range(0, num_samples, size)]


def cut_all(batches: Sequence[Any], size: int) -> list[Any]:
    """Return the first `size` samples of each batch; see `cut`."""
    return [cut(batch, size)[0] for batch in batches]


def _rebuilt(batch: Any, part: slice, num_samples: int) -> Any:
    def of(value: Any) -> Any:
        return _rebuilt(value, part, num_samples)

    if isinstance(batch, Tensor):
        return batch[part]
    if next(tensors(batch), None) is None:
        return batch[part] if isinstance(batch, (list, tuple)) and len(batch) == num_samples else batch
    children, spec = pytree.tree_flatten(batch, is_leaf=lambda value: value is not batch)
    if not spec.is_leaf():  # a builtin container, or a type that was registered as one
        return pytree.tree_unflatten([of(child) for child in children], spec)
    made: Any = {} if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping) else copy.copy(batch)
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            made[key] = of(value)
    else:
        for name, value in vars(batch).items():
            object.__setattr__(made, name, of(value))  # works for a frozen dataclass too
    return made


# -- the check ---------------------------------------------------------------------------------------------------------


def num_micro_batches(num_samples: int) -> int:
    """Return the number of micro-batches for the check, so that each has at least two samples."""
    return 4 if num_samples >= 8 else 2


def num_checked(batch_size: int) -> int:
    """Return the number of samples to check, a multiple of the number of micro-batches."""
    num_samples = min(batch_size, _MAX_SAMPLES)
    return num_samples - num_samples % num_micro_batches(num_samples)


def unchecked(reason: str, batch_size: int) -> Accumulation:
    """Return the result of a check that could not be done, with the reason, a clause."""
    return Accumulation(
        verdict="unchecked",
        reason=f"Accumulation is unchecked: {reason}.",
        next_step="Keep the batch whole, or compare its gradient with that of accumulated micro-batches yourself.",
        batch_size=batch_size,
        num_micro_batches=num_micro_batches(batch_size),
    )


def check(subject: CheckInputs, num_samples: int) -> Accumulation:
    """Compare the gradients of micro-batches with that of the whole batch on `subject`; the model is restored.

    `subject.batches` are the whole batch of `num_samples` and then its micro-batches, equal in size and in its order.
    Dropout is disabled; a model with other randomness is *unchecked*. Exceptions of the model's own code pass through;
    non-finite numbers never raise.
    """
    started = time.perf_counter()
    passes = Passes(subject, in_fp32(subject.model, subject.device.type) if has_half_weights(subject.model) else None)
    own = unwrap(passes.model)
    with ExitStack() as stack:
        # Compiled code would ignore the removal of dropout.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_dropout(own))
        if can_be_pinned(own):  # in fp32 also inside an autocast of the loss function
            override(own, "fp32", subject.device.type)
            stack.callback(clear_override, own)
        read_maxima = stack.enter_context(watch_forward(own, subject.device))
        try:
            found = _checked(passes, read_maxima, num_samples)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)
    return msgspec.structs.replace(found, num_passes=passes.num_passes, seconds=time.perf_counter() - started)


def _checked(passes: Passes, read_maxima: Callable[[], dict[str, float]], num_samples: int) -> Accumulation:
    seed, micro_batches = passes.subject.seed, passes.subject.batches[1:]
    whole = _pass(passes, 0)
    if not whole.is_finite:
        return unchecked("the loss of the whole batch or its gradient is not finite", num_samples)
    passes.restore()
    repeated = _pass(passes, 0, seed + 1)
    passes.restore()
    perturb(passes.model, REROUNDING, seed)
    moved = _pass(passes, 0)
    unit_roundoff = MODES["bf16" if any(read_maxima().values()) else "fp32"].unit_roundoff
    names = sorted(signals(whole.gradients, moved.gradients))
    rounding = _distance(whole.gradients, moved.gradients, names)
    if not names or rounding * _ROUNDING_MARGIN > _MAX_TOLERANCE:
        return unchecked("the gradient of the whole batch is zero, or no more than rounding noise", num_samples)
    unrepeated = _distance(whole.gradients, repeated.gradients, names)
    if unrepeated > max(_ROUNDING_MARGIN * rounding, 4 * unit_roundoff):
        reason = "the same batch gives another gradient a second time, by random draws or by what the first pass left"
        return unchecked(f"{reason} (they part by {unrepeated:.1g})", num_samples)
    # In sequence, as in training: each pass sees the buffers left by the one before.
    passes.restore()
    parts = [_pass(passes, index + 1) for index in range(len(micro_batches))]
    if not all(part.is_finite for part in parts):
        return Accumulation(
            verdict="inexact",
            reason="The loss of a micro-batch or its gradient is not finite, where that of the whole batch is: a mean "
            "over something of which a micro-batch may hold nothing.",
            next_step="Keep the batch whole, make the loss finite for such a batch, or leave such samples out.",
            batch_size=num_samples,
            num_micro_batches=len(micro_batches),
        )
    sums = GradientProducts(
        gram=_gram([whole.gradients, *(part.gradients for part in parts)], names),
        losses=(whole.loss, *(part.loss for part in parts)),
        rounding=max(rounding, unrepeated),
        unit_roundoff=unit_roundoff,
    )
    return _report(sums, find_weights(sums, counted_shares(micro_batches)), passes, num_samples)


def _pass(passes: Passes, index: int, seed: int | None = None) -> Pass:
    """Run a pass from the model's present state, and keep a subset of each gradient's entries."""
    done = passes.run(index, "fp32", restores=False, seed=seed)
    return replace(done, gradients={name: _entries(gradient) for name, gradient in done.gradients.items()})


def _entries(gradient: Tensor) -> Tensor:
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    return flat[:: -(-max(1, flat.numel()) // _MAX_ENTRIES)].cpu()


def _gram(gradients: Sequence[Gradients], names: Sequence[str]) -> Tensor:
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for name in names:
        matrix = torch.stack([each.get(name, torch.zeros_like(gradients[0][name])).double() for each in gradients])
        gram += matrix @ matrix.T
    return gram


def _distance(one: Gradients, other: Gradients, names: Sequence[str]) -> float:
    gram = _gram([one, other], names)
    size = float(gram[0, 0])
    return math.sqrt(max(0.0, float(gram[0, 0] + gram[1, 1] - 2 * gram[0, 1])) / size) if size else 0.0


# -- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientProducts:
    """Scalar products of gradients in fp64: `gram[0, 0]` is |g|^2, `gram[0, i]` the product of g and g_i, and so on.

    `rounding` is the relative change of g by other rounding; `unit_roundoff` that of one operation.
    """

    gram: Tensor
    losses: tuple[float, ...]
    rounding: float
    unit_roundoff: float

    def error(self, weights: Tensor) -> float:
        """Return |g - sum w_i g_i| / |g|."""
        coefficients = torch.cat([torch.ones(1, dtype=torch.float64), -weights])
        return math.sqrt(max(0.0, float(coefficients @ self.gram @ coefficients)) / float(self.gram[0, 0]))

    def tolerance(self, weights: Tensor) -> float:
        """Return the error that rounding explains."""
        norms = self.gram.diagonal().sqrt()
        parts = float((weights.abs() * norms[1:]).sum() / norms[0])
        return _ROUNDING_MARGIN * self.rounding + 2 * self.unit_roundoff * (1 + parts)

    def fits(self, weights: Tensor) -> bool:
        """Return whether these weights reproduce the whole batch's gradient, within rounding."""
        return self.error(weights) <= self.tolerance(weights)

    def tell_apart(self, weights: Tensor) -> bool:
        """Return whether the weights are unique; others fit as well if the micro-batches' gradients are too similar."""
        least, num = float(torch.linalg.eigvalsh(self.gram[1:, 1:])[0]), len(weights)
        allowed = self.tolerance(weights) * math.sqrt(float(self.gram[0, 0]))
        return least > 0 and allowed <= _MAX_WEIGHT_ERROR / num * math.sqrt(least)

    def do_losses_fit(self, weights: Tensor) -> bool:
        """Return whether these weights reproduce the whole batch's loss too."""
        parts = torch.tensor(self.losses[1:], dtype=torch.float64) * weights
        size = max(abs(self.losses[0]), float(parts.abs().sum()))
        return abs(self.losses[0] - float(parts.sum())) <= _MAX_LOSS_ERROR * size


class AccumulationFinding(NamedTuple):
    """Result of the search for weights.

    `weights` are those found, or the best ones for *inexact*; `share` is the expression that they are proportional to.
    """

    verdict: AccumulationVerdict
    weights: Tensor
    share: str | None = None


def find_weights(sums: GradientProducts, shares: Sequence[tuple[str, Tensor]]) -> AccumulationFinding:
    """Return the simplest combination that reproduces the gradient; for few or collinear gradients many do."""
    ones = torch.ones(len(sums.gram) - 1, dtype=torch.float64)
    simple = [AccumulationFinding("mean", ones / len(ones)), AccumulationFinding("sum", ones)]
    for finding in (*simple, *(AccumulationFinding("weighted", weights, name) for name, weights in shares)):
        if sums.fits(finding.weights):
            return finding
    best = torch.linalg.pinv(sums.gram[1:, 1:], rtol=1e-12, hermitian=True) @ sums.gram[0, 1:]  # weights of least error
    if sums.fits(best) and not sums.tell_apart(best):
        return AccumulationFinding("unchecked", best)
    return AccumulationFinding("weighted" if sums.fits(best) and sums.do_losses_fit(best) else "inexact", best)


def counted_shares(micro_batches: Sequence[object]) -> list[tuple[str, Tensor]]:
    """Return the quantities that a loss may average over, each with the micro-batches' shares of it.

    The quantities are counts over the batch's tensors. `[:, 1:]` leaves out the first of each sequence, as a language
    model does that shifts its labels.
    """
    columns: dict[str, list[Tensor]] = {}
    for micro_batch in micro_batches:
        for name, tensor in tensors(micro_batch):
            columns.setdefault(name, []).append(tensor)
            if tensor.dim() > 1:
                columns.setdefault(f"{name}[:, 1:]", []).append(tensor[:, 1:])
    shares = []
    for text, count in _COUNTS.items():
        for name, column in columns.items():
            counts = torch.tensor([count(tensor) for tensor in column], dtype=torch.float64)
            is_known = len(counts) == len(micro_batches) and bool(counts.isfinite().all()) and float(counts.sum()) > 0
            counts_all = text != ".numel()" and counts.tolist() == [tensor.numel() for tensor in column]
            if is_known and not counts_all:
                shares.append((name + text, counts / counts.sum()))
    return shares


def _other_than(value: int, column: Tensor) -> float:
    return math.nan if column.is_floating_point() or column.is_complex() else float((column != value).sum())


def _sum(column: Tensor) -> float:
    return math.nan if column.is_complex() or bool((column < 0).any()) else float(column.cpu().double().sum())


# In order of significance; NaN for tensors that are not counted so.
_COUNTS: dict[str, Callable[[Tensor], float]] = {
    f" != {IGNORED_LABEL}": lambda column: _other_than(IGNORED_LABEL, column),
    " != 0": lambda column: _other_than(0, column),
    ".numel()": lambda column: float(column.numel()),
    ".sum()": _sum,
}


# -- the report --------------------------------------------------------------------------------------------------------


def _report(sums: GradientProducts, found: AccumulationFinding, passes: Passes, num_samples: int) -> Accumulation:
    num = len(found.weights)
    error, mean_error = sums.error(found.weights), sums.error(torch.full((num,), 1 / num, dtype=torch.float64))
    the_whole = f"the gradient of the whole batch of {num_samples}"
    parts = f"gradients of {num} micro-batches of {num_samples // num} samples"
    apart = f"they part by {error:.1g} of it, and fp32 rounded otherwise by {sums.rounding:.1g}"
    if found.verdict == "unchecked":
        reason = f"the {parts} are too much alike to tell with which weights they add up to {the_whole}"
        return msgspec.structs.replace(unchecked(reason, num_samples), error=error, mean_error=mean_error)
    if found.verdict == "weighted":
        weights = ", ".join(f"{weight:.3f}" for weight in found.weights.tolist())
        share = found.share or "whatever the loss divides by"
        reason = (
            f"The {parts} add up to {the_whole} when each counts by its share of {share}, here {weights} ({apart}); "
            f"their plain mean misses it by {100 * mean_error:.2g} %"
        )
        next_step = (
            f"Multiply each micro-batch's loss by its share of the window's {share} in place of 1/accumulation_steps: "
            "PrecisionController.windows(loader, weigh=...) has it, and the exports."
        )
    elif found.verdict == "inexact":
        cause, next_step = _cause(passes)
        reason = (
            f"No weighting of the {parts} gives {the_whole}: the best misses it by {100 * error:.2g} %, where rounding "
            f"explains {sums.tolerance(found.weights):.1g}; {cause}"
        )
    else:
        reason = f"The {found.verdict} of the {parts} is {the_whole} ({apart})"
        next_step = {
            "mean": "Divide each micro-batch's loss by the accumulation steps.",
            "sum": "Add the micro-batches' losses as they are: do not divide them by the accumulation steps.",
        }[found.verdict]
    return Accumulation(
        verdict=found.verdict,
        reason=f"{reason}.",
        next_step=next_step,
        batch_size=num_samples,
        num_micro_batches=num,
        error=error,
        mean_error=mean_error,
        weighted_by=found.share,
    )


def _cause(passes: Passes) -> tuple[str, str]:
    """Return the visible cause of an inexact accumulation, and the advice for the user."""
    modules = modules_by_name(passes.model).items()
    norms = [n for n, m in modules if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    if norms:
        return (
            f"BatchNorm in training mode takes its statistics from each micro-batch ({', '.join(norms[:3])})",
            "Keep the batch whole, or put BatchNorm in eval mode or GroupNorm in its place.",
        )
    return (
        "the loss or the model compares samples with each other, as in-batch negatives do, the padding counts, the "
        "forward pass computes with buffers that it changes, or the loss holds a term that is no mean over samples",
        "Keep the batch whole: smaller batches accumulated would learn something else.",
    )

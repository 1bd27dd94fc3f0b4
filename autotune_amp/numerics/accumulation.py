"""Check whether gradients accumulated over micro-batches equal that of the whole batch, and with which weights.

With g the whole batch's gradient and g_i those of its micro-batches, |g - sum w_i g_i| is computed for three kinds of
weights: the plain mean, the sum, and shares of countable items such as labels. If none fits, it is minimised over w.
A combination fits if its error is no larger than that of rounding in fp32.
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
from autotune_amp.core.text import percent
from autotune_amp.numerics.comparison import parameters_with_signal
from autotune_amp.numerics.draws import without_dropout
from autotune_amp.numerics.paired_runs import REROUNDING, perturb
from autotune_amp.numerics.passes import CheckInputs, Gradients, Passes, PassResult, fp32_copy
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    clear_override,
    computes_in_half,
    modules_by_name,
    override,
    unwrap,
    watch_forward,
)
from autotune_amp.precision.modes import MODES

IGNORED_LABEL = -100  # default ignore_index of torch's cross_entropy
_MAX_SAMPLES = 16  # samples of the whole batch that are checked, to save time
_MAX_ENTRIES = 2**16  # gradient entries per parameter: a linear relation holds for a subset of the entries too
# Rounding is measured as the change of the gradient by slightly changed weights, which round differently in every
# operation, as parts of a batch do. An error of up to this many times that is attributed to rounding.
_ROUNDING_MARGIN = 8.0
_MAX_TOLERANCE = 0.05  # if rounding explains a larger error, relative to the gradient, the check is skipped
_MAX_LOSS_ERROR = 1e-3  # relative to the loss
_MAX_WEIGHT_ERROR = 0.1  # relative to 1/k for k micro-batches: less exact weights are not reported


# -- batches of any type -----------------------------------------------------------------------------------------------


def batch_tensors(batch: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in a batch with its name, such as ``labels``, or ``batch[1]`` in a tuple or list."""
    if isinstance(batch, Tensor):
        yield name, batch
        return
    prefix = "" if name == "batch" else f"{name}."
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from batch_tensors(value, f"{prefix}{key}")
    elif isinstance(batch, (list, tuple)):
        fields = getattr(batch, "_fields", None)
        for index, value in enumerate(batch):
            yield from batch_tensors(value, f"{prefix}{fields[index]}" if fields else f"{name}[{index}]")
    elif dataclasses.is_dataclass(batch) or (hasattr(batch, "__dict__") and not callable(batch)):
        for attribute, value in _attributes(batch).items():
            yield from batch_tensors(value, f"{prefix}{attribute}")


def _attributes(batch: Any) -> dict[str, Any]:
    """Return the attributes of an object, and the fields of a dataclass, which may be in slots, by name."""
    fields = dataclasses.fields(batch) if dataclasses.is_dataclass(batch) else ()
    in_fields = {field.name: getattr(batch, field.name) for field in fields if hasattr(batch, field.name)}
    return in_fields | getattr(batch, "__dict__", {})


def first_dimensions(batch: Any) -> set[int]:
    """Return the sizes of the tensors' first dimensions, 0 for scalars; a batch with a single size can be split."""
    return {tensor.shape[0] if tensor.dim() else 0 for _, tensor in batch_tensors(batch)}


def split_batch(batch: Any, size: int) -> list[Any]:
    """Split `batch` into parts of `size` samples; the last may be smaller.

    All of its tensors must have the same first dimension. Lists and tuples with one entry per sample are split too;
    other objects are shared by all parts.
    """
    (num_samples,) = first_dimensions(batch)
    return [_slice_samples(batch, slice(start, start + size), num_samples) for start in range(0, num_samples, size)]


def truncate_batches(batches: Sequence[Any], size: int) -> list[Any]:
    """Return the first `size` samples of each batch; see `split_batch`."""
    return [split_batch(batch, size)[0] for batch in batches]


def _slice_samples(batch: Any, part: slice, num_samples: int) -> Any:
    """Return a copy of `batch`, which has `num_samples`, with the samples in `part`."""

    def sliced(value: Any) -> Any:
        return _slice_samples(value, part, num_samples)

    if isinstance(batch, Tensor):
        return batch[part]
    if next(batch_tensors(batch), None) is None:
        return batch[part] if isinstance(batch, (list, tuple)) and len(batch) == num_samples else batch
    children, spec = pytree.tree_flatten(batch, is_leaf=lambda value: value is not batch)
    if not spec.is_leaf():  # a builtin container, or a type registered with pytree
        return pytree.tree_unflatten([sliced(child) for child in children], spec)
    copied: Any = {} if isinstance(batch, Mapping) and not isinstance(batch, MutableMapping) else copy.copy(batch)
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            copied[key] = sliced(value)
    else:
        for name, value in _attributes(batch).items():
            object.__setattr__(copied, name, sliced(value))  # works for a frozen dataclass too
    return copied


# -- the check ---------------------------------------------------------------------------------------------------------


def num_micro_batches(num_samples: int) -> int:
    """Return the number of micro-batches for the check: 4 if each then has at least two samples, otherwise 2."""
    return 4 if num_samples >= 8 else 2


def num_checked_samples(batch_size: int) -> int:
    """Return the number of samples to check, a multiple of the number of micro-batches."""
    num_samples = min(batch_size, _MAX_SAMPLES)
    return num_samples - num_samples % num_micro_batches(num_samples)


def unchecked_result(reason: str, batch_size: int) -> Accumulation:
    """Return an *unchecked* result; `reason` is a clause."""
    return Accumulation(
        verdict="unchecked",
        reason=f"Accumulation is unchecked: {reason}.",
        next_step="Do not split the batch, or compare its gradient with that of accumulated micro-batches yourself.",
        batch_size=batch_size,
        num_micro_batches=num_micro_batches(batch_size),
    )


def check_accumulation(subject: CheckInputs, num_samples: int) -> Accumulation:
    """Compare the gradients of micro-batches with that of the whole batch, and restore the model.

    `subject.batches` are the whole batch of `num_samples`, and then its micro-batches, in order and of equal size.
    Dropout is disabled; a model with other randomness is *unchecked*. Exceptions of the model's code pass through;
    non-finite numbers never raise.
    """
    started = time.perf_counter()
    passes = Passes(subject, fp32_copy(subject.model, subject.device.type) if computes_in_half(subject.model) else None)
    model = unwrap(passes.model)
    with ExitStack() as stack:
        # Compiled code would keep its dropout.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(without_dropout(model))
        if can_be_pinned(model):  # run in fp32 also if the loss function enters autocast
            override(model, "fp32", subject.device.type)
            stack.callback(clear_override, model)
        read_maxima = stack.enter_context(watch_forward(model, subject.device))
        try:
            result = _check_without_dropout(passes, read_maxima, num_samples)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)
    return msgspec.structs.replace(result, num_passes=passes.num_passes, seconds=time.perf_counter() - started)


def _check_without_dropout(
    passes: Passes, read_maxima: Callable[[], dict[str, float]], num_samples: int
) -> Accumulation:
    """Compare the gradients in a model without dropout; the model is left at the end of the last pass."""
    seed, micro_batches = passes.subject.seed, passes.subject.batches[1:]
    whole = _run_pass(passes, 0)
    if not whole.is_finite:
        return unchecked_result("the loss of the whole batch or its gradient is not finite", num_samples)
    passes.restore()
    repeated = _run_pass(passes, 0, seed + 1)
    passes.restore()
    perturb(passes.model, REROUNDING, seed)
    rerounded = _run_pass(passes, 0)
    unit_roundoff = MODES["bf16" if any(read_maxima().values()) else "fp32"].unit_roundoff
    names = sorted(parameters_with_signal(whole.gradients, rerounded.gradients))
    rounding = _relative_distance(whole.gradients, rerounded.gradients, names)
    if not names or rounding * _ROUNDING_MARGIN > _MAX_TOLERANCE:
        return unchecked_result("the gradient of the whole batch is zero, or no more than rounding noise", num_samples)
    repeat_error = _relative_distance(whole.gradients, repeated.gradients, names)
    if repeat_error > max(_ROUNDING_MARGIN * rounding, 4 * unit_roundoff):
        reason = "the same batch gives another gradient a second time, by random draws or by state that the model keeps"
        return unchecked_result(f"{reason} (relative difference {repeat_error:.1g})", num_samples)
    # One after another, as in training: each pass uses the buffers that the one before changed.
    passes.restore()
    parts = [_run_pass(passes, index + 1) for index in range(len(micro_batches))]
    if not all(part.is_finite for part in parts):
        return Accumulation(
            verdict="inexact",
            reason="The loss of a micro-batch or its gradient is not finite, but that of the whole batch is. The loss "
            "may be a mean over items, such as labels, of which a micro-batch has none.",
            next_step="Do not split the batch, make the loss finite for such a micro-batch, or remove such samples.",
            batch_size=num_samples,
            num_micro_batches=len(micro_batches),
        )
    products = GradientProducts(
        gram=_gram_matrix([whole.gradients, *(part.gradients for part in parts)], names),
        losses=(whole.loss, *(part.loss for part in parts)),
        rounding=max(rounding, repeat_error),
        unit_roundoff=unit_roundoff,
    )
    return _report(products, find_weights(products, counted_shares(micro_batches)), passes, num_samples)


def _run_pass(passes: Passes, index: int, seed: int | None = None) -> PassResult:
    """Run a pass from the model's current state; its gradients are cut to a flat subset of their entries."""
    result = passes.run(index, "fp32", restores=False, seed=seed)
    return replace(result, gradients={name: _sampled_entries(gradient) for name, gradient in result.gradients.items()})


def _sampled_entries(gradient: Tensor) -> Tensor:
    """Return at most about `_MAX_ENTRIES` evenly spaced entries of the gradient, flat, real and on the CPU."""
    dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    return flat[:: -(-max(1, flat.numel()) // _MAX_ENTRIES)].cpu()


def _gram_matrix(gradients: Sequence[Gradients], names: Sequence[str]) -> Tensor:
    """Return the scalar products of the gradients over the parameters `names`, in fp64."""
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for name in names:
        matrix = torch.stack([each.get(name, torch.zeros_like(gradients[0][name])).double() for each in gradients])
        gram += matrix @ matrix.T
    return gram


def _relative_distance(one: Gradients, other: Gradients, names: Sequence[str]) -> float:
    """Return |one - other| / |one| over the parameters `names`; 0 if `one` is zero."""
    gram = _gram_matrix([one, other], names)
    square = float(gram[0, 0])
    return math.sqrt(max(0.0, float(gram[0, 0] + gram[1, 1] - 2 * gram[0, 1])) / square) if square else 0.0


# -- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientProducts:
    """Scalar products of gradients in fp64: `gram[0, 0]` is |g|^2, `gram[0, i]` the product of g and g_i, and so on.

    `losses` are those of the whole batch and then of the micro-batches. `rounding` is the relative change of g if fp32
    rounds differently, `unit_roundoff` the largest relative error of one operation.
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
        """Return the largest error that rounding explains, relative to |g|."""
        norms = self.gram.diagonal().sqrt()
        parts = float((weights.abs() * norms[1:]).sum() / norms[0])
        return _ROUNDING_MARGIN * self.rounding + 2 * self.unit_roundoff * (1 + parts)

    def reproduces_gradient(self, weights: Tensor) -> bool:
        """Return whether these weights reproduce the whole batch's gradient, within rounding."""
        return self.error(weights) <= self.tolerance(weights)

    def are_unique(self, weights: Tensor) -> bool:
        """Return whether no other weights fit as well, as they do if the micro-batches' gradients are too similar."""
        least, num = float(torch.linalg.eigvalsh(self.gram[1:, 1:])[0]), len(weights)
        allowed = self.tolerance(weights) * math.sqrt(float(self.gram[0, 0]))
        return least > 0 and allowed <= _MAX_WEIGHT_ERROR / num * math.sqrt(least)

    def reproduces_loss(self, weights: Tensor) -> bool:
        """Return whether these weights reproduce the whole batch's loss too."""
        parts = torch.tensor(self.losses[1:], dtype=torch.float64) * weights
        size = max(abs(self.losses[0]), float(parts.abs().sum()))
        return abs(self.losses[0] - float(parts.sum())) <= _MAX_LOSS_ERROR * size


class WeightSearchResult(NamedTuple):
    """Result of the search for weights that combine the micro-batches' gradients.

    For *inexact* and *unchecked* `weights` are those of least error. `share` is the expression over the batch's tensors
    that the weights are proportional to, None if there is none.
    """

    verdict: AccumulationVerdict
    weights: Tensor
    share: str | None = None


def find_weights(sums: GradientProducts, shares: Sequence[tuple[str, Tensor]]) -> WeightSearchResult:
    """Return the simplest weights that reproduce the gradient: the mean, the sum, one of `shares`, or any others.

    `shares` are pairs of an expression and the weights. The verdict is *unchecked* if only others do, and these are not
    unique.
    """
    ones = torch.ones(len(sums.gram) - 1, dtype=torch.float64)
    simple = [WeightSearchResult("mean", ones / len(ones)), WeightSearchResult("sum", ones)]
    for finding in (*simple, *(WeightSearchResult("weighted", weights, name) for name, weights in shares)):
        if sums.reproduces_gradient(finding.weights):
            return finding
    best = torch.linalg.pinv(sums.gram[1:, 1:], rtol=1e-12, hermitian=True) @ sums.gram[0, 1:]  # weights of least error
    if sums.reproduces_gradient(best) and not sums.are_unique(best):
        return WeightSearchResult("unchecked", best)
    return WeightSearchResult(
        "weighted" if sums.reproduces_gradient(best) and sums.reproduces_loss(best) else "inexact", best
    )


def counted_shares(micro_batches: Sequence[object]) -> list[tuple[str, Tensor]]:
    """Return the counts that a loss may average over, as expressions, each with the micro-batches' shares of it.

    Counts are over a tensor of the batch, and over its `[:, 1:]`, since language models shift their labels by one.
    """
    columns: dict[str, list[Tensor]] = {}
    for micro_batch in micro_batches:
        for name, tensor in batch_tensors(micro_batch):
            columns.setdefault(name, []).append(tensor)
            if tensor.dim() > 1:
                columns.setdefault(f"{name}[:, 1:]", []).append(tensor[:, 1:])
    shares = []
    for operation, count in _COUNTS.items():
        for name, column in columns.items():
            counts = torch.tensor([count(tensor) for tensor in column], dtype=torch.float64)
            is_countable = (
                len(counts) == len(micro_batches) and bool(counts.isfinite().all()) and float(counts.sum()) > 0
            )
            counts_all = operation != ".numel()" and counts.tolist() == [tensor.numel() for tensor in column]
            if is_countable and not counts_all:
                shares.append((name + operation, counts / counts.sum()))
    return shares


def _other_than(value: int, column: Tensor) -> float:
    return math.nan if column.is_floating_point() or column.is_complex() else float((column != value).sum())


def _sum(column: Tensor) -> float:
    return math.nan if column.is_complex() or bool((column < 0).any()) else float(column.cpu().double().sum())


# Operations that count items in a tensor, most common first; NaN if the operation does not apply.
_COUNTS: dict[str, Callable[[Tensor], float]] = {
    f" != {IGNORED_LABEL}": lambda column: _other_than(IGNORED_LABEL, column),
    " != 0": lambda column: _other_than(0, column),
    ".numel()": lambda column: float(column.numel()),
    ".sum()": _sum,
}


# -- the report --------------------------------------------------------------------------------------------------------


def _report(products: GradientProducts, result: WeightSearchResult, passes: Passes, num_samples: int) -> Accumulation:
    """Return the result of the check with its reason and next step."""
    num_parts = len(result.weights)
    error = products.error(result.weights)
    mean_error = products.error(torch.full((num_parts,), 1 / num_parts, dtype=torch.float64))
    whole_gradient = f"the gradient of the whole batch of {num_samples}"
    parts = f"gradients of {num_parts} micro-batches of {num_samples // num_parts} samples"
    accuracy = f"relative error {error:.1g}, rounding {products.rounding:.1g}"
    if result.verdict == "unchecked":
        reason = f"the {parts} are too similar to find the weights with which they add up to {whole_gradient}"
        return msgspec.structs.replace(unchecked_result(reason, num_samples), error=error, mean_error=mean_error)
    if result.verdict == "weighted":
        weights = ", ".join(f"{weight:.3f}" for weight in result.weights.tolist())
        share = result.share or "the number that the loss divides by"
        reason = (
            f"The {parts} add up to {whole_gradient} when each counts by its share of {share}, here {weights} "
            f"({accuracy}); their plain mean is off by {percent(mean_error)}"
        )
        next_step = (
            f"Multiply each micro-batch's loss by its share of the step's {share} in place of 1/accumulation_steps, as "
            "PrecisionController.windows(loader, weigh=...) and the exported scripts do."
        )
    elif result.verdict == "inexact":
        cause, next_step = _cause_and_advice(passes)
        reason = (
            f"No weighting of the {parts} gives {whole_gradient}: the best is off by {percent(error)}, and rounding "
            f"explains {percent(products.tolerance(result.weights))}; {cause}"
        )
    else:
        reason = f"The {result.verdict} of the {parts} is {whole_gradient} ({accuracy})"
        next_step = {
            "mean": "Divide each micro-batch's loss by the accumulation steps.",
            "sum": "Add up the micro-batches' losses without dividing them by the accumulation steps.",
        }[result.verdict]
    return Accumulation(
        verdict=result.verdict,
        reason=f"{reason}.",
        next_step=next_step,
        batch_size=num_samples,
        num_micro_batches=num_parts,
        error=error,
        mean_error=mean_error,
        weighted_by=result.share,
    )


def _cause_and_advice(passes: Passes) -> tuple[str, str]:
    """Return a likely cause of inexact accumulation, a clause, and advice for the user."""
    modules = modules_by_name(passes.model).items()
    norms = [n for n, m in modules if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    if norms:
        return (
            f"BatchNorm in training mode computes its statistics per micro-batch ({', '.join(norms[:3])})",
            "Do not split the batch, put BatchNorm in eval mode, or replace it by GroupNorm.",
        )
    return (
        "the loss may compare samples with each other (in-batch negatives), depend on padding, use buffers that the "
        "forward pass changes, or have a term that is not a mean over samples",
        "Do not split the batch: accumulated micro-batches would minimise another loss.",
    )

"""Whether gradients accumulated over micro-batches are those of the whole batch, and with which weights.

With g of the whole batch and g_i of its micro-batches, |g - sum w_i g_i|^2 is asked for the plain mean, the sum and the
shares of what can be counted in the batch, and then minimised over w. It is held against what rounding in fp32 does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.outcome import Accumulation, AccumulationVerdict
from autotune_amp.numerics.batches import tensors
from autotune_amp.numerics.comparison import perturb, signals
from autotune_amp.numerics.fidelity import REROUNDING, in_fp32
from autotune_amp.numerics.modules import modules_by_name, unwrap
from autotune_amp.numerics.passes import Gradients, Pass, Passes, Subject, without_dropout
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import can_be_pinned, clear_override, has_half_weights, override
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES

IGNORED_LABEL = -100  # torch's own, in cross_entropy
_MAX_SAMPLES = 16
_MAX_ENTRIES = 2**16  # of each parameter's gradient: what holds for the whole gradient holds for any of its entries
# Moved weights round anew in every operation, as a batch cut in pieces does; this many times that is still rounding.
_ROUNDING_MARGIN = 8.0
_MAX_TOLERANCE = 0.05  # where rounding alone does more than this to a gradient, nothing can be told from it
_MAX_LOSS_ERROR = 1e-3
_MAX_WEIGHT_ERROR = 0.1  # of 1/k: weights found less exactly are no finding


def num_micro_batches(num_samples: int) -> int:
    """In how many a batch is cut for the check; each has two samples at least."""
    return 4 if num_samples >= 8 else 2


def num_checked(batch_size: int) -> int:
    """How many samples of a batch are checked: micro-batches of equal size are made of them."""
    num_samples = min(batch_size, _MAX_SAMPLES)
    return num_samples - num_samples % num_micro_batches(num_samples)


def unchecked(reason: str, batch_size: int) -> Accumulation:
    """What could not be found out, and why."""
    return Accumulation(
        verdict="unchecked",
        reason=f"Accumulation is unchecked: {reason}.",
        next_step="Keep the batch whole, or compare its gradient with that of accumulated micro-batches yourself.",
        batch_size=batch_size,
        num_micro_batches=num_micro_batches(batch_size),
    )


def check(subject: Subject, num_samples: int) -> Accumulation:
    """Hold micro-batches against the whole batch on `subject`, whose model is left as it was.

    `subject.batches` are the whole batch of `num_samples` and then its micro-batches, equal in size and in its order.
    What the model's own code raises comes through; numbers that are not finite never raise.
    """
    started = time.perf_counter()
    passes = Passes(subject, in_fp32(subject.model, subject.device.type) if has_half_weights(subject.model) else None)
    own = unwrap(passes.model)
    with ExitStack() as stack:
        # Compiled code would draw out of sight of the modes, and drop what dropout drops.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if can_be_pinned(own):  # in fp32 also under an autocast that the loss function has around it
            override(own, "fp32", subject.device.type)
            stack.callback(clear_override, own)
        try:
            found = _checked(passes, num_samples)
        except CannotReplayError as error:
            found = unchecked(f"a micro-batch cannot be given the whole batch's random draws: {error}", num_samples)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)
    return msgspec.structs.replace(found, num_passes=passes.num_passes, seconds=time.perf_counter() - started)


def _checked(passes: Passes, num_samples: int) -> Accumulation:
    pieces = passes.subject.batches[1:]
    size = num_samples // len(pieces)
    everything = Samples(0, num_samples, num_samples)
    seed = passes.subject.seed
    recorded = RecordedDraws()

    def again(index: int, samples: Samples, other_seed: int = seed) -> Pass:
        replayed = ReplayedDraws(recorded.draws, samples)
        done = _pass(passes, index, replayed, other_seed)
        replayed.finish()
        return done

    passes.restore()
    whole = _pass(passes, 0, recorded, seed)
    if not whole.is_finite:
        return unchecked("the loss of the whole batch or its gradient is not finite", num_samples)
    passes.restore()
    repeated = again(0, everything, seed + 1)
    passes.restore()
    perturb(passes.model, REROUNDING, seed)
    moved = again(0, everything)
    unit_roundoff = MODES["bf16" if recorded.has_half else "fp32"].unit_roundoff
    names = sorted(signals(whole.gradients, moved.gradients))
    rounding = _distance(whole.gradients, moved.gradients, names)
    if not names or rounding * _ROUNDING_MARGIN > _MAX_TOLERANCE:
        return unchecked("the gradient of the whole batch is zero, or no more than rounding noise", num_samples)
    unrepeated = _distance(whole.gradients, repeated.gradients, names)
    if unrepeated > max(_ROUNDING_MARGIN * rounding, 4 * unit_roundoff):
        reason = f"the same batch gives another gradient a second time (they part by {unrepeated:.1g})"
        because = "by random draws that cannot be handed on, or by what the first pass left outside the model's buffers"
        return unchecked(f"{reason}, {because}", num_samples)
    # One after the other, as training runs them: each finds what the one before left in the model's buffers.
    passes.restore()
    parts = [again(index + 1, Samples(index * size, size, num_samples)) for index in range(len(pieces))]
    if not all(part.is_finite for part in parts):
        return Accumulation(
            verdict="inexact",
            reason=f"The loss of a micro-batch of {size} samples or its gradient is not finite, where that of the "
            f"whole batch of {num_samples} is: a mean over something of which a micro-batch may hold nothing.",
            next_step="Keep the batch whole, make the loss finite for such a batch, or leave such samples out.",
            batch_size=num_samples,
            num_micro_batches=len(pieces),
        )
    sums = Sums(
        gram=_gram([whole.gradients, *(part.gradients for part in parts)], names),
        losses=(whole.loss, *(part.loss for part in parts)),
        rounding=max(rounding, unrepeated),
        unit_roundoff=unit_roundoff,
    )
    return _report(sums, find_weights(sums, counted_shares(pieces)), passes, num_samples)


def _pass(passes: Passes, index: int, draws: AbstractContextManager[object], seed: int) -> Pass:
    """Forward and backward, which may compute the forward pass again; only entries of the gradients are kept."""

    @contextmanager
    def replaying() -> Iterator[None]:
        torch_state.seed(seed)
        with draws:
            yield

    with without_dropout():
        done = passes.run(index, "fp32", restores=False, around_forward=replaying(), around_backward=draws)
    return Pass(done.loss, {name: _entries(gradient) for name, gradient in done.gradients.items()})


def _entries(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
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


# -- random draws ------------------------------------------------------------------------------------------------------

# Whose numbers do not depend on how many are drawn beside them, in place or not. Not `randperm`: a permutation of the
# batch's samples has no part that permutes some of them.
_DRAWING = {
    f"aten::{name}"
    for name in (
        *("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "poisson"),
        *("binomial", "uniform", "exponential", "random", "log_normal", "geometric", "cauchy", "_standard_gamma"),
    )
}
_MULTIPLYING = {f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution")}


class CannotReplayError(Exception):
    """A pass draws otherwise than the one whose draws it is to be given."""


class Samples(NamedTuple):
    """`num` samples from the `first` on, of `num_all` that the recorded pass had."""

    first: int
    num: int
    num_all: int


class Draw(NamedTuple):
    """What a random operation gave; `numbers` are its arguments that are plain numbers, such as bounds."""

    name: str
    numbers: tuple[float, ...]
    value: Tensor


class RecordedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Keeps in `draws` what random operations give while it is entered, in their order.

    `has_half` says whether any matrix product or convolution was computed in half precision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self.has_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.has_half |= func._schema.name in _MULTIPLYING and result.dtype in HALF_DTYPES
            if _draws(func):
                self.draws.append(Draw(func._schema.name, _numbers(args), result.detach().clone()))
        return result


class ReplayedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Gives random operations what the same ones gave when `draws` were recorded, or the part of it of `samples`.

    While it is entered an operation that has nothing to match raises `CannotReplayError`, as does `finish` where draws
    are left.
    """

    def __init__(self, draws: Sequence[Draw], samples: Samples) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(reversed(draws))
        self._samples = samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and _draws(func):
            draw, name = self._left.pop() if self._left else None, func._schema.name
            if draw is None or (draw.name, draw.numbers) != (name, _numbers(args)):
                raise CannotReplayError(f"it draws by {name.removeprefix('aten::')} where the whole batch did not")
            result.copy_(_part(draw.value, result.shape, self._samples))
        return result

    def finish(self) -> None:
        """The pass is over."""
        if self._left:
            raise CannotReplayError(f"it makes {len(self._left)} draws fewer than the whole batch")


def _part(value: Tensor, shape: torch.Size, samples: Samples) -> Tensor:
    """The samples' part of `value` along the one dimension in which `shape` is shorter; all of it where none is."""
    if value.shape == shape:
        return value
    shorter = [dim for dim, (whole, part) in enumerate(zip(value.shape, shape, strict=False)) if whole != part]
    if value.dim() == len(shape) and len(shorter) == 1:
        (dim,) = shorter
        per_sample, rest = divmod(value.shape[dim], samples.num_all)
        if not rest and shape[dim] == per_sample * samples.num:
            return value.narrow(dim, samples.first * per_sample, shape[dim])
    raise CannotReplayError(f"its draw of shape {tuple(shape)} is no part of the whole batch's {tuple(value.shape)}")


def _draws(func: Any) -> bool:
    return func._schema.name.removesuffix("_") in _DRAWING


def _numbers(args: tuple[Any, ...]) -> tuple[float, ...]:
    return tuple(argument for argument in args if isinstance(argument, (int, float)))


# -- the weights -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sums:
    """Scalar products of the gradients, in fp64: `gram[0, 0]` is |g|^2, `gram[0, i]` of g and g_i, and so on.

    `rounding` is what another rounding does to g, relative to it; `unit_roundoff` that of one operation.
    """

    gram: Tensor
    losses: tuple[float, ...]
    rounding: float
    unit_roundoff: float

    def error(self, weights: Tensor) -> float:
        """|g - sum w_i g_i| over |g|."""
        coefficients = torch.cat([torch.ones(1, dtype=torch.float64), -weights])
        return math.sqrt(max(0.0, float(coefficients @ self.gram @ coefficients)) / float(self.gram[0, 0]))

    def tolerance(self, weights: Tensor) -> float:
        """The error that rounding explains."""
        norms = self.gram.diagonal().sqrt()
        parts = float((weights.abs() * norms[1:]).sum() / norms[0])
        return _ROUNDING_MARGIN * self.rounding + 2 * self.unit_roundoff * (1 + parts)

    def fits(self, weights: Tensor) -> bool:
        """Whether these weights give the whole batch's gradient."""
        return self.error(weights) <= self.tolerance(weights)

    def best(self) -> Tensor:
        """The weights of least error."""
        weights: Tensor = torch.linalg.pinv(self.gram[1:, 1:], rtol=1e-12, hermitian=True) @ self.gram[0, 1:]
        return weights

    def tell_apart(self, weights: Tensor) -> bool:
        """Whether no others fit as well, as they do where micro-batches are too much alike."""
        least, num = float(torch.linalg.eigvalsh(self.gram[1:, 1:])[0]), len(weights)
        allowed = self.tolerance(weights) * math.sqrt(float(self.gram[0, 0]))
        return least > 0 and allowed <= _MAX_WEIGHT_ERROR / num * math.sqrt(least)

    def do_losses_fit(self, weights: Tensor) -> bool:
        """Whether these weights give the whole batch's loss too."""
        parts = torch.tensor(self.losses[1:], dtype=torch.float64) * weights
        size = max(abs(self.losses[0]), float(parts.abs().sum()))
        return abs(self.losses[0] - float(parts.sum())) <= _MAX_LOSS_ERROR * size


class Finding(NamedTuple):
    """`weights` are those found; of *inexact*, the best there are. `share` is what they are proportional to."""

    verdict: AccumulationVerdict
    weights: Tensor
    share: str | None = None


def find_weights(sums: Sums, shares: Sequence[tuple[str, Tensor]]) -> Finding:
    """The simplest combination that fits: of few or collinear gradients many do."""
    ones = torch.ones(len(sums.gram) - 1, dtype=torch.float64)
    simple = [Finding("mean", ones / len(ones)), Finding("sum", ones)]
    for finding in (*simple, *(Finding("weighted", weights, name) for name, weights in shares)):
        if sums.fits(finding.weights):
            return finding
    best = sums.best()
    if sums.fits(best) and not sums.tell_apart(best):
        return Finding("unchecked", best)
    return Finding("weighted" if sums.fits(best) and sums.do_losses_fit(best) else "inexact", best)


def counted_shares(pieces: Sequence[object]) -> list[tuple[str, Tensor]]:
    """What a loss may average over, and each micro-batch's share of it: entries of the batch's tensors that count.

    `[:, 1:]` stands where the first of each sequence is left out, as a language model does that shifts its labels.
    """
    by_piece = [dict(tensors(piece)) for piece in pieces]
    columns = {name: [of_piece[name] for of_piece in by_piece if name in of_piece] for name in by_piece[0]}
    columns |= {
        f"{name}[:, 1:]": [tensor[:, 1:] for tensor in column if tensor.dim() > 1] for name, column in columns.items()
    }
    shares = []
    for text in (*_NOT_COUNTED, _ALL, _SUM):
        for name, column in columns.items():
            counts = torch.tensor([_count(tensor, text) for tensor in column], dtype=torch.float64)
            is_known = len(counts) == len(pieces) and bool(counts.isfinite().all()) and float(counts.sum()) > 0
            counts_all = text != _ALL and counts.tolist() == [tensor.numel() for tensor in column]
            if is_known and not counts_all:
                shares.append((name + text, counts / counts.sum()))
    return shares


# In the order of how telling they are.
_NOT_COUNTED, _ALL, _SUM = {f" != {IGNORED_LABEL}": IGNORED_LABEL, " != 0": 0}, ".numel()", ".sum()"


def _count(column: Tensor, text: str) -> float:
    """NaN, which no share is made of, where such numbers are not counted so."""
    if text == _ALL:
        return float(column.numel())
    if column.is_complex() or (text == _SUM and bool((column < 0).any())):
        return math.nan
    if text == _SUM:
        return float(column.cpu().double().sum())
    return math.nan if column.is_floating_point() else float((column != _NOT_COUNTED[text]).sum())


# -- in words ----------------------------------------------------------------------------------------------------------


def _report(sums: Sums, found: Finding, passes: Passes, num_samples: int) -> Accumulation:
    num = len(found.weights)
    error, mean_error = sums.error(found.weights), sums.error(torch.full((num,), 1 / num, dtype=torch.float64))
    the_whole = f"the gradient of the whole batch of {num_samples}"
    parts = f"gradients of {num} micro-batches of {num_samples // num} samples"
    apart = f"they part by {error:.1g} of it, and fp32 rounded otherwise by {sums.rounding:.1g}"
    if found.verdict == "unchecked":
        reason = f"the {parts} are too much alike to tell with which weights they add up to {the_whole}"
        return msgspec.structs.replace(unchecked(reason, num_samples), error=error, mean_error=mean_error)
    if found.verdict == "mean":
        next_step = "Divide each micro-batch's loss by the accumulation steps."
    elif found.verdict == "sum":
        next_step = "Add the micro-batches' losses as they are: do not divide them by the accumulation steps."
    reason = f"The {found.verdict} of the {parts} is {the_whole} ({apart})"
    if found.verdict == "weighted":
        weights = ", ".join(f"{weight:.3f}" for weight in found.weights.tolist())
        by = f"its share of {found.share}" if found.share else "its own weight"
        reason = (
            f"The {parts} add up to {the_whole} when each counts by {by}, here {weights} ({apart}); their plain mean "
            f"misses it by {100 * mean_error:.2g} %"
        )
        kind = "tokens" if found.share and str(IGNORED_LABEL) in found.share else "entries that count"
        next_step = (
            f"Multiply each micro-batch's loss by its share of the window's {kind} "
            f"({found.share or 'whatever the loss divides by'}) in place of 1/accumulation_steps: "
            "PrecisionController.windows(loader, weigh=...) has it, and the exports."
        )
    elif found.verdict == "inexact":
        cause, next_step = _cause(passes)
        reason = (
            f"No weighting of the {parts} gives {the_whole}: the best misses it by {100 * error:.2g} %, where rounding "
            f"explains {sums.tolerance(found.weights):.1g}; {cause}"
        )
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
    """What makes it inexact, as far as that can be seen, and what the user does about it."""
    modules = modules_by_name(passes.model).items()
    norms = [n for n, m in modules if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]
    if norms:
        return (
            f"BatchNorm in training mode takes its statistics from each micro-batch ({_some(norms)})",
            "Keep the batch whole, or put BatchNorm in eval mode or GroupNorm in its place.",
        )
    if changed := passes.changed_buffers():
        return (
            f"the forward pass changes {_some(changed)}, which that of the next micro-batch may compute with",
            "Keep the batch whole, or change these buffers once per optimizer step, outside of the forward pass.",
        )
    return (
        "the loss or the model compares samples with each other, as in-batch negatives and load balancing do, the "
        "padding counts, of which each micro-batch has its own length, or the loss holds a term that is no mean over "
        "samples",
        "Keep the batch whole: smaller batches accumulated would learn something else.",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

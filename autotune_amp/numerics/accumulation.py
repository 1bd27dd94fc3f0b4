"""Whether gradients accumulated over micro-batches are those of the whole batch, and with which weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from autotune_amp.core.fidelity import Accumulation
from autotune_amp.numerics.attempt import REROUNDING, in_fp32
from autotune_amp.numerics.blame import modules_by_name, unwrap
from autotune_amp.numerics.combination import IGNORED_LABEL, ROUNDING_MARGIN, Finding, Sums, counted_shares, judge
from autotune_amp.numerics.comparison import signals
from autotune_amp.numerics.draws import without_dropout
from autotune_amp.numerics.paired import UNIT_ROUNDOFF, perturb
from autotune_amp.numerics.passes import Gradients, Pass, Passes, Subject
from autotune_amp.numerics.same_draws import CannotReplayError, RecordedDraws, ReplayedDraws, Samples
from autotune_amp.precision import torch_state
from autotune_amp.precision.mode import clear_override, has_half_weights, override

_MAX_SAMPLES = 16
_MAX_ENTRIES = 2**16  # of each parameter's gradient: what holds for the whole gradient holds for any of its entries
# A ReLU or a router that rounding flips changes more than rounding does, but not at weights moved a little as well.
_MAX_CHANCE_ERROR = 0.02
_MAX_TOLERANCE = 0.05  # where rounding alone does more than this to a gradient, nothing can be told from it


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
    is_half = has_half_weights(subject.model)
    passes = Passes(subject, in_fp32(subject.model, subject.device.type) if is_half else None)
    # Compiled code would draw out of sight of the modes, and drop what dropout drops.
    with torch.compiler.set_stance("force_eager"), _overridden(passes.model, subject.device.type):
        try:
            found = _checked(passes, num_samples)
        except CannotReplayError as error:
            found = unchecked(f"a micro-batch cannot be given the whole batch's random draws: {error}", num_samples)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)
    return msgspec.structs.replace(found, num_passes=passes.num_passes, seconds=time.perf_counter() - started)


@contextmanager
def _overridden(model: nn.Module, device_type: str) -> Iterator[None]:
    """In fp32 also under an autocast that the loss function has around it."""
    own = unwrap(model)
    if isinstance(own, torch.jit.ScriptModule):  # whose forward nothing can be put around
        yield
        return
    override(own, "fp32", device_type)
    try:
        yield
    finally:
        clear_override(own)


def _checked(passes: Passes, num_samples: int) -> Accumulation:
    found = _looked_at(passes, num_samples)
    if found.verdict != "inexact" or found.error is None or found.error > _MAX_CHANCE_ERROR:
        return found
    elsewhere = _looked_at(passes, num_samples, perturbation=REROUNDING)
    return found if elsewhere.verdict == "inexact" else elsewhere


def _looked_at(passes: Passes, num_samples: int, perturbation: float = 0.0) -> Accumulation:
    """What is found at the first weights, each of them first moved by up to `perturbation` times itself."""
    pieces = passes.subject.batches[1:]
    size = num_samples // len(pieces)
    everything = Samples(0, num_samples, num_samples)
    seed = passes.subject.seed
    recorded = RecordedDraws()

    def at_start() -> None:
        passes.restore()
        perturb(passes.model, perturbation, seed + 1)

    def again(index: int, samples: Samples, other_seed: int = seed) -> Pass:
        replayed = ReplayedDraws(recorded.draws, samples)
        done = _pass(passes, index, replayed, other_seed)
        replayed.finish()
        return done

    at_start()
    whole = _pass(passes, 0, recorded, seed)
    if not whole.is_finite:
        return unchecked("the loss of the whole batch or its gradient is not finite", num_samples)
    at_start()
    repeated = again(0, everything, seed + 1)
    at_start()
    perturb(passes.model, REROUNDING, seed)
    moved = again(0, everything)
    unit_roundoff = UNIT_ROUNDOFF["bf16" if recorded.has_half else "fp32"]
    names = sorted(signals(whole.gradients, moved.gradients))
    rounding = _distance(whole.gradients, moved.gradients, names)
    if not names or rounding * ROUNDING_MARGIN > _MAX_TOLERANCE:
        return unchecked("the gradient of the whole batch is zero, or no more than rounding noise", num_samples)
    unrepeated = _distance(whole.gradients, repeated.gradients, names)
    if unrepeated > max(ROUNDING_MARGIN * rounding, 4 * unit_roundoff):
        reason = f"the same batch gives another gradient a second time (they part by {unrepeated:.1g})"
        because = "by random draws that cannot be handed on, or by what the first pass left outside the model's buffers"
        return unchecked(f"{reason}, {because}", num_samples)

    def of_parts(prepare: Callable[[], None]) -> Sums | None:
        """The micro-batches one after the other, `prepare` called before each; None where one is not finite."""
        parts = []
        for index in range(len(pieces)):
            prepare()
            parts.append(again(index + 1, Samples(index * size, size, num_samples)))
        if not all(part.is_finite for part in parts):
            return None
        return Sums(
            gram=_gram([whole.gradients, *(part.gradients for part in parts)], names),
            losses=(whole.loss, *(part.loss for part in parts)),
            rounding=max(rounding, unrepeated),
            unit_roundoff=unit_roundoff,
        )

    alone = of_parts(at_start)
    if alone is None:
        return _of_not_finite(num_samples, len(pieces))
    found = judge(alone, counted_shares(pieces))
    report = _report(alone, found, passes.model, num_samples)
    if not report.is_exact:
        return report
    left = {name: buffer.clone() for name, buffer in passes.model.named_buffers()}
    at_start()
    changed = [name for name, buffer in passes.model.named_buffers() if not _is_same(buffer, left.get(name))]
    if not changed:
        return report
    in_order = of_parts(lambda: None)  # as training runs them: each finds what the one before left in the buffers
    if in_order is not None and in_order.fits(found.weights):
        return report
    return _of_state(report, None if in_order is None else in_order.error(found.weights), changed)


def _pass(passes: Passes, index: int, draws: AbstractContextManager[object], seed: int) -> Pass:
    """Forward and backward, which may compute the forward pass again; only entries of the gradients are kept."""

    @contextmanager
    def seeded() -> Iterator[None]:
        torch_state.seed(seed)
        with without_dropout(), draws:
            yield

    @contextmanager
    def backward() -> Iterator[None]:
        with without_dropout(), draws:
            yield

    done = passes.go_on(index, "fp32", around_forward=seeded(), around_backward=backward())
    return Pass(done.loss, {name: _entries(gradient) for name, gradient in done.gradients.items()})


def _entries(gradient: Tensor) -> Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    flat = (torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense).reshape(-1)
    return flat[:: -(-max(1, flat.numel()) // _MAX_ENTRIES)].cpu()


def _gram(gradients: Sequence[Gradients], names: Sequence[str]) -> Tensor:
    gram = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for name in names:
        rows = [of_pass.get(name, torch.zeros_like(gradients[0][name])).double() for of_pass in gradients]
        matrix = torch.stack(rows)
        gram += matrix @ matrix.T
    return gram


def _distance(one: Gradients, other: Gradients, names: Sequence[str]) -> float:
    gram = _gram([one, other], names)
    size = float(gram[0, 0])
    difference = float(gram[0, 0] + gram[1, 1] - 2 * gram[0, 1])
    return math.sqrt(max(0.0, difference) / size) if size else 0.0


def _of_not_finite(num_samples: int, num: int) -> Accumulation:
    return Accumulation(
        verdict="inexact",
        reason=f"The loss of a micro-batch of {num_samples // num} samples or its gradient is not finite, where that "
        f"of the whole batch of {num_samples} is: a mean over something of which a micro-batch may hold nothing.",
        next_step="Keep the batch whole, make the loss finite for such a batch, or leave such samples out.",
        batch_size=num_samples,
        num_micro_batches=num,
    )


def _is_same(one: Tensor, other: Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _of_state(alone: Accumulation, error: float | None, changed: Sequence[str]) -> Accumulation:
    """Of micro-batches whose gradients fit, as `alone` says, until one finds the buffers as another has left them."""
    misses = "their sum is not finite" if error is None else f"their sum misses that of the whole by {_percent(error)}"
    return msgspec.structs.replace(
        alone,
        verdict="inexact",
        reason=f"The gradients of {alone.num_micro_batches} micro-batches of "
        f"{alone.batch_size // alone.num_micro_batches} samples fit that of the whole batch of {alone.batch_size} only "
        f"while each begins from the same buffers. One after the other, as training runs them, {misses}: the forward "
        f"pass changes {_some(changed)}, which the next one computes with.",
        next_step="Keep the batch whole, or change these buffers once per optimizer step, outside of the forward pass.",
        error=error,
        mean_error=None,
        weighted_by=None,
    )


def _report(sums: Sums, found: Finding, model: nn.Module, num_samples: int) -> Accumulation:
    num = len(found.weights)
    mean_error = sums.error(torch.full((num,), 1 / num, dtype=torch.float64))
    error = sums.error(found.weights)
    the_whole = f"the gradient of the whole batch of {num_samples}"
    parts = f"gradients of {num} micro-batches of {num_samples // num} samples"
    apart = f"they part by {error:.1g} of it, and fp32 rounded otherwise by {sums.rounding:.1g}"
    if found.verdict == "unchecked":
        reason = f"the {parts} are too much alike to tell with which weights they add up to {the_whole}"
        found_nothing = unchecked(reason, num_samples)
        return msgspec.structs.replace(found_nothing, error=error, mean_error=mean_error)
    if found.verdict == "weighted":
        weights = ", ".join(f"{weight:.3f}" for weight in found.weights.tolist())
        by = f"its share of {found.share}" if found.share else "its own weight"
        reason = (
            f"The {parts} add up to {the_whole} when each counts by {by}, here {weights} ({apart}); their plain mean "
            f"misses it by {_percent(mean_error)}"
        )
    elif found.verdict == "inexact":
        reason = (
            f"No weighting of the {parts} gives {the_whole}: the best misses it by {_percent(error)}, where rounding "
            f"explains {sums.tolerance(found.weights):.1g}; {_cause(model)}"
        )
    else:
        reason = f"The {found.verdict} of the {parts} is {the_whole} ({apart})"
    return Accumulation(
        verdict=found.verdict,
        reason=f"{reason}.",
        next_step=_next_step(found, has_batch_norm=bool(_batch_norms(model))),
        batch_size=num_samples,
        num_micro_batches=num,
        error=error,
        mean_error=mean_error,
        weighted_by=found.share,
    )


def _next_step(found: Finding, *, has_batch_norm: bool) -> str:
    if found.verdict == "mean":
        return "Divide each micro-batch's loss by the accumulation steps."
    if found.verdict == "sum":
        return "Add the micro-batches' losses as they are: do not divide them by the accumulation steps."
    if found.verdict == "weighted":
        what = f"({found.share})" if found.share else "(whatever the loss divides by)"
        kind = "tokens" if found.share and str(IGNORED_LABEL) in found.share else "entries that count"
        return (
            f"Multiply each micro-batch's loss by its share of the window's {kind} {what} in place of "
            "1/accumulation_steps: PrecisionController.windows(loader, weigh=...) has it, and the exports."
        )
    if has_batch_norm:
        return "Keep the batch whole, or put BatchNorm in eval mode or GroupNorm in its place."
    return "Keep the batch whole: smaller batches accumulated would learn something else."


def _batch_norms(model: nn.Module) -> list[str]:
    modules = modules_by_name(model).items()
    return [n for n, m in modules if isinstance(m, _BatchNorm) and (m.training or m.running_mean is None)]


def _cause(model: nn.Module) -> str:
    if norms := _batch_norms(model):
        return f"BatchNorm in training mode takes its statistics from each micro-batch ({_some(norms)})"
    return (
        "the loss or the model compares samples with each other, as in-batch negatives and load balancing do, the "
        "padding counts, of which each micro-batch has its own length, or the loss holds a term that is no mean over "
        "samples"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"

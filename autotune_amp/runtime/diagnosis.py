"""Whose fault a trip is: precision's, or not; where it begins, and which modules to pin in fp32 against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from autotune_amp.core.config import Precision
from autotune_amp.numerics.nonfinite import Recorder, bad_parameters
from autotune_amp.precision.mode import can_be_pinned
from autotune_amp.runtime.gradients import NEGLIGIBLE
from autotune_amp.runtime.rerun import Pass, Rerunner

_MAX_PINNED_SHARE = 0.05  # of the modules; one module may always be pinned
_MAX_PIN_ROUNDS = 3


@dataclass(frozen=True)
class Finding:
    """What reruns of the batch have shown; the same on every rank.

    `reproduced`: the batch is not finite again, or an earlier pass of its window may be what was not.
    `culprit` says for people where the non-finite numbers begin. `finite_in` are those of the precisions asked for in
    which loss and gradients are finite, `not_run` those that could not be: out of memory, or the loop keeps its own.
    With `pins` kept in fp32 the current precision is finite. `is_precision`: the batch is finite in a safer precision,
    or with the pins; None where that could not be found out.
    """

    reproduced: bool
    finite_in: tuple[Precision, ...]
    culprit: str | None
    pins: tuple[str, ...]
    num_passes: int
    not_run: tuple[Precision, ...] = ()
    is_precision: bool | None = None


@dataclass(frozen=True)
class ProbeResult:
    """How a batch fares in a precision. `forward_max` is this rank's largest magnitude put out by a module."""

    is_finite: bool
    forward_max: float


def diagnose(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    current: Precision,
    lower: Sequence[Precision],
    loss_scale: float,
    device_type: str,
    already_pinned: bool,
    agree: Callable[[bool], bool] = lambda flag: flag,
    gather: Callable[[tuple[str, ...]], tuple[str, ...]] = lambda names: names,
    can_run_fp32: bool = True,
    is_whole: bool = True,
) -> Finding:
    """Rerun the batch in `current`, in fp32, with modules pinned and in each of `lower`; no step is taken.

    `rerun` computes the loss of the batch. `lower` is ordered, first choice first. `agree` is whether a flag is set on
    any rank, `gather` the names from all ranks. `is_whole`: the batch is all of the window that failed, not the last of
    several passes, which tells nothing of the others if it is finite. Raises `InvalidRequestError` where the closure
    fails.
    """
    bench = Rerunner(model, rerun, current=current, device_type=device_type, agree=agree)
    first = bench.run(current, loss_scale)
    if not first.fits:
        return Finding(True, (), None, (), bench.num_passes, not_run=(current,))
    if first.is_finite:
        culprit = None if is_whole else "an earlier pass of the window than the one run again"
        return Finding(not is_whole, (), culprit, (), bench.num_passes)

    passes = {current: first}

    def run_once(precision: Precision) -> Pass:
        if precision not in passes:
            passes[precision] = bench.run(precision, 1.0)
        return passes[precision]

    # The safest precision that can be run decides whether precision is at fault at all. Without any, pins may show it.
    fp32: tuple[Precision, ...] = ("fp32",) if can_run_fp32 else ()
    decider = next((done for precision in (*fp32, *reversed(lower)) if (done := run_once(precision)).fits), None)
    pins: tuple[str, ...] = ()
    finite_in: tuple[Precision, ...] = ()
    if decider is not None and not decider.is_finite:
        culprit = _culprit(model, decider, gather)
    else:
        healthy = None if decider is None else decider.recorder
        culprit = _first(gather(_as_names(first.recorder.damaged(healthy)[1])))
        if not already_pinned:
            pins = _find_pins(bench, first, healthy, current, loss_scale, gather)
        finite_in = tuple(precision for precision in lower if run_once(precision).is_finite)
    not_run = tuple(precision for precision, done in passes.items() if not done.fits)
    is_precision = True if pins else None if decider is None else decider.is_finite
    return Finding(True, finite_in, culprit, pins, bench.num_passes, not_run, is_precision)


def _culprit(model: nn.Module, bad: Pass, gather: Callable[[tuple[str, ...]], tuple[str, ...]]) -> str | None:
    """Where a pass went bad that precision has no part in."""
    if parameters := gather(bad_parameters(model)):
        return f"parameter {parameters[0]}"
    mine = bad.recorder.backward_culprit() if bad.is_loss_finite else bad.recorder.forward_culprit()
    return _first(gather(_as_names(mine)))


def _first(names: tuple[str, ...]) -> str | None:
    return names[0] if names else None


def _as_names(name: str | None) -> tuple[str, ...]:
    return () if name is None else (name,)


def _find_pins(
    bench: Rerunner,
    bad: Pass,
    healthy: Recorder | None,
    current: Precision,
    loss_scale: float,
    gather: Callable[[tuple[str, ...]], tuple[str, ...]],
) -> tuple[str, ...]:
    """Modules that make `current` finite once they run in fp32; () where that takes too many, or does not help."""
    limit = max(1, int(_MAX_PINNED_SHARE * len(bench.modules)))
    pins: tuple[str, ...] = ()
    for _ in range(_MAX_PIN_ROUNDS):
        damaged = (name for name in bad.recorder.damaged(healthy)[0] if name and can_be_pinned(bench.modules[name]))
        wanted = tuple(dict.fromkeys((*pins, *gather(tuple(damaged)))))
        if wanted == pins or len(wanted) > limit:
            return ()
        pins = wanted
        bad = bench.run(current, loss_scale, pins)
        if bad.is_finite:
            return pins
        if not bad.fits:
            return ()
    return ()


def probe(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    precision: Precision,
    loss_scale: float,
    device_type: str,
    agree: Callable[[bool], bool] = lambda flag: flag,
) -> ProbeResult:
    """Run the batch in `precision` at `loss_scale`, without a step, before promoting to it."""
    done = Rerunner(model, rerun, current=precision, device_type=device_type, agree=agree).run(precision, loss_scale)
    return ProbeResult(done.is_finite, done.recorder.forward_max)


def flushed_share(
    model: nn.Module,
    rerun: Callable[[], Tensor],
    *,
    loss_scale: float,
    device_type: str,
    agree: Callable[[bool], bool] = lambda flag: flag,
) -> float:
    """The share of the gradient's entries that matter which fp16 rounds to zero at `loss_scale`, from a pass in fp32.

    What is at most 2^-25 after scaling is nearer to 0 than to the smallest fp16 number, 2^-24. 0.0 where the pass is
    not finite or does not fit: then there is nothing to tell.
    """
    bench = Rerunner(model, rerun, current="fp16", device_type=device_type, agree=agree)
    done = bench.run("fp32", 1.0, keeps_gradients=True)
    if not done.is_finite:
        return 0.0
    magnitudes = [gradient.abs() for gradient in done.gradients if gradient.numel()]
    largest = max((float(magnitude.max()) for magnitude in magnitudes), default=0.0)
    matters = [magnitude[magnitude > largest * NEGLIGIBLE] for magnitude in magnitudes]
    num_flushed = sum(int((magnitude <= 2.0**-25 / loss_scale).sum()) for magnitude in matters)
    return num_flushed / max(1, sum(magnitude.numel() for magnitude in matters))

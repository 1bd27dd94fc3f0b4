"""Child side of a check of a precision, of its loss scale, or of accumulation, on the user's own model and batches.

The numbers come from numerics/; here the workload is built for them, and what it raises is told apart.
"""

from __future__ import annotations

import copy
import math
import traceback
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import torch

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Tell
from autotune_amp.core.outcome import Accumulation, Calibration, CheckOutcome, Failure, Fidelity
from autotune_amp.core.setting import Precision
from autotune_amp.core.workload import Workload
from autotune_amp.numerics import accumulation, calibration, fidelity
from autotune_amp.numerics.passes import Loop, NoStepError, Passes, Subject, no_loss
from autotune_amp.precision.forward_wrapper import has_half_weights
from autotune_amp.trial import data
from autotune_amp.trial.context import Context, LoopState
from autotune_amp.trial.jobs import Check
from autotune_amp.trial.micro_batches import LOOK_SECONDS, CannotCutError, whole_and_parts
from autotune_amp.trial.optimizers import make_optimizer
from autotune_amp.trial.training import checked_loss
from autotune_amp.trial.worker import classify, guarded, prepare

LOOK_SHARE = 0.2  # of a check's seconds, at most, for unequal samples
_PHASES = {
    "fidelity": "checking {} against fp32",
    "calibration": "calibrating the loss scale",
    "accumulation": "holding accumulated gradients against those of a whole batch",
}


def check(context: Context, spec: Check, tell: Tell) -> CheckOutcome:
    """Make one check; whatever goes wrong comes back as a `Failure`."""
    return guarded(context, spec, lambda: _check(context, spec, tell))


def _check(context: Context, spec: Check, tell: Tell) -> CheckOutcome:
    prepare(context, spec)
    try:
        subject = _subject(context, spec)
    except CannotCutError as error:
        return accumulation.unchecked(str(error), spec.batch_size)
    tell({"event": "phase", "name": _PHASES[spec.what].format(spec.precision)})
    try:
        return _found(subject, spec, tell)
    except NoStepError:
        reason = "one call of train_step takes no optimizer step, so that it cannot be held against fp32"
        if spec.what == "fidelity":
            return _unchecked(spec, reason, "Give train_step a whole step of it, or compare runs of some hundred steps")
        return Failure(kind="workload_error", message=reason)
    except Exception as error:
        failure = classify(error)
        if isinstance(error, AutotuneAmpError) or failure.kind not in ("workload_error", "unsupported"):
            raise
        return _attributed(failure, subject, spec)


def _attributed(failure: Failure, subject: Subject, spec: Check) -> Failure:
    """`failure` as what a single pass shows it to be: the workload's own, the precision's, or neither's."""
    passes = Passes(subject)
    if not _runs(passes, "fp32"):
        return msgspec.structs.replace(failure, kind="workload_error")
    with passes.pinned(spec.pinned_modules):
        if not _runs(passes, spec.precision):
            return msgspec.structs.replace(failure, kind="unsupported")
    return msgspec.structs.replace(failure, kind="crash", details=traceback.format_exc()[-8000:])


def _found(subject: Subject, spec: Check, tell: Tell) -> Fidelity | Calibration | Accumulation:
    if spec.what == "accumulation":
        return accumulation.check(subject, accumulation.num_checked(spec.batch_size))
    if spec.what == "calibration":
        return calibration.calibrate(subject, batch_size=spec.batch_size, pinned_modules=spec.pinned_modules)
    if subject.loop is not None and has_half_weights(subject.model):
        return _unchecked(
            spec,
            "a loop that keeps weights in half precision cannot be run in fp32",
            "Compare a few hundred of its steps with those of the same loop whose weights are in fp32.",
        )
    return fidelity.check(
        subject,
        spec.precision,
        pinned_modules=spec.pinned_modules,
        batch_size=spec.batch_size,
        find_pins=spec.find_pins and subject.loop is None,
        on_bad_verdict=lambda found: tell({"event": "so far", "value": msgspec.to_builtins(found)}),
    )


def _unchecked(spec: Check, reason: str, next_step: str) -> Fidelity:
    return Fidelity(
        precision=spec.precision,
        batch_size=spec.batch_size,
        pinned_modules=spec.pinned_modules,
        verdict="unchecked",
        reason=f"{spec.precision} is unchecked: {reason}.",
        next_step=next_step,
    )


def _subject(context: Context, spec: Check) -> Subject:
    device = torch.device(spec.device)
    workload = context.workload
    model = context.model(device)
    batches = _batches(workload.data, spec)
    if device.type != "cpu":
        batches = [data.move(batch, device) for batch in batches]
    if isinstance(model, LoopState):
        return _loop_subject(workload, model, batches, spec)
    loss = checked_loss(workload.loss)
    return Subject(
        model=model,
        # Of a copy: what the user's code takes out of its batch, or changes in it, is there for the next pass.
        loss=lambda model, batch: loss(model, copy.deepcopy(batch)),
        batches=batches,
        make_optimizer=partial(make_optimizer, workload),
        device=device,
        seed=spec.seed,
    )


def _loop_subject(workload: Workload, model: LoopState, batches: list[Any], spec: Check) -> Subject:
    train_step = workload.train_step
    assert train_step is not None
    loop = Loop(
        step=lambda state, batch, amp: train_step(state.held, copy.deepcopy(batch), amp),
        forget=LoopState.forget_steps,
        batch_size=spec.batch_size,
    )
    return Subject(
        model=model,
        loss=no_loss,
        batches=batches,
        make_optimizer=lambda _: model.first_optimizer(),
        device=torch.device(spec.device),
        seed=spec.seed,
        loop=loop,
    )


def _batches(user_data: Any, spec: Check) -> list[Any]:
    if spec.what == "accumulation":
        seconds = min(LOOK_SECONDS, LOOK_SHARE * (spec.deadline_seconds or math.inf))
        return whole_and_parts(user_data, accumulation.num_checked(spec.batch_size), spec.seed, seconds)
    with closing(data.stream(user_data, spec.batch_size)) as stream:
        return list(islice(stream, spec.num_batches))


def _runs(passes: Passes, precision: Precision) -> bool:
    try:
        passes.run(0, precision)
    except Exception:  # the user's code may raise anything
        return False
    return True

"""Child side of a check: a precision held against fp32 on the user's own model and batches, or its loss scale measured.

The numbers come from numerics/; here the workload is built for them, and what it raises is told apart.
"""

from __future__ import annotations

import copy
import traceback
from contextlib import closing
from functools import partial
from itertools import islice

import msgspec
import torch

from autotune_amp.config import Precision
from autotune_amp.errors import AutotuneAmpError
from autotune_amp.numerics import calibration, fidelity
from autotune_amp.numerics.passes import Passes, Subject
from autotune_amp.numerics.results import Calibration, Fidelity
from autotune_amp.trial import data
from autotune_amp.trial.outcome import CheckOutcome, Failure
from autotune_amp.trial.spec import CheckSpec
from autotune_amp.trial.step import checked_loss, make_optimizer
from autotune_amp.trial.worker import Bench, Send, classify, guarded, prepare

_PHASES = {"fidelity": "checking {} against fp32", "calibration": "calibrating the loss scale"}


def check(bench: Bench, spec: CheckSpec, send: Send) -> CheckOutcome:
    """Make one check; whatever goes wrong comes back as a `Failure`."""
    return guarded(bench, spec, lambda: _check(bench, spec, send))


def _check(bench: Bench, spec: CheckSpec, send: Send) -> CheckOutcome:
    prepare(bench, spec)
    subject = _subject(bench, spec)
    send({"event": "phase", "name": _PHASES[spec.what].format(spec.precision)})
    try:
        return _found(subject, spec, send)
    except Exception as error:
        failure = classify(error)
        if isinstance(error, AutotuneAmpError) or failure.kind not in ("workload_error", "unsupported"):
            raise
        return _attributed(failure, subject, spec)


def _attributed(failure: Failure, subject: Subject, spec: CheckSpec) -> Failure:
    """`failure` as what a single pass shows it to be: the workload's own, the precision's, or neither's."""
    passes = Passes(subject)
    if not _runs(passes, "fp32"):
        return msgspec.structs.replace(failure, kind="workload_error")
    with passes.pinned(spec.pinned_modules):
        if not _runs(passes, spec.precision):
            return msgspec.structs.replace(failure, kind="unsupported")
    return msgspec.structs.replace(failure, kind="crash", details=traceback.format_exc()[-8000:])


def _found(subject: Subject, spec: CheckSpec, send: Send) -> Fidelity | Calibration:
    if spec.what == "calibration":
        return calibration.calibrate(subject, batch_size=spec.batch_size, pinned_modules=spec.pinned_modules)
    return fidelity.check(
        subject,
        spec.precision,
        pinned_modules=spec.pinned_modules,
        batch_size=spec.batch_size,
        find_pins=spec.find_pins,
        judged=lambda found: send({"event": "so far", "value": msgspec.to_builtins(found)}),
    )


def _subject(bench: Bench, spec: CheckSpec) -> Subject:
    device = torch.device(spec.device)
    workload = bench.workload
    loss = checked_loss(workload.loss)
    model = bench.model(device)
    with closing(data.stream(workload.data, spec.batch_size)) as stream:
        batches = list(islice(stream, spec.num_batches))
    if device.type != "cpu":
        batches = [data.move(batch, device) for batch in batches]
    return Subject(
        model=model,
        # Of a copy: what the user's code takes out of its batch, or changes in it, is there for the next pass.
        loss=lambda model, batch: loss(model, copy.deepcopy(batch)),
        batches=batches,
        make_optimizer=partial(make_optimizer, workload),
        device=device,
        seed=spec.seed,
    )


def _runs(passes: Passes, precision: Precision) -> bool:
    try:
        passes.run(0, precision)
    except Exception:  # the user's code may raise anything
        return False
    return True

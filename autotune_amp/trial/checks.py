"""Child side of a check: prepares the workload for numerics/, cuts batches, and attributes errors."""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import PartialResult, Phase, Ready, Tell
from autotune_amp.core.outcome import (
    MIN_ACCUMULATION_SAMPLES,
    Accumulation,
    Calibration,
    CheckOutcome,
    Failure,
    Fidelity,
)
from autotune_amp.core.workload import Workload
from autotune_amp.dimensions import NUMERIC, VARIANTS
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.numerics import accumulation, calibration, fidelity
from autotune_amp.numerics.accumulation import IGNORED_LABEL, cut, first_dimensions, num_micro_batches, tensors
from autotune_amp.numerics.paired_runs import train_before
from autotune_amp.numerics.passes import CheckInputs, Loop, NoStepError, Passes, no_loss
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import has_half_weights
from autotune_amp.trial import data, failures
from autotune_amp.trial.context import Context, LoopState, copied_model, each, make_optimizer
from autotune_amp.trial.data import copied
from autotune_amp.trial.jobs import Check
from autotune_amp.trial.training import checked_loss
from autotune_amp.trial.worker import guarded, prepare
from autotune_amp.trial.worst_batch import MAX_SCANNED_SAMPLES, scan_samples

LOOK_SECONDS, LOOK_SHARE = 1.0, 0.2  # limits for finding unequal samples: seconds, and share of the check's
MAX_SAMPLES_SEEN = 2048  # samples rarer than one in this many matter little
# Dimensions that change numerics but are not applied by the passes of numerics/.
_UNSEEN = [name for name in NUMERIC if name not in ("precision", "pinned_modules", *VARIANTS)]
_PHASES = {
    "fidelity": "checking {} against fp32",
    "calibration": "calibrating the loss scale",
    "accumulation": "holding accumulated gradients against those of a whole batch",
}


def check(context: Context, spec: Check, tell: Tell) -> CheckOutcome:
    """Run one check; an error is returned as a `Failure`."""
    return guarded(context, spec, lambda: _check(context, spec, tell))


def _check(context: Context, spec: Check, tell: Tell) -> CheckOutcome:
    prepare(context, spec)
    try:
        subject, num_steps = _subject(context, spec, tell)
    except CannotCutError as error:
        return accumulation.unchecked(str(error), spec.candidate.batch_size)
    except NotTrainedError as error:
        return spec.unchecked(f"training in fp32 for it failed: {error}")
    spec = msgspec.structs.replace(spec, num_steps_before=num_steps)
    tell(Phase(_PHASES[spec.what].format(spec.candidate.precision)))
    try:
        return _found(subject, spec, tell)
    except NoStepError:
        reason = "one call of train_step takes no optimizer step, so that it cannot be compared with fp32"
        if spec.what == "fidelity":
            return spec.unchecked(reason, "Give train_step a whole step of it, or compare runs of some hundred steps")
        return Failure(kind="workload_error", message=reason)
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if isinstance(error, AutotuneAmpError) or failure.kind not in ("workload_error", "unsupported"):
            raise
        return _attributed(failure, subject, spec)


def _attributed(failure: Failure, subject: CheckInputs, spec: Check) -> Failure:
    """Return `failure` as a single pass in each precision shows it: the workload's, the precision's, or neither's."""
    passes = Passes(subject)
    try:
        passes.run(0, "fp32")
    except Exception:  # the user's code may raise anything
        return msgspec.structs.replace(failure, kind="workload_error")
    try:
        with passes.pinned(spec.candidate.pinned_modules):
            passes.run(0, spec.candidate.precision)
    except Exception:  # the user's code may raise anything
        return msgspec.structs.replace(failure, kind="unsupported")
    return msgspec.structs.replace(failure, kind="crash", details=traceback.format_exc()[-8000:])


def _found(subject: CheckInputs, spec: Check, tell: Tell) -> Fidelity | Calibration | Accumulation:
    asked = spec.candidate
    if spec.what == "accumulation":
        return accumulation.check(subject, accumulation.num_checked(asked.batch_size))
    if spec.what == "calibration":
        return calibration.calibrate(subject, batch_size=asked.batch_size, pinned_modules=asked.pinned_modules)
    if unseen := [name for name in _UNSEEN if asked.uses(name)]:
        reason = f"no check looks at what {' and '.join(unseen)} does to the numbers"
        return spec.unchecked(reason, "Compare a few hundred steps of a training with it and of one without.")
    if subject.loop is not None and has_half_weights(subject.model):
        reason = "a loop that keeps weights in half precision cannot be run in fp32"
        return spec.unchecked(reason, "Compare a few hundred of its steps with those of the same loop in fp32.")
    return fidelity.check(
        subject,
        asked.precision,
        pinned_modules=asked.pinned_modules,
        batch_size=asked.batch_size,
        find_pins=spec.find_pins and subject.loop is None and subject.reference is None,
        label=asked.labelled(NUMERIC),
        num_steps_before=spec.num_steps_before,
        # the seconds of compiling do not show how long a pass takes
        seconds=math.inf if spec.aim_seconds is None or subject.is_compiled else spec.aim_seconds,
        on_bad_verdict=lambda found: tell(PartialResult(found)),
    )


class NotTrainedError(Exception):
    """Raised when there are no trained weights to check."""


def _subject(context: Context, spec: Check, tell: Tell) -> tuple[CheckInputs, int]:
    """Return the training to check, with an fp32 reference, and the number of fp32 steps its weights have taken.

    The reference is the same training without the setting's further dimensions.
    """
    device, wanted = torch.device(spec.device), spec.candidate.active_variants
    batches = _batches(context.workload.data, spec)
    if device.type != "cpu":
        batches = [data.move(batch, device) for batch in batches]
    plain = _subject_of(context.workload, spec, context.model(device), batches)
    tell(Ready())
    num_steps = 0
    if spec.num_steps_before:
        tell(Phase(f"training {spec.num_steps_before} steps in fp32"))
        num_steps = _train(plain, context.workload, spec)
    if not wanted:
        return plain, num_steps
    model = copied_model(plain.model, context.workload)
    parts = model.live_training(device) if isinstance(model, LoopState) else LiveTraining([model], [], device)
    if "weights" in wanted:  # compare training from rounded weights with fp32 training from the same weights
        for weight in (each for each in plain.model.parameters() if each.dtype == torch.float32):
            weight.data = weight.data.to(torch.bfloat16).to(weight.dtype)
    for name, value in wanted.items():
        VARIANTS[name].change_once(value, parts)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = plain.make_optimizer(model)
        for name, value in wanted.items():
            VARIANTS[name].change_once(value, LiveTraining([], each(optimizer), device))
        return optimizer

    is_compiled = spec.candidate.is_compiled
    own = _subject_of(context.workload, spec, model, batches)
    subject = replace(
        own,
        make_optimizer=own.make_optimizer if isinstance(model, LoopState) else make,
        reference=replace(plain, has_like_draws=not is_compiled),
        is_compiled=is_compiled,
        has_like_draws=not is_compiled,
    )
    return subject, num_steps


def _train(subject: CheckInputs, workload: Workload, spec: Check) -> int:
    """Train the subject in fp32 for `spec.num_steps_before` steps. Return the number taken, at least one.

    Raises `NotTrainedError`.
    """
    try:
        with closing(data.stream(workload.data, spec.candidate.batch_size)) as stream:
            batches = (data.move(batch, subject.device) for batch in islice(stream, spec.num_steps_before))
            num_steps = train_before(subject, batches)
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if failure.kind == "oom":  # a smaller batch may fit
            raise
        raise NotTrainedError(failure.message) from error
    if num_steps == 0:
        raise NotTrainedError("its first step is not finite")
    return num_steps


def _subject_of(workload: Workload, spec: Check, model: nn.Module, batches: list[Any]) -> CheckInputs:
    # Each pass gets a copy, since the user's code may take parts out of its batch or change them.
    subject = CheckInputs(
        model=model,
        loss=no_loss,
        batches=batches,
        make_optimizer=partial(make_optimizer, workload),
        device=torch.device(spec.device),
        seed=spec.seed,
    )
    if not isinstance(model, LoopState):
        loss = checked_loss(workload.loss)
        return replace(subject, loss=lambda model, batch: loss(model, copy.deepcopy(batch)))
    train_step = workload.train_step
    assert train_step is not None
    return replace(
        subject,
        make_optimizer=lambda _: model.first_optimizer(),
        loop=Loop(
            step=lambda state, batch, amp: train_step(state.held, copy.deepcopy(batch), amp),
            forget=LoopState.forget_steps,
            batch_size=spec.candidate.batch_size,
        ),
    )


def _batches(user_data: Any, spec: Check) -> list[Any]:
    if spec.what == "accumulation":
        seconds = min(LOOK_SECONDS, LOOK_SHARE * (spec.deadline_seconds or math.inf))
        return whole_and_parts(user_data, accumulation.num_checked(spec.candidate.batch_size), spec.seed, seconds)
    with closing(data.stream(user_data, spec.candidate.batch_size)) as stream:
        return list(islice(stream, spec.num_batches))


# -- a whole batch and its micro-batches -------------------------------------------------------------------------------


class CannotCutError(Exception):
    """Raised when a batch cannot be cut into micro-batches, which is no error of the user's code."""


def whole_and_parts(user_data: Any, num_samples: int, seed: int, seconds: float = LOOK_SECONDS) -> list[Any]:
    """Return a batch of `num_samples`, followed by its micro-batches, equal in size and in the same order.

    Samples of a map-style dataset are chosen after looking for at most `seconds`, so that the micro-batches are
    unequal: if nearly all were cut to one length, a mean over tokens would look like one over samples. They are
    collated twice, so that padding is as in training. For other data, and if collating draws at random, the first batch
    is cut along the first dimension of its tensors. Raises `CannotCutError` if that is impossible.
    """
    if num_samples < MIN_ACCUMULATION_SAMPLES:
        few = f"fewer than {MIN_ACCUMULATION_SAMPLES} samples"
        raise CannotCutError(f"{few} cannot be cut into micro-batches of two at least")
    stream, loader = data.opened(user_data, num_samples)
    with closing(stream):
        # Without samples to choose from, the dataset gives ready batches or a stream.
        is_stream = loader is None or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
        if loader is None or is_stream or data.gives_batches(loader):
            return _cut_batch(next(stream), num_samples)
    return _collated(loader.collate_fn, _samples(loader, num_samples, seed, seconds), seed)


def _samples(loader: DataLoader[Any], num_samples: int, seed: int, seconds: float) -> list[Any]:
    """Return samples, half the smallest and half the largest of those seen, loaded by a worker if the loader has
    workers.

    Samples without any label come last: a micro-batch of only such samples has no mean, which hardly happens in
    training.
    """
    sampler = loader.sampler if loader.batch_size is not None else chain.from_iterable(loader.batch_sampler or ())
    drawn = list(islice(sampler, MAX_SCANNED_SAMPLES))
    # Not the first ones, as a loader may sort by length.
    order = random.Random(seed).sample(drawn, min(len(drawn), MAX_SAMPLES_SEEN))  # noqa: S311 - no secret
    # A collate function may fail on a single sample: then samples are taken as drawn.
    seen, _ = scan_samples(loader, order, num_counted, seconds)
    by_size = sorted((position for position, num in enumerate(seen) if num), key=seen.__getitem__)
    half = num_samples // 2
    positions = dict.fromkeys([*by_size[:half], *by_size[-half:], *by_size, *range(len(order))])
    torch_state.seed(seed)  # the same state however many were looked at
    alone = data.rebuilt(
        loader,
        min(loader.num_workers, 1),
        batch_size=None,
        sampler=[order[position] for position in islice(positions, num_samples)],
        collate_fn=copied,
        generator=torch.Generator(),
        pin_memory=False,
    )
    samples = list(alone)
    if len(samples) < num_samples:
        raise CannotCutError(f"the data holds {len(samples)} samples, fewer than the {num_samples} of a batch")
    return samples


def num_counted(batch: Any) -> int:
    """Return the number of entries that a loss may average over: neither padding nor ignored labels. 0 if all labels
    are ignored.

    If there are integer tensors only they count, since a 0 in an image is there by chance.
    """
    given = [tensor for _, tensor in tensors(batch)]
    if any(bool((tensor == IGNORED_LABEL).all()) for tensor in given):
        return 0
    counting = [tensor for tensor in given if not tensor.is_floating_point()] or given
    return sum(int(((tensor != 0) & (tensor != IGNORED_LABEL)).sum()) for tensor in counting)


def _collated(collate: Callable[[Any], Any], samples: list[Any], seed: int) -> list[Any]:
    def of(part: list[Any], with_seed: int = seed) -> Any:
        torch_state.seed(with_seed)
        return collate(copied(part))

    whole = of(samples)
    num_samples = len(samples)
    if not _are_equal(whole, of(samples, seed + 1)):  # it masks or augments at random
        return _cut_batch(whole, num_samples)
    size = num_samples // num_micro_batches(num_samples)
    return [whole, *(of(samples[start : start + size]) for start in range(0, num_samples, size))]


def _cut_batch(batch: Any, num_samples: int) -> list[Any]:
    found = first_dimensions(batch)
    if len(found) != 1 or min(found) < num_samples:
        dimensions = f"tensors with first dimensions {sorted(found)}" if found else "no tensors"
        raise CannotCutError(f"a batch of {num_samples} samples has {dimensions} and cannot be cut into smaller ones")
    whole = cut(batch, num_samples)[0]
    return [whole, *cut(whole, num_samples // num_micro_batches(num_samples))]


def _are_equal(one: Any, other: Any) -> bool:
    ours, theirs = dict(tensors(one)), dict(tensors(other))
    return ours.keys() == theirs.keys() and all(
        ours[name].shape == theirs[name].shape and torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num())
        for name in ours
    )

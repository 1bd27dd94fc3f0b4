"""Checks in a trial process: prepare the training to check, cut batches into micro-batches, and attribute errors."""

from __future__ import annotations

import copy
import math
import random
import traceback
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, IterableDataset

from autotune_amp.command.agent.flops import count_flops
from autotune_amp.command.agent.tokens import count_tokens
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import PartialResult, Phase, Ready, Tell
from autotune_amp.core.outcome import (
    MIN_ACCUMULATION_SAMPLES,
    Accumulation,
    Calibration,
    CheckOutcome,
    CountedFlops,
    Failure,
    Fidelity,
)
from autotune_amp.core.text import size
from autotune_amp.core.workload import Workload
from autotune_amp.dimensions import NUMERIC, VARIANTS
from autotune_amp.dimensions.attention import backends_in_use
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.hardware import host
from autotune_amp.numerics import accumulation, calibration, fidelity
from autotune_amp.numerics.accumulation import (
    IGNORED_LABEL,
    batch_tensors,
    first_dimensions,
    num_micro_batches,
    split_batch,
)
from autotune_amp.numerics.experiment import least_host_bytes
from autotune_amp.numerics.paired_runs import train_in_fp32
from autotune_amp.numerics.passes import CheckedLoop, CheckInputs, NoStepError, Passes, holds_equal, raise_no_loss
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import computes_in_half
from autotune_amp.trial import data, failures
from autotune_amp.trial.context import Context, LoopState, copy_model, make_optimizer, users_optimizers
from autotune_amp.trial.data import copy_sample
from autotune_amp.trial.jobs import Check
from autotune_amp.trial.training import loss_with_checks
from autotune_amp.trial.worker import prepare_process, run_guarded
from autotune_amp.trial.worst_batch import MAX_SCANNED_SAMPLES, scan_samples

# Reading samples to find unequal ones takes at most so many seconds, and this share of the check's deadline.
SAMPLE_SCAN_SECONDS, SAMPLE_SCAN_SHARE = 1.0, 0.2
MAX_SAMPLES_READ = 2048  # samples rarer than one in this many matter little
# Dimensions that change numerics, but that no check applies to its passes.
_UNCHECKED_DIMENSIONS = [name for name in NUMERIC if name not in ("precision", "pinned_modules", *VARIANTS)]
_PHASES = {
    "fidelity": "checking {} against fp32",
    "calibration": "calibrating the loss scale",
    "accumulation": "comparing accumulated gradients with those of a whole batch",
}


def check(context: Context, spec: Check, tell: Tell) -> CheckOutcome:
    """Run one check; an error is returned as a `Failure`."""
    with ExitStack() as stack:
        return run_guarded(context, spec, lambda: _prepare_and_check(context, spec, tell, stack))


def _prepare_and_check(context: Context, spec: Check, tell: Tell, stack: ExitStack) -> CheckOutcome:
    prepare_process(context, spec)
    try:
        inputs, num_steps = _make_check_inputs(context, spec, tell, stack)
    except CannotCutError as error:
        return accumulation.unchecked_result(str(error), spec.candidate.batch_size)
    except NotTrainedError as error:
        return spec.unchecked(f"training in fp32 for it failed: {error}")
    spec = msgspec.structs.replace(spec, num_steps_before=num_steps)
    tell(Phase(_PHASES[spec.what].format(spec.candidate.precision)))
    try:
        return _run_check(inputs, spec, tell)
    except NoStepError as error:
        reason = f"{error}, so that it cannot be compared with fp32"
        if spec.what == "fidelity":
            return spec.unchecked(reason, "Give train_step a whole step of it, or compare runs of some hundred steps")
        return Failure(kind="workload_error", message=reason)
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if isinstance(error, AutotuneAmpError) or failure.kind not in ("workload_error", "unsupported"):
            raise
        return _attribute_failure(failure, inputs, spec)


def _attribute_failure(failure: Failure, inputs: CheckInputs, spec: Check) -> Failure:
    """Return `failure` with the kind that one pass in each precision shows: ``workload_error`` if fp32 fails,
    ``unsupported`` if only the candidate's precision fails, else ``crash``.
    """
    passes = Passes(inputs)
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


def _run_check(inputs: CheckInputs, spec: Check, tell: Tell) -> Fidelity | Calibration | Accumulation:
    candidate = spec.candidate
    if inputs.loop is not None and _has_lazy_values(inputs.model):
        raise NoStepError("its lazy modules have no weights before the first step")
    if spec.what == "accumulation":
        return accumulation.check_accumulation(inputs, accumulation.num_checked_samples(candidate.batch_size))
    if spec.what == "calibration":
        return calibration.calibrate(inputs, batch_size=candidate.batch_size, pinned_modules=candidate.pinned_modules)
    if unchecked := [name for name in _UNCHECKED_DIMENSIONS if candidate.uses(name)]:
        reason = f"no check covers the numerical effect of {' and '.join(unchecked)}"
        return spec.unchecked(reason, "Compare a few hundred steps of a training with it and of one without.")
    if inputs.loop is not None and computes_in_half(inputs.model):
        reason = "a loop whose weights or quantized layers compute in half precision cannot be run in fp32"
        return spec.unchecked(reason, "Compare a few hundred of its steps with those of the same loop in fp32.")
    needed_bytes, free_bytes = least_host_bytes(inputs), host.free_memory_bytes()
    if needed_bytes > free_bytes:
        reason = f"its check takes {size(needed_bytes)} of the host's memory, of which {size(free_bytes)} are free"
        return spec.unchecked(reason, "Free memory on the host, or compare runs of some hundred steps.")
    result = fidelity.check(
        inputs,
        candidate.precision,
        pinned_modules=candidate.pinned_modules,
        batch_size=candidate.batch_size,
        find_pins=spec.find_pins and inputs.loop is None and inputs.reference is None,
        label=candidate.labelled(NUMERIC),
        num_steps_before=spec.num_steps_before,
        # With compilation in it, the time of the first passes does not predict that of later ones.
        seconds=math.inf if spec.aim_seconds is None or inputs.is_compiled else spec.aim_seconds,
        on_bad_verdict=lambda fidelity_result: tell(PartialResult(fidelity_result)),
    )
    if spec.num_steps_before:
        return result
    tell(PartialResult(result))  # it stands, whatever becomes of the count
    return msgspec.structs.replace(result, counted_flops=_count_flops(inputs.reference or inputs, spec))


def _count_flops(inputs: CheckInputs, spec: Check) -> CountedFlops:
    """Count the operations of a pass over the first batch in fp32, which are the same in every precision."""
    tokens = count_tokens(inputs.batches[0])
    passes = Passes(inputs)
    try:
        flops, problem = count_flops(lambda: passes.run(0, "fp32"))
    finally:
        passes.restore()
        passes.model.zero_grad(set_to_none=True)
    return CountedFlops(
        flops=flops,
        num_samples=spec.candidate.batch_size,
        num_positions=None if tokens is None else tokens.num_positions,
        problem=problem,
    )


class NotTrainedError(Exception):
    """Raised when there are no trained weights to check."""


def _make_check_inputs(context: Context, spec: Check, tell: Tell, stack: ExitStack) -> tuple[CheckInputs, int]:
    """Return the training to check, with an fp32 reference, and the number of fp32 steps its weights have taken.

    The reference is the same training without the setting's further dimensions. Of those of the whole process it has
    today's attention backends; the others do not affect numerics. Changes of the whole process are undone by `stack`.
    """
    device, variants = torch.device(spec.device), spec.candidate.active_variants
    batches = _read_batches(context.workload.data, spec)
    if device.type != "cpu":
        batches = [data.move_batch(batch, device) for batch in batches]
    reference = _inputs_for_model(context.workload, spec, context.model(device), batches)
    if reference.loop is None and _has_lazy_values(reference.model):
        reference.loss(reference.model, batches[0])  # gives the parameters their first values
    tell(Ready())
    num_steps = 0
    if spec.num_steps_before:
        tell(Phase(f"training {spec.num_steps_before} steps in fp32"))
        num_steps = _train(reference, context.workload, spec)
    if not variants:
        return reference, num_steps
    model = copy_model(reference.model, context.workload)
    live_training = model.live_training(device) if isinstance(model, LoopState) else LiveTraining([model], [], device)
    if "weights" in variants:  # compare training from rounded weights with fp32 training from the same weights
        for weight in (weight for weight in reference.model.parameters() if weight.dtype == torch.float32):
            weight.data = weight.data.to(torch.bfloat16).to(weight.dtype)
    backends_today = backends_in_use()
    for name, value in variants.items():
        if (undo := VARIANTS[name].change_once(value, live_training)) is not None:
            stack.callback(undo)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = reference.make_optimizer(model)
        for name, value in variants.items():
            VARIANTS[name].change_once(value, LiveTraining([], users_optimizers(optimizer), device))
        return optimizer

    is_compiled = spec.candidate.is_compiled
    inputs_of_model = _inputs_for_model(context.workload, spec, model, batches)
    inputs = replace(
        inputs_of_model,
        make_optimizer=inputs_of_model.make_optimizer if isinstance(model, LoopState) else make,
        reference=replace(reference, around=backends_today.used, has_like_draws=not is_compiled),
        is_compiled=is_compiled,
        has_like_draws=not is_compiled,
    )
    return inputs, num_steps


def _has_lazy_values(model: nn.Module) -> bool:
    """Return whether a parameter or buffer has no values before the model's first pass."""
    return any(map(is_lazy, (*model.parameters(), *model.buffers())))


def _train(inputs: CheckInputs, workload: Workload, spec: Check) -> int:
    """Train the model of `inputs` in fp32 for `spec.num_steps_before` steps. Return the number taken, at least one.

    Raises `NotTrainedError` if training fails for another reason than memory, or takes no step.
    """
    try:
        with closing(data.stream(workload.data, spec.candidate.batch_size)) as stream:
            batches = (data.move_batch(batch, inputs.device) for batch in islice(stream, spec.num_steps_before))
            num_steps = train_in_fp32(inputs, batches)
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if failure.kind == "oom":  # a smaller batch may fit
            raise
        raise NotTrainedError(failure.message) from error
    if num_steps == 0:
        raise NotTrainedError("its first step is not finite")
    return num_steps


def _inputs_for_model(workload: Workload, spec: Check, model: nn.Module, batches: list[Any]) -> CheckInputs:
    # Each pass gets a copy, since the user's code may take parts out of its batch or change them.
    inputs = CheckInputs(
        model=model,
        loss=raise_no_loss,
        batches=batches,
        make_optimizer=partial(make_optimizer, workload),
        device=torch.device(spec.device),
        seed=spec.seed,
    )
    if not isinstance(model, LoopState):
        loss = loss_with_checks(workload.loss)
        return replace(inputs, loss=lambda model, batch: loss(model, copy.deepcopy(batch)))
    train_step = workload.train_step
    assert train_step is not None
    return replace(
        inputs,
        make_optimizer=lambda _: model.first_optimizer(),
        loop=CheckedLoop(
            step=lambda state, batch, amp: train_step(state.held, copy.deepcopy(batch), amp),
            forget=LoopState.restore_python_state,
            batch_size=spec.candidate.batch_size,
        ),
    )


def _read_batches(user_data: Any, spec: Check) -> list[Any]:
    if spec.what == "accumulation":
        seconds = min(SAMPLE_SCAN_SECONDS, SAMPLE_SCAN_SHARE * (spec.deadline_seconds or math.inf))
        return whole_and_parts(
            user_data, accumulation.num_checked_samples(spec.candidate.batch_size), spec.seed, seconds
        )
    with closing(data.stream(user_data, spec.candidate.batch_size)) as stream:
        return list(islice(stream, spec.num_batches))


# -- a whole batch and its micro-batches -------------------------------------------------------------------------------


class CannotCutError(Exception):
    """Raised when a batch cannot be cut into micro-batches, which is no error of the user's code."""


def whole_and_parts(user_data: Any, num_samples: int, seed: int, seconds: float = SAMPLE_SCAN_SECONDS) -> list[Any]:
    """Return a batch of `num_samples`, followed by its micro-batches, equal in size and in the same order.

    Samples of a map-style dataset are read for at most `seconds` to choose micro-batches of unequal samples: with
    samples of one length, a mean over tokens equals one over samples. The whole and the parts are collated separately,
    so that padding is as in training. For other data, and if collating draws at random, the first batch is cut along
    the first dimension of its tensors. Raises `CannotCutError` if that is impossible.
    """
    if num_samples < MIN_ACCUMULATION_SAMPLES:
        raise CannotCutError(
            f"fewer than {MIN_ACCUMULATION_SAMPLES} samples cannot be cut into micro-batches of two at least"
        )
    stream, loader = data.open_data(user_data, num_samples)
    with closing(stream):
        # Without samples to choose from, the dataset gives ready batches or a stream.
        is_stream = loader is None or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)
        if loader is None or is_stream or data.has_batched_dataset(loader):
            return _cut_batch(next(stream), num_samples)
    return _collated(loader.collate_fn, _samples(loader, num_samples, seed, seconds), seed)


def _samples(loader: DataLoader[Any], num_samples: int, seed: int, seconds: float) -> list[Any]:
    """Return `num_samples`, half the smallest and half the largest of those read within `seconds`. A worker process
    loads them if the loader has workers.

    Samples without any label come last: a mean over a micro-batch of only such samples is undefined.
    """
    sampler = loader.sampler if loader.batch_size is not None else chain.from_iterable(loader.batch_sampler or ())
    drawn = list(islice(sampler, MAX_SCANNED_SAMPLES))
    # Not the first ones, as a loader may sort by length.
    order = random.Random(seed).sample(drawn, min(len(drawn), MAX_SAMPLES_READ))  # noqa: S311 - no secret
    # A collate function may fail on a single sample: then samples are taken as drawn.
    sizes, _ = scan_samples(loader, order, num_counted, seconds)
    by_size = sorted((position for position, num in enumerate(sizes) if num), key=sizes.__getitem__)
    half = num_samples // 2
    positions = dict.fromkeys([*by_size[:half], *by_size[-half:], *by_size, *range(len(order))])
    torch_state.seed(seed)  # the same state however many samples were read
    single_samples = data.rebuild_loader(
        loader,
        min(loader.num_workers, 1),
        batch_size=None,
        sampler=[order[position] for position in islice(positions, num_samples)],
        collate_fn=copy_sample,
        generator=torch.Generator(),
        pin_memory=False,
    )
    samples = list(single_samples)
    if len(samples) < num_samples:
        raise CannotCutError(f"the data holds {len(samples)} samples, fewer than the {num_samples} of a batch")
    return samples


def num_counted(batch: Any) -> int:
    """Return the number of entries that a loss may average over: neither padding nor ignored labels. 0 if all labels
    are ignored.

    If there are integer tensors only they count, since a 0 in an image is no padding.
    """
    of_batch = [tensor for _, tensor in batch_tensors(batch)]
    if any(bool((tensor == IGNORED_LABEL).all()) for tensor in of_batch):
        return 0
    counting = [tensor for tensor in of_batch if not tensor.is_floating_point()] or of_batch
    return sum(int(((tensor != 0) & (tensor != IGNORED_LABEL)).sum()) for tensor in counting)


def _collated(collate: Callable[[Any], Any], samples: list[Any], seed: int) -> list[Any]:
    def collate_part(part: list[Any], with_seed: int = seed) -> Any:
        torch_state.seed(with_seed)
        return collate(copy_sample(part))

    whole = collate_part(samples)
    num_samples = len(samples)
    if not _are_equal(whole, collate_part(samples, seed + 1)):  # it masks or augments at random
        return _cut_batch(whole, num_samples)
    size = num_samples // num_micro_batches(num_samples)
    return [whole, *(collate_part(samples[start : start + size]) for start in range(0, num_samples, size))]


def _cut_batch(batch: Any, num_samples: int) -> list[Any]:
    sizes = first_dimensions(batch)
    if len(sizes) != 1 or min(sizes) < num_samples:
        dimensions = f"tensors with first dimensions {sorted(sizes)}" if sizes else "no tensors"
        raise CannotCutError(f"a batch of {num_samples} samples has {dimensions} and cannot be cut into smaller ones")
    whole = split_batch(batch, num_samples)[0]
    return [whole, *split_batch(whole, num_samples // num_micro_batches(num_samples))]


def _are_equal(first: Any, second: Any) -> bool:
    first_tensors, second_tensors = dict(batch_tensors(first)), dict(batch_tensors(second))
    return first_tensors.keys() == second_tensors.keys() and all(
        first_tensors[name].shape == second_tensors[name].shape
        and holds_equal(first_tensors[name].nan_to_num(), second_tensors[name].nan_to_num())
        for name in first_tensors
    )

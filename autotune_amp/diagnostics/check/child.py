"""Child side of a check: record one step and read the user's source files."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeAlias

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.job import Phase, Tell
from autotune_amp.core.outcome import Failure
from autotune_amp.core.workload import Workload
from autotune_amp.diagnostics.check import reading
from autotune_amp.diagnostics.check.findings import (
    CheckReport,
    CodeLocation,
    Finding,
    WorkloadCheckJob,
    in_order,
    make_finding,
)
from autotune_amp.diagnostics.check.recording import Recording, Say, raised_at
from autotune_amp.precision import rules, torch_state
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.precision.step_amp import StepAmp
from autotune_amp.trial import data, failures
from autotune_amp.trial.context import Context, LoopState, make_model
from autotune_amp.trial.training import loss_with_checks

NewAutocast: TypeAlias = Callable[[], AbstractContextManager[object]]
SeeLoss: TypeAlias = Callable[[Tensor], object]

# Findings hardly depend on the batch size: 2 samples are recorded, or up to 8 if the step fails with 2.
NUM_SAMPLES, MOST_SAMPLES = 2, 8


def check(context: Context, job: WorkloadCheckJob, tell: Tell) -> CheckReport | Failure:
    """Return the report of a check, or the `Failure` for an exception that the workload's own code raised."""
    try:
        return _check(context, job, lambda text: tell(Phase(text)))
    except Exception as error:
        failure = failures.failure_from_exception(error)
        traceback.clear_frames(error.__traceback__)
        return failure


def _check(context: Context, job: WorkloadCheckJob, say: Say) -> CheckReport:
    say("building the model")
    torch_state.apply(job.torch_state)
    torch_state.set_flags("fp32")
    torch_state.seed(job.seed)
    model = context.model(torch.device("cpu"))
    most = job.batch_size or _most_samples(context.workload)
    fewest = job.batch_size or min(NUM_SAMPLES, most)
    try:
        return _report(context, job, model, fewest, say)
    except Exception:
        if fewest == most:
            raise
    say(f"taking {most} samples: the step does not run with {fewest}")
    torch_state.seed(job.seed)
    return _report(context, job, make_model(context.workload), most, say)  # the first one's weights may be fp32 by now


def _report(context: Context, job: WorkloadCheckJob, model: nn.Module, batch_size: int, say: Say) -> CheckReport:
    if job.is_recorded:
        return report_on(context.workload, model, job.autocast_device, batch_size, context.source, say)
    _take(context.workload, model, batch_size)
    name, device = context.workload.name, job.autocast_device
    return CheckReport(workload=name, device=device, batch_size=batch_size, findings=(), num_calls=0, num_modules=0)


def report_on(
    workload: Workload,
    model: nn.Module,
    device: AutocastDevice,
    batch_size: int | None = None,
    source: Any = None,
    say: Say = lambda _: None,
) -> CheckReport:
    """Record one step of `model`, made by `workload`, read the user's source files, and return the report.

    `batch_size` is in samples; None takes that of the workload's data, at most 8. `source` is the function that made
    the workload. `say` is called with the progress. Weights in half precision are cast to fp32 in place. If the
    recorded step raises, it is repeated without recording: an exception that is raised again propagates, any other is
    the report's `problem`.
    """
    batch_size = batch_size or _most_samples(workload)
    say(f"loading {batch_size} samples")
    with closing(data.stream(workload.data, batch_size)) as stream:
        batch = next(stream)
    sources, unread = reading.sources_of(_written(source, workload, model))
    findings = [finding for source in sources for finding in reading.read(source)]
    findings += _of_weights(model, device, sources, (workload.model, workload.build, source))
    recording = Recording(model, device, say)
    problem = None
    try:
        with recording.running():
            _step(workload, model, batch, recording.autocast, recording.see_loss)
    except Exception as error:
        _take(workload, model, batch_size)  # raises if the error is the workload's own
        problem = failures.failure_from_exception(error).message
        if (rule := rules.rule_of(problem)) is not None:  # code that inspects dtypes, as torch's own may
            findings.append(make_finding(rule, raised_at(error)))
    return CheckReport(
        workload=workload.name,
        device=device,
        batch_size=batch_size,
        findings=in_order([*findings, *recording.findings]),
        num_calls=recording.num_calls,
        num_modules=len(recording.modules_run),
        files=tuple(source.file for source in sources),
        unread=unread,
        problem=problem,
    )


def _written(source: Any, workload: Workload, model: nn.Module) -> list[Any]:
    """Return the classes and functions that the workload is made of, including the types of its modules."""
    parts = workload.model, workload.loss, workload.build, workload.train_step, workload.optimizer, workload.clip
    given = [part for part in (source, *parts) if callable(part) and not isinstance(part, nn.Module | Workload)]
    return [*given, *dict.fromkeys(type(module) for module in model.modules() if not isinstance(module, LoopState))]


def _of_weights(
    model: nn.Module, device: AutocastDevice, sources: Sequence[reading.SourceText], makers: Sequence[Any]
) -> Iterator[Finding]:
    """Yield a finding for complex trained weights, and one for each other dtype than fp32 that trained weights have."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if modules := dict.fromkeys(name.rpartition(".")[0] for name, parameter in trained if parameter.is_complex()):
        why = "Complex weights are trained, whose gradients GradScaler cannot unscale."
        mend = "Keep them as pairs of real numbers, as torch.view_as_real has them, or train in bf16."
        finding = make_finding(rules.WEIGHTS, CodeLocation(), why=why, mend=mend, precisions=("fp16",))
        yield replace(finding, modules=tuple(modules))
    kept: dict[torch.dtype, dict[str, None]] = {}
    for name, parameter in trained:
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            kept.setdefault(parameter.dtype, {})[name.rpartition(".")[0]] = None
    for dtype, modules in kept.items():
        breaks = dtype == torch.float16 or (dtype == torch.float64 and device == "mps")  # MPS has no float64
        name = str(dtype).removeprefix("torch.")
        yield reading.of_weights(name, "breaks" if breaks else "hurts", tuple(modules), sources, makers)


def _most_samples(workload: Workload) -> int:
    _, own, num_samples = data.describe(workload.data)
    return min(own or MOST_SAMPLES, num_samples or MOST_SAMPLES, MOST_SAMPLES)


def _take(workload: Workload, model: nn.Module, batch_size: int) -> None:
    """Run one step without recording it."""
    with closing(data.stream(workload.data, batch_size)) as stream:
        _step(workload, model, next(stream), nullcontext, lambda _: None)


def _step(workload: Workload, model: nn.Module, batch: Any, autocast: NewAutocast, see_loss: SeeLoss) -> None:
    """Run a forward and a backward pass, or a `train_step`, under `autocast`.

    `see_loss` is called with the loss before the backward pass.
    """
    if isinstance(model, LoopState):
        assert workload.train_step is not None
        workload.train_step(model.held, batch, _WatchedAmp(autocast, see_loss))
        return
    with autocast():
        loss = loss_with_checks(workload.loss)(model, batch)
    see_loss(loss)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it


class _WatchedAmp(StepAmp):
    """Stand-in for the amp argument of a `train_step`: it scales nothing, and passes each loss to `see_loss`."""

    def __init__(self, autocast: NewAutocast, see_loss: SeeLoss) -> None:
        super().__init__(autocast, "cpu", AmpConfig(precision="fp32", batch_size=1), scales=False)
        self._see_loss = see_loss

    def scale(self, outputs: Any) -> Any:
        """Return the outputs unscaled, after passing each tensor among them to `see_loss`."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._see_loss(leaf)
        return super().scale(outputs)

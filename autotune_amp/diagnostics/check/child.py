"""Child process of a workload check: records one step and reads the user's source files."""

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
    make_finding,
    merged_and_sorted,
)
from autotune_amp.diagnostics.check.recording import ProgressCallback, StepRecorder, location_of_error
from autotune_amp.precision import rules, torch_state
from autotune_amp.precision.rules import AutocastDevice
from autotune_amp.precision.step_amp import StepAmp
from autotune_amp.trial import data, failures
from autotune_amp.trial.context import Context, LoopState, make_model
from autotune_amp.trial.training import loss_with_checks

AutocastFactory: TypeAlias = Callable[[], AbstractContextManager[object]]
LossCallback: TypeAlias = Callable[[Tensor], object]

# Findings hardly depend on the batch size: 2 samples are recorded, or up to 8 if the step fails with 2.
MIN_SAMPLES, MAX_SAMPLES = 2, 8


def check(context: Context, job: WorkloadCheckJob, tell: Tell) -> CheckReport | Failure:
    """Return the report of a check, or the `Failure` for an exception that the workload's own code raised."""
    try:
        return _check(context, job, lambda text: tell(Phase(text)))
    except Exception as error:
        failure = failures.failure_from_exception(error)
        traceback.clear_frames(error.__traceback__)
        return failure


def _check(context: Context, job: WorkloadCheckJob, on_progress: ProgressCallback) -> CheckReport:
    on_progress("building the model")
    torch_state.apply(job.torch_state)
    torch_state.set_flags("fp32")
    torch_state.seed(job.seed)
    model = context.model(torch.device("cpu"))
    max_samples = job.batch_size or _max_samples(context.workload)
    min_samples = job.batch_size or min(MIN_SAMPLES, max_samples)
    try:
        return _report(context, job, model, min_samples, on_progress)
    except Exception:
        if min_samples == max_samples:
            raise
    on_progress(f"taking {max_samples} samples: the step does not run with {min_samples}")
    torch_state.seed(job.seed)
    model = make_model(context.workload)  # the first model's weights may be cast to fp32 already
    return _report(context, job, model, max_samples, on_progress)


def _report(
    context: Context, job: WorkloadCheckJob, model: nn.Module, batch_size: int, on_progress: ProgressCallback
) -> CheckReport:
    if job.is_recorded:
        return report_on(context.workload, model, job.autocast_device, batch_size, context.source, on_progress)
    _run_step_unrecorded(context.workload, model, batch_size)
    name, device = context.workload.name, job.autocast_device
    return CheckReport(workload=name, device=device, batch_size=batch_size, findings=(), num_calls=0, num_modules=0)


def report_on(
    workload: Workload,
    model: nn.Module,
    device: AutocastDevice,
    batch_size: int | None = None,
    source: Any = None,
    on_progress: ProgressCallback = lambda _: None,
) -> CheckReport:
    """Record one step of `model`, the workload's model, read the user's source files, and return the report.

    `batch_size` is in samples; None takes that of the workload's data, at most 8. `source` is the function that made
    the workload. `on_progress` is called with a line of text. Weights in half precision are cast to fp32 in place. If
    the recorded step raises, it is repeated without recording: if that raises too, the exception propagates, otherwise
    it is the report's `problem`.
    """
    batch_size = batch_size or _max_samples(workload)
    on_progress(f"loading {batch_size} samples")
    with closing(data.stream(workload.data, batch_size)) as stream:
        batch = _next_on_cpu(stream)
    sources, unread = reading.parse_sources(_user_code(source, workload, model))
    findings = [finding for source in sources for finding in reading.source_findings(source)]
    findings += weight_findings(model, device, sources, (workload.model, workload.build, source))
    recorder = StepRecorder(model, device, on_progress)
    problem = None
    try:
        with recorder.recording():
            _run_step(workload, model, batch, recorder.autocast, recorder.check_loss)
    except Exception as error:
        _run_step_unrecorded(workload, model, batch_size)  # raises if the error is the workload's own
        problem = failures.failure_from_exception(error).message
        if (rule := rules.rule_of(problem)) is not None:  # code that inspects dtypes, as torch's own may
            findings.append(make_finding(rule, location_of_error(error)))
    return CheckReport(
        workload=workload.name,
        device=device,
        batch_size=batch_size,
        findings=merged_and_sorted([*findings, *recorder.findings]),
        num_calls=recorder.num_calls,
        num_modules=len(recorder.modules_run),
        files=tuple(source.file for source in sources),
        unread=unread,
        problem=problem,
    )


def _user_code(source: Any, workload: Workload, model: nn.Module) -> list[Any]:
    """Return the user's classes and functions in the workload, including the classes of its modules."""
    parts = workload.model, workload.loss, workload.build, workload.train_step, workload.optimizer, workload.clip
    parts_with_code = [
        part for part in (source, *parts) if callable(part) and not isinstance(part, nn.Module | Workload)
    ]
    return [
        *parts_with_code,
        *dict.fromkeys(type(module) for module in model.modules() if not isinstance(module, LoopState)),
    ]


def weight_findings(
    model: nn.Module, device: AutocastDevice, sources: Sequence[reading.SourceText], makers: Sequence[Any]
) -> Iterator[Finding]:
    """Yield a finding for complex trained weights, and one for each dtype of trained weights other than fp32."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if modules := dict.fromkeys(name.rpartition(".")[0] for name, parameter in trained if parameter.is_complex()):
        why = "Complex weights are trained, whose gradients GradScaler cannot unscale."
        mend = "Store them as pairs of real numbers (torch.view_as_real), or train in bf16."
        finding = make_finding(rules.WEIGHTS, CodeLocation(), why=why, mend=mend, precisions=("fp16",))
        yield replace(finding, modules=tuple(modules))
    modules_by_dtype: dict[torch.dtype, dict[str, None]] = {}
    for name, parameter in trained:
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            modules_by_dtype.setdefault(parameter.dtype, {})[name.rpartition(".")[0]] = None
    for dtype, modules in modules_by_dtype.items():
        is_breaking = dtype == torch.float16 or (dtype == torch.float64 and device == "mps")  # MPS has no float64
        name = str(dtype).removeprefix("torch.")
        yield reading.weights_finding(name, "breaks" if is_breaking else "hurts", tuple(modules), sources, makers)


def _max_samples(workload: Workload) -> int:
    """Return the batch size of the workload's data, at most `MAX_SAMPLES` and at most the size of the dataset."""
    _, own_batch_size, num_samples = data.describe(workload.data)
    return min(own_batch_size or MAX_SAMPLES, num_samples or MAX_SAMPLES, MAX_SAMPLES)


def _next_on_cpu(stream: Iterator[Any]) -> Any:
    """Return the next batch, moved to the CPU, where the model is: a function may make it on a GPU."""
    return data.move_batch(next(stream), torch.device("cpu"))


def _run_step_unrecorded(workload: Workload, model: nn.Module, batch_size: int) -> None:
    """Run one step without recording it."""
    with closing(data.stream(workload.data, batch_size)) as stream:
        _run_step(workload, model, _next_on_cpu(stream), nullcontext, lambda _: None)


def _run_step(
    workload: Workload, model: nn.Module, batch: Any, autocast: AutocastFactory, check_loss: LossCallback
) -> None:
    """Run a forward and a backward pass, or a `train_step`, under `autocast`.

    `check_loss` is called with the loss before the backward pass.
    """
    if isinstance(model, LoopState):
        assert workload.train_step is not None
        workload.train_step(model.held, batch, _LossCheckingAmp(autocast, check_loss))
        return
    with autocast():
        loss = loss_with_checks(workload.loss)(model, batch)
    check_loss(loss)
    loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it


class _LossCheckingAmp(StepAmp):
    """Argument `amp` of a `train_step` that scales nothing and passes each loss to `check_loss`."""

    def __init__(self, autocast: AutocastFactory, check_loss: LossCallback) -> None:
        super().__init__(autocast, "cpu", AmpConfig(precision="fp32", batch_size=1), scales=False)
        self._check_loss = check_loss

    def scale(self, outputs: Any) -> Any:
        """Return the outputs unscaled, after passing each tensor among them to `check_loss`."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor):
                self._check_loss(leaf)
        return super().scale(outputs)

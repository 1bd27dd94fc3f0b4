"""Child side of a profile: the precisions' trainings in turns on the same batches, then traced, then their FLOPs."""

from __future__ import annotations

import copy
import inspect
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from autotune_amp.core.job import Tell
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Precision
from autotune_amp.core.workload import Workload
from autotune_amp.hardware.measuring import flops_per_second, synchronize
from autotune_amp.isolation.packing import compile_with, compiler_of
from autotune_amp.numerics.batches import tensors
from autotune_amp.precision import mode as precision
from autotune_amp.precision import torch_state
from autotune_amp.profile.gap import MARK, Trace, split, step_mark
from autotune_amp.profile.job import CUT_RATIO, Lane, Profile, Profiled, Split
from autotune_amp.trial.context import Context, LoopState, each, make_model
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS, Trial
from autotune_amp.trial.timing import MAX_COMPILING_STEPS, MAX_SCALE_SEARCH_STEPS, CompileWatch, NonFiniteError
from autotune_amp.trial.training import BaseTraining, Training, make_training
from autotune_amp.trial.worker import classify, guarded, prepare

NUM_BLOCKS_BEFORE_CUT = 3
RATE_SECONDS, _RATE_BYTES = 0.2, 2**30
NUM_PROFILED_STEPS = 3, 7  # at least and at most, after the first, which starts the profiler and does not count
PROFILED_SECONDS = 1.0  # after which no step is begun that is more than the least

Window: TypeAlias = list[Any]  # the batches of one optimizer step


def profile(context: Context, spec: Profile, send: Tell) -> Profiled | Failure:
    """Run the precisions side by side; what ends one of them is in its lane, what ends all of them a `Failure`.

    Running out of memory ends all: it says nothing of the one that was running, beside the others.
    """
    return guarded(context, spec.trials[0], lambda: _profile(context, spec, send))


def _profile(context: Context, spec: Profile, send: Tell) -> Profiled:
    prepare(context, spec.trials[0])
    with ExitStack() as stack, CompileWatch(lambda: None) as compiling:
        runs = [_Run(stack.enter_context(closing(training))) for training in trainings(context, spec.trials)]
        source = runs[0].training
        source.start_loading()
        window = _next_window(source)
        for run in runs:
            run.attempt(partial(run.warm_up, window))
        data_seconds = _take_turns(runs, spec, compiling, send)
        splits: dict[str, Split] = {}
        split_problem = flops = flops_problem = None
        if spec.takes_apart:
            splits, split_problem = _traced([run for run in runs if run.is_running], window, spec.trace_file, send)
            flops, flops_problem = _flops(runs, window)
        return Profiled(
            lanes=tuple(run.lane(splits.get(run.name), data_seconds) for run in runs),
            loads_ahead=source.num_loaded_ahead > 0,
            split_problem=split_problem,
            flops_per_step=flops,
            flops_problem=flops_problem,
            unfused_optimizer=unfused_optimizer(source),
            is_compiled=compiling.count() > 0,
            num_loader_workers=source.num_loader_workers if source.has_loader else None,
            rates=_rates(runs) if spec.takes_apart else {},
        )


@dataclass
class _Run:
    """One precision's training, what was timed of it, and what ended it."""

    training: BaseTraining
    block_seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    failure: Failure | None = None
    was_cut: bool = False

    @property
    def is_running(self) -> bool:
        return self.failure is None and not self.was_cut

    @property
    def name(self) -> Precision:
        return self.training.spec.candidate.precision

    def lane(self, split: Split | None, data_seconds: Sequence[float]) -> Lane:
        return Lane(
            precision=self.name,
            block_seconds=tuple(self.block_seconds),
            data_seconds=tuple(data_seconds[: len(self.block_seconds)]),
            num_steps=self.num_steps,
            split=split,
            failure=self.failure,
            was_cut=self.was_cut,
        )

    def attempt(self, action: Callable[[], None]) -> None:
        """Do it unless this precision has ended; memory is everybody's."""
        if not self.is_running:
            return
        try:
            action()
        except Exception as error:
            failure = classify(error)
            if failure.kind == "oom":
                raise
            self.failure = failure
            traceback.clear_frames(error.__traceback__)

    def warm_up(self, window: Window) -> None:
        """As `trial.timing` does: more steps while fp16's scale comes down, and until a loop takes its first update."""
        num_done = 0
        while True:
            scale = self.training.loss_scale()
            self.steps([window])
            num_done += 1
            is_skipping = (self.training.loss_scale() or 0.0) < (scale or 0.0)
            if num_done >= NUM_WARMUP_STEPS and self.training.has_stepped and not is_skipping:
                return
            if num_done >= NUM_WARMUP_STEPS + MAX_SCALE_SEARCH_STEPS:
                raise NonFiniteError(f"gradients still overflow after {num_done} steps")

    def block(self, windows: Sequence[Window]) -> None:
        """Time a step of these windows, between two synchronisations."""
        self.block_seconds.append(self.steps(windows))

    def steps(self, windows: Sequence[Window]) -> float:
        """Take a step on each window; returns the seconds of one. Raises `NonFiniteError` for such a loss."""
        training = self.training
        precision.set_flags(self.name)
        copies = [[_fresh(batch, training.device) for batch in window] for window in windows]
        synchronize(training.device)
        started = time.perf_counter()
        losses = [_step(training, window) for window in copies]
        synchronize(training.device)
        seconds = (time.perf_counter() - started) / len(windows)
        if not all(math.isfinite(float(loss)) for loss in losses):
            raise NonFiniteError("the loss is not finite")
        return seconds


def _step(training: BaseTraining, window: Window) -> torch.Tensor:
    with record_function(f"{MARK} forward and backward"):
        losses = [training.forward_backward(batch) for batch in window]
    with record_function(f"{MARK} update"):
        training.update()
    return torch.stack([loss.float() for loss in losses]).sum()


def _fresh(batch: Any, device: torch.device) -> Any:
    """A copy for one step: the user's code may take its batch apart. Tensors that are moved to a device are shared."""
    shared = {} if device.type == "cpu" else {id(tensor): tensor for _, tensor in tensors(batch)}
    return copy.deepcopy(batch, shared)


def _next_window(source: BaseTraining) -> Window:
    return [source.next_batch() for _ in range(source.spec.candidate.accumulation_steps)]


def _take_turns(runs: Sequence[_Run], spec: Profile, compiling: CompileWatch, send: Tell) -> list[float]:
    """Time blocks of steps, each precision on the same batches, another one first each time; returns the wait of each
    block's step for its data. A block in which torch.compile compiled is taken again."""
    data_seconds: list[float] = []
    num_done = num_retaken = 0
    while num_done < spec.num_batches and any(run.is_running for run in runs):
        num_steps = min(spec.num_batches_per_block, spec.num_batches - num_done)
        num_compilations, started = compiling.count(), time.perf_counter()
        windows = [_next_window(runs[0].training) for _ in range(num_steps)]
        waited = (time.perf_counter() - started) / num_steps
        first = (len(data_seconds) + num_retaken) % len(runs)
        for run in (*runs[first:], *runs[:first]):
            run.attempt(partial(run.block, windows))
        if compiling.count() > num_compilations and num_retaken < MAX_COMPILING_STEPS:
            num_retaken += 1
            for run in runs:
                del run.block_seconds[len(data_seconds) :]
            continue
        data_seconds.append(waited)
        num_done += num_steps
        for run in runs:
            run.num_steps = num_done if len(run.block_seconds) == len(data_seconds) else run.num_steps
        _cut(runs)
        send({"event": "step", "number": num_done, "seconds": time.perf_counter() - started})
    return data_seconds


def _cut(runs: Sequence[_Run]) -> None:
    """Leave those whose every block so far, a few at least, was hopelessly slow beside that of fp32."""
    if runs[0].name != "fp32":
        return
    for run in runs[1:]:
        ratios = [ours / fp32 for ours, fp32 in zip(run.block_seconds, runs[0].block_seconds, strict=False)]
        run.was_cut = run.was_cut or (len(ratios) >= NUM_BLOCKS_BEFORE_CUT and min(ratios) > CUT_RATIO)


def _traced(
    runs: Sequence[_Run], window: Window, trace_file: str | None, send: Tell
) -> tuple[dict[str, Split], str | None]:
    """Profile a few steps of each; the trace stays where `trace_file` says so. Where no trace can be written there are
    no splits, but why."""
    if not runs:
        return {}, None
    device_type = runs[0].training.device.type
    activities = [ProfilerActivity.CPU]
    if device_type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device_type.upper()))
    with TemporaryDirectory(prefix="autotune_amp-") as folder:
        send({"event": "phase", "name": "profiling", "folder": folder})
        path = trace_file or str(Path(folder, "trace.json"))
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            for run in runs:
                run.attempt(partial(_profiled_steps, run, window))
        try:
            profiler.export_chrome_trace(path)
            trace = msgspec.json.decode(Path(path).read_bytes(), type=Trace)
        except (OSError, msgspec.DecodeError) as error:  # a full disk leaves none, or a part of it
            return {}, f"the profiler's trace could not be written ({error})"
    splits = {run.name: split(trace, run.name, range(1, 1 + max(NUM_PROFILED_STEPS))) for run in runs}
    return {name: found for name, found in splits.items() if found is not None}, None


def _profiled_steps(run: _Run, window: Window) -> None:
    device = run.training.device
    precision.set_flags(run.name)
    least, most = NUM_PROFILED_STEPS
    for number in range(1 + most):
        if number <= 1:
            started = time.perf_counter()
        elif number > least and time.perf_counter() - started > PROFILED_SECONDS:
            return
        batches = [_fresh(batch, device) for batch in window]
        with record_function(step_mark(run.name, number)):
            _step(run.training, batches)
            synchronize(device)


def _flops(runs: Sequence[_Run], window: Window) -> tuple[int | None, str | None]:
    """Those of a step, which are the same in every precision; None with the reason."""
    run = next((run for run in runs if run.is_running), None)
    if run is None:
        return None, "no precision ran to its end"
    precision.set_flags(run.name)
    return count_flops(partial(_step, run.training, [_fresh(batch, run.training.device) for batch in window]))


def _rates(runs: Sequence[_Run]) -> dict[Precision, float]:
    """The machine's rates at this moment; others may have been at work when the device was probed."""
    rates: dict[Precision, float] = {}
    for run in runs:
        spec = run.training.spec
        limit = (spec.memory_limit_bytes or _RATE_BYTES) // 10
        with suppress(torch.OutOfMemoryError):  # then the probe's rate has to do
            rates[run.name] = flops_per_second(spec.device, run.name, seconds=RATE_SECONDS, max_bytes=limit)
    return rates


def trainings(context: Context, trials: Sequence[Trial]) -> Iterator[BaseTraining]:
    """Each with a model of its own, all of the same first weights."""
    device = torch.device(trials[0].device)
    first = context.model(device)
    models = [first, *(_another(context.workload, first, trial.seed).to(device) for trial in trials[1:])]
    for model, trial in zip(models, trials, strict=True):
        yield make_training(context.workload, model, trial)


def _another(workload: Workload, first: nn.Module, seed: int) -> nn.Module:
    """A model like the first; a copy of it where the workload hands out the same parameters again."""
    torch_state.seed(seed)
    made = make_model(workload)
    known = {id(parameter) for parameter in first.parameters()}
    if known.isdisjoint(id(parameter) for parameter in made.parameters()):
        return made
    copied = LoopState(copy.deepcopy(made.held)) if isinstance(made, LoopState) else copy.deepcopy(made)
    for ours, theirs in zip(copied.modules(), made.modules(), strict=True):
        if (context := compiler_of(theirs)) is not None:
            compile_with(ours, context)
    return copied


def unfused_optimizer(training: BaseTraining) -> str | None:
    """The class of the first optimizer that could step in fused kernels and does not."""
    optimizers: Iterable[torch.optim.Optimizer] = ()
    if isinstance(training.model, LoopState):
        optimizers = training.model.optimizers.values()
    elif isinstance(training, Training):
        optimizers = each(training.optimizer)
    for optimizer in optimizers:
        accepts = "fused" in inspect.signature(type(optimizer)).parameters
        if accepts and not any(group.get("fused") for group in optimizer.param_groups):
            return type(optimizer).__name__
    return None


_Shape: TypeAlias = torch.Size


def count_flops(step: Callable[[], object]) -> tuple[int | None, str | None]:
    """Run `step` without compiling and count; None with the reason where that cannot be.

    A product of m x k by k x n counts 2mkn; the numbers' format changes nothing. Recurrent layers run in kernels that
    torch's counter does not know.
    """
    counter = FlopCounterMode(display=False, custom_mapping=_on_cpu())
    try:
        with torch.compiler.set_stance("force_eager"), counter, warnings.catch_warnings():
            # The counter's own hooks, which a module that torch.compile wrapped warns of and calls twice.
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            step()
    except Exception as error:  # the counter runs operations through a mode that not all models' bear
        return None, (str(error) or type(error).__name__).splitlines()[0]
    flops = counter.get_total_flops()
    return (flops, None) if flops else (None, "torch's FLOP counter knows none of its operations")


def _on_cpu() -> dict[Any, Any]:
    """The attention of CPUs, which torch's counter lacks (2.13)."""
    aten = torch.ops.aten
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    return {operation: formula for operation, formula in formulas.items() if operation not in flop_registry}


def _attention(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]  # torch does not type it


def _attention_backward(grad: _Shape, query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]

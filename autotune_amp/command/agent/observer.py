"""Observer of the optimizer steps of a training script, in the script's own process.

It hooks into torch and reports each step to the search with its batches, forward and backward passes, autocast regions,
losses and memory.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import resource
import sys
import time
import weakref
from collections import Counter
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import batches, passes, where
from .channel import Channel
from .imports import after_import
from .outside import deepspeed_engine

NUM_STEPS_SENT_AT_ONCE = 8  # first steps, which are sent at once; later ones are queued for the channel's thread
# Steps of an optimizer that are timed together on an accelerator, since each synchronization delays training.
NUM_STEPS_PER_SYNC = 4


def install(channel: Channel, settings: dict[str, Any]) -> None:
    """Seed this process and install the hooks that `settings` ask for, right after torch was imported.

    ``seed``: of the random number generators. ``sample_dim``: dimension of a module's inputs along which samples are
    counted. ``frozen``: settings of a `GradientRecorder`, which writes the gradients to ``folder`` in place of taking
    optimizer steps. ``diagnosis``: settings of a `StepDiagnosis`. ``observes``: false to report no steps.
    ``is_held``: whether to wait before the first forward pass in training until the parent asks to go on.
    ``counts_flops``: whether to count the floating-point operations of a step. ``sites``: whether to report the calls
    in the user's code that created the training's objects. ``outside``: batch size, precision and accumulation to set
    by hooks.
    """
    _report_process(channel)
    if settings.get("seed") is not None:  # compared runs must draw the same numbers, even in an unseeded script
        import random

        random.seed(settings["seed"])
        torch.manual_seed(settings["seed"])
        after_import("numpy.random", channel.shield(lambda numpy_random: numpy_random.seed(settings["seed"])))
    observer = Observer(channel)
    observer.passes.sample_dim = settings.get("sample_dim", 0)
    observer.counts_flops = settings.get("counts_flops", False)
    observer.is_held = settings.get("is_held", False)
    if settings.get("frozen"):
        from .frozen import GradientRecorder

        observer.gradient_recorder = GradientRecorder(channel, observer, settings["folder"], settings["frozen"])
    if settings.get("diagnosis"):
        from .diagnosis import StepDiagnosis

        observer.diagnosis = StepDiagnosis(channel, observer, settings["diagnosis"])
    if settings.get("observes", True):
        observer.watch()
    if settings.get("sites"):
        from . import sites

        sites.watch(channel, observer)
    if settings.get("outside") is not None:
        from .outside.hooks import SettingHooks

        SettingHooks(channel, observer.passes, settings["outside"]).install()


class Observer:
    """Observer that sends a `Step` message for every optimizer step, with the losses and forwards since the last one.

    Samples, backward passes and compilations are counted from the start of the process; see `messages.Step`.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.loaders = batches.LoaderObserver(channel)
        self.passes = passes.PassRecorder(channel)
        self.gradient_recorder: Any = None  # if set, it records the gradients in place of each step
        self.is_held = False
        self._is_loaded = False  # whether a forward pass in training, or without any a step, has begun
        self.counts_flops = False
        self._flop_counter: Any = None  # while it counts the second step of the first optimizer
        self._counted_before: tuple[int, int] = 0, 0  # samples and positions that loaders had yielded then
        self.diagnosis: Any = None  # if set, a `StepDiagnosis`
        self.num_steps = 0
        self._optimizers: list[Any] = []  # weak references, in the order of their first steps
        self._num_steps_of: list[int] = []  # by index of the optimizer
        # By index of the optimizer, for each loader: samples at its latest step, number of steps that it yielded for;
        # and how many loaders yielded for the latest step.
        self._loaded_for: list[tuple[dict[str, int], Counter[str], int]] = []
        self._running_step_frame: Any = None  # frame of the outermost running `Optimizer.step`, None outside of one
        self._num_nested = 0  # running `Optimizer.step` calls inside the outermost
        self.has_stepped = False  # whether an optimizer has stepped since the latest GradScaler.step began
        self.scaler_depth = 0  # running calls of GradScaler.step or of DeepSpeed's, one inside another
        self.ignores_steps = False  # while DeepSpeed's engine is made, which steps to make its optimizer's state
        self._pending: list[dict[str, Any]] = []  # steps not reported yet: reading their losses synchronizes the device
        self.device = torch.device("cpu")
        self._devices: set[torch.device] = set()  # of all parameters, also those that are not trained
        self._num_compilations = 0
        self._peak_bytes: int | None = None
        self.modules: dict[int, Any] = {}  # outermost modules that have run in training: weak references by id
        channel.before_send = channel.shield(self._update_peak_memory)  # shielded: errors never reach the script
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Forget the steps and optimizers of the parent process, in a forked child."""
        self.num_steps = 0
        self._optimizers = []
        self._num_steps_of = []
        self._loaded_for = []
        self._running_step_frame = None
        self._pending = []
        if self._flop_counter is not None:
            self._flop_counter.__exit__(None, None, None)
            self._flop_counter = None

    def watch(self) -> None:
        """Install the hooks of DataLoaders, forward and backward passes, optimizers, torch.compile and GradScaler."""
        self.loaders.watch()
        self.passes.watch()
        self.passes.on_outermost += [
            lambda module: self.modules.setdefault(id(module), weakref.ref(module)),
            lambda module: self._report_loaded(module.parameters),
        ]
        before_step, after_step = self.channel.shield(self._before_step), self.channel.shield(self._after_step)
        hooks = [register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)]

        def hook_dynamo(dynamo: Any) -> None:
            def exclude_hooks_from_graphs(*_: Any) -> None:  # else a compiled `optimizer.step` would trace the hooks
                while hooks:  # only at the first compilation: then the list stays empty
                    hooks.pop().remove()
                    if not hooks:
                        register_optimizer_step_pre_hook(dynamo.disable(before_step))
                        register_optimizer_step_post_hook(dynamo.disable(after_step))

            callbacks = dynamo.callback.callback_handler
            clear, on_compile_start = callbacks.clear, self.channel.shield(exclude_hooks_from_graphs)

            def register() -> None:
                callbacks.register_start_callback(on_compile_start)
                callbacks.register_end_callback(self._count_compilation)

            def clear_and_register() -> None:  # torch.compiler.reset clears all callbacks
                clear()
                register()

            callbacks.clear = clear_and_register
            register()

        after_import("torch._dynamo", self.channel.shield(hook_dynamo))
        _hook_scaler(self)
        deepspeed_engine.watch(self)

    def _report_loaded(self, parameters: Any) -> None:
        """Report at the first call that what comes before training is done, and wait if this process is held.

        `parameters` returns the trained parameters.
        """
        if self._is_loaded:
            return
        self._is_loaded = True
        self.device = next((p.device for p in parameters() if p.device.type != "cpu"), self.device)
        self.channel.send("loaded", device=self.device.type, **_device_memory(self.device), **where.rank())
        if self.is_held:
            self.channel.wait_for_go()

    def _count_compilation(self, *_: Any) -> None:
        """Count a compilation, including that of a backward pass. Dynamo's own counters can be reset by the script."""
        self._num_compilations += 1

    def index_of(self, optimizer: Any) -> int:
        """Return the index of an optimizer in the order of first steps. Send an `Optimizer` message for a new one."""
        for index, reference in enumerate(self._optimizers):
            if reference() is optimizer:
                return index
        self._report_optimizer(optimizer)
        return len(self._optimizers) - 1

    def live_optimizers(self) -> list[Any]:
        """Return the optimizers that have taken a step and still exist, in the order of their first steps."""
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]

    def live_modules(self) -> list[Any]:
        """Return the outermost modules that have run in training and still exist."""
        return [module for module in (reference() for reference in self.modules.values()) if module is not None]

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if self._is_capturing():
            self.channel.send("captured")
            return None
        if self._is_in_step():
            self._num_nested += 1  # a subclass that calls its parent's step takes one step, not two
            return None
        self._running_step_frame, self._num_nested = _step_frame(), 0
        if self.ignores_steps:
            return None
        if not self._is_loaded:  # no module has run
            self._report_loaded(lambda: passes.parameters_of(optimizer))
        if self.scaler_depth:
            self.index_of(optimizer)  # DeepSpeed takes its parameters away after the step
        if self.diagnosis is not None:
            return self.diagnosis.before_step(optimizer, args, kwargs)
        recorder = self.gradient_recorder
        return None if recorder is None else recorder.record_in_place_of_step(optimizer, args, kwargs)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        if self._is_capturing():
            return
        if self._num_nested:
            self._num_nested -= 1
            return
        self._running_step_frame = None
        if self.gradient_recorder is not None:
            self.gradient_recorder.restore_gradients()
        self.has_stepped = True
        if not (self.scaler_depth or self.ignores_steps):
            self.report_step(optimizer)

    def _is_capturing(self) -> bool:
        """Whether operations are being captured into a CUDA graph, which a synchronization would invalidate."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _is_in_step(self) -> bool:
        """Whether an optimizer step is running. A step that raised an error is not: its frame is not on the
        call stack.
        """
        if self._running_step_frame is None:
            return False
        frame: Any = sys._getframe(1)
        while frame is not None and frame is not self._running_step_frame:
            frame = frame.f_back
        return frame is not None

    def report_scaler_step(self, scaler: Any, optimizer: Any) -> None:
        """Report the optimizer step of an enabled GradScaler, which may have skipped it.

        A fused optimizer is called also for a skipped step, and then changes nothing: only `found_inf` shows the skip.
        """
        found_inf = None
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            found_inf = sum(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        self.report_step(optimizer, found_inf, is_skipped=not self.has_stepped)

    def report_step(self, optimizer: Any, found_inf: Any = None, *, is_skipped: bool = False) -> None:
        """Report that an optimizer stepped or that its scaler skipped the step.

        `found_inf`, a tensor on the device, is not zero if the step was skipped; `is_skipped` counts if it is None.
        """
        began = time.perf_counter()
        index = self.index_of(optimizer)
        self.num_steps += 1
        self._num_steps_of[index] += 1
        self.passes.has_stepped = True
        step = {
            "optimizer": index,
            "is_skipped": is_skipped if found_inf is None else found_inf,
            **self.passes.pop_record(),
            "num_samples": dict(self.loaders.num_samples),
            "tokens_by_loader": dict(self.loaders.tokens),
            "num_batches": self.loaders.num_batches,
            "wait_seconds": self.loaders.wait_seconds,
            "num_compilations": self._num_compilations,
            "time": time.monotonic(),
        }
        self._pending.append(step)
        follows_evaluation = self._follows_evaluation(index)
        # Module calls are recorded in the first steps only, since that slows training.
        if self.gradient_recorder is None:
            self.passes.count_step(optimizer)
        if (
            self.device.type == "cpu"
            or self.num_steps <= passes.NUM_FULLY_WATCHED
            or self._num_steps_of[index] % NUM_STEPS_PER_SYNC == 0
            or self._num_steps_of[index] == 1  # an optimizer may be made anew before it has taken so many
            or follows_evaluation  # else no interval is without one where epochs have few steps
        ):
            self._report_steps()
        if self.counts_flops and index == 0:
            self._count_flops(self._num_steps_of[0])
        self.passes.overhead_seconds += time.perf_counter() - began
        if self.diagnosis is not None:
            self.diagnosis.after_step(optimizer, step)

    def _follows_evaluation(self, index: int) -> bool:
        """Whether more loaders have yielded batches for this step of an optimizer than for its previous one, among them
        one that yields for less than half of the steps, as one for evaluation does (`Rank.training_loaders`): that of a
        loop with two steps for each batch does not, unless it is made anew in each epoch.
        """
        num_samples, num_steps_with, num_before = self._loaded_for[index]
        yielding = [name for name, num in self.loaders.num_samples.items() if num != num_samples.get(name, 0)]
        num_samples.update(self.loaders.num_samples)
        num_steps_with.update(yielding)
        self._loaded_for[index] = num_samples, num_steps_with, len(yielding)
        is_rare = any(2 * num_steps_with[name] < self._num_steps_of[index] for name in yielding)
        return is_rare and num_before < len(yielding)  # else it takes the place of a loader of an earlier epoch

    def _count_flops(self, num_steps: int) -> None:
        """Count the floating-point operations of the first optimizer's second step, which is part of the warm-up and
        never timed. Compiled code is not counted, and left alone.
        """
        loaders = self.loaders
        yielded = sum(loaders.num_samples.values()), sum(each.num_positions for each in loaders.tokens.values())
        flops, problem = 0, None
        if num_steps == 1 and not self._num_compilations:
            try:
                from .flops import FlopCounter

                self._counted_before, self._flop_counter = yielded, FlopCounter()
                self._flop_counter.__enter__()
                return
            except Exception as error:  # an older torch, whose counter differs
                self._flop_counter, problem = None, str(error)
        self.counts_flops = False
        counter, self._flop_counter = self._flop_counter, None
        if counter is not None:
            counter.__exit__(None, None, None)
            flops, problem = counter.flops, counter.problem
        if self._num_compilations:
            problem = "torch.compile compiles its code"
        self.channel.add(
            "flops",
            flops=flops,
            problem=problem,
            num_samples=yielded[0] - self._counted_before[0],
            num_positions=yielded[1] - self._counted_before[1],
        )

    def _report_steps(self) -> None:
        """Synchronize the device, read losses and memory, and report the pending steps."""
        last = self._pending[-1]
        last.update(self.memory_fields())
        if self.device.type != "cpu":
            self._call_for_accelerators("synchronize")
            last["time"] = time.monotonic()
        last["is_settled"] = True  # its time is that after a synchronization; the times of the others are not
        last["overhead_seconds"] = self.passes.overhead_seconds + self.loaders.overhead_seconds
        for step in self._pending:
            step["losses"] = [passes.read(loss) for loss in step["losses"]]
            step["is_skipped"] = bool(step["is_skipped"])
            step["tokens"] = None if step["tokens"] is None else step["tokens"].read()
            step["tokens_by_loader"] = {name: tokens.read() for name, tokens in step["tokens_by_loader"].items()}
            self.channel.add("step", **step)
        self._pending = []
        if self.num_steps <= NUM_STEPS_SENT_AT_ONCE:
            self.channel.flush()

    def _call_for_accelerators(self, name: str) -> list[Any]:
        """Call the function `name` of `torch.cuda` or its like for each accelerator, and return the results."""
        function = getattr(getattr(torch, self.device.type), name)
        if self.device.type == "mps":
            return [function()]
        return [function(device) for device in self._devices if device.type == self.device.type]

    def _update_peak_memory(self) -> None:
        """Read this process's peak resident memory if it trains on a CPU, or poll MPS, which keeps no peak.

        The sending thread calls this, not every step: reading it takes longer than sending a step's messages.
        """
        if self._optimizers and self.device.type == "cpu":
            self._peak_bytes = _peak_resident_bytes()
        elif self.device.type == "mps":
            self._peak_bytes = max(self._peak_bytes or 0, torch.mps.driver_allocated_memory())

    def memory_fields(self) -> dict[str, Any]:
        """Return the fields of `Step` on memory: peaks of this process so far, in bytes; of several accelerators the
        largest.
        """
        if self.device.type in ("cpu", "mps"):
            if self.num_steps <= NUM_STEPS_SENT_AT_ONCE:
                self._update_peak_memory()
            fields = {"peak_memory_bytes": self._peak_bytes}
            return fields if self.device.type == "cpu" else {**fields, "reserved_memory_bytes": self._peak_bytes}
        if not hasattr(getattr(torch, self.device.type), "memory_stats"):
            return {}
        stats = self._call_for_accelerators("memory_stats")
        return {
            "peak_memory_bytes": max(each.get("allocated_bytes.all.peak", 0) for each in stats),
            "reserved_memory_bytes": max(each.get("reserved_bytes.all.peak", 0) for each in stats),
            "num_ooms": sum(each.get("num_ooms", 0) for each in stats),
        }

    def _report_optimizer(self, optimizer: Any) -> None:
        """Give a new optimizer its index, and report it with the devices of the training: those of its parameters,
        unless they are on the CPU and the model on another device, as with DeepSpeed's offload.
        """
        parameters = passes.parameters_of(optimizer)
        self._optimizers.append(weakref.ref(optimizer))
        self._num_steps_of.append(0)
        self._loaded_for.append(({}, Counter(), 0))
        self.device = next((p.device for p in parameters if p.device.type != "cpu"), self.device)
        untrained = {id(p): p for module in self.live_modules() for p in module.parameters() if not p.requires_grad}
        self._devices |= {self.device, *(p.device for p in (*parameters, *untrained.values()))}
        self.channel.send(
            "optimizer",
            index=len(self._optimizers) - 1,
            name=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            num_parameters=_num_by_dtype(parameters),
            num_frozen=_num_by_dtype(untrained.values()),
            devices=sorted({str(p.device) for p in parameters if p.device.type != "cpu"} or {str(self.device)}),
            line=where.user_line(),
            uses_tf32=self.device.type == "cuda"
            and getattr(torch.backends.cuda.matmul, "fp32_precision", "") == "tf32",
            **where.rank(),
        )


def _num_by_dtype(parameters: Any) -> dict[str, int]:
    """Return the total number of elements of the parameters, by dtype."""
    counts: dict[str, int] = {}
    for parameter in parameters:
        dtype = str(parameter.dtype).replace("torch.", "")
        # DeepSpeed empties the parameters of ZeRO-3, and keeps their number.
        counts[dtype] = counts.get(dtype, 0) + getattr(parameter, "ds_numel", parameter.numel())
    return counts


def _step_frame() -> Any:
    """Return the frame of torch's wrapper of `Optimizer.step`, which calls the hooks; None if there is none."""
    frame: Any = sys._getframe(2)
    file = register_optimizer_step_pre_hook.__code__.co_filename
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame


def _hook_scaler(observer: Observer) -> None:
    """Hook into GradScaler.step: when it skips a step, it calls the optimizer, and its hooks, only if that is fused."""
    scaler_class: Any = GradScaler
    original, report_step = scaler_class.step, observer.channel.shield(observer.report_scaler_step)

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        observer.scaler_depth += 1
        observer.has_stepped = False
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            observer.scaler_depth -= 1
        if observer.scaler_depth == 0 and not observer._is_capturing():
            report_step(scaler, optimizer)
        return result

    scaler_class.step = step


def _peak_resident_bytes() -> int:
    """Return the peak resident memory of this process."""
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                if line.startswith(b"VmHWM"):
                    return 1024 * int(line.split()[1])
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _free_memory_share() -> float | None:
    """Return the free share of the current CUDA device's memory: now, or at the peak of this process if less.

    None if this process has not used CUDA, or if the device has failed.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch does not type it
        return None
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # after an error on the GPU every CUDA call fails
        return None
    return min(free, total - torch.cuda.max_memory_reserved()) / total


def _device_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes of a CUDA device's memory: in all, in use by all processes, and reserved by this one.

    Empty for another device, or if the device has failed.
    """
    if device.type != "cuda":
        return {}
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return {}
    return {"total_bytes": total, "used_bytes": total - free, "reserved_bytes": torch.cuda.memory_reserved(device)}


def _report_process(channel: Channel) -> None:
    """Report that this process has imported torch, and later its uncaught exception or its exit; start the channel."""
    hook = sys.excepthook

    def excepthook(kind: Any, value: Any, trace: Any) -> None:
        channel.send_error(value, _free_memory_share())
        hook(kind, value, trace)

    sys.excepthook = excepthook

    def report_exit() -> None:
        channel.send("exit", **where.rank())
        channel.end()

    atexit.register(report_exit)
    is_multiprocessing_child = multiprocessing.parent_process() is not None
    channel.send(
        "torch",
        arguments=sys.argv,
        parent_pid=os.getppid(),
        folder=where.working_folder(),
        worker=multiprocessing.current_process().name if is_multiprocessing_child else None,
        **where.rank(),
    )
    channel.listen()

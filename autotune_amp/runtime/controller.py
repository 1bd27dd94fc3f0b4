"""PrecisionController: a replacement for GradScaler with which a run survives repeated overflow."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.utils._pytree import tree_leaves

from autotune_amp.command.agent.tokens import count_tokens
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import Whole
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import MeasuredFlops
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.precision.step_amp import has_gradients
from autotune_amp.runtime import checkpoint, windows
from autotune_amp.runtime.end_signal import EndSignal
from autotune_amp.runtime.executor import Executor, OnDemotion, RequestKind
from autotune_amp.runtime.metrics import MetricsRecorder
from autotune_amp.runtime.model import AttachedModel
from autotune_amp.runtime.optimizers import makes_buffers_unread, refuse_closure, takes_a_scaler
from autotune_amp.runtime.policy import BackoffFactor, GrowthFactor, GrowthInterval, Policy, check_scale
from autotune_amp.runtime.scaler import (
    CLEAN,
    LAG_UPDATES,
    NO_GRADIENTS,
    GradientCheck,
    LossScaler,
    Ranks,
    StepResult,
    UpdateResult,
    UpdateWindow,
    checked_device,
    worst_of,
)
from autotune_amp.runtime.sinks import Sink
from autotune_amp.runtime.status import MoveRecord, Status, write_status
from autotune_amp.runtime.train_step import TrainStep

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # torch can be built without

Batch = TypeVar("Batch")


def _attribute_of(part: str, name: str, kind: Any = None) -> Any:
    """Return a property in place of an attribute of GradScaler: attribute `name` of a part of the controller.

    Setting it raises `InvalidRequestError` for a value that is not of type `kind`, if that is given.
    """

    def set_it(controller: Any, value: Any) -> None:
        try:
            setattr(getattr(controller, part), name, value if kind is None else msgspec.convert(value, kind))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"The {name} given is {value!r}: {error}.", "Growth is by 1 or more, backing off by 1 or less."
            ) from error

    return property(operator.attrgetter(f"{part}.{name}"), set_it)


class PrecisionController(torch.amp.GradScaler):
    """Drop-in replacement for ``torch.amp.GradScaler`` that steps the precision down when it causes failures.

    Use `train_step`; or `autocast()` around the forward pass, then `backward`, `unscale_` to clip, `step` and `update`,
    as with GradScaler. `config` names the precision and its fallbacks; a fallback is taken only if its measured plan
    fits. Sets the process's TF32 flags to those of the precision, as the search's trials do.

    guard: check bf16 and fp32 steps too and skip those that are not finite. False leaves them alone, and undiagnosed.
    halt: raise `NotPrecisionError` or `NoRungFitsError` when the run must not go on; False skips such steps for ever.
    on_demotion: "checkpoint_and_stop" raises `DemotedError` from `update()` after stepping down; so does a fallback
        with another batch size in a loop that does not go over `windows`, also if it was set by hand or loaded, unless
        the loop's windows then have the fallback's number of passes.
    promote: go back up, after 2000 clean steps, if a rerun (see `attach`) at 16 times the loss scale is finite.
    on_signal: called in `update()` at the end of the window in which SIGTERM came, as Slurm ends a job; on accelerators
        of the next. Give it on every rank or on none. Afterwards, and by `detach`, the previous handler is restored; it
        gets a SIGTERM that came after the last window.
    process_group: the ranks that decide together; all ranks if None.
    sinks: called in threads of their own, on rank 0, with the metrics (`autotune_amp.runtime.status`) of every 64th
        update, change of the loss scale and move. `autotune_amp.integrations.sinks` has ready-made ones.
    run_log: a file to append to, for ``autotune-amp report``: a line of JSON for every move, every change of the loss
        scale, and every 64th update with the loss. Rank 0 writes it; a resumed run continues it.
    measured_flops: operations of a sample and rates of this machine, by which status, run log and sinks have the
        utilization of steps (MFU); `load` takes them from the recommendation.

    Logs a warning to ``autotune_amp.runtime`` if this process lacks the config's environment variables. Raises
    `DeviceError` for a missing device and `InvalidRequestError` for options that cannot be honoured.
    """

    _growth_factor = _attribute_of("_rule", "growth_factor", GrowthFactor)
    _backoff_factor = _attribute_of("_rule", "backoff_factor", BackoffFactor)
    _growth_interval = _attribute_of("_rule", "growth_interval", GrowthInterval)
    _scale = _attribute_of("_scaler", "scale")
    _growth_tracker = _attribute_of("_scaler", "growth_tracker")
    _enabled = _attribute_of("_executor", "is_checking")

    def __init__(
        self,
        config: AmpConfig,
        device: str | torch.device = "cuda",
        *,
        guard: bool = True,
        halt: bool = True,
        on_demotion: OnDemotion = "continue",
        promote: bool = False,
        on_signal: Callable[[], object] | None = None,
        process_group: ProcessGroup | None = None,
        sinks: Sequence[Sink] = (),
        run_log: str | os.PathLike[str] | None = None,
        measured_flops: MeasuredFlops | None = None,
    ) -> None:
        is_assumed = ":" not in str(device)
        self._ranks = ranks = Ranks(checked_device(device), process_group, is_assumed=is_assumed)
        self._on_signal = on_signal
        self._end_signal: EndSignal | None = None
        self._check = GradientCheck(ranks)
        precisions = [config.precision, *(plan.precision for plan in config.plans)]
        self._policy = policy = Policy(precisions, config.loss_scale, promotes=promote)
        self._rule = policy.scale
        self._scaler = scaler = LossScaler(self._rule)
        self._metrics = MetricsRecorder(
            config, policy, scaler, ranks, sinks=sinks, run_log=run_log, measured_flops=measured_flops
        )
        self._executor = Executor(
            config,
            policy,
            scaler,
            self._metrics,
            ranks,
            guards=guard,
            halts=halt,
            on_demotion=on_demotion,
        )
        backoff_factor = self._rule.backoff_factor
        super().__init__(ranks.device.type, self._rule.scale, self._rule.growth_factor, 0.5, self._rule.growth_interval)
        self._rule.backoff_factor = backoff_factor  # the constructor refuses 1.0, which never backs off
        # A window lasts from the first autocast() or scale() until update(). A move may call the user's closure.
        self._is_in_window = self._is_moving = False
        self._watches_backward = False  # by hooks of the losses, once the loop may have dropped a window's gradients
        self._position = windows.WindowPosition()  # of the loop in `windows`
        self._train_step = TrainStep(self._executor)
        self._executor.apply()
        self.open()

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: str | torch.device = "cuda", **options: Any
    ) -> PrecisionController:
        """Return a controller for the config in a ``recommendation.json``; `options` are the constructor's."""
        recommendation = Recommendation.load(path)
        own_options = {"measured_flops": recommendation.measured_flops, **options}
        return cls(recommendation.training_config, device, **own_options)

    # The loop: autocast, backward, unscale_, step, update.

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new context for the forward pass in the current precision."""
        if self._is_moving:
            return nullcontext()
        self._executor.use_own_autocast()
        self._carry_out_requests()
        self._begin_window()
        return self._executor.autocast()

    def scale(self, outputs: Any) -> Any:
        """Return the outputs multiplied by the loss scale, and check whether they are finite."""
        self._begin_window(has_run=True)
        self._check.window.num_passes += 1
        if not self._enabled:
            return outputs
        if not isinstance(outputs, (Tensor, list, tuple)) and isinstance(outputs, Iterable):  # may be a generator
            outputs = list(outputs)
        losses = [outputs] if isinstance(outputs, Tensor) else list(filter(torch.is_tensor, tree_leaves(outputs)))
        if losses:
            self._scaler.follow(losses[0])
            self._check.see_losses(losses, self._scale.device)
        scaled = super().scale(outputs) if self._scaler.is_scaling else outputs
        for loss in tree_leaves(scaled) if self._watches_backward else ():
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.register_hook(self._check.window.note_backward)  # type: ignore[no-untyped-call] # torch's
        return scaled

    def train_step(
        self,
        closure: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        clip_norm: float | None = None,
        num_tokens: int | Tensor | None = None,
    ) -> StepResult:
        """Train on one batch: zero_grad, `closure` under autocast, backward, unscale_, clip, step and update.

        `closure` returns the loss of the batch, a single number, and does nothing else: if `attach` got no rerun it is
        called again to find out why steps fail; if no model is attached yet, the one named in the closure's code is.
        `clip_norm` limits the norm of all gradients together; with several optimizers each is stepped by itself.
        `num_tokens` are the batch's tokens without padding, such as ``attention_mask.sum()``: status, run log and sinks
        then have the tokens per second. A tensor on an accelerator costs no wait. Inside `windows` a call is one pass,
        and its share of the loss is taken automatically. The result is true if the window stepped, and has the ``loss``
        and the ``grad_norm`` before clipping, on the device. An exception clears the gradients and discards the window.
        Raises `InvalidRequestError` for a loop or a loss that cannot be trained.
        """
        if num_tokens is not None:
            self._metrics.count_tokens(num_tokens)
        return self._train_step.run(self, self._position, closure, optimizer, clip_norm)

    def count_tokens(self, batch: Any) -> None:
        """Count the tokens of a batch, as `train_step` does with `num_tokens`: those of its ``input_ids`` that its
        ``attention_mask`` marks. Does nothing for a batch without token ids.
        """
        counted = count_tokens(batch)
        if counted is not None:
            self._metrics.count_tokens(counted.num_tokens)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run ``scale(loss).backward(**kwargs)``."""
        self.scale(loss).backward(**kwargs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the loss scale and check them, at most once per optimizer and update."""
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._examine(optimizer, self._scaler.inverse() if self._scaler.is_scaling else None)
        state["stage"] = OptState.UNSCALED

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `unscale_` or `step` was called for the optimizer since the last update."""
        return self._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY

    def unscale_together(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Call `unscale_` on all optimizers, to clip by a single norm: a non-finite gradient in one skips all."""
        given = list(optimizers)
        if not self._enabled:
            return
        for optimizer in given:
            if not self.is_unscaled(optimizer):
                self.unscale_(optimizer)
        self._check.join(given, self._per_optimizer_states)

    def _examine(self, optimizer: torch.optim.Optimizer, inv_scale: Tensor | None, *, is_first: bool = True) -> None:
        self._executor.register_optimizer(self._check.number_of(optimizer), optimizer)
        samples = is_first and self._scaler.is_scaling and self._metrics.wants_sample
        skipped = self._check.examine(optimizer, self._scale.device, inv_scale, samples=samples)
        state = self._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {} if skipped is None else {skipped.device: skipped}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Run ``optimizer.step(*args, **kwargs)`` if there are gradients and they and the loss are finite."""
        if torch.is_autocast_enabled(self._ranks.device.type):  # which keeps casts of the weights before the step
            torch.clear_autocast_cache()
        check = self._check
        if not self._enabled:
            self._executor.register_optimizer(number := check.number_of(optimizer), optimizer)
            value = optimizer.step(*args, **kwargs)
            check.window.verdicts[number] = CLEAN
            self._executor.optimizers.note({number: CLEAN if has_gradients(optimizer) else NO_GRADIENTS})
            return StepResult(CLEAN, value)
        refuse_closure(optimizer, args, kwargs)
        self._check_scale_growth_tracker("step")
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            if is_fused:  # fused optimizers unscale by themselves
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        elif state["stage"] is OptState.UNSCALED and check.needs_second_look(optimizer):
            self._examine(optimizer, None, is_first=False)
        verdict = check.wait_for(optimizer) if makes_buffers_unread(optimizer) else check.verdict_of(optimizer)
        # A fused optimizer reads the verdict on the device, but need not be called if the host knows it.
        if state["stage"] is not OptState.STEPPED and isinstance(verdict, int) and verdict != CLEAN:
            state["stage"] = OptState.STEPPED
            return StepResult(verdict)
        if is_fused and not takes_a_scaler(type(optimizer)):  # type: ignore[arg-type] # mypy and hashes of classes
            value = self._scaler.step_fused(optimizer, state, *args, **kwargs)
        else:
            value = super().step(optimizer, *args, **kwargs)
        return StepResult(verdict if isinstance(verdict, int) else check.verdict_of(optimizer), value)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the accumulation window and update the loss scale, to `new_scale` if given. The precision may change.

        Raises subclasses of `TrainingStoppedError` when the run must not go on.
        """
        num_passes = self._check.window.num_passes
        if new_scale is not None:
            scale = check_scale(float(new_scale))
            growth_tracker = self._scaler.current_growth_tracker()
            self._end_window()
            self.synchronize()
            self._scaler.set_by_hand(scale, growth_tracker)
            self._metrics.report_scale("it was set by hand")
        else:
            if self._enabled:
                self._check_scale_growth_tracker("update")
                if not self._check.window.verdicts:
                    raise InvalidRequestError(
                        "update() was called before step(): no gradients were checked since the last update().",
                        "Call step(optimizer), or unscale_(optimizer), for each optimizer first.",
                    )
            self._end_window()
        self._executor.raise_if_batches_differ(num_passes)
        if self._end_signal is not None:
            self._end_signal.end_window()

    def synchronize(self) -> None:
        """Wait for pending verdicts from the device, act on them, and call due callbacks.

        With several ranks, call it on all of them.
        """
        if len(self._scaler.reader):
            self._read_verdicts(0)

    def _begin_window(self, *, has_run: bool = False) -> None:
        self._is_in_window = True
        model, window = self._executor.model, self._check.window
        if window.num_passes > 0 and self._may_be_dropped() and not self._executor.optimizers.may_hold_gradients():
            # Without a backward pass so far, that may follow those of more losses.
            if window.has_run_backward or window.verdicts:
                dropped = window.dropped_probe + window.loss_probe
                if (worst := int(worst_of(window.verdicts.values()))) > CLEAN:  # the loop itself skips such steps
                    window.verdicts = {n: v if v == NO_GRADIENTS else worst for n, v in window.verdicts.items()}
                    self._end_window(next_has_run=has_run)
                    self._is_in_window, dropped = True, dropped if has_run else 0.0
                self._check.window = window = UpdateWindow(dropped_probe=dropped)
                self._per_optimizer_states.clear()
            self._watches_backward = True
        if model is not None and window.num_passes == 0:
            model.begin_window(has_run=has_run)

    def _may_be_dropped(self) -> bool:
        """Return whether the loop may have left the window's step out, if no gradients are left."""
        if not self._check.window.verdicts:
            return not self._check.window.scale_was_read
        return {state["stage"] for state in self._per_optimizer_states.values()} == {OptState.UNSCALED}

    def _end_window(self, *, next_has_run: bool = False) -> None:
        # A forward pass of the next window needs the running statistics and the precision that it ran with.
        window, self._check.window = self._check.window, UpdateWindow()
        self._per_optimizer_states.clear()
        if self._executor.model is not None:
            self._executor.model.num_window_passes = window.num_passes
        if window.is_late:
            self._metrics.end_window()
            skipped, follows_bad = self._scaler.send(window, self._ranks), window.follows_bad_batch()
            self._executor.end_window(skipped if follows_bad is False else skipped + follows_bad)
            # Hysteresis is counted on the host only, so the host must not lag behind.
            self._read_verdicts(0 if self._rule.hysteresis > 1 else LAG_UPDATES)
        else:
            self.synchronize()
            if self._enabled:
                self._executor.optimizers.note(window.verdicts)
            result = window.result(self._ranks)
            if result.verdicts:
                self._metrics.end_window()
                if not next_has_run:
                    self._executor.end_window(result.worst > CLEAN or window.follows_bad_batch())
                self._executor.end_update(result)
                self._scaler.write()
        self._is_in_window = next_has_run
        self._carry_out_requests()

    def _read_verdicts(self, max_waiting: int) -> None:
        reader = self._scaler.reader
        while len(reader) > (0 if self._policy.is_watching else max_waiting):
            self._executor.optimizers.note(dict(zip((popped := reader.pop())[1], popped[0], strict=False)))
            self._executor.end_update(UpdateResult.from_values(*popped)._replace(ended_at=reader.ended_at))
        if not len(reader):
            self._scaler.write(is_forced=True)
        self._carry_out_requests()

    # A move waits until the accumulation window is over, which would otherwise mix gradients of two scales, and until
    # an autocast of ours has ended, whose cached casts would break, or a validation in a precision of its own. A user's
    # own autocast may stay on for ever; there the precision is changed by contexts inside it, which use no cache.

    def _request(self, what: RequestKind, name: str = "") -> None:
        self._executor.pending_requests.append((what, name))
        self._carry_out_requests()

    def _carry_out_requests(self) -> None:
        executor = self._executor
        is_inside_autocast = executor.uses_own_autocast and torch.is_autocast_enabled(self._ranks.device.type)
        if not executor.pending_requests or is_inside_autocast or executor.is_validating:
            return
        while executor.pending_requests and not (self._is_in_window or self._is_moving):
            self._is_moving = True
            try:
                self.synchronize()  # pending verdicts belong to the rung about to be left
                executor.carry_out_next_request()
            finally:
                self._is_moving = False

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if self._check.number_of(optimizer) not in self._check.window.verdicts:
            self._examine(optimizer, None)
        return self._found_inf_per_device(optimizer)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: dict[str, Any],  # noqa: ARG002 # GradScaler's signature
        *args: Any,
        **kwargs: Any,
    ) -> float | None:
        # GradScaler synchronizes here too.
        return optimizer.step(*args, **kwargs) if self._check.wait_for(optimizer) == CLEAN else None

    def get_scale(self) -> float:
        """Return the current loss scale, 1.0 if the loss is not scaled. Synchronizes with the device."""
        self._check.window.scale_was_read = self._check.window.num_passes > 0
        return self._scaler.current_scale()

    def __getstate__(self) -> dict[str, Any]:
        self.synchronize()
        return super().__getstate__()

    @contextmanager
    def validation(self, precision: Precision | None = None) -> Iterator[None]:
        """Run the forward pass of validation without gradients, in `precision` or the current one."""
        with torch.no_grad(), self._executor.running_in(precision):
            yield

    def windows(
        self, loader: Iterable[Batch], weigh: Callable[[Batch], float | Tensor] | None = None
    ) -> Iterator[tuple[Batch, bool]]:
        """Yield (batch, is_last) for every pass. When `is_last`, step and update: the accumulation window is over.

        A window has the config's accumulation steps; the last one has the rest of the loader. Without `train_step`
        divide the loss by `window_size`. If the loss is a mean over something that batches hold unequal amounts of,
        multiply it by `window_share` instead, and pass a `weigh` function that counts it (the labels other than -100,
        say); if it counts 0 the loss must be 0, not NaN. A smaller batch size splits the loader's batches; raises
        `InvalidRequestError` if that is impossible.
        """

        def next_shape() -> tuple[int, int]:
            self._executor.uses_windows = True
            self._carry_out_requests()
            plan = self.config
            return windows.shape(self._executor.own_config.batch_size, plan.batch_size, plan.accumulation_steps)

        position: windows.WindowPosition | None = None
        try:
            for batch, position in windows.passes(iter(loader), next_shape, weigh):
                self._position = position
                yield batch, position.is_last
        finally:
            if self._position is position:  # another loop may have started meanwhile
                self._position = windows.WindowPosition()
        self.synchronize()

    @property
    def window_size(self) -> int:
        """Return the backward passes in the current window of `windows`, else the config's accumulation steps."""
        return len(self._position.shares) or self.config.accumulation_steps

    @property
    def window_share(self) -> float:
        """Return the current pass's share of the window's total weight by `weigh`; without it, of its passes."""
        share = self._position.share
        return 1 / self.window_size if share is None else share

    def discard_window(self) -> None:
        """End the accumulation window without a step and without counting it, for a loop that drops its gradients."""
        if self._is_in_window:
            self._executor.end_window(True)
            self._check.window, self._is_in_window = UpdateWindow(), False
            self._per_optimizer_states.clear()
        self._metrics.discard_window()

    def on_step(self, callback: Callable[[], object], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call `callback` once for every step taken: of `optimizer`, or with None of any optimizer in the update.

        For a fused optimizer on an accelerator it is called `scaler.LAG_UPDATES` updates later, to avoid a sync;
        `synchronize` and the end of `windows` make pending calls, and so does a run resumed from `state_dict`.
        """
        self._executor.on_step.append((callback, None if optimizer is None else self._check.number_of(optimizer)))

    def on_move(self, listener: Callable[[MoveRecord], object]) -> None:
        """Call `listener` with the record of every move, whose config has the new batch size and accumulation steps."""
        self._executor.listeners.append(listener)

    def attach(self, model: nn.Module, rerun: Callable[[], Tensor] | None = None) -> None:
        """Attach the model: watch its activations, undo batch-norm statistics of skipped steps, pin modules in fp32.

        `rerun` recomputes the loss of the latest batch: it is used to diagnose failures before the precision changes,
        unless an earlier pass of the accumulation window failed. Code that opens its own autocast can be stepped down
        only with an attached model. Call it before or after compiling. Raises `InvalidRequestError` for a second model,
        and for a module to pin that the model does not have.
        """
        found = self._executor.model
        if found is not None:
            if not found.is_from_closure:
                raise InvalidRequestError("A model is attached already.", "Make another controller for another model.")
            self._executor.detach()
        self._ranks.note_device(model.parameters())
        self._executor.attach(AttachedModel(model, rerun, self._ranks.device))

    def detach(self) -> None:
        """Restore the attached model and the TF32 flags of a config as found, and `close`."""
        self._executor.detach()
        self.close()

    def open(self) -> None:
        """Handle SIGTERM by `on_signal` again after `close`. A new controller does so already."""
        if self._on_signal is not None and (self._end_signal is None or self._end_signal.is_closed):
            self._end_signal = EndSignal(self._on_signal, self._ranks)

    def close(self) -> None:
        """Report the last update, wait briefly for the sinks, and restore the handler of SIGTERM."""
        self._metrics.close()
        if self._end_signal is not None:
            self._end_signal.close()

    @property
    def config(self) -> AmpConfig:
        """Return the config in use, with the precision, batch size and accumulation steps of the current rung."""
        return self._executor.config

    def set_precision(self, name: Precision) -> None:
        """Switch to the rung of a precision at the end of the window. Raises `InvalidRequestError` if there is none."""
        self._policy.rung_of(name)
        self._executor.refuse_by_hand(name)
        self._request("set_precision", name)

    def disable(self) -> None:
        """Train in fp32 without loss scaling or checks, from the end of the window until `enable`.

        Raises `InvalidRequestError` if the loop or the model cannot be switched to fp32.
        """
        self._executor.refuse_by_hand("fp32")
        self._request("disable")

    def enable(self) -> None:
        """Undo `disable`, at the end of the window."""
        self._request("enable")

    def status(self) -> Status:
        """Return the status of the run. Synchronizes with the device.

        With several ranks, one of which may ask alone, it only counts verdicts that all ranks have acted on.
        """
        if not self._ranks.are_many:
            self.synchronize()
        return self._executor.status()

    def epoch(self, number: int) -> None:
        """Set the number of the epoch that begins, for `status`, the run log and the sinks.

        Raises `InvalidRequestError` for anything but a whole number from 0.
        """
        try:
            self._metrics.epoch = msgspec.convert(int(operator.index(number)), Whole)
        except (TypeError, msgspec.ValidationError) as error:
            raise InvalidRequestError(
                f"The epoch is {number!r}; it must be a whole number from 0.", "Call controller.epoch(int(epoch))."
            ) from error

    def reset_stats(self) -> None:
        """Restart the counts of `status`; the run log and the sinks keep counting."""
        self.status()  # act on the pending verdicts that this rank may read alone
        self._metrics.reset()

    def save_stats(self, path: str | os.PathLike[str]) -> None:
        """Write `status()` as a JSON document, atomically."""
        write_status(self.status(), path)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in plain types, with GradScaler's keys on top. Synchronizes with the device.

        Pending verdicts are saved too, and acted on after loading, so one rank may save alone. Inside an accumulation
        window also save the gradients: they belong to the model, not to the controller.
        """
        return checkpoint.save(self._executor, self._check.window)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved state: a controller's, a plain GradScaler's, or ``{}``, which a disabled one saves.

        Raises `FormatError` for anything else, for impossible values (a negative count) and for a state of other rungs,
        and `InvalidRequestError` for a loss scale that cannot work (0, infinite). Nothing is changed then.
        """
        saved = checkpoint.read(self._executor, state_dict)
        self.synchronize()
        checkpoint.restore(self._executor, self._check.window, saved)
        self._is_in_window = self._check.window.num_passes > 0

"""Executor of the policy's actions: diagnoses failures, moves between rungs, stops the run, and records each move.

The way of an overflow: `PrecisionController.step` has `GradientCheck` find it and skips the step; `update` passes the
verdict to `Executor.end_update`; `Policy.observe` decides on an action, which waits among the `pending_requests` until
the accumulation window is over; `Executor._act` has it diagnosed if the batch can be rerun, and `_move` steps down.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError, NotPrecisionError
from autotune_amp.core.hardware import Capability
from autotune_amp.core.precisions import Precision, autocast_precision
from autotune_amp.dimensions.attention import FUSED_BACKENDS, forget_compiled_attention, switch_off, switch_on
from autotune_amp.hardware import cuda
from autotune_amp.hardware.device import load_device_module
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import computes_in_half
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import parameters_of
from autotune_amp.runtime import diagnosis
from autotune_amp.runtime.metrics import MetricsRecorder, held_memory_bytes
from autotune_amp.runtime.model import AttachedModel
from autotune_amp.runtime.optimizers import KnownOptimizers, refuse_half_parameters
from autotune_amp.runtime.policy import Action, DiagnosisResult, Policy, RecordKind, Signal
from autotune_amp.runtime.scaler import BAD_LOSS, CLEAN, OVERFLOW, LossScaler, Ranks, UpdateResult
from autotune_amp.runtime.status import MoveRecord, Status

log = logging.getLogger("autotune_amp.runtime")

_HARMLESS = ("by_hand", "promotion", "rescale")  # kinds of moves that are logged as information, not as warnings
OnDemotion = Literal["continue", "checkpoint_and_stop"]
RequestKind = Literal["act", "give_up", "set_precision", "disable", "enable"]

_MISSING_VARIABLES = (
    "The config was measured with variables that this process was started without, so it may be slower. "
    "Before Python starts: export %s"
)
_NOTHING_PINNED = "Modules are to be pinned in fp32; without controller.attach(model) nothing is pinned."
_START_AGAIN = "Save a checkpoint with the controller's state_dict() and start again with the error's config."
_OR_SPLIT = " Over controller.windows(loader) a loop goes on, with the loader's batches split."
_ADVISORY = (
    "The controller is advisory: the loop uses neither controller.autocast() nor controller.attach(model), so it "
    "scales and guards, but cannot step the precision down; where steps fail for good it stops the run."
)
_BAD_WEIGHTS = (
    "No step can fix them: load a checkpoint from before. They were loaded so, or a step was taken that the "
    "controller did not check (guard=False, disable(), an optimizer stepped without it)."
)


class Executor:
    """Executor of the policy's actions. After each move the loss scale, the TF32 flags and the model follow the rung.

    With `halts` off a stop is only recorded, and failing steps go on being skipped.
    """

    def __init__(
        self,
        config: AmpConfig,
        policy: Policy,
        scaler: LossScaler,
        metrics: MetricsRecorder,
        ranks: Ranks,
        *,
        guards: bool,
        halts: bool,
        on_demotion: OnDemotion,
    ) -> None:
        self.own_config = config
        self.plans = config.plans  # for the rungs below the config's own
        self.policy = policy
        self.precision: Precision = config.precision  # precision that the loop runs in
        self.is_checking = True  # whether gradients are checked
        self.is_off = False
        policy.can_move = False  # until the loop gives a way to change its precision
        self.uses_own_autocast = False  # whether the loop uses the controller's autocast
        self.uses_windows = False  # whether the loop goes over `windows`, which split its batches as a plan says
        self.is_validating = False  # in a precision of its own, during which no move may be made
        self.model: AttachedModel | None = None
        self.history: list[MoveRecord] = []
        self.listeners: list[Callable[[MoveRecord], object]] = []
        self.on_step: list[tuple[Callable[[], object], int | None]] = []  # callback and optimizer number, None for any
        self.excluded_attention: tuple[str, ...] = ()  # backends that gave non-finite numbers
        self._switched_off: set[str] = set()  # those of them that the process allowed
        self.pins_to_come = config.pinned_modules  # until a model is attached
        self.pinned_model: weakref.ref[nn.Module] | None = None  # the model detached last, whose pins are to come
        self.scaler = scaler
        self.metrics = metrics
        self.ranks = ranks
        self._guards = guards
        self._halts = halts
        self._on_demotion = on_demotion
        self._own_flags = torch_state.capture() if config.as_found else None  # the TF32 flags to keep
        self.pending_requests: list[tuple[RequestKind, str]] = []  # with a precision, for the end of the window
        self._action: Action | None = None  # pending action of the policy
        self.optimizers = KnownOptimizers()
        self._forward = diagnosis.ForwardWatch()
        self._rerun_has_failed = False
        self._computes_in_half = False  # weights or quantized layers outside of autocast too
        self._culprit: str | None = None
        for plan in self.plans:
            if plan.precision == "bf16" and ranks.device.type == "cuda" and not cuda.is_bf16_native(ranks.device):
                policy.withdraw("bf16", "this GPU only emulates it")
        missing = {name: value for name, value in config.environment.items() if os.environ.get(name) != value}
        if missing:
            log.warning(_MISSING_VARIABLES, " ".join(f"{name}={value}" for name, value in missing.items()))

    @property
    def is_advisory(self) -> bool:
        """Whether the loop gives no way to change its precision."""
        return not self.policy.can_move

    @property
    def pinned(self) -> tuple[str, ...]:
        """Return the modules that are pinned in fp32, or will be once a model is attached."""
        return self.pins_to_come if self.model is None else self.model.pinned

    @property
    def config(self) -> AmpConfig:
        """Return the config in use: the current rung's precision and batch size, and the rungs below."""
        rung = self.policy.rung
        if rung == 0 and self.pinned == self.own_config.pinned_modules and not self.excluded_attention:
            return self.own_config
        plan = self.plans[rung - 1] if rung else self.own_config
        own = self.own_config.attention
        return msgspec.structs.replace(
            self.own_config,
            precision=plan.precision,
            as_found=plan.as_found,
            fp8_recipe=plan.fp8_recipe,
            batch_size=plan.batch_size,
            accumulation_steps=plan.accumulation_steps,
            loss_scale=self.policy.loss_scale if MODES[plan.precision].takes_scaler else None,
            fallback=tuple(self.plans[rung:]),
            pinned_modules=self.pinned,
            attention="as_found" if own in self.excluded_attention else own,
        )

    def apply(self) -> None:
        """Set flags, scaler, model and metrics to the policy's current rung."""
        self.precision = "fp32" if self.is_off else self.policy.precision
        self.metrics.begin_rung(self.precision, len(self.plans) + 1 if self.is_off else self.policy.rung)
        if self._own_flags is not None and self.precision == self.own_config.precision and not self.is_off:
            torch_state.apply_fp32_flags(self._own_flags)
        else:
            torch_state.set_flags(self.precision)
        self.exclude_attention()
        torch.clear_autocast_cache()
        self.scaler.is_scaling = self.policy.is_scaling and not self.is_off
        self.is_checking = not self.is_off and (self._guards or self.scaler.is_scaling)
        self._force_model()
        self._begin_verifying()
        self.scaler.write(is_forced=True)

    def exclude_attention(self, names: Sequence[str] = ()) -> None:
        """Switch the attention backends off that gave non-finite numbers, `names` too, until `detach`."""
        switch_on(self._switched_off)
        self.excluded_attention = tuple(dict.fromkeys((*self.excluded_attention, *names)))
        self._switched_off = switch_off(self.excluded_attention)
        if names:
            forget_compiled_attention()

    def use_own_autocast(self) -> None:
        """Note that the loop uses the controller's autocast, so the precision can be changed."""
        if not self.uses_own_autocast:
            self.uses_own_autocast = True
            self.policy.can_move = True
            self._force_model()

    def _force_model(self) -> None:
        """Force the model into the current precision, unless the loop uses the controller's autocast."""
        if self.model is not None:
            self.model.run_fp8(self.own_config.fp8_recipe if self.precision == "fp8" else None)
            is_as_written = self.uses_own_autocast or self.precision == self.own_config.precision
            self.model.run_in(None if is_as_written else self.precision)

    def _begin_verifying(self) -> None:
        if self.model is not None:
            self.model.is_verifying = False
            if not (self.uses_own_autocast or self.is_advisory):
                self.model.begin_verifying()

    def _cannot_move(self, model: AttachedModel) -> bool:
        """Return whether the model's layers were seen to run in another precision than the one they are forced into."""
        model.is_verifying = False
        # Layers that the user or a pin keeps in fp32 are fine.
        wanted = {autocast_precision(self.precision), "fp32"}
        is_elsewhere = not model.observer.precisions <= wanted or (model.is_forced and not model.can_be_forced)
        if not self.ranks.any(is_elsewhere):
            return False
        if not model.is_forced:  # the loop's own precision differs from the config's
            model.run_in(self.precision)
            self._begin_verifying()
            return False
        return True

    @cached_property
    def _capabilities(self) -> dict[Precision, Capability]:
        device = self.ranks.device
        return load_device_module(device.type).capabilities(str(device))

    def status(self) -> Status:
        """Return the status of the run as far as the host knows."""
        model, metrics = self.model, self.metrics
        totals = metrics.totals.since(metrics.totals_at_reset)
        num_amp_steps = sum(num for name, num in totals.num_steps.items() if MODES[name].uses_autocast)
        return Status(
            **metrics.current_readings(totals),
            is_enabled=not self.is_off,
            is_advisory=self.is_advisory,
            pinned_modules=self.pinned,
            excluded_attention=self.excluded_attention,
            num_updates=totals.num_updates,
            skip_share=totals.num_skips / max(1, totals.num_updates),
            amp_share=num_amp_steps / max(1, totals.num_all_steps),
            steps_by_precision=totals.num_steps,
            seconds_by_precision=totals.seconds,
            capabilities=self._capabilities,
            throttling_reasons=metrics.gpu_sensors.slowdowns or (),
            forward_max=model.forward_max() if model else None,
            history=tuple(self.history),
        )

    def attach(self, model: AttachedModel) -> None:
        """Attach a model: withdraw precisions that it cannot run in, and pin the config's modules.

        Raises `InvalidRequestError` for a config in fp8 if no layer can run in it, and for a missing module to pin.
        """
        own = self.own_config
        if self.pinned_model is not None and self.pinned_model() is not model.model:  # its modules have other names
            self.pins_to_come = own.pinned_modules
        try:
            if own.precision == "fp8" and (why_not := model.why_not_fp8(own.fp8_recipe)) is not None:
                raise InvalidRequestError(
                    f"The config's fp8 cannot be had on this model: {why_not}.", "Attach the model that was searched."
                )
            model.pin(self.pins_to_come)
        except InvalidRequestError:
            model.detach()
            raise
        self.model = model
        self.policy.can_move = True
        self.policy.can_rerun = model.rerun is not None
        if computes_in_half(model.model):
            self._withdraw_without_autocast()
        self.apply()

    def _withdraw_without_autocast(self) -> None:
        """Withdraw the precisions without autocast, whose fp32 activations half-precision weights cannot multiply."""
        self._computes_in_half = True
        for name, its in MODES.items():
            if not its.uses_autocast:
                self.policy.withdraw(
                    name, "the model's weights or quantized layers in half precision would not multiply"
                )

    def use_rerun(self, closure: Callable[[], Tensor] | None) -> None:
        """Use `closure`, or none, for later diagnoses. Once a closure has failed there are none."""
        if self.model is not None:
            self.model.rerun = closure
            self.policy.can_rerun = closure is not None and not self._rerun_has_failed

    def detach(self) -> None:
        """Restore the model, and the TF32 flags if the config keeps the caller's own."""
        self._forward.end()
        switch_on(self._switched_off)
        if self.model is not None:
            if self._action is not None and self._action.kind in ("diagnose", "probe"):  # which need the model
                self.drop_action()
            self.pins_to_come, self.pinned_model = self.model.pinned, weakref.ref(self.model.model)
            self.model.detach()
            self.model = None
            self.policy.can_rerun = False
            self.policy.can_move = self.uses_own_autocast
        if self._own_flags is not None:
            torch_state.apply_fp32_flags(self._own_flags)

    def autocast(self) -> AbstractContextManager[object]:
        """Return a new context for a forward pass in the current precision."""
        return nullcontext() if self.is_off else torch_state.autocast(self.precision, self.ranks.device.type)

    @contextmanager
    def running_in(self, precision: Precision | None) -> Iterator[None]:
        """Run a forward pass in `precision`, whatever the loop runs in; with None in the current precision."""
        if precision is None:
            with self.autocast():
                yield
            return
        if precision not in MODES:
            raise InvalidRequestError(
                f"precision is {precision!r}; it must be one of {', '.join(MODES)}.", "Leave it out for the run's own."
            )
        model, own, flags = self.model, self.precision, torch_state.capture()
        was_validating, self.is_validating = self.is_validating, True
        torch_state.set_flags(precision)
        try:
            if model is not None:
                self.precision = precision
                self._force_model()
            with torch_state.autocast(precision, self.ranks.device.type):
                yield
        finally:
            self.is_validating = was_validating
            torch_state.apply_fp32_flags(flags)
            if model is not None:
                self.precision = own
                self._force_model()

    def end_window(self, skipped: bool | Tensor) -> None:
        """Update the model's running statistics and observers after a window, whose step may be `skipped`."""
        model = self.model
        if model is None:
            return
        if model.is_verifying and self._cannot_move(model):
            self.pending_requests.append(("give_up", ""))
        model.end_window(skipped)
        model.observer.is_sampling = self.metrics.wants_sample or model.is_verifying

    def end_update(self, result: UpdateResult) -> None:
        """Pass the result of an update to the policy, the metrics and the callbacks, in order and once each."""
        if not result.verdicts:
            return
        worst, is_checking = result.worst, self.is_checking
        # Beside infinite entries all others are negligible.
        share = self.policy.usable_lost_share(result.lost_share) if worst == CLEAN else None
        result = result._replace(lost_share=share)
        self.metrics.begin_update(result, is_overflow=worst == BAD_LOSS and self._forward_overflowed())
        if worst == CLEAN:
            self._forward.end()
            self._culprit = self._culprit if self.policy.can_rerun else None  # a rerun starts each search anew
        if self.is_off:
            self.policy.num_updates += 1  # nothing is checked, but updates go on
        else:
            seen_loss = None if worst == BAD_LOSS else result.loss
            scale_before = self.policy.scale.scale
            action = self.policy.observe(Signal(worst == OVERFLOW, worst == BAD_LOSS, result.lost_share, seen_loss))
            self.metrics.count_scaler_update(scale_before)
            if action is not None and self._action is None:  # one at a time, before later requests of the user
                self._action = action
                self.pending_requests.insert(0, ("act", ""))
        for callback, number in self.on_step:  # last, since callbacks may save a checkpoint
            if CLEAN in result.verdicts.values() if number is None else result.verdicts.get(number) == CLEAN:
                callback()
        self.metrics.end_update(result, knows_loss=is_checking)

    def _forward_overflowed(self) -> bool:
        """Return whether the forward pass overflows on any rank in this burst of non-finite losses."""
        seen = None if self.policy.can_rerun else self._forward.saw_bad_loss()  # a rerun shows more
        culprit, *_ = *self.ranks.union(() if seen is None else (seen,)), None
        self._culprit = culprit or self._culprit
        return culprit is not None

    def drop_action(self) -> None:
        """Forget the policy's action that waits for the end of the window."""
        self._action = None
        self.pending_requests[:] = [request for request in self.pending_requests if request[0] != "act"]

    def carry_out_next_request(self) -> None:
        """Carry out the first of `pending_requests`. Raises subclasses of `TrainingStoppedError`."""
        what, name = self.pending_requests.pop(0)
        if what == "act":
            action, self._action = self._action, None
            while action is not None:
                action = self._act(action)
        elif what == "give_up":
            self._give_up_moving()
        elif what == "set_precision":
            self._move_by_hand(cast("Precision", name), "asked for")
        else:
            self._turn(off=what == "disable")

    def _act(self, action: Action) -> Action | None:
        """Carry out an action and return the action that follows from it, or None."""
        if action.kind in ("diagnose", "advise", "demotion", "not_precision") and self._stop_for_weights(action):
            return None
        if action.kind in ("diagnose", "probe"):
            try:
                return self._diagnose(action) if action.kind == "diagnose" else self._probe(action)
            except InvalidRequestError as error:  # an error of the closure must not end a run that works without it
                log.error("%s The run goes on without it: %s", error.message, error.next_step, exc_info=error)
                self._rerun_has_failed, self.policy.can_rerun = True, False
                return (
                    self.policy.answer_diagnosis(action.reason, DiagnosisResult(True))
                    if action.kind == "diagnose"
                    else None
                )
        if action.kind == "advise":
            self._advise(action.reason)
        elif action.kind == "warn":
            log.warning("%s", action.reason)
        elif action.kind == "stop":
            self._stop(action)
        else:
            return self._move(action)
        return None

    def _move(self, move: Action) -> Action | None:
        policy, before, reason = self.policy, self.policy.precision, move.reason
        stops = move.kind == "demotion" and self._on_demotion == "checkpoint_and_stop"
        next_step = _START_AGAIN
        if move.kind == "demotion":
            plan = self.plans[move.rung - 1]
            if self.is_advisory:
                self._advise(reason)
                return None
            if reasons := self.ranks.union([why for why in (self._why_not(plan),) if why is not None]):
                return policy.refuse(move, reasons[0])
            if self._needs_other_batches(plan):
                reason += f"; batch size {plan.batch_size} with {plan.accumulation_steps} accumulation steps fits"
                if not (stops or self.uses_windows):
                    stops, next_step = True, _START_AGAIN + _OR_SPLIT
        if move.kind == "pin":
            assert self.model is not None  # a pin follows from a diagnosis, which needs a model
            self.model.pin(move.modules)
        if move.kind == "attention":
            self.exclude_attention(move.backends)
            reason = f"{reason}; finite with {_backends_off(move.backends)} in attention"
        follows = policy.confirm(move)
        self.apply()
        self._note(cast("RecordKind", move.kind), policy.precision, reason, before)
        if stops:
            told = f"The precision was stepped down from {before} to {policy.precision}: {reason}."
            raise DemotedError(told, next_step, self.config)
        return follows

    def _needs_other_batches(self, plan: FallbackPlan) -> bool:
        own = self.own_config
        return (plan.batch_size, plan.accumulation_steps) != (own.batch_size, own.accumulation_steps)

    def raise_if_batches_differ(self, num_passes: int) -> None:
        """Raise `DemotedError` after a window of `num_passes` if the current precision was measured with other batches.

        So it is after a move by hand, or a checkpoint of such a precision, unless the loop took over its batches too.
        """
        rung = 0 if self.is_off or self.uses_windows else self.policy.rung
        plan = self.plans[rung - 1] if rung else None
        if plan is not None and self._needs_other_batches(plan) and num_passes != plan.accumulation_steps:
            raise DemotedError(
                f"The precision is now {plan.precision}, which was measured with batch size {plan.batch_size} and "
                f"{plan.accumulation_steps} accumulation steps; the loop keeps the config's batch size of "
                f"{self.own_config.batch_size}.",
                _START_AGAIN + _OR_SPLIT,
                self.config,
            )

    def _advise(self, reason: str) -> None:
        """Report a step-down that the controller cannot make, and how the loop could allow it."""
        policy = self.policy
        below = [name for name in policy.rungs[policy.rung + 1 :] if name not in policy.withdrawn]
        policy.advise()
        told = _advice(policy, reason, self._culprit, below, is_hidden=self._forward.is_hidden)
        self._note("advice", below[0] if below else policy.precision, told)

    def _stop_for_weights(self, action: Action) -> bool:
        """Stop if weights are not finite already: neither precision nor data is at fault. Return whether it did."""
        names = self.ranks.union(self.optimizers.bad_weights(None if self.model is None else self.model.model))
        if not names:
            return False
        self.policy.decline()
        self._stop(
            Action("stop", f"{action.reason}, and the weights are not finite already: {_shortened(names)}"),
            _BAD_WEIGHTS,
        )
        return True

    def _why_not(self, plan: FallbackPlan) -> str | None:
        """Return why this rank cannot run the plan, or None if it can."""
        if (reason := _why_not_in_memory(plan, self.ranks.device)) is not None:
            return reason
        if self._breaks_script(plan.precision):
            return f"the model holds TorchScript modules, whose compiled code keeps to {self.own_config.precision}"
        return None

    def _breaks_script(self, precision: Precision) -> bool:
        dtypes = {MODES[name].autocast_dtype for name in (precision, self.own_config.precision)} - {None}
        return len(dtypes) > 1 and self.model is not None and self.model.holds_script

    def _rerunner(self) -> diagnosis.Rerunner:
        assert self.model is not None and self.model.rerun is not None  # noqa: PT018 # else never called
        self.model.observer.is_sampling = False  # activations of a rerun in another precision are not the run's
        recipe = self.own_config.fp8_recipe
        return diagnosis.Rerunner(self.model.given, self.model.rerun, self.policy.precision, self.ranks, recipe)

    def _withdraw_failed(self, rerunner: diagnosis.Rerunner) -> None:
        for precision, why in rerunner.failed.items():
            self.policy.withdraw(precision, why)

    def _diagnose(self, asked: Action) -> Action | None:
        policy, model = self.policy, self.model
        assert model is not None  # without a model no diagnosis is requested
        self._forward.end()
        rerunner = self._rerunner()
        finding = diagnosis.diagnose(
            rerunner,
            [p for p in policy.rungs[policy.rung + 1 :] if p not in policy.withdrawn and not self._breaks_script(p)],
            policy.scale_before_burst if policy.is_scaling else 1.0,
            finds_pins=not policy.has_pinned,
            is_whole=not self.ranks.any(model.num_window_passes > 1),
            can_run_fp32=not self._computes_in_half,
        )
        self._withdraw_failed(rerunner)
        self._culprit = finding.culprit
        if finding.is_precision:
            self.metrics.explain_by_overflow()
        log.debug("%s; diagnosis: %s", asked.reason, finding)
        return policy.answer_diagnosis(asked.reason, finding)

    def _probe(self, probe: Action) -> Action | None:
        faster = self.policy.rungs[probe.rung]
        rerunner = self._rerunner()
        done = rerunner.run(faster, probe.scale if MODES[faster].takes_scaler else 1.0)
        self._withdraw_failed(rerunner)
        return self.policy.probed(probe, is_finite=done.is_finite)

    def _stop(self, stop: Action, next_step: str | None = None) -> None:
        reason = stop.reason + (f"; it begins in {self._culprit}" if self._culprit and next_step is None else "")
        self._note("stop", self.policy.precision, reason)
        self._forward.end()
        if not self._halts:
            return
        self.policy.decline(num_quiet=0)  # a run that goes on anyway is judged anew
        what = f"Training was stopped in {self.policy.precision}: {reason}."
        if stop.is_precision:
            on = "Search again for fallback plans that fit, or train in fp32 on smaller batches."
            raise NoRungFitsError(what, _way_out(self.policy) if self.is_advisory else on)
        halt = "Look at data and learning rate. PrecisionController(..., halt=False) skips such steps for ever instead."
        raise NotPrecisionError(what, next_step or halt)

    def _give_up_moving(self) -> None:
        """Stop changing the precision, since the loop ignores it; keep scaling and checking."""
        self.policy.can_move = False
        why = "an autocast inside the attached model, or around another method than its forward, keeps its precision. "
        if self.model is not None and not self.model.can_be_forced:
            why = "the attached model is a TorchScript module, whose autocast nothing inside of it can change. "
        way_out = "Use controller.autocast(), or attach the module that the autocast wraps and the loop calls"
        self._move_by_hand(self.own_config.precision, why + way_out, "advice")

    def register_optimizer(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer before its first step; log or raise problems that would show up later."""
        self._refuse_fp8_without_model(self.precision)
        if number in self.optimizers:
            return
        self.ranks.note_device(parameters_of(optimizer))
        refuse_half_parameters(optimizer, self.precision)
        if any(map(torch_state.is_half, parameters_of(optimizer))):
            self._withdraw_without_autocast()
        if not self.optimizers:
            last = self.history[-1] if self.history else None
            log.info("%s", _introduction(self.policy, self.scaler, last, self.ranks.device, checks=self.is_checking))
            if self.pins_to_come and self.model is None:
                log.warning(_NOTHING_PINNED)
            if self.is_advisory and MODES[self.precision].uses_autocast:
                log.warning(_ADVISORY)
        self.optimizers.add(number, optimizer)
        self.metrics.num_gradient_entries = self.optimizers.num_gradient_entries()

    def refuse_by_hand(self, name: Precision) -> None:
        """Raise `InvalidRequestError` for a precision that the loop or the model cannot be switched to."""
        if not self.optimizers and self.model is None:
            return  # it is not known yet how the loop is written
        self._refuse_fp8_without_model(name)
        if self.is_advisory:
            raise InvalidRequestError(
                f"The precision cannot be changed to {name}: the controller is advisory.",
                "Use controller.autocast() around the forward pass, or controller.attach(model).",
            )
        if not MODES[name].uses_autocast and self._computes_in_half:
            raise InvalidRequestError(
                f"The model cannot run in {name}: weights or quantized layers are in half precision.",
                "Stay in bf16 or fp16, or convert weights with model.float().",
            )

    def _refuse_fp8_without_model(self, name: Precision) -> None:
        if name == "fp8" and self.model is None:
            raise InvalidRequestError(
                "The config's fp8 is layers of the model's, and no model is attached to the controller.",
                "Call controller.attach(model) before the first step.",
            )

    def _move_by_hand(self, name: Precision, reason: str, kind: RecordKind = "by_hand") -> None:
        before = self.policy.precision
        self.policy.move_by_hand(name)
        self.apply()
        self._note(kind, name, reason, before)

    def _turn(self, *, off: bool) -> None:
        """Switch the controller off, to fp32 without scaling and checks, or on again in the policy's rung."""
        if off == self.is_off:
            return
        before = self.precision
        self.is_off = off
        self.apply()
        self._note("by_hand", self.precision, "disabled" if off else "enabled", before)

    def _note(self, kind: RecordKind, after: Precision, reason: str, before: Precision | None = None) -> None:
        policy = self.policy
        record = MoveRecord(policy.num_updates, kind, before or policy.precision, after, reason, self.config)
        self.history.append(record)
        level = logging.INFO if kind in _HARMLESS else logging.WARNING
        log.log(level, "%s at update %d, %s -> %s: %s", kind, record.update, record.before, after, reason)
        self.metrics.log_move(record)
        for listener in self.listeners:
            listener(record)


# -- whether a fallback fits this device -------------------------------------------------------------------------------


def _why_not_in_memory(plan: FallbackPlan, device: torch.device) -> str | None:
    """Return why the plan's measured peak does not fit into the device's memory, or None if it does."""
    needed = plan.peak_memory_bytes or 0
    available = _available_memory_bytes(device) if needed else 0
    if needed <= available:
        return None
    return f"it takes {needed / 2**30:.2f} GiB and {available / 2**30:.2f} GiB can be had"


def _available_memory_bytes(device: torch.device) -> int:
    """Return the memory that this process may use on the device in total: the free memory plus its own."""
    return load_device_module(device.type).memory(str(device)).available + held_memory_bytes(device)


# -- messages to the user ----------------------------------------------------------------------------------------------


def _introduction(
    policy: Policy, scaler: LossScaler, last: MoveRecord | None, device: torch.device, *, checks: bool
) -> str:
    """Return a line with the precision, the reason for it, and how failing steps are handled."""
    why = "as its config says" if last is None else f"since update {last.update}: {last.reason}"
    scale = f", loss scale {scaler.target:g}" if scaler.is_scaling else ""
    guarded = "steps that are not finite are skipped" if checks else "nothing is guarded"
    below = [name for name in policy.rungs[policy.rung + 1 :] if name not in policy.withdrawn]
    then = f"; where they repeat, down to {' or '.join(below)}" if below and checks else ""
    how = "rerunning the batch says why" if policy.can_rerun else "without a rerun, on trial"
    diagnosis = f" ({how})" if then else ""
    return f"Training in {policy.precision} on {device}, {why}{scale}; {guarded}{then}{diagnosis}."


def _advice(
    policy: Policy, reason: str, culprit: str | None, below: Sequence[Precision], *, is_hidden: bool = False
) -> str:
    """Return the advice to use a lower precision that the controller cannot set, with the way to allow it.

    `is_hidden`: compiled code does not show whether the forward pass overflows.
    """
    where = f", first in {culprit}" if culprit and culprit not in reason else ""
    if is_hidden and not where:
        where = " (compiled code does not show where: overflows of its forward pass are counted as bad batches)"
    should = below[0] if below else "a fallback"
    told = f"{reason}{where}. The precision should be {should}, but the loop gives no way to change it from here."
    return f"{told} {_way_out(policy)}"


def _way_out(policy: Policy) -> str:
    """Return which lines to change so that the controller can change the precision."""
    has_fallback = len(policy.rungs) > policy.rung + 1
    fallback = "" if has_fallback else ' Name fallbacks, too: AmpConfig(..., fallback=["bf16", "fp32"]).'
    return (
        "Change two lines: `with controller.autocast():` in place of torch.autocast(...) around the forward pass, and "
        "controller.attach(model, rerun=lambda: ...) before the loop, with what computes the loss of the latest "
        f"batch, to have failures diagnosed.{fallback}"
    )


def _backends_off(names: Sequence[str]) -> str:
    """Return the names of the attention backends that were switched off, as in "cuDNN off"."""
    return f"{' and '.join(FUSED_BACKENDS[name] for name in names)} off"


def _shortened(names: Sequence[str]) -> str:
    """Return the first three names, and the number of others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

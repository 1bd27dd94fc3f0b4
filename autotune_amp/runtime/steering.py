"""Carries out what the policy asks for: diagnoses, moves between rungs, stops; and keeps the record of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor

from autotune_amp.core.config import FP16_MAX, AmpConfig, DemotedError, FallbackPlan, Precision
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError, NotPrecisionError
from autotune_amp.hardware import cuda
from autotune_amp.runtime import actions, diagnosis
from autotune_amp.runtime.actions import Action, Move
from autotune_amp.runtime.attachment import Attachment
from autotune_amp.runtime.batchnorm import SavedStatistics
from autotune_amp.runtime.policy import Policy
from autotune_amp.runtime.ranks import Ranks
from autotune_amp.runtime.status import MoveRecord, available_memory_bytes

log = logging.getLogger("autotune_amp.runtime")

OnDemotion = Literal["continue", "checkpoint_and_stop"]
MIN_SPEEDUP = 1.05  # less than that is not worth the risk of going back up
MAX_FORWARD = FP16_MAX / 8  # the largest activation with which fp16 is tried again
_KINDS: dict[type, str] = {
    actions.Demote: "demotion",
    actions.Promote: "promotion",
    actions.Revert: "revert",
    actions.Pin: "pin",
    actions.Rescale: "rescale",
    actions.Blame: "not_precision",
}


class Steering:
    """The policy's hands. `applied` is called after every move: the rung or the loss scale may be another.

    `halts` off: what would stop the run is recorded, and its steps go on being skipped.
    """

    def __init__(
        self,
        config: AmpConfig,
        device: torch.device,
        ranks: Ranks,
        *,
        halts: bool,
        promotes: bool,
        on_demotion: OnDemotion,
        max_slowdown: float | None,
    ) -> None:
        own = FallbackPlan(
            precision=config.precision, batch_size=config.batch_size, accumulation_steps=config.accumulation_steps
        )
        self.own_config = config
        self.plans = (own, *config.plans)
        self.policy = Policy([plan.precision for plan in self.plans], config.loss_scale, promotes=promotes)
        self.attachment: Attachment | None = None
        self.is_advisory = True  # until the loop shows a way to change its precision
        self.applied: Callable[[], None] = lambda: None
        self.history: list[MoveRecord] = []
        self.listeners: list[Callable[[MoveRecord], object]] = []
        self.rung_seconds: dict[Precision, float] = {}
        self.device = device
        self.ranks = ranks
        self._halts = halts
        self._on_demotion = on_demotion
        self.pins_to_come = config.pinned_modules  # until a model is attached
        self._statistics_to_come: SavedStatistics | None = None
        self._culprit: str | None = None
        self._finite_in: tuple[Precision, ...] = ()  # by the latest diagnosis
        self._withdraw(max_slowdown)

    def _withdraw(self, max_slowdown: float | None) -> None:
        for plan in self.plans[1:]:
            if max_slowdown is not None and plan.slowdown is None:
                raise InvalidRequestError(
                    f"max_slowdown={max_slowdown} cannot be kept: the speed of {plan.precision} was not measured.",
                    "Use a config that a search recommended, or leave max_slowdown out.",
                )
            if max_slowdown is not None and plan.slowdown is not None and plan.slowdown > max_slowdown:
                self.policy.withdraw(plan.precision, f"{plan.slowdown:.2g} times slower, above {max_slowdown:g}")
            if plan.precision == "bf16" and self.device.type == "cuda" and not cuda.is_bf16_native(self.device):
                self.policy.withdraw("bf16", "this card only emulates it")

    @property
    def config(self) -> AmpConfig:
        """What the run uses now: the current rung's precision, batch size and accumulation, and the rungs below."""
        rung = self.policy.rung
        if rung == 0 and not (self.attachment and self.attachment.pinned):
            return self.own_config
        plan = self.plans[rung]
        return msgspec.structs.replace(
            self.own_config,
            precision=plan.precision,
            batch_size=plan.batch_size,
            accumulation_steps=plan.accumulation_steps,
            loss_scale=self.policy.loss_scale if plan.precision == "fp16" else None,
            fallback=tuple(self.plans[rung + 1 :]),
            pinned_modules=self.attachment.pinned if self.attachment else self.own_config.pinned_modules,
        )

    def attach(self, attachment: Attachment) -> None:
        """Use the model: what it cannot run is withdrawn, what the config pins is pinned."""
        self.attachment = attachment
        self.is_advisory = False
        self.policy.can_rerun = attachment.rerun is not None
        if attachment.has_frozen_half_weights:
            for name in ("fp32", "tf32"):
                self.policy.withdraw(name, "the model's frozen weights are in half precision and would not multiply")
        attachment.check_state(self.pins_to_come, self._statistics_to_come)
        attachment.load_state(self.pins_to_come, self._statistics_to_come)

    def load_model_state(self, pinned: Sequence[str], statistics: SavedStatistics | None) -> None:
        """Pin these modules and remember these statistics, once a model is attached where none is yet."""
        self.pins_to_come, self._statistics_to_come = tuple(pinned), statistics
        if self.attachment is not None:
            self.attachment.load_state(pinned, statistics)

    def act(self, action: Action | None) -> None:
        """Carry out `action` and what follows from it. Raises the errors of `TrainingStoppedError`."""
        while action is not None:
            if isinstance(action, actions.Diagnose):
                action = self._diagnose(action)
            elif isinstance(action, actions.Measure):
                action = self._measure(action)
            elif isinstance(action, actions.Probe):
                action = self._probe(action)
            elif isinstance(action, actions.Warn):
                log.warning("%s", action.reason)
                action = None
            elif isinstance(action, actions.Stop):
                self._stop(action)
                action = None
            else:
                action = self._move(action)

    def _move(self, move: Move) -> Action | None:
        if isinstance(move, actions.Demote):
            if self.is_advisory:
                self.policy.decline()
                self._note("advice", self.plans[move.rung].precision, self._advice(move))
                return None
            reason = self._why_not(self.plans[move.rung])
            if reasons := self.ranks.union([reason] if reason else []):
                finite_in = None if move.is_tentative else self._finite_in
                return self.policy.refuse(move, reasons[0], finite_in)
        if isinstance(move, actions.Pin):
            assert self.attachment is not None  # a pin comes from a diagnosis
            self.attachment.pin(move.modules)
        before = self.policy.precision
        follows = self.policy.confirm(move)
        self.applied()
        self._note(_KINDS[type(move)], self.policy.precision, move.reason + self._batch_change(move), before)
        if isinstance(move, actions.Demote) and self._on_demotion == "checkpoint_and_stop":
            raise DemotedError(
                f"The precision was stepped down from {before} to {self.policy.precision}: {move.reason}.",
                "Save a checkpoint with the controller's state_dict() and start again with the error's config.",
                self.config,
            )
        return follows

    def _batch_change(self, move: Move) -> str:
        own, plan = self.plans[0], self.plans[self.policy.rung]
        is_same = (plan.batch_size, plan.accumulation_steps) == (own.batch_size, own.accumulation_steps)
        if is_same or not isinstance(move, actions.Demote):
            return ""
        return f"; batch size {plan.batch_size} with {plan.accumulation_steps} accumulation steps is what fits"

    def _advice(self, move: actions.Demote) -> str:
        wanted = self.plans[move.rung].precision
        return f"{move.reason}. The precision should be {wanted}, but the loop gives no way to change it from here"

    def _why_not(self, plan: FallbackPlan) -> str | None:
        if plan.peak_memory_bytes is None:
            return None  # named by hand: taken at its word
        available = available_memory_bytes(self.device)
        if plan.peak_memory_bytes <= available:
            return None
        return f"it takes {plan.peak_memory_bytes / 2**30:.2f} GiB and {available / 2**30:.2f} GiB can be had"

    def _what_to_rerun(self) -> tuple[Attachment, Callable[[], Tensor]]:
        assert self.attachment is not None and self.attachment.rerun is not None  # noqa: PT018 # else never asked for
        self.attachment.observer.is_sampling = False  # a rerun in another precision says nothing of the run
        return self.attachment, self.attachment.rerun

    def _diagnose(self, asked: actions.Diagnose) -> Action | None:
        attachment, rerun = self._what_to_rerun()
        policy = self.policy
        lower = [
            plan.precision
            for index, plan in enumerate(self.plans)
            if index > policy.rung and plan.precision not in policy.withdrawn
        ]
        try:
            finding = diagnosis.diagnose(
                attachment.given,
                rerun,
                current=policy.precision,
                lower=lower,
                loss_scale=policy.scale_before_burst if policy.is_scaling else 1.0,
                device_type=self.device.type,
                already_pinned=policy.has_pinned,
                is_whole=not self.ranks.any(attachment.num_window_passes > 1),
                can_run_fp32=not attachment.has_frozen_half_weights,
                agree=self.ranks.any,
                gather=self.ranks.union,
            )
        except InvalidRequestError as error:  # of the closure; it must not end a run that goes on without it
            log.error("%s The run goes on without it: %s", error.message, error.next_step, exc_info=error)
            policy.can_rerun = False
            return policy.judge(asked.reason, reproduced=True, is_precision=None, finite_in=())
        self._culprit, self._finite_in = finding.culprit, finding.finite_in
        log.warning("%s; diagnosis: %s", asked.reason, finding)
        return policy.judge(
            asked.reason + (f", first in {finding.culprit}" if finding.culprit else ""),
            reproduced=finding.reproduced,
            is_precision=finding.is_precision,
            finite_in=finding.finite_in,
            pins=finding.pins,
        )

    def _measure(self, asked: actions.Measure) -> Action | None:
        attachment, rerun = self._what_to_rerun()
        lost_share = diagnosis.flushed_share(
            attachment.given,
            rerun,
            loss_scale=self.policy.scale.scale,
            device_type=self.device.type,
            agree=self.ranks.any,
        )
        return self.policy.judge_underflow(asked.reason, -self.ranks.least(-lost_share))

    def _probe(self, probe: actions.Probe) -> Action | None:
        attachment, rerun = self._what_to_rerun()
        faster, here, timed = self.plans[probe.rung].precision, self.policy.precision, self.rung_seconds
        speedup = self.ranks.least(timed[here] / timed[faster] if {here, faster} <= set(timed) else 0.0)
        if not speedup:
            slower, quicker = (self.plans[rung].slowdown if rung else 1.0 for rung in (self.policy.rung, probe.rung))
            speedup = self.ranks.least(slower / quicker if slower and quicker else 0.0)
        result = diagnosis.probe(
            attachment.given,
            rerun,
            precision=faster,
            loss_scale=probe.scale if faster == "fp16" else 1.0,
            device_type=self.device.type,
            agree=self.ranks.any,
        )
        is_small = not self.ranks.any(faster == "fp16" and not result.forward_max < MAX_FORWARD)
        reason = (
            f"{self.policy.clean_run} clean steps; {faster} is {speedup:.2f} times as fast, "
            f"{'finite' if result.is_finite else 'not finite'} at scale {probe.scale:g}, "
            f"largest activation {-self.ranks.least(-result.forward_max):.3g}"
        )
        fits = result.is_finite and is_small and speedup > MIN_SPEEDUP
        if not fits:
            log.info("no promotion: %s", reason)
        return self.policy.probed(probe, fits=fits, reason=reason)

    def _stop(self, stop: actions.Stop) -> None:
        culprit = self._culprit or self._bad_parameters()
        reason = stop.reason + (f"; it begins in {culprit}" if culprit else "")
        self._note("stop", self.policy.precision, reason)
        if not self._halts:
            return
        self.policy.decline(num_quiet=0)  # a run that goes on from here all the same is judged anew
        if stop.is_precision:
            raise NoRungFitsError(
                f"Training was stopped in {self.policy.precision}: {reason}.",
                "Search again so that the config gets fallback plans that fit, or train in fp32 with a smaller batch.",
            )
        raise NotPrecisionError(
            f"Training was stopped in {self.policy.precision}: {reason}.",
            "Look at the data and the learning rate: a lower precision would not have helped. "
            "PrecisionController(..., halt=False) skips such steps for ever instead.",
        )

    def _bad_parameters(self) -> str:
        if self.attachment is None:
            return ""
        names = self.ranks.union(self.attachment.bad_parameters())
        return f"the gradients of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""

    def give_up_moving(self) -> None:
        """The loop was seen to run in another precision than it was told to: scale and guard as it is written."""
        before = self.policy.precision
        self.is_advisory = True
        self.policy.move_by_hand(self.own_config.precision)
        self.applied()
        why = "an autocast inside the attached model, or around another method than its forward, keeps its precision. "
        way_out = "Use controller.autocast(), or attach the module that the autocast wraps and the loop calls"
        self._note("advice", self.policy.precision, why + way_out, before)

    def refuse_by_hand(self, name: Precision) -> None:
        """Raise `InvalidRequestError` for a precision that the loop or the model cannot be brought into."""
        if self.is_advisory:
            raise InvalidRequestError(
                f"The precision cannot be changed to {name}: the controller is advisory.",
                "Use controller.autocast() around the forward pass, or controller.attach(model).",
            )
        if name in ("fp32", "tf32") and self.attachment is not None and self.attachment.has_frozen_half_weights:
            raise InvalidRequestError(
                f"The model cannot run in {name}: its frozen weights are in half precision.",
                "Stay in bf16 or fp16, or convert the frozen weights with model.float().",
            )

    def move_by_hand(self, name: Precision) -> None:
        """Go to a rung because the user says so."""
        before = self.policy.precision
        self.policy.move_by_hand(name)
        self.applied()
        self._note("by_hand", name, "asked for", before)

    def _note(self, kind: str, after: Precision, reason: str, before: Precision | None = None) -> None:
        record = MoveRecord(
            update=self.policy.num_updates,
            kind=kind,
            before=before or self.policy.precision,
            after=after,
            reason=reason,
            config=self.config,
        )
        self.history.append(record)
        log.warning("%s at update %d, %s -> %s: %s", kind, record.update, record.before, after, reason)
        for listener in self.listeners:
            listener(record)

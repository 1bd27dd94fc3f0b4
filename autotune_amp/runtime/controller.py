"""PrecisionController: GradScaler's place in the user's loop, and a run that survives repeated overflow."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation, write_atomically
from autotune_amp.precision import mode as precision
from autotune_amp.precision import torch_state
from autotune_amp.runtime import checkpoint, windows
from autotune_amp.runtime.attachment import Attachment
from autotune_amp.runtime.checks import checked_device
from autotune_amp.runtime.ranks import Ranks
from autotune_amp.runtime.run_log import RunLog
from autotune_amp.runtime.status import MoveRecord, Status, peak_memory_bytes, to_plain
from autotune_amp.runtime.steered import SteeredScaler
from autotune_amp.runtime.steering import OnDemotion, Steering

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # torch can be built without

log = logging.getLogger("autotune_amp.runtime")

Batch = TypeVar("Batch")


class PrecisionController(SteeredScaler):
    """A drop-in for ``torch.amp.GradScaler`` that steps the precision down when precision is what fails.

    Use `autocast()` around the forward pass, then `backward` (or ``scale(loss).backward()``), `unscale_` to clip,
    `step` and `update`, as with GradScaler. `config` names the precision and its fallbacks; a fallback is taken only
    where its measured plan fits. Sets the process's TF32 flags to what the precision means, as the search's trials do.

    guard: check bf16 and fp32 steps too and skip those that are not finite. False leaves them alone, and undiagnosed.
    halt: raise `NotPrecisionError` or `NoRungFitsError` when the run must not go on; False skips such steps for ever.
    on_demotion: "checkpoint_and_stop" raises `DemotedError` from `update()` after stepping down.
    max_slowdown: refuse fallbacks measured to take more than this many times as long.
    promote: go back up where a rerun (see `attach`) shows that it is safe and more than 5 % faster.
    process_group: the ranks that decide alike; all of them where None.
    writer: an object with TensorBoard's ``add_scalar(tag, value, step)``.
    run_log: a file to append to, for ``autotune-amp report``: a line of JSON for every move, every change of the loss
        scale, and every 64th update with the loss. Rank 0 writes it; a resumed run goes on in it.

    Warns in the log ``autotune_amp.runtime`` where this process lacks the config's environment variables. Raises
    `DeviceError` for a device that is not there and `InvalidRequestError` for options that cannot be kept.
    """

    def __init__(
        self,
        config: AmpConfig,
        device: str | torch.device = "cuda",
        *,
        guard: bool = True,
        halt: bool = True,
        on_demotion: OnDemotion = "continue",
        max_slowdown: float | None = None,
        promote: bool = False,
        process_group: ProcessGroup | None = None,
        writer: Any = None,
        run_log: str | os.PathLike[str] | None = None,
    ) -> None:
        checked = checked_device(device)
        ranks = Ranks(checked, process_group)
        steering = Steering(
            config,
            checked,
            ranks,
            halts=halt,
            promotes=promote,
            on_demotion=on_demotion,
            max_slowdown=max_slowdown,
        )
        _warn_of_missing(config.environment)
        written = None if run_log is None else RunLog(run_log)
        if written is not None and ranks.rank == 0:
            written.check()
        super().__init__(steering, guard=guard, writer=writer, run_log=written)
        self._shares: list[float] = []  # of the passes in the current window of `windows`
        self._pass = 0

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], device: str | torch.device = "cuda", **options: Any
    ) -> PrecisionController:
        """A controller for the config in a ``recommendation.json``; `options` are the constructor's."""
        return cls(Recommendation.load(path).config, device, **options)

    def autocast(self) -> AbstractContextManager[object]:
        """The context for the forward pass in the current precision, fresh each time."""
        if self._is_rerunning:
            return nullcontext()
        if not self._autocast_is_ours:
            self._autocast_is_ours = True
            self._steering.is_advisory = False
            self._force_model()
        self._settle()
        self._begin_window()
        return nullcontext() if self._is_off else precision.autocast(self._precision, self._main_device.type)

    @contextmanager
    def validation(self) -> Iterator[None]:
        """The forward pass of validation: the current precision without gradients; the scaler is left alone."""
        context = nullcontext() if self._is_off else precision.autocast(self._precision, self._main_device.type)
        with torch.no_grad(), context:
            yield

    def windows(
        self, loader: Iterable[Batch], weigh: Callable[[Batch], float | Tensor] | None = None
    ) -> Iterator[tuple[Batch, bool]]:
        """(batch, is_last) for every pass; where `is_last`, step and update: the accumulation window is over.

        A window has the config's accumulation steps, the last one what is left of the loader; divide the loss by
        `window_size`. Where it is a mean over something of which batches hold unequal parts, `weigh` counts that in a
        batch (the labels other than -100, say): multiply the loss by `window_share` then; of a batch in which nothing
        counts it must be 0, not the NaN of a mean over nothing. After a demotion to a smaller batch size the loader's
        batches are split. Raises `InvalidRequestError` where they cannot be.
        """
        batches = iter(loader)
        try:
            while True:
                self._settle()
                plan = self.config
                num_batches, num_pieces = windows.shape(
                    self._steering.own_config.batch_size, plan.batch_size, plan.accumulation_steps
                )
                window = windows.take(batches, num_batches, num_pieces)
                if not window:
                    break
                weights = [1.0 if weigh is None else float(weigh(batch)) for batch in window]
                self._shares = [weight / (sum(weights) or 1.0) for weight in weights]  # all 0: no loss, and no NaN
                for self._pass, batch in enumerate(window):
                    yield batch, self._pass == len(window) - 1
        finally:
            self._shares = []
        self.synchronize()

    @property
    def window_size(self) -> int:
        """Backward passes in the current window of `windows`; outside of it, the config's accumulation steps."""
        return len(self._shares) or self.config.accumulation_steps

    @property
    def window_share(self) -> float:
        """The current pass's part of what `weigh` counts in its window of `windows`; without it, of the passes."""
        return self._shares[self._pass] if self._shares else 1 / self.window_size

    def discard_window(self) -> None:
        """End the accumulation window without a step and without a trace, for a loop that drops its gradients."""
        if self._is_in_window:
            self._verdicts.clear()
            self._skipped(True)
            self._end_window()

    def on_step(self, callback: Callable[[], object], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Call `callback` once for every step really taken: of `optimizer`, or (None) of any in the update.

        Behind a fused optimizer on an accelerator that is `lag.LAG_UPDATES` updates later, so that nobody waits;
        `synchronize` and the end of `windows` call those still due, and a run resumed from `state_dict` does.
        """
        self._on_step.append((callback, None if optimizer is None else self._position(optimizer)))

    def on_move(self, listener: Callable[[MoveRecord], object]) -> None:
        """Call `listener` with the record of every move; its config has the new batch size and accumulation."""
        self._steering.listeners.append(listener)

    def attach(self, model: nn.Module, rerun: Callable[[], Tensor] | None = None) -> None:
        """Use the model: watch its activations, undo batch norm statistics of skipped steps, pin modules in fp32.

        `rerun` recomputes the loss of the latest batch: with it a trip is diagnosed before anything moves, unless an
        earlier pass of the accumulation window is what fails. Code that opens an autocast of its own can be demoted
        only through this. Call it before or after compiling.
        Raises `InvalidRequestError` for a second model, and for a module to pin that the model does not have.
        """
        if self._steering.attachment is not None:
            raise InvalidRequestError("A model is attached already.", "Make another controller for another model.")
        self._steering.attach(Attachment(model, rerun, self._main_device))
        self._apply_rung()

    def detach(self) -> None:
        """Let go of the attached model, if there is one, and leave it as it was: this controller is done with.

        TF32 flags that it keeps as found (`AmpConfig.as_found`) are as they were, too.
        """
        if self._steering.attachment is not None:
            self._steering.attachment.detach()
            self._steering.attachment = None
            self._policy.can_rerun = False
            self._steering.is_advisory = not self._autocast_is_ours
        if self._found is not None:
            torch_state.apply_fp32_flags(self._found)

    @property
    def config(self) -> AmpConfig:
        """What the run uses now: precision, batch size and accumulation steps of the current rung."""
        return self._steering.config

    def set_precision(self, name: Precision) -> None:
        """Move to the rung of this precision at the end of the window. Raises `InvalidRequestError` without one."""
        self._policy.rung_of(name)
        self._refuse_by_hand(name)
        self._when_idle("set_precision", name)

    def disable(self) -> None:
        """Train in fp32, unscaled and unguarded, from the end of the window until `enable`.

        Raises `InvalidRequestError` where the loop or the model cannot be brought into fp32.
        """
        self._refuse_by_hand("fp32")
        self._when_idle("disable")

    def _refuse_by_hand(self, name: Precision) -> None:
        if self._inspected or self._steering.attachment is not None:  # before that nobody knows how the loop is written
            self._steering.refuse_by_hand(name)

    def enable(self) -> None:
        """Undo `disable`, at the end of the window."""
        self._when_idle("enable")

    def status(self) -> Status:
        """Where the run stands; waits for the device.

        With several ranks, of which one may ask alone, it is as of the verdicts that all ranks have acted on.
        """
        if not self._ranks.are_many:
            self.synchronize()
        policy, attachment = self._policy, self._steering.attachment
        return Status(
            precision=self._precision,
            is_enabled=not self._is_off,
            is_advisory=self._steering.is_advisory,
            pinned_modules=attachment.pinned if attachment else (),
            scale=self._target_scale,
            num_updates=policy.num_updates,
            num_steps=self._num_steps,
            num_skips=policy.num_skips,
            skip_share=policy.num_skips / max(1, policy.num_updates),
            amp_share=self._num_amp_steps / max(1, self._num_steps),
            step_seconds=median(self._seconds) if self._seconds else None,
            peak_memory_bytes=peak_memory_bytes(self._main_device),
            forward_max=attachment.forward_max() if attachment else None,
            history=tuple(self._steering.history),
        )

    def save_stats(self, path: str | os.PathLike[str]) -> None:
        """Write `status()` as a JSON document, atomically."""
        status = self.status()
        document = asdict(status) | {"history": [to_plain(record) for record in status.history]}
        forward_max = status.forward_max
        if forward_max is not None and not math.isfinite(forward_max):
            document["forward_max"] = None  # JSON has neither NaN nor infinity
        write_atomically(Path(path), json.dumps(document, indent=2, allow_nan=False) + "\n")

    def state_dict(self) -> dict[str, Any]:
        """All of the controller's state in plain types, GradScaler's keys on top; waits for the device.

        What is still on its way from the device is saved with it, and acted on after loading: one rank may save alone.
        Inside an accumulation window save the gradients too: they are the model's, not the controller's.
        """
        counters = {
            "run_id": self._run_id,
            "num_steps": self._num_steps,
            "num_amp_steps": self._num_amp_steps,
            "num_passes": self._num_passes,
            "loss_was_finite": math.isfinite(float(self._probe)),
            "loss": float(self._loss),
            "is_off": self._is_off,
            "wishes": [list(wish) for wish in self._pending if wish[0] != "act"],
            "waiting": [[values, list(label)] for values, label in self._reader.waiting()],
        }
        rule = self._policy.scale
        scaler = {
            "scale": self._current_scale(),
            "growth_factor": rule.growth_factor,
            "backoff_factor": rule.backoff_factor,
            "growth_interval": rule.growth_interval,
            "_growth_tracker": self._get_growth_tracker(),
        }
        return checkpoint.save(self._steering, scaler, counters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state: a controller's, a plain GradScaler's, or ``{}``, which a disabled one saves.

        Raises `FormatError` for what is no such state or belongs to other rungs, `InvalidRequestError` for a loss
        scale that cannot work (0, infinite); then nothing is changed.
        """
        self.synchronize()
        counters = checkpoint.load(self._steering, state_dict)
        if counters:
            self._num_steps = counters["num_steps"]
            self._num_amp_steps = counters["num_amp_steps"]
            self._num_passes = counters["num_passes"]
            self._is_in_window = self._num_passes > 0
            self._probe = 0.0 if counters["loss_was_finite"] else math.nan
            self._loss = counters["loss"]
            self._is_off = counters["is_off"]
            self._pending = [(what, name) for what, name in counters["wishes"]]
        self._apply_rung()
        self._run_id = counters.get("run_id")
        if self._run_log is not None:
            self._run_log.has_begun = False
        if counters:
            self._resume(counters["waiting"], state_dict["scale"], state_dict["_growth_tracker"])


def _warn_of_missing(environment: Mapping[str, str]) -> None:
    missing = " ".join(f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value)
    if missing:
        log.warning(
            "The config was measured with variables that this process was started without, so it may be slower. "
            "Before Python starts: export %s",
            missing,
        )

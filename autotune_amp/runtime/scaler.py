"""Loss scaling without host syncs: gradient check, loss scale on the device, verdicts on their way to the host."""

from __future__ import annotations

import functools
import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autotune_amp.core.errors import DeviceError, InvalidRequestError
from autotune_amp.distributed import place_variables
from autotune_amp.hardware.device import load_device_module, parse_device_name
from autotune_amp.numerics.passes import stored_values
from autotune_amp.precision.step_amp import parameters_of
from autotune_amp.precision.torch_state import HALF_DTYPES
from autotune_amp.runtime.policy import ScaleRule

LAG_UPDATES = 4
Waiting: TypeAlias = Sequence[tuple[Sequence[float], Sequence[int]]]  # (values, label)

# Verdicts on one optimizer's gradients. The larger one wins, between optimizers and between ranks.
NO_GRADIENTS, CLEAN, OVERFLOW, BAD_LOSS = -1, 0, 1, 2
VERDICTS = frozenset((NO_GRADIENTS, CLEAN, OVERFLOW, BAD_LOSS))

_SAMPLES_PER_PARAMETER = 1024
# Nonzero fp16 numbers below 2^-22 are in the three lowest octaves of the format. If magnitudes are log-normal over 3 to
# 4 octaves (standard deviation), six times as many are there as were flushed when 1 % was flushed.
_BARELY_THERE = 2.0**-22
_BARELY_THERE_PER_LOST = 6.0
# Share of the model's largest gradient. Smaller ones, as before a batch norm or behind a saturated softmax, are
# rounding noise.
NEGLIGIBLE = 2.0**-20


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device with its index. Raises `DeviceError` if it is missing or "auto"."""
    kind, index = parse_device_name(str(device))
    if kind == "auto":
        raise DeviceError("device='auto' does not say where the model is.", 'Pass its device: device="cuda", for one.')
    return torch.device(load_device_module(kind).resolve(index))


class Ranks:
    """Ranks of `process_group`, or with None all of them. Methods that compare values are collectives: call them on all
    ranks.

    `device`: this process's. If it `is_assumed`, since the caller named no index, `note_device` replaces it.
    """

    def __init__(
        self, device: torch.device, process_group: dist.ProcessGroup | None = None, *, is_assumed: bool = False
    ) -> None:
        self.device = device
        self._is_assumed = is_assumed
        self._group = process_group

    def note_device(self, tensors: Iterable[Tensor]) -> None:
        """Replace an assumed device by that of the first tensor of its type: the current device need not be the one
        that this process trains on.
        """
        if self._is_assumed:
            found = next((tensor.device for tensor in tensors if tensor.device.type == self.device.type), None)
            self.device, self._is_assumed = found or self.device, found is None

    @property
    def rank(self) -> int:
        """Return this process's rank in the group; before `init_process_group` the one that the launcher set."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self._group)
        return int(os.environ.get(place_variables()[1], "0"))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, 1 before `init_process_group`."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def are_many(self) -> bool:
        """Whether there is more than one rank."""
        return self.num_ranks > 1

    def maximum_(self, values: Tensor) -> Tensor:
        """Replace each value by its maximum over the ranks, and return them. Synchronizes only if the backend does."""
        if self.are_many:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank."""
        return bool(self.maximum_(torch.tensor(float(flag), device=self.device)).item()) if self.are_many else flag

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the names given on all ranks, each once, in the order of the ranks."""
        if not self.are_many:
            return tuple(names)
        gathered: list[Sequence[str] | None] = [None] * self.num_ranks
        with torch.accelerator.device_index(self.device.index):  # NCCL would use the current device for objects
            dist.all_gather_object(gathered, list(names), group=self._group)
        return tuple(dict.fromkeys(name for given in gathered for name in given or ()))


def worst_of(verdicts: Iterable[int | Tensor]) -> int | Tensor:
    """Return the largest verdict; on the device, without a sync, if one of them is there."""
    given = list(verdicts)
    late = [verdict for verdict in given if isinstance(verdict, Tensor)]
    known = max((verdict for verdict in given if isinstance(verdict, int)), default=NO_GRADIENTS)
    return torch.stack([verdict.to(late[0].device) for verdict in late]).amax().clamp(min=known) if late else known


class StepResult:
    """Result of `step`: true if the optimizer stepped. For a fused optimizer reading it synchronizes with the device.

    `value` is the return value of ``optimizer.step``, or a list for several optimizers. `loss` and `grad_norm` are set
    by `PrecisionController.train_step`.
    """

    def __init__(
        self, verdict: int | Tensor, value: Any = None, loss: Tensor | None = None, grad_norm: Tensor | None = None
    ) -> None:
        self._verdict = verdict
        self.value = value
        self.loss = loss
        self.grad_norm = grad_norm

    @classmethod
    def all_of(cls, steps: Sequence[StepResult], loss: Tensor, grad_norm: Tensor | None) -> StepResult:
        """Return the joint result of steps: true if each optimizer with gradients stepped. Does not synchronize."""
        if len(steps) == 1:  # without launching a kernel
            return cls(steps[0]._verdict, steps[0].value, loss, grad_norm)
        return cls(worst_of(step._verdict for step in steps), [step.value for step in steps], loss, grad_norm)

    def __bool__(self) -> bool:
        return int(self._verdict) == CLEAN


class UpdateResult(NamedTuple):
    """Host's view of an update. `verdicts` are by number, for the optimizers that had gradients."""

    verdicts: Mapping[int, int]
    loss: float
    lost_share: float | None = None
    ended_at: float | None = None  # by `time.perf_counter`; None for just now

    @property
    def worst(self) -> int:
        """Return the largest verdict."""
        return max(self.verdicts.values())

    @classmethod
    def from_values(cls, values: Sequence[float], numbers: Sequence[int]) -> UpdateResult:
        """Return the view made from verdicts on these optimizers, the loss and, if it was sampled, the lost share."""
        verdicts, (loss, *shares) = values[: len(numbers)], values[len(numbers) :]
        known = zip(numbers, map(int, verdicts), strict=True)
        return cls({n: verdict for n, verdict in known if verdict != NO_GRADIENTS}, loss, next(iter(shares), None))


@dataclass
class UpdateWindow:
    """State of one accumulation window. `verdicts` are by the number of the optimizer."""

    num_passes: int = 0
    has_run_backward: bool = False  # in this process
    loss: float | Tensor = 0.0  # of all passes: each scales its part
    loss_probe: float | Tensor = 0.0  # 0 times every loss: NaN if one was not finite
    dropped_probe: float | Tensor = 0.0  # of batches before whose gradients the loop dropped
    scale_was_read: bool = False  # after a backward pass
    verdicts: dict[int, int | Tensor] = field(default_factory=dict)
    is_joint: bool = False  # the optimizers step together or not at all
    lost_share: float | Tensor | None = None  # a number on the host holds for all ranks

    def note_backward(self, _: Tensor) -> None:
        """Note, as a hook of a scaled loss, that its backward pass has run."""
        self.has_run_backward = True

    def follows_bad_batch(self) -> bool | Tensor:
        """Whether a loss of a batch before, whose gradients the loop dropped, was not finite: nonzero on the device."""
        probe = self.dropped_probe
        return probe.isnan().float() if isinstance(probe, Tensor) else math.isnan(probe)

    @property
    def is_late(self) -> bool:
        """Whether a verdict is still on the device."""
        return any(isinstance(verdict, Tensor) for verdict in self.verdicts.values())

    def result(self, ranks: Ranks) -> UpdateResult:
        """Return the host's view of the window. No verdict may be late."""
        share = self.lost_share
        if isinstance(share, Tensor):
            share = float(ranks.maximum_(share).item())
        known = {number: int(verdict) for number, verdict in self.verdicts.items() if verdict != NO_GRADIENTS}
        return UpdateResult(known, float(self.loss), share)


@functools.cache
def _one(device: torch.device) -> Tensor:
    """Return a 1 on the device, the same at each call: creating one would launch a kernel."""
    return torch.ones((), dtype=torch.float32, device=device)


def check_gradients(optimizer: torch.optim.Optimizer, inv_scale: Tensor | None) -> Tensor | None:
    """Return 1.0 on the device if any gradient is not finite, 0.0 if all are, without a sync; None without gradients.

    Multiplies the gradients by `inv_scale` in place if it is given. Raises `InvalidRequestError` for fp16 gradients,
    which cannot be unscaled.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in _local_gradients(optimizer):
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found: Tensor | None = None
    with torch.no_grad():
        for (device, dtype), gradients in alike.items():
            here = torch.zeros((), device=device)
            if dtype in HALF_DTYPES and inv_scale is None:
                # The fused check has no bf16 on CUDA (pytorch#127176); a sum is not finite if one of its terms is not.
                here = (~torch.stack([g.sum(dtype=torch.float32) for g in gradients]).isfinite().all()).float()
            elif dtype == torch.float16:
                raise InvalidRequestError(
                    "The gradients to unscale are fp16, so the trainable parameters are fp16.",
                    "Keep trainable parameters in fp32 (model.float()); autocast casts them where it pays.",
                )
            else:
                # Copies to the host are blocking: it would read a non-blocking one too early.
                one = _one(device) if inv_scale is None else inv_scale.to(device, non_blocking=device.type != "cpu")
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, one)
            if found is not None:
                found = torch.maximum(found, here.to(found.device, non_blocking=found.device.type != "cpu"))
            else:
                found = here
    return found


def lost_share(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """Return an estimate of the share of the scaled gradient that fp16 flushed to zero; 0 without gradients.

    It is estimated from a sample of the rest: a flushed zero looks like any other zero, but where values are flushed,
    others are just above the smallest number. 1.0 if all entries are zero.
    """
    samples = [
        gradient.reshape(-1)[:: max(1, gradient.numel() // _SAMPLES_PER_PARAMETER)].float().to(device)
        for gradient in _local_gradients(optimizer)
    ]
    if not any(sample.numel() for sample in samples):
        return torch.zeros((), device=device)
    magnitudes = torch.cat(samples).abs()
    matters = magnitudes > magnitudes.amax() * NEGLIGIBLE
    num_left = matters.sum()
    num_barely = (matters & (magnitudes < _BARELY_THERE)).sum()
    share = num_barely / num_left.clamp(min=1) / _BARELY_THERE_PER_LOST
    return torch.where(num_left > 0, share, torch.ones_like(share))


def _local_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the entries of each gradient that this rank holds, writable; complex ones as pairs of real numbers."""
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):  # a DTensor's own shard; the ranks agree on the result later
            gradient = gradient.to_local()
        if gradient.layout != torch.strided:
            if gradient.is_sparse and gradient.dtype == torch.float16 and not gradient.is_coalesced():
                parameter.grad = gradient = gradient.coalesce()  # summing duplicates is where fp16 overflows
            gradient = stored_values(gradient)
        elif gradient.is_conj() or gradient.is_neg():  # lazily conjugated or negated tensors are not writable
            parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
        yield torch.view_as_real(gradient) if gradient.is_complex() else gradient


class GradientCheck:
    """Check of each optimizer's gradients, once per window, with a verdict that all ranks agree on.

    A verdict is on the host at once if the gradients are, else it is a scalar on the device.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.window = UpdateWindow()
        self._ranks = ranks
        self._numbers: dict[int, int] = {}  # id of an optimizer -> its number, in the order of first appearance

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number of an optimizer, in the order of first appearance."""
        return self._numbers.setdefault(id(optimizer), len(self._numbers))

    def verdict_of(self, optimizer: torch.optim.Optimizer) -> int | Tensor:
        """Return the verdict on an optimizer's gradients in this window, `NO_GRADIENTS` if they were not examined."""
        return self.window.verdicts.get(self.number_of(optimizer), NO_GRADIENTS)

    def wait_for(self, optimizer: torch.optim.Optimizer) -> int:
        """Return `verdict_of` on the host. One sync fetches the loss and the lost share too."""
        verdict, window = self.verdict_of(optimizer), self.window
        if not isinstance(verdict, Tensor):
            return verdict
        late = {name: value for name in ("loss", "lost_share") if isinstance(value := getattr(window, name), Tensor)}
        if "lost_share" in late:
            self._ranks.maximum_(late["lost_share"])
        known, *others = torch.stack([verdict, *(value.to(verdict.device) for value in late.values())]).tolist()
        for name, value in zip(late, others, strict=True):
            setattr(window, name, value)
        verdict = window.verdicts[self.number_of(optimizer)] = int(known)
        return verdict

    def see_losses(self, losses: Iterable[Tensor], device: torch.device) -> None:
        """Check whether the losses of a backward pass are finite. `device` is where the loss scale is.

        Losses after the scale was read are ignored: a gradient penalty's loss contains gradients, which overflow too.
        """
        for loss in () if self.window.scale_was_read else losses:
            self._see_loss(loss.detach(), device)

    def _see_loss(self, loss: Tensor, device: torch.device) -> None:
        window = self.window
        value = loss if loss.numel() == 1 else loss.sum(dtype=torch.float32)
        if self.is_on_host(value):
            known = value.item()
            if not math.isfinite(known):
                window.loss_probe = math.nan
            window.loss = window.loss + known
            return
        late = value.float().reshape(()).to(device)
        window.loss_probe = window.loss_probe + late * 0.0
        is_first = isinstance(window.loss, float) and window.loss == 0.0  # an addition would launch a kernel
        window.loss = late if is_first else late + window.loss

    def examine(
        self, optimizer: torch.optim.Optimizer, device: torch.device, inv_scale: Tensor | None, *, samples: bool
    ) -> Tensor | None:
        """Check the gradients, multiplying them by `inv_scale`. Return 1.0 for a step to skip, 0.0 for one to take.

        None if there are no gradients on any rank. With `samples` the share that fp16 lost is estimated too. `device`
        is where the loss scale is.
        """
        if samples:
            share, known = lost_share(optimizer, device), self.window.lost_share
            self.window.lost_share = share if known is None else share.clamp(min=known)
        verdict, skipped = self._verdict(check_gradients(optimizer, inv_scale), device)
        number = self.number_of(optimizer)
        if (before := self.window.verdicts.get(number)) is not None:  # a second check, after clipping
            verdict = worst_of((before, verdict))
            skipped = verdict.clamp(CLEAN, OVERFLOW) if isinstance(verdict, Tensor) else skipped
        self.window.verdicts[number] = verdict
        return skipped

    def needs_second_look(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether clipping by a norm over several optimizers may have spread non-finite values to this one."""
        window, number = self.window, self.number_of(optimizer)
        others = (verdict for other, verdict in window.verdicts.items() if other != number)
        is_clean = isinstance(own := window.verdicts.get(number, NO_GRADIENTS), Tensor) or own == CLEAN
        return is_clean and not window.is_joint and any(isinstance(v, Tensor) or v > CLEAN for v in others)

    def join(self, optimizers: Sequence[torch.optim.Optimizer], states: Mapping[int, Any]) -> None:
        """Set the verdict of all optimizers with gradients to the worst one, in GradScaler's `states` too.

        Synchronizes only if an optimizer's own verdict is on the host and another's on the device.
        """
        verdicts, numbers = self.window.verdicts, [self.number_of(optimizer) for optimizer in optimizers]
        worst = worst_of(verdicts.get(number, NO_GRADIENTS) for number in numbers)
        self.window.is_joint = True
        for number in numbers:
            own = verdicts.get(number, NO_GRADIENTS)
            if isinstance(own, Tensor):
                late = torch.as_tensor(worst, dtype=own.dtype, device=own.device)
                verdicts[number] = torch.where(own == NO_GRADIENTS, own, late)
            elif own != NO_GRADIENTS:
                verdicts[number] = int(worst)
        if isinstance(worst, Tensor):
            for optimizer in optimizers:
                for found in states[id(optimizer)]["found_inf_per_device"].values():
                    found.copy_(worst.clamp(CLEAN, OVERFLOW), non_blocking=True)

    def _verdict(self, found: Tensor | None, device: torch.device) -> tuple[int | Tensor, Tensor | None]:
        """Return the verdict, and the value that `examine` returns."""
        window, are_many = self.window, self._ranks.are_many
        if found is None:
            if not are_many:
                return NO_GRADIENTS, None
            found = torch.full((), float(NO_GRADIENTS), device=device)
        if not self.is_on_host(found):
            found = found.to(device)  # the model may be split over several devices
        if not self.is_on_host(found):
            judged = torch.nan_to_num(found + window.loss_probe, nan=float(BAD_LOSS))
            if are_many:
                loss = window.loss if isinstance(window.loss, Tensor) else torch.full_like(judged, window.loss)
                pair = torch.stack([judged, torch.nan_to_num(loss.to(judged.device), 0.0, 0.0, 0.0)])
                judged, window.loss = self._ranks.maximum_(pair).unbind()
            return judged, judged.clamp(CLEAN, OVERFLOW)
        verdict = BAD_LOSS if math.isnan(float(window.loss_probe)) else int(found.item())
        if are_many:
            # Also share the loss, since its course decides, and has to decide the same on all ranks.
            mine = float(window.loss) if math.isfinite(window.loss) else 0.0
            pair = torch.tensor([verdict, mine], dtype=torch.float32, device=self._ranks.device)
            largest, window.loss = self._ranks.maximum_(pair).tolist()
            verdict = int(largest)
        if are_many or verdict != CLEAN:
            found.fill_(float(verdict > CLEAN))
        return verdict, found

    @staticmethod
    def is_on_host(tensor: Tensor) -> bool:
        """Whether the host can read a tensor without a sync."""
        return tensor.device.type == "cpu"


class LaggedReader:
    """Queue of small groups of device scalars, each copied to pinned host memory when it is pushed, with its label."""

    def __init__(self) -> None:
        # Values, their copy's event, label, and when they were pushed.
        self._waiting: deque[tuple[Tensor, torch.Event | None, tuple[int, ...], float | None]] = deque()
        self._latest: tuple[torch.Event, float] | None = None  # on CUDA, of the group popped last; when it was copied
        self.ended_at: float | None = None  # of the group popped last, by `time.perf_counter`; None if restored

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without an event, which belongs to this process."""
        return vars(self) | {"_latest": None}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Sequence[Tensor], label: tuple[int, ...]) -> None:
        """Start copying `values`, scalars of one device, to the host."""
        packed = torch.stack(list(values))
        if packed.device.type == "cpu":
            self._waiting.append((packed, None, label, time.perf_counter()))
            return
        host = torch.empty(len(values), pin_memory=True)
        host.copy_(packed, non_blocking=True)
        # On the copy's stream, which need not be that of the current device.
        event = torch.Event(packed.device, enable_timing=packed.device.type == "cuda")
        torch.accelerator.current_stream(packed.device).record_event(event)
        self._waiting.append((host, event, label, time.perf_counter()))

    def waiting(self) -> list[tuple[list[float], tuple[int, ...]]]:
        """Return all groups and labels, oldest first, without removing them. Synchronizes with the device."""
        for _, event, *_ in self._waiting:
            if event is not None:
                event.synchronize()
        return [(host.tolist(), label) for host, _, label, _ in self._waiting]

    def restore(self, waiting: Waiting) -> None:
        """Replace the queue by these groups."""
        self._waiting.clear()
        self._waiting.extend((torch.tensor(values), None, tuple(label), None) for values, label in waiting)

    def pop(self) -> tuple[list[float], tuple[int, ...]]:
        """Remove and return the oldest group and its label. Synchronizes if its copy is not finished."""
        host, event, label, self.ended_at = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        self._time(event)
        return host.tolist(), label

    def _time(self, event: torch.Event | None) -> None:
        # CUDA's events tell the time between two copies, however late these are read. Elsewhere the host's clock has
        # to do: the host waits for older groups before it pushes more, so it keeps the device's pace.
        if event is None or event.device.type != "cuda":
            self._latest = None
            return
        if self._latest is None or self._latest[0].device != event.device:
            self.ended_at = time.perf_counter()
        else:
            before, copied_at = self._latest
            self.ended_at = copied_at + before.elapsed_time(event) / 1e3
        self._latest = event, self.ended_at


class LossScaler:
    """Loss scale and growth tracker as scalars on the device, created with the first loss.

    If the host knows each verdict at once they follow `rule`, which holds them on the host. With a fused optimizer on
    an accelerator the device applies the same rule itself, and the host follows `LAG_UPDATES` later, with the values
    that are on their way in `reader`.
    """

    def __init__(self, rule: ScaleRule) -> None:
        self.rule = rule
        self.is_scaling = True
        self.scale: Tensor | None = None
        self.growth_tracker: Tensor | None = None
        self.reader = LaggedReader()
        self._written = rule.scale
        self._inverse: Tensor | None = None

    @property
    def target(self) -> float:
        """Return the host's loss scale, 1.0 if the loss is not scaled."""
        return self.rule.scale if self.is_scaling else 1.0

    def current_scale(self) -> float:
        """Return the device's loss scale. Synchronizes if the device may be ahead of the host."""
        return float(self.scale.item()) if len(self.reader) and self.scale is not None else self.target

    def current_growth_tracker(self) -> int:
        """Return the device's growth tracker. Synchronizes as `current_scale` does."""
        tracker = self.growth_tracker
        return int(tracker.item()) if len(self.reader) and tracker is not None else self.rule.growth_tracker

    def place(self, device: torch.device | str, scale: float, growth_tracker: int) -> None:
        """Create `scale` and `growth_tracker` on a device."""
        self._written = scale
        self._inverse = None
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.full((), growth_tracker, dtype=torch.int32, device=device)

    def follow(self, loss: Tensor) -> None:
        """Place the scale on the loss's device if it is not placed yet, or on the host, where a checkpoint puts it."""
        is_on_host = GradientCheck.is_on_host
        if self.scale is None or (is_on_host(self.scale) and not is_on_host(loss)):
            self.place(loss.device, self.current_scale(), self.current_growth_tracker())

    def inverse(self) -> Tensor:
        """Return 1 / scale, cached until the scale changes."""
        assert self.scale is not None  # a loss was scaled
        if self._inverse is None:
            # In double precision as GradScaler; MPS and some XPUs have none (pytorch#147731).
            has_double = self.scale.device.type not in ("mps", "xpu")
            self._inverse = self.scale.double().reciprocal().float() if has_double else self.scale.reciprocal()
        return self._inverse

    def step_fused(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Step a fused optimizer as GradScaler does, without 50 microseconds for inspecting its signature."""
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        given = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            optimizer.grad_scale = self.scale if given is None else self.scale * given
        else:
            optimizer.grad_scale = given
        (optimizer.found_inf,) = state["found_inf_per_device"].values()
        value = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        del optimizer.grad_scale, optimizer.found_inf
        return value

    def send(self, window: UpdateWindow, ranks: Ranks) -> Tensor:
        """Update the scale by verdicts on the device, and start copying the window's results to the host.

        Return 1.0 if the device skips the step, else 0.0.
        """
        assert self.scale is not None and self.growth_tracker is not None  # noqa: PT018 # a loss was scaled
        scale, rule = self.scale, self.rule
        if not len(self.reader):
            self.write(is_forced=True)  # the host may have changed it since
        verdicts, loss = window.verdicts.values(), window.loss
        values = [v if isinstance(v, Tensor) else torch.full_like(scale, float(v)) for v in verdicts]
        worst = values[0] if len(values) == 1 else torch.stack(values).amax()
        values.append(loss.to(scale.device) if isinstance(loss, Tensor) else torch.full_like(scale, loss))
        if window.lost_share is not None:
            share = window.lost_share
            values.append(ranks.maximum_(share) if isinstance(share, Tensor) else torch.full_like(scale, share))
        self.reader.push(values, tuple(window.verdicts))
        if self.is_scaling:
            factors = rule.growth_factor, rule.backoff_factor, rule.growth_interval
            torch._amp_update_scale_(scale, self.growth_tracker, worst.eq(OVERFLOW).float(), *factors)
            scale.clamp_(rule.floor, rule.max_scale)
            self._inverse = None
        return worst.clamp(0, 1)

    def set_by_hand(self, scale: float, growth_tracker: int) -> None:
        """Set the scale, keeping the growth tracker from before the update, as GradScaler does."""
        self.rule.set(scale)
        self.rule.growth_tracker = growth_tracker
        self.write(is_forced=True)

    def write(self, *, is_forced: bool = False) -> None:
        """Write the host's scale to the device if it changed; `is_forced` if the device may have changed its own."""
        if self.scale is None or self.growth_tracker is None:
            return
        if is_forced or self._written != self.target:
            self._written = self.target
            self._inverse = None
            self.scale.fill_(self._written)
            self.growth_tracker.fill_(self.rule.growth_tracker)

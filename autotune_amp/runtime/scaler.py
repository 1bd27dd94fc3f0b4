"""The scaler's part: gradients checked, the loss scale on the device, verdicts on their way from there. No waiting."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import DeviceError, InvalidRequestError
from autotune_amp.distributed import place_variables
from autotune_amp.hardware.device import device_of, parse
from autotune_amp.numerics.passes import stored
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES
from autotune_amp.runtime.policy_state import ScaleRule

LAG_UPDATES = 4
Waiting: TypeAlias = Sequence[tuple[Sequence[float], Sequence[int]]]  # (values, label)

# The verdict on one optimizer's gradients. The larger one wins: between optimizers, between ranks.
NO_GRADIENTS, CLEAN, OVERFLOW, BAD_LOSS = -1, 0, 1, 2

_SAMPLES_PER_PARAMETER = 1024
# Nonzero fp16 numbers below 2^-22 stand in the three lowest octaves of the format. Where magnitudes are spread
# log-normally over 3 to 4 octaves (standard deviation), six times as many stand there as were flushed when 1 % was.
_BARELY_THERE = 2.0**-22
_BARELY_THERE_PER_LOST = 6.0
# Of the model's largest gradient. Less, as before a batch norm or behind a saturated softmax, is rounding noise.
NEGLIGIBLE = 2.0**-20


def checked_device(device: str | torch.device) -> torch.device:
    """The device, with its number. Raises `DeviceError` where it is not there, or "auto"."""
    kind, index = parse(str(device))
    if kind == "auto":
        raise DeviceError("device='auto' does not say where the model is.", 'Pass its device: device="cuda", for one.')
    return torch.device(device_of(kind).resolve(index))


class Ranks:
    """The ranks of `process_group` (None: all of them). Every method is a collective: call it on all ranks alike."""

    def __init__(self, device: torch.device, process_group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = process_group

    @property
    def rank(self) -> int:
        """This process's place among them; before `init_process_group`, what the launcher says."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(self._group)
        return int(os.environ.get(place_variables()[1], "0"))

    @property
    def num_ranks(self) -> int:
        """How many there are, 1 before `init_process_group`."""
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    @property
    def are_many(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.num_ranks > 1

    def maximum_(self, values: Tensor) -> Tensor:
        """The largest of each value over the ranks, in place; waits for the device only where the backend does."""
        if self.are_many:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any rank."""
        return bool(self.maximum_(torch.tensor(float(flag), device=self.device)).item()) if self.are_many else flag

    def union(self, names: Sequence[str]) -> tuple[str, ...]:
        """The names of all ranks, each once, in the order of the ranks."""
        if not self.are_many:
            return tuple(names)
        gathered: list[Sequence[str] | None] = [None] * self.num_ranks
        with torch.accelerator.device_index(self.device.index):  # NCCL would send objects by way of the current one
            dist.all_gather_object(gathered, list(names), group=self._group)
        return tuple(dict.fromkeys(name for given in gathered for name in given or ()))


class Stepped:
    """What `step` gives back: true if the optimizer stepped. Known at once, or one wait where it is fused.

    `value` is what ``optimizer.step`` returned, a list of several. `loss` and `grad_norm` are those of
    `PrecisionController.train_step`.
    """

    def __init__(
        self, verdict: int | Tensor, value: Any = None, loss: Tensor | None = None, grad_norm: Tensor | None = None
    ) -> None:
        self._verdict = verdict
        self.value = value
        self.loss = loss
        self.grad_norm = grad_norm

    @classmethod
    def all_of(cls, steps: Sequence[Stepped], loss: Tensor, grad_norm: Tensor | None) -> Stepped:
        """True if each that had gradients stepped; without a wait."""
        if len(steps) == 1:  # and without a kernel of its own
            return cls(steps[0]._verdict, steps[0].value, loss, grad_norm)
        verdicts = [step._verdict for step in steps]
        late = [verdict for verdict in verdicts if isinstance(verdict, Tensor)]
        worst: int | Tensor = max((verdict for verdict in verdicts if isinstance(verdict, int)), default=NO_GRADIENTS)
        if late:
            worst = torch.stack([verdict.to(late[0].device) for verdict in late]).amax().clamp(min=worst)
        values = [step.value for step in steps]
        return cls(worst, values, loss, grad_norm)

    def __bool__(self) -> bool:
        return int(self._verdict) == CLEAN


class Found(NamedTuple):
    """What the host knows of an update. `verdicts` are of the optimizers that had gradients, by their number."""

    verdicts: Mapping[int, int]
    loss: float
    lost_share: float | None = None

    @property
    def worst(self) -> int:
        """The verdict that decides."""
        return max(self.verdicts.values())

    @classmethod
    def of(cls, values: Sequence[float], numbers: Sequence[int]) -> Found:
        """From the verdicts on these optimizers, the loss and, where it was looked at, the lost share."""
        verdicts, (loss, *shares) = values[: len(numbers)], values[len(numbers) :]
        known = zip(numbers, map(int, verdicts), strict=True)
        return cls({n: verdict for n, verdict in known if verdict != NO_GRADIENTS}, loss, next(iter(shares), None))


@dataclass
class Window:
    """What is known of one accumulation window. `verdicts` are by the number of the optimizer."""

    num_passes: int = 0
    loss: float | Tensor = 0.0  # of the latest pass
    loss_probe: float | Tensor = 0.0  # 0 times every loss: NaN if one was not finite
    scale_was_read: bool = False  # after a backward pass
    verdicts: dict[int, int | Tensor] = field(default_factory=dict)
    lost_share: float | Tensor | None = None  # on the host it is that of all ranks

    @property
    def is_late(self) -> bool:
        """Whether a verdict is still on the device."""
        return any(isinstance(verdict, Tensor) for verdict in self.verdicts.values())

    def found(self, ranks: Ranks) -> Found:
        """All of it on the host, where no verdict is late."""
        share = self.lost_share
        if isinstance(share, Tensor):
            share = float(ranks.maximum_(share).item())
        known = {number: int(verdict) for number, verdict in self.verdicts.items() if verdict != NO_GRADIENTS}
        return Found(known, float(self.loss), share)


class GradientCheck:
    """Checks each optimizer's gradients once in a window; all ranks agree on the verdict.

    A verdict is on the host at once where the gradients are, else a scalar on the device.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.window = Window()
        self._ranks = ranks
        self._numbers: dict[int, int] = {}  # id of an optimizer -> which it is, in the order of first appearance

    def number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Which optimizer it is, in the order of first appearance."""
        return self._numbers.setdefault(id(optimizer), len(self._numbers))

    def verdict_of(self, optimizer: torch.optim.Optimizer) -> int | Tensor:
        """The verdict on its gradients in this window, `NO_GRADIENTS` where they were not examined."""
        return self.window.verdicts.get(self.number_of(optimizer), NO_GRADIENTS)

    def wait_for(self, optimizer: torch.optim.Optimizer) -> int:
        """`verdict_of` on the host; one wait where it is on the device, for the loss and the lost share, too."""
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

    def see_loss(self, loss: Tensor) -> None:
        """Look at whether the loss of a backward pass is finite."""
        window = self.window
        value = loss if loss.numel() == 1 else loss.sum(dtype=torch.float32)
        if self.is_at_hand(value):
            window.loss = value.item()
            if not math.isfinite(window.loss):
                window.loss_probe = math.nan
            return
        window.loss = value.float().reshape(())
        nothing, probe = window.loss * 0.0, window.loss_probe
        window.loss_probe = nothing if isinstance(probe, float) else probe + nothing.to(probe.device)

    def examine(
        self, optimizer: torch.optim.Optimizer, device: torch.device, inv_scale: Tensor | None, *, samples: bool
    ) -> Tensor | None:
        """Check the gradients, times `inv_scale` from now on; gives 1.0 for a step to skip, 0.0 for one to take.

        None where there are no gradients on any rank. With `samples` the share that fp16 lost is estimated as well.
        `device` is where the loss scale is.
        """
        if samples:
            share, known = lost_share(optimizer, device), self.window.lost_share
            self.window.lost_share = share if known is None else share.clamp(min=known)
        verdict, skipped = self._verdict(check(optimizer, inv_scale), device)
        self.window.verdicts[self.number_of(optimizer)] = verdict
        return skipped

    def _verdict(self, found: Tensor | None, device: torch.device) -> tuple[int | Tensor, Tensor | None]:
        """The verdict, and what `examine` gives."""
        window, are_many = self.window, self._ranks.are_many
        if found is None:
            if not are_many:
                return NO_GRADIENTS, None
            found = torch.full((), float(NO_GRADIENTS), device=device)
        if not self.is_at_hand(found):
            judged = torch.nan_to_num(found + window.loss_probe, nan=float(BAD_LOSS))
            if are_many:
                loss = window.loss if isinstance(window.loss, Tensor) else torch.full_like(judged, window.loss)
                pair = torch.stack([judged, torch.nan_to_num(loss.to(judged.device), 0.0, 0.0, 0.0)])
                judged, window.loss = self._ranks.maximum_(pair).unbind()
            return judged, judged.clamp(CLEAN, OVERFLOW)
        verdict = BAD_LOSS if math.isnan(float(window.loss_probe)) else int(found.item())
        if are_many:
            # The loss too: how it develops decides, and has to decide alike.
            mine = float(window.loss) if math.isfinite(window.loss) else 0.0
            pair = torch.tensor([verdict, mine], dtype=torch.float32, device=self._ranks.device)
            largest, window.loss = self._ranks.maximum_(pair).tolist()
            verdict = int(largest)
        if are_many or verdict != CLEAN:
            found.fill_(float(verdict > CLEAN))
        return verdict, found

    @staticmethod
    def is_at_hand(tensor: Tensor) -> bool:
        """Whether the host can read it without waiting."""
        return tensor.device.type == "cpu"


def makes_buffers_unread(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a first step that the device skips leaves memory behind that nobody wrote: fused SGD's momentum."""
    if not isinstance(optimizer, torch.optim.SGD) or optimizer.state:
        return False
    return any(group.get("fused") and group["momentum"] for group in optimizer.param_groups)


def refuse_half_parameters(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Raise `InvalidRequestError` where fp16's scaled gradients could not be unscaled: half precision parameters."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if MODES[precision].takes_scaler and parameter.requires_grad and parameter.dtype.to_real() in HALF_DTYPES:
            raise InvalidRequestError(
                f"A trainable parameter of shape {tuple(parameter.shape)} is {str(parameter.dtype).split('.')[1]}; "
                "precision fp16 needs trainable parameters in fp32, since fp16 gradients cannot be unscaled.",
                "Convert the model with model.float(), autocast casts where it pays; or train with bf16 "
                "weights under precision bf16.",
            )


@functools.cache
def _one(device: torch.device) -> Tensor:
    """What a check that scales nothing multiplies by, kept: each launch of a kernel counts."""
    return torch.ones((), dtype=torch.float32, device=device)


def check(optimizer: torch.optim.Optimizer, inv_scale: Tensor | None) -> Tensor | None:
    """1.0 where any gradient is not finite, 0.0 where all are, without waiting for the device; None without gradients.

    Multiplies the gradients by `inv_scale` in place where it is given. Raises `InvalidRequestError` for fp16
    gradients, which cannot be unscaled.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in _local(optimizer):
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
                one = _one(device) if inv_scale is None else inv_scale.to(device, non_blocking=True)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, one)
            found = here if found is None else torch.maximum(found, here.to(found.device, non_blocking=True))
    return found


def lost_share(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """An estimate of the share of the gradient, scaled still, that fp16 flushed to zero; 0 without gradients.

    From a sample of what is left: after the fact a flushed zero looks like any other, but what is flushed leaves
    neighbours barely above the smallest number. 1.0 where nothing is left at all.
    """
    samples = [
        gradient.reshape(-1)[:: max(1, gradient.numel() // _SAMPLES_PER_PARAMETER)].float().to(device)
        for gradient in _local(optimizer)
    ]
    if not any(sample.numel() for sample in samples):
        return torch.zeros((), device=device)
    magnitudes = torch.cat(samples).abs()
    matters = magnitudes > magnitudes.amax() * NEGLIGIBLE
    num_left = matters.sum()
    num_barely = (matters & (magnitudes < _BARELY_THERE)).sum()
    share = num_barely / num_left.clamp(min=1) / _BARELY_THERE_PER_LOST
    return torch.where(num_left > 0, share, torch.ones_like(share))


def _local(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the numbers of each gradient that this rank holds, of a complex one as pairs of real ones; writable."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is None:
            continue
        if hasattr(gradient, "to_local"):  # a DTensor: its own shard; the ranks agree afterwards
            gradient = gradient.to_local()
        if gradient.layout != torch.strided:
            if gradient.is_sparse and gradient.dtype == torch.float16 and not gradient.is_coalesced():
                parameter.grad = gradient = gradient.coalesce()  # summing duplicates is where fp16 overflows
            gradient = stored(gradient)
        elif gradient.is_conj() or gradient.is_neg():  # conjugated or negated when read, and not writable so
            parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
        yield torch.view_as_real(gradient) if gradient.is_complex() else gradient


class LaggedReader:
    """A queue of small groups of device scalars, each copied to pinned host memory as it is pushed, with its label."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Tensor, torch.Event | None, tuple[int, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, values: Sequence[Tensor], label: tuple[int, ...]) -> None:
        """Send `values`, scalars of one device, on their way."""
        packed = torch.stack(list(values))
        if packed.device.type == "cpu":
            self._waiting.append((packed, None, label))
            return
        host = torch.empty(len(values), pin_memory=True)
        host.copy_(packed, non_blocking=True)
        # On the stream of the copy, which need not be the current device's.
        event = torch.accelerator.current_stream(packed.device).record_event()
        self._waiting.append((host, event, label))

    def waiting(self) -> list[tuple[list[float], tuple[int, ...]]]:
        """All groups and their labels, oldest first, which go on waiting; waits for the device."""
        for _, event, _ in self._waiting:
            if event is not None:
                event.synchronize()
        return [(host.tolist(), label) for host, _, label in self._waiting]

    def restore(self, waiting: Waiting) -> None:
        """Have these wait, and nothing else."""
        self._waiting.clear()
        self._waiting.extend((torch.tensor(values), None, tuple(label)) for values, label in waiting)

    def pop(self) -> tuple[list[float], tuple[int, ...]]:
        """The oldest group and its label; waits for the device where it is not there yet."""
        host, event, label = self._waiting.popleft()
        if event is not None:
            event.synchronize()
        return host.tolist(), label


class LossScaler:
    """`scale` and `growth_tracker` are scalars on the device, none before the first loss.

    Where the host knows each verdict at once they follow `rule`, which holds them on the host. Behind a fused optimizer
    on an accelerator the device applies the same rule itself, and the host follows `LAG_UPDATES` later: what it will
    know then is in `reader`.
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
        """The scale that the host counts on, 1.0 where the loss is not scaled."""
        return self.rule.scale if self.is_scaling else 1.0

    def current_scale(self) -> float:
        """The device's scale, which may be ahead of the host; waits for it then."""
        return float(self.scale.item()) if len(self.reader) and self.scale is not None else self.target

    def current_growth_tracker(self) -> int:
        """The device's growth tracker, as `current_scale`."""
        tracker = self.growth_tracker
        return int(tracker.item()) if len(self.reader) and tracker is not None else self.rule.growth_tracker

    def place(self, device: torch.device, scale: float, growth_tracker: int) -> None:
        """Have `scale` and `growth_tracker` on this device."""
        self._written = scale
        self._inverse = None
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.growth_tracker = torch.full((), growth_tracker, dtype=torch.int32, device=device)

    def inverse(self) -> Tensor:
        """1 / scale, kept until the scale changes."""
        assert self.scale is not None  # a loss was scaled
        if self._inverse is None:
            # In double precision as GradScaler; MPS and some XPU have none (pytorch#147731).
            has_double = self.scale.device.type not in ("mps", "xpu")
            self._inverse = self.scale.double().reciprocal().float() if has_double else self.scale.reciprocal()
        return self._inverse

    def step_fused(self, optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As GradScaler's own, which looks at the signature of ``optimizer.step`` each time, for 50 microseconds."""
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

    def send(self, window: Window, ranks: Ranks) -> Tensor:
        """Follow verdicts that are on the device, and send all that the window found on its way to the host.

        Gives 1.0 for a step that the device skips, else 0.0.
        """
        assert self.scale is not None and self.growth_tracker is not None  # noqa: PT018 # a loss was scaled
        scale, rule = self.scale, self.rule
        if not len(self.reader):
            self.write(is_forced=True)  # the host may have counted on since
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

    def write(self, *, is_forced: bool = False) -> None:
        """Bring the device in line with the host; `is_forced` where the device may have gone on by itself."""
        if self.scale is None or self.growth_tracker is None:
            return
        if is_forced or self._written != self.target:
            self._written = self.target
            self._inverse = None
            self.scale.fill_(self._written)
            self.growth_tracker.fill_(self.rule.growth_tracker)


@functools.cache
def takes_a_scaler(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether its `step` wants the scaler itself, as custom optimizers once did."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters

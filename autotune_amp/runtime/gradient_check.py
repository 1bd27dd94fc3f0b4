"""What an accumulation window's gradients and losses say: finite or not, and how much is too small for fp16."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.torch_state import HALF_DTYPES
from autotune_amp.runtime.device import Ranks

# The verdict on one optimizer's gradients. The larger one wins: between optimizers, between ranks.
NO_GRADIENTS, CLEAN, OVERFLOW, BAD_LOSS = -1, 0, 1, 2

_SAMPLES_PER_PARAMETER = 1024
# Nonzero fp16 numbers below 2^-22 stand in the three lowest octaves of the format. Where magnitudes are spread
# log-normally over 3 to 4 octaves (standard deviation), six times as many stand there as were flushed when 1 % was.
_BARELY_THERE = 2.0**-22
_BARELY_THERE_PER_LOST = 6.0
# Of the model's largest gradient. Less, as before a batch norm or behind a saturated softmax, is rounding noise.
NEGLIGIBLE = 2.0**-20


class Stepped:
    """What `step` gives back: true if the optimizer stepped. Known at once, or one wait where it is fused.

    `value` is what ``optimizer.step`` returned.
    """

    def __init__(self, verdict: int | Tensor, value: Any = None) -> None:
        self._verdict = verdict
        self.value = value

    def __bool__(self) -> bool:
        return int(self._verdict) == CLEAN

    def __repr__(self) -> str:
        return f"Stepped({bool(self)})"


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
        known = {number: int(verdict) for number, verdict in zip(numbers, verdicts, strict=True)}
        had_gradients = {number: verdict for number, verdict in known.items() if verdict != NO_GRADIENTS}
        return cls(had_gradients, loss, shares[0] if shares else None)


@dataclass
class Window:
    """What is known of one accumulation window. `verdicts` are by the number of the optimizer."""

    num_passes: int = 0
    loss: float | Tensor = 0.0  # of the latest pass
    loss_probe: float | Tensor = 0.0  # 0 times every loss: NaN if one was not finite
    scale_was_read: bool = False  # after a backward pass
    verdicts: dict[int, int | Tensor] = field(default_factory=dict)
    lost_share: Tensor | None = None

    @property
    def is_late(self) -> bool:
        """Whether a verdict is still on the device."""
        return any(isinstance(verdict, Tensor) for verdict in self.verdicts.values())

    def found(self, ranks: Ranks) -> Found:
        """All of it on the host, where no verdict is late."""
        had_gradients = {number: int(v) for number, v in self.verdicts.items() if v != NO_GRADIENTS}
        share = None if self.lost_share is None else float(ranks.maximum_(self.lost_share).item())
        return Found(had_gradients, float(self.loss), share)


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

    def end_window(self) -> Window:
        """What was found in the window that ends; another begins."""
        ended, self.window = self.window, Window()
        return ended

    def verdict_of(self, optimizer: torch.optim.Optimizer) -> int | Tensor:
        """The verdict on its gradients in this window, `NO_GRADIENTS` where they were not examined."""
        return self.window.verdicts.get(self.number_of(optimizer), NO_GRADIENTS)

    def wait_for(self, optimizer: torch.optim.Optimizer) -> int:
        """`verdict_of` on the host; one wait where it is on the device, which brings the loss too."""
        verdict, window = self.verdict_of(optimizer), self.window
        if isinstance(verdict, Tensor):
            if isinstance(window.loss, Tensor):
                verdict, window.loss = torch.stack([verdict, window.loss.to(verdict.device)]).tolist()
            verdict = window.verdicts[self.number_of(optimizer)] = int(verdict)
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
            share = lost_share(optimizer, device)
            share = torch.zeros((), device=device) if share is None else share  # for the ranks that have gradients
            known = self.window.lost_share
            self.window.lost_share = share if known is None else torch.maximum(share, known)
        found = check(optimizer, inv_scale)
        verdict, skipped = self._judge(found, device)
        self.window.verdicts[self.number_of(optimizer)] = verdict
        return skipped

    def _judge(self, found: Tensor | None, device: torch.device) -> tuple[int | Tensor, Tensor | None]:
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
    if not MODES[precision].takes_scaler:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.dtype in HALF_DTYPES:
                raise InvalidRequestError(
                    f"A trainable parameter of shape {tuple(parameter.shape)} is {str(parameter.dtype).split('.')[1]}; "
                    "precision fp16 needs trainable parameters in fp32, since fp16 gradients cannot be unscaled.",
                    "Convert the model with model.float(), autocast casts where it pays; or train with bf16 "
                    "weights under precision bf16.",
                )


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
                one = torch.ones((), device=device) if inv_scale is None else inv_scale.to(device, non_blocking=True)
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, one)
            found = here if found is None else torch.maximum(found, here.to(found.device, non_blocking=True))
    return found


def lost_share(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | None:
    """An estimate of the share of the gradient, scaled still, that fp16 flushed to zero; None without gradients.

    From a sample of what is left: after the fact a flushed zero looks like any other, but what is flushed leaves
    neighbours barely above the smallest number. 1.0 where nothing is left at all.
    """
    samples = [
        gradient.reshape(-1)[:: max(1, gradient.numel() // _SAMPLES_PER_PARAMETER)].float().to(device)
        for gradient in _local(optimizer)
    ]
    if not any(sample.numel() for sample in samples):
        return None
    magnitudes = torch.cat(samples).abs()
    matters = magnitudes > magnitudes.amax() * NEGLIGIBLE
    num_left = matters.sum()
    num_barely = (matters & (magnitudes < _BARELY_THERE)).sum()
    share = num_barely / num_left.clamp(min=1) / _BARELY_THERE_PER_LOST
    return torch.where(num_left > 0, share, torch.ones_like(share))


def _local(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if hasattr(gradient, "to_local"):  # a DTensor: its own shard; the ranks agree afterwards
                gradient = gradient.to_local()
            if gradient.is_sparse:
                if gradient.dtype == torch.float16 and not gradient.is_coalesced():
                    parameter.grad = gradient = gradient.coalesce()  # summing duplicates is where fp16 overflows
                gradient = gradient._values()
            yield gradient


def listed(outputs: Any) -> Any:
    """`outputs` with lists in place of iterators, which can be read only once. Raises `ValueError` as GradScaler."""
    if isinstance(outputs, Tensor):
        return outputs
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    return (type(outputs) if isinstance(outputs, (list, tuple)) else list)(map(listed, outputs))


def tensors(outputs: Any) -> Iterable[Tensor]:
    """The tensors in what `listed` gave."""
    if isinstance(outputs, Tensor):
        yield outputs
    else:
        for output in outputs:
            yield from tensors(output)

"""Check of an optimizer's gradients for non-finite values, for the share that fp16 lost, and for fp16 parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.numerics.passes import stored
from autotune_amp.precision.modes import MODES
from autotune_amp.precision.step_amp import parameters_of
from autotune_amp.precision.torch_state import HALF_DTYPES

_SAMPLES_PER_PARAMETER = 1024
# Nonzero fp16 numbers below 2^-22 are in the three lowest octaves of the format. If magnitudes are log-normal over 3 to
# 4 octaves (standard deviation), six times as many are there as were flushed when 1 % was flushed.
_BARELY_THERE = 2.0**-22
_BARELY_THERE_PER_LOST = 6.0
# Share of the model's largest gradient. Smaller ones, as before a batch norm or behind a saturated softmax, are
# rounding noise.
NEGLIGIBLE = 2.0**-20


def refuse_half_parameters(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Raise `InvalidRequestError` for half-precision parameters under fp16, whose gradients cannot be unscaled."""
    for parameter in parameters_of(optimizer):
        if MODES[precision].takes_scaler and parameter.requires_grad and parameter.dtype.to_real() in HALF_DTYPES:
            raise InvalidRequestError(
                f"A trainable parameter of shape {tuple(parameter.shape)} is {str(parameter.dtype).split('.')[1]}; "
                "precision fp16 needs trainable parameters in fp32, since fp16 gradients cannot be unscaled.",
                "Convert the model with model.float(), autocast casts where it pays; or train with bf16 "
                "weights under precision bf16.",
            )


@functools.cache
def _one(device: torch.device) -> Tensor:
    """Return a 1 on the device, the same at each call: creating one would launch a kernel."""
    return torch.ones((), dtype=torch.float32, device=device)


def check(optimizer: torch.optim.Optimizer, inv_scale: Tensor | None) -> Tensor | None:
    """Return 1.0 on the device if any gradient is not finite, 0.0 if all are, without a sync; None without gradients.

    Multiplies the gradients by `inv_scale` in place if it is given. Raises `InvalidRequestError` for fp16 gradients,
    which cannot be unscaled.
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
            if found is not None:  # a blocking copy, since the host would read a non-blocking one too early
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
            gradient = stored(gradient)
        elif gradient.is_conj() or gradient.is_neg():  # lazily conjugated or negated tensors are not writable
            parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
        yield torch.view_as_real(gradient) if gradient.is_complex() else gradient

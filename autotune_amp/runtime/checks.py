"""What would go wrong later, said before the first step."""

from __future__ import annotations

import torch

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import DeviceError, InvalidRequestError
from autotune_amp.hardware.device import numbered, parse
from autotune_amp.precision.mode import HALF_DTYPES


def checked_device(device: str | torch.device) -> torch.device:
    """`device` as torch has it. Raises `DeviceError` where torch cannot use it."""
    kind, index = parse(str(device))
    if kind == "auto":
        raise DeviceError("device='auto' does not say where the model is.", 'Pass its device: device="cuda", for one.')
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        raise DeviceError(
            f"device={str(device)!r} was asked for, but PyTorch cannot use any {kind} device here.",
            'Pass the device that the model is on, for example PrecisionController(config, device="cpu").',
        )
    if kind == "mps":
        return torch.device(kind)
    if index is None:
        return torch.device(kind, int(module.current_device()))
    numbered(kind, index, module.device_count())
    return torch.device(kind, index)


def refuse_half_parameters(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Raise `InvalidRequestError` where fp16's scaled gradients could not be unscaled: half precision parameters."""
    if precision != "fp16":
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

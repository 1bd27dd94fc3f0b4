"""What the caller's TF32 flags amount to in a step of the workload: some may concern nothing that runs in it."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.config import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Workload
from autotune_amp.precision import mode as precision
from autotune_amp.precision.mode import CUDA_FLAGS
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.step import make_training

# Matrix products are taken to run always.
_MODULES: dict[str, type[nn.Module]] = {"cudnn.conv": _ConvNd, "cudnn.rnn": nn.RNNBase}
_OPERATORS = {"cudnn.conv": "convolution", "cudnn.rnn": "_rnn"}  # cuDNN's RNN and MIOpen's


def as_run(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    state: Mapping[str, Any],
    batch_size: int | None,
    *,
    has_tf32: bool,
) -> tuple[Precision, bool]:
    """`precision.as_found` of the flags that concern a step of `batch_size`; a precision of the workload's own is so.

    One step is taken where that alone can tell; with None for `batch_size` none is, and all flags count.
    """
    if workload.precision is not None:
        return workload.precision, True
    if not has_tf32:
        return precision.as_found(state, device.type, CUDA_FLAGS)
    found = precision.as_found(state, device.type)
    absent = [flag for flag, kind in _MODULES.items() if not any(isinstance(part, kind) for part in model.modules())]
    _, could_be_strict = precision.as_found(state, device.type, absent)
    if batch_size is None or found[1] or not could_be_strict:
        return found
    candidate = Setting(precision=found[0], batch_size=batch_size, as_found=True)
    spec = Trial(candidate=candidate, device=str(device), torch_state=dict(state))
    used = used_flags(workload, model, spec)
    return precision.as_found(state, device.type, [flag for flag in absent if flag not in used])


def used_flags(workload: Workload, model: nn.Module, spec: Trial) -> frozenset[str]:
    """Which of cuDNN's flags concern an operator of a step, taken as `spec` says; all of them where it cannot be known.

    It cannot where the step fails, and where an operator that is not PyTorch's own may call any other.
    """
    watch = _Watch()
    try:
        with closing(make_training(workload, model, spec)) as training:
            training.start_loading()
            batch = training.next_batch()
            # Compiled code hides its operators, and compiling takes long.
            with torch.compiler.set_stance("force_eager"), watch:
                training.forward_backward(batch)
    except Exception as error:  # the user's code may raise anything
        traceback.clear_frames(error.__traceback__)
        return frozenset(_OPERATORS)
    return frozenset(watch.used)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_own = func.namespace in ("aten", "profiler")  # an optimizer tells the profiler of its steps
        self.used |= {flag for flag, name in _OPERATORS.items() if not is_own or name in func.name()}
        return func(*args, **(kwargs or {}))

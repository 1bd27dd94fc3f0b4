"""Loops of their own on a CUDA device."""

from __future__ import annotations

import pytest
import torch
from loop_samples import LOOPS

from autotune_amp import LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import Context, LoopState
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import make_training

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_a_loop_built_on_the_cpu_trains_on_the_device(name: str, precision: Precision) -> None:
    context = Context(LOOPS[name](), is_kept=False)
    model = context.model(torch.device("cuda"))
    assert isinstance(model, LoopState)
    before = [parameter.detach().clone() for parameter in model.trained()]
    assert {tensor.device.type for tensor in (*before, *model.buffers())} == {"cuda"}
    spec = Trial(
        candidate=Setting(precision=precision, batch_size=32),
        device="cuda",
        loss_scale=LossScale() if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )
    training = make_training(context.workload, model, spec)
    for _ in range(3):
        assert training.forward_backward(training.next_batch()).isfinite()
    assert all(not torch.equal(old, new) for old, new in zip(before, model.trained(), strict=True))

"""cuDNN's benchmark: what it can be switched on for, in a process and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autotune_amp import AmpConfig
from autotune_amp.core.variants import CUDNN_BENCHMARK, SO_ALREADY
from autotune_amp.variants.prepare import set_up, values_for
from autotune_amp.variants.subject import Trained

CONVOLUTION, LINEAR = nn.Conv1d(2, 2, 1), nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    yield
    torch.backends.cudnn.benchmark = before


def trained(model: nn.Module, device: str = "cuda") -> Trained:
    return Trained([model], [], torch.device(device))


def why_not(subject: Trained) -> str | None:
    return values_for(subject)["cudnn_benchmark"]["on"]


def test_it_is_for_convolutions_on_cuda_that_have_it_not_yet() -> None:
    assert why_not(trained(nn.Sequential(LINEAR, CONVOLUTION))) is None
    assert why_not(trained(LINEAR)) == "the model has no convolution"
    assert why_not(trained(CONVOLUTION, "cpu")) == "cuDNN is CUDA's"
    torch.backends.cudnn.benchmark = True
    assert why_not(trained(CONVOLUTION)) == SO_ALREADY


def test_a_trial_takes_it_back_unless_it_was_on_before() -> None:
    undo = set_up("cudnn_benchmark", "on", trained(CONVOLUTION))
    assert undo is not None
    assert torch.backends.cudnn.benchmark
    undo()
    assert not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    assert set_up("cudnn_benchmark", "on", trained(CONVOLUTION)) is None


def test_plain_pytorch_has_a_line_for_it_and_it_changes_no_numerics_to_check() -> None:
    assert CUDNN_BENCHMARK.export("on", "torch") == ["torch.backends.cudnn.benchmark = True"]
    assert CUDNN_BENCHMARK.export("as_found", "torch") is None
    config = AmpConfig(precision="fp32", batch_size=4, cudnn_benchmark="on")
    assert config.numerics == config.ordinary
    assert config.set_up == {"cudnn_benchmark": "on"}

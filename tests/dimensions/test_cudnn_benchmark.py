"""cuDNN's benchmark: what it can be switched on for, in a process and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from autotune_amp import AmpConfig
from autotune_amp.dimensions import CUDNN_BENCHMARK, numerics_of
from autotune_amp.dimensions.dimension import APPLIED_ALREADY
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.trial.worker import supported_values

CONVOLUTION, LINEAR = nn.Conv1d(2, 2, 1), nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    yield
    torch.backends.cudnn.benchmark = before


def live_training(model: nn.Module, device: str = "cuda") -> LiveTraining:
    return LiveTraining([model], [], torch.device(device))


def unsupported_reason(live: LiveTraining) -> str | None:
    return supported_values(live)["cudnn_benchmark"]["on"]


def test_it_is_for_convolutions_on_cuda_that_have_it_not_yet() -> None:
    assert unsupported_reason(live_training(nn.Sequential(LINEAR, CONVOLUTION))) is None
    assert unsupported_reason(live_training(LINEAR)) == "the model has no convolution"
    assert unsupported_reason(live_training(CONVOLUTION, "cpu")) == "cuDNN needs CUDA"
    torch.backends.cudnn.benchmark = True
    assert unsupported_reason(live_training(CONVOLUTION)) == APPLIED_ALREADY


def test_a_trial_takes_it_back_unless_it_was_on_before() -> None:
    undo = CUDNN_BENCHMARK.change_once("on", live_training(CONVOLUTION))
    assert undo is not None
    assert torch.backends.cudnn.benchmark
    undo()
    assert not torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    assert CUDNN_BENCHMARK.change_once("on", live_training(CONVOLUTION)) is None


def test_plain_pytorch_has_a_line_for_it_and_it_changes_no_numerics_to_check() -> None:
    assert CUDNN_BENCHMARK.export("on", "torch") == ["torch.backends.cudnn.benchmark = True"]
    assert CUDNN_BENCHMARK.export("as_found", "torch") is None
    config = AmpConfig(precision="fp32", batch_size=4, cudnn_benchmark="on")
    assert numerics_of(config) == config.ordinary
    assert config.active_variants == {"cudnn_benchmark": "on"}

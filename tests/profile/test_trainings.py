"""The models that precisions are held against each other on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.profile.trainings import trainings
from autotune_amp.trial.bench import Bench
from autotune_amp.trial.spec import Candidate, TrialSpec


class Net(nn.Module):
    """Of our own: torch compiles its own modules as parts of others alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.linear(inputs)


@pytest.fixture
def compiled() -> Iterator[list[Any]]:
    """What a backend was asked to compile."""
    yield []
    torch.compiler.reset()


def test_a_live_model_compiled_in_place_is_compiled_in_each_precision(compiled: list[Any]) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    live = Net()
    live.compile(backend=backend)
    bench = Bench(
        Workload(
            live,
            lambda model, batch: model(batch).square().mean(),
            lambda size: torch.ones(size, 4),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        is_kept=False,
    )
    trials = [TrialSpec(candidate=Candidate(precision=p, batch_size=2), device="cpu") for p in ("fp32", "bf16")]
    models = [training.model for training in trainings(bench, trials)]
    assert models[0] is not models[1]
    for number, model in enumerate(models, start=1):
        model(torch.ones(2, 4))
        assert len(compiled) == number

"""gather_for_metrics in `windows`, whose batches are fetched ahead: what the plain loop gathers, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

from accelerate_training import Net, fresh_accelerate, inputs, loss_of

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.integrations.accelerate import AutotuneAccelerator, num_own


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_accelerate():
        yield


class Gathering:
    """A loop that gathers its inputs, and what Accelerate says of the loader at each pass."""

    def __init__(self, config: AmpConfig, *, uses_windows: bool) -> None:
        self.accelerator = AutotuneAccelerator(config, cpu=True)
        self.uses_windows = uses_windows
        self.gathered: list[torch.Tensor] = []
        self.said: list[tuple[bool, int]] = []

    @property
    def sizes(self) -> list[int]:
        return [len(samples) for samples in self.gathered]

    def over(self, samples: Any) -> Gathering:
        accelerator, state, net = self.accelerator, self.accelerator.gradient_state, Net()
        plain: Any = torch.optim.SGD(net.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(net, plain, DataLoader(samples, batch_size=8))
        for batch in accelerator.windows(loader) if self.uses_windows else loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                self.gathered.append(accelerator.gather_for_metrics(batch))
                self.said.append((state.end_of_dataloader, state.remainder))
                optimizer.step()
                optimizer.zero_grad()
        assert state.active_dataloader is None
        return self


@pytest.mark.parametrize(("num_samples", "accumulation_steps"), [(20, 1), (20, 2), (24, 2), (20, 4)])
def test_every_sample_is_gathered_as_in_the_plain_loop(num_samples: int, accumulation_steps: int) -> None:
    config = AmpConfig(precision="bf16", batch_size=8, accumulation_steps=accumulation_steps)
    samples = inputs(num_samples, batch_size=1)
    plain, ours = (Gathering(config, uses_windows=is_ours).over(samples) for is_ours in (False, True))
    assert plain.sizes == [8, 8, num_samples - 16]
    assert ours.sizes == plain.sizes
    assert ours.said == plain.said
    assert ours.said[-1][0]
    assert torch.equal(torch.cat(ours.gathered), samples)


def test_after_a_demotion_every_sample_is_gathered_in_pieces() -> None:
    plan = FallbackPlan(precision="fp32", batch_size=4, accumulation_steps=4)
    config = AmpConfig(
        precision="fp16", batch_size=8, accumulation_steps=2, loss_scale=LossScale(init_scale=1024.0), fallback=[plan]
    )
    samples = inputs(9, batch_size=8, overflowing=range(2, 6))[:69]  # the last batch has 5
    ours = Gathering(config, uses_windows=True).over(samples)
    assert ours.accelerator.controller.status().precision == "fp32"
    assert ours.sizes[:2] == [8, 8]
    assert ours.sizes[-4:] == [4, 4, 3, 2]
    assert [is_end for is_end, _ in ours.said[-3:]] == [False, True, True]
    assert torch.equal(torch.cat(ours.gathered), samples)


def test_an_evaluation_in_the_middle_has_a_loader_of_its_own() -> None:
    accelerator = AutotuneAccelerator(AmpConfig(precision="fp32", batch_size=8, accumulation_steps=2), cpu=True)
    state = accelerator.gradient_state
    training: Any = inputs(24, batch_size=1)
    evaluated: Any = inputs(12, batch_size=1)
    loader, evaluation = accelerator.prepare(DataLoader(training, batch_size=8), DataLoader(evaluated, batch_size=8))
    said = []
    for batch in accelerator.windows(loader):
        assert [len(accelerator.gather_for_metrics(some)) for some in evaluation] == [8, 4]
        said.append((state.active_dataloader is loader, state.end_of_dataloader, len(batch)))
    assert said == [(True, False, 8), (True, False, 8), (True, True, 8)]
    for _ in accelerator.windows(loader):
        break
    assert (loader.end_of_dataloader, loader.remainder) == (False, 0), "what it says itself, two batches on"


@pytest.mark.parametrize(("remainder", "expected"), [(3, [3, 0]), (8, [4, 4]), (10, [6, 4]), (15, [8, 7])])
def test_of_a_piece_the_ranks_first_samples_are_the_datas_own(remainder: int, expected: list[int]) -> None:
    """Two ranks of 8 samples, in two pieces of 4."""
    assert [num_own(remainder, 8, piece) for piece in (range(4), range(4, 8))] == expected

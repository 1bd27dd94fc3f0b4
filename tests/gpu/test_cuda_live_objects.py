"""Live objects on a CUDA device: what a trial of them finds there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.processes.packing import pack, unpack
from autotune_amp.trial.context import Context, move_to_accelerator
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import make_training
from autotune_amp.trial.worker import prepare_process

pytestmark = pytest.mark.gpu


def test_what_the_loss_and_the_dataset_hold_on_the_device_is_there_in_a_trial() -> None:
    model, teacher = nn.Linear(4, 2).cuda(), nn.Linear(4, 2).cuda()
    view_of = torch.ones(3, device="cuda")
    criterion = nn.CrossEntropyLoss(weight=view_of[:2])
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 4).cuda(), torch.randint(2, (8,)).cuda())
    on_cpu = torch.ones(1)

    def loss(model: nn.Module, batch: Any) -> Any:
        assert all(part.is_cuda for part in dataset.tensors)
        assert not on_cpu.is_cuda
        return criterion(model(batch[0]), batch[1]) + nn.functional.mse_loss(model(batch[0]), teacher(batch[0]))

    optimizer = torch.optim.SGD([*model.parameters(), *teacher.parameters()], lr=0.1)
    there: Any = unpack(pack(Workload(model, loss, torch.utils.data.DataLoader(dataset, batch_size=4), optimizer)))
    assert {tensor.device.type for tensor in (*there.model.parameters(), *there.data.dataset.tensors)} == {"cpu"}
    context = Context(there)
    spec = Trial(candidate=Setting(precision="fp32", batch_size=4), device="cuda:0", torch_state=torch_state.capture())
    prepare_process(context, spec)
    training = make_training(there, context.model(torch.device("cuda:0")), spec)
    training.start_loading()
    assert training.forward_backward(training.next_batch()).isfinite()
    training.update()
    training.close()


def test_views_of_the_same_memory_on_the_device_stay_so_in_a_trial() -> None:
    model, whole = nn.Linear(4, 2).cuda(), torch.zeros(4, 3, device="cuda")
    part, sparse = whole[1:, 1], torch.eye(3, device="cuda").to_sparse()

    def loss(model: nn.Module, batch: Any) -> Any:
        part.fill_(float(sparse.sum()))
        return model(batch).sum() + whole.sum()

    there: Any = unpack(pack(Workload(model, loss, lambda size: torch.ones(size, 4))))
    move_to_accelerator(torch.device("cuda:0"))
    assert there.loss(lambda batch: batch, torch.zeros(1, device="cuda")) == 9.0

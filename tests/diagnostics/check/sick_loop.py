"""A loop of its own that clips scaled gradients of a loss in half precision: apart, since all of a file is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp import Workload


def build() -> dict[str, Any]:
    net = nn.Linear(8, 8)
    return {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}


def step(state: dict[str, Any], batch: Tensor, amp: Any) -> None:
    with amp.autocast():
        out = state["net"](batch)
        loss = (out * out).mean()
    amp.scale(loss).backward()
    nn.utils.clip_grad_norm_(state["net"].parameters(), 1.0)
    amp.step(state["optimizer"])
    amp.update()


def workload() -> Workload:
    return Workload(build=build, train_step=step, data=lambda n: torch.randn(n, 8))

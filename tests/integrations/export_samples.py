"""Configs to export, and what a text is pasted into."""

from __future__ import annotations

from typing import Any

import torch
from samples import ambient
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale

ACCUMULATED = AmpConfig(precision="bf16", batch_size=4, accumulation_steps=2)
CONFIGS = [
    AmpConfig(precision="fp32", batch_size=8),
    ACCUMULATED,
    AmpConfig(
        precision="fp16",
        batch_size=4,
        accumulation_steps=2,
        loss_scale=LossScale(init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2),
        num_workers=1,
    ),
]
PINNED = AmpConfig(
    precision="fp16",
    batch_size=4,
    accumulation_steps=2,
    loss_scale=LossScale(init_scale=64.0, hysteresis=2),
    pinned_modules=("second",),
    fallback=(FallbackPlan(precision="fp32", batch_size=4, accumulation_steps=2, slowdown=1.5),),
)


def scaler_values(scaler: Any) -> tuple[float, ...]:
    """What a live scaler scales by, and how it goes on."""
    return (scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())


def values_after(scale: LossScale | None, num_steps: int) -> tuple[float, ...]:
    """The same as the config has it, after steps without an overflow."""
    assert scale is not None
    grown = scale.growth_factor ** (num_steps // scale.growth_interval)
    return (scale.init_scale * grown, scale.growth_factor, scale.backoff_factor, scale.growth_interval)


def precision_here() -> str:
    """What autocast means around the caller."""
    return {torch.float16: "fp16", torch.bfloat16: "bf16", None: "fp32"}[ambient()]


class Net(nn.Module):
    """Notes what its forward runs in. Takes and returns what a Transformers Trainer wants, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.precisions: list[str] = []
        self.batch_sizes: list[int] = []
        self.second_dtypes: set[torch.dtype] = set()

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        self.precisions.append(precision_here())
        self.batch_sizes.append(len(inputs))
        outputs = self.second(self.first(inputs))
        self.second_dtypes.add(outputs.dtype)
        return outputs if labels is None else {"loss": outputs.float().pow(2).mean(), "logits": outputs}


class Ran:
    """What a text left behind."""

    def __init__(self) -> None:
        self.net = Net()
        self.dataset = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
        self.num_steps = 0
        self.loss_precisions: set[str] = set()
        self.names: dict[str, Any] = {}

    @property
    def loader(self) -> Any:
        return self.names["loader"]

    def count(self, *_: object) -> None:
        self.num_steps += 1


def exec_text(text: str, **names: Any) -> Ran:
    """Run the text in a script that has `dataset`, `model`, `optimizer` and `compute_loss`."""
    ran = Ran()
    optimizer = torch.optim.SGD(ran.net.parameters(), lr=0.01)
    optimizer.register_step_post_hook(ran.count)

    def compute_loss(model: nn.Module, batch: Tensor) -> Tensor:
        outputs = model(batch)
        ran.loss_precisions.add(precision_here())
        loss: Tensor = outputs.float().pow(2).mean()
        return loss

    ran.names = {
        "dataset": ran.dataset,
        "model": ran.net,
        "optimizer": optimizer,
        "compute_loss": compute_loss,
        **names,
    }
    exec(compile(text, "exported.py", "exec"), ran.names)
    return ran

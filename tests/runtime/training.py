"""A training loop as a user writes it, on tiny models, for the tests of the controller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.runtime.controller import PrecisionController

Batch = tuple[Tensor, Tensor]
MODES = ("eager", "attached then compiled", "compiled then attached")


def fp16(**options: Any) -> AmpConfig:
    """fp16 with both fallbacks; `options` replace what is given."""
    loss_scale = options.pop("loss_scale", LossScale(init_scale=1024.0))
    return AmpConfig(
        **{"precision": "fp16", "batch_size": 4, "loss_scale": loss_scale, "fallback": ["bf16", "fp32"], **options}
    )


def batches(num_batches: int, *, width: int = 8, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, 1, generator=generator)
    made = []
    for _ in range(num_batches):
        inputs = torch.randn(4, width, generator=generator)
        made.append((inputs, inputs @ weight))
    return made


def timeless(state: dict[str, Any]) -> dict[str, Any]:
    """A controller's state without the seconds that it took, which no two runs share, and without what was sampled,
    which late verdicts bring at another update."""
    its = copy.deepcopy(state)
    its["autotune_amp"]["counters"].pop("flushed_share")
    for totals in ("totals", "totals_at_reset"):
        its["autotune_amp"]["counters"][totals].pop("seconds")
    return its


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether parameters and buffers are equal bit for bit."""
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


class Loop:
    """The README's loop over `model`, plain (no controller, fp32) or steered."""

    def __init__(
        self,
        model: nn.Module,
        controller: PrecisionController | None = None,
        *,
        mode: str = "eager",
        attaches: bool = True,
        reruns: bool = True,
        own_autocast: torch.dtype | None = None,
        learning_rate: float = 0.05,
        loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.mse_loss,
        backend: Any = "eager",
    ) -> None:
        self.controller = controller
        self.loss = loss
        self.own_autocast = own_autocast
        self.optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        self.losses: list[float] = []
        self.batch: Batch | None = None
        self.model: Any = model
        if controller is not None and attaches and mode != "compiled then attached":
            controller.attach(model, self.rerun if reruns else None)
        if mode != "eager":
            self.model = torch.compile(model, backend=backend)
        if controller is not None and attaches and mode == "compiled then attached":
            self.model(torch.zeros(2, 8))  # compiled before it is attached
            for parameter in model.parameters():
                parameter.grad = None
            controller.attach(self.model, self.rerun if reruns else None)

    def rerun(self) -> Tensor:
        assert self.batch is not None
        inputs, targets = self.batch
        with self._own():
            return self.loss(self.model(inputs), targets)

    @contextmanager
    def _own(self) -> Iterator[None]:
        if self.own_autocast is None:
            yield
        else:
            with torch.autocast("cpu", dtype=self.own_autocast):
                yield

    def step(self, batch: Batch) -> bool:
        self.batch = batch
        inputs, targets = batch
        controller = self.controller
        self.optimizer.zero_grad()
        if controller is None:
            loss = self.loss(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(loss.item())
            return True
        if self.own_autocast is None:
            with controller.autocast():
                loss = self.loss(self.model(inputs), targets)
        else:
            loss = self.rerun()
        self.losses.append(loss.item())
        controller.backward(loss)
        stepped = controller.step(self.optimizer)
        controller.update()
        return bool(stepped)

    def run(self, given: Iterable[Batch]) -> Loop:
        for batch in given:
            self.step(batch)
        return self

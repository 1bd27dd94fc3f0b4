"""A training run on one of two ranks, and what befalls one of them in it."""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training import timeless

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.errors import TrainingStoppedError
from autotune_amp.core.precisions import Precision
from autotune_amp.dimensions.attention import enabled_backends
from autotune_amp.runtime import checkpoint, executor
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.status import to_plain

NUM_RANKS = 2
WIDTH, BATCH = 8, 4
INIT_SCALE = 1024.0
CONFIG = AmpConfig(
    precision="fp16", batch_size=BATCH, loss_scale=LossScale(init_scale=INIT_SCALE), fallback=["bf16", "fp32"]
)
Wrapper = Literal["ddp", "ddp_ignored", "fsdp1", "fsdp2"]
Kind = Literal["input", "loss", "gradient", "steep", "unused", "signal", "attention"]
Attached = Literal["no", "before", "after"]  # before or after the model is wrapped


class Model(nn.Module):
    """Two linear layers overflow fp16 on a huge input; the norm after them makes it harmless where they do not.

    The side head reads the features detached: what its gradient comes to stays in its own weights, a row for each
    output, of which FSDP gives each rank some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.side = nn.Linear(2 * WIDTH, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.norm(torch.cat([self.left(inputs), self.right(inputs)], dim=-1))
        return self.head(features), self.side(features.detach())


@dataclass(frozen=True)
class Trouble:
    """What happens on `rank` alone, at `steps`.

    input: values above fp16's largest. loss: infinite, in any precision. gradient: infinite in the side head's first
    row, a tiny part that FSDP keeps on rank 0. steep: the loss times 1e6, so that the gradients overflow fp16.
    unused: the side head is left out of the loss and has no gradient. signal: SIGTERM comes. attention: a gradient is
    NaN where cuDNN may compute attention.
    """

    kind: Kind
    steps: frozenset[int]
    rank: int = 1

    @classmethod
    def at(cls, kind: Kind, *steps: int, rank: int = 1) -> Trouble:
        return cls(kind, frozenset(steps), rank)

    def strikes(self, kind: str, step: int, rank: int) -> bool:
        return kind == self.kind and step in self.steps and rank == self.rank


@dataclass(frozen=True)
class Scenario:
    """A run; the same on both ranks but for `trouble` and what names a rank."""

    wrapper: Wrapper = "ddp"
    fused: bool = False
    trouble: Trouble | None = None
    attached: Attached = "no"
    has_rerun: bool = True
    scaler: Literal["controller", "lagged"] = "controller"
    num_optimizers: int = 1
    accumulation_steps: int = 1
    num_steps: int = 7
    config: AmpConfig = CONFIG
    asking_ranks: tuple[int, ...] = (0, 1)  # which call status(), state_dict() and get_scale() after every step
    cramped_rank: int | None = None  # has no memory left for another plan
    run_log: str | None = None
    in_one_call: bool = False  # `train_step`
    names_more_on_rank: int | None = None  # where the closure's code names a second model

    def is_in_one_call(self) -> bool:
        """Whether the loop is not written out."""
        return self.in_one_call or self.names_more_on_rank is not None


@dataclass
class Outcome:
    """What one rank saw; an entry for each step. `counts` are updates, steps, skips. `weights` are those of the whole
    model, whatever the sharding.
    """

    precisions: list[Precision] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    callbacks: list[str] = field(default_factory=list)
    signalled_at: list[int] = field(default_factory=list)  # steps
    counts: tuple[int, int, int] = (0, 0, 0)
    history: list[dict[str, object]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def moves(self) -> list[tuple[object, ...]]:
        return [(move["update"], move["kind"], move["before"], move["after"]) for move in self.history]


class LaggedController(PrecisionController):
    """Verdicts stay on the device, here too, so that they are acted on late, as behind a fused optimizer on a GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check.is_on_host = lambda tensor: False  # type: ignore[method-assign] # of this object alone


def batch_of(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, trouble: Trouble | None, step: int, rank: int) -> Tensor:
    """The loss of one pass, with whatever befalls this rank at this step."""

    def struck(kind: str) -> bool:
        return trouble is not None and trouble.strikes(kind, step, rank)

    if struck("signal"):
        signal.raise_signal(signal.SIGTERM)
    main, side = model(inputs * 1e6 if struck("input") else inputs)
    if struck("attention"):
        main = nn.functional.scaled_dot_product_attention(main[:, None], main[:, None], main[:, None])[:, 0]
        main.register_hook(lambda gradient: gradient * (math.nan if "cudnn" in enabled_backends() else 1.0))  # type: ignore[no-untyped-call]
    if struck("gradient"):
        side.register_hook(lambda gradient: gradient * gradient.new_tensor([math.inf, 1.0, 1.0, 1.0]))
    loss = (main.float() - 1.0).square().mean()
    if not struck("unused"):
        loss = loss + (side.float() - 2.0).square().mean()
    factor = math.inf if struck("loss") else 1e6 if struck("steep") else 1.0
    return torch.mul(loss, factor)


def optimizers_of(model: nn.Module, scenario: Scenario) -> list[torch.optim.Optimizer]:
    """One over everything, or the side head's apart, last."""
    side = [p for name, p in model.named_parameters() if "side" in name]
    rest = [p for name, p in model.named_parameters() if "side" not in name]
    groups = [rest + side] if scenario.num_optimizers == 1 else [rest, side]
    return [torch.optim.Adam(group, lr=0.01, fused=scenario.fused) for group in groups]


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def wrapped(model: Model, wrapper: Wrapper) -> nn.Module:
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if wrapper == "fsdp2":
        for layer in (model.left, model.right, model.side):
            fully_shard(layer)
        fully_shard(model)
        return model
    if wrapper == "ddp_ignored":
        names = [f"side.{name}" for name, _ in model.side.named_parameters()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(model)


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """As plain lists; a collective where the model is sharded."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return {name: p.detach().tolist() for name, p in model.module.named_parameters()}
    parameters = {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}
    return {name: (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist() for name, p in parameters.items()}


def train(scenario: Scenario, rank: int) -> Outcome:
    """One run on this rank."""
    with patch.object(
        executor, "_available_memory_bytes", lambda device: 0 if rank == scenario.cramped_rank else 2**40
    ):
        return _train(scenario, rank)


def _train(scenario: Scenario, rank: int) -> Outcome:
    bare = new_model()
    kind = LaggedController if scenario.scaler == "lagged" else PrecisionController
    outcome = Outcome()
    is_signalled = scenario.trouble is not None and scenario.trouble.kind == "signal"
    step = micro_batch = 0

    def note_signal() -> None:
        outcome.signalled_at.append(step)

    on_signal = note_signal if is_signalled else None
    controller = kind(scenario.config, "cpu", run_log=scenario.run_log, on_signal=on_signal)

    def rerun() -> Tensor:
        trouble = scenario.trouble if micro_batch == 0 else None
        return loss_of(model, batch_of(step, micro_batch, rank), trouble, step, rank)

    if scenario.attached == "before":
        controller.attach(bare, rerun if scenario.has_rerun else None)
    model = wrapped(bare, scenario.wrapper)
    if scenario.attached == "after":
        controller.attach(model, rerun if scenario.has_rerun else None)
    beside = nn.ModuleList([bare.left])

    def names_more() -> Tensor:
        assert len(beside) == 1
        return rerun()

    closure = names_more if rank == scenario.names_more_on_rank else rerun
    optimizers = optimizers_of(model, scenario)
    controller.on_step(lambda: outcome.callbacks.append("any"))
    controller.on_step(lambda: outcome.callbacks.append("side"), optimizers[-1])
    try:
        for step in range(scenario.num_steps):  # noqa: B007 # the closure reads it
            outcome.precisions.append(controller.config.precision)
            if scenario.is_in_one_call():
                taken = controller.train_step(closure, optimizers)
                outcome.stepped.append(bool(taken))
                continue
            for micro_batch in range(scenario.accumulation_steps):
                is_last = micro_batch == scenario.accumulation_steps - 1
                with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
                    with controller.autocast():
                        loss = rerun()
                    controller.backward(loss / scenario.accumulation_steps)
            stepped = [controller.step(optimizer) for optimizer in optimizers]
            controller.update()
            outcome.stepped.append(bool(stepped[0]))
            for optimizer in optimizers:
                optimizer.zero_grad()
            if rank in scenario.asking_ranks:
                controller.status()
                controller.state_dict()
                outcome.scales.append(controller.get_scale())
    except TrainingStoppedError as stopped:
        outcome.stepped.append(bool(stepped[0]))
        outcome.error = f"{type(stopped).__name__}: {stopped.message}"
    controller.synchronize()
    status = controller.status()
    outcome.counts = (status.num_updates, status.num_steps, status.num_skips)
    outcome.history = [to_plain(move) for move in status.history]
    outcome.state = timeless(controller.state_dict())
    outcome.state[checkpoint.KEY]["counters"]["run_id"] = None  # that of the log, which rank 0 alone writes
    outcome.weights = whole_weights(model)
    return outcome

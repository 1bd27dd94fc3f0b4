"""Two ranks in processes of their own: a training run on each under gloo, and what the run showed there."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.config import AmpConfig, LossScale, Precision
from autotune_amp.errors import TrainingStoppedError
from autotune_amp.runtime.controller import PrecisionController
from autotune_amp.runtime.scaler import JudgingScaler
from autotune_amp.runtime.status import to_plain

NUM_RANKS = 2
WIDTH, BATCH = 8, 4
INIT_SCALE = 1024.0
CONFIG = AmpConfig(
    precision="fp16", batch_size=BATCH, loss_scale=LossScale(init_scale=INIT_SCALE), fallback=["bf16", "fp32"]
)
Wrapper = Literal["ddp", "ddp_ignored", "fsdp1", "fsdp2"]


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
    row, a tiny part that FSDP keeps on rank 0. unused: the side head is left out of the loss and has no gradient.
    """

    kind: Literal["input", "loss", "gradient", "unused"]
    steps: frozenset[int]
    rank: int = 1

    @classmethod
    def at(cls, kind: Any, *steps: int, rank: int = 1) -> Trouble:
        return cls(kind, frozenset(steps), rank)

    def strikes(self, kind: str, step: int, rank: int) -> bool:
        return kind == self.kind and step in self.steps and rank == self.rank


@dataclass(frozen=True)
class Scenario:
    wrapper: Wrapper = "ddp"
    optimizer: Literal["sgd", "adam"] = "sgd"
    fused: bool = False
    trouble: Trouble | None = None
    attached: Literal["no", "before", "after"] = "no"  # before or after the model is wrapped
    scaler: Literal["controller", "lagged", "plain", "sharded"] = "controller"
    num_optimizers: int = 1
    accumulation_steps: int = 1
    num_steps: int = 7
    config: AmpConfig = CONFIG
    asking_rank: int | None = None  # calls status(), state_dict() and get_scale() after every step, alone
    dies_at: tuple[int, Literal["step", "rerun"]] | None = None  # rank 1, without a word


@dataclass
class Outcome:
    """What one rank saw; an entry for each step. `weights` are whole, whatever the sharding."""

    precisions: list[Precision] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    stepped: list[bool] = field(default_factory=list)
    num_callbacks: int = 0
    num_side_callbacks: int = 0
    counts: tuple[int, int, int] = (0, 0, 0)  # updates, steps, skips
    history: list[dict[str, object]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def moves(self) -> list[tuple[object, ...]]:
        return [(move["update"], move["kind"], move["before"], move["after"]) for move in self.history]


class LaggedController(PrecisionController):
    """Verdicts stay on the device, here too, so that they are acted on late, as behind a fused optimizer on a GPU."""

    def _verdict(self, found: Tensor | None, device: torch.device) -> int | Tensor:
        known = torch.tensor(float(JudgingScaler._verdict(self, found, device)))
        return known


def batch_of(step: int, micro_batch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, trouble: Trouble | None, step: int, rank: int) -> Tensor:
    """The loss of one pass, with whatever befalls this rank at this step."""

    def struck(kind: str) -> bool:
        return trouble is not None and trouble.strikes(kind, step, rank)

    main, side = model(inputs * 1e6 if struck("input") else inputs)
    if struck("gradient"):
        side.register_hook(lambda gradient: gradient * torch.tensor([math.inf, 1.0, 1.0, 1.0]))
    loss = (main.float() - 1.0).square().mean()
    if not struck("unused"):
        loss = loss + (side.float() - 2.0).square().mean()
    return loss * math.inf if struck("loss") else loss


def optimizers_of(model: nn.Module, scenario: Scenario) -> list[torch.optim.Optimizer]:
    """One over everything, or the side head's apart, last."""
    side = [p for name, p in model.named_parameters() if "side" in name]
    rest = [p for name, p in model.named_parameters() if "side" not in name]
    groups = [rest + side] if scenario.num_optimizers == 1 else [rest, side]
    if scenario.optimizer == "sgd":
        return [torch.optim.SGD(group, lr=0.1, momentum=0.9, fused=scenario.fused) for group in groups]
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
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
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
    bare = new_model()
    if scenario.scaler in ("plain", "sharded"):
        return _train_plainly(wrapped(bare, scenario.wrapper), scenario, rank)
    kind = LaggedController if scenario.scaler == "lagged" else PrecisionController
    controller = kind(scenario.config, "cpu")
    last: list[tuple[Tensor, int]] = []

    def rerun() -> Tensor:
        if scenario.dies_at == (last[0][1], "rerun") and rank == 1:
            os._exit(1)
        return loss_of(model, last[0][0], scenario.trouble, last[0][1], rank)

    if scenario.attached == "before":
        controller.attach(bare, rerun)
    model = wrapped(bare, scenario.wrapper)
    if scenario.attached == "after":
        controller.attach(model, rerun)
    optimizers = optimizers_of(model, scenario)
    outcome = Outcome()

    def count() -> None:
        outcome.num_callbacks += 1

    def count_side() -> None:
        outcome.num_side_callbacks += 1

    controller.on_step(count)
    controller.on_step(count_side, optimizers[-1])
    try:
        for step in range(scenario.num_steps):
            outcome.precisions.append(controller.config.precision)
            for micro_batch in range(scenario.accumulation_steps):
                last[:] = [(batch_of(step, micro_batch, rank), step)]
                is_last = micro_batch == scenario.accumulation_steps - 1
                with _unsynchronised(model, not is_last):
                    with controller.autocast():
                        trouble = scenario.trouble if micro_batch == 0 else None
                        loss = loss_of(model, last[0][0], trouble, step, rank)
                    if scenario.dies_at == (step, "step") and rank == 1:
                        os._exit(1)
                    controller.backward(loss / scenario.accumulation_steps)
            outcome.stepped.append([bool(controller.step(optimizer)) for optimizer in optimizers][0])
            controller.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if scenario.asking_rank == rank:
                controller.status(), controller.state_dict()
            if scenario.asking_rank in (None, rank):
                outcome.scales.append(controller.get_scale())
    except TrainingStoppedError as stopped:
        outcome.error = f"{type(stopped).__name__}: {stopped.message}"
    status = controller.status()
    outcome.counts = (status.num_updates, status.num_steps, status.num_skips)
    outcome.history = [to_plain(move) for move in status.history]
    outcome.state = controller.state_dict()
    outcome.weights = whole_weights(model)
    return outcome


def _unsynchronised(model: nn.Module, wanted: bool) -> Any:
    return model.no_sync() if wanted and isinstance(model, DistributedDataParallel) else nullcontext()


def _train_plainly(model: nn.Module, scenario: Scenario, rank: int) -> Outcome:
    """As PyTorch documents it, with its own scalers."""
    kind = ShardedGradScaler if scenario.scaler == "sharded" else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=INIT_SCALE)
    (optimizer,) = optimizers_of(model, scenario)
    outcome = Outcome()
    for step in range(scenario.num_steps):
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch_of(step, 0, rank), scenario.trouble, step, rank)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        outcome.scales.append(scaler.get_scale())
    outcome.weights = whole_weights(model)
    return outcome


def trained_by_hand(scenario: Scenario, precisions: list[Precision], skipped: frozenset[int]) -> list[dict[str, Any]]:
    """Each rank's weights after a plain loop in one process: no wrapper, no scaler, the steps in `skipped` left out."""
    models = [new_model() for _ in range(NUM_RANKS)]
    optimizers = [optimizers_of(model, scenario) for model in models]
    for step, precision in enumerate(precisions):
        if step in skipped:
            continue
        loss_scale = INIT_SCALE if precision == "fp16" else 1.0
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        for rank, model in enumerate(models):
            for micro_batch in range(scenario.accumulation_steps):
                with torch.autocast("cpu", dtype) if dtype else nullcontext():
                    trouble = scenario.trouble if micro_batch == 0 else None
                    loss = loss_of(model, batch_of(step, micro_batch, rank), trouble, step, rank)
                (loss / scenario.accumulation_steps * loss_scale).backward()
        for name, *copies in zip(
            dict(models[0].named_parameters()), *(model.parameters() for model in models), strict=True
        ):
            is_own = scenario.wrapper == "ddp_ignored" and name.startswith("side.")
            gradients = [copy.grad / loss_scale for copy in copies if copy.grad is not None]
            if not is_own:
                gradients = [torch.stack(gradients).sum(dim=0) / NUM_RANKS] * NUM_RANKS
            for copy, gradient in zip([c for c in copies if not is_own or c.grad is not None], gradients, strict=True):
                copy.grad = gradient.clone()
        for mine in optimizers:
            for optimizer in mine:
                optimizer.step()
                optimizer.zero_grad()
    return [whole_weights(model) for model in models]


class Ranks:
    """Two processes joined by gloo that run scenarios one after the other, until one of them fails."""

    LIMIT_SECONDS = 100.0

    def __init__(self, folder: Path, group_seconds: float = 60.0) -> None:
        context = multiprocessing.get_context("spawn")
        store = folder / "store"
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, str(store), group_seconds), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def send(self, scenario: Scenario) -> None:
        for pipe in self.pipes:
            pipe.send(scenario)

    def answer(self, rank: int) -> Outcome | str:
        """The outcome, or the traceback of what ended the run there. Raises `TimeoutError` where nothing comes."""
        if not self.pipes[rank].poll(self.LIMIT_SECONDS):
            raise TimeoutError(f"rank {rank} hangs")
        answer: Outcome | str = self.pipes[rank].recv()
        return answer

    def end(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # ends a rank that waits for its next scenario
        for process in self.processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _serve(pipe: Connection, rank: int, store: str, group_seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=group_seconds),
    )
    while True:
        try:
            scenario = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(train(scenario, rank))
        except Exception:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()

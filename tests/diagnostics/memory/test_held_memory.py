"""The child's side in this process: every part has the bytes that the shapes have, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint

from autotune_amp import Workload
from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Failure
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.memory import child
from autotune_amp.diagnostics.memory.results import MemoryBreakdown, MemoryJob
from autotune_amp.precision import torch_state
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial

BATCH, WIDTH, HIDDEN = 4, 8, 16
FLOAT, HALF = 4, 2  # bytes


def loss(model: nn.Module, batch: Any) -> Tensor:
    found: Tensor = (model(batch[0]) - batch[1]).square().mean()
    return found


def data(size: int) -> tuple[Tensor, Tensor]:
    return torch.ones(size, WIDTH), torch.ones(size, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


MLP_PARAMETERS = WIDTH * HIDDEN + HIDDEN + HIDDEN + 1


def ran(
    model: Callable[[], nn.Module] = mlp, precision: Precision = "fp32", *, steps: int = 1, **changes: Any
) -> MemoryBreakdown | Failure:
    made = Workload(**{"model": model, "loss": loss, "data": data, "optimizer": torch.optim.SGD, **changes})
    trial = Trial(
        candidate=Setting(precision=precision, batch_size=BATCH, accumulation_steps=steps),
        device="cpu",
        loss_scale=LossScale() if precision == "fp16" else None,
        torch_state=torch_state.capture(),
    )
    job = MemoryJob(device="cpu", trial=trial)
    return child.measure_memory(Context(made, is_kept=False), job, lambda message: None)


def taken_apart(*arguments: Any, **changes: Any) -> MemoryBreakdown:
    found = ran(*arguments, **changes)
    assert isinstance(found, MemoryBreakdown), found
    return found


def saved(found: MemoryBreakdown) -> dict[str, int]:
    return {module.name: module.num_bytes for module in found.modules}


def test_parameters_gradients_and_the_batch() -> None:
    found = taken_apart()
    assert found.parameters_bytes == found.gradients_bytes == FLOAT * MLP_PARAMETERS
    assert found.batch_bytes == FLOAT * BATCH * (WIDTH + 1)
    assert (found.buffers_bytes, found.cast_weights_bytes, found.allocated_bytes) == (0, 0, None)
    assert found.optimizers == ("SGD",)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.SGD, 0),
        (lambda parameters: torch.optim.SGD(parameters, momentum=0.9), FLOAT * MLP_PARAMETERS),
        # And a step counter for each of the four parameters.
        (torch.optim.AdamW, FLOAT * (2 * MLP_PARAMETERS + 4)),
        (lambda parameters: torch.optim.AdamW(parameters, amsgrad=True), FLOAT * (3 * MLP_PARAMETERS + 4)),
    ],
)
def test_the_state_of_the_optimizer(optimizer: Any, expected: int) -> None:
    assert taken_apart(optimizer=optimizer).optimizer_state_bytes == expected


class NestedState(torch.optim.SGD):
    """Its state has a list in a dict, and one tensor twice."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            history = torch.zeros(3, 10)
            self.state[parameter] = {"history": {"last": [history, history[1:]]}, "number": 1}


def test_nested_state_counts_and_a_view_of_it_does_not() -> None:
    assert taken_apart(optimizer=NestedState).optimizer_state_bytes == 4 * FLOAT * 30


class Tied(nn.Module):
    """A weight that two layers share, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)) + self.offset
        return y


def test_tied_weights_count_once() -> None:
    found = taken_apart(Tied, optimizer=torch.optim.AdamW)
    assert found.parameters_bytes == found.gradients_bytes == FLOAT * WIDTH * WIDTH
    assert found.optimizer_state_bytes == FLOAT * (2 * WIDTH * WIDTH + 1)
    assert found.buffers_bytes == FLOAT * WIDTH


def test_each_storage_is_of_the_module_that_saved_it_first() -> None:
    """The first layer saves the batch, ReLU its output, which the second layer saves too; the loss a difference."""
    assert saved(taken_apart()) == {"": FLOAT * BATCH, "1": FLOAT * BATCH * HIDDEN}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_under_autocast_activations_halve_and_weights_are_cast(precision: Precision) -> None:
    found = taken_apart(mlp, precision)
    assert found.parameters_bytes == found.gradients_bytes == FLOAT * MLP_PARAMETERS
    assert found.cast_weights_bytes == HALF * MLP_PARAMETERS
    scale = FLOAT * (precision == "fp16")  # what the loss was multiplied by
    assert saved(found) == {
        "": FLOAT * BATCH + scale,
        "0": HALF * BATCH * WIDTH,  # the batch in the compute type
        "1": HALF * BATCH * HIDDEN,
    }


@pytest.mark.parametrize("to", [{"dtype": torch.float32, "copy": True}, {"device": "meta", "dtype": torch.bfloat16}])
def test_another_copy_of_the_weights_is_none_of_autocasts(to: dict[str, Any]) -> None:
    def copying_loss(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) + 0 * len([parameter.detach().to(**to) for parameter in model.parameters()])

    assert taken_apart(loss=copying_loss).cast_weights_bytes == 0


class Frozen(nn.Module):
    """A frozen layer, whose cast weight autocast does not keep, between two that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def test_a_frozen_weight_has_no_gradient_and_its_cast_copy_is_no_activation() -> None:
    found = taken_apart(Frozen, "bf16")
    assert (found.parameters_bytes, found.gradients_bytes) == (3 * FLOAT * WIDTH**2, 2 * FLOAT * WIDTH**2)
    assert found.cast_weights_bytes == 3 * HALF * WIDTH**2
    inputs = HALF * BATCH * WIDTH  # of the layers that are trained
    assert saved(found) == {"": FLOAT * BATCH * WIDTH, "layers.0": inputs, "layers.2": inputs}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Blocks(nn.Module):
    """Two blocks, checkpointed or not."""

    def __init__(self, *, is_checkpointed: bool, use_reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self._is_checkpointed, self._use_reentrant = is_checkpointed, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._use_reentrant) if self._is_checkpointed else block(x)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_saves_its_input_alone(use_reentrant: bool) -> None:
    plain = taken_apart(lambda: Blocks(is_checkpointed=False))
    inside = {f"blocks.{k}.inner.1": FLOAT * BATCH * HIDDEN for k in (0, 1)}
    inside |= {f"blocks.{k}.inner.3": FLOAT * BATCH * WIDTH for k in (0, 1)}
    outside = {"": FLOAT * BATCH * WIDTH}
    assert saved(plain) == inside | outside
    found = taken_apart(lambda: Blocks(is_checkpointed=True, use_reentrant=use_reentrant))
    between = FLOAT * BATCH * WIDTH  # the input of the second block: that of the first is the batch
    assert found.activations_bytes == outside[""] + between
    assert found.gradients_bytes == plain.gradients_bytes == plain.parameters_bytes


def test_blocks_that_a_checkpoint_would_free_are_named() -> None:
    assert taken_apart(lambda: Blocks(is_checkpointed=False)).checkpointable_modules == ("blocks.0", "blocks.1")
    assert taken_apart().checkpointable_modules == ()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:FutureWarning")
def test_what_a_torchscript_module_saves_is_of_the_module_around_it() -> None:
    def model() -> nn.Module:
        traced: Any = torch.jit.trace(nn.Linear(WIDTH, HIDDEN), torch.ones(BATCH, WIDTH))  # type: ignore[no-untyped-call]
        return nn.Sequential(nn.Sequential(traced), nn.ReLU(), nn.Linear(HIDDEN, 1))

    found = taken_apart(model)
    assert found.parameters_bytes == FLOAT * MLP_PARAMETERS
    assert set(saved(found)) <= {"", "0", "1", "2"}


def test_gradients_come_as_activations_go() -> None:
    """At the start of the backward pass both layers' activations are there and no gradient; at its end the reverse."""
    found = taken_apart()
    activations = FLOAT * BATCH * (HIDDEN + 1)
    assert found.activations_bytes == activations
    # The most is held once the second layer has its gradients: ReLU's output is still there.
    second = FLOAT * (HIDDEN + 1)
    held = max(activations, FLOAT * BATCH * HIDDEN + second, found.gradients_bytes)
    assert found.not_held_together_bytes == activations + found.gradients_bytes - held


def test_while_a_window_accumulates_gradients_are_there_with_all_activations() -> None:
    assert taken_apart(steps=4).not_held_together_bytes == 0


def test_a_batch_that_is_a_view_of_a_dataset_counts_with_its_own_rows() -> None:
    everything = torch.ones(1000, WIDTH + 1)
    found = taken_apart(data=lambda size: (everything[:size, :WIDTH], everything[:size, WIDTH:]))
    assert found.batch_bytes == FLOAT * BATCH * (WIDTH + 1)
    assert saved(found) == saved(taken_apart())


@pytest.mark.parametrize("steps", [1, 4])
def test_the_batch_that_takes_the_most_is_the_one_that_is_looked_at(steps: int) -> None:
    def longest(size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 5, WIDTH), torch.ones(size, 5, 1)

    found = taken_apart(steps=steps, worst_batch=longest)
    assert found.batch_bytes == 5 * FLOAT * BATCH * (WIDTH + 1)
    assert saved(found) == {"": 5 * FLOAT * BATCH, "1": 5 * FLOAT * BATCH * HIDDEN}


def step(state: Any, batch: Any, amp: Any) -> None:
    with amp.autocast():
        found = loss(state["model"], batch)
    state["optimizer"].zero_grad()
    amp.backward(found)
    amp.step(state["optimizer"])
    amp.update()


def test_a_loop_of_its_own_is_taken_apart_as_well() -> None:
    def build() -> dict[str, Any]:
        model = mlp()
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    found = taken_apart(model=None, loss=None, optimizer=None, build=build, train_step=step)
    assert found.gradients_bytes == FLOAT * MLP_PARAMETERS
    assert found.optimizer_state_bytes == FLOAT * (2 * MLP_PARAMETERS + 4)
    assert found.optimizers == ("AdamW",)
    assert saved(found) == {"": FLOAT * BATCH, "model.1": FLOAT * BATCH * HIDDEN}


@given(st.lists(st.sampled_from([8, 16, 24]), min_size=1, max_size=4), st.sampled_from(["fp32", "bf16"]))
def test_the_parts_and_the_rest_are_the_peak_and_the_modules_are_the_activations(
    widths: list[int], precision: Precision
) -> None:
    def model() -> nn.Module:
        pairs = zip([WIDTH, *widths], [*widths, 1], strict=True)
        return nn.Sequential(*(part for a, b in pairs for part in (nn.Linear(a, b), nn.Tanh())))

    found = taken_apart(model, precision)
    item = FLOAT if precision == "fp32" else HALF
    tanhs = {str(2 * k + 1): item * BATCH * width for k, width in enumerate([*widths, 1])}
    assert {name: num for name, num in saved(found).items() if name in tanhs} == tanhs
    assert found.activations_bytes == sum(saved(found).values())
    parts = found.parameters_bytes + found.buffers_bytes + found.gradients_bytes + found.optimizer_state_bytes
    parts += found.batch_bytes + found.cast_weights_bytes + found.activations_bytes
    assert parts - found.not_held_together_bytes + found.rest_bytes == found.taken_bytes
    assert 0 <= found.not_held_together_bytes <= found.gradients_bytes + found.activations_bytes


def test_hooks_are_gone_afterwards_and_a_step_that_fails_is_a_failure() -> None:
    made = mlp()
    taken_apart(lambda: made)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in made.modules())

    def fails(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError("all of it")

    failed = ran(loss=fails)
    assert isinstance(failed, Failure)
    assert failed.kind == "oom"


def test_a_snapshot_records_the_allocator_meanwhile_and_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = Mock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", cuda.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", cuda.dump)
    path = str(tmp_path / "memory.pickle")
    with child.snapshot(path):
        cuda.step()
    started = call.record(max_entries=child.MAX_HISTORY_ENTRIES, stacks="python")
    assert cuda.mock_calls == [started, call.step(), call.dump(path), call.record(enabled=None)]
    with pytest.raises(ValueError, match="no"), child.snapshot(path):
        raise ValueError("no")
    assert cuda.mock_calls[4:] == [started, call.record(enabled=None)]


def test_of_a_tensor_that_ranks_share_the_own_part_counts(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    try:
        shared = distribute_tensor(torch.ones(BATCH, WIDTH), init_device_mesh("cpu", (1,)))
        assert sum(child.storage_bytes([shared]).values()) == BATCH * WIDTH * FLOAT
    finally:
        torch.distributed.destroy_process_group()

"""Nothing of the model, its gradients or the random states changes, whatever happens in a rerun."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnosis_models import WIDTH, FeedForward, Model, batch, find, find_rerun, square
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import is_pinned, override, override_of, pin_fp32


class Busy(nn.Module):
    """Buffers of every kind, dropout, and an overflow where `level` asks for it."""

    none: Tensor | None
    replaced: Tensor

    def __init__(self, level: float = 66246.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.ff = FeedForward(level)
        self.register_buffer("none", None)
        self.register_buffer("replaced", torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.none = torch.ones(1)
        output: Tensor = self.ff(self.drop(self.norm(hidden))) / 66246
        return output


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "state": copy.deepcopy(model.state_dict()),
        "objects": [*(p.grad for p in model.parameters()), *(b for m in model.modules() for b in m._buffers.values())],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "classes": [type(module) for module in model.modules()],
        "keys": [set(module.__dict__) for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "torch": torch_state.capture(),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    pairs = zip(before.pop("objects"), after.pop("objects"), strict=True)
    assert all(one is other for one, other in pairs)
    for key in before:
        assert _plain(after[key]) == _plain(before[key]), key


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def batch_with_gradients(model: nn.Module) -> None:
    torch.autograd.backward(square(model(batch())))


def test_nothing_of_the_model_changes() -> None:
    model = Busy()
    batch_with_gradients(model)
    model.drop.eval()
    before = snapshot(model)
    assert find(model).pins == ("ff.wo",)
    assert_same(before, snapshot(model))


class ClosureError(Exception):
    pass


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_closure_that_raises_is_told_of_and_nothing_changes(num_good: int) -> None:
    model = Busy()
    batch_with_gradients(model)
    before = snapshot(model)
    calls: list[None] = []

    def rerun() -> Tensor:
        output = model(batch())
        if len(calls) == num_good:
            raise ClosureError("gone")
        calls.append(None)
        return square(output)

    with pytest.raises(InvalidRequestError, match="ClosureError: gone") as caught:
        find_rerun(model, rerun)
    assert isinstance(caught.value.__cause__, ClosureError)
    assert_same(before, snapshot(model))


def test_every_rank_hears_of_a_closure_that_raised_on_one() -> None:
    model = Model(FeedForward())
    with pytest.raises(InvalidRequestError, match="another rank"):
        find(model, agree=lambda flag: True)


@pytest.mark.parametrize(
    ("spoil", "given"),
    [
        (lambda loss: loss.detach(), r"shape \(\) without a gradient"),
        (lambda loss: loss.expand(2), r"shape \(2,\)"),
        (lambda loss: loss.item(), "a float"),
        (lambda loss: None, "a NoneType"),
    ],
)
def test_what_is_no_loss_is_refused(spoil: Callable[[Tensor], Any], given: str) -> None:
    model = Busy()
    before = snapshot(model)
    with pytest.raises(InvalidRequestError, match=given):
        find_rerun(model, lambda: spoil(square(model(batch()))))
    assert_same(before, snapshot(model))


def test_a_rerun_that_runs_out_of_memory_at_once_decides_nothing() -> None:
    def rerun() -> Tensor:
        raise torch.OutOfMemoryError("full")

    finding = find_rerun(Model(FeedForward()), rerun)
    assert (finding.reproduced, finding.is_precision, finding.finite_in) == (True, None, ())
    assert finding.not_run == ("fp16",)


def test_every_pass_draws_the_same_numbers() -> None:
    model = Busy()
    seen: list[list[float]] = []

    def rerun() -> Tensor:
        seen.append(torch.rand(3).tolist())
        return square(model(batch()))

    assert find_rerun(model, rerun).num_passes == 4
    assert seen == [seen[0]] * 4


def test_pins_and_an_override_that_are_there_stay() -> None:
    model = Model(FeedForward(66246.0), FeedForward())
    override(model, "bf16", "cpu")
    pin_fp32(model.get_submodule("blocks.1.ff"), "cpu")
    assert find(model).pins == ("blocks.0.ff.wo",)
    assert override_of(model) == "bf16"
    assert [name for name, module in model.named_modules() if is_pinned(module)] == ["blocks.1.ff"]


def test_gradients_of_a_loss_function_with_weights_of_its_own_are_put_back() -> None:
    model, criterion = Model(FeedForward(66246.0)), nn.Linear(WIDTH, 1)
    criterion.weight.grad = kept = torch.full_like(criterion.weight, 7.0)
    find(model, loss_fn=lambda output: square(criterion(output)))
    assert criterion.weight.grad is kept
    assert kept.tolist() == [[7.0] * WIDTH]
    assert criterion.bias.grad is None


class Witness:
    """Lives as long as the node of a graph that it is put into."""


def test_no_graph_is_left_alive() -> None:
    model = Model(FeedForward(66246.0))
    witnesses: list[weakref.ref[Witness]] = []

    def rerun() -> Tensor:
        output = model(batch())
        output.grad_fn.metadata["witness"] = witness = Witness()
        witnesses.append(weakref.ref(witness))
        return square(output)

    find_rerun(model, rerun)
    gc.collect()
    assert [witness() for witness in witnesses] == [None] * 4


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.ff = FeedForward(66246.0)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = checkpoint(self.ff, self.first(hidden), use_reentrant=use_reentrant)
            normed: Tensor = self.norm(output)
            return normed

    finding = find(Checkpointed())
    assert (finding.culprit, finding.pins) == ("module ff.wo (Linear)", ("ff.wo",))


@pytest.mark.parametrize("wraps", ["torch.compile", "module.compile"])
def test_a_compiled_model_is_diagnosed_and_not_compiled_again(wraps: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    inner = Model(FeedForward(66246.0))
    model: Any = inner
    if wraps == "torch.compile":
        model = torch.compile(inner, backend=counter)
    else:
        inner.compile(backend=counter)
    override(inner, "bf16", "cpu")

    batch_with_gradients(model)
    num_graphs = counter.frame_count
    finding = find(model)
    assert (finding.culprit, finding.pins) == ("module blocks.0.ff.wo (Linear)", ("blocks.0.ff.wo",))
    batch_with_gradients(model)
    assert counter.frame_count == num_graphs > 0
    torch.compiler.reset()


def test_ddp_with_gradients_in_its_buckets() -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        inner = Model(FeedForward(66246.0))
        model = DistributedDataParallel(inner, gradient_as_bucket_view=True)
        batch_with_gradients(model)
        model.zero_grad()
        batch_with_gradients(model)  # DDP sorts its buckets anew at the second forward pass
        before, could_sync = snapshot(model), model.require_forward_param_sync
        assert find(model).pins == ("blocks.0.ff.wo",)
        assert_same(before, snapshot(model))
        assert model.require_forward_param_sync is could_sync
        batch_with_gradients(model)  # added up in the buckets, as before
        assert inner.head.weight.grad is not None
        assert torch.equal(inner.head.weight.grad, 2 * before["gradients"][-2])
    finally:
        distributed.destroy_process_group()

"""A module whose class is swapped is in everything else as it was."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from swap_samples import Block, Model, doubled, give_roles, wrap_as_accelerate
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from autotune_amp.precision.forward_wrapper import (
    Observer,
    clear_override,
    is_pinned,
    observe,
    override,
    override_of,
    pin_fp32,
    unpin,
)
from autotune_amp.precision.torch_state import autocast


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


def test_a_module_with_roles_looks_like_itself(x: Tensor) -> None:
    class Local(Block):
        """A local class: its qualified name is not its name."""

    module, plain, registered = Local(), Local(), list(Block.registry)
    give_roles(module)
    assert isinstance(module, Local)
    assert repr(module) == repr(plain)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(module), name) == getattr(Local, name)
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(module)) == inspect.signature(Local)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in module.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert Block.registry == registered
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x, scale=3.0), plain(x, scale=3.0))
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("pre"))
    module.register_forward_hook(lambda *_: calls.append("post"))
    module(x)
    assert calls == ["pre", "post"]


def duplicates(module: nn.Module) -> Iterator[Any]:
    yield copy.deepcopy(module)
    yield copy.copy(module)
    yield pickle.loads(pickle.dumps(module))


def test_copies_and_pickles_keep_pin_and_override_but_not_the_observer(x: Tensor) -> None:
    model = Model()
    pin_fp32(model.linear(0), "cpu")
    override(model, "bf16", "cpu")
    observe(model, Observer(1, "cpu"), 0)
    observe(model.blocks[1], Observer(1, "cpu"), 0)
    for twin in duplicates(model):
        assert is_pinned(twin.linear(0))
        assert override_of(twin) == "bf16"
        assert torch.equal(twin(x)[0], model(x)[0])
        unpin(twin.linear(0))
        clear_override(twin)
        assert type(twin) is Model
        assert type(twin.linear(0)) is nn.Linear
        twin.blocks[0].linear = model.linear(0)
        pin_fp32(model.linear(0), "cpu")  # the shallow copy shares it
    assert override_of(model) == "bf16"


def test_a_copy_of_a_module_that_is_only_observed_is_plain() -> None:
    module = Block()
    observe(module, Observer(1, "cpu"), 0)
    assert b"autotune_amp" not in pickle.dumps(module)
    for twin in duplicates(module):
        assert type(twin) is Block
        assert twin.__dict__.keys() == Block().__dict__.keys()


def test_a_forward_set_on_the_instance_plays_the_roles(x: Tensor) -> None:
    module = Block()
    wrap_as_accelerate(module)
    own = module.forward
    with autocast("bf16", "cpu"):
        low = module(x, scale=3.0)
        pin_fp32(module, "cpu")
        pinned = module(x, scale=3.0)
        assert "scale" in inspect.signature(module.forward).parameters
        for twin in duplicates(module):
            assert torch.equal(twin(x, scale=3.0), pinned)
        unpin(module)
        assert torch.equal(module(x, scale=3.0), low)
    assert torch.equal(pinned, module(x, scale=3.0))
    assert not torch.equal(pinned, low)
    assert module.__dict__["forward"] is own
    observe(module, Observer(1, "cpu"), 0)
    for twin in duplicates(module):
        assert twin.__dict__["forward"].func is doubled
        assert twin.__dict__["forward"].args[1] is (twin if twin.linear is not module.linear else module)


@pytest.mark.usefixtures("_one_rank")
def test_modules_inside_distributed_data_parallel(x: Tensor) -> None:
    model = Model()
    parallel = nn.parallel.DistributedDataParallel(model)
    pin_fp32(model.linear(0), "cpu")
    override(model, "bf16", "cpu")
    with autocast("fp16", "cpu"):
        (out,) = parallel(x)
        out.sum().backward()
    with autocast("bf16", "cpu"):
        clear_override(model)
        assert torch.equal(out, model(x)[0])
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("pins_first", [False, True])
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_module_that_fsdp_swapped_too(pins_first: bool, x: Tensor) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        pin_fp32(each.linear(0), "cpu")
    if not pins_first:
        unpin(model.linear(0))
    fully_shard(model.linear(0), mesh=mesh)
    fully_shard(model, mesh=mesh)
    pin_fp32(model.linear(0), "cpu")
    override(model, "bf16", "cpu")
    override(plain, "bf16", "cpu")
    (out,) = model(x)
    out.sum().backward()
    assert torch.equal(out, plain(x)[0])
    assert isinstance(model.linear(0), FSDPModule)
    unpin(model.linear(0))
    unpin(plain.linear(0))
    assert not is_pinned(model.linear(0))
    assert isinstance(model.linear(0), FSDPModule)
    assert torch.equal(model(x)[0], plain(x)[0])
    assert not torch.equal(model(x)[0], out)

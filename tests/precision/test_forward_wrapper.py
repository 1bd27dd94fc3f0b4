"""Pins, overrides and observers: what they do, and that the module is in everything else as it was."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies
from swap_samples import UNUSUAL, Block, Doubling, Model, Registering
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.forward_wrapper import (
    ForwardObserver,
    clear_override,
    is_pinned,
    modules_named,
    names_matching,
    observe,
    override,
    pin_fp32,
    stop_observing,
    unpin,
    watch_forward,
    wrappers_of,
)
from autotune_amp.precision.torch_state import autocast

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Recorder(nn.Module):
    """Keeps what its forward was given, and whether autocast was on; gives out what it is told to."""

    def __init__(self, output: Any = None) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        self.autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        return self.output


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8)


@pytest.mark.parametrize("inside", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("outside", ["fp32", "bf16", "fp16"])
def test_an_override_wins_over_the_autocast_around_it_and_a_pin_over_both(
    inside: Precision, outside: Precision, x: Tensor
) -> None:
    module, linear = Recorder(), nn.Linear(8, 8)
    outer = nn.Sequential(module, linear)
    with autocast(outside, "cpu"):
        plain = linear(x).dtype  # caches the weight in half precision
        override(outer, inside, "cpu")
        module.output = x
        assert outer(x).dtype == HALF.get(inside, torch.float32)
        assert module.autocast == HALF.get(inside)
        pin_fp32(linear, "cpu")
        override(linear, inside, "cpu")
        assert outer(x).dtype == linear(x.to(plain)).dtype == torch.float32
        for remove in (unpin, clear_override):
            remove(linear)
        clear_override(outer)
        assert linear(x).dtype == plain
        assert torch.is_autocast_enabled("cpu") == (outside != "fp32")


def test_an_override_leaves_an_evaluation_outside_of_any_autocast_in_fp32(x: Tensor) -> None:
    linear = nn.Linear(8, 8)
    override(linear, "bf16", "cpu")
    for is_training in (True, False):
        linear.train(is_training)
        with torch.set_grad_enabled(not is_training):
            assert linear(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert linear(x).dtype == torch.float32
        with autocast("fp16", "cpu"):
            assert linear(x).dtype == torch.bfloat16


@pytest.mark.parametrize("wrap", [lambda m: pin_fp32(m, "cpu"), lambda m: override(m, "fp32", "cpu")])
def test_inputs_are_cast_up_anywhere_in_containers(wrap: Callable[[nn.Module], None]) -> None:
    module, half, double = Recorder(), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    wrap(module)
    indices, kept = torch.arange(2), deque([half])
    module(half, [half, (indices, {"a": half})], "text", double, more=OrderedDict(b=half), kept=kept)
    first, (second, (third, inner)), text, fourth = module.args
    assert [t.dtype for t in (first, second, inner["a"], module.kwargs["more"]["b"])] == [torch.float32] * 4
    assert third is indices
    assert text == "text"
    assert fourth is double
    assert isinstance(module.kwargs["more"], OrderedDict)
    assert module.kwargs["kept"] is kept  # a module may write into it, as into a key-value cache
    assert kept[0] is half


def test_a_name_may_be_a_pattern() -> None:
    inner = nn.ModuleDict({"norm": nn.LayerNorm(4), "out": nn.Linear(4, 4)})
    model = nn.Sequential(inner, nn.LayerNorm(4))
    assert names_matching(model, ["*.norm", "0.out", "*norm"]) == ("0.norm", "0.out")
    assert names_matching(model, ["1", ""]) == ("1", "")
    assert modules_named(model, ["0.*"]) == [inner["norm"], inner["out"]]
    for absent in ("2*", "[01]", "norm"):
        with pytest.raises(InvalidRequestError, match=re.escape(absent)):
            names_matching(model, ["0", absent])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # newer torch has deprecated it
def test_what_cannot_be_is_refused(x: Tensor) -> None:
    with pytest.raises(InvalidRequestError, match="TorchScript"):
        pin_fp32(torch.jit.script(nn.Linear(8, 8)), "cpu")
    half = nn.Linear(8, 8).bfloat16()
    with pytest.raises(InvalidRequestError, match="half precision"):
        pin_fp32(half, "cpu")
    assert type(half) is nn.Linear
    override(half, "fp32", "cpu")  # but fp32 may be asked of a model kept in half precision: as it is
    assert half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("output", "maximum"),
    [
        (torch.tensor([1.0, -3.0, 2.0], requires_grad=True), 3),
        (torch.tensor([-(2.0**-24), 0.0], dtype=torch.float16), 2.0**-24),
        (torch.tensor([1.0, -torch.inf]), torch.inf),
        (torch.tensor([torch.inf, torch.nan, 1.0]), torch.nan),
        # The first floating tensor, wherever it stands.
        ((None, torch.arange(9), [torch.full((1,), 2.0)], torch.ones(1)), 2),
        ({"logits": torch.full((1,), 2.0), "hidden": torch.ones(1)}, 2),
        (torch.empty(0, 8), 0),
        ("nothing", 0),
    ],
)
def test_an_observer_keeps_the_largest_magnitude_while_sampling_and_training(output: Any, maximum: float) -> None:
    module, observer = Recorder(output), ForwardObserver(2, "cpu")
    observe(module, observer, 1)
    module()
    observer.is_sampling = True
    module.eval()()
    assert observer.read().tolist() == [0, 0]
    module.train()
    for said in (output, torch.zeros(1)):
        module.output = said
        module()
        torch.testing.assert_close(observer.read().tolist(), [0.0, float(maximum)], equal_nan=True)
    observer.reset()
    module.output = torch.ones(1)
    module()
    stop_observing(module)
    module.output = torch.full((1,), 5.0)
    module()
    assert observer.read().tolist() == [0, 1]


WRAPPERS: dict[str, Callable[[nn.Module], None]] = {
    "pin": lambda module: pin_fp32(module, "cpu"),
    "unpin": unpin,
    "override fp32": lambda module: override(module, "fp32", "cpu"),
    "override bf16": lambda module: override(module, "bf16", "cpu"),
    "clear": clear_override,
    "observe": lambda module: observe(module, ForwardObserver(1, "cpu"), 0),
    "stop": stop_observing,
}


@hypothesis.given(strategies.lists(strategies.sampled_from(sorted(WRAPPERS))), strategies.booleans())
def test_any_order_of_changes_ends_as_it_should(changes: list[str], has_own_forward: bool) -> None:
    module = Recorder(torch.ones(1))
    if has_own_forward:
        module.forward = functools.partial(module.forward, 7)  # type: ignore[method-assign] # as Accelerate does
    before = dict(module.__dict__)
    pinned, precision, is_observed = False, None, False
    for change in changes:
        WRAPPERS[change](module)
        pinned = {"pin": True, "unpin": False}.get(change, pinned)
        precision = {"override fp32": "fp32", "override bf16": "bf16", "clear": None}.get(change, precision)
        is_observed = {"observe": True, "stop": False}.get(change, is_observed)
        assert is_pinned(module) == pinned
        assert (type(module) is Recorder) == (not pinned and precision is None and not is_observed)
    with autocast("fp16", "cpu"):
        module()
    expected = None if pinned else {"fp32": None, "bf16": torch.bfloat16, None: torch.float16}[precision]
    assert module.autocast == expected
    assert module.args == ((7,) if has_own_forward else ())
    for end in (unpin, clear_override, stop_observing):
        end(module)
    for name in ("args", "kwargs", "autocast"):
        del module.__dict__[name]
    assert type(module) is Recorder
    assert module.__dict__ == before


# -- the module is as it was -------------------------------------------------------------------------------------------


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_module_with_wrappers_looks_like_itself(x: Tensor) -> None:
    class Local(Block):
        """A local class: its qualified name is not its name."""

    module, plain, registered = Local(), Local(), list(Block.registry)
    for name in ("pin", "override bf16", "observe"):
        WRAPPERS[name](module)
    assert isinstance(module, Local)
    assert repr(module) == repr(plain)
    assert [getattr(type(module), n) == getattr(Local, n) for n in ("__name__", "__qualname__", "__doc__")] == [
        True
    ] * 3
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert Block.registry == registered
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x, scale=3.0), plain(x, scale=3.0))


def duplicates(module: nn.Module) -> Iterator[Any]:
    yield copy.deepcopy(module)
    yield copy.copy(module)
    yield pickle.loads(pickle.dumps(module))


def test_copies_and_pickles_keep_pin_and_override_but_not_the_observer(x: Tensor) -> None:
    model = Model()
    pin_fp32(model.linear(0), "cpu")
    override(model, "bf16", "cpu")
    observe(model, ForwardObserver(1, "cpu"), 0)
    observe(model.blocks[1], ForwardObserver(1, "cpu"), 0)
    assert b"Observer" not in pickle.dumps(model)
    for twin in duplicates(model):
        assert is_pinned(twin.linear(0))
        assert twin.blocks[1] is model.blocks[1] or type(twin.blocks[1]) is Block
        assert torch.equal(twin(x)[0], model(x)[0])
        unpin(twin.linear(0))
        clear_override(twin)
        assert type(twin) is Model
        assert type(twin.linear(0)) is nn.Linear
        twin.blocks[0].linear = model.linear(0)
        pin_fp32(model.linear(0), "cpu")  # the shallow copy shares it


@pytest.mark.parametrize("make", UNUSUAL, ids=lambda make: str(make.__name__))
def test_modules_of_any_class_take_wrappers_and_give_them_back(make: Callable[[], nn.Module], x: Tensor) -> None:
    module = make()
    kind, plain, registered = type(module), module(x), list(Registering.known)
    for name in ("override bf16", "observe", "pin"):
        WRAPPERS[name](module)
    with autocast("bf16", "cpu"):
        for each in (module, *duplicates(module)):
            assert torch.equal(each(x), plain)
            WRAPPERS["unpin"](each)
            assert each(x).dtype == torch.bfloat16
            WRAPPERS["pin"](each)
    for end in ("unpin", "clear", "stop"):
        WRAPPERS[end](module)
    assert type(module) is kind
    assert vars(kind).get("__init_subclass__") is vars(make).get("__init_subclass__")
    assert Registering.known == registered


def test_a_module_whose_class_copies_itself_is_copied_with_its_wrappers(x: Tensor) -> None:
    module = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))  # has a __deepcopy__ of its own, and no pickle
    pin_fp32(module, "cpu")
    observe(module, ForwardObserver(1, "cpu"), 0)
    twin = copy.deepcopy(module)
    assert is_pinned(twin)
    assert wrappers_of(twin).observed is None
    unpin(twin)
    assert type(twin).__mro__[1:] == nn.Linear.__mro__


def test_a_fake_quantizer_and_the_layer_around_it_are_watched_while_they_train(x: Tensor) -> None:
    from torch.ao.quantization import FakeQuantize

    model = nn.Sequential(Doubling(), FakeQuantize())  # type: ignore[no-untyped-call] # torch does not type it
    with watch_forward(model, torch.device("cpu")) as read, autocast("bf16", "cpu"):
        model(x)
        assert read()["1"] > 0
    assert type(model[1]) is FakeQuantize


def doubled(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return forward(*args, **kwargs) * 2


def wrap_as_accelerate(module: nn.Module) -> None:
    """What Accelerate does: the class's function taken out, wrapped, and put on the instance."""
    inner = module.forward.__func__  # type: ignore[attr-defined] # mypy does not know a bound method here
    module.forward = functools.update_wrapper(functools.partial(doubled, inner, module), module.forward)


def test_a_forward_set_on_the_instance_is_wrapped_too(x: Tensor) -> None:
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


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_a_module_that_fsdp_swapped_too(x: Tensor) -> None:
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    for each in (plain, model):
        pin_fp32(each.linear(0), "cpu")
        override(each, "bf16", "cpu")
    for module in (model.linear(0), model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    pinned = model(x)[0]
    assert torch.equal(pinned, plain(x)[0])
    for each in (plain, model):
        unpin(each.linear(0))
    assert not is_pinned(model.linear(0))
    assert isinstance(model.linear(0), FSDPModule)
    assert torch.equal(model(x)[0], plain(x)[0])
    assert not torch.equal(model(x)[0], pinned)

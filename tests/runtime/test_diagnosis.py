"""Whose fault it is, which module's, and that a rerun leaves nothing behind: real fp16 autocast on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision import torch_state
from autotune_amp.precision.forward_wrapper import is_pinned, override, pin_fp32, wrappers_of
from autotune_amp.runtime.diagnosis import Rerunner, diagnose
from autotune_amp.runtime.policy import DiagnosisResult
from autotune_amp.runtime.scaler import Ranks

WIDTH = 4
BEYOND_FP16 = 66246.0


class FeedForward(nn.Module):
    """Puts out about `level` in every element, a sum that is large where no term of it is."""

    def __init__(self, level: float = 1.0) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, 8)
        self.wo = nn.Linear(8, WIDTH, bias=False)
        with torch.no_grad():
            self.wi.weight.mul_(1e-3)
            self.wi.bias.fill_(level / 8)
            self.wo.weight.fill_(1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.wo(self.wi(hidden))  # type: ignore[no-any-return]


class Leaf(nn.Module):
    """A module without children whose forward computes `function`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return self.function(hidden)


class Written(Leaf):
    """A module whose forward computes `function` between two children that are innocent."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.first = nn.Identity()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.last(self.function(self.first(hidden)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, ff: nn.Module) -> None:
        super().__init__()
        self.ff = ff
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden + self.ff(hidden))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks around `inner`, and a head; `num_idle` modules do nothing but count."""

    def __init__(self, *inner: nn.Module, num_idle: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*map(Block, inner or (FeedForward(),)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.ModuleList(nn.Identity() for _ in range(num_idle))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.blocks(hidden))  # type: ignore[no-any-return]


def batch() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


class TwoRanks(Ranks):
    """This rank, and another whose passes end as told: each asks for an error, for memory, whether it went bad."""

    def __init__(self, *is_bad: bool, names: tuple[str, ...] = ()) -> None:
        super().__init__(torch.device("cpu"))
        self.answers = [answer for bad in is_bad for answer in (False, False, bad)]
        self.answers.insert(3, False)  # after the first pass: whether it called attention
        self.names = names

    def any(self, flag: bool) -> bool:
        return self.answers.pop(0) or flag

    def union(self, names: Any) -> tuple[str, ...]:
        return (*names, *(name for name in self.names if name not in names))


def find(
    model: nn.Module,
    rerun: Callable[[], Tensor] | None = None,
    *,
    inputs: Tensor | None = None,
    loss: Callable[[Tensor], Tensor] = square,
    current: Any = "fp16",
    lower: Any = ("bf16", "fp32"),
    loss_scale: float = 16.0,
    ranks: Ranks | None = None,
    **options: Any,
) -> DiagnosisResult:
    """The finding for one batch, at a scale that leaves room."""
    given = batch() if inputs is None else inputs
    ranks = ranks or Ranks(torch.device("cpu"))
    return diagnose(
        Rerunner(model, rerun or (lambda: loss(model(given))), current, ranks), lower, loss_scale, **options
    )


# -- precision's fault -------------------------------------------------------------------------------------------------


def test_a_finite_batch_finds_nothing_and_an_earlier_pass_may_be_what_was_not() -> None:
    assert find(Model(FeedForward())) == DiagnosisResult(False)
    in_window = find(Model(FeedForward()), is_whole=False)
    assert in_window.reproduced
    assert "earlier pass" in str(in_window.culprit)


def overflow(hidden: Tensor) -> Tensor:
    large = hidden @ torch.zeros(WIDTH, WIDTH) + 300
    return (large @ large.mT)[:, :1].expand(-1, WIDTH) / 360000


def two_bad(num_idle: int) -> nn.Module:
    """A twentieth of the modules may be pinned."""
    return Model(FeedForward(BEYOND_FP16), FeedForward(70000.0), num_idle=num_idle)


def amplify(hidden: Tensor) -> Tensor:
    return (hidden * 1e-6) @ (torch.eye(WIDTH) * 3e4)


BACKWARD = ", in its backward pass"
WO = "module blocks.0.ff.wo (Linear)"
Make = Callable[[], nn.Module]
# The model, how it is looked at, the culprit and what is pinned; bf16 and fp32 are finite in each.
PRECISION: dict[str, tuple[Make, dict[str, Any], str, tuple[str, ...]]] = {
    "two of many": (lambda: two_bad(num_idle=40), {}, WO, ("blocks.0.ff.wo", "blocks.1.ff.wo")),
    "two of few": (lambda: two_bad(num_idle=0), {}, WO, ()),
    "between children": (lambda: Model(Written(overflow)), {}, "module blocks.0.ff (Written)", ("blocks.0.ff",)),
    "the loss": (Model, {"loss_scale": 2.0**24}, f"the loss function{BACKWARD}", ()),
    "backward": (
        lambda: Model(FeedForward(), Leaf(amplify)),
        {"loss_scale": 2.0**14},
        f"module blocks.1.ff (Leaf){BACKWARD}",
        ("blocks.1.ff",),
    ),
}


@pytest.mark.parametrize("name", PRECISION)
def test_what_overflows_fp16_is_named_and_pinned(name: str) -> None:
    make, options, culprit, pins = PRECISION[name]
    assert find(make(), **options) == DiagnosisResult(True, ("bf16", "fp32"), culprit, pins, is_precision=True)


def test_a_module_with_weights_in_half_precision_is_never_pinned_nor_run_in_fp32() -> None:
    ff = FeedForward(BEYOND_FP16)
    ff.wo.half()
    seen: list[torch.dtype] = []
    ff.wi.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    finding = find(Model(ff), can_run_fp32=False, lower=("bf16",))
    assert (finding.culprit, finding.pins) == ("module blocks.0.ff.wo (Linear)", ())
    assert finding.finite_in == ("bf16",)
    assert seen == [torch.float16, torch.bfloat16]


def test_a_precision_that_does_not_fit_is_told_apart_from_one_that_overflows() -> None:
    model = Model(FeedForward(BEYOND_FP16))

    def rerun() -> Tensor:
        output = model(batch())
        if output.dtype == torch.float32:
            raise torch.OutOfMemoryError("no room for fp32")
        return square(output)

    finding = find(model, rerun)
    assert (finding.finite_in, finding.is_precision, finding.pins) == (("bf16",), True, ("blocks.0.ff.wo",))
    alone = find(model, can_run_fp32=False, lower=())
    assert (alone.finite_in, alone.is_precision, alone.pins) == ((), True, ("blocks.0.ff.wo",))


# -- not precision's fault ---------------------------------------------------------------------------------------------


def spoilt() -> nn.Module:
    model = Model(FeedForward(), FeedForward())
    with torch.no_grad():
        model.get_parameter("blocks.1.ff.wi.weight")[0, 0] = torch.nan
    return model


def log(hidden: Tensor) -> Tensor:
    return (hidden - 1e3).log()


def root(hidden: Tensor) -> Tensor:
    return hidden - (hidden - hidden).sqrt()


ONE_NAN = torch.where(torch.arange(12).reshape(3, WIDTH) == 5, torch.nan, batch())
NOT_PRECISION: dict[str, tuple[Make, dict[str, Any], str]] = {
    "a batch": (Model, {"inputs": ONE_NAN}, "the input of the model"),
    "a parameter": (spoilt, {}, "parameter blocks.1.ff.wi.weight"),
    "a root": (lambda: Model(FeedForward(), Written(root)), {}, f"module blocks.1.ff (Written){BACKWARD}"),
    "the loss": (Model, {"loss": lambda output: log(output).sum()}, "the loss function"),
}


@pytest.mark.parametrize("name", NOT_PRECISION)
def test_what_is_not_finite_in_fp32_either_is_not_precision(name: str) -> None:
    make, options, culprit = NOT_PRECISION[name]
    assert find(make(), **options) == DiagnosisResult(True, culprit=culprit, is_precision=False)


def only_in_half(hidden: Tensor) -> Tensor:
    if hidden.dtype == torch.float32:
        raise TypeError("no kernel for fp32")
    return hidden


def test_a_precision_or_pin_in_which_the_model_raises_is_told_apart_from_a_closure_that_fails() -> None:
    model = nn.Sequential(FeedForward(BEYOND_FP16), Leaf(only_in_half))
    finding = find(model, ranks=(ranks := Ranks(torch.device("cpu"))))
    assert (finding.finite_in, finding.pins, finding.is_precision) == (("bf16",), (), True)
    rerunner = Rerunner(model, lambda: square(model(batch())), "fp16", ranks)
    assert not rerunner.run("fp32", 1.0).fits
    assert {name: "no kernel" in why for name, why in rerunner.failed.items()} == {"fp32": True}


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_ranks_find_the_same_whosever_batch_it_was() -> None:
    theirs = TwoRanks(True, False, False, False, names=("blocks.0.ff",))
    finding = find(Model(FeedForward()), ranks=theirs)
    assert finding == DiagnosisResult(True, ("bf16", "fp32"), "blocks.0.ff", ("blocks.0.ff",), is_precision=True)
    both = TwoRanks(True, True)
    assert find(Model(FeedForward(BEYOND_FP16)), ranks=both).finite_in == ()
    assert theirs.answers == both.answers == []


def test_every_rank_hears_of_a_closure_that_raised_on_one() -> None:
    ranks = TwoRanks()
    ranks.answers = [True]
    with pytest.raises(InvalidRequestError, match="another rank"):
        find(Model(FeedForward()), ranks=ranks)


# -- nothing changes ---------------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Buffers of every kind, dropout, and an overflow."""

    none: Tensor | None
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.ff = FeedForward(BEYOND_FP16)
        self.register_buffer("none", None)
        self.register_buffer("replaced", torch.zeros(2))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        self.replaced = self.replaced + 1
        self.none = torch.ones(1)
        output: Tensor = self.ff(self.drop(self.norm(hidden))) / BEYOND_FP16
        return output


def snapshot(model: nn.Module) -> dict[str, Any]:
    buffers = [buffer for module in model.modules() for buffer in module._buffers.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "objects": [*map(id, gradients), *map(id, buffers)],
        "gradients": [None if gradient is None else gradient.tolist() for gradient in gradients],
        "modes": [module.training for module in model.modules()],
        "keys": [{*module.__dict__, type(module)} for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "rng": torch.get_rng_state().tolist(),
        "torch": torch_state.capture(),
    }


def batch_with_gradients(model: nn.Module) -> None:
    torch.autograd.backward(square(model(batch())))


def test_nothing_of_the_model_changes() -> None:
    model = Busy()
    batch_with_gradients(model)
    model.drop.eval()
    before = snapshot(model)
    assert find(model).pins == ("ff.wo",)
    assert snapshot(model) == before


SPOILT: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("ZeroDivisionError", lambda loss: 1 // 0),
    ("one number with a gradient", lambda loss: loss.detach()),
    ("one number with a gradient", lambda loss: loss.expand(2)),
    ("one number with a gradient", lambda loss: loss.item()),
]


@pytest.mark.parametrize(("told", "spoil"), SPOILT)
def test_a_closure_that_fails_is_told_of_and_nothing_changes(told: str, spoil: Callable[[Tensor], Any]) -> None:
    model = Busy()
    batch_with_gradients(model)
    before = snapshot(model)
    with pytest.raises(InvalidRequestError, match=told):
        find(model, lambda: spoil(square(model(batch()))))
    assert snapshot(model) == before


def test_pins_and_an_override_that_are_there_stay() -> None:
    model = Model(FeedForward(BEYOND_FP16), FeedForward())
    override(model, "bf16", "cpu")
    pin_fp32(model.get_submodule("blocks.1.ff"), "cpu")
    wrappers = wrappers_of(model)
    assert find(model).pins == ("blocks.0.ff.wo",)
    assert wrappers_of(model) == wrappers
    assert [name for name, module in model.named_modules() if is_pinned(module)] == ["blocks.1.ff"]


def test_ddp_with_gradients_in_its_buckets() -> None:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Model(FeedForward(BEYOND_FP16)), gradient_as_bucket_view=True)
        batch_with_gradients(model)
        model.zero_grad()
        batch_with_gradients(model)  # DDP sorts its buckets anew at the second forward pass
        before, could_sync = snapshot(model), model.require_forward_param_sync
        assert find(model).pins == ("blocks.0.ff.wo",)
        assert snapshot(model) == before
        assert model.require_forward_param_sync is could_sync
    finally:
        distributed.destroy_process_group()

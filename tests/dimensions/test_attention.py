"""Attention backends: what they are tried for, that a trial measures the one it names, and what a run does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp import AmpConfig, prepare
from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Workload
from autotune_amp.dimensions import ATTENTION, numerics_of
from autotune_amp.dimensions.attention import enabled_backends
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.integrations.export import ExportSource, export
from autotune_amp.precision import torch_state
from autotune_amp.trial.checks import check
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.training import make_training
from autotune_amp.trial.worker import supported_values

BF16 = Setting(precision="bf16", batch_size=4)
FLASH = AmpConfig(precision="fp32", batch_size=4, attention="flash")
attend = nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = torch_state.capture()
    yield
    torch_state.apply(before)


def helper(hidden: Tensor) -> Tensor:
    return attend(hidden, hidden, hidden)


class Block(nn.Module):
    """Attends through a function of its file, under another name than PyTorch's."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = dropout

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.linear(hidden)[:, None]
        return (attend(hidden, hidden, hidden, dropout_p=self.dropout) if self.dropout else helper(hidden))[:, 0]


class Processor:
    """Computes attention for a module, as in Diffusers, which names the class."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return attend(hidden, hidden, hidden)


class SlicedProcessor(Processor):
    """Inherits how attention is computed."""


class Processed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.processor = SlicedProcessor()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.processor(self.linear(hidden)[:, None])[:, 0]


class Unattending(nn.Module):
    """Names a class of modules that attend, of which it has none."""

    def has_blocks(self) -> bool:
        return any(isinstance(module, Block) for module in self.modules())


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def is_flash(model: Callable[[Tensor], Tensor]) -> bool:
    with Operators() as operators:
        model(torch.randn(2, 4, 8)).sum().backward()  # type: ignore[no-untyped-call]
    return any("flash_attention" in name for name in operators.names)


def live(model: nn.Module, device: str = "cpu") -> LiveTraining:
    return LiveTraining([model], [], torch.device(device))


def test_values_are_supported_where_the_model_attends_and_the_device_has_them() -> None:
    assert set(supported_values(live(nn.Sequential(Block()), "cuda"))["attention"].values()) == {None}
    assert set(supported_values(live(nn.MultiheadAttention(8, 2), "cuda"))["attention"].values()) == {None}
    assert set(supported_values(live(Processed(), "cuda"))["attention"].values()) == {None}
    assert "no module" in str(supported_values(live(Unattending()))["attention"]["math"])
    on_cpu = supported_values(live(Block()))["attention"]
    assert (on_cpu["flash"], on_cpu["math"]) == (None, None)
    assert "CUDA" in str(on_cpu["cudnn"])
    assert "no module" in str(supported_values(live(nn.Linear(8, 8)))["attention"]["math"])
    torch.backends.cuda.enable_cudnn_sdp(False)
    assert "enable_cudnn_sdp" in str(supported_values(live(Block(), "cuda"))["attention"]["cudnn"])


def trained(setting: Setting, dropout: float = 0.0) -> bool:
    """Take a pass of a trial, and return whether FlashAttention computed it."""
    workload = Workload(
        model=lambda: Block(dropout),
        loss=lambda model, batch: model(batch).square().mean(),
        data=lambda num: (torch.randn(num, 4, 8) for _ in range(4)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    training = make_training(workload, Block(dropout), Trial(candidate=setting, device="cpu"))
    try:
        with Operators() as operators:
            training.forward_backward(training.next_batch())
    finally:
        training.close()
    return any("flash_attention" in name for name in operators.names)


def test_a_trial_runs_the_backend_that_it_names_or_fails_and_leaves_nothing_behind() -> None:
    before, allowed = torch._C._get_sdp_priority_order(), enabled_backends()
    assert trained(Setting(precision="fp32", batch_size=4, attention="flash"))
    assert not trained(Setting(precision="fp32", batch_size=4, attention="math"))
    with pytest.raises(RuntimeError, match="No available kernel"):
        trained(Setting(precision="fp32", batch_size=4, attention="flash"), dropout=0.1)
    assert (torch._C._get_sdp_priority_order(), enabled_backends()) == (before, allowed)


def test_a_run_prefers_the_backend_and_does_not_end_where_it_cannot_be_used() -> None:
    model, _ = prepare(FLASH, Block(dropout=0.1), None)
    assert torch._C._get_sdp_priority_order()[0] == 1  # SDPBackend.FLASH_ATTENTION
    assert not is_flash(model)  # dropout, which FlashAttention does not support on a CPU


def test_compiled_code_follows_the_backend() -> None:
    model = Block()
    compiled = torch.compile(model, backend="aot_eager")
    assert is_flash(compiled)
    undo = ATTENTION.change_once("math", live(model))
    assert undo is not None
    assert not is_flash(compiled)
    undo()
    assert is_flash(compiled)


def test_of_an_offloaded_model_the_accelerators_backend_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first weights are on the CPU, and PyTorch sets its own order in the first call on the accelerator."""

    class Offloaded(Block):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            yield from super().parameters(recurse)
            yield cast("nn.Parameter", SimpleNamespace(device=cuda))

    cuda = torch.device("cuda", 0)
    asked: list[torch.device] = []
    monkeypatch.setattr(torch_state, "started_accelerator", lambda: cuda)
    monkeypatch.setattr(torch_state, "default_sdp_order", asked.append)
    prepare(AmpConfig(precision="fp32", batch_size=4, attention="cudnn"), Offloaded(), None)
    assert torch._C._get_sdp_priority_order()[0] == 3  # SDPBackend.CUDNN_ATTENTION
    ATTENTION.change("flash", live(Block()))
    assert asked == [cuda, cuda]


def test_what_is_compiled_stays_where_the_backend_is_preferred_already(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(FLASH, Block(), None)
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    prepare(FLASH, Block(), None)
    assert resets == []


def test_it_is_compared_with_fp32_and_plain_pytorch_has_lines_for_it() -> None:
    config = AmpConfig(precision="fp32", batch_size=4, attention="math")
    assert numerics_of(config) != config.ordinary
    text = export(ExportSource(config, "cpu"), "torch").text
    lines = [line for line in text.splitlines() if "sdpa_kernel" in line or line.startswith("attention.")]
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)
    assert enabled_backends() == {"math"}
    del namespace


@pytest.mark.parametrize("value", ["math", "flash"])
def test_the_fp32_run_that_it_is_compared_with_has_todays_backend(value: str) -> None:
    in_flash: dict[str, list[bool]] = {"fp32": [], "bf16": []}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with Operators() as operators:
            found: Tensor = model(batch).square().mean()
        precision = "bf16" if torch.is_autocast_enabled("cpu") else "fp32"
        in_flash[precision].append(any("flash_attention" in name for name in operators.names))
        return found

    workload = Workload(
        model=Block,
        loss=loss,
        data=lambda num: (torch.randn(num, 4, 8) for _ in range(8)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    before = torch._C._get_sdp_priority_order(), enabled_backends()
    candidate, state = replace(BF16, attention=value), torch_state.capture()
    spec = Check(candidate=candidate, device="cpu", what="fidelity", torch_state=state)
    checked = check(Context(workload), spec, lambda _: None)
    assert isinstance(checked, Fidelity)
    assert set(in_flash["fp32"]) == {True}
    assert set(in_flash["bf16"]) == {value == "flash"}
    assert (torch._C._get_sdp_priority_order(), enabled_backends()) == before

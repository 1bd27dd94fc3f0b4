"""Further dimensions on a CUDA device: set up on live objects, under a scaler, in trials of every isolation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale, PrecisionController, prepare
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Isolation, LocalBackend, Payload
from autotune_amp.processes.process import Watcher
from autotune_amp.trial.jobs import Trial

pytestmark = pytest.mark.gpu
VALUES: dict[str, Any] = {
    "allocator": "expandable_segments",
    "memory_format": "channels_last",
    "cudnn_benchmark": "on",
    "activation_checkpointing": "blocks",
    "optimizer_impl": "fused",
}
WORKLOAD = """
import torch
from torch import nn
from autotune_amp import Workload

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x).relu()

def model():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sequential(Block(), Block()), nn.Flatten(), nn.Linear(8 * 6 * 6, 4))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def workload():
    data = lambda size: (torch.randn(size, 3, 8, 8), torch.randint(4, (size,)))
    return Workload(model, loss, data, torch.optim.AdamW)
"""


@pytest.fixture
def made() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(WORKLOAD, names)  # what the trials import
    return names


def gradients(model: nn.Module, loss: Any, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    batch = torch.randn(4, 3, 8, 8, device="cuda"), torch.randint(4, (4,), device="cuda")
    model.zero_grad()
    loss(model, batch).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_set_up_on_a_card_they_give_the_same_gradient(made: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    model = made["model"]().cuda()
    expected = gradients(model, made["loss"])
    optimizer = torch.optim.AdamW(model.parameters())
    prepare(AmpConfig(precision="fp32", batch_size=4, **VALUES), model, optimizer)
    torch.testing.assert_close(gradients(model, made["loss"]), expected, rtol=1e-3, atol=1e-5)
    optimizer.step()
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cuda"}


def test_a_fused_step_that_overflows_is_skipped_without_the_host_and_the_next_is_taken(made: dict[str, Any]) -> None:
    model = made["model"]().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=4.0), **VALUES)
    prepare(config, model, optimizer)
    controller = PrecisionController(config, "cuda")
    controller.attach(model)
    for factor, moves in ((float("inf"), False), (1.0, True)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with controller.autocast():
            loss = made["loss"](model, (torch.randn(4, 3, 8, 8, device="cuda"), torch.zeros(4, device="cuda").long()))
        controller.backward(loss * factor)
        controller.step(optimizer)
        controller.update()
        optimizer.zero_grad()
        same = all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert same is not moves
        assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("isolation", ["forked", "kept"])
def test_trials_have_it_one_after_the_other(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOAD)
    plain = Setting(precision="fp32", batch_size=4)
    settings = [plain, *(Setting(precision="fp16", batch_size=4, **{name: VALUES[name]}) for name in VALUES), plain]
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, isolation, Watcher()) as backend:
        state = backend.load(120)
        backend.open("cuda", None, 120)
        for setting in settings:
            scale = LossScale(init_scale=4.0) if setting.precision == "fp16" else None
            found = backend.submit(
                Trial(candidate=setting, device="cuda", loss_scale=scale, torch_state=state)
            ).result()
            assert isinstance(found, Measurement), found


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_layers_in_fp8_train_on_a_card_and_step_down_there(recipe: Any) -> None:
    """Emulated where the card has no fp8; what its tensor cores compute is what another test looks at."""
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() >= (8, 9):
        pytest.skip("this card computes fp8 itself")
    widths = [nn.Linear(32, 64), *(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 10)]
    model = nn.Sequential(*widths).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    config = AmpConfig(precision="fp8", batch_size=16, fp8_recipe=recipe, fallback=["bf16"])
    prepare(config, model, optimizer)
    controller = PrecisionController(config, "cuda")
    controller.attach(model)
    kinds = []
    for _ in range(2):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with controller.autocast():
            output = model(torch.randn(16, 32, device="cuda"))
        controller.backward(nn.functional.cross_entropy(output.float(), torch.zeros(16, device="cuda").long()))
        controller.step(optimizer)
        controller.update()
        optimizer.zero_grad()
        kinds.append((output.dtype, type(model[1]).__name__))
        assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        controller.set_precision("bf16")
    assert kinds == [(torch.bfloat16, "Fp8Linear"), (torch.bfloat16, "Linear")]


@pytest.mark.real_gpu("fp8 tensor cores and Triton")
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_fp8_s_tensor_cores_are_measured_with_any_number_of_samples(recipe: Any) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 tensor cores begin with 8.9")
    workload = Path(__file__).parents[1] / "dimensions" / "fp8_samples.py"
    payload = Payload(target=f"{workload}:workload", path=tuple(sys.path))
    with LocalBackend(payload, None, Watcher()) as backend:
        state = backend.load(120)
        backend.open("cuda", None, 120)
        for batch_size in (256, 250):
            setting = Setting(precision="fp8", batch_size=batch_size, fp8_recipe=recipe, compile="default")
            found = backend.submit(Trial(candidate=setting, device="cuda", torch_state=state)).result()
            assert isinstance(found, Measurement), found

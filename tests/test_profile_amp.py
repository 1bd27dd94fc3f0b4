"""profile_amp() on live objects: nothing of the user's changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from conftest import CommandLine

SCRIPT = """
import pickle, random, numpy, torch
from torch import nn
from autotune_amp import AmpProfile, Workload, profile_amp
from autotune_amp.core.intervals import ratio_interval

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
model[2].eval()
optimizer = torch.optim.AdamW([
    {"params": model[0].parameters(), "lr": 0.1}, {"params": model[3].parameters()}], lr=0.01)
generator = torch.Generator().manual_seed(11)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
loss(model, next(iter(loader))).backward()
optimizer.step()
loss(model, next(iter(loader))).backward()  # gradients are left as they are

def snapshot():
    return pickle.dumps([
        [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()],
        [parameter.grad is None or parameter.grad.numpy().tobytes() for parameter in model.parameters()],
        [(module.training, type(module), sorted(vars(module))) for module in model.modules()],
        [[(k, v.numpy().tobytes() if torch.is_tensor(v) else v) for k, v in s.items()]
         for s in optimizer.state_dict()["state"].values()],
        optimizer.state_dict()["param_groups"],
        [tensor.numpy().tobytes() for tensor in dataset.tensors],
        torch.get_rng_state().numpy().tobytes(), generator.get_state().numpy().tobytes(),
        random.getstate(), numpy.random.get_state(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    ])

before = snapshot()
addresses = [parameter.data_ptr() for parameter in model.parameters()]
found = profile_amp(Workload(model, loss, loader, optimizer), 4, device="cpu", precision=["bf16", "tf32"])
assert snapshot() == before, "the profile changed something"
assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
model[0].weight.data.add_(1)
assert snapshot() != before, "the snapshot sees no change at all"
assert isinstance(found, AmpProfile)
bf16 = found.row("bf16")
assert found.batch_size == 4 and found.best_precision == "bf16"
assert found.speedup == bf16.speedup and bf16.speedup_interval == ratio_interval(
    found.row("fp32").process_step_seconds, bf16.process_step_seconds)
assert len(bf16.process_step_seconds) == 3 and bf16.num_steps == 4 and bf16.peak_memory_bytes > 0
assert abs(sum(part.share for part in found.gap.parts) - 1) < 1e-9
assert found.verdict in found.explain()
print(found.row("tf32").reason)
"""


@pytest.mark.slow
def test_live_objects_are_the_same_bit_for_bit_after_a_profile(cli: CommandLine) -> None:
    (cli.folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=cli.folder, env=cli.environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "TF32 is a mode of NVIDIA's tensor cores; a CPU has none.\n"
    assert "fp32, bf16 in turns" in done.stderr

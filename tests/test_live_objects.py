"""recommend_config() on live objects: nothing of the user's is changed, and any script, REPL or class of it works."""

from __future__ import annotations

import subprocess

import pytest
from conftest import CommandLine, Finished

# One trial does not end the search by itself: a busy machine may take all of the budget.
OPTIONS = (
    "budget=90, trials=1, try_=['optimizer_impl'], precision='fp32', batch_size=(4, 8), effective_batch_size='free', "
    "baseline='fp32:4', device='cpu'"
)

PREAMBLE = """import torch
from torch import nn
from autotune_amp import Workload, recommend_config
from autotune_amp.search.stages import confirm
confirm.MAX_ROUNDS = 1
"""


def run_script(cli: CommandLine, text: str) -> Finished:
    """Run a script of that text in the test's folder."""
    (cli.folder / "script.py").write_text(text)
    return cli.python("script.py")


def test_live_objects_are_the_same_bit_for_bit_after_a_search(cli: CommandLine) -> None:
    script = f"""{PREAMBLE}
import copy, pickle, random, numpy
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 1))
model[2].eval()
optimizer = torch.optim.AdamW([
    {{"params": model[0].parameters(), "lr": 0.1}}, {{"params": model[3].parameters()}}], lr=0.01)
generator = torch.Generator().manual_seed(11)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

loss(model, next(iter(loader))).backward()
optimizer.step()
loss(model, next(iter(loader))).backward()  # gradients are left as they are

def snapshot():
    return pickle.dumps([
        [(name, value.numpy().tobytes()) for name, value in model.state_dict().items()],
        [parameter.grad is None or parameter.grad.numpy().tobytes() for parameter in model.parameters()],
        [module.training for module in model.modules()],
        [[(k, v.numpy().tobytes() if torch.is_tensor(v) else v) for k, v in s.items()]
         for s in optimizer.state_dict()["state"].values()],
        optimizer.state_dict()["param_groups"],
        torch.get_rng_state().numpy().tobytes(), generator.get_state().numpy().tobytes(),
        random.getstate(), numpy.random.get_state(),
        torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
    ])

before = snapshot()
addresses = [parameter.data_ptr() for parameter in model.parameters()]
found = recommend_config(Workload(model, loss, loader, optimizer), {OPTIONS})
assert snapshot() == before, "the search changed something"
assert addresses == [parameter.data_ptr() for parameter in model.parameters()]
model[0].weight.data.add_(1)
assert snapshot() != before, "the snapshot sees no change at all"
print(found.config.precision, found.evidence.baseline.config.batch_size)
"""
    done = run_script(cli, script)
    assert done.code == 0, done.err
    assert done.out == "fp32 4\n"


def test_a_script_without_a_main_guard_whose_torch_state_and_autocast_the_trials_take_over(cli: CommandLine) -> None:
    script = f"""{PREAMBLE}
print("the script runs")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
WIDTH = 16

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, inputs):
        return self.layers(inputs)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        assert info is not None and info.num_workers == 2, "loaded outside a worker"
        return torch.full((8,), float(index)), torch.zeros(1)

def loss(model, batch):
    assert torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16 or not torch.is_autocast_enabled("cpu")
    return (model(batch[0]) - batch[1]).square().mean()

with torch.autocast("cpu", dtype=torch.bfloat16):
    found = recommend_config(
        Workload(lambda: Model(), loss, torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2),
                 lambda parameters: torch.optim.SGD(parameters, lr=0.001)),
        budget=90, trials=2, precision=["fp32", "bf16"], batch_size=(4, 4), device="cpu", try_="none")
print(found.evidence.baseline.config.precision)
"""
    done = run_script(cli, script)
    assert done.code == 0, done.err
    assert done.out == "the script runs\nbf16\n", "a child ran the script again"
    assert cli.failures() == []


@pytest.mark.slow
def test_from_a_repl(cli: CommandLine) -> None:
    typed = f"""{PREAMBLE}
class Model(nn.Linear):
    pass

def data(size):
    return torch.randn(size, 8), torch.randn(size, 1)

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

found = recommend_config(Workload(lambda: Model(8, 1), loss, data), {OPTIONS})
print("answer", found.config.precision)
"""
    out, err = cli.start_python("-i", "-q", stdin=subprocess.PIPE).communicate(typed, timeout=200)
    assert "answer fp32" in out, err

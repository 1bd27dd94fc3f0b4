"""Training commands on a CUDA device: what is heard of them, and the jobs that they answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import command_line
from described_commands import described, fidelity, local_backend, trial
from running_commands import run_command

from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend

pytestmark = pytest.mark.gpu

SCRIPT = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--precision", default="fp32")
options = parser.parse_args()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
model = nn.Linear(64, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(1000):
    for x, y in torch.utils.data.DataLoader(data, batch_size=options.batch, shuffle=True):
        with torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = (model(x.cuda()) - y.cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


local = pytest.fixture(scope="module")(local_backend)


def test_a_command_is_described_measured_judged_and_held_to_its_memory(tmp_path: Path, local: LocalBackend) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [sys.executable, str(tmp_path / "train.py"), "--batch", "{batch_size=8}", "--precision", "{precision=fp32}"]
    backend, found = described(line, local, device="cuda:0")
    assert isinstance(found, Description), found
    assert (found.batch_size, found.num_parameters) == (8, 65)
    setting = Setting(precision="bf16", batch_size=4)

    def limited(num_bytes: int) -> Measurement | Failure:
        job = trial(setting, device="cuda:0", num_steps=(8, 24), memory_limit_bytes=num_bytes)
        outcome: Measurement | Failure = backend.submit(job).result()
        return outcome

    measured = limited(1 << 40)
    assert isinstance(measured, Measurement), measured
    assert measured.num_steps_together == 4, "the device is not waited for at every step"
    assert 0 < measured.peak_memory_bytes <= measured.reserved_memory_bytes
    refused = limited(measured.reserved_memory_bytes - 1)
    assert isinstance(refused, Failure)
    assert refused.kind == "oom"
    judged = backend.submit(fidelity(setting, "cuda:0")).result()
    assert isinstance(judged, Fidelity)
    assert judged.verdict != "unchecked", judged.reason


def test_a_script_that_catches_its_running_out_of_memory_is_no_measurement(tmp_path: Path, local: LocalBackend) -> None:
    catching = """
        try:
            torch.empty(1 << 50, device="cuda")
        except torch.OutOfMemoryError:
            pass
        optimizer.step()
"""
    (tmp_path / "train.py").write_text(SCRIPT.replace("\n        optimizer.step()\n", catching))
    _, found = described([sys.executable, str(tmp_path / "train.py")], local, device="cuda:0")
    assert isinstance(found, Failure)
    assert found.kind == "oom"


@pytest.mark.real_time
def test_a_search_of_a_command_confirms_what_it_recommends(tmp_path: Path) -> None:
    with command_line(tmp_path) as cli:
        (tmp_path / "train.py").write_text(SCRIPT)
        line = (sys.executable, "train.py", "--batch", "{batch_size=64}", "--precision", "{precision=fp32}")
        done = cli.search("--device", "cuda", "--trials", "3", "--budget", "250", "--", *line)
    assert done.code == 0, done.err
    document = done.document
    assert document["hardware"]["device"].startswith("cuda:")
    assert document["evidence"]["is_confirmed"]
    assert document["command"].startswith(f"{sys.executable} train.py --batch 64")


TWO = """
import torch
from torch import nn
generator, critic = nn.Linear(8, 8).to("{device}"), nn.Linear(8, 1).to("{device}")
optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (generator, critic)]
data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
for epoch in range(1000):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=8):
        critic(generator(x.to("{device}"))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
"""


@pytest.mark.parametrize("number", [0, 1])
def test_two_optimizers_that_step_in_turn_are_measured_on_their_own_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    import torch

    if torch.cuda.device_count() <= number:
        pytest.skip("needs a second card")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TWO.format(device=f"cuda:{number}"))

    def is_enough(heard: RunEvents) -> bool:
        return any(len(list(rank.intervals())) >= 3 for rank in heard.ranks.values())

    ran = run_command([sys.executable, "train.py"], is_enough=is_enough)
    assert ran.verdict == "measured", ran.state.printed
    (rank,) = ran.events.ranks.values()
    assert (rank.peak_memory_bytes or 0) > 0

"""What is set from outside of real scripts, in real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import TORCHRUN, run
from forked_python import ForkServer
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from autotune_amp.command.agent.outside.hooks import SettingHooks
from autotune_amp.command.measure import precision_of
from autotune_amp.command.messages import Set
from autotune_amp.command.rank_steps import Rank

Ran = Callable[..., Rank]

PREAMBLE = """
import copy, sys, torch
from torch import nn
torch.manual_seed(0)
inputs, targets = torch.randn(256, 16), torch.randn(256, 1)
data = torch.utils.data.TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_of = nn.functional.mse_loss
generator = torch.Generator().manual_seed(0)
"""
LOADER = "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, generator=generator)"
STEPS = """
for x, y in loader:
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def ran(fork_server: ForkServer, tmp_path: Path) -> Ran:
    """Run a script that begins with `PREAMBLE` with values set from outside; its first rank.

    It is forked from a process that has imported torch, unless it has a command of its own.
    """

    def ran(text: str, *, command: list[str] | None = None, **outside: object) -> Rank:
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        if command is None:
            heard = run([sys.executable, "train.py"], tmp_path, server=fork_server, outside=outside)
        else:
            heard = run(command, tmp_path, outside=outside)
        return min(heard.ranks.values(), key=lambda rank: rank.rank)

    return ran


def sizes(rank: Rank) -> set[float]:
    return {one.num_samples / one.num_steps for one in rank.intervals()}


def losses(rank: Rank) -> list[float]:
    return [float(loss) for step in rank.primary_steps for loss in step.losses]


def the(name: str, rank: Rank) -> Set:
    (found,) = [one for one in rank.sets if one.name == name]
    return found


@pytest.mark.parametrize(
    "made",
    [
        "torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)",
        "torch.utils.data.DataLoader(data, 8, True)",
        "torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler("
        "torch.utils.data.RandomSampler(data), 8, False))",
    ],
)
def test_the_batch_size_of_the_training_loader_alone(ran: Ran, made: str) -> None:
    text = f"loader = {made}\nothers = torch.utils.data.DataLoader(data, batch_size=64)\n" + STEPS
    today = ran(text)
    trained, other = today.loaders.values()
    assert (trained.batch_size, other.batch_size) == (8, 64)
    rank = ran(text, batch_size=16, maker=trained.maker)
    assert sizes(rank) == {16}
    assert [loader.batch_size for loader in rank.loaders.values()] == [16, 64]
    found = the("batch_size", rank)
    assert (found.what, found.line) == ("DataLoader", trained.line)


@pytest.mark.parametrize(("args", "kwargs"), [((8,), {}), ((), {"batch_size": 8, "num_workers": 0})])
def test_a_loader_that_lightning_makes_again_for_its_sampler_has_the_size_too(
    args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a LightningModule's hooks Lightning goes around DataLoader, to make it again with a sampler for ranks."""
    lightning = pytest.importorskip("lightning.fabric.utilities.data")
    training = TensorDataset(torch.randn(64, 4))
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)  # taken back at the end

    def train_dataloader() -> Any:
        return DataLoader(training, *args, **kwargs)

    def val_dataloader() -> Any:
        return DataLoader(training, *args, **kwargs)

    line = train_dataloader.__code__.co_firstlineno + 1
    maker = f"{Path(__file__).name}:train_dataloader:{line}"
    SettingHooks(Mock(), Mock(), {"batch_size": 16, "maker": maker})._hook_loaders()
    with lightning._replace_dunder_methods(DataLoader, "dataset"):
        loaders = [train_dataloader(), val_dataloader()]
    again = [lightning._update_dataloader(each, SequentialSampler(each.dataset)) for each in loaders]
    assert [each.batch_size for each in loaders] == [16, 8]
    assert [each.batch_size for each in again] == [16, 8]


def test_a_sampler_of_batches_that_is_the_scripts_own_is_left_alone(ran: Ran) -> None:
    text = """
class Pairs(torch.utils.data.BatchSampler):
    pass
loader = torch.utils.data.DataLoader(data, batch_sampler=Pairs(torch.utils.data.RandomSampler(data), 8, False))
"""
    rank = ran(text + STEPS, batch_size=16)
    assert sizes(rank) == {8}
    assert not rank.sets


REGIONS = {
    "switch": "torch.autocast('cpu', torch.bfloat16, enabled={on})",
    "compiled": "torch.autocast('cpu', torch.bfloat16, enabled={on})",
    "old style": "torch.cpu.amp.autocast(enabled={on}, dtype=torch.bfloat16)",
}


@pytest.mark.slow
@pytest.mark.parametrize("region", REGIONS)
def test_regions_of_the_scripts_own(ran: Ran, region: str) -> None:
    """bf16 set from outside, in regions that are off, is the script's own switch; and fp32 its being off."""
    text = (
        LOADER
        + """
{wrapped}
def forward(x, y):
    with {region}:
        return loss_of(model(x), y)
for x, y in loader:
    forward(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
""".replace("{region}", REGIONS[region]).replace(
            "{wrapped}", "@torch.compile(backend='aot_eager')" if region == "compiled" else ""
        )
    )
    off, on = (ran(text.format(on=on)) for on in (False, True))
    assert (precision_of(off), precision_of(on)) == ("fp32", "bf16")
    as_off = ran(text.format(on=True), precision="fp32")
    as_on = ran(text.format(on=False), precision="bf16")
    assert losses(as_off) == losses(off)
    assert losses(as_on) == losses(on)
    assert losses(on) != losses(off)
    assert the("precision", as_on).what == the("precision", as_off).what == "autocast"


def test_a_region_that_is_off_beside_others_that_are_on_stays_off(ran: Ran) -> None:
    text = """
for x, y in loader:
    with torch.autocast('cpu', torch.bfloat16):
        hidden = model[:2](x)
    with torch.autocast('cpu', enabled=False):
        output = model[2](hidden.float())
    assert output.dtype == torch.float32
    loss_of(output, y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    assert losses(ran(LOADER + text, precision="bf16")) == losses(ran(LOADER + text))


@pytest.mark.parametrize(
    "compiles",
    [
        "",
        pytest.param("model = torch.compile(model, backend='eager')\n", marks=pytest.mark.slow),
        pytest.param("model.compile(backend='eager')\n", marks=pytest.mark.slow),
    ],
)
def test_around_the_forward_where_there_is_no_region(ran: Ran, compiles: str) -> None:
    own = """
for x, y in loader:
    with torch.autocast('cpu', torch.bfloat16):
        output = model(x)
    loss = loss_of(output.float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    switched = ran(LOADER + own)
    plain = ran(LOADER + "\n" + compiles + STEPS)
    rank = ran(LOADER + "\n" + compiles + STEPS, precision="bf16")
    assert losses(rank) == pytest.approx(losses(switched), rel=1e-4), "to four digits"
    assert losses(rank) != pytest.approx(losses(plain), rel=1e-5)
    assert "forward" in the("precision", rank).what


def test_the_loss_inside_of_the_model_and_copies_of_it(ran: Ran) -> None:
    text = """
import cloudpickle, functools, pickle
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = model
    def forward(self, x, y):
        return {"loss": loss_of(self.net(x), y), "outputs": (self.net(x),)}
whole, partial = Whole(), nn.Linear(16, 1)
partial.forward = functools.partial(partial.forward)
for number, (x, y) in enumerate(loader):
    out = whole(x, y)
    assert out["loss"].dtype == out["outputs"][0].dtype == partial(x).dtype == torch.float32
    out["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
average = copy.deepcopy(whole)
with torch.no_grad():
    for parameter in average.parameters():
        parameter.zero_()
    assert average(x, y)["outputs"][0].abs().max() == 0, "a copy has its own weights"
    assert whole(x, y)["outputs"][0].abs().max() > 0
for each, args in ((whole, (x, y)), (average, (x, y)), (partial, (x,))):
    for pickled in (pickle.dumps(each), cloudpickle.dumps(each)):
        assert b"autotune_amp.command" not in pickled, "a pickled model is as the script wrote it"
        pickle.loads(pickled)(*args)
"""
    rank = ran(LOADER + text, precision="bf16")
    assert precision_of(rank) == "bf16"
    assert the("precision", rank).what == "the forward of Whole"


def test_a_model_that_trains_after_the_first_steps_of_another_has_a_region_too(ran: Ran) -> None:
    text = """
generator = nn.Linear(16, 16)
own = torch.optim.SGD(generator.parameters(), lr=0.01)
for number, (x, y) in enumerate(loader):
    with torch.set_grad_enabled(number % 5 == 4):
        x = generator(x)
    loss_of(model(x), y).backward()
    (own if number % 5 == 4 else optimizer).step()
assert "forward" in vars(model) and "forward" in vars(generator)
"""
    assert precision_of(ran(LOADER + text, precision="bf16")) == "bf16"


def test_a_model_that_is_exported_has_no_autocast_region(ran: Ran) -> None:
    recurrent = """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(16, 4)
    def forward(self, x):
        return self.cell(x)[0]
recurrent = Recurrent()
recurrent.cell(inputs)
"""
    text = """
assert "forward" in vars(model)
assert "aten::to" not in str(torch.jit.trace(model, x).inlined_graph)
assert torch.equal(torch.jit.script(model)(x), type(model).forward(model, x))
program = str(torch.export.export(model, (x,)).graph)
assert "autocast" not in program and "bfloat16" not in program
own = recurrent.cell.forward
assert torch.equal(torch.jit.script(recurrent)(x), nn.GRU.forward(recurrent.cell, x)[0]), "it has overloads"
assert vars(recurrent.cell)["forward"] is own
"""
    assert precision_of(ran(LOADER + recurrent + STEPS + text, precision="bf16")) == "bf16"


SCALED = """
scaler = torch.amp.GradScaler("cpu", enabled={on})
for x, y in loader:
    with torch.autocast("cpu", torch.float16, enabled={on}):
        loss = loss_of(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
assert scaler.is_enabled() is {becomes}
"""


@pytest.mark.parametrize(("on", "precision"), [(False, "fp16"), (True, "bf16"), (True, "fp32")])
def test_the_scaler_goes_with_the_precision(ran: Ran, on: bool, precision: str) -> None:
    text = LOADER + SCALED.format(on=on, becomes=precision == "fp16")
    rank = ran(text, precision=precision)
    assert precision_of(rank) == precision


def test_no_fp16_without_a_scaler(ran: Ran) -> None:
    rank = ran(LOADER + STEPS, precision="fp16")
    assert precision_of(rank) == "fp32"
    assert not rank.sets


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_the_scripts_own_switch_of_tf32_does_not_undo_the_precision(ran: Ran, precision: str) -> None:
    text = f"torch.backends.cuda.matmul.allow_tf32 = {precision == 'fp32'}\n{LOADER}{STEPS}"
    text += f"assert torch.backends.cuda.matmul.allow_tf32 is {precision == 'tf32'}"
    assert ran(text, precision=precision).primary_steps


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", ["nn.parallel.DistributedDataParallel(model)", "fully_shard(model)"])
def test_ranks(ran: Ran, wrapped: str) -> None:
    text = f"""
import os, time
import torch.distributed
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo")
model = {wrapped}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
{STEPS}
torch.distributed.barrier()
time.sleep(1.0)  # until all is sent: gloo's threads abort about one process in forty at exit, without us too
os._exit(0)
"""
    rank = ran(text, command=[*TORCHRUN, "train.py"], precision="bf16", batch_size=16)
    assert (sizes(rank), precision_of(rank)) == ({16}, "bf16")

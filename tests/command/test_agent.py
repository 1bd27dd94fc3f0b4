"""What the agent sees of real trainings in real processes."""

from __future__ import annotations

import ast
import fcntl
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from commands import INJECTED, TORCHRUN, run
from forked_python import ForkServer

from autotune_amp.command.agent.channel import Channel
from autotune_amp.command.agent.passes import before_update
from autotune_amp.command.frozen_pair import PairingProblem, pair_steps
from autotune_amp.command.measure import batch_sizes, passes_per_step, precision_of
from autotune_amp.command.messages import Error, Gradient, Hello, Torch, Unstepped
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents

PREAMBLE = """
import torch
from torch import nn

torch.manual_seed(0)
inputs, targets = torch.randn(256, 8), torch.randn(256, 1)
data = torch.utils.data.TensorDataset(inputs, targets)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
loss_of = nn.functional.mse_loss
"""


Script = Callable[[str], list[str]]
Train = Callable[..., RunEvents]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """The command of a script that begins with `PREAMBLE`."""

    def write(text: str) -> list[str]:
        (tmp_path / "train.py").write_text(PREAMBLE + text)
        return [sys.executable, "train.py"]

    return write


@pytest.fixture
def train(fork_server: ForkServer, script: Script, tmp_path: Path) -> Train:
    """Run a script that begins with `PREAMBLE`, forked from a process that has imported torch.

    A test of how a process starts calls `run` without a server, and says why.
    """

    def train(text: str, **settings: Any) -> RunEvents:
        return run(script(text), tmp_path, server=fork_server, **settings)

    return train


def only(heard: RunEvents) -> Rank:
    (rank,) = heard.ranks.values()
    return rank


def per_step(rank: Rank) -> set[tuple[float, int]]:
    """Samples and backward passes behind each warm step."""
    return {(one.num_samples // one.num_steps, one.num_passes // one.num_steps) for one in rank.intervals()}


LOOP = """
optimizer = {optimizer}
scaler = torch.amp.GradScaler("cpu", enabled={scales}, init_scale=2.0**127, growth_interval=1000)
for epoch in range({epochs}):
    for number, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=8, shuffle=True), 1):
        scaler.scale(loss_of(model(x), y) * 4).backward()
        if number % {accumulates} == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
"""
SGD, FUSED = "torch.optim.SGD(model.parameters(), lr=0.01)", "torch.optim.SGD(model.parameters(), lr=0.01, fused=True)"


@pytest.mark.parametrize("accumulates", [1, 4])
def test_a_plain_loop(train: Train, accumulates: int) -> None:
    text = LOOP.format(optimizer=SGD, scales=False, epochs=2, accumulates=accumulates)
    rank = only(train(text))
    assert len(rank.primary_steps) == 64 // accumulates
    assert per_step(rank) == {(8 * accumulates, accumulates)}
    assert len(list(rank.intervals())) == len(rank.warm_steps) - 1
    assert len(rank.scalers) == 1
    assert precision_of(rank) == "fp32"
    assert {it.shuffles for it in rank.loaders.values()} == {True}
    assert [forward for forward, *_ in rank.primary_steps[0].forwards] == ["Sequential"] * accumulates


@pytest.mark.parametrize("optimizer", [SGD, FUSED])
def test_what_a_scaler_skips(train: Train, optimizer: str) -> None:
    rank = only(train(LOOP.format(optimizer=optimizer, scales=True, epochs=1, accumulates=1)))
    skipped = [step.is_skipped for step in rank.primary_steps]
    assert len(skipped) == 32
    assert 0 < sum(skipped) < 32
    assert skipped == sorted(skipped, reverse=True), "only at first, while the scale is too large"
    assert len(rank.scalers) == 1
    assert all(0 < float(loss) < 100 for step in rank.primary_steps for loss in step.losses), "not the scaled ones"


def test_two_optimizers_of_which_one_steps_less(train: Train) -> None:
    text = """
critic = nn.Linear(1, 1)
generators, critics = (torch.optim.Adam(part.parameters()) for part in (model, critic))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
for number, (x, y) in enumerate(loader, 1):
    critic(model(x).detach()).sum().backward()
    critics.step()
    if number % 4 == 0:
        critic(model(x)).mean().backward()
        generators.step()
"""
    rank = only(train(text))
    assert len(rank.optimizers) == 2
    assert len(rank.primary_steps) == 16
    assert per_step(rank) == {(16, 5)}


def test_what_comes_before_an_update_comes_at_the_end_of_its_closure() -> None:
    events: list[str] = []

    def closure() -> float:
        events.append("closure")
        return 0.5

    assert before_update(("optimizer",), {}, lambda: events.append("action")) is None
    for args, kwargs in ((("optimizer", closure), {}), (("optimizer",), {"closure": closure})):
        changed_args, changed = before_update(args, kwargs, lambda: events.append("action"))
        assert (changed_args, changed["closure"]()) == (("optimizer",), 0.5)
    assert events == ["action", *["closure", "action"] * 2]


def test_closures_and_a_loop_without_a_loader(train: Train) -> None:
    text = """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, tolerance_grad=0, tolerance_change=0)
for number in range(8):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(inputs[:32]), targets[:32])
        loss.backward()
        return loss
    optimizer.step(closure)
"""
    rank = only(train(text))
    assert len(rank.primary_steps) == 8
    assert not rank.training_loaders
    passes = {one.num_passes for one in rank.intervals()}
    assert passes
    assert passes <= {3, 4}
    assert {(one.num_samples, one.num_batches) for one in rank.intervals()} == {(32, 1)}, "however often it enters"


NEXT_BATCH = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
position = 0
static = torch.empty(8, 8)
def next_batch():
    global position
    position = (position + 8) % 256
    return {batch}
for step in range(48):
    for _ in range({num_passes}):
        {forward}.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("batch", "forward", "num_passes", "expected"),
    [
        ("inputs[position : position + 8]", "model(next_batch()).sum()", "4", (8, 4)),
        ("torch.randn(8, 8)", "model(next_batch()).sum()", "4", (8, 4)),
        ("static.copy_(inputs[position : position + 8])", "model(next_batch()).sum()", "4", (8, 4)),
        ("torch.randn(8, 8)", "(model(next_batch()) - model(next_batch())).sum()", "1", (8, 1)),  # siamese
        ("torch.randn(8, 8)", "model(next_batch()).sum()", "1 + step // 4", (8, None)),  # it ramps up
    ],
)
def test_a_batch_of_the_scripts_own(
    train: Train, batch: str, forward: str, num_passes: str, expected: tuple[int, int | None]
) -> None:
    rank = only(train(NEXT_BATCH.format(batch=batch, forward=forward, num_passes=num_passes)))
    size, num = expected
    assert batch_sizes(rank) == {size}
    least, most = passes_per_step(rank) or (0, 0)
    assert (least, most) == (num, num) if num else least < most
    assert {one.num_samples / one.num_batches for one in rank.intervals()} == {size}


@pytest.mark.parametrize("sample_dim", [0, 1])
def test_what_enters_a_model_in_the_passes_of_a_step(train: Train, sample_dim: int) -> None:
    text = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(24):
    model(torch.randn(5, 3, 8)).square().mean().backward()
    if number % 3 == 2:
        optimizer.step()
"""
    rank = only(train(text, sample_dim=sample_dim))
    assert per_step(rank) == {(3 * (5, 3)[sample_dim], 3)}


COMPILED = """
@torch.compile(backend="eager", dynamic=False)
def loss_in_region(x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model(x).float(), y)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = torch.compile(optimizer.step, backend="eager")
batches = [[8 * number % 256 + n for n in range(8 if number < 48 else 4)] for number in range(64)]
for x, y in torch.utils.data.DataLoader(data, batch_sampler=batches):
    optimizer.zero_grad()
    loss_in_region(x, y).backward()
    step()
"""


def check_compiled(rank: Rank) -> None:
    """Once more after the longest warm-up, where batches get smaller; the autocast region is inside."""
    assert len(rank.primary_steps) == 64
    assert per_step(rank) == {(8, 1), (4, 1)}
    assert rank.num_compiling_steps == 1
    assert len(list(rank.intervals())) == len(rank.warm_steps) - 2, "one compiled anew"
    assert precision_of(rank) == "bf16"


@pytest.mark.parametrize("reset", ["", "torch.compiler.reset()"])
def test_what_is_compiled_the_step_too(train: Train, reset: str) -> None:
    check_compiled(only(train(reset + COMPILED)))


def test_an_evaluation_is_no_training(train: Train) -> None:
    text = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
others = torch.utils.data.DataLoader(data, batch_size=64)
for number, (x, y) in enumerate(loader):
    if number % 8 == 0:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for z, _ in others:
                model(z)
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    rank = only(train(text))
    assert len(rank.training_loaders) == 1
    assert not any(step.regions for step in rank.steps)
    assert per_step(rank) == {(8, 1)}
    assert 0 < len(list(rank.intervals())) < len(rank.warm_steps) - 1, "some of them hold an evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("launch", ["module", "shell", "spawn"])
def test_ways_to_start(script: Script, tmp_path: Path, launch: str) -> None:
    """In fresh processes: Python's own ways to find the program are what differs."""
    body = f"""
def train(rank=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

if __name__ == "__main__":
    {"torch.multiprocessing.spawn(train, nprocs=2)" if launch == "spawn" else "train()"}
"""
    command = script(body)
    if launch == "module":
        command = [sys.executable, "-m", "train"]
    elif launch == "shell":
        (tmp_path / "train.sh").write_text(f"{sys.executable} train.py\n")
        command = ["bash", "train.sh"]
    heard = run(command, tmp_path)
    assert [len(rank.primary_steps) for rank in heard.ranks.values()] == [32] * (2 if launch == "spawn" else 1)
    assert all(per_step(rank) == {(8, 1)} for rank in heard.ranks.values())


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_modules_of_a_loaders_worker_are_not_watched(
    fork_server: ForkServer, script: Script, tmp_path: Path, context: str
) -> None:
    command = script(f"""
class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = model[1](inputs[index])
        if nn.Module.__call__.__name__ == "outermost":
            raise RuntimeError("patched for each sample")
        return x, targets[index]

if __name__ == "__main__":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Augmented(), batch_size=8, num_workers={2 if context == "spawn" else 1},
                                         multiprocessing_context="{context}")
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
""")
    # A worker that is spawned imports the program of a process that was started as such.
    rank = only(run(command, tmp_path, server=fork_server if context == "fork" else None))
    assert len(rank.primary_steps) == 8
    assert per_step(rank) == {(8, 1)}


RANKS = """
import os, time
import torch.distributed
torch.distributed.init_process_group("gloo")
model = {wrapped}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = torch.utils.data.DistributedSampler(data)
for x, y in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()
torch.distributed.barrier()
time.sleep(1.0)  # until all is sent: gloo's threads abort about one process in forty at exit, without us too
os._exit(0)
"""


DDP = "nn.parallel.DistributedDataParallel(model)"
CASTING = "torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)"


def check_ranks(heard: RunEvents, precision: str) -> None:
    assert heard.has_all_ranks
    assert sorted(rank.rank for rank in heard.ranks.values()) == [0, 1]
    assert heard.num_steps == 16
    assert all(per_step(rank) == {(8, 1)} for rank in heard.ranks.values())
    assert (heard.samples_per_second() or 0) > 0
    assert [precision_of(rank) for rank in heard.ranks.values()] == [precision] * 2


@pytest.mark.slow
def test_ranks(script: Script, tmp_path: Path) -> None:
    """Started by torchrun itself."""
    script(RANKS.format(wrapped=DDP))
    check_ranks(run([*TORCHRUN, "train.py"], tmp_path), "fp32")


@pytest.mark.slow
def test_two_torchruns_at_once_one_of_fsdp_that_casts_by_its_own_policy(tmp_path: Path) -> None:
    scripts = (DDP, f"torch.distributed.fsdp.fully_shard(model, mp_policy={CASTING})")
    for name, wrapped in zip(("ddp.py", "fsdp.py"), scripts, strict=True):
        (tmp_path / name).write_text(f"{PREAMBLE}import torch.distributed.fsdp\n{RANKS.format(wrapped=wrapped)}")
    with ThreadPoolExecutor(2) as pool:
        ddp, fsdp = pool.map(lambda name: run([*TORCHRUN, name], tmp_path), ("ddp.py", "fsdp.py"))
    assert not ddp.ranks.keys() & fsdp.ranks.keys()
    check_ranks(ddp, "fp32")
    check_ranks(fsdp, "bf16")
    assert all((rank.peak_memory_bytes or 0) > 1 << 26 for rank in fsdp.ranks.values())


def test_a_python_without_torch_says_hello_and_starts_no_thread(tmp_path: Path) -> None:
    text = "import sys, threading; assert threading.active_count() == 1 and 'torch' not in sys.modules"
    heard = run([sys.executable, "-c", text], tmp_path)
    assert len(heard.of(Hello)) == 1
    assert not heard.of(Torch)


def test_nothing_is_patched_where_nothing_is_observed(train: Train) -> None:
    text = """
from torch.utils.data import dataloader
from torch.optim import optimizer
patched = [torch.autograd.backward, nn.Module.__call__, torch.autocast.__init__, torch.autocast.__enter__,
           torch.amp.GradScaler.__init__, torch.amp.GradScaler.scale, torch.amp.GradScaler.step,
           dataloader.DataLoader.__init__, dataloader._BaseDataLoaderIter.__next__]
assert not [function for function in patched if "autotune_amp" in function.__code__.co_filename]
assert not optimizer._global_optimizer_pre_hooks and not optimizer._global_optimizer_post_hooks
"""
    heard = train(text, observes=False)
    assert len(heard.of(Torch)) == 1
    with pytest.raises(AssertionError):
        train(text)


def test_an_error_of_the_agent_is_told_and_raises_nothing(train: Train) -> None:
    text = """
import sys
def broken(*_):
    raise LookupError("a fault of the agent")
sys.modules["autotune_amp_agent.batches"].size_of = broken
for _ in torch.utils.data.DataLoader(data, batch_size=None):
    break
"""
    heard = train(text)
    assert [(error.types[0], error.message) for error in heard.of(Error)] == [("LookupError", "a fault of the agent")]


def test_a_process_in_which_files_cannot_be_guarded_does_not_run(tmp_path: Path) -> None:
    heard = run([sys.executable, "-c", "open('changed', 'w')"], tmp_path, fails=True, guard={"wrong": 1})
    assert [error.is_of_agent for error in heard.of(Error)] == [True]
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_is_heard(train: Train) -> None:
    text = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for factor in (1.0, float("nan"), float("inf"), 1.0):
    (loss_of(model(inputs), targets) * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
    model = model.requires_grad_()
"""
    losses = [step.losses[0] for step in only(train(text)).steps]
    assert isinstance(losses[0], float)
    assert losses[1:3] == ["nan", "nan"]


def test_the_users_own_sitecustomize_runs(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = True\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    heard = run(
        [sys.executable, "-c", "assert theirs\nimport sitecustomize\nassert 'theirs' in sitecustomize.__file__"],
        tmp_path,
    )
    assert len(heard.of(Hello)) == 1


HOOK = """
import sys
from importlib.machinery import PathFinder

class Finder:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name) if name == "torch" else None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow
def test_what_the_users_own_sitecustomize_does_to_imports_hides_nothing(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "theirs"))
    # In a fresh process: it imports torch, and the compiler later, after the hook is there.
    check_compiled(only(run(script(COMPILED), tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", [["coverage", "run", "--branch"], ["debugpy", "--listen", "127.0.0.1:0"]], ids=lambda tool: tool[0]
)
def test_what_else_looks_into_the_interpreter_goes_on(script: Script, tmp_path: Path, tool: list[str]) -> None:
    coverage = pytest.importorskip("coverage")
    pytest.importorskip(tool[0])
    loop = LOOP.format(optimizer=SGD, scales=False, epochs=1, accumulates=1)
    heard = run([sys.executable, "-m", *tool, *script(loop)[1:]], tmp_path)
    assert [len(rank.primary_steps) for rank in heard.ranks.values()] == [32]
    if tool[0] == "coverage":
        data = coverage.CoverageData(str(tmp_path / ".coverage"))
        data.read()
        written = (PREAMBLE + loop).split("\n")
        assert sorted(data.lines(str(tmp_path / "train.py"))) == [
            number for number, text in enumerate(written, 1) if text
        ]


# Functions and methods that Python 3.8 does not have.
NEWER = {"functools.cache", "itertools.pairwise", "removeprefix", "removesuffix", "is_relative_to"}


def test_the_agent_is_for_python_3_8_and_needs_nothing_but_torch() -> None:
    for path in INJECTED.parent.rglob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert not NEWER & {name for node in attributes for name in (node.attr, ast.unparse(node))}, path
        imported = {
            (name.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.level)
            for name in node.names
        }
        # A run, unlike a trial, may use the controller.
        ours = {"autotune_amp", "msgspec"} if path.name == "real.py" else set()
        assert imported <= {*sys.stdlib_module_names, "torch", *ours}, path


def test_weights_that_are_updated_by_hand(train: Train) -> None:
    text = """
for number in range(600):
    loss_of(model(inputs[:8]), targets[:8]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
"""
    heard = train(text)
    assert not heard.ranks
    unstepped = heard.first(Unstepped)
    assert unstepped is not None
    assert unstepped.num_backward <= 600


@pytest.mark.parametrize("data", ["loader", "tensors"])
def test_frozen_steps_tell_of_their_batches(train: Train, data: str) -> None:
    text = f"""
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
slices = [(inputs[8 * i : 8 * i + 8], targets[8 * i : 8 * i + 8]) for i in range(6)]
for x, y in torch.utils.data.DataLoader(data, batch_size=8) if {data == "loader"} else slices:
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    told = train(text, frozen={"num_steps": 3, "max_entries": 1000}).of(Gradient)
    assert [each.number for each in told] == [0, 1, 2]
    assert len({each.weights for each in told}) == 1, "no step was taken"
    assert len({each.batch for each in told} - {None}) == 3
    assert {sum(each.sizes) for each in told} == {8 * 8 + 8 + 8 + 1}


def test_gradients_can_be_read_after_a_frozen_step(train: Train) -> None:
    told = train(
        """
optimizer = torch.optim.LBFGS(model.parameters())
def closure():
    optimizer.zero_grad()
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
    assert all(p.grad.norm() > 0 for p in model.parameters())
""",
        frozen={"num_steps": 3, "max_entries": 1000},
    ).of(Gradient)
    assert len(told) == 3
    assert len({each.weights for each in told}) == 1, "no step was taken"


def test_weights_in_half_precision_are_raised_for_the_run_that_others_are_held_against(train: Train) -> None:
    text = """
class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.trained = nn.Linear(8, 8).bfloat16().requires_grad_(False), nn.Linear(8, 1)
        self.compute_dtype = torch.bfloat16  # as of bitsandbytes' Linear4bit
        self.packed = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        self.packed.quant_state = "4 bit"  # as of its weights, stored as bf16 for FSDP
    def forward(self, batch):
        hidden = self.frozen(batch["x"])
        assert self.packed.dtype == torch.bfloat16
        assert (hidden.dtype == torch.float32) == (self.compute_dtype == torch.float32)
        return self.trained(hidden.float())
models = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16(), Base()]
optimizer = torch.optim.SGD([p for each in models for p in each.parameters() if p.requires_grad], lr=1.0)
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    (loss_of(models[0](x.bfloat16()), y) + loss_of(models[1]({"x": x.bfloat16()}), y)).backward()
    optimizer.step()
"""
    low, raised = (
        train(text, frozen={"num_steps": 3, "max_entries": 1000, "in_fp32": in_fp32}) for in_fp32 in (False, True)
    )
    assert [each.has_low_weights for each in low.of(Gradient)] == [True] * 3
    assert [each.has_low_weights for each in raised.of(Gradient)] == [False] * 3
    assert isinstance(pair_steps(low.of(Gradient), raised.of(Gradient)), tuple)
    assert not isinstance(pair_steps(low.of(Gradient), raised.of(Gradient)), PairingProblem), (
        "the same weights and batches"
    )
    (rank,) = low.ranks.values()
    assert rank.optimizers[0].num_frozen == {"bfloat16": 76}
    assert rank.optimizers[0].num_parameters == {"bfloat16": 81, "float32": 9}


def test_frozen_gradients_of_complex_and_sparse_weights_are_written_in_full(train: Train) -> None:
    text = """
mix = torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))
words = torch.nn.Embedding(5, 2, sparse=True)
optimizer = torch.optim.SGD([mix, *words.parameters()], lr=1.0)
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    (loss_of(model(x), y) + (mix.conj() * (1 + 2j)).real.sum() + words(torch.arange(2)).sum()).backward()
    optimizer.step()
"""
    told = train(text, frozen={"num_steps": 3, "max_entries": 1000}).of(Gradient)
    assert len(told) == 3
    assert {each.sizes for each in told} == {(2 * 3, 5 * 2)}


def test_what_weights_are_used_in_is_not_what_they_are_packed_in(train: Train) -> None:
    heard = train("""
model.packed = torch.nn.Parameter(torch.zeros(4096, dtype=torch.uint8), requires_grad=False)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    loss_of(model(x), y).backward()
    optimizer.step()
""")
    (rank,) = heard.ranks.values()
    assert {dtype for step in rank.steps for _, _, dtype in step.forwards} == {"float32"}


def test_lazy_modules_may_be_initialized_by_a_forward_in_training(train: Train) -> None:
    heard = train(
        """
model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(1))
model(torch.zeros(2, 8))
model.append(nn.Linear(1, 1))
mixed = nn.Sequential(nn.Linear(8, 1), nn.LazyLinear(1))
never = nn.LazyLinear(1)
optimizer = torch.optim.SGD([*model.parameters(), *mixed.parameters(), *never.parameters()], lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_size=8):
    (loss_of(model(x), y) + loss_of(mixed(x), y)).backward()
    optimizer.step()
""",
        frozen={"num_steps": 3, "max_entries": 1000},
    )
    assert not heard.of(Error)
    assert len(heard.of(Gradient)) == 3
    assert only(heard).steps[0].forwards == (("Sequential", 8, "float32"), ("Sequential", 8, "float32"))


@pytest.mark.slow
def test_no_thread_of_ours_lives_while_python_is_torn_down(tmp_path: Path) -> None:
    """In a fresh process, whose own end it is."""
    (tmp_path / "train.py").write_text("""
import atexit, threading
from pathlib import Path
atexit.register(lambda: Path("threads").write_text(" ".join(each.name for each in threading.enumerate())))
import torch
weight = torch.ones(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for number in range(3):
    (weight * 2).sum().backward()
    optimizer.step()
assert "autotune-amp" in [each.name for each in threading.enumerate()]
""")
    assert len(only(run([sys.executable, "train.py"], tmp_path)).steps) == 3
    assert (tmp_path / "threads").read_text() == "MainThread"


def test_batches_of_an_iterable_dataset_are_counted(train: Train) -> None:
    heard = train(
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in torch.utils.data.DataLoader(Stream(), batch_size=8):
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    )
    assert not heard.of(Error)
    assert per_step(only(heard)) == {(8, 1)}
    (loader,) = only(heard).loaders.values()
    assert (loader.batch_size, loader.num_samples) == (8, None)


def test_each_rank_counts_what_it_is_given_of_batches_that_one_draws_for_all(train: Train) -> None:
    """As rank 0 of two, which draws for both with Accelerate's loader of an IterableDataset."""
    heard = train(
        """
from types import SimpleNamespace
from accelerate.data_loader import DataLoaderDispatcher
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(inputs, targets))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoaderDispatcher(Stream(), batch_size=8)
loader.state = SimpleNamespace(process_index=0, num_processes=2, device="cpu")
for x, y in loader:
    loss_of(model(x), y).backward()
    optimizer.step()
"""
    )
    assert not heard.of(Error)
    steps = only(heard).steps
    assert [(sum(step.num_samples.values()), step.num_batches) for step in steps] == [(8 * n, n) for n in range(1, 17)]


def test_samples_of_a_stream_are_counted_where_they_lie_in_one_row_without_padding(train: Train) -> None:
    heard = train(
        """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(inputs, targets))
def collate(rows):
    x, y = torch.utils.data.default_collate(rows)
    ids = torch.arange(5 * len(rows))[None]
    return {"input_ids": ids, "position_ids": ids % 5, "x": x, "y": y}
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in torch.utils.data.DataLoader(Stream(), batch_size=8, collate_fn=collate):
    loss_of(model(batch["x"]), batch["y"]).backward()
    optimizer.step()
"""
    )
    assert not heard.of(Error)
    assert per_step(only(heard)) == {(8, 1)}


def test_sizes_of_loaders_that_are_drawn_together_are_candidates_each(train: Train) -> None:
    heard = train(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loaders = [torch.utils.data.DataLoader(data, batch_size=size) for size in (4, 10)]
for (x, y), (others, _) in zip(*loaders):
    loss_of(model(torch.cat([x, others]))[:4], y).backward()
    optimizer.step()
"""
    )
    assert batch_sizes(only(heard)) >= {4, 10}


@pytest.mark.parametrize("size", ["[4, 2]", "np.int64(4)"])
def test_a_batch_sampler_may_name_any_size_and_draws_by_the_seed(train: Train, size: str) -> None:
    heard = [
        train(
            f"""
import numpy as np
class Buckets:
    batch_size = {size}
    def __iter__(self):
        yield from (list(range(size)) for size in np.random.permutation(8) + 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_sampler=Buckets()):
    loss_of(model(x), y).backward()
    optimizer.step()
""",
            seed=1,
            sites=True,
        )
        for _ in range(2)
    ]
    assert not heard[0].of(Error)
    samples = [[step.num_samples for step in only(each).steps] for each in heard]
    assert samples[0] == samples[1]
    (loader,) = only(heard[0]).loaders.values()
    assert loader.batch_size == (None if "[" in size else 4)


def test_a_batch_that_is_drawn_once_and_used_in_every_step_is_counted(train: Train) -> None:
    heard = train(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = next(iter(torch.utils.data.DataLoader(data, batch_size=128)))
for _ in range(20):
    loss_of(model.forward(x), y).backward()
    optimizer.step()
"""
    )
    assert per_step(only(heard)) == {(128, 1)}
    assert batch_sizes(only(heard)) == {128}


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process open more than 1,100 files."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if most == resource.RLIM_INFINITY else min(most, 4096), most))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@pytest.mark.usefixtures("many_files")
def test_requests_are_heard_by_a_program_with_more_than_a_thousand_open_files() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel("")
    with ours, theirs, socket.socket(fileno=fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 1100)) as connection:
        channel._socket = connection
        channel.listen()
        ours.sendall(b"go\n")
        assert channel._may_train.wait(60)
        channel.end()

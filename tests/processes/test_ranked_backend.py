"""Trials that two processes train together: what they exchange, and what becomes of the others when one fails."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_contract import BackendContract, Made
from conftest import needs_two_cpus
from listening import Listener
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Description, Failure, FailureKind, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.distributed import free_port
from autotune_amp.processes.devices import rank_slots
from autotune_amp.processes.local import CompletedHandle, Isolation, LocalBackend, Payload
from autotune_amp.processes.process import ENDED
from autotune_amp.processes.ranks import (
    GRACE_SECONDS,
    RankedBackend,
    RankGrace,
    _causing_failure_of_ranks,
    _RankedHandle,
)
from autotune_amp.trial.jobs import Check, Describe, Trial
from autotune_amp.trial.training import Training

# What a batch does is said by its size, and on rank 1 alone.
WORKLOAD = """
import os, time
import torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from autotune_amp import Workload

HERE = Path(__file__).parent
lengths = iter(range(2, 100))
compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        self.offset = 1.0

    def forward(self, x):
        return self.layer(x)

class Parts(nn.ModuleDict):  # a loss takes it apart, so that no forward of it is called; one part is idle
    def __init__(self):
        super().__init__({"layer": nn.Linear(4, 1, bias=False), "idle": nn.Linear(4, 1)})
        self.offset = 1.0

def loss(model, batch):
    is_ranked = dist.is_initialized()
    rank = dist.get_rank() if is_ranked else 0
    if len(batch) == 3:
        raise ValueError("three")
    if rank == 1:
        if len(batch) == 8:
            model.ballast = torch.ones(1 << 26)
        if len(batch) == 10:
            compiled(torch.ones(next(lengths)))
        if len(batch) == 5:
            os._exit(7)
        if len(batch) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory: so it was written")
        if len(batch) == 7:
            time.sleep(1000)
    if is_ranked:
        with (HERE / f"seen-{rank}").open("a") as file:
            weights = [round(weight, 9) for weight in model.layer.weight.flatten().tolist()]
            print(len(batch), weights, batch.sum().item(), file=file)
    return ((model(batch) if isinstance(model, Net) else model["layer"](batch)) - model.offset).square().mean()

def parts():
    return Workload(Parts, loss, lambda size: torch.randn(size, 4), lambda p: torch.optim.SGD(p, lr=0.03))

def evaluate(model):
    time.sleep(1000)

def workload():
    optimizer = lambda p: torch.optim.SGD(p, lr=0.03)
    return Workload(Net, loss, lambda size: torch.randn(size, 4), optimizer, evaluate=evaluate)

class SlowOnRank1(torch.optim.SGD):
    def step(self):
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(0.5)
        super().step()

def uneven():
    optimizer = lambda p: SlowOnRank1(p, lr=0.03)
    return Workload(Net, loss, lambda size: torch.randn(size, 4), optimizer)

def loop():
    def build():
        model = Net()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    def train_step(state, batch, amp):
        state["optimizer"].zero_grad()
        state["model"](batch).square().mean().backward()
        state["optimizer"].step()
    return Workload(build=build, train_step=train_step, data=lambda size: torch.randn(size, 4))
"""

pytestmark = [needs_two_cpus, pytest.mark.usefixtures("nothing_left_at_once", "forked_processes")]


class Opened:
    """A workload that is open on two ranks."""

    def __init__(self, folder: Path, isolation: Isolation | None = None, function: str = "workload") -> None:
        self.folder = folder
        (folder / "train.py").write_text(WORKLOAD)
        payload = Payload(target=f"train:{function}", path=(str(folder), *sys.path))
        self.backend = RankedBackend(
            rank_slots(2, "cpu"), lambda slot, watcher: LocalBackend(payload, isolation, watcher, slot=slot), Listener()
        )
        self.backend.load(60)
        self.state = self.backend.open("cpu", None, 60).torch_state

    def trial(self, batch_size: int = 4, num_ranks: int = 2, **fields: Any) -> Trial:
        steps = {"accumulation_steps": fields.pop("accumulation_steps", 1)}
        candidate = Setting(precision="fp32", batch_size=batch_size, **steps)
        fields = {"num_steps": (3, 3), "deadline_seconds": 60.0, "torch_state": self.state, **fields}
        return Trial(candidate=candidate, device="cpu", num_ranks=num_ranks, **fields)

    def run(self, batch_size: int = 4, **fields: Any) -> Any:
        return self.backend.submit(self.trial(batch_size, **fields)).result()

    def seen(self, rank: int, batch_size: int) -> list[tuple[str, str]]:
        """The weights and the data at each pass of that batch size, in order."""
        lines = (self.folder / f"seen-{rank}").read_text().splitlines()
        ours = [line.partition(" ")[2].rpartition(" ") for line in lines if line.startswith(f"{batch_size} ")]
        return [(weights, data) for weights, _, data in ours]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    made = Opened(tmp_path_factory.mktemp("ranks"))
    with made.backend:
        yield made


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Opened]:
    made = Opened(tmp_path)
    with made.backend:
        yield made


def made_of(opened: Opened) -> Made:
    setting = Setting(precision="bf16", batch_size=4)
    check = Check(what="fidelity", candidate=setting, device="cpu", torch_state=opened.state)
    return Made(opened.backend, opened.trial(num_ranks=1), opened.trial(3), "workload_error", check)


class TestRanked(BackendContract):
    @pytest.fixture
    def made(self, shared: Opened) -> Made:
        return made_of(shared)

    @pytest.fixture
    def new(self, own: Opened) -> Made:
        return made_of(own)


def test_what_is_measured_is_of_both_together(shared: Opened) -> None:
    found = shared.run(4)
    assert isinstance(found, Measurement), found
    assert found.samples_per_second * found.step_seconds == pytest.approx(2 * 4)


def described(opened: Opened, batch_size: int = 4) -> Description:
    job = Describe(device="cpu", torch_state=opened.state, baseline_batch_size=batch_size)
    found = opened.backend.submit(job).result()
    assert isinstance(found, Description), found
    return found


def is_exchanging(opened: Opened, *, has_unused: bool) -> bool:
    """Whether two ranks keep the same weights on different data."""
    unused = described(opened).has_unused_parameters
    assert unused == has_unused
    assert isinstance(opened.run(9, has_unused_parameters=unused), Measurement)
    first, second = opened.seen(0, 9), opened.seen(1, 9)
    num_both = min(len(first), len(second))
    assert num_both >= 3
    assert len({weights for weights, _ in first}) > 1, "steps were taken"
    is_alike = [weights for weights, _ in first[:num_both]] == [weights for weights, _ in second[:num_both]]
    return is_alike and all(ours != theirs for (_, ours), (_, theirs) in zip(first, second, strict=False))


def test_gradients_are_exchanged_so_that_weights_stay_alike_on_different_data(shared: Opened) -> None:
    assert is_exchanging(shared, has_unused=False)


def test_gradients_are_exchanged_where_some_parameters_are_unused(tmp_path: Path) -> None:
    opened = Opened(tmp_path, function="parts")
    with opened.backend:
        assert is_exchanging(opened, has_unused=True)


@pytest.mark.parametrize(
    ("batch_size", "kind", "said"), [(3, "workload_error", "three"), (5, "crash", "rank 1"), (6, "oom", "rank 1")]
)
def test_the_failure_of_a_rank_is_the_trial_s_and_the_next_one_runs(
    shared: Opened, batch_size: int, kind: FailureKind, said: str
) -> None:
    failed = shared.run(batch_size)
    assert isinstance(failed, Failure)
    assert failed.kind == kind, failed
    assert said in failed.message
    assert isinstance(shared.run(4), Measurement)


def test_a_rank_that_hangs_times_out_and_the_next_trial_runs(shared: Opened) -> None:
    failed = shared.run(7, deadline_seconds=3.0)
    assert isinstance(failed, Failure)
    assert failed.kind == "timeout"
    assert isinstance(shared.run(4), Measurement)


def test_the_memory_is_that_of_the_rank_which_takes_the_most(shared: Opened) -> None:
    usual, more = shared.run(4), shared.run(8)
    assert more.peak_memory_bytes > usual.peak_memory_bytes + 200 * 2**20
    assert more.reserved_memory_bytes > usual.reserved_memory_bytes + 200 * 2**20
    limit_bytes = (usual.reserved_memory_bytes + more.reserved_memory_bytes) // 2
    assert isinstance(shared.run(4, memory_limit_bytes=limit_bytes), Measurement)
    failed = shared.run(8, memory_limit_bytes=limit_bytes)
    assert (failed.kind, failed.message.startswith("rank 1")) == ("oom", True)


def test_a_step_for_which_rank_0_waits_for_another_s_compiler_is_taken_again(shared: Opened) -> None:
    found = shared.run(10, num_steps=(4, 4))
    assert isinstance(found, Measurement), found
    assert found.num_compiling_steps


def test_a_port_that_was_taken_meanwhile_is_not_the_trial_s_failure(
    shared: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("", 0)) as taken:
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr("autotune_amp.processes.ranks.free_port", lambda: ports.pop(0))
        assert isinstance(shared.run(4), Measurement)
    assert ports == []


def test_an_evaluation_that_is_too_long_leaves_the_measurement(shared: Opened) -> None:
    """The other ranks have ended by then: they would lose rank 0, which is killed."""
    found = shared.run(4, ending_seconds=1.0)
    assert isinstance(found, Measurement), found
    assert "evaluate" in (found.ending_problem or "")


def test_a_rank_may_take_longer_for_its_last_step(tmp_path: Path) -> None:
    opened = Opened(tmp_path, function="uneven")
    with opened.backend:
        found = opened.run(4)
    assert isinstance(found, Measurement), found


@pytest.mark.parametrize("is_alone", [False, True])
def test_processes_that_are_not_forked_train_together_too(tmp_path: Path, *, is_alone: bool) -> None:
    made = Opened(tmp_path, "kept")
    with made.backend:
        assert all(isinstance(made.run(size, is_alone=is_alone), Measurement) for size in (4, 9))
        assert made.run(6, is_alone=is_alone).kind == "oom"
        assert isinstance(made.run(4, is_alone=is_alone), Measurement)


def test_the_description_says_so(shared: Opened) -> None:
    found = described(shared)
    assert (found.num_ranks, found.is_ranked) == (2, True)
    assert not described(shared, 3).has_unused_parameters, "a batch that fails fails in its trial"


def test_a_loop_of_its_own_is_refused_by_what_would_do(tmp_path: Path) -> None:
    made = Opened(tmp_path, function="loop")
    with made.backend, pytest.raises(WorkloadError, match="ranks is for a workload") as raised:
        made.backend.submit(Describe(device="cpu", torch_state=made.state)).result()
    assert "torchrun" in raised.value.next_step


def test_more_ranks_than_cpus_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="CPUs"):
        rank_slots(100_000, "cpu")


def test_of_an_accumulating_step_the_last_pass_alone_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        num_quiet = 0

        def no_sync(self) -> Any:
            self.num_quiet += 1
            return nullcontext()

    workload = Workload(
        lambda: nn.Linear(4, 1),
        lambda model, batch: model(batch).square().mean(),
        lambda size: torch.ones(size, 4),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trial = Trial(candidate=Setting(precision="fp32", batch_size=4, accumulation_steps=3), device="cpu")
    training, counting = Training(workload, nn.Linear(4, 1), trial), Counting()
    training.no_sync = counting.no_sync
    for number in range(3):
        training.forward_backward(torch.ones(4, 4), is_last=number == 2)
    assert counting.num_quiet == 2


def failure(kind: FailureKind, message: str = "so") -> Failure:
    return Failure(kind=kind, message=message)


def test_a_trial_has_started_once_its_last_rank_has() -> None:
    start_seconds = iter([7.0, 2.0])
    ranks: Any = SimpleNamespace(
        slots=rank_slots(2, "cpu"),
        end_event=lambda slot: threading.Event(),
        submit=lambda job, slot: CompletedHandle(None, next(start_seconds)),
    )
    trial = Trial(candidate=Setting(precision="fp32", batch_size=4), device="cpu", num_ranks=2)
    assert _RankedHandle(ranks, trial).start_seconds == 7.0


TOKENS = "cannot restore the cached tokens"
HELD_UP = "; any of the 2 ranks may have held it up"
LOST = failure("workload_error", "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1")


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([LOST, failure("oom"), LOST], ("oom", "rank 1: so")),
        ([failure("oom"), LOST], ("oom", "so")),
        ([LOST, failure("timeout"), failure("crash", "killed")], ("crash", "rank 2: killed")),
        ([failure("timeout", "late"), failure("timeout", ENDED)], ("timeout", f"late{HELD_UP}")),
        ([LOST, failure("timeout", "late")], ("timeout", "rank 1: late")),
        ([LOST, failure("timeout", ENDED)], (LOST.kind, LOST.message)),
        ([failure("nonfinite"), failure("nonfinite")], ("nonfinite", "so")),
        (
            [failure("crash", "died of SIGABRT"), failure("workload_error", TOKENS)],
            ("workload_error", f"rank 1: {TOKENS}"),
        ),
        ([LOST, failure("workload_error", TOKENS)], ("workload_error", f"rank 1: {TOKENS}")),
    ],
)
def test_the_culprit_is_the_rank_whose_failure_is_its_own(outcomes: list[Failure], expected: tuple[str, str]) -> None:
    found = _causing_failure_of_ranks(outcomes)
    assert (found.kind, found.message) == expected


def test_the_cause_may_report_for_a_while_but_out_of_memory_is_the_cause() -> None:
    grace = RankGrace()
    assert not grace.is_over(LOST, 10.0)
    assert not grace.is_over(failure("workload_error", TOKENS), 10.0 + 0.9 * GRACE_SECONDS), "it runs from the first"
    assert grace.is_over(LOST, 10.0 + GRACE_SECONDS)
    assert not RankGrace().is_over(failure("timeout", "late"), 10.0), "stacks may come"
    assert RankGrace().is_over(failure("oom"), 10.0)


def test_after_what_was_a_pause_the_ranks_have_their_time_anew() -> None:
    grace = RankGrace()
    grace.is_over(LOST, 10.0)
    assert not grace.is_over(None, 100.0)
    assert not grace.is_over(LOST, 100.0)

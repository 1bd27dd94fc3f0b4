"""torch.compile in trials: compiling is no step time, has time of its own, and shares the compiler's cache on disk."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import Listener
from msgspec.structs import replace
from torch import Tensor, nn

from autotune_amp import Workload
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.processes.local import Isolation, LocalBackend, Payload
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.timing import MAX_COMPILING_STEPS, CompileWatch, Timing, time_steps
from autotune_amp.trial.training import make_training

NEEDS_CXX = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, g++, on a CPU")

WORKLOAD = """
import os, time
import torch
from torch import nn
from autotune_amp import Workload
from torch._dynamo.utils import counters

def slow(graph, inputs):
    time.sleep(2.0 if any(tensor.shape[:1] == (6,) for tensor in inputs) else 0.0)
    return graph.forward

def model():
    torch.manual_seed(0)
    return torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), backend=BACKEND)

def loss(model, batch):
    loss = model(batch).square().mean()
    print("graphs", counters["stats"]["unique_graphs"], "hits", counters["inductor"]["fxgraph_cache_hit"])
    print("loss", float(loss).hex())
    return loss

def workload():
    return Workload(model, loss, lambda size: torch.ones(size, 4), lambda p: torch.optim.SGD(p, lr=0.03))
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch)  # type: ignore[no-any-return]  # a module


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def payload(folder: Path, backend: str) -> Payload:
    (folder / "train.py").write_text(WORKLOAD.replace("BACKEND", backend))
    return Payload(target="train:workload", path=(str(folder), *sys.path))


def spec(batch_size: int = 4, **fields: Any) -> Trial:
    candidate = Setting(precision="fp32", batch_size=batch_size)
    return Trial(**{"candidate": candidate, "device": "cpu", "num_warmup_steps": (3, 3), "num_steps": (2, 2), **fields})


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]  # a module


def timed(model: nn.Module, lengths: Iterator[int], **fields: Any) -> tuple[Timing, list[int]]:
    """Trained on sequences of these lengths; with the number of compilations when each step was reported."""

    workload = Workload(model, mean_square, lambda size: torch.ones(size, next(lengths), 4))
    counts: list[int] = []
    with CompileWatch(lambda: None) as watch:
        training = make_training(workload, model, spec(**fields))
        timing = time_steps(training, lambda number, _: counts.append(watch.count()), lambda _: None, watch.count)
    return timing, counts


def test_a_step_that_compiled_is_taken_again() -> None:
    model = Net()
    model.compile(backend="eager")
    timing, counts = timed(model, itertools.chain([7, 7], itertools.count(8)), num_steps=(4, 4))
    # Once for the first length, once more for all others: in the warm-up, whose step was taken again.
    assert counts == [1, 1, 2, *[2] * 4]
    assert timing.num_compiling_steps == 1
    assert len(timing.raw_step_seconds) == 4
    training = make_training(Workload(model, mean_square, lambda size: torch.ones(size, 4)), model, spec())
    for_ever = itertools.count()
    timing = time_steps(training, lambda *_: None, lambda _: None, lambda: next(for_ever))
    assert timing.num_compiling_steps == MAX_COMPILING_STEPS, "one that compiles for ever is measured at last"


@pytest.mark.slow
def test_compiling_has_time_of_its_own_and_a_kept_worker_compiles_for_each_trial(tmp_path: Path) -> None:
    listener = Listener()
    with LocalBackend(payload(tmp_path, "slow"), "kept", listener) as runner:
        state = runner.load(60)
        runner.open("cpu", None, 60)
        assert all(isinstance(runner.submit(spec(size, torch_state=state)).result(), Measurement) for size in (3, 4, 5))
        # One more in each: a worker that went on would compile for any batch size in its second trial, and no more.
        assert sorted(set(listener.words("graphs"))) == ["1", "2", "3"]
        fields: dict[str, Any] = {"torch_state": state, "first_step_deadline_seconds": 1.0}
        assert isinstance(runner.submit(spec(6, deadline_seconds=60.0, **fields)).result(), Measurement)
        late = runner.submit(spec(6, deadline_seconds=2.2, **fields)).result()
    assert isinstance(late, Failure)
    assert late.kind == "timeout"
    assert "compiling" in late.message


def test_graph_breaks_are_counted_while_it_watches() -> None:
    def broken(batch: Tensor) -> Tensor:
        doubled = 2 * batch
        torch._dynamo.graph_break()
        return doubled + 1

    for _ in range(2):
        torch.compiler.reset()
        with CompileWatch(lambda: None) as watch:
            torch.compile(broken, backend="eager")(torch.ones(2))
            assert watch.num_graph_breaks() == 1


class Skipped(Net):
    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch does not type it
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # the compiler's own
def test_what_the_compiler_leaves_alone_is_not_called_compiled() -> None:
    context = Context(Workload(Skipped, mean_square, lambda size: torch.ones(size, 4)), is_kept=False)
    compiled = Setting(precision="fp32", batch_size=4, compile="default")
    found = worker.run(context, spec(candidate=compiled, torch_state=torch_state.capture()), lambda _: None)
    assert isinstance(found, Failure)
    assert (found.kind, "compiled nothing" in found.message) == ("unsupported", True), found


@NEEDS_CXX
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # the compiler's own
def test_trials_share_the_compilers_cache_and_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    losses = []
    state: dict[str, Any] = {}
    isolations: tuple[tuple[Isolation, bool], ...] = (("kept", False), ("forked", False), ("kept", True))
    for isolation, is_alone in isolations:
        listener = Listener()
        with LocalBackend(payload(tmp_path, "'inductor'"), isolation, listener) as runner:
            state = state or runner.load(60)
            if isolation == "kept" and not is_alone:  # a second trial in a process that has the compiler costs least
                runner.open("cpu", None, 60)
                assert isinstance(runner.submit(spec(torch_state=state)).result(), Measurement)
                assert set(listener.words("hits")) == {"0"}
            assert isinstance(runner.submit(spec(torch_state=state, is_alone=is_alone)).result(), Measurement)
        assert int(listener.words("hits")[-1]) > 0
        losses.append(listener.words("loss")[-5:])
    assert losses[0] == losses[1] == losses[2]


BROKEN_COMPILERS = {
    "crash": "echo internal compiler error >&2; exit 4",
    "no space": "echo 'cannot write /tmp/a.s: No space left on device' >&2; exit 1",
    "hang": "touch $BEGUN; exec sleep 1000",
}


@NEEDS_CXX
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "kind", "word"),
    [
        ("crash", "workload_error", "internal compiler error"),
        ("no space", "workload_error", "No space left"),
        ("hang", "timeout", "still"),
    ],
)
def test_a_compiler_that_does_not_compile_costs_its_own_trial(
    what: str, kind: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "g++"
    asked = 'for argument; do case "$argument" in *.cpp) has_source=1;; esac; done'
    broken = f'if [ -n "$has_source" ]; then {BROKEN_COMPILERS[what]}; fi'
    compiler.write_text(f'#!/bin/sh\n{asked}\n{broken}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BEGUN", str(tmp_path / "begun"))
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # ten seconds for a cache that one test has
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    text = WORKLOAD.replace("torch.compile(", "(").replace(", backend=BACKEND", "")
    (tmp_path / "train.py").write_text(text)
    plain = Setting(precision="fp32", batch_size=4)
    with LocalBackend(Payload(target="train:workload", path=(str(tmp_path), *sys.path)), None, Listener()) as runner:
        state = runner.load(60)
        runner.open("cpu", None, 60)
        compiled = replace(plain, compile="default")
        seconds = 30.0 if what == "hang" else 60.0
        failed = runner.submit(spec(candidate=compiled, torch_state=state, deadline_seconds=seconds)).result()
        assert isinstance(failed, Failure), failed
        assert failed.kind == kind, failed
        assert word in failed.message + (failed.details or ""), failed
        assert (tmp_path / "begun").exists() is (what == "hang")
        assert isinstance(runner.submit(spec(candidate=plain, torch_state=state)).result(), Measurement)

"""The confirmation as a miniature of the job: the worst batch first and last, an evaluation and a checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autotune_amp import Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import LocalBackend, Payload
from autotune_amp.isolation.process import Watcher
from autotune_amp.precision import torch_state
from autotune_amp.trial import memory, worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Describe, Trial


@pytest.fixture(autouse=True)
def torch_state_as_before() -> Iterator[None]:
    before = torch_state.capture()
    yield
    torch_state.apply(before)


class Job:
    """A workload that notes what is done to it; sample i is as long as i says."""

    def __init__(self, **parts: Any) -> None:
        self.lengths: list[int] = []
        self.phases: list[str] = []
        samples: Any = [torch.ones(length, 4) for length in (1, 1, 1, 50, 1, 70)]
        self.workload = Workload(
            **{
                "model": nn.Sequential(nn.Linear(4, 1), nn.Dropout()),
                "loss": self.loss,
                "data": DataLoader(samples, batch_size=2, collate_fn=nn.utils.rnn.pad_sequence),
                **parts,
            }
        )

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.lengths.append(batch.shape[0])
        result: torch.Tensor = model(batch).square().mean()
        return result

    def run(self, purpose: Any = "confirm", **fields: Any) -> Outcome:
        spec = Trial(
            candidate=Setting(precision="bf16", batch_size=2),
            device="cpu",
            purpose=purpose,
            num_steps=(2, 2),
            torch_state=torch_state.capture(),
            **({"ending_seconds": 60.0 if purpose == "confirm" else None} | fields),
        )
        return worker.run(Context(self.workload, is_kept=False), spec, self._hear)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["event"] == "phase":
            self.phases.append(message["name"])


def test_the_largest_samples_come_first_and_last_and_the_jobs_own_functions_after_them() -> None:
    noted: dict[str, Any] = {}

    def evaluate(model: nn.Module) -> None:
        model.eval()
        noted["dtype"] = model(torch.ones(1, 4)).dtype

    def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        noted["modes"] = [module.training for module in model.modules()]
        noted["folder"] = folder
        torch.save((model.state_dict(), optimizer.state_dict()), folder / "last.pt")

    model = nn.Sequential(nn.Linear(4, 1), nn.Dropout(), nn.Identity().eval())
    job = Job(model=model, evaluate=evaluate, checkpoint=checkpoint)
    outcome = job.run(worst_samples=(5,))
    assert isinstance(outcome, Measurement)
    assert [job.lengths[step] for step in (0, 3, 6)] == [70] * 3
    assert sorted(job.lengths[step] for step in (1, 2, 4)) == [1, 50, 70]  # an epoch
    assert len(job.lengths) == 7
    assert noted["dtype"] == torch.bfloat16
    assert noted["modes"] == [True, True, True, False]
    assert not noted["folder"].exists()
    assert outcome.evaluation_seconds is not None
    assert outcome.checkpoint_seconds is not None
    assert job.phases[-2:] == ["evaluating", "writing a checkpoint"]


def test_a_trial_of_the_search_takes_the_worst_batch_that_the_workload_names_and_nothing_more() -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    job = Job(worst_batch=lambda size: torch.ones(99, size, 4), evaluate=fail, checkpoint=fail)
    outcome = job.run("search", worst_samples=(5,))
    assert isinstance(outcome, Measurement)
    assert job.lengths.count(99) == 2
    assert job.lengths[0] == 99
    assert (outcome.evaluation_seconds, outcome.checkpoint_seconds) == (None, None)


def test_what_the_jobs_own_functions_raise_is_noted_and_the_measurement_stands() -> None:
    folders: list[Path] = []

    def evaluate(model: nn.Module) -> None:
        sys.exit("no data")

    def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        folders.append(folder)
        (folder / "half.pt").write_text("half")
        raise ValueError("disk of glass")

    outcome = Job(evaluate=evaluate, checkpoint=checkpoint).run()
    assert isinstance(outcome, Measurement)
    assert outcome.ending_problem == "evaluate raised SystemExit: no data; checkpoint raised ValueError: disk of glass"
    assert (outcome.evaluation_seconds, outcome.checkpoint_seconds) == (None, None)
    assert outcome.ending_seconds is not None
    assert not folders[0].exists()


def test_running_out_of_memory_there_is_a_failure() -> None:
    def evaluate(model: nn.Module) -> None:
        raise MemoryError

    outcome = Job(evaluate=evaluate).run()
    assert isinstance(outcome, Failure)
    assert outcome.kind == "oom"


@pytest.mark.parametrize(("seconds", "problem"), [(None, None), (0.0, "evaluate was not run, for want of time")])
def test_they_are_run_where_they_are_asked_for_and_have_time(seconds: float | None, problem: str | None) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    outcome = Job(evaluate=fail).run(ending_seconds=seconds)
    assert isinstance(outcome, Measurement)
    assert outcome.ending_problem == problem


@pytest.mark.parametrize(
    ("parts", "call"),
    [
        ({"evaluate": lambda: None}, "evaluate(model)"),
        ({"checkpoint": lambda model, folder: None}, "checkpoint(model, optimizer, folder)"),
    ],
)
def test_functions_that_cannot_be_called_so_are_refused_before_anything_is_run(
    parts: dict[str, Any], call: str
) -> None:
    with pytest.raises(WorkloadError, match=re.escape(f"is called as {call}")) as caught:
        worker.describe(
            Context(Job(**parts).workload, is_kept=False),
            Describe(device="cpu", torch_state=torch_state.capture()),
            lambda event: None,
        )
    assert f"def {call}" in caught.value.next_step


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process start its peak memory anew")
@pytest.mark.parametrize("where", ["worst_batch", "evaluate", "checkpoint"])
def test_memory_above_the_limit_is_out_of_memory_wherever_it_was_taken(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_limit_data", lambda limit_bytes: None)  # nothing raises, and the tests go on

    def take(*_: Any) -> torch.Tensor:
        torch.ones(1 << 26)  # 256 MiB
        return torch.ones(1, 2, 4)

    limit = 128 << 20
    assert isinstance(Job().run(memory_limit_bytes=limit), Measurement)
    outcome = Job(**{where: take}).run(memory_limit_bytes=limit)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "oom"
    assert "over the limit of 128 MiB" in outcome.message


ENDINGS = """
import os, time
import torch
from torch import nn
from autotune_amp import Workload

size = 0

def data(n):
    global size
    size = n
    return torch.ones(n, 4)

def evaluate(model):
    print("evaluating")
    time.sleep({1: 0, 2: 0.8, 3: 1000}[size])

def checkpoint(model, optimizer, folder):
    print("folder", folder)
    (folder / "half.pt").write_text("half")
    if size == 1:
        os._exit(7)

def workload():
    loss = lambda model, batch: model(batch).square().mean()
    return Workload(nn.Linear(4, 1), loss, data, evaluate=evaluate, checkpoint=checkpoint)
"""


class Listener(Watcher):
    def __init__(self) -> None:
        self.text = ""

    def output(self, text: str) -> None:
        self.text += text


def test_how_a_process_may_end_after_it_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDINGS)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    listener = Listener()
    with LocalBackend(payload, "forked", listener) as runner:
        state = runner.load(60)
        runner.open("cpu", None, 60)

        def run(batch_size: int, **fields: Any) -> Outcome:
            candidate = Setting(precision="fp32", batch_size=batch_size)
            fields = {"ending_seconds": 60.0, **fields}
            return runner.submit(
                Trial(candidate=candidate, device="cpu", purpose="confirm", torch_state=state, **fields)
            ).result()

        died = run(1)
        long = run(2, step_deadline_seconds=0.4)
        endless = run(3, ending_seconds=1.5)
    assert isinstance(died, Failure)
    assert (died.kind, died.message) == (
        "crash",
        "its process exited with status 7 before it reported, writing a checkpoint",
    )
    folders = [Path(line.split()[1]) for line in listener.text.splitlines() if line.startswith("folder")]
    assert len(folders) == 2
    assert not any(folder.exists() for folder in folders)
    assert isinstance(long, Measurement), "no step's deadline holds for an evaluation"
    assert long.evaluation_seconds is not None
    assert long.evaluation_seconds > 0.7
    assert isinstance(endless, Measurement), "it was measured before its time was up"
    assert (endless.evaluation_seconds, endless.ending_seconds) == (None, 1.5)
    assert endless.ending_problem == "evaluate did not end within 1.5 s"

"""Real processes: forked, kept and fresh ones, and what is left of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune_amp.core.errors import BudgetTooSmallError, WorkloadError
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Isolation, LocalBackend, Payload
from autotune_amp.isolation.process import Watcher
from autotune_amp.trial.jobs import Trial

WORKLOAD = """
import os, sys, time
import torch
from torch import nn
from autotune_amp import Workload

print("imported in", os.getpid())

def model():
    print("built in", os.getpid())
    return nn.Linear(4, 1)

def loss(model, batch):
    print("weight", model.weight.detach().flatten().tolist(), "in", os.getpid())
    if len(batch) == 3:
        raise ValueError("three")
    if len(batch) == 5:
        os._exit(7)
    if len(batch) == 6:
        time.sleep(1000)
    return model(batch).square().mean()

def workload():
    return Workload(model, loss, lambda size: torch.ones(size, 4), lambda p: torch.optim.SGD(p, lr=0.03))
"""


class Listener(Watcher):
    def __init__(self) -> None:
        self.text = ""
        self.steps: list[int] = []

    def output(self, text: str) -> None:
        self.text += text

    def step(self, num_steps: int, step_seconds: float) -> None:
        self.steps.append(num_steps)

    def pids(self, word: str) -> list[str]:
        return [line.split()[-1] for line in self.text.splitlines() if line.startswith(word)]


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def payload(tmp_path: Path) -> Payload:
    (tmp_path / "train.py").write_text(WORKLOAD)
    return Payload(target="train:workload", path=(str(tmp_path), *sys.path))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert psutil.Process().children(recursive=True) == []
    assert threading.active_count() == before


def spec(state: dict[str, Any], batch_size: int = 4, **fields: Any) -> Trial:
    candidate = Setting(precision="fp32", batch_size=batch_size)
    return Trial(candidate=candidate, device="cpu", torch_state=state, num_steps=(1, 1), **fields)


def opened(runner: LocalBackend) -> dict[str, Any]:
    runner.load(60)
    state, reason = runner.open("cpu", None, 60)
    assert reason is None
    return state


def test_a_template_loads_once_and_forks_for_each_trial(payload: Payload, listener: Listener) -> None:
    with LocalBackend(payload, "forked", listener) as runner:
        state = opened(runner)
        assert all(isinstance(runner.submit(spec(state)).result(), Measurement) for _ in range(3))
    assert len(listener.pids("imported in")) == 1
    assert len(set(listener.pids("built in"))) == 3
    assert listener.steps == [0, 0, 0, 1] * 3


def test_a_kept_worker_builds_once_and_starts_each_trial_from_the_first_weights(
    payload: Payload, listener: Listener
) -> None:
    with LocalBackend(payload, "kept", listener) as runner:
        state = opened(runner)
        assert all(isinstance(runner.submit(spec(state)).result(), Measurement) for _ in range(2))
        last = runner.submit(spec(state))
        assert isinstance(last.result(), Measurement)
        assert last.start_seconds == 0.0
    assert len(listener.pids("imported in")) == 1
    assert len(listener.pids("built in")) == 1
    weights = [line.split(" in ")[0] for line in listener.text.splitlines() if line.startswith("weight")]
    assert weights[0] == weights[4] == weights[8]
    assert len(set(weights)) == 4


@pytest.mark.slow
def test_a_fresh_process_is_started_for_each_trial(payload: Payload, listener: Listener) -> None:
    with LocalBackend(payload, "fresh", listener, {"MARK_OF_TEST": "1"}) as runner:
        state = opened(runner)
        runner.close()
        for _ in range(2):
            handle = runner.submit(spec(state))
            assert isinstance(handle.result(), Measurement)
            assert handle.start_seconds
    assert len(set(listener.pids("imported in"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["forked", "kept", "fresh"])
def test_failures_are_told_apart_and_the_next_trial_works(
    payload: Payload, listener: Listener, isolation: Isolation
) -> None:
    with LocalBackend(payload, isolation, listener) as runner:
        state = opened(runner)
        raised = runner.submit(spec(state, 3)).result()
        assert isinstance(raised, Failure)
        assert (raised.kind, raised.message) == ("workload_error", "ValueError: three")
        assert 'raise ValueError("three")' in (raised.details or "")
        ended = runner.submit(spec(state, 5)).result()
        assert isinstance(ended, Failure)
        assert ended.kind == "crash"
        assert "status 7" in ended.message
        hung = runner.submit(spec(state, 6, first_step_deadline_seconds=0.5)).result()
        assert isinstance(hung, Failure)
        assert (hung.kind, hung.message) == ("timeout", "a step took longer than 0.5 s (in the first step)")
        late = runner.submit(spec(state, 6, deadline_seconds=12.0)).result()
        assert isinstance(late, Failure)
        assert late.kind == "timeout"
        assert "its time was up" in late.message
        assert isinstance(runner.submit(spec(state, 4)).result(), Measurement)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["forked", "kept", "fresh"])
def test_what_a_dying_trial_leaves_in_another_session_is_ended(
    tmp_path: Path, listener: Listener, isolation: Isolation
) -> None:
    leave = "import subprocess; print('sleeper', subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    (tmp_path / "train.py").write_text(WORKLOAD.replace("os._exit(7)", f"{leave}; sys.stdout.flush(); os._exit(7)"))
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, isolation, listener) as runner:
        outcome = runner.submit(spec(opened(runner), 5)).result()
        assert isinstance(outcome, Failure)
        assert outcome.kind == "crash"
    (sleeper,) = listener.pids("sleeper")
    assert not psutil.pid_exists(int(sleeper)) or psutil.Process(int(sleeper)).status() == psutil.STATUS_ZOMBIE


def test_a_helper_started_by_the_workloads_own_import_is_there_for_every_trial(
    tmp_path: Path, listener: Listener
) -> None:
    text = WORKLOAD + "\nimport subprocess\nhelper = subprocess.Popen(['sleep', '1000'])\n"
    text = text.replace("    if len(batch) == 3:", "    os.kill(helper.pid, 0)\n    if len(batch) == 3:")
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        state = opened(runner)
        assert [type(runner.submit(spec(state)).result()) for _ in range(3)] == [Measurement] * 3


def test_flags_set_by_the_users_function_are_taken_over(tmp_path: Path, listener: Listener) -> None:
    text = WORKLOAD.replace("def workload():", "def workload():\n    torch.backends.cudnn.benchmark = True")
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        assert runner.load(60)["cudnn.benchmark"] is False
        state, _ = runner.open("cpu", None, 60)
        assert state["cudnn.benchmark"] is True


@pytest.mark.slow
def test_a_fresh_and_a_forked_trial_agree_on_memory_that_is_the_models(tmp_path: Path, listener: Listener) -> None:
    text = WORKLOAD.replace(
        "return nn.Linear(4, 1)", "return nn.Sequential(nn.Linear(4, 1), nn.Embedding(1 << 16, 512))"
    )
    text = text.replace("model.weight", "model[0].weight").replace("model(batch)", "model[0](batch)")
    (tmp_path / "train.py").write_text(text)  # the table is 128 MiB
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    counted = {}
    isolations: tuple[Isolation, ...] = ("forked", "kept", "fresh")
    for isolation in isolations:
        with LocalBackend(payload, isolation, listener) as runner:
            state = opened(runner)
            found = [runner.submit(spec(state)).result() for _ in range(2)]
            counted[isolation] = [o.reserved_memory_bytes / 2**20 for o in found if isinstance(o, Measurement)]
    assert counted["forked"] == pytest.approx(counted["fresh"], abs=40)
    assert counted["forked"][1] > 120
    assert counted["kept"][1] > 120


def test_a_killed_template_is_started_again(payload: Payload, listener: Listener) -> None:
    with LocalBackend(payload, "forked", listener) as runner:
        state = opened(runner)
        (template,) = psutil.Process().children()
        template.kill()
        template.wait()
        assert isinstance(runner.submit(spec(state)).result(), Measurement)


def test_the_threads_a_workload_asks_for_are_those_of_its_trials(tmp_path: Path, listener: Listener) -> None:
    text = WORKLOAD + "\ntorch.set_num_threads(3)\ntorch.ones(1 << 22).add_(1)\n"
    text = text.replace('    print("weight"', '    print("threads", torch.get_num_threads())\n    print("weight"')
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        runner.load(60)
        state, reason = runner.open("cpu", None, 60)
        assert reason is None, "the template stays at one thread whatever the workload's code asks for"
        assert state["num_threads"] == 3
        assert isinstance(runner.submit(spec(state)).result(), Measurement)
    assert "threads 3" in listener.text


def test_a_deadline_while_loading(tmp_path: Path, listener: Listener) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(1000)")
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner, pytest.raises(BudgetTooSmallError, match="budget ended"):
        runner.load(6.0)


def test_a_module_that_crashes_while_loading(tmp_path: Path, listener: Listener) -> None:
    (tmp_path / "train.py").write_text("import os; print('last words'); os.kill(os.getpid(), 9)")
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner, pytest.raises(WorkloadError, match="SIGKILL"):
        runner.load(60)
    assert "last words" in listener.text


def test_prints_that_look_like_messages_change_nothing(tmp_path: Path, listener: Listener) -> None:
    text = WORKLOAD.replace('print("weight"', 'os.write(1, b\'{"event": "exit", "status": 3}\\n\'); print("weight"')
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        assert isinstance(runner.submit(spec(opened(runner))).result(), Measurement)
    assert '{"event": "exit", "status": 3}' in listener.text


def test_a_trial_over_its_memory_limit_fails_cleanly(tmp_path: Path, listener: Listener) -> None:
    text = WORKLOAD.replace(
        "if len(batch) == 3:", "if len(batch) == 2:\n        torch.ones(1 << 28)\n    if len(batch) == 3:"
    )
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        state = opened(runner)
        outcome = runner.submit(spec(state, 2, memory_limit_bytes=1 << 29)).result()
        assert isinstance(outcome, Failure)
        assert outcome.kind == "oom"
        assert isinstance(runner.submit(spec(state, 4, memory_limit_bytes=1 << 29)).result(), Measurement)


def test_trackers_are_off_and_the_environment_is_inherited(
    tmp_path: Path, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN_TOKEN", "secret")
    text = WORKLOAD + "\nprint({n: os.environ[n] for n in ('OWN_TOKEN', 'AUTOTUNE_AMP_TRIAL', 'WANDB_MODE')})\n"
    (tmp_path / "train.py").write_text(text)
    payload = Payload(target="train:workload", path=(str(tmp_path), *sys.path))
    with LocalBackend(payload, "forked", listener) as runner:
        runner.load(60)
    assert "{'OWN_TOKEN': 'secret', 'AUTOTUNE_AMP_TRIAL': '1', 'WANDB_MODE': 'disabled'}" in listener.text
    assert "AUTOTUNE_AMP_TRIAL" not in os.environ


def test_a_process_that_is_started_for_a_trial_opens_the_workload_for_the_trials_device(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that "cuda" in the user's function means that one; nobody else has told a runner of fresh processes."""
    sent: list[dict[str, Any]] = []

    class Made:
        """A process that is ready, loads, opens and fails."""

        def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
            self.answers: Iterator[Any] = iter([None, {}, {}, Failure(kind="crash", message="made")])

        def send(self, message: dict[str, Any], data: bytes = b"") -> None:
            sent.append(message)

        def wait(self, *_: Any, **__: Any) -> Any:
            return next(self.answers)

        def end(self) -> None:
            """Nothing to end."""

    monkeypatch.setattr("autotune_amp.isolation.local.Process", Made)
    trial = Trial(candidate=Setting(precision="fp32", batch_size=4), device="cuda:1", torch_state={})
    with LocalBackend(Payload(target=None, path=()), "fresh", listener) as runner:
        assert isinstance(runner.submit(trial).result(), Failure)
    assert [(message["cmd"], message.get("device")) for message in sent][1] == ("open", "cuda:1")

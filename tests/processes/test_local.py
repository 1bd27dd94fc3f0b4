"""Real processes: forked and kept ones, and what is left of them."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_contract import BackendContract, Made
from conftest import is_gone
from forked_python import TRUE_POPEN
from listening import Listener
from msgspec.structs import replace

from autotune_amp.core.errors import BudgetTooSmallError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import identify
from autotune_amp.processes.local import Isolation, LocalBackend, Payload, can_fork
from autotune_amp.processes.process import ProcessEndedError, Watcher
from autotune_amp.trial.jobs import Check, Describe, FingerprintJob, Trial

pytestmark = pytest.mark.usefixtures("nothing_left_at_once", "forked_processes")
needs_fork = pytest.mark.skipif(not can_fork(), reason="trials are not forked here")

# A program that has another one remove its temporary file when it is asked to end, and not when it is killed.
COMPILER = (
    r'trap "sh -c \"sleep 0.1; rm -f $1\"; exit 1" TERM; touch "$1"; '
    "echo compiler $$; while true; do sleep 0.02; done"
)
# What a batch does is said by its size.
WORKLOAD = (
    f"""
COMPILER = {COMPILER!r}
"""
    + """
import os, subprocess, sys, time
import torch
from torch import nn
from autotune_amp import Workload

FOLDER = os.path.dirname(__file__)
print("imported", os.getpid())
print({name: os.environ.get(name) for name in ("OWN_TOKEN", "AUTOTUNE_AMP_TRIAL", "WANDB_MODE")})
helper = subprocess.Popen(["sleep", "1000"])
torch.set_num_threads(3)
torch.ones(1 << 22).add_(1)

def model():
    print("built", os.getpid())
    return nn.Linear(4, 1)

def loss(model, batch):
    os.write(1, b'{"event": "exit", "status": 3}\\n')  # as a message would look, were it not the user's own print
    os.kill(helper.pid, 0)
    print("weight", model.weight.detach().flatten().tolist(), "in", os.getpid())
    print("threads", torch.get_num_threads())
    if len(batch) == 2:
        torch.ones(1 << 28)
    if len(batch) == 3:
        raise ValueError("three")
    if len(batch) == 5:
        print("sleeper", subprocess.Popen(["sleep", "1000"], start_new_session=True).pid)
        sys.stdout.flush()
        os._exit(7)
    if len(batch) == 7:
        os.makedirs(f"{FOLDER}/torch_extensions/mine", exist_ok=True)
        os.open(f"{FOLDER}/torch_extensions/mine/lock", os.O_CREAT | os.O_EXCL)
        for number in range(1000):  # a kernel that could not be compiled, and the next one
            subprocess.run(["sh", "-c", COMPILER, "sh", f"{__file__}.{number}.s"])
    if len(batch) == 6:
        time.sleep(1000)
    return model(batch).square().mean()

def workload():
    torch.backends.cudnn.benchmark = True
    return Workload(model, loss, lambda size: torch.ones(size, 4), lambda p: torch.optim.SGD(p, lr=0.03))
"""
)


class Heard(Listener):
    """Which steps were reported too."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def step(self, num_steps: int, step_seconds: float) -> None:
        self.steps.append(num_steps)


class Opened:
    """A backend whose workload is open, and who listens to it."""

    def __init__(self, folder: Path, isolation: Isolation, *, text: str = WORKLOAD) -> None:
        self.workload = folder / "train.py"
        self.workload.write_text(text)
        self.listener = Heard()
        payload = Payload(target="train:workload", path=(str(folder), *sys.path))
        self.backend = LocalBackend(payload, isolation, self.listener)
        self.loaded_state = self.backend.load(60)
        self.state, self.why_not_forked, _ = self.backend.open("cpu", None, 60)

    def trial(self, batch_size: int = 4, **fields: Any) -> Trial:
        candidate = Setting(precision="fp32", batch_size=batch_size)
        steps: Any = {"num_warmup_steps": (3, 3), "num_steps": (1, 1)}
        return Trial(candidate=candidate, device="cpu", torch_state=self.state, **steps, **fields)

    def run(self, batch_size: int = 4, **fields: Any) -> Measurement | Failure:
        return self.backend.submit(self.trial(batch_size, **fields)).result()

    def failure(self, batch_size: int, **fields: Any) -> Failure:
        found = self.run(batch_size, **fields)
        assert isinstance(found, Failure), found
        return found

    @property
    def made(self) -> Made:
        check = Check(
            what="fidelity", candidate=Setting(precision="bf16", batch_size=8), device="cpu", torch_state=self.state
        )
        return Made(self.backend, self.trial(), self.trial(3), "workload_error", check)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    if not can_fork():
        pytest.skip("trials are not forked here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", TRUE_POPEN)  # a true start
        patch.setenv("OWN_TOKEN", "secret")
        made = Opened(tmp_path_factory.mktemp("forked"), "forked")
    with made.backend:
        yield made


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    made = Opened(tmp_path_factory.mktemp("kept"), "kept")
    with made.backend:
        yield made


class TestForked(BackendContract):
    @pytest.fixture
    def made(self, forked: Opened) -> Made:
        return forked.made

    @pytest.fixture
    def new(self, tmp_path: Path, forked: Opened) -> Iterator[Made]:
        made = Opened(tmp_path, "forked")
        with made.backend:
            yield made.made


class TestKept(BackendContract):
    @pytest.fixture
    def made(self, kept: Opened) -> Made:
        return kept.made


class TestAlone(BackendContract):
    @pytest.fixture
    def made(self, kept: Opened) -> Made:
        made = kept.made
        trial, failing = replace(made.trial, is_alone=True), replace(made.failing, is_alone=True)
        return Made(made.backend, trial, failing, made.failure_kind, replace(made.check, is_alone=True))

    def test_each_trial_has_a_process_of_its_own(self, kept: Opened) -> None:
        assert isinstance(kept.run(), Measurement), "in a process that others may follow in"
        kept.listener.text = ""
        for _ in range(2):
            handle = kept.backend.submit(kept.trial(is_alone=True))
            assert isinstance(handle.result(), Measurement)
            assert handle.start_seconds
        assert isinstance(kept.run(), Measurement)
        assert len(set(kept.listener.words("imported"))) == 3


def test_a_template_loads_once_and_forks_for_each_trial(forked: Opened) -> None:
    listener = forked.listener
    num_imported, num_built = len(listener.words("imported")), len(listener.words("built"))
    listener.steps.clear()
    for _ in range(2):
        handle = forked.backend.submit(forked.trial())
        assert isinstance(handle.result(), Measurement)
        assert handle.start_seconds is None
    assert len(listener.words("imported")) == num_imported
    assert len(set(listener.words("built")[num_built:])) == 2
    assert listener.steps == [0, 0, 0, 1] * 2


def test_a_kept_worker_builds_once_and_starts_each_trial_from_the_first_weights(kept: Opened) -> None:
    for _ in range(2):  # what a job prints is heard by the end of the next one
        assert isinstance(kept.run(), Measurement)
    kept.listener.text = ""
    for _ in range(3):
        handle = kept.backend.submit(kept.trial())
        assert isinstance(handle.result(), Measurement)
        assert handle.start_seconds == 0.0
    assert kept.listener.words("built") == []
    weights = [line.split(" in ")[0] for line in kept.listener.text.splitlines() if line.startswith("weight")]
    assert len(weights) >= 8, "of four steps each"
    assert weights[4:] == weights[:-4]
    assert len(set(weights)) == 4


def test_failures_are_told_apart(forked: Opened) -> None:
    raised = forked.failure(3)
    assert (raised.kind, raised.message) == ("workload_error", "ValueError: three")
    assert 'raise ValueError("three")' in (raised.details or "")
    hung = forked.failure(6, first_step_deadline_seconds=0.5)
    assert hung.kind == "timeout"
    assert "first step" in hung.message
    late = forked.failure(6, deadline_seconds=1.5)
    assert late.kind == "timeout"
    assert "its time was up" in late.message


@pytest.mark.parametrize("isolation", ["forked", "kept"])
def test_what_a_dying_trial_leaves_in_another_session_is_ended(isolation: str, request: pytest.FixtureRequest) -> None:
    opened: Opened = request.getfixturevalue(isolation)
    ended = opened.failure(5)
    assert (ended.kind, "status 7" in ended.message) == ("crash", True)
    sleeper = int(opened.listener.words("sleeper")[-1])
    assert is_gone(sleeper)


@pytest.mark.parametrize("isolation", ["forked", "kept"])
def test_a_late_trial_leaves_no_temporary_files_of_its_programs_and_no_lock_of_a_build(
    isolation: str, request: pytest.FixtureRequest
) -> None:
    opened: Opened = request.getfixturevalue(isolation)
    assert isinstance(opened.run(), Measurement), "a process is there: the deadline is the program's alone"
    assert opened.failure(7, first_step_deadline_seconds=5.0).kind == "timeout"
    assert opened.listener.words("compiler"), "it was started"
    assert not list(opened.workload.parent.glob("*.s"))
    assert not list(opened.workload.parent.glob("torch_extensions/mine/*"))


LOADING = """
import os, signal, tempfile
import torch
from torch import nn
from autotune_amp import Workload

def loss(model, batch):
    if not model.training_steps:
        tempfile.mkdtemp(prefix="mine")
        os.kill(os.getpid(), signal.SIGKILL)  # with loader workers that hold sockets
    model.training_steps -= 1
    return model(batch).square().mean()

def model():
    made = nn.Linear(4, 1)
    made.training_steps = 2
    return made

def workload():
    loader = torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=4, num_workers=2)
    return Workload(model, loss, loader, lambda p: torch.optim.SGD(p, lr=0.03))
"""


@pytest.mark.parametrize("isolation", ["kept", pytest.param("forked", marks=needs_fork)])
def test_a_process_that_is_killed_leaves_no_temporary_files(
    isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's own are gone with the trial, whose search may go on for an hour."""
    temporary = Path(tempfile.mkdtemp(prefix="amp-"))  # of a short name, for the sockets
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    opened = Opened(tmp_path, isolation, text=LOADING)
    found = opened.backend.submit(opened.trial()).result()
    left = [*temporary.rglob("pymp-*"), *temporary.rglob("mine*")]
    opened.backend.close()
    at_the_end = list(temporary.iterdir())
    shutil.rmtree(temporary)
    assert isinstance(found, Failure)
    assert found.kind == "crash"
    assert (left, at_the_end) == ([], [])


def test_what_the_workloads_code_sets_and_prints_is_taken_over_and_trackers_are_off(forked: Opened) -> None:
    assert (forked.loaded_state["cudnn.benchmark"], forked.state["cudnn.benchmark"]) == (False, True)
    assert forked.why_not_forked is None, "the template stays at one thread whatever the workload's code asks for"
    assert forked.state["num_threads"] == 3
    assert isinstance(forked.run(), Measurement)
    assert set(forked.listener.words("threads")) == {"3"}
    assert '{"event": "exit", "status": 3}' in forked.listener.text, "no message of ours"
    assert "{'OWN_TOKEN': 'secret', 'AUTOTUNE_AMP_TRIAL': '1', 'WANDB_MODE': 'disabled'}" in forked.listener.text
    assert "AUTOTUNE_AMP_TRIAL" not in os.environ


def test_a_trial_over_its_memory_limit_fails_cleanly(forked: Opened) -> None:
    assert forked.failure(2, memory_limit_bytes=1 << 29).kind == "oom"
    assert isinstance(forked.run(4, memory_limit_bytes=1 << 29), Measurement)


def test_no_process_of_ours_imports_torchao_before_fp8_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts CUDA where it is imported, and nothing could be forked any more. In a true start."""
    monkeypatch.setattr(subprocess, "Popen", TRUE_POPEN)
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").write_text("print('torchao', 'imported')")
    opened = Opened(tmp_path, "kept")
    with opened.backend:
        assert isinstance(opened.backend.submit(Describe(device="cpu", torch_state=opened.state)).result(), Description)
        candidate = Setting(precision="bf16", batch_size=4)
        assert isinstance(opened.backend.submit(replace(opened.trial(), candidate=candidate)).result(), Measurement)
        assert isinstance(opened.backend.submit(replace(opened.made.check)).result(), Fidelity)
        assert isinstance(opened.run(), Measurement), "by whose end all before it was heard"
        assert opened.listener.words("weight")
        assert opened.listener.words("torchao") == []


@needs_fork
def test_nothing_is_forked_where_the_kernel_opens_no_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert not can_fork()


OPENS_FILES = """
import resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most if most == resource.RLIM_INFINITY else min(most, 4096), most))
opened = [open("/dev/null") for _ in range(1100)]
"""


@needs_fork
def test_a_workload_may_keep_more_than_a_thousand_files_open(tmp_path: Path) -> None:
    opened = Opened(tmp_path, "forked", text=OPENS_FILES + WORKLOAD)
    with opened.backend:
        assert opened.why_not_forked is None
        assert isinstance(opened.run(), Measurement)


class Scripted:
    """A process that gives one answer after the other, and notes what it was sent."""

    answers: Iterator[Any]
    sent: list[dict[str, Any]]
    pid = os.getpid()

    def __init__(self, mode: str, environment: dict[str, str], watcher: Watcher) -> None:
        """Nothing is started."""

    def is_alive(self) -> bool:
        return True

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        self.sent.append(message)

    def wait(self, *_: Any, **__: Any) -> Any:
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Nothing to end."""


READY: tuple[Any, ...] = (None, {}, {"torch_state": {}, "why_not_forked": None})
OVERDUE = ProcessEndedError(Failure(kind="timeout", message="it took too long", is_loading=True))


def scripted(monkeypatch: pytest.MonkeyPatch, isolation: Isolation, *answers: Any) -> tuple[LocalBackend, Any]:
    monkeypatch.setattr("autotune_amp.processes.local.Process", Scripted)
    Scripted.answers, Scripted.sent = iter(answers), []
    return LocalBackend(Payload(target=None, path=()), isolation, Watcher()), Scripted.sent


CUDA_TRIAL = Trial(candidate=Setting(precision="fp32", batch_size=4), device="cuda:1", deadline_seconds=60.0)


def test_a_process_opens_the_workload_for_the_trials_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that "cuda" in the user's function means that one; nobody else has told a backend that was never opened."""
    backend, sent = scripted(monkeypatch, "kept", *READY, {"outcome": "failure", "kind": "crash", "message": "made"})
    assert isinstance(backend.submit(CUDA_TRIAL).result(), Failure)
    assert [(message["cmd"], message.get("device")) for message in sent][1] == ("open", "cuda:1")


@pytest.mark.parametrize(("isolation", "num_loads"), [("forked", 1), ("kept", 2)])
def test_a_process_in_which_a_job_failed_runs_no_other(
    isolation: Isolation, num_loads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failure leaves behind would be measured with the next job; a template only forks."""
    failed = {"outcome": "failure", "kind": "oom", "message": "full"}
    answers = [*READY, failed, *(READY if num_loads == 2 else ()), failed]
    backend, sent = scripted(monkeypatch, isolation, *answers)
    outcomes = [backend.submit(CUDA_TRIAL).result() for _ in range(2)]
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert [message["cmd"] for message in sent].count("load") == num_loads


def test_time_that_ends_while_loading_is_a_small_budget_or_nobodys_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = scripted(monkeypatch, "kept", None, OVERDUE)
    with pytest.raises(BudgetTooSmallError, match=r"more than the 6\.0 s left of the budget"):
        backend.load(6.0)
    jobs: list[Job[Any]] = [replace(CUDA_TRIAL, loading_seconds=6.0), Describe(device="cpu", loading_seconds=6.0)]
    for job in jobs:
        backend, _ = scripted(monkeypatch, "kept", None, OVERDUE)
        found = backend.submit(job).result()
        assert isinstance(found, Failure)
        assert (found.kind, found.is_loading) == ("timeout", True)
        assert found.message == "the workload takes more than 6.0 s to load"


def test_a_result_that_cannot_be_read_is_a_failure_and_a_partial_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ProcessEndedError(Failure(kind="timeout", message="late"), so_far={"step_seconds": None})
    for answer, kind in ((ended.so_far, "crash"), (ended, "timeout")):
        backend, _ = scripted(monkeypatch, "kept", *READY, answer)
        found = backend.submit(CUDA_TRIAL).result()
        assert isinstance(found, Failure)
        assert found.kind == kind


SLOW = """
import time
import torch
from torch import nn
from autotune_amp import Workload

BUILDING_SECONDS = 4.0

def model():
    time.sleep(BUILDING_SECONDS)
    return nn.Linear(4, 1)

def workload():
    return Workload(model, lambda model, batch: model(batch).square().mean(), lambda size: torch.ones(size, 4))
"""


@pytest.mark.parametrize("isolation", [pytest.param("forked", marks=needs_fork), "kept"])
def test_a_jobs_clock_starts_when_its_model_is_built(isolation: Isolation, tmp_path: Path) -> None:
    """Building takes longer than the whole job may; it is loading, which has a deadline of its own."""
    opened = Opened(tmp_path, isolation, text=SLOW)
    with opened.backend:
        late = opened.failure(4, deadline_seconds=60.0, loading_seconds=1.0)
        assert (late.kind, late.is_loading) == ("timeout", True)
        assert late.message == "the workload takes more than 1.0 s to load"
        found = opened.run(4, deadline_seconds=3.0, loading_seconds=60.0)
        assert isinstance(found, Measurement), found


def test_a_workload_may_set_how_processes_start(tmp_path: Path) -> None:
    """As it may in a new Python process; jobs that ran before, such as the fingerprint's, change nothing."""
    sets = "    torch.multiprocessing.set_start_method('spawn')\n    torch.backends"
    (tmp_path / "train.py").write_text(WORKLOAD.replace("    torch.backends", sets))
    payload, identity = Payload(target="train:workload", path=(str(tmp_path), *sys.path)), identify("cpu")
    with LocalBackend(payload, "kept", Listener()) as backend:
        backend.load(60)
        assert isinstance(
            backend.submit(FingerprintJob(device="cpu", options={}, identity=identity)).result(), Fingerprint
        )
        state = backend.open("cpu", None, 60).torch_state
        assert isinstance(backend.submit(Describe(device="cpu", torch_state=state)).result(), Description)

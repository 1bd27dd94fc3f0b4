"""What tests share: the command line in a real process, results made once for all workers, and the proof that
nothing is left behind.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import filelock
import hypothesis
import numpy as np
import psutil
import pytest
from forked_python import ForkServer, forked_programs
from ray_nodes import RayCluster

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# The same examples on every machine, however long each takes there. `--hypothesis-profile default` draws new ones.
hypothesis.settings.register_profile(
    "suite", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

pytest_plugins = ["virtual_gpu_plugin"]

MARK = "AUTOTUNE_AMP_TEST_MARK"

needs_two_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs"
)

# The workers and their children share the cores: a second thread of one waits for the core that another test has. What
# was set outside stands. Before anything imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before a test's own takes its place.
TEMPORARY = tempfile.gettempdir()

# The compiler's cache is meant to outlive a process, and the folder for temporary files that a test has.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{TEMPORARY}/torchinductor_{os.getuid()}")

# Started in the background of a shell, pytest ignores Ctrl-C, and so would every command that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored likewise under nohup


def pytest_configure(config: pytest.Config) -> None:
    """Of pytest-randomly the order alone: what a test draws is `_same_start`'s."""
    config.option.randomly_reset_seed = False


def pytest_xdist_auto_num_workers() -> int:
    """Return two workers for each core: a third of the time of the tests is waiting for processes and deadlines."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(2 * num_cores, 16)


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests for the workers. In CI, have what runs in real time tried once more: a busy machine may cut it
    off, and pytest lists what needed it.
    """
    items[:] = in_shares(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    if "CI" not in os.environ:
        return
    for item in items:
        if item.get_closest_marker("real_time") or {"cli", "shared_once"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.flaky(reruns=1))


def in_shares(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """Order tests so that each worker of `--dist worksteal`, which begins with an equal part of them in their order,
    has whole modules, those with slow tests first: no long test is the last one of all, and what a module's tests
    share is made once.
    """
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    by_slowness = sorted(modules.values(), key=lambda module: -sum(map(is_slow, module)))
    for number, module in enumerate(by_slowness):
        share = shares[number % num_workers] if any(map(is_slow, module)) else min(shares, key=len)
        share += sorted(module, key=is_slow, reverse=True)
    return list(itertools.chain.from_iterable(shares))


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test draws the same numbers and finds fp32 computed as at first, in whatever order the tests run."""
    import torch  # not above: a virtual card must be there before it

    from autotune_amp.precision import torch_state

    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(0)
    flags = torch_state.capture()
    yield
    torch_state.apply_fp32_flags(flags)  # every controller sets them


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, thread or temporary file outlives the tests of a file."""
    tmp_path_factory.getbasetemp()  # pytest's own folder is made before, where it is for all
    # Not in that one: the sockets that loader workers put there allow for about a hundred characters.
    temporary = tempfile.mkdtemp(prefix="amp-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", temporary)
        before = set(_living())
        yield
    left = _left_beside(before)
    files = _files(Path(temporary))
    shutil.rmtree(temporary)
    assert (left, files) == (set(), [])


standing: set[int] = set()  # numbers of the processes that serve tests until the session ends


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Runs Python programs at the price of a fork; see `forked_python`."""
    server = ForkServer()
    standing.add(server.pid)
    yield server
    server.close()


@pytest.fixture(scope="module")
def forked_processes(fork_server: ForkServer) -> Iterator[None]:
    """Processes that trials, checks and commands run in are forks of one that has torch, for a module's tests.

    What else those start, as a launcher does its ranks, is started as ever.
    """
    with forked_programs(fork_server):
        yield


families: set[int] = set()  # numbers of processes that, with all their children, serve tests until the session ends


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """A Ray cluster for all tests, whose head runs no trials: each test adds its own nodes, and removes them."""
    with RayCluster(folder=TEMPORARY, num_cpus=0) as cluster:
        families.add(cluster.pid)
        yield cluster
        families.remove(cluster.pid)


@pytest.fixture(scope="module")
def nothing_left_at_once() -> Iterator[None]:
    """No process or thread, of any kind, is there when the tests of a file are over; nobody waits for its end."""
    before = set(threading.enumerate())
    yield
    served = (
        standing | families | {child.pid for pid in families for child in psutil.Process(pid).children(recursive=True)}
    )
    assert [child for child in psutil.Process().children(recursive=True) if child.pid not in served] == []
    assert set(threading.enumerate()) <= before


def _files(temporary: Path) -> list[str]:
    """What was left in the folder for temporary files, without the compiler's cache and the file of eight characters
    that `tempfile` writes in each process to see whether it may, which may be killed then.
    """
    names = [path.name for path in temporary.iterdir()]
    return [name for name in names if not re.fullmatch(r"torchinductor_.*|[a-z0-9_]{8}", name)]


def _left_beside(before: set[str]) -> set[str]:
    """What does not end by itself within ten seconds."""
    patience_ends = time.monotonic() + 10
    while (left := set(_living()) - before) and time.monotonic() < patience_ends:
        gc.collect()  # a loader's iterator that an exception's traceback holds ends its workers when it is collected
        time.sleep(0.05)
    return left


def is_gone(pid: int) -> bool:
    """Whether a process has ended, its parent knowing it or not."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _living() -> Iterator[str]:
    """This process's children and those of the fork server, and threads; without the one that multiprocessing keeps."""
    servers = [psutil.Process(pid) for pid in standing]
    for process in itertools.chain.from_iterable(each.children() for each in [psutil.Process(), *servers]):
        if process.pid in standing | families:
            continue
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = " ".join(process.cmdline())
            if command and "resource_tracker" not in command:
                yield f"process {process.pid}: {command}"
    for thread in threading.enumerate():
        if not thread.daemon:
            yield f"thread {thread.ident}: {thread.name}"


@dataclass
class Finished:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which must be one JSON document and nothing else."""
        parsed: dict[str, Any] = json.loads(self.out)
        return parsed


class CommandLine:
    """Runs `autotune-amp` in `folder`, with temporary files in a folder of its own.

    With a `server`, what is run to its end is forked from that; what is started is always a process of its own.
    """

    def __init__(self, folder: Path, server: ForkServer | None = None) -> None:
        self.folder = folder
        self._server = server
        # Not in `folder`: its name may be too long for the sockets that loader workers put there.
        self.temporary = Path(tempfile.mkdtemp(prefix="amp-"))
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), MARK: self.mark, "NO_COLOR": "1"}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return self.start_python("-m", "autotune_amp", *arguments, **options)

    def start_python(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def __call__(self, *arguments: str) -> Finished:
        return self.python("-m", "autotune_amp", *arguments)

    def terminate_all(self, process: subprocess.Popen[str]) -> None:
        """As Slurm ends a job: SIGTERM to a command and to all of its processes, which it hears of all at once."""
        process.send_signal(signal.SIGSTOP)
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.terminate()
        process.terminate()
        process.send_signal(signal.SIGCONT)

    def python(self, *arguments: str) -> Finished:
        """A script of the user's own, or a module."""
        if self._server is not None:
            done = self._server.run(arguments, cwd=self.folder, env=self.environment)
            return Finished(done.returncode, done.stdout, done.stderr)
        process = self.start_python(*arguments)
        out, err = process.communicate(timeout=250)
        return Finished(process.returncode, out, err)

    def search(self, *arguments: str) -> Finished:
        """A short search with its result as JSON."""
        return self("search", "--json", *arguments)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return f"{name}:workload"

    def failures(self) -> list[str]:
        """What failed in the searches in this folder, without what a busy machine left no time for."""
        paths = list(self.folder.glob("studies/*/outcomes.jsonl"))
        assert paths, "no search has run here"
        outcomes = [json.loads(line)["outcome"] for path in paths for line in path.read_text().splitlines()]
        failed = [outcome for outcome in outcomes if outcome["outcome"] == "failure"]
        return [f"{outcome['kind']}: {outcome['message']}" for outcome in failed if outcome["kind"] != "timeout"]

    def leftovers(self) -> list[str]:
        """Processes of this test that are still alive, and temporary files."""
        return [*(str(p.cmdline()) for p in self._processes()), *_files(self.temporary)]

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def wait_until_alone(self, seconds: float = 30.0) -> list[str]:
        """The leftovers once children had time to notice that their parent is gone."""
        deadline = time.monotonic() + seconds
        while (left := self.leftovers()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def end(self) -> None:
        for process in list(self._processes()):
            process.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def command_line(folder: Path, server: ForkServer | None = None) -> Iterator[CommandLine]:
    """The command line in `folder`; nothing but what it writes there may outlive the block."""
    cli = CommandLine(folder, server)
    try:
        yield cli
    finally:
        left = cli.wait_until_alone()
        cli.end()
        shutil.rmtree(cli.temporary)
    assert left == []


@pytest.fixture(scope="session")
def cli_server(request: pytest.FixtureRequest) -> ForkServer | None:
    """What the command line is forked from; nothing where there is a card, with which a fork cannot compute, or a
    virtual one, whose machine is chosen as torch is imported.
    """
    has_card = "VIRTUAL_GPU" in os.environ or Path("/dev/nvidiactl").exists()
    return None if has_card else request.getfixturevalue("fork_server")


@pytest.fixture
def cli(cli_server: ForkServer | None, tmp_path: Path) -> Iterator[CommandLine]:
    """The command line in a folder of its own; nothing of it may outlive the test."""
    with command_line(tmp_path, cli_server) as cli:
        yield cli


T = TypeVar("T")


class SharedOnce(Protocol):
    """`shared_once(name, make)`: what `make(folder)` returned, run once for all workers of pytest-xdist."""

    def __call__(self, name: str, make: Callable[[Path], T]) -> T: ...


@pytest.fixture
def shared_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SharedOnce:
    """Makes what is dear, such as a real search, once: the first worker that asks makes it, another waits for it. A
    test that is tried once more has it made anew.

    `make` gets an empty folder that stays until the session ends, and returns what can be pickled.
    """
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    shared = base / "shared"
    is_repeated = getattr(request.node, "execution_count", 1) > 1  # pytest-rerunfailures counts from 1

    def once(name: str, make: Callable[[Path], T]) -> T:
        shared.mkdir(exist_ok=True)
        made = shared / f"{name}.pickle"
        if is_repeated or not made.exists():
            with filelock.FileLock(shared / f"{name}.lock"):
                if is_repeated or not made.exists():
                    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=shared))
                    (folder / "made").mkdir()
                    (folder / "pickle").write_bytes(pickle.dumps(make(folder / "made")))
                    (folder / "pickle").rename(made)  # at once: others may be reading what was made before
        value: T = pickle.loads(made.read_bytes())
        return value

    return once


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real headless Chromium. For one file: playwright's event loop counts as running meanwhile, also for others."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if executable is None:
        pytest.skip("neither chromium nor chromium-headless-shell is on PATH: a real browser is needed for this")
    with sync_playwright() as playwright:
        # Without a sandbox, which root may not have.
        yield playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])

"""The thread of searches with scripted processes: what runs at the same time, and how each end is saved."""

from __future__ import annotations

import errno
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

from autotune_amp.core.errors import InvalidRequestError, RunnerError
from autotune_amp.hardware import nvml
from autotune_amp.processes import devices
from autotune_amp.service import jobs, searching
from autotune_amp.service.jobs import Queue, Search
from autotune_amp.service.searching import OptionError, SearchEvents, SearchThread, checked_options
from autotune_amp.service.settings import Settings, Target

DOCUMENT = {"config": {"precision": "bf16"}}
CPU: dict[str, Any] = {"device": "cpu"}
GPU: dict[str, Any] = {"device": "cuda:0"}
BUSY = {"error": {"kind": "study_busy", "message": "Busy.", "next_step": "Wait."}}
REFUSED = {"error": {"kind": "budget_too_small", "message": "--budget is 1.", "next_step": "Give --budget 2."}}


class ScriptedProcess:
    """A process that ends when the test says so, or when it is interrupted."""

    started: ClassVar[list[ScriptedProcess]] = []

    def __init__(
        self, arguments: list[str], folder: str, output: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.arguments, self.folder, self.output, self.environment = arguments, folder, output, environment
        self.events = Path(arguments[arguments.index("--events") + 1]) if "--events" in arguments else None
        self.code: int | None = None
        self.is_interrupted = self.is_closed = False
        self.started.append(self)

    def end(self, code: int, document: dict[str, Any]) -> None:
        self.output.write_text(json.dumps(document))
        self.code = code

    def interrupt(self) -> None:
        self.is_interrupted = True
        if self.code is None:
            self.end(143, {"error": {"kind": "search_interrupted"}, "best": DOCUMENT})

    def exit_code(self) -> int | None:
        return self.code

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found

    def close(self) -> None:
        self.is_closed = True


class Service:
    """Searches of the given targets, and the processes that were started."""

    def __init__(self, folder: Path, **devices: str) -> None:
        targets = {n: Target(workload=f"{n}.py:f", device=device, folder=str(folder)) for n, device in devices.items()}
        self.settings = Settings(targets=targets, folder=str(folder))
        self.folder = folder
        self.processes = ScriptedProcess.started
        self.start()

    def start(self) -> None:
        self.queue = Queue(f"sqlite:///{self.folder / 'queue.db'}", "here", 10)
        self.thread = SearchThread(self.settings, self.queue)
        self.thread.start()

    def stop(self) -> None:
        self.thread.stop()
        self.queue.close()

    def ask(self, target: str, caller: str = "ann", **options: Any) -> str:
        return self.thread.submit(target, options, caller).id

    def search(self, id_: str) -> Search:
        return self.queue.searches[id_]

    def document(self, id_: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.thread.document(self.search(id_)))
        return found

    def until(self, is_so: Callable[[], object]) -> None:
        for _ in range(3000):
            if is_so():
                return
            threading.Event().wait(0.01)
        raise AssertionError("it did not come")

    def process(self, number: int) -> ScriptedProcess:
        self.until(lambda: len(self.processes) > number)
        return self.processes[number]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Service]]:
    monkeypatch.setattr(searching, "_Process", ScriptedProcess)
    monkeypatch.setattr(searching, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(ScriptedProcess, "started", [])
    made: list[Service] = []

    def make_service(**devices: str) -> Service:
        made.append(Service(tmp_path, **devices))
        return made[-1]

    yield make_service
    for service in made:
        service.stop()


def test_a_search_runs_with_its_options_and_its_end_is_kept(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp", precision=["bf16"], memory_limit="1GiB")
    process = service.process(0)
    assert process.arguments[0] == "search"
    assert process.arguments[-1] == "mlp.py:f"
    for words in ("--memory-limit 1073741824", "--precision bf16", "--device cpu", "--json"):
        assert words in " ".join(process.arguments)
    assert process.events is not None
    best = '{"event": "best", "time": 1.0, "setting": "bf16 batch 8", "outcome": "fast"}\n'
    process.events.write_text(
        '{"event": "phase", "time": 1.0, "text": "searching"}\n{"event": "trial"}\n' + best + "{half"
    )
    service.until(lambda: service.document(id_)["best"])
    running = service.document(id_)
    assert (running["state"], running["phase"], running["num_trials"]) == ("running", "searching", 1)
    assert running["best"] == {"setting": "bf16 batch 8", "outcome": "fast"}
    process.end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")
    done = service.document(id_)
    assert (done["recommendation"], done["best"], done["phase"]) == (DOCUMENT, running["best"], None)
    assert process.is_closed
    assert service.thread.num_trials == 1


def test_one_search_runs_on_a_device_and_none_overtakes(make: Callable[..., Service]) -> None:
    service = make(one="cuda:0", other="cuda:1", host="cpu")
    first, second, third, fourth = (
        service.ask("one"),
        service.ask("one", seed=1),
        service.ask("host"),
        service.ask("other"),
    )
    service.process(0)
    service.until(lambda: service.search(first).state == "running")
    assert [service.document(id_)["position"] for id_ in (second, third, fourth)] == [0, 1, 2]
    service.process(0).end(0, DOCUMENT)
    service.process(1).end(0, DOCUMENT)
    host = service.process(2)
    assert host.arguments[-1] == "host.py:f"
    assert service.search(fourth).state == "queued", "a search on the CPU would be disturbed"
    beside = service.ask("one", seed=2)
    host.end(0, DOCUMENT)
    service.process(4)
    assert [service.search(id_).state for id_ in (fourth, beside)] == ["running", "running"]


def test_a_command_of_several_gpus_sees_these_and_runs_beside_none_of_them(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "host_uuids", lambda: ("GPU-a", "GPU-b", "GPU-c"))
    monkeypatch.setattr(devices, "_gpu_model", lambda _: "T4")
    monkeypatch.setattr(nvml, "process_notes", lambda _: ())
    service = make(two="auto", beside="cuda:2", third="cuda:1")
    service.stop()
    target = replace(service.settings.targets["two"], workload=None, command="torchrun train.py", devices=(1, 2))
    service.settings = replace(service.settings, targets={**service.settings.targets, "two": target})
    service.start()
    service.ask("two")
    waiting = service.ask("beside"), service.ask("third")
    process = service.process(0)
    assert process.environment == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-c"}
    assert "--devices" not in process.arguments, "a search of a command refuses it"
    assert [service.search(id_).state for id_ in waiting] == ["queued", "queued"]
    process.end(0, DOCUMENT)
    service.process(2)
    assert not service.processes[1].environment


def test_a_command_of_all_gpus_sees_all_that_the_service_does(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those in use, and those that CUDA_VISIBLE_DEVICES numbers on a host of several models."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setattr(nvml, "host_uuids", lambda: ("GPU-a", "GPU-b"))
    monkeypatch.setattr(devices, "_gpu_model", lambda uuid: uuid)
    service = make(all="auto")
    service.stop()
    target = replace(service.settings.targets["all"], workload=None, command="torchrun train.py", devices="all")
    service.settings = replace(service.settings, targets={"all": target})
    service.start()
    service.ask("all")
    assert not service.process(0).environment


def test_commands_of_one_folder_wait_for_each_other(make: Callable[..., Service]) -> None:
    service = make(one="cuda:0", other="cuda:1", workload="cuda:2")
    service.stop()
    targets = {
        name: target if name == "workload" else replace(target, workload=None, command="python train.py")
        for name, target in service.settings.targets.items()
    }
    service.settings = replace(service.settings, targets=targets)
    service.start()
    service.ask("one")
    waiting = service.ask("other")
    service.ask("workload")
    process = service.process(1)
    assert process.arguments[-1] == "workload.py:f"
    assert service.search(waiting).state == "queued", "its trials would meet the files of the other's"
    service.process(0).end(0, DOCUMENT)
    service.until(lambda: service.search(waiting).state == "running")


def test_a_search_that_is_done_is_started_again_and_answers_as_before_meanwhile(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    service.process(0).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")
    measured = service.search(id_).measured
    assert service.ask("mlp", "ben") == id_, "its program may have changed"
    service.until(lambda: service.search(id_).state == "running")
    assert service.document(id_)["recommendation"] == DOCUMENT
    assert "--fresh" not in service.process(1).arguments
    service.process(1).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")
    assert service.search(id_).measured == measured, "its cache answered"
    service.thread.submit("mlp", {}, "ben", is_fresh=True)
    fresh = service.process(2)
    assert "--fresh" in fresh.arguments
    service.until(lambda: service.search(id_).state == "running")
    assert fresh.events is not None
    fresh.events.write_text('{"event": "trial"}\n')
    service.until(lambda: not service.search(id_).is_fresh)
    service.stop()
    service.start()
    changed = service.process(3)
    assert "--fresh" not in changed.arguments, "it goes on"
    changed.end(0, {"config": {"precision": "fp16"}})
    service.until(lambda: service.search(id_).state == "done")
    assert service.search(id_).measured != measured


@pytest.mark.parametrize(
    ("code", "document", "words"),
    [(2, REFUSED, ("budget_too_small", "budget is 1.", "Give budget=2.")), (-9, {}, ("crash", "-9", ".log"))],
)
def test_a_failure_is_told(
    code: int, document: dict[str, Any], words: tuple[str, ...], make: Callable[..., Service]
) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    service.process(0).end(code, document)
    service.until(lambda: service.search(id_).state == "failed")
    assert all(word in json.dumps(service.document(id_)["error"]) for word in words)
    assert service.ask("mlp") == id_, "and may be tried again"
    service.process(1).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")
    assert service.document(id_)["error"] is None


def test_what_ends_with_the_service_goes_on_with_the_next(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    running, queued = service.ask("mlp"), service.ask("mlp", seed=1)
    process = service.process(0)
    assert process.events is not None
    lines = '{"event": "phase", "text": "searching"}\n{"event": "trial"}\n'
    process.events.write_text(lines)
    service.stop()
    assert process.is_interrupted
    assert process.is_closed
    service.start()
    again = service.process(1)
    assert again.arguments == process.arguments
    assert process.events.read_text() == lines
    assert [service.search(id_).state for id_ in (running, queued)] == ["running", "queued"]
    assert service.document(running)["num_trials"] == 1
    assert service.document(running)["phase"] is None, "its process is only starting"


def test_a_killed_service_has_left_its_search_running(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    service.process(0)
    service.until(lambda: service.search(id_).state == "running")
    service.queue.close()  # the old thread hears nothing more, as of a killed process
    service.thread.is_stopping = True
    service.thread.join()
    search = replace(service.search(id_), state="running")
    other = Queue(f"sqlite:///{service.folder / 'queue.db'}", "here", 10)
    other.change(id_, state=search.state)
    other.close()
    service.start()
    service.process(1)
    service.until(lambda: service.search(id_).state == "running")


def test_a_study_that_somebody_uses_is_tried_again(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_BUSY_SECONDS", 0.02)
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    service.process(0).end(2, BUSY)
    service.process(1).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")


def test_a_search_is_ended_once_all_have_withdrawn_and_its_best_is_kept(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp", "ann")
    service.ask("mlp", "ben 1f")
    service.ask("mlp", "ben 2e")
    process = service.process(0)
    service.until(lambda: service.search(id_).state == "running")
    assert service.document(id_)["callers"] == ["ann", "ben"]
    service.thread.withdraw(service.search(id_), "ann")
    service.thread.withdraw(service.search(id_), "ben")
    service.until(lambda: service.search(id_).state == "ended")
    assert process.is_interrupted
    assert service.document(id_)["recommendation"] == DOCUMENT


@pytest.mark.parametrize("is_withdrawn", [True, False], ids=["is ended", "fails"])
def test_a_finished_recommendation_stays_where_a_second_request(
    is_withdrawn: bool, make: Callable[..., Service]
) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    service.process(0).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")
    service.ask("mlp")
    service.process(1).end(2, REFUSED)
    service.until(lambda: service.search(id_).state == "failed")
    if is_withdrawn:  # before it had measured anything
        service.queue.change(id_, state="ended")
    assert service.document(id_)["recommendation"] == DOCUMENT


@pytest.mark.parametrize("has_trial", [False, True])
def test_the_events_of_a_finished_search_stay_until_a_trial_of_its_repetition(
    has_trial: bool, make: Callable[..., Service], tmp_path: Path
) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp")
    for number, setting in enumerate(("one", "two")):
        process = service.process(number)
        assert process.events is not None
        lines = '{"event": "phase", "text": "loading"}\n'
        if number == 0 or has_trial:
            lines += f'{{"event": "trial"}}\n{{"event": "best", "setting": "{setting}"}}\n'
        process.events.write_text(lines)
        process.end(0, DOCUMENT)
        service.until(lambda: service.search(id_).state == "done")
        found = service.document(id_)
        assert (found["num_trials"], found["best"]["setting"]) == (1, setting if has_trial else "one")
        assert len(list(tmp_path.glob("searches/*.events.jsonl"))) == 1
        service.ask("mlp")


def test_the_files_of_a_forgotten_search_are_removed(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "_MAX_FINISHED", 1)
    service = make(mlp="cpu")
    ids = []
    for seed in range(2):
        ids.append(service.ask("mlp", seed=seed))
        process = service.process(seed)
        assert process.events is not None
        for path in (process.events, process.output.with_suffix(".log")):
            path.write_text("")
        process.end(0, DOCUMENT)
        service.until(lambda: service.search(ids[-1]).state == "done")
    service.until(lambda: not list(tmp_path.glob(f"searches/{ids[0]}.*")))
    assert len(list(tmp_path.glob(f"searches/{ids[1]}.*"))) == 3


def test_a_target_that_is_gone_fails(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    running = service.ask("mlp")
    gone = service.ask("mlp", seed=1)
    service.process(0)
    service.stop()
    service.settings = replace(service.settings, targets={"other": service.settings.targets["mlp"]})
    service.start()
    service.until(lambda: service.search(gone).state == "failed")
    assert service.search(running).state == "failed"
    assert "mlp" in service.document(gone)["error"]["message"]


def test_a_search_that_waits_is_not_begun_with_other_settings_of_its_target(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu")
    service.ask("mlp")
    waiting = service.ask("mlp", seed=1)
    service.process(0)
    service.stop()
    changed = replace(service.settings.targets["mlp"], workload="other.py:f")
    service.settings = replace(service.settings, targets={"mlp": changed})
    service.start()
    service.until(lambda: service.search(waiting).state == "failed")
    assert len(service.processes) == 1
    service.until(lambda: service.search(service.ask("mlp", seed=1)).state == "running")


def test_devices_are_probed_when_nothing_runs(make: Callable[..., Service]) -> None:
    service = make(mlp="cpu", gpu="cuda:0")
    service.ask("mlp")
    search = service.process(0)
    service.thread.want_hardware()
    search.end(0, DOCUMENT)
    for number, device in ((1, "cpu"), (2, "cuda:0")):
        probe = service.process(number)
        assert probe.arguments == ["probe", "--json", "--device", device]
        probe.end(0, {"hardware": CPU}) if device == "cpu" else probe.end(2, BUSY)
    service.until(lambda: service.thread.hardware)
    assert service.thread.hardware == {"cpu": CPU, "cuda:0": BUSY["error"]}
    service.thread.want_hardware()
    again = service.process(3)
    assert again.arguments[-1] == "cuda:0", "only what failed"
    again.end(0, {"hardware": GPU})
    service.until(lambda: service.thread.hardware == {"cpu": CPU, "cuda:0": GPU})
    service.stop()
    both = replace(service.settings.targets["gpu"], device="auto", devices=(0, 1))
    service.settings = replace(service.settings, targets={"both": both})
    service.start()
    service.thread.want_hardware()
    for number in (4, 5):
        service.process(number).end(0, {"hardware": GPU})
    service.until(lambda: service.thread.hardware == {"cuda:0": GPU, "cuda:1": GPU})


def test_one_who_joins_while_an_ended_search_is_closed_is_waited_for(
    make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make(mlp="cpu")
    id_ = service.ask("mlp", "ann")
    service.process(0)
    monkeypatch.setattr(ScriptedProcess, "close", lambda _: service.ask("mlp", "ben"))
    service.thread.withdraw(service.search(id_), "ann")
    service.process(1)
    service.until(lambda: service.search(id_).state == "running")
    assert service.search(id_).callers == ("ben",)


def test_what_hangs_is_interrupted(make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_PROBE_SECONDS", 0.0)
    service = make(mlp="cpu")
    service.thread.want_hardware()
    assert service.process(0).arguments[0] == "probe"
    service.until(lambda: service.thread.hardware)
    monkeypatch.setattr(searching, "_LATE_SECONDS", -1000.0)
    id_ = service.ask("mlp")
    service.until(lambda: service.search(id_).state == "failed")
    assert service.process(1).is_interrupted
    assert service.search(id_).error


@pytest.mark.parametrize("is_cause", [True, False])
def test_a_search_waits_while_too_many_files_are_open(
    is_cause: bool, make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    shortage = OSError(errno.EMFILE, "Too many open files")
    tried: list[str] = []

    def fail(arguments: list[str], *_: object) -> None:
        tried.append(arguments[0])
        if is_cause:
            raise RunnerError("It cannot be started.", "Wait.") from shortage
        raise shortage

    monkeypatch.setattr(searching, "_BUSY_SECONDS", 0.02)
    with monkeypatch.context() as patch:
        patch.setattr(searching, "_Process", fail)
        service = make(mlp="cpu")
        service.thread.want_hardware()
        service.until(lambda: tried.count("probe") > 1)
    service.process(0).end(0, {"hardware": "cpu"})
    service.until(lambda: service.thread.hardware)
    tried.clear()
    with monkeypatch.context() as patch:
        patch.setattr(searching, "_Process", fail)
        id_ = service.ask("mlp")
        service.until(lambda: tried.count("search") > 1)
        assert service.search(id_).state == "queued"
    service.process(1).end(0, DOCUMENT)
    service.until(lambda: service.search(id_).state == "done")


def test_a_probe_that_cannot_be_started_is_told(make: Callable[..., Service], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(searching, "_Process", fail)
        service = make(mlp="cpu")
        service.thread.want_hardware()
        service.until(lambda: service.thread.hardware)
    assert service.thread.hardware is not None
    assert service.thread.hardware["cpu"]["kind"] == "study"
    assert service.thread.is_alive()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python has no -P")
def test_modules_in_the_folder_of_a_target_do_not_replace_those_of_python(tmp_path: Path) -> None:
    (tmp_path / "signal.py").write_text("raise ImportError")
    process = searching._Process(["--version"], str(tmp_path), tmp_path / "output")
    try:
        assert process._program.wait(60) == 0, (tmp_path / "output.log").read_text()
    finally:
        process.close()


def test_options_are_those_of_the_target_at_most() -> None:
    target = Target(workload="a.py:b", budget=900, memory_limit="2GiB")
    assert checked_options(target, {}).budget_seconds == 600
    assert checked_options(target, {}).memory_limit == 2 << 30
    assert checked_options(target, {"budget": 900, "memory_limit": 5}).memory_limit == 5
    for asked in ({"budget": 901}, {"memory_limit": "3GiB"}):
        with pytest.raises(OptionError) as refused:
            checked_options(target, asked)
        assert refused.value.field in asked
    with pytest.raises(OptionError, match=r"^try is") as refused:
        checked_options(target, {"try": "all"})
    assert refused.value.kind == InvalidRequestError("", "").kind


def test_events_are_read_as_they_are_written(tmp_path: Path) -> None:
    events = SearchEvents(tmp_path / "events.jsonl", 3)
    events.read()
    assert events.lines == []
    with events.path.open("w") as file:
        print('{"event": "phase", "text": "one"}\n{"event": "no', end="", file=file, flush=True)
        events.read()
        assert (events.phase, len(events.lines)) == ("one", 1)
        print('te"}\nhalf{\n[1]\n{"event": "phase", "text": "two"}', file=file, flush=True)
        events.read()
    assert (events.phase, len(events.lines)) == ("two", 3)
    assert events.lines[2] == b'id: 3-2\nevent: phase\ndata: {"event": "phase", "text": "two"}\n\n'

"""Searches of a service: a thread starts each queued one as a process of its own, follows it and saves how it ended.

A process is `autotune-amp search` in its target's folder, under a keeper: if the service is killed, so is the search,
and the next service starts it again, which resumes its study. Two searches run at the same time only on different GPUs,
and those of commands only in different folders, where trials meet no files of the other's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil

from autotune_amp.core.documents import cause, decode, read_file
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, RunnerError, StudyError
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.text import in_python
from autotune_amp.hardware import identify, nvml
from autotune_amp.integrations.service_address import TOKEN_VARIABLE
from autotune_amp.processes.devices import find_gpus, visible_gpus
from autotune_amp.processes.program import Program, new_folder
from autotune_amp.search.options import SearchOptions
from autotune_amp.service.jobs import (
    WAITING,
    Queue,
    Search,
    State,
    UnknownError,
    caller_name,
    search_id,
    study_name,
    target_digest,
)
from autotune_amp.service.settings import Settings, Target

_TICK_SECONDS = 0.25
_END_SECONDS = 60.0  # for a search to save its best after SIGTERM
_LATE_SECONDS = 600.0  # after its budget, when a search is interrupted
_PROBE_SECONDS = 60.0  # for a probe, before it is interrupted
_BUSY_SECONDS = 2.0  # until a search is tried again whose study somebody else uses
# With `-m` Python looks for modules in the target's folder first, unlike `autotune-amp` itself.
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


class SearchEvents:
    """Events so far of one repetition of a search, from its file: for clients, and as phase, trials and best so far."""

    def __init__(self, path: Path, repetition: int) -> None:
        self.path, self.repetition = path, repetition
        self.lines: list[bytes] = []  # server-sent events
        self.phase: str | None = None
        self.num_trials = 0
        self.best: dict[str, Any] | None = None
        self._offset = 0

    def read(self) -> None:
        """Read what was appended to the file."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole + newline)
            for line in whole.splitlines():
                with contextlib.suppress(msgspec.MsgspecError):  # half a line of a search that was killed
                    self._add(msgspec.json.decode(line, type=dict[str, Any]), line)

    def _add(self, event: dict[str, Any], line: bytes) -> None:
        kind = str(event.get("event"))
        if kind == "phase":
            self.phase = event.get("text")
        elif kind == "trial":
            self.num_trials += 1
        elif kind == "best":
            self.best = {name: value for name, value in event.items() if name not in ("event", "time")}
        self.lines.append(server_sent_event(kind, line, f"{self.repetition}-{len(self.lines)}"))


def server_sent_event(kind: str, data: bytes, id_: str | None = None) -> bytes:
    """Return an event in the format of `text/event-stream`, with its ID if given. `data` is on one line."""
    id_line = b"" if id_ is None else b"id: %s\n" % id_.encode()
    return b"%sevent: %s\ndata: %s\n\n" % (id_line, kind.encode(), data)


class _Process:
    """A command of `autotune-amp` that runs for the service, with its output in files."""

    def __init__(
        self, arguments: list[str], folder: str, output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
        with output.open("wb") as out, output.with_suffix(".log").open("wb") as log:
            self._program = Program(
                [sys.executable, *_SAFE_PATH, "-m", "autotune_amp", *arguments],
                {**inherited, **(environment or {})},
                new_folder(),
                working_directory=Path(folder),
                stdin=subprocess.DEVNULL,
                stdout=out.fileno(),
                stderr=log.fileno(),
            )
        self._output = output
        self._end_at: float | None = None
        self._program.start()

    def interrupt(self) -> None:
        """Ask the command, by SIGTERM, to save its best and end; kill it if that takes too long."""
        if self._end_at is None:
            self._end_at = time.monotonic() + _END_SECONDS
            for process in self._program.processes()[:1]:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGTERM)
        elif time.monotonic() > self._end_at:
            self._program.end()

    @property
    def is_interrupted(self) -> bool:
        """Whether the command was asked to end."""
        return self._end_at is not None

    def exit_code(self) -> int | None:
        """Return the exit code once all processes of the command have ended, else None."""
        return self._program.wait(0)

    def document(self) -> dict[str, Any]:
        """Return the document that the command has printed; empty if there is none."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return decode(read_file(self._output), dict[str, Any])
        return {}

    def close(self) -> None:
        """End the command if it still runs, and remove its temporary files."""
        self._program.close()


class SearchThread(threading.Thread):
    """Thread that runs the searches of a queue until `stop`, and the state that clients ask for, kept in memory.

    It starts the processes, so that they have its priority and end with it.
    """

    def __init__(self, settings: Settings, queue: Queue) -> None:
        super().__init__(name="autotune_amp searches", daemon=True)
        self.settings, self.queue = settings, queue
        self.is_stopping = False
        self.hardware: dict[str, dict[str, Any]] | None = None  # documents or errors of the devices, once probed
        self.num_trials = 0  # of all searches, since the service was started
        self.studies = str(Path(settings.folder, "studies"))  # folder of their studies
        self._files = Path(settings.folder, "searches")
        self._files.mkdir(parents=True, exist_ok=True)
        self._devices = {name: _devices_of(target.limits) for name, target in settings.targets.items()}
        self._running: dict[str, _Process] = {}
        self._is_hardware_wanted = False
        self._probed: dict[str, dict[str, Any]] = {}
        self._probing: tuple[str, _Process] | None = None
        self._interrupt_at: dict[str, float] = {}  # by the ID of a search that runs
        self._interrupt_probe_at = 0.0
        self._not_before: dict[str, float] = {}
        self._events: dict[str, SearchEvents] = {}
        self._wake = threading.Event()

    # --- asked by clients, from any thread ---------------------------------------------------------------------------

    def submit(self, name: str, asked: Mapping[str, Any], caller: str, *, is_fresh: bool = False) -> Search:
        """Queue a search of the target `name`, or join the equal one; return it, with `is_fresh` to be measured again.

        Raises `OptionError` for an option that is wrong or above the target's limits, and the errors of
        `Queue.submit`.
        """
        target = self.settings.targets[name]
        id_ = search_id(target, checked_options(target, asked))
        asked_for = Search(
            id=id_,
            target=name,
            target_digest=target_digest(target),
            options=dict(asked),
            callers=(caller,),
            is_fresh=is_fresh,
        )
        search = self.queue.submit(asked_for)
        self._wake.set()
        return search

    def withdraw(self, search: Search, caller: str) -> Search:
        """Withdraw a caller's request; see `Queue.withdraw`."""
        search = self.queue.withdraw(search, caller)
        self._wake.set()
        return search

    def document(self, search: Search) -> bytes:
        """Return a search as JSON: its state, its best so far, and its recommendation or error once it is over.

        The recommendation stays while the search is done again, and if that is ended or fails.
        """
        waiting = [other.id for other in self.queue.waiting()] if search.state in WAITING else []
        events = self.events(search)
        fields = msgspec.structs.asdict(search) | {
            "callers": list(dict.fromkeys(map(caller_name, search.callers))),
            "position": waiting.index(search.id) if search.id in waiting else None,
            "phase": events.phase if search.state == "running" else None,
            "num_trials": events.num_trials,
            "best": events.best,
            "recommendation": self._recommendation(search),
        }
        return msgspec.json.encode(fields)

    def events(self, search: Search) -> SearchEvents:
        """Return the newest events of a search: in memory while it runs, from its file when it is over."""
        running = self._events.get(search.id)
        if running is not None:
            return running
        repetition = search.repetition
        if search.state != "queued":
            repetition = max(self._repetitions(search.id), default=repetition)
        events = SearchEvents(self._events_path(search.id, repetition), repetition)
        if search.state != "queued":
            events.read()
        return events

    def _recommendation(self, search: Search) -> object:
        """Return as JSON the newest recommendation of a search, the best so far if it was ended, or None."""
        best = None
        if search.state == "ended":
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                best = decode(read_file(self._output(search.id)), dict[str, Any]).get("best")
        return best or self.measured_json(search)

    def measured_json(self, search: Search) -> msgspec.Raw | None:
        """Return the recommendation of a search when it was last done, or None if it never was."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if search.measured is not None:
                return msgspec.Raw(msgspec.json.format(read_file(self._result(search.id)), indent=-1))
        return None

    def newest_measured(self, name: str, precisions: Collection[str] = PRECISIONS) -> Search:
        """Return the search that was done last of a target as it is set today, one of all `precisions` if there is any.

        Raises `UnknownError` without one.
        """
        target = self.settings.targets.get(name)
        digest = None if target is None else target_digest(target)
        measured = [
            search
            for search in list(self.queue.searches.values())
            if search.target_digest == digest and search.measured is not None
        ]
        if not measured:
            raise UnknownError(
                "No search of this target is finished.",
                f"POST /searches begins one; the targets are {', '.join(self.settings.targets)}.",
            )

        def rank(search: Search) -> tuple[bool, float]:
            tried = SearchOptions.from_user(precision=search.options.get("precision")).precisions or PRECISIONS
            return set(precisions) <= set(tried), search.measured or 0.0

        return max(measured, key=rank)

    def want_hardware(self) -> None:
        """Have the devices probed whose memory and support are not known, once no search runs."""
        self._is_hardware_wanted = True
        self._wake.set()

    # --- the thread itself --------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all searches with their best saved, and the thread. The next service goes on with them."""
        self.is_stopping = True
        self._wake.set()
        self.join()

    def run(self) -> None:
        """Start, follow and finish searches until `stop`."""
        for search in list(self.queue.searches.values()):
            if search.state == "running":  # when the service was killed or stopped
                self.queue.change(search.id, state="queued")
        while not self.is_stopping:
            self._start_searches()
            self._follow()
            for id_ in self.queue.save_later_changes():
                self._forget(id_)
            self._wake.wait(_TICK_SECONDS)
            self._wake.clear()
        while self._running or self._probing:
            for process in self._processes():
                process.interrupt()
            self._follow()
            time.sleep(_TICK_SECONDS / 5)

    def _forget(self, id_: str) -> None:
        """Remove the files of a forgotten search and what is kept of it in memory. Its study stays."""
        for state in (self._interrupt_at, self._not_before):
            state.pop(id_, None)
        with contextlib.suppress(OSError):
            for path in self._files.glob(f"{id_}.*"):
                path.unlink()

    def _processes(self) -> Iterator[_Process]:
        yield from self._running.values()
        if self._probing is not None:
            yield self._probing[1]

    def _output(self, id_: str) -> Path:
        """Return the file with what the process of a search has printed."""
        return self._files / f"{id_}.out"

    def _events_path(self, id_: str, repetition: int) -> Path:
        """Return the file for the events of one repetition of a search."""
        return self._files / f"{id_}.{repetition}.events.jsonl"

    def _repetitions(self, id_: str) -> list[int]:
        """Return the repetitions of a search that have a file of events."""
        return [int(path.name.split(".")[1]) for path in self._files.glob(f"{id_}.*.events.jsonl")]

    def _result(self, id_: str) -> Path:
        """Return the file with the recommendation of a search that was done."""
        return self._files / f"{id_}.json"

    def _start_searches(self) -> None:
        """Start the probe of a device that was asked for, and the searches whose devices are free, in order."""
        if self._probing is not None:
            return
        taken = [self._needs(self.queue.searches[id_].target) for id_ in self._running]
        # One that failed is probed again only while no search waits, so that those who ask for it hold none up.
        if self._is_hardware_wanted and not taken and (self.hardware is None or not self.queue.waiting()):
            devices = frozenset[str]().union(*self._devices.values())
            for device in sorted(devices - self._probed.keys())[:1]:
                self._start_probe(device)
                return
            self.hardware = dict(self._probed)
            self._probed = {device: found for device, found in self._probed.items() if "next_step" not in found}
            self._is_hardware_wanted = False
        for search in self.queue.waiting():
            target = self.settings.targets.get(search.target)
            try:
                if target is None:
                    raise InvalidRequestError(f"There is no target {search.target} any more.", "Name another.")
                if target_digest(target) != search.target_digest:
                    raise InvalidRequestError(f"The settings of target {search.target} have changed.", "Ask again.")
                options = checked_options(target, search.options)
                needs = self._needs(search.target)
                if any(_overlap(needs, others) for others in taken):
                    taken.append(needs)  # no later one may overtake it
                elif time.monotonic() >= self._not_before.get(search.id, 0.0):
                    taken.append(needs)
                    self._start_search(search, target, options)
            except (AutotuneAmpError, OSError) as error:
                if _is_shortage(error):
                    self._not_before[search.id] = time.monotonic() + _BUSY_SECONDS
                else:
                    self.queue.change(search.id, state="failed", ended=time.time(), error=_start_error_fields(error))

    def _needs(self, name: str) -> frozenset[str]:
        """Return the devices of a target, and the folder in which its command writes."""
        target = self.settings.targets[name]
        return self._devices[name] | (frozenset() if target.command is None else {target.folder})

    def _start_probe(self, device: str) -> None:
        """Start the probe of a device, whose document is the error if that cannot be done."""
        output = self._files.parent / "hardware.json"
        self._interrupt_probe_at = time.monotonic() + _PROBE_SECONDS
        try:
            self._probing = device, _Process(["probe", "--json", "--device", device], self.settings.folder, output)
        except (AutotuneAmpError, OSError) as error:
            if not _is_shortage(error):
                self._probed[device] = _start_error_fields(error)

    def _start_search(self, search: Search, target: Target, options: SearchOptions) -> None:
        visible_gpus = _visible_gpus(target)
        repetition = search.repetition + (search.started is None or search.ended is not None)
        events = SearchEvents(self._events_path(search.id, repetition), repetition)
        events.read()  # of the search that goes on
        events.phase = None
        study = study_name(search.target, target, options)
        own = ["--json", "--events", str(events.path), "--out", self.studies, "--study", study]
        fresh = ["--fresh"] if search.is_fresh else []
        arguments = ["search", *options.arguments(), *fresh, *own, *target.arguments()]
        self._running[search.id] = _Process(arguments, target.folder, self._output(search.id), visible_gpus)
        self._events[search.id] = events
        self._interrupt_at[search.id] = time.monotonic() + options.budget_seconds + _LATE_SECONDS
        self.queue.change(
            search.id, state="running", repetition=repetition, started=time.time(), ended=None, error=None
        )

    def _follow(self) -> None:
        """Read new events, interrupt what hangs or nobody waits for, and save how ended ones ended."""
        for id_, process in list(self._running.items()):
            num_before = self._events[id_].num_trials
            code = process.exit_code()
            self._events[id_].read()
            self.num_trials += self._events[id_].num_trials - num_before
            search = self.queue.searches[id_]
            if search.is_fresh and self._events[id_].num_trials:  # from here on it is resumed, not begun again
                search = self.queue.change(id_, is_fresh=False)
            if code is not None:
                del self._running[id_]
                process.close()
                self._finish(self.queue.searches[id_], code, process)  # somebody may have joined meanwhile
                self._events.pop(id_, None)
            elif not search.callers or time.monotonic() > self._interrupt_at[id_]:
                process.interrupt()
        if self._probing is not None:
            device, process = self._probing
            code = process.exit_code()
            if code is not None:
                process.close()
                self._probing = None
                document = process.document()
                self._probed[device] = document.get("hardware") or document.get("error") or _failed_probe(device)
                self._wake.set()
            elif time.monotonic() > self._interrupt_probe_at:
                process.interrupt()

    def _finish(self, search: Search, code: int, process: _Process) -> None:
        """Save how a search ended, from its exit code and what it printed."""
        document = process.document()
        error = document.get("error") or {}
        if code == 0 and "config" in document:
            before = self.measured_json(search)
            is_cached = before is not None and msgspec.json.decode(before) == document
            self._output(search.id).replace(self._result(search.id))
            measured = search.measured if is_cached else time.time()
            self._end(search, "done", measured=measured)
        elif process.is_interrupted and not search.callers:
            self._end(search, "ended")
        elif process.is_interrupted and time.monotonic() > self._interrupt_at[search.id]:
            late = RunnerError(
                f"The search still ran {_LATE_SECONDS:g} s after its budget.",
                f"Ask again to go on with it; its output is {search.id}.log in the service's folder.",
            )
            self._end(search, "failed", error=error_fields(late))
        elif process.is_interrupted:  # by the end of the service, or somebody joined meanwhile: it goes on later
            self.queue.change(search.id, state="queued")
        elif error.get("kind") == "study_busy":
            self._not_before[search.id] = time.monotonic() + _BUSY_SECONDS
            self.queue.change(search.id, state="queued")
        else:
            error = error or {
                "kind": "crash",
                "message": f"The search ended with status {code}.",
                "next_step": f"Ask again to go on with it; its output is {search.id}.log in the service's folder.",
            }
            words = {name: in_python(str(error[name])) for name in ("kind", "message", "next_step")}
            self._end(search, "failed", error=words)

    def _end(self, search: Search, state: State, **changes: Any) -> None:
        """Save that a search is over, and keep the events of one repetition: of the newest that made a trial."""
        has_trial = self._events.pop(search.id).num_trials > 0
        for repetition in sorted(self._repetitions(search.id), reverse=has_trial)[1:]:
            self._events_path(search.id, repetition).unlink()
        self.queue.change(search.id, state=state, ended=time.time(), **changes)


class OptionError(InvalidRequestError):
    """Raised for a wrong option of a request; `field` is its name there."""

    def __init__(self, field: str, message: str, next_step: str) -> None:
        super().__init__(message, next_step)
        self.field = field

    @property
    def kind(self) -> str:
        """Return the name of the public class of this error."""
        return "invalid_request"


def checked_options(target: Target, asked: Mapping[str, Any]) -> SearchOptions:
    """Return the options of a search, those of the target where the request has none.

    Raises `OptionError` for a wrong one, and for one above the target's limits.
    """
    limits = target.limits
    defaults = {"budget": min(target.budget, SearchOptions().budget_seconds), "memory_limit": target.memory_limit}
    given = {name: value for name, value in asked.items() if value is not None}
    named = defaults | {"try_" if name == "try" else name: value for name, value in given.items()}
    for name, value in named.items():
        checked_option(name.rstrip("_"), name, value)
    try:
        devices = None if target.command is not None else target.devices  # a command has them from `_visible_gpus`
        options = SearchOptions.from_user(**named, device=target.device, devices=devices)
    except InvalidRequestError as error:  # two that do not go together
        raise OptionError("options", in_python(error.message), "Leave one of them out.") from error
    if options.budget_seconds > limits.budget_seconds:
        largest = f"{limits.budget_seconds:g}"
        raise OptionError("budget", f"budget is {options.budget_seconds:g} s.", f"Ask for {largest} s at most.")
    if limits.memory_limit is not None and (options.memory_limit or 0) > limits.memory_limit:
        message = f"memory_limit is {options.memory_limit} bytes."
        raise OptionError("memory_limit", message, f"Ask for {target.memory_limit} at most.")
    return options


def checked_option(field: str, name: str, value: Any) -> None:
    """Raise `OptionError` if the option `name`, called `field` in the request, has a wrong value."""
    try:
        SearchOptions.from_user(**{name: value})
    except InvalidRequestError as error:
        next_step = "Leave it out for the default; the page /docs lists the options."
        message = field + in_python(error.message).removeprefix(name)
        raise OptionError(field, message, next_step) from error


def error_fields(error: AutotuneAmpError) -> dict[str, str]:
    """Return the fields of an error in a document."""
    return {"kind": error.kind, "message": error.message, "next_step": error.next_step}


def _is_shortage(error: AutotuneAmpError | OSError) -> bool:
    """Whether an error, or its cause, is that there are too many open files for the moment."""
    return any(isinstance(e, OSError) and e.errno in (errno.EMFILE, errno.ENFILE) for e in (error, error.__cause__))


def _start_error_fields(error: AutotuneAmpError | OSError) -> dict[str, str]:
    """Return the fields of the error for a process that could not be started."""
    if isinstance(error, OSError):
        error = StudyError(f"The service's folder: {cause(error)}.", "Free some space there.")
    return error_fields(error)


def _failed_probe(device: str) -> dict[str, str]:
    """Return the fields of the error for a probe that crashed or hung."""
    return error_fields(
        RunnerError(
            f"The probe of {device} failed.", f"Run `autotune-amp probe --device {device}` on the service's host."
        )
    )


def _devices_of(limits: SearchOptions) -> frozenset[str]:
    """Return the devices that a search with these options uses."""
    if limits.devices is not None:
        numbers = range(len(nvml.visible_uuids())) if limits.devices == "all" else limits.devices
        return frozenset(f"cuda:{number}" for number in numbers)
    kind = identify("auto").type if limits.device == "auto" else limits.device
    return frozenset({kind if ":" in kind or kind in ("cpu", "mps") else f"{kind}:0"})


def _visible_gpus(target: Target) -> dict[str, str]:
    """Return the environment variable that limits a command to the GPUs in the `devices` of its target.

    With "all" nothing limits it. Raises `InvalidRequestError` if there is no such GPU, or if those given by index are
    of several models.
    """
    devices = target.limits.devices
    if target.command is None or devices is None:
        return {}
    if devices == "all":
        visible_gpus("devices")
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(slot.uuid or "" for slot in find_gpus(devices).slots)}


def _overlap(needs: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two searches would disturb each other: one on the CPU disturbs all."""
    return "cpu" in needs | others or bool(needs & others)

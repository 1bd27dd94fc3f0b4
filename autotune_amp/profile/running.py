"""profile_amp() behind its arguments: the precisions in turns, in children, then taken apart; and what came of it."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core.config import LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion, NothingWorksError
from autotune_amp.core.setting import Setting
from autotune_amp.hardware import identify, machine_load
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.local import LocalBackend
from autotune_amp.precision.modes import MODES
from autotune_amp.profile.job import LOW, Profile, Profiled
from autotune_amp.profile.results import AmpProfile
from autotune_amp.profile.rows import Found, answer, is_cut, limits, rows
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import Budget, ProgressWatcher, RunsJobs
from autotune_amp.search.source import Opened, Source, message_of, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, Space, build_space
from autotune_amp.trial.jobs import Trial


class Request(NamedTuple):
    """A profile that was asked for; None leaves precisions and batch size to what the device and the workload have."""

    num_batches: int
    precisions: tuple[Precision, ...] | None
    batch_size: int | None
    device: str
    trace: Path | None


def checked_request(
    num_batches: int,
    device: str,
    precision: Sequence[str] | str | None,
    batch_size: int | None,
    trace: str | os.PathLike[str] | None,
) -> Request:
    """The arguments of `profile_amp`; raises `InvalidRequestError` for one that cannot be meant, and for a trace that
    cannot be written."""
    numbers = {"--batches": num_batches} | ({} if batch_size is None else {"--batch-size": batch_size})
    for name, given in numbers.items():
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise InvalidRequestError(
                f"{name} is {given!r}; it must be a whole number from 1 up.", f"Give {name} 32, for example."
            )
    options = SearchOptions.from_user(device=device, precision=precision)
    return Request(num_batches, options.precisions, batch_size, device, None if trace is None else _writable(trace))


def _writable(trace: str | os.PathLike[str]) -> Path:
    """The absolute path of a trace that can be written; what the file holds so far stays."""
    path = Path(trace).absolute()
    next_step = "Give for example --trace trace.json."
    if path.is_dir() or not path.parent.is_dir() or path.suffix == ".gz":
        raise InvalidRequestError(
            f"--trace is {str(trace)!r}; it must be a file in a folder that is there, and is not compressed.", next_step
        )
    was_there = path.exists()
    try:
        path.open("ab").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise InvalidRequestError(
            f"--trace is {str(trace)!r}, which cannot be written: {error.strerror}.", next_step
        ) from error
    return path


DEADLINE_SECONDS = 600.0  # of one process
NUM_ROUNDS = 3
MAX_SETUP_SECONDS = 30.0  # that the rounds after the second may spend on building models and on first steps
# Kineto writes a line to standard error at every start and end; this is above all its levels.
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}


def run_profile(origin: Source, request: Request, progress: Progress) -> AmpProfile:
    """Profile in children; see `autotune_amp.profile_amp`."""
    clock = Budget(math.inf)
    meter = LoadMeter(identify(request.device).uuid)  # before a context of ours is on the card
    watcher = ProgressWatcher(progress, clock, meter)
    progress.work_started(None)
    with LocalBackend(origin.payload(), None, watcher, _ENVIRONMENT) as backend:
        watcher.phase("loading the workload")
        backend.load(clock.left())
        opened = open_workload(backend, origin, request.device, watcher)
        progress.found_hardware(opened.hardware)
        asked = _asked(request, opened.hardware)
        space = _space(request, opened, asked)
        refused = refused_in(space)
        trials = {p: _trial(p, space, opened) for p in asked if p not in refused}
        meter.start()
        timed = Rounds(backend, trials, request.num_batches, progress)
        outcomes = timed.run()
        load = machine_load.evidence([meter.stop()])
        if load is not None:  # the rows' intervals are the processes' own
            load = msgspec.structs.replace(load, interval_factors=(1.0, 1.0))
        others = machine_load.doubts(load, "profile again")
        notes = [*_notes(request, opened.description), *timed.notes, *others]
        if not any(isinstance(outcome, Measurement) for of_one in outcomes.values() for outcome in of_one):
            raise _nothing_works(asked, refused, outcomes)
        with TemporaryDirectory(prefix="autotune_amp-") as folder:
            watcher.phase("taking steps apart")
            profiled = {}
            for precision in timed.running():
                trace = Path(folder, f"{precision}.json")
                found = backend.submit(_profile(trials[precision], trace)).result()
                if isinstance(found, Profiled):
                    profiled[precision] = found
                else:
                    notes.append(f"{precision} could not be taken apart: {found.message}.")
            parts = [Path(folder, f"{p}.json") for p, found in profiled.items() if found.split is not None]
            problem = None if request.trace is None else write_trace(parts, request.trace)
    everything = Found(opened.hardware, refused, outcomes, profiled)
    return answer(
        rows(asked, everything),
        everything,
        workload=origin.name,
        setting=space.baseline,
        num_batches=request.num_batches,
        trace=None if request.trace is None or problem is not None else str(request.trace),
        notes=notes if problem is None else [*notes, problem],
    )


class Rounds:
    """The precisions in turns, each time in a process of its own, each round on batches of its own.

    The batches asked for are divided among three rounds; among two where building the models and the first steps take
    long. A precision that fails or is cut is in no later round.
    """

    def __init__(
        self, backend: RunsJobs, trials: Mapping[Precision, Trial], num_batches: int, progress: Progress
    ) -> None:
        self.notes: list[str] = []
        self._backend, self._trials, self._progress = backend, trials, progress
        self._num_batches = num_batches
        self._outcomes: dict[Precision, list[Outcome]] = {precision: [] for precision in trials}
        self._num_trials = 0

    def run(self) -> Mapping[Precision, Sequence[Outcome]]:
        """What each precision did in each round. Raises `WorkloadError` where the workload does not run in fp32."""
        self._progress.phase(f"timing {', '.join(self._trials)} in turns on the same batches")
        num_rounds, num_left = min(NUM_ROUNDS, self._num_batches), self._num_batches
        number = 0
        while number < num_rounds:
            size = -(-num_left // (num_rounds - number))
            num_left -= size
            names = self.running()
            first = number % max(1, len(names))
            for precision in (*names[first:], *names[:first]):  # another one is first each time
                self._run(precision, number, size)
            number += 1
            if number == 1 and self._setup_seconds() > MAX_SETUP_SECONDS:
                num_rounds = min(2, num_rounds)
                self.notes.append("Building and first steps take long: two processes were timed in place of three.")
        return self._outcomes

    def running(self) -> list[Precision]:
        """Those that neither failed nor are cut."""
        fp32 = self._outcomes.get("fp32")
        return [
            precision
            for precision, outcomes in self._outcomes.items()
            if not outcomes or (isinstance(outcomes[-1], Measurement) and not (fp32 and is_cut(outcomes[-1], fp32[0])))
        ]

    def _run(self, precision: Precision, number: int, size: int) -> None:
        trial, fp32 = self._trials[precision], self._outcomes.get("fp32")
        trial = msgspec.structs.replace(trial, seed=trial.seed + number, num_steps=(size, size))
        if precision != "fp32" and fp32 and isinstance(fp32[0], Measurement):
            trial = msgspec.structs.replace(trial, **limits(fp32[0]))
        self._num_trials += 1
        self._progress.trial_started(self._num_trials, trial.candidate, trial.purpose)
        started = time.monotonic()
        outcome = self._backend.submit(trial).result()
        record = Record(
            search_id="profile",
            number=self._num_trials,
            candidate=trial.candidate,
            purpose=trial.purpose,
            outcome=outcome,
            seconds=time.monotonic() - started,
        )
        self._progress.trial_ended(record, None)
        if isinstance(outcome, Failure) and outcome.kind == "workload_error" and precision == "fp32":
            raise WorkloadError(*message_of(outcome))
        self._outcomes[precision].append(outcome)

    def _setup_seconds(self) -> float:
        measured = [outcomes[0] for outcomes in self._outcomes.values()]
        return sum(m.build_seconds + m.first_step_seconds for m in measured if isinstance(m, Measurement))


def _asked(request: Request, hardware: Hardware) -> tuple[Precision, ...]:
    """fp32 first. TF32 is no mixed precision, so that it is shown where the device has it or somebody asks."""
    usual: tuple[Precision, ...] = ("tf32", *LOW) if hardware.has_tf32 else LOW
    return tuple(dict.fromkeys(("fp32", *(request.precisions or usual))))


def _space(request: Request, opened: Opened, asked: tuple[Precision, ...]) -> Space:
    """What is legal, at the user's own batch size and accumulation unless another batch size was given."""
    size = request.batch_size
    if size is None and opened.description.batch_size is None:
        size = ASSUMED_BATCH_SIZE
    own: dict[str, Any] = {} if size is None else {"baseline": ("fp32", size), "effective_batch_size": "free"}
    return build_space(opened.hardware, opened.description, SearchOptions.from_user(precision=asked, **own))


def refused_in(space: Space) -> dict[Precision, str]:
    """The precisions that cannot be run at the batch size of the profile, with the reason; larger ones are not asked
    for."""
    return {e.precision: e.reason for e in space.excluded if (e.batch_size or 0) <= space.baseline.batch_size}


def _trial(precision: Precision, space: Space, opened: Opened) -> Trial:
    return Trial(
        candidate=Setting(
            precision=precision,
            batch_size=space.baseline.batch_size,
            accumulation_steps=space.baseline.accumulation_steps,
        ),
        device=opened.hardware.device,
        loss_scale=LossScale() if MODES[precision].takes_scaler else None,
        deadline_seconds=DEADLINE_SECONDS,
        memory_limit_bytes=int(SearchOptions().memory_fraction * opened.hardware.memory.available),
        torch_state=opened.torch_state,
    )


def _profile(trial: Trial, trace: Path) -> Profile:
    return Profile(device=trial.device, trial=trial, trace_file=str(trace), deadline_seconds=DEADLINE_SECONDS)


def _notes(request: Request, description: Description) -> list[str]:
    """What was assumed of the workload."""
    notes = []
    if description.batch_size is None and request.batch_size is None:
        notes.append(
            f"The data has no batch size of its own: {ASSUMED_BATCH_SIZE} is assumed. --batch-size says yours."
        )
    if (kept := description.weights) in LOW:
        notes.append(f"The weights are kept in {kept}: fp32 runs the model as it is, without autocast.")
    elif not description.is_as_found_strict:
        notes.append("fp32 is strict here: the TF32 and reduced-precision flags that were found on are off in it.")
    return notes


def _nothing_works(
    asked: Sequence[Precision], refused: Mapping[Precision, str], outcomes: Mapping[Precision, Sequence[Outcome]]
) -> NothingWorksError:
    failures = {p: of_one[0] for p, of_one in outcomes.items() if of_one}
    reasons = {**refused, **{p: f"{o.kind}: {o.message}" for p, o in failures.items() if isinstance(o, Failure)}}
    return NothingWorksError(
        "No precision could be measured.",
        "Mend what the reasons name, or give a smaller --batch-size.",
        tuple(Exclusion(precision=p, batch_size=None, reason=reasons[p]) for p in asked if p in reasons),
    )


def write_trace(parts: Sequence[Path], trace: Path) -> str | None:
    """Put `parts` into one trace, whose processes tell them apart; returns why there is none, None where there is."""
    if not parts:
        return "No trace was written: no precision was taken apart."
    try:
        traces = [json.loads(part.read_text()) for part in parts]
        events = [event for one in traces for event in one["traceEvents"]]
        trace.write_text(json.dumps({**traces[0], "traceEvents": events}))
    except (OSError, json.JSONDecodeError) as error:
        return f"No whole trace was written to {trace}: {error}."
    return None

"""profile_amp() behind its arguments: each precision alone, then side by side, in children; then what came of it."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome, Record
from autotune_amp.core.recommendation import Exclusion, NothingWorksError
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.hardware import identify, machine_load
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.backend import Backend
from autotune_amp.isolation.local import LocalBackend
from autotune_amp.profile.job import LOW, NUM_ROUNDS, Profile, Profiled, num_rounds, timed
from autotune_amp.profile.results import AmpProfile
from autotune_amp.profile.rows import (
    Found,
    answer,
    cut_step_seconds,
    first_step_deadline_seconds,
    is_cut,
    rows,
    step_deadline_seconds,
)
from autotune_amp.search.budget import Budget
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import Opened, Source, message_of, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, Space, build_space
from autotune_amp.trial.jobs import STEPS_PER_SYNC, Trial

_EXAMPLES = {"batches": 10, "batch-size": 32}


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
    for name, given in (("batches", num_batches), ("batch-size", batch_size)):
        is_missing = given is None and name == "batch-size"
        if not is_missing and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise InvalidRequestError(
                f"--{name} is {given!r}; it must be a whole number from 1 up.", f"Give --{name} {_EXAMPLES[name]}."
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


DEADLINE_SECONDS = 600.0  # of fp32 alone, which says how long the others may take
NUM_STEPS_ALONE, SECONDS_ALONE = (4, 8), 5.0
SECONDS_BETWEEN_NOTES = 3.0
_SLACK = 5.0  # how many times the time foreseen the side-by-side run may take
# Kineto writes a line to standard error at every start and end; this is above all its levels.
_ENVIRONMENT = {"KINETO_LOG_LEVEL": "99"}


class _Watcher(ProgressWatcher):
    """Says now and then how many steps the precisions have taken in turns, where it is to `expect` some."""

    def __init__(self, progress: Progress, clock: Budget, meter: LoadMeter) -> None:
        super().__init__(progress, clock, meter)
        self._say, self._elapsed = progress.note, clock.elapsed
        self._num_batches: int | None = None
        self._said_at = 0.0

    def expect(self, num_batches: int | None) -> None:
        self._num_batches, self._said_at = num_batches, self._elapsed()

    def step(self, num_steps: int, step_seconds: float) -> None:
        super().step(num_steps, step_seconds)
        if self._num_batches is not None and self._elapsed() - self._said_at > SECONDS_BETWEEN_NOTES:
            self._said_at = self._elapsed()
            self._say(f"{num_steps} of {self._num_batches} batches")


def run_profile(origin: Source, request: Request, progress: Progress) -> AmpProfile:
    """Profile in children; see `autotune_amp.profile_amp`."""
    clock = Budget(math.inf)
    meter = LoadMeter(identify(request.device).uuid)  # before a context of ours is on the card
    watcher = _Watcher(progress, clock, meter)
    progress.work_started(None)
    with LocalBackend(origin.payload(), None, watcher, _ENVIRONMENT) as backend:
        watcher.phase("loading the workload")
        backend.load(clock.left())
        opened = open_workload(backend, origin, request.device, watcher)
        progress.found_hardware(opened.hardware)
        asked = _asked(request, opened.hardware)
        space = _space(request, opened, asked)
        refused = {exclusion.precision: exclusion.reason for exclusion in space.excluded}
        trials = {p: _trial(p, space, opened) for p in asked if p not in refused}
        alone = _alone(backend, trials, clock, progress)
        ran = [p for p, outcome in alone.items() if isinstance(outcome, Measurement) and not is_cut(p, alone)]
        if not ran:
            raise _nothing_works(asked, refused, alone)
        with TemporaryDirectory(prefix="autotune_amp-") as folder:
            spec = _profile_spec([trials[p] for p in ran], request, opened.hardware.device, Path(folder, "trace"))
            meter.start()
            profiled, notes = _profiled(backend, spec, alone, watcher, progress)
            others = machine_load.doubts(machine_load.evidence((), [meter.stop()]), "profile again")
            no_trace = None if request.trace is None else write_trace(sorted(Path(folder).iterdir()), request.trace)
    found = Found(refused, alone, profiled, _rates(opened.hardware, profiled), opened.hardware.identity.type)
    return answer(
        rows(asked, found),
        profiled,
        workload=origin.name,
        hardware=opened.hardware,
        batch_size=space.baseline.batch_size,
        accumulation_steps=space.baseline.accumulation_steps,
        num_batches=request.num_batches,
        trace=None if request.trace is None or no_trace is not None else str(request.trace),
        notes=(*_notes(request, opened.description), *notes, *others, *([] if no_trace is None else [no_trace])),
    )


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


def _trial(precision: Precision, space: Space, opened: Opened) -> Trial:
    return Trial(
        candidate=Setting(
            precision=precision,
            batch_size=space.baseline.batch_size,
            accumulation_steps=space.baseline.accumulation_steps,
        ),
        device=opened.hardware.device,
        loss_scale=LossScale() if precision == "fp16" else None,
        num_steps=NUM_STEPS_ALONE,
        measure_seconds=SECONDS_ALONE,
        deadline_seconds=DEADLINE_SECONDS,
        memory_limit_bytes=int(SearchOptions().memory_fraction * opened.hardware.memory.available),
        torch_state=opened.torch_state,
    )


def _alone(
    backend: Backend, trials: Mapping[Precision, Trial], clock: Budget, progress: Progress
) -> dict[Precision, Measurement | Failure]:
    """Each in a process of its own: its memory, whether it runs at all, and whether it is worth running longer."""
    progress.phase("measuring each precision alone")
    found: dict[Precision, Measurement | Failure] = {}
    for number, (precision, trial) in enumerate(trials.items(), start=1):
        progress.trial_started(number, trial.candidate, trial.purpose)
        started = clock.elapsed()
        outcome = backend.submit(_limited(trial, found.get("fp32"))).result()
        progress.trial_ended(
            Record(
                search_id="profile",
                number=number,
                candidate=trial.candidate,
                purpose=trial.purpose,
                outcome=outcome,
                seconds=clock.elapsed() - started,
            ),
            None,
        )
        if isinstance(outcome, Failure) and outcome.kind == "workload_error" and precision == "fp32":
            raise WorkloadError(*message_of(outcome))
        found[precision] = outcome
    return found


def _limited(trial: Trial, fp32: Outcome | None) -> Trial:
    """With what its steps may take, going by those of fp32 where that ran."""
    if not isinstance(fp32, Measurement) or trial.candidate.precision == "fp32":
        return trial
    return msgspec.structs.replace(
        trial,
        cut_step_seconds=cut_step_seconds(fp32),
        first_step_deadline_seconds=first_step_deadline_seconds(fp32),
        step_deadline_seconds=step_deadline_seconds(fp32),
    )


def _profile_spec(trials: Sequence[Trial], request: Request, device: str, trace_file: Path) -> Profile:
    return Profile(
        device=device,
        trials=tuple(trials),
        num_batches=request.num_batches,
        num_batches_per_block=1 if device == "cpu" else STEPS_PER_SYNC,
        trace_file=None if request.trace is None else str(trace_file),
    )


def _profiled(
    backend: Backend,
    spec: Profile,
    alone: Mapping[Precision, Measurement | Failure],
    watcher: _Watcher,
    progress: Progress,
) -> tuple[Profiled, tuple[str, ...]]:
    """The rounds, and what there is to say of them."""
    names = [trial.candidate.precision for trial in spec.trials]
    known = [outcome for name in names if isinstance(outcome := alone[name], Measurement)]
    num = num_rounds(known, spec.num_batches)
    joined = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} in turns"
    progress.phase(f"running {joined} on the same {spec.num_batches} batches, in {_processes(num)}")

    def run(trial: Trial) -> Outcome:
        return backend.submit(_limited(trial, alone.get("fp32"))).result()

    profiled, notes = timed(partial(_ask, backend, watcher, known), run, spec, num, progress.note)
    if num < min(NUM_ROUNDS, spec.num_batches):
        few = "Building and first steps take long: one process was timed, and the intervals rest on how far processes"
        notes = (*notes, f"{few} usually differ.")
    return profiled, notes


def _processes(num: int) -> str:
    return "one process" if num == 1 else f"{num} processes"


def _ask(backend: Backend, watcher: _Watcher, alone: Sequence[Measurement], spec: Profile) -> Profiled | Failure:
    """The child's answer; it may take several times what the runs alone foretell, which are all waited for."""
    watcher.expect(spec.num_batches)
    foreseen = sum(m.build_seconds + m.first_step_seconds + (spec.num_batches + 10) * m.step_seconds for m in alone)
    answer = backend.submit(msgspec.structs.replace(spec, deadline_seconds=60.0 + _SLACK * foreseen)).result()
    watcher.expect(None)
    return answer


def _rates(hardware: Hardware, profiled: Profiled) -> dict[Precision, float]:
    """The highest seen: what else runs on the machine only lowers it."""
    probed = {p: c.matmul_flops_per_second or 0.0 for p, c in hardware.precisions.items()}
    return {precision: max(rate, profiled.rates.get(precision, 0.0)) for precision, rate in probed.items()}


def _notes(request: Request, description: Description) -> list[str]:
    """What was assumed of the workload."""
    notes = []
    if description.batch_size is None and request.batch_size is None:
        notes.append(
            f"The data has no batch size of its own: {ASSUMED_BATCH_SIZE} is assumed. --batch-size says yours."
        )
    if (kept := description.weights) in ("bf16", "fp16"):
        notes.append(f"The weights are kept in {kept}: fp32 runs the model as it is, without autocast.")
    elif not description.is_as_found_strict:
        notes.append("fp32 is strict here: the TF32 and reduced-precision flags that were found on are off in it.")
    return notes


def _nothing_works(
    asked: Sequence[Precision], refused: Mapping[Precision, str], alone: Mapping[Precision, Measurement | Failure]
) -> NothingWorksError:
    reasons = {**refused, **{p: f"{o.kind}: {o.message}" for p, o in alone.items() if isinstance(o, Failure)}}
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
        if len(parts) == 1:
            shutil.copyfile(parts[0], trace)
        else:
            trace.write_text(json.dumps(_joined(parts)))
    except (OSError, json.JSONDecodeError) as error:
        return f"No whole trace was written to {trace}: {error}."
    return None


def _joined(parts: Sequence[Path]) -> dict[str, Any]:
    traces = [json.loads(part.read_text()) for part in parts]
    events = [event for trace in traces for event in trace["traceEvents"]]
    return {**traces[0], "traceEvents": events}

"""Optuna study of a search. Optuna is imported here and in `database` alone.

The throughput model (`stages.throughput_model`) decides what to try. A trial's parameters are the dimensions of the
space (numbers on a log scale: the range of an int may change later, a category may not), for trials on the winner also
the further dimensions and, under fp16, `init_scale` and `growth_interval`. TPE suggests those two, and each pair is
replayed on one measurement. A trial that somebody enqueued is snapped to the nearest legal setting. User attributes
hold the rest for optuna-dashboard; they are few, since each is a commit.

The ledger has all of it: a search continues without a storage that is away, and sends everything once it is back.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import TrialState

from autotune_amp.core.errors import StudyError
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import DIMENSIONS, FP8_RECIPE, VARIANTS
from autotune_amp.dimensions.dimension import Dimension
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.precision.modes import MODES
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.loss_scales import DEFAULT_PAIR, LOG2_INIT_SCALES, Pair, nearest_power_of_two, scales_of
from autotune_amp.search.storage.database import (
    STORAGE_ERRORS,
    load_study,
    open_storage,
    optuna_log_silenced,
    storage_errors,
    study_error,
)

SPACE_DIMENSIONS = tuple(dimension for dimension in DIMENSIONS if dimension.found_by == "curves")
GROWTH_INTERVALS = (10, 20_000)

# A sampler learns from a violated constraint and ignores a trial told as FAIL (studies/README.md).
_RUNS = "runs"

AWAY_SECONDS = 10.0  # between two tries to reach a storage that is away


class StudyTrial(NamedTuple):
    """Trial to run with `setting`, to be passed to `Study.tell`; under fp16 with `pair`, an init_scale and
    growth_interval.

    `trial` is None if the storage is away.
    """

    setting: Setting
    trial: optuna.Trial | None
    pair: Pair | None


class Study:
    """Study of one search in an Optuna storage, used inside ``with Study.open(...)`` from one thread.

    If the storage fails later, `note` is called and the search continues without it; `catch_up` tries it again every
    `AWAY_SECONDS`.
    """

    def __init__(
        self,
        storage: str | Path,
        load: Callable[[], optuna.Study],
        ledger: Ledger,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        space = ledger.space
        self._storage = storage
        self._load = load
        self._note = note
        self._away_since: float | None = None  # the time of its failure or of the last attempt to reach it
        self._ledger = ledger
        self._open_trials: list[StudyTrial] = []  # asked and not told yet
        self._legal = (*space.candidates, space.baseline)
        tried = (*self._legal, *(FP8_RECIPE.on(space.baseline, v) for v in space.variants.get(FP8_RECIPE.name, ())))
        self._distributions = {dimension.name: _distribution(dimension, tried) for dimension in SPACE_DIMENSIONS}
        # Parameters of only those trials that have a non-default value of a further dimension.
        self._variant_distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(tuple(dict.fromkeys((variant.default, *values))))
            for name, variant in VARIANTS.items()
            if (values := space.variants.get(name, ()))
        }
        self._load_again()

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        storage: str | Path,
        name: str,
        ledger: Ledger,
        *,
        owner: str = "",
        seed: int = 0,
        note: Callable[[str], None] = lambda _: None,
    ) -> Iterator[Study]:
        """Create the study of a search, or resume it. `storage` is an Optuna storage URL, or the path of the search's
        own file.

        The study belongs to the ledger's `search_id` and to `owner`, the search's folder. It is called `name`, or
        `name-search_id` and so on if another search has that name, whose measurements must not steer this one. Trials
        that a killed search left running are marked as failed, and the ledger's trials that the study lacks are added.
        Raises `StudyError`, naming the storage without its password, if it cannot be used.
        """
        with optuna_log_silenced(), open_storage(storage) as database:

            def load() -> optuna.Study:
                study = load_study(database, name, ledger.search_id, owner)
                study.sampler = TPESampler(seed=seed + len(study.trials))  # a resumed search must draw other values
                return study

            with storage_errors(storage):
                opened = cls(storage, load, ledger, note)
            opened.catch_up(ledger)
            yield opened

    @property
    def name(self) -> str:
        """Return the study's name in the storage."""
        return self._study.study_name

    def ask(self, setting: Setting, pair: Pair | None = DEFAULT_PAIR) -> StudyTrial:
        """Return a trial of `setting`, under fp16 with `pair`; TPE suggests the pair if it is None.

        A trial that somebody enqueued through the dashboard comes first, snapped to the nearest legal setting, so run
        the setting that is returned. Raises `StudyError` if such a trial cannot be read, and `ValueError` for a setting
        outside the space, which would leave a running trial behind.
        """
        if not self._is_legal(setting):
            raise ValueError(f"{setting} is not in the space.")
        with self._surviving_failure():
            if self.is_reachable:
                self._open_trials.append(self._ask(setting, pair))
                return self._open_trials[-1]
        return StudyTrial(setting, None, pair)

    def _ask(self, setting: Setting, pair: Pair | None) -> StudyTrial:
        further = self._variant_distributions if setting.active_variants else {}
        parameters = _parameters(setting, pair) | {name: getattr(setting, name) for name in further}
        self._study.enqueue_trial(parameters, user_attrs=_initial_attributes(setting))
        try:
            trial = self._study.ask(self._distributions | further)
        except ValueError as error:
            what = f"A trial that somebody enqueued in study {self.name} cannot be run: {error}."
            raise StudyError(what, "The same command again goes on without that trial.") from error
        asked_for = {dimension.name: trial.params[dimension.name] for dimension in SPACE_DIMENSIONS}
        suggested = None
        if MODES[asked_for["precision"]].takes_scaler:
            low, high = (2.0**log2_scale for log2_scale in LOG2_INIT_SCALES)
            init_scale = trial.suggest_float("init_scale", low, high, log=True)
            suggested = nearest_power_of_two(init_scale), trial.suggest_int("growth_interval", *GROWTH_INTERVALS, log=True)
        if asked_for != _parameters(setting, None):
            setting = self._nearest(asked_for)
            _set_attributes(trial, _initial_attributes(setting))
        return StudyTrial(setting, trial, suggested)

    def tell(self, asked: StudyTrial, outcome: Outcome, *, number: int | None = None, slot: str | None = None) -> None:
        """Finish a trial with its applied samples per second, or with the reason that there are none.

        `number` is that of its record, which is written before; None if the outcome was known already. `slot` is the
        slot it ran on, if there are several. A failure becomes a pruned trial with a violated constraint, never a
        failed trial: samplers learn from a constraint.
        """
        self._open_trials = [other for other in self._open_trials if other is not asked]
        outcome, replay = self._ledger.outcome_with_pair(asked.setting, outcome, asked.pair)
        with self._surviving_failure():
            if asked.trial is None or not self.is_reachable:
                return
            where = {} if slot is None else {"slot": slot}
            is_own = isinstance(self._storage, Path)
            _set_attributes(asked.trial, _result_attributes(outcome, number, asked.pair, replay, is_own=is_own) | where)
            if isinstance(outcome, Measurement):
                share = 1.0 if replay is None else replay.applied_share
                self._study.tell(asked.trial, share * outcome.samples_per_second)
            else:
                asked.trial.set_constraint(_RUNS, 1.0)
                self._study.tell(asked.trial, state=TrialState.PRUNED)

    def catch_up(self, ledger: Ledger, *, is_over: bool = False) -> None:
        """Tell the study every trial of the ledger that it lacks, and the replays of the first pairs of each
        calibration.

        An fp16 trial that awaits calibration is told after it, or when the search `is_over`.
        """
        self._ledger = ledger
        if self._away_since is not None and (is_over or time.monotonic() > self._away_since + AWAY_SECONDS):
            with self._surviving_failure():
                self._load_again()
                self._away_since = None
                self._note("The study's storage is there again.")
        for record in ledger.records:
            setting, outcome = record.candidate, record.outcome
            is_due = record.purpose == "search" and record.number not in self._finished_numbers and self._is_legal(setting)
            if is_due and (is_over or not ledger.awaits_calibration(setting)):
                assert isinstance(outcome, (Measurement, Failure)), "a check is no trial"
                ours = (asked for asked in self._open_trials if asked.setting == setting)
                asked = next(ours, None) or self.ask(setting)
                self.tell(asked, outcome, number=record.number, slot=record.slot)
                self._finished_numbers.add(record.number)
            if record.purpose == "calibration" and setting not in self._calibrated:
                self._calibrated.add(setting)
                self.suggest_pairs(setting, 0, lambda: 0.0)  # the initial ones alone

    @property
    def is_reachable(self) -> bool:
        """Whether the storage could be reached when it was last used."""
        return self._away_since is None

    @contextlib.contextmanager
    def _surviving_failure(self) -> Iterator[None]:
        """Suppress a failure of the storage inside and mark the storage as away."""
        try:
            yield
        except STORAGE_ERRORS as error:
            if self.is_reachable:
                self._note(f"{study_error(self._storage, error).message} The search goes on, and tells it later.")
            self._away_since = time.monotonic()

    def _load_again(self) -> None:
        """Load the study as a resumed search does, from the trials that it has."""
        self._study = self._load()
        self._open_trials = []
        self._calibrated: set[Setting] = set()
        self._fail_interrupted_trials()
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        self._finished_numbers = {t.user_attrs["record"] for t in finished if "record" in t.user_attrs}  # numbers of its records

    def suggest_pairs(self, setting: Setting, num_pairs: int, left_seconds: Callable[[], float]) -> None:
        """Tell the study the initial pairs of a calibrated setting that it lacks, then let the sampler suggest more
        until it has `num_pairs` or no time is left. Without a safe scale do nothing.
        """
        scales, outcome = scales_of(self._ledger.scales, setting), self._ledger.outcomes.get(setting)
        if scales is None or scales.refusal is not None or outcome is None:
            return
        known = self.pairs(setting)
        for pair in known:  # a resumed search counts earlier pairs
            self._ledger.replay(setting, pair)
        seeds = [pair for pair in scales.seeds if pair not in known]
        for pair in seeds:
            self.tell(self.ask(setting, pair), outcome)
        for _ in range(num_pairs - len(known) - len(seeds)):
            if left_seconds() <= 0 or not self.is_reachable:
                return
            self.tell(self.ask(setting, None), outcome)

    def pairs(self, setting: Setting) -> list[Pair]:
        """Return the pairs of an fp16 setting that the study has results for, in order."""
        finished: Sequence[optuna.trial.FrozenTrial] = ()
        with self._surviving_failure():
            if self.is_reachable:
                finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        wanted = _initial_attributes(setting)
        answered = (t for t in finished if "applied_share" in t.user_attrs)
        ours = [t for t in answered if all(t.user_attrs.get(key) == wanted[key] for key in wanted)]
        return [(nearest_power_of_two(t.params["init_scale"]), t.params["growth_interval"]) for t in ours]

    def _nearest(self, parameters: dict[str, Any]) -> Setting:
        """Return the legal candidate nearest to `parameters`, preferring strict flags to the user's own."""

        def distance(name: str, value: Any) -> float:
            if isinstance(value, int):
                return abs(math.log(value / parameters[name]))
            return 0.0 if value == parameters[name] else math.inf

        return min(
            self._legal, key=lambda c: (sum(distance(name, getattr(c, name)) for name in parameters), c.as_found)
        )

    def _fail_interrupted_trials(self) -> None:
        """Mark trials left running by a killed search as failed; only `study.optimize` has heartbeats."""
        for left in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            if "candidate" in left.user_attrs:  # trials enqueued by somebody are still to be run
                self._study._storage.set_trial_state_values(left._trial_id, TrialState.RUNNING)  # to be told
        for left in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self._study, left._trial_id)
            trial.set_user_attr("failure", "interrupted")
            trial.set_user_attr("reason", "the search was killed, or cut off from here, while this trial was running")
            self._study.tell(left.number, state=TrialState.FAIL)

    def _is_legal(self, setting: Setting) -> bool:
        """Whether a setting is in the space, apart from pinned modules and further dimensions except workers."""
        return msgspec.structs.replace(setting.without_variants, pinned_modules=()) in self._legal


def _distribution(dimension: Dimension[Any], settings: Sequence[Setting]) -> BaseDistribution:
    """Return the distribution over the values that the settings have in a dimension."""
    values = sorted({getattr(setting, dimension.name) for setting in settings}, key=dimension.risk)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(min(values), max(values), log=True)
    return CategoricalDistribution(values)


def _set_attributes(owner: optuna.Trial | optuna.Study, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        owner.set_user_attr(key, value)


def _parameters(setting: Setting, pair: Pair | None) -> dict[str, Any]:
    """Return the parameters of a setting's trial; without `pair` those of the loss scale are left out."""
    found = {dimension.name: getattr(setting, dimension.name) for dimension in SPACE_DIMENSIONS}
    if MODES[setting.precision].takes_scaler and pair is not None:
        found["init_scale"], found["growth_interval"] = pair
    return found


def _initial_attributes(setting: Setting) -> dict[str, Any]:
    """Return the user attributes that are known when a trial begins."""
    # The name gives only the number of pinned modules, which two sets may share.
    pins = {"pinned_modules": list(setting.pinned_modules)} if setting.pinned_modules else {}
    return {"candidate": str(setting)} | pins


def _result_attributes(
    outcome: Outcome, number: int | None, pair: Pair | None, replay: Replay | None, *, is_own: bool
) -> dict[str, Any]:
    """Return the user attributes of a finished trial. `number` is that of its record.

    `is_own`: the storage is the search's own file.
    """
    explained: dict[str, Any] = {} if number is None else {"record": number}
    if isinstance(outcome, Failure):
        # The message may quote the user's code, which others who use a storage must not read.
        return explained | {"failure": outcome.kind} | ({"reason": outcome.message} if is_own else {})
    if number is not None or pair is None:  # measurements are stored with the trial that measured them
        explained |= {"step_seconds": outcome.step_seconds, "peak_memory_bytes": outcome.peak_memory_bytes}
    if outcome.was_cut:
        explained["was_cut"] = True
    if replay is not None and pair is not None:
        share, num_skips = replay.applied_share, replay.num_skips
        explained |= {"snapped_init_scale": pair[0], "applied_share": share, "num_skips": num_skips}
    elif pair is not None:
        explained["is_calibrated"] = False  # the value is an upper bound
    return explained

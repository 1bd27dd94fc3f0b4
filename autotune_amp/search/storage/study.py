"""Optuna study of a search. Only this module and `database` import Optuna.

The throughput model (`stages.throughput_model`) decides which setting to try. A trial's parameters are the dimensions
of the space, for trials on the leader also the further dimensions and, under fp16, `init_scale` and `growth_interval`.
Numbers are ints on a log scale, whose range may change later. The choices of a categorical may not, so they are all
values, whether this session can try them or not. TPE suggests the two of fp16, and each pair
is replayed on one measurement. A trial that a user enqueued is moved to the nearest setting of the space.
User attributes hold further values for optuna-dashboard; they are few, since each takes a commit.

The ledger holds all results: a search continues if the storage fails, and sends them once it can be reached again.
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
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import BATCH_SIZE, PRECISION
from autotune_amp.dimensions.argument import Argument
from autotune_amp.dimensions.dimension import Variant
from autotune_amp.numerics.scaler_replay import Replay
from autotune_amp.precision.modes import MODES
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.loss_scales import DEFAULT_PAIR, LOG2_INIT_SCALES, Pair, nearest_power_of_two, scales_of
from autotune_amp.search.ranking import throughput
from autotune_amp.search.storage.database import (
    STORAGE_ERRORS,
    load_study,
    open_storage,
    optuna_log_silenced,
    storage_errors,
    study_error,
)

_SPACE_DIMENSIONS = (PRECISION, BATCH_SIZE)
GROWTH_INTERVALS = (10, 20_000)

# Name of the constraint that failed settings violate. A sampler learns from it, but ignores a trial with the state FAIL
# (studies/README.md).
_RUNS = "runs"

AWAY_SECONDS = 10.0  # between two attempts to reach a storage that failed


class StudyTrial(NamedTuple):
    """Trial of `setting` returned by `Study.ask`, to be passed to `Study.tell`.

    `pair` is the init_scale and growth_interval under fp16. `trial` is None if the storage cannot be reached.
    """

    setting: Setting
    trial: optuna.Trial | None
    pair: Pair | None


class Study:
    """Study of one search in an Optuna storage, used inside ``with Study.open(...)`` from one thread.

    If the storage fails later, `note` is called with a message and the search continues; `catch_up` tries to reach it
    every `AWAY_SECONDS`.
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
        self._away_since: float | None = None  # monotonic time of the failure or of the last attempt to reach it
        self._ledger = ledger
        self._open_trials: list[StudyTrial] = []  # trials returned by `ask` and not finished by `tell`
        self._legal = (*space.candidates, space.baseline)
        sizes = [setting.batch_size for setting in self._legal]
        self._distributions: dict[str, BaseDistribution] = {
            PRECISION.name: CategoricalDistribution(PRECISIONS),
            BATCH_SIZE.name: IntDistribution(min(sizes), max(sizes), log=True),
        }
        # Only trials with a non-default value of a further dimension have these parameters.
        self._variant_distributions: dict[str, BaseDistribution] = {
            dimension.name: CategoricalDistribution(
                dimension.values if isinstance(dimension, Variant) else (dimension.default, *values)
            )
            for dimension in space.tried_on_leader
            if isinstance(dimension, Variant | Argument) and (values := space.variants.get(dimension.name, ()))
        }
        self._load_from_storage()

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
        """Create or resume the study of a search. `storage` is an Optuna storage URL or the path of the search's file.

        The study belongs to the ledger's `search_id` and to `owner`, the search's folder. It is called `name`, or
        `name-search_id` and so on if another search has that name, since its measurements must not affect this one.
        Trials that a killed search left running are marked as failed, and the ledger's trials that the study lacks are
        added. Raises `StudyError` if the storage cannot be used.
        """
        with optuna_log_silenced(), open_storage(storage) as database:

            def load() -> optuna.Study:
                study = load_study(database, name, ledger.search_id, owner)
                study.sampler = TPESampler(seed=seed + len(study.trials))  # a resumed search must suggest other values
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

        A trial that a user enqueued through the dashboard comes first, moved to the nearest setting of the space, so
        run the setting that is returned. Raises `StudyError` if such a trial cannot be read, and `ValueError` for a
        setting outside the space.
        """
        if not self._is_legal(setting):
            raise ValueError(f"{setting} is not in the space.")
        with self._surviving_failure():
            if self.is_reachable:
                self._open_trials.append(self._ask(setting, pair))
                return self._open_trials[-1]
        return StudyTrial(setting, None, pair)

    def _ask(self, setting: Setting, pair: Pair | None) -> StudyTrial:
        further = self._variant_distributions if setting.has_variants else {}
        parameters = _parameters(setting, pair) | {
            dimension.name: dimension.read(setting)
            for dimension in self._ledger.space.tried_on_leader
            if dimension.name in further
        }
        self._study.enqueue_trial(parameters, user_attrs=_initial_attributes(setting))
        try:
            trial = self._study.ask(self._distributions | further)
        except ValueError as error:
            message = f"A trial that was enqueued in study {self.name} cannot be run: {error}."
            raise StudyError(message, "Run the same command again to continue without that trial.") from error
        suggested_parameters = {dimension.name: trial.params[dimension.name] for dimension in _SPACE_DIMENSIONS}
        suggested_pair = None
        if MODES[suggested_parameters["precision"]].takes_scaler:
            low, high = (2.0**log2_scale for log2_scale in LOG2_INIT_SCALES)
            init_scale = trial.suggest_float("init_scale", low, high, log=True)
            suggested_pair = (
                nearest_power_of_two(init_scale),
                trial.suggest_int("growth_interval", *GROWTH_INTERVALS, log=True),
            )
        if suggested_parameters != _parameters(setting, None):
            setting = self._nearest(suggested_parameters)
            _set_attributes(trial, _initial_attributes(setting))
        return StudyTrial(setting, trial, suggested_pair)

    def tell(
        self, study_trial: StudyTrial, outcome: Outcome, *, number: int | None = None, slot: str | None = None
    ) -> None:
        """Finish a trial with its samples per second that reach the optimizer (with ``--objective tokens`` its tokens),
        or with the reason of its failure.

        `number` is that of its record, which was saved before; None for another pair on the same outcome. `slot` is
        the name of its slot, if there are several. A failure becomes a pruned trial with a violated constraint, not a
        failed trial, since samplers learn from a constraint.
        """
        self._open_trials = [other for other in self._open_trials if other is not study_trial]
        outcome, replay = self._ledger.outcome_with_pair(study_trial.setting, outcome, study_trial.pair)
        with self._surviving_failure():
            if study_trial.trial is None or not self.is_reachable:
                return
            slot_attribute = {} if slot is None else {"slot": slot}
            is_own = isinstance(self._storage, Path)
            _set_attributes(
                study_trial.trial,
                _result_attributes(outcome, number, study_trial.pair, replay, is_own=is_own) | slot_attribute,
            )
            if isinstance(outcome, Measurement):
                share = 1.0 if replay is None else replay.applied_share
                # Not the ledger's objective, which may change in a search: all values have one unit.
                rate = throughput(self._ledger.requested_objective, outcome)
                self._study.tell(study_trial.trial, share * rate)
            else:
                study_trial.trial.set_constraint(_RUNS, 1.0)
                self._study.tell(study_trial.trial, state=TrialState.PRUNED)

    def catch_up(self, ledger: Ledger, *, is_over: bool = False) -> None:
        """Add to the study the ledger's trials that it lacks, and replays of the initial pairs of each calibration.

        An fp16 trial that awaits calibration is added after it, or when the search `is_over`.
        """
        self._ledger = ledger
        if self._away_since is not None and (is_over or time.monotonic() > self._away_since + AWAY_SECONDS):
            with self._surviving_failure():
                self._load_from_storage()
                self._away_since = None
                self._note("The study's storage can be reached again.")
        for record in ledger.records:
            setting, outcome = record.candidate, record.outcome
            is_due = (
                record.purpose == "search" and record.number not in self._finished_numbers and self._is_legal(setting)
            )
            if is_due and (is_over or not ledger.awaits_calibration(setting)):
                assert isinstance(outcome, (Measurement, Failure)), "a check is not a trial"
                matching_trials = (study_trial for study_trial in self._open_trials if study_trial.setting == setting)
                study_trial = next(matching_trials, None) or self.ask(setting)
                self.tell(study_trial, outcome, number=record.number, slot=record.slot)
                self._finished_numbers.add(record.number)
            if record.purpose == "calibration" and setting not in self._calibrated:
                self._calibrated.add(setting)
                self.suggest_pairs(setting, 0, lambda: 0.0)  # only the initial ones

    @property
    def is_reachable(self) -> bool:
        """Whether the storage could be reached when it was last used."""
        return self._away_since is None

    @contextlib.contextmanager
    def _surviving_failure(self) -> Iterator[None]:
        """Suppress a failure of the storage in the block, note it, and mark the storage as not reachable."""
        try:
            yield
        except STORAGE_ERRORS as error:
            if self.is_reachable:
                self._note(
                    f"{study_error(self._storage, error).message} The search continues and sends its results later."
                )
            self._away_since = time.monotonic()

    def _load_from_storage(self) -> None:
        """Load the study and the state of this object that follows from its trials."""
        self._study = self._load()
        self._open_trials = []
        self._calibrated: set[Setting] = set()
        self._fail_interrupted_trials()
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        # Numbers of the records in the study.
        self._finished_numbers = {t.user_attrs["record"] for t in finished if "record" in t.user_attrs}

    def suggest_pairs(self, setting: Setting, num_pairs: int, left_seconds: Callable[[], float]) -> None:
        """Replay the initial pairs of a calibrated setting, then pairs that the sampler suggests, and add the results.

        Stop at `num_pairs` pairs in the study, or once `left_seconds()` is 0. Without a safe scale do nothing.
        """
        scales, outcome = scales_of(self._ledger.scales, setting), self._ledger.outcomes.get(setting)
        if scales is None or scales.refusal is not None or outcome is None:
            return
        finished_pairs = self.pairs(setting)
        for pair in finished_pairs:  # of a resumed search
            self._ledger.replay(setting, pair)
        seeds = [pair for pair in scales.seeds if pair not in finished_pairs]
        for pair in seeds:
            self.tell(self.ask(setting, pair), outcome)
        for _ in range(num_pairs - len(finished_pairs) - len(seeds)):
            if left_seconds() <= 0 or not self.is_reachable:
                return
            self.tell(self.ask(setting, None), outcome)

    def pairs(self, setting: Setting) -> list[Pair]:
        """Return the pairs of an fp16 setting with results in the study, in order."""
        finished: Sequence[optuna.trial.FrozenTrial] = ()
        with self._surviving_failure():
            if self.is_reachable:
                finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        attributes = _initial_attributes(setting)
        replayed = (t for t in finished if "applied_share" in t.user_attrs)
        trials = [t for t in replayed if all(t.user_attrs.get(key) == attributes[key] for key in attributes)]
        return [(nearest_power_of_two(t.params["init_scale"]), t.params["growth_interval"]) for t in trials]

    def _nearest(self, parameters: dict[str, Any]) -> Setting:
        """Return the setting of the space nearest to `parameters`, preferring strict flags to the user's own."""

        def distance(name: str, value: Any) -> float:
            if isinstance(value, int):
                return abs(math.log(value / parameters[name]))
            return 0.0 if value == parameters[name] else math.inf

        return min(
            self._legal, key=lambda c: (sum(distance(name, getattr(c, name)) for name in parameters), c.as_found)
        )

    def _fail_interrupted_trials(self) -> None:
        """Mark trials that a killed search left running as failed, since Optuna does so only in `study.optimize`."""
        for interrupted in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            if "candidate" in interrupted.user_attrs:  # a trial that a user enqueued is still to be run
                # Only a running trial can be finished.
                self._study._storage.set_trial_state_values(interrupted._trial_id, TrialState.RUNNING)
        for interrupted in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self._study, interrupted._trial_id)
            trial.set_user_attr("failure", "interrupted")
            trial.set_user_attr(
                "reason", "the search was killed, or lost its connection to the storage, while this trial was running"
            )
            self._study.tell(interrupted.number, state=TrialState.FAIL)

    def _is_legal(self, setting: Setting) -> bool:
        """Whether a setting is in the space, apart from pinned modules and further dimensions except workers."""
        return msgspec.structs.replace(setting.without_variants, pinned_modules=()) in self._legal


def _set_attributes(owner: optuna.Trial | optuna.Study, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        owner.set_user_attr(key, value)


def _parameters(setting: Setting, pair: Pair | None) -> dict[str, Any]:
    """Return the parameters of a setting's trial; without `pair` those of the loss scale are left out."""
    parameters = {dimension.name: getattr(setting, dimension.name) for dimension in _SPACE_DIMENSIONS}
    if MODES[setting.precision].takes_scaler and pair is not None:
        parameters["init_scale"], parameters["growth_interval"] = pair
    return parameters


def _initial_attributes(setting: Setting) -> dict[str, Any]:
    """Return the user attributes of a trial before it runs."""
    # A setting's name has only the number of its pinned modules.
    pins = {"pinned_modules": list(setting.pinned_modules)} if setting.pinned_modules else {}
    return {"candidate": str(setting)} | pins


def _result_attributes(
    outcome: Outcome, number: int | None, pair: Pair | None, replay: Replay | None, *, is_own: bool
) -> dict[str, Any]:
    """Return the user attributes of a finished trial. `number` is that of its record.

    `is_own`: the storage is the search's own file.
    """
    attributes: dict[str, Any] = {} if number is None else {"record": number}
    if isinstance(outcome, Failure):
        # The message may quote the user's code, which other users of a shared storage must not see.
        return attributes | {"failure": outcome.kind} | ({"reason": outcome.message} if is_own else {})
    if number is not None or pair is None:  # only the trial that was run has these, not replays on its measurement
        attributes |= {"step_seconds": outcome.step_seconds, "peak_memory_bytes": outcome.peak_memory_bytes}
    if outcome.was_cut:
        attributes["was_cut"] = True
    if replay is not None and pair is not None:
        share, num_skips = replay.applied_share, replay.num_skips
        attributes |= {"snapped_init_scale": pair[0], "applied_share": share, "num_skips": num_skips}
    elif pair is not None:
        attributes["is_calibrated"] = False  # the value is an upper bound
    return attributes

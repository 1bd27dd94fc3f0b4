"""Optuna study of a search. Only this module and `database` import Optuna.

The throughput model (`stages.throughput_model`) decides which setting to try, and each trial is written to the study
once it has run. Its parameters are the precision and the batch size, for trials on the leader also the further
dimensions and, under fp16, `init_scale` and `growth_interval`. Numbers are ints on a log scale, whose range may change
later. Optuna refuses other choices of a CategoricalDistribution in a study that has trials, so the choices are all
values, whether this session can try them or not. TPE suggests the two of fp16, and each pair is replayed on one
measurement. User attributes hold further values for optuna-dashboard. Trials that others enqueue are not run.

The ledger holds all results: a search continues if the storage fails, and sends them once it can be reached again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState

from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions.argument import Argument
from autotune_amp.dimensions.dimension import Variant
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

# Names of the parameters that make up a pair, with their ranges.
_PAIR: dict[str, BaseDistribution] = {
    "init_scale": FloatDistribution(2.0 ** LOG2_INIT_SCALES[0], 2.0 ** LOG2_INIT_SCALES[1], log=True),
    "growth_interval": IntDistribution(10, 20_000, log=True),
}
_DEFAULT_PAIR: dict[str, Any] = dict(zip(_PAIR, DEFAULT_PAIR, strict=True))
# Name of the constraint that failed settings violate. A sampler learns from it, but ignores a trial with the state FAIL
# (studies/README.md).
_RUNS = "runs"

AWAY_SECONDS = 10.0  # between two attempts to reach a storage that failed


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
        self._storage = storage
        self._load = load
        self._note = note
        self._away_since: float | None = None  # monotonic time of the failure or of the last attempt to reach it
        self._ledger, space = ledger, ledger.space
        self._legal = (*space.candidates, space.baseline)
        # Only trials with a non-default value of one of these have them as parameters.
        self._further = [
            dimension
            for dimension in space.tried_on_leader
            if isinstance(dimension, Variant | Argument) and space.variants.get(dimension.name)
        ]
        sizes = [setting.batch_size for setting in self._legal]
        self._distributions: dict[str, BaseDistribution] = {
            "precision": CategoricalDistribution(PRECISIONS),
            "batch_size": IntDistribution(min(sizes), max(sizes), log=True),
            **_PAIR,
        }
        for dimension in self._further:
            others = dimension.others if isinstance(dimension, Variant) else space.variants[dimension.name]
            self._distributions[dimension.name] = CategoricalDistribution((dimension.default, *others))
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
        `name-search_id` and so on if another search has that name, since its measurements must not affect this one. The
        ledger's trials that the study lacks are added. Raises `StudyError` if the storage cannot be used.
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
            is_due = record.purpose == "search" and record.number not in self._numbers
            is_due = is_due and msgspec.structs.replace(setting.without_variants, pinned_modules=()) in self._legal
            if is_due and (is_over or not ledger.awaits_calibration(setting)):
                assert isinstance(outcome, (Measurement, Failure)), "a check is not a trial"
                takes_scaler = MODES[setting.precision].takes_scaler
                self._add(self._trial(setting, outcome, _DEFAULT_PAIR if takes_scaler else {}, record))
                self._numbers.add(record.number)
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
        self._calibrated: set[Setting] = set()
        attributes = [trial.user_attrs for trial in self._study.get_trials(deepcopy=False)]
        self._numbers = {each["record"] for each in attributes if "record" in each}  # of the records in the study

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
            self._add(self._trial(setting, outcome, dict(zip(_PAIR, pair, strict=True))))
        num_left = num_pairs - len(finished_pairs) - len(seeds)
        if num_left <= 0:
            return
        # The sampler is asked through a copy of the study in memory, so that the storage holds no unfinished trial and
        # trials that others enqueued are not taken.
        asked = optuna.create_study(direction="maximize", sampler=self._study.sampler)
        asked.add_trials(self._finished_trials())
        for _ in range(num_left):
            if left_seconds() <= 0 or not self.is_reachable:
                return
            trial = self._trial(setting, outcome, asked.ask(_PAIR).params)
            self._add(trial)
            asked.add_trial(trial)

    def pairs(self, setting: Setting) -> list[Pair]:
        """Return the pairs of an fp16 setting with results in the study, in order."""
        attributes = _name_attributes(setting)
        replayed = (t for t in self._finished_trials() if "applied_share" in t.user_attrs)
        trials = [t for t in replayed if all(t.user_attrs.get(key) == attributes[key] for key in attributes)]
        return [_pair(t.params) for t in trials]

    def _finished_trials(self) -> Sequence[FrozenTrial]:
        """Return the trials of the study that have a result; none if the storage cannot be reached."""
        with self._surviving_failure():
            if self.is_reachable:
                return self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        return ()

    def _trial(
        self, setting: Setting, outcome: Outcome, pair_parameters: dict[str, Any], record: Record | None = None
    ) -> FrozenTrial:
        """Return a finished trial with its samples per second that reach the optimizer (with ``--objective tokens`` its
        tokens), or with the reason of its failure.

        `record` is that of the trial that was run; None for another pair on the same outcome. A failure becomes a
        pruned trial with a violated constraint, not a failed trial, since samplers learn from a constraint.
        """
        pair = _pair(pair_parameters) if pair_parameters else None
        outcome, replay = self._ledger.outcome_with_pair(setting, outcome, pair)
        parameters = {"precision": setting.precision, "batch_size": setting.batch_size, **pair_parameters}
        if setting.has_variants:
            parameters |= {dimension.name: dimension.read(setting) for dimension in self._further}
        attributes = _name_attributes(setting)
        if record is not None:
            attributes |= {"record": record.number} | ({} if record.slot is None else {"slot": record.slot})
        if isinstance(outcome, Failure):
            result: dict[str, Any] = {"state": TrialState.PRUNED, "constraints": {_RUNS: 1.0}}
            attributes["failure"] = outcome.kind
            if isinstance(self._storage, Path):  # it may quote the user's code, which others must not see
                attributes["reason"] = outcome.message
        else:
            share = 1.0 if replay is None else replay.applied_share
            # Not the ledger's objective, which may change in a search: all values have one unit.
            result = {"value": share * throughput(self._ledger.requested_objective, outcome)}
            if record is not None:
                attributes |= {"step_seconds": outcome.step_seconds, "peak_memory_bytes": outcome.peak_memory_bytes}
            if outcome.was_cut:
                attributes["was_cut"] = True
            if pair is not None and replay is None:
                attributes["is_calibrated"] = False  # the value is an upper bound
            elif pair is not None and replay is not None:
                attributes |= {"snapped_init_scale": pair[0], "applied_share": share, "num_skips": replay.num_skips}
        distributions = {name: self._distributions[name] for name in parameters}
        trial = optuna.create_trial(params=parameters, distributions=distributions, user_attrs=attributes, **result)
        if record is not None and trial.datetime_start is not None:
            trial.datetime_start -= timedelta(seconds=record.seconds)
        return trial

    def _add(self, trial: FrozenTrial) -> None:
        """Write a trial to the storage if it can be reached."""
        with self._surviving_failure():
            if self.is_reachable:
                self._study.add_trial(trial)


def _pair(parameters: dict[str, Any]) -> Pair:
    """Return the pair that is replayed for a trial's parameters: a loss scale is a power of two."""
    return nearest_power_of_two(parameters["init_scale"]), parameters["growth_interval"]


def _name_attributes(setting: Setting) -> dict[str, Any]:
    """Return the user attributes of a trial that name its setting, whose name has only the number of its pins."""
    pins = {"pinned_modules": list(setting.pinned_modules)} if setting.pinned_modules else {}
    return {"candidate": str(setting)} | pins

"""The ask/tell loop around Optuna: the only file that imports it.

One study, four parameters: `precision`, `batch_size` (an int on a log scale, snapped to the nearest legal size: an
int range may change later and a category may not) and, under fp16, `init_scale` (snapped to a power of two) and
`growth_interval`. An fp16 batch size is measured once; what is told of its pairs of the two comes from a replay, which
a `told.Judge` knows. User attributes say the rest, since they are what optuna-dashboard shows: the candidate that was
run, why it failed, its memory and step time. They are few, since each is a commit.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
import sqlalchemy
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, StorageInternalError, UpdateFinishedTrialError
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from autotune_amp.core.config import PRECISIONS
from autotune_amp.core.errors import StudyError
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.search import told
from autotune_amp.search.loss_scales import DEFAULT_PAIR, LOG2_INIT_SCALES, Pair, snapped
from autotune_amp.search.storage import open_file, sqlite_url, study_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autotune_amp.core.outcome import Outcome, Record
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.space import Space
    from autotune_amp.search.told import Judge

__all__ = ["Asked", "Study", "connected", "sqlite_url"]

GROWTH_INTERVALS = (10, 20_000)

# TPE learns from a violated constraint and ignores a trial told as FAIL (shared/reference/measurement.md, Optuna 5).
_RUNS = "runs"


class Asked(NamedTuple):
    """A trial that the study waits for: run `candidate`, then `Study.tell` its outcome.

    `pair` is init_scale, a power of two, and growth_interval under fp16, None otherwise.
    """

    candidate: Setting
    trial: optuna.Trial
    pair: Pair | None


class Study:
    """One search in an Optuna storage: made by `Study.open`, used in a ``with`` statement or closed by hand.

    Every method raises `StudyError` where the storage fails. To be used from one thread.
    """

    def __init__(self, storage: str | Path, study: optuna.Study, space: Space, judge: Judge) -> None:
        self._storage = storage
        self._study = study
        self._judge = judge
        self._cleanup = contextlib.ExitStack()
        self._legal = (*space.candidates, space.baseline)
        self._precisions = [p for p in PRECISIONS if any(c.precision == p for c in self._legal)]
        self._sizes = min(c.batch_size for c in self._legal), max(c.batch_size for c in self._legal)

    @classmethod
    def open(
        cls,
        storage: str | Path,
        name: str,
        space: Space,
        *,
        search_id: str,
        owner: str = "",
        judge: Judge = told.as_measured,
        seed: int = 0,
        records: Iterable[Record] = (),
    ) -> Study:
        """Create the study of a search, or go on with it. `storage` is an Optuna storage URL, or the search's own file.

        It belongs to `search_id` and `owner`, the search's folder: another folder's search may be running beside it.
        It is called `name`, or `name-search_id`, or `name-search_id-2` and so on where another search has that name:
        Optuna cannot change the choices of a study, and what another search measured must not steer this one.
        Trials that a killed search left running are told as failed, and the search records of `search_id` that the
        study lacks are added.
        Raises `StudyError`, naming the storage without its password, where it cannot be used.
        """
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(optuna.logging.set_verbosity, optuna.logging.get_verbosity())
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            database = cleanup.enter_context(connected(storage))
            with _storage_errors(storage):
                study = _create_or_load(database, name, search_id, owner)
                study.sampler = TPESampler(seed=seed + len(study.trials))  # resumed, it must not draw the same again
                opened = cls(storage, study, space, judge)
                opened._fail_left_behind()
                opened._add_missing(record for record in records if record.search_id == search_id)
            opened._cleanup = cleanup.pop_all()
        return opened

    def close(self) -> None:
        """Close every connection and give Optuna's logging its verbosity back."""
        self._cleanup.close()

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The study's name in the storage."""
        return self._study.study_name

    def ask(self, candidate: Setting | None = None, pair: Pair | None = DEFAULT_PAIR) -> Asked:
        """The next trial: of `candidate`, or of what TPE suggests, snapped to the nearest legal batch size.

        Under fp16 with `pair`; with None TPE suggests one for the candidate. A candidate with pinned modules is told
        under the precision that it pins them in. A trial that somebody enqueued through the dashboard comes first, so
        run what is returned. What TPE suggests may have been measured or ruled out: tell what is known, TPE learns
        from that too.
        Raises `ValueError` for a candidate outside the space: enqueued, it would leave a running trial behind.
        What others enqueued that cannot be read is a `StudyError`.
        """
        if candidate is not None and told.unpinned(candidate) not in self._legal:
            raise ValueError(f"{candidate} is not in the space.")
        with _storage_errors(self._storage):
            if candidate is not None:
                self._study.enqueue_trial(told.parameters(candidate, pair), user_attrs=told.described(candidate))
            trial = self._study.ask()
            try:
                precision = trial.suggest_categorical("precision", self._precisions)
                size = trial.suggest_int("batch_size", *self._sizes, log=True)
                suggested = self._suggested_pair(trial) if precision == "fp16" else None
                if candidate is None or (precision, size) != (candidate.precision, candidate.batch_size):
                    candidate = self._nearest(precision, size)
                    _set_attributes(trial, told.described(candidate))
            except ValueError as error:
                raise StudyError(
                    f"Trial {trial.number}, which somebody enqueued in study {self.name}, cannot be run: {error}.",
                    f"Enqueue {', '.join(self._precisions)} only; the same command again goes on without that trial.",
                ) from error
            return Asked(candidate, trial, suggested)

    def tell(self, asked: Asked, outcome: Outcome, *, number: int | None = None) -> None:
        """Finish a trial: its applied samples per second as the judge has them, or why there are none.

        `number` is that of the record, written before this is called; None where the outcome was known already.
        A failure becomes a pruned trial with a violated constraint, never a failed one, so that TPE learns from it.
        """
        outcome, replay = self._judge(asked.candidate, outcome, asked.pair)
        with _storage_errors(self._storage):
            _set_attributes(asked.trial, told.explained(outcome, number, asked.pair, replay))
            if isinstance(outcome, Measurement):
                self._study.tell(asked.trial, told.value(outcome, replay))
            else:
                asked.trial.set_constraint(_RUNS, 1.0)
                self._study.tell(asked.trial, state=TrialState.PRUNED)

    def pairs(self, candidate: Setting) -> list[Pair]:
        """The pairs that were answered for an fp16 candidate, in order."""
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        wanted = told.described(candidate)
        answered = (t for t in finished if "applied_share" in t.user_attrs)
        ours = [t for t in answered if all(t.user_attrs.get(key) == wanted[key] for key in wanted)]
        return [(snapped(t.params["init_scale"]), t.params["growth_interval"]) for t in ours]

    def _suggested_pair(self, trial: optuna.Trial) -> Pair:
        low, high = (2.0**log2_scale for log2_scale in LOG2_INIT_SCALES)
        return (
            snapped(trial.suggest_float("init_scale", low, high, log=True)),
            trial.suggest_int("growth_interval", *GROWTH_INTERVALS, log=True),
        )

    def _distributions(self, names: Iterable[str]) -> dict[str, BaseDistribution]:
        low, high = (2.0**log2_scale for log2_scale in LOG2_INIT_SCALES)
        known: dict[str, BaseDistribution] = {
            "precision": CategoricalDistribution(self._precisions),
            "batch_size": IntDistribution(*self._sizes, log=True),
            "init_scale": FloatDistribution(low, high, log=True),
            "growth_interval": IntDistribution(*GROWTH_INTERVALS, log=True),
        }
        return {name: known[name] for name in names}

    def _nearest(self, precision: str, size: int) -> Setting:
        """The legal candidate with the nearest batch size; strict flags before as found where both have it."""
        ours = (c for c in self._legal if c.precision == precision)
        return min(ours, key=lambda c: (abs(math.log(c.batch_size / size)), c.as_found))

    def _fail_left_behind(self) -> None:
        """Heartbeats belong to `study.optimize`: with ask and tell, the next search marks the dead trials itself."""
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()  # only a running trial can be told
        for left in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            trial = optuna.Trial(self._study, left._trial_id)
            trial.set_user_attr("failure", "interrupted")
            trial.set_user_attr("reason", "the search was killed while this trial was running")
            self._study.tell(left.number, state=TrialState.FAIL)

    def _add_missing(self, records: Iterable[Record]) -> None:
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
        known = {trial.user_attrs.get("record") for trial in finished}
        for record in records:
            candidate, outcome = record.candidate, record.outcome
            if record.purpose != "search" or record.number in known or told.unpinned(candidate) not in self._legal:
                continue
            assert isinstance(outcome, (Measurement, Failure))
            pair = DEFAULT_PAIR if candidate.precision == "fp16" else None
            parameters = told.parameters(candidate, pair)
            outcome, replay = self._judge(candidate, outcome, pair)
            is_measured = isinstance(outcome, Measurement)
            self._study.add_trial(
                optuna.create_trial(
                    state=TrialState.COMPLETE if is_measured else TrialState.PRUNED,
                    value=told.value(outcome, replay) if isinstance(outcome, Measurement) else None,
                    params=parameters,
                    distributions=self._distributions(parameters),
                    user_attrs=told.described(candidate) | told.explained(outcome, record.number, pair, replay),
                    constraints=None if is_measured else {_RUNS: 1.0},
                )
            )


def _set_attributes(owner: optuna.Trial | optuna.Study, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        owner.set_user_attr(key, value)


def _create_or_load(storage: RDBStorage, name: str, search_id: str, owner: str) -> optuna.Study:
    ours = {"search_id": search_id, "owner": owner}
    own_name = f"{name}-{search_id}"
    for free_name in itertools.chain((name, own_name), (f"{own_name}-{k}" for k in itertools.count(2))):
        try:  # creating fails for all but one of several searches that start together
            study = optuna.create_study(storage=storage, study_name=free_name, direction="maximize")
        except DuplicatedStudyError:
            study = optuna.load_study(storage=storage, study_name=free_name)
            if ours.items() <= study.user_attrs.items():
                break
        else:
            _set_attributes(study, ours)
            break
    return study


@contextlib.contextmanager
def connected(storage: str | Path) -> Iterator[RDBStorage]:
    """An Optuna storage by its URL, or a search's own file. Raises `StudyError` where it cannot be used."""
    database = _connect(storage)
    try:
        yield database
    finally:
        database.remove_session()
        database.engine.dispose()


def _connect(storage: str | Path) -> RDBStorage:
    # Without a pool no SQLite connection outlives its session, not even one that Optuna's constructor failed on.
    options: dict[str, Any] = {}
    if isinstance(storage, Path):
        options["pool"] = sqlalchemy.NullPool(lambda: open_file(storage))  # type: ignore[arg-type]
    elif storage.startswith("sqlite") and ":memory:" not in storage and storage != "sqlite://":
        options["poolclass"] = sqlalchemy.NullPool
    try:
        return RDBStorage("sqlite://" if isinstance(storage, Path) else storage, engine_kwargs=options)
    except Exception as error:  # a wrong URL, driver, host, password, file or schema: each has a type of its own
        cause = error.__cause__ if isinstance(error, StorageInternalError) else None
        raise study_error(storage, cause or error) from error


@contextlib.contextmanager
def _storage_errors(storage: str | Path) -> Iterator[None]:
    try:
        yield
    except StorageInternalError as error:
        raise study_error(storage, error.__cause__ or error) from error
    except SQLAlchemyError as error:
        raise study_error(storage, error) from error
    except UpdateFinishedTrialError as error:
        raise StudyError(
            "A trial of this search was finished in the study by somebody else while it was running.",
            "Run the same command again to go on; leave a running search's trials alone.",
        ) from error

"""Database of an Optuna storage: connecting to it, loading its studies, and errors without its password."""

from __future__ import annotations

import contextlib
import itertools
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.exceptions import DuplicatedStudyError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import RDBStorage
from sqlalchemy.exc import IntegrityError, ProgrammingError, SQLAlchemyError

from autotune_amp.core.errors import StudyError

_NUM_TRIES, _TRY_SECONDS = 10, 0.3  # attempts to create an empty database's tables
# Optuna raises KeyError for a study or trial that somebody deleted.
STORAGE_ERRORS = (StorageInternalError, SQLAlchemyError, UpdateFinishedTrialError, KeyError)
# Timeouts of libpq, in seconds except the last in milliseconds. Without them it waits for ever for a connection, or for
# a server whose packets are lost.
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


@contextlib.contextmanager
def open_storage(storage: str | Path) -> Iterator[RDBStorage]:
    """Open the Optuna storage of a URL or of a search's own file. Raises `StudyError` if it cannot be used."""
    url = "sqlite://" if isinstance(storage, Path) else storage
    options = engine_options(url)
    if isinstance(storage, Path):
        options["pool"] = sqlalchemy.NullPool(lambda: _open_file(storage))
    try:
        if "connect_args" in options:
            _create_tables(url, options["connect_args"])
        database = RDBStorage(url, engine_kwargs=options)
    except Exception as error:  # a wrong URL, driver, host, password, file or schema each raises its own type
        raise study_error(storage, error) from error
    try:
        yield database
    finally:
        database.remove_session()
        database.engine.dispose()


def engine_options(url: str) -> dict[str, Any]:
    """Return the options of SQLAlchemy's engine for the database at `url`. Its errors never show what was stored."""
    hidden = {"hide_parameters": True}
    if url.startswith("sqlite") and ":memory:" not in url and url != "sqlite://":
        # Without a pool no connection outlives its session, not even if Optuna's constructor fails.
        return {"poolclass": sqlalchemy.NullPool, **hidden}
    if url.partition(":")[0] in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2"):
        return {
            # Otherwise the first query on an open connection fails after a restart of the server.
            "pool_pre_ping": True,
            "connect_args": {name: value for name, value in _PATIENCE.items() if f"{name}=" not in url},
            **hidden,
        }
    return hidden


def _create_tables(url: str, connect_args: dict[str, Any]) -> None:
    """Create missing tables. Optuna fails if another search creates the same ones, so retry."""
    options = {"poolclass": sqlalchemy.NullPool, "connect_args": connect_args}  # no connection outlives a failure
    for _ in range(_NUM_TRIES):
        try:
            RDBStorage(url, engine_kwargs=options).engine.dispose()
        except (IntegrityError, ProgrammingError):
            time.sleep(_TRY_SECONDS)
        else:
            return


@contextlib.contextmanager
def storage_errors(storage: str | Path) -> Iterator[None]:
    """Raise `StudyError` for a failure of the storage in the block."""
    try:
        yield
    except STORAGE_ERRORS as error:
        raise study_error(storage, error) from error


@contextlib.contextmanager
def optuna_log_silenced() -> Iterator[None]:
    """Silence Optuna's log in the block."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def attributes(storage: str, name: str) -> dict[str, Any]:
    """Return a study's user attributes, empty if there is no such study. Raises `StudyError` if the storage fails."""
    with open_storage(storage) as database, storage_errors(storage):
        try:
            return database.get_study_user_attrs(database.get_study_id_from_name(name))
        except KeyError:
            return {}


def set_attribute(storage: str, name: str, key: str, value: Any) -> None:
    """Set a user attribute of a study, which is created if missing. Raises `StudyError` if the storage fails."""
    with optuna_log_silenced(), open_storage(storage) as database, storage_errors(storage):
        optuna.create_study(storage=database, study_name=name, load_if_exists=True).set_user_attr(key, value)


def load_study(database: RDBStorage, name: str, search_id: str, owner: str) -> optuna.Study:
    """Create or load the study of a search, called `name` unless that is the study of another search."""
    attributes = {"search_id": search_id, "owner": owner}
    own_name = f"{name}-{search_id}"
    names = itertools.chain((name, own_name), (f"{own_name}-{k}" for k in itertools.count(2)))
    while True:
        free_name = next(names)
        try:  # of several searches that start together only one can create the study
            study = optuna.create_study(storage=database, study_name=free_name, direction="maximize")
        except DuplicatedStudyError:
            study = optuna.load_study(storage=database, study_name=free_name)
            if attributes.items() <= study.user_attrs.items():
                return study
        else:
            for key, value in attributes.items():
                study.set_user_attr(key, value)
            return study


def _open_file(path: Path) -> sqlite3.Connection:
    """Return a connection that does not wait for the disk: a dozen commits take 75 ms instead of 330 (measured).

    A killed process does no damage. Only a power failure may, and the file can be created again from the records.
    """
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def study_error(storage: str | Path, error: Exception) -> StudyError:
    """Return the error for a storage that failed, with the password in its URL hidden."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    description = str(getattr(cause, "orig", None) or cause).strip().split("\n")[0].rstrip(".") or type(cause).__name__
    if isinstance(error, ImportError) and str(storage).startswith("postgresql"):
        next_step = "Run `pip install 'autotune_amp[postgresql]'`."
    elif isinstance(storage, Path):
        next_step = "Check that its folder is writable and has space; move a damaged file away."
    else:
        next_step = "Check that it exists and is writable, or leave --storage out to use a file in the study's folder."
        secrets = re.findall(r"[?&](?:ssl)?password=([^&]+)", storage)
        for secret in (*secrets, *re.findall(r"(?:^|://)[^:/@]*:(?!//)(.+)@", storage)):
            storage = storage.replace(f"password={secret}", "password=***").replace(f":{secret}@", ":***@")
            description = description.replace(secret, "***")
    return StudyError(f"The storage {storage} cannot be used: {description}.", next_step)

"""Queue of searches in a database: SQLite in the service's folder, or the team's PostgreSQL. Reads are from memory."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any, Literal, TypeAlias

import msgspec
import sqlalchemy
from msgspec.structs import replace
from sqlalchemy.exc import SQLAlchemyError

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.storage.database import engine_options, study_error
from autotune_amp.service.settings import Target

State: TypeAlias = Literal["queued", "running", "done", "failed", "ended"]
WAITING: tuple[State, ...] = ("queued", "running")
_MAX_FINISHED = 1000  # older ones are forgotten with their files; their studies stay

_METADATA = sqlalchemy.MetaData()
_TABLE = sqlalchemy.Table(
    "autotune_amp_searches",
    _METADATA,
    sqlalchemy.Column("service", sqlalchemy.String(255), primary_key=True),
    sqlalchemy.Column("id", sqlalchemy.String(32), primary_key=True),
    sqlalchemy.Column("search", sqlalchemy.Text, nullable=False),
)


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """A requested search and its state. Times are seconds since 1970.

    `id` is a digest of the request, so that equal requests are one search. `target_digest` is that of the target's
    settings when it was asked for. `options` are those that were asked for, by the names of the request. `callers` wait
    for it; without one it is ended. Each is a caller's name, followed by a space and the ID of the request if its
    client sent one: people who share a name wait apart. `repetition` is how often it was begun, not counting that a
    new service went on with it. `measured` is when it was last measured to its end. With `is_fresh` it is still to
    begin to measure again what exists already. `error` says why it failed.
    """

    id: str
    target: str
    target_digest: str = ""
    options: dict[str, Any]
    callers: tuple[str, ...]
    is_fresh: bool = False
    state: State = "queued"
    repetition: int = 0
    created: float = msgspec.field(default_factory=time.time)
    started: float | None = None
    ended: float | None = None
    measured: float | None = None
    error: dict[str, str] | None = None


class QueueFullError(AutotuneAmpError):
    """Raised if too many searches wait already."""


class UnknownError(AutotuneAmpError):
    """Raised if there is no search of the given ID, or none of a target is finished."""


class ForbiddenError(AutotuneAmpError):
    """Raised if a caller may not change a search."""


def caller_name(caller: str) -> str:
    """Return the name of a caller, without the ID of its request."""
    return caller.partition(" ")[0]


def search_id(target: Target, options: SearchOptions) -> str:
    """Return the ID of the search with these options: 32 hexadecimal digits, equal for equal requests."""
    return _digest(target, options)[:32]


def target_digest(target: Target) -> str:
    """Return a digest of a target's settings: another one if its program, folder, devices or limits are changed."""
    return hashlib.sha256(msgspec.json.encode(target)).hexdigest()[:32]


def study_name(name: str, target: Target, options: SearchOptions) -> str:
    """Return the study's name for the target `name`: requests that need the same measurements share a study."""
    defaults = SearchOptions()
    measured = replace(options, **{field: getattr(defaults, field) for field in RANKING})
    return f"{name}-{_digest(target, measured)[:8]}"


def _digest(target: Target, options: SearchOptions) -> str:
    return hashlib.sha256(msgspec.json.encode((target, options))).hexdigest()


class Queue:
    """Searches of one service by ID. Methods may be called from any thread; `searches` is only read by others.

    Several services may share a database; each has only the searches of its own name. `engine` is that of the database.
    Raises `StudyError` if it cannot be used.
    """

    def __init__(self, database: str, service: str, max_queued: int) -> None:
        self._database, self._service, self._max_queued = database, service, max_queued
        self._lock = threading.Lock()
        self._unsaved: set[str] = set()
        try:
            self.engine = sqlalchemy.create_engine(database, **engine_options(database))
            _METADATA.create_all(self.engine)
            with self.engine.connect() as connection:
                rows = connection.execute(sqlalchemy.select(_TABLE.c.search).where(_TABLE.c.service == service)).all()
        except Exception as error:  # a wrong URL, driver, host, password, file or schema each raises its own type
            raise study_error(database, error) from error
        found = (msgspec.json.decode(row.search, type=Search) for row in rows)
        self.searches = {search.id: search for search in sorted(found, key=lambda search: search.created)}

    def waiting(self) -> list[Search]:
        """Return the searches that wait for a device, the oldest first."""
        return [search for search in list(self.searches.values()) if search.state == "queued"]

    def submit(self, search: Search) -> Search:
        """Add a search, or its callers to the equal one that waits or runs.

        An equal one that is over is started again, with its place before newer ones: if it is done and nothing has
        changed, its study answers once its device is free. Raises `QueueFullError` if too many wait, `StudyError` if it
        cannot be saved.
        """
        with self._lock:
            before = self.searches.get(search.id)
            if before is not None:
                is_fresh = before.is_fresh or (search.is_fresh and before.state != "running")
                state: State = before.state if before.state in WAITING else "queued"
                callers = before.callers if before.state in WAITING else ()
                callers = tuple(dict.fromkeys((*callers, *search.callers)))
                search = replace(before, state=state, callers=callers, is_fresh=is_fresh)
            if (before is None or before.state not in WAITING) and len(self.waiting()) >= self._max_queued:
                raise QueueFullError(f"{self._max_queued} searches wait already.", "Try again later.")
            self.searches[search.id] = search
            try:
                self._save(search.id)
            except SQLAlchemyError as error:
                if before is None:
                    del self.searches[search.id]
                else:
                    self.searches[search.id] = before
                raise study_error(self._database, error) from error
            return search

    def withdraw(self, search: Search, caller: str) -> Search:
        """Remove a caller from those who wait for a search. Without any it is ended, or has to be if it runs.

        A name without the ID of a request stands for all requests of that name. A search that was queued again is done,
        as before.
        Raises `ForbiddenError` if the caller did not ask for it.
        """
        with self._lock:
            search = self.searches[search.id]
            if search.state not in WAITING:
                return search
            callers = tuple(other for other in search.callers if not f"{other} ".startswith(f"{caller} "))
            if callers == search.callers:
                name = caller_name(caller)
                raise ForbiddenError(f"{name} did not ask for search {search.id}.", "Ask those who did to end it.")
            is_over = not callers and search.state == "queued"
            over = {"state": "ended" if search.measured is None else "done", "ended": time.time(), "is_fresh": False}
            return self._change(search, callers=callers, **(over if is_over else {}))

    def change(self, id_: str, **changes: Any) -> Search:
        """Change the fields of a search. If the database is away, it is saved later."""
        with self._lock:
            return self._change(self.searches[id_], **changes)

    def save_later_changes(self) -> list[str]:
        """Save what could not be saved before, and forget the oldest finished searches, whose IDs are returned."""
        with self._lock:
            for id_ in list(self._unsaved):
                self._try_to_save(id_)
            finished = [search for search in self.searches.values() if search.state not in WAITING]
            oldest = sorted(finished, key=lambda search: search.ended or 0.0)[:-_MAX_FINISHED]
            for search in oldest:
                del self.searches[search.id]
                self._try_to_save(search.id)
            return [search.id for search in oldest]

    def close(self) -> None:
        """Close the connections to the database."""
        self.engine.dispose()

    def _change(self, search: Search, **changes: Any) -> Search:
        search = self.searches[search.id] = replace(search, **changes)
        self._try_to_save(search.id)
        return search

    def _try_to_save(self, id_: str) -> None:
        try:
            self._save(id_)
            self._unsaved.discard(id_)
        except SQLAlchemyError:
            self._unsaved.add(id_)

    def _save(self, id_: str) -> None:
        """Write a search to the database, or remove one that is forgotten."""
        search = self.searches.get(id_)
        own = (_TABLE.c.service == self._service) & (_TABLE.c.id == id_)
        with self.engine.begin() as connection:
            connection.execute(sqlalchemy.delete(_TABLE).where(own))
            if search is not None:
                text = msgspec.json.encode(search).decode()
                connection.execute(sqlalchemy.insert(_TABLE).values(service=self._service, id=id_, search=text))

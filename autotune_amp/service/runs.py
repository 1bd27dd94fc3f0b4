"""Training runs that post their metrics to the service: their store, their routes, and their text for Prometheus.

`autotune_amp.integrations.sinks.http` posts them. A run belongs to the caller who began it: nobody else can add to it.
"""

# No `from __future__ import annotations`: FastAPI reads the annotations of the routes, which name local variables.

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    MetaData,
    RowMapping,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from autotune_amp.core.documents import Whole, cause, decode
from autotune_amp.core.errors import InvalidRequestError, StudyBusyError
from autotune_amp.core.precisions import Precision
from autotune_amp.integrations.sinks import MAX_POSTED, MAX_TEXT
from autotune_amp.report.files import RELOAD_SECONDS
from autotune_amp.report.run_page import run_page
from autotune_amp.runtime.policy import RecordKind
from autotune_amp.runtime.run_log import Line, LoggedRun, MoveLine, SampleLine
from autotune_amp.runtime.status import METRICS, PREFIX, Readings
from autotune_amp.service.jobs import ForbiddenError, UnknownError

LIVE_SECONDS = 900  # since the last post: 64 updates of a slow training run can take minutes
_NO_NUL = "^[^\0]*$"  # PostgreSQL stores no text with one
ShortText = Annotated[str, msgspec.Meta(max_length=MAX_TEXT, pattern=_NO_NUL)]
_RUN_ID = re.compile(r"[0-9a-f]{32}")

# The page's own scripts and styles stand in the page; it loads and sends nothing.
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}


class PostedReadings(Readings, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Metrics of an update as a run posts them, with the text keys of a move if it is one.

    `number` counts the metrics of a run, so that what is posted twice is stored once.
    """

    number: Whole
    move: RecordKind | None = None
    before: Precision | None = None
    reason: ShortText = ""
    pinned_modules: ShortText = ""

    def line(self) -> Line:
        """Return the line of a run log that says the same."""
        fields = {name: getattr(self, name) for name in Readings.__struct_fields__}
        if self.move is None:
            return SampleLine(**fields)
        pinned_modules = tuple(filter(None, self.pinned_modules.split(", ")))
        return MoveLine(
            **fields,
            kind=self.move,
            before=self.before or self.precision,
            after=self.precision,
            reason=self.reason,
            pinned_modules=pinned_modules,
        )


class RunPost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a post: the run's name, and metrics in the order of their numbers."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT, pattern=_NO_NUL)]
    values: Annotated[list[PostedReadings], msgspec.Meta(min_length=1, max_length=MAX_POSTED)]


class StoredRun(msgspec.Struct, frozen=True, kw_only=True):
    """Run in the store. `began` and `heard`, the last post, are seconds since 1970 of the service's clock.

    `seconds_by_precision` is the time between updates since the first post.
    """

    id: str
    owner: str
    name: str
    began: float
    heard: float
    newest: PostedReadings
    seconds_by_precision: dict[Precision, float]

    @property
    def is_live(self) -> bool:
        """Whether the run has posted lately."""
        return time.time() - self.heard < LIVE_SECONDS

    def summary(self) -> dict[str, object]:
        """Return the run for a JSON document, without its owner."""
        newest = {name: value for name, value in msgspec.to_builtins(self.newest).items() if name in _SHORT_NAMES}
        return {
            "id": self.id,
            "name": self.name,
            "began": _iso(self.began),
            "heard": _iso(self.heard),
            "is_live": self.is_live,
            "seconds_by_precision": self.seconds_by_precision,
            "newest": dict.fromkeys(_SHORT_NAMES) | newest,
        }


_SHORT_NAMES = tuple(metric.name.removeprefix(PREFIX) for metric in METRICS.values())


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


_METADATA = MetaData()
_RUNS = Table(
    "autotune_amp_runs",
    _METADATA,
    Column("service", String(255), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("began", Float, nullable=False),
    Column("heard", Float, nullable=False),
    Column("newest", Text, nullable=False),
    Column("seconds_by_precision", Text, nullable=False),
)
_VALUES = Table(
    "autotune_amp_run_values",
    _METADATA,
    Column("service", String(255), primary_key=True),
    Column("id", String(32), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("readings", Text, nullable=False),
)


class RunStore:
    """Store of one service's runs in a database: `max_runs` at most, and the newest `max_values` metrics of each.

    Several services may share a database; each has only the runs of its own name.
    """

    def __init__(self, engine: Engine, service: str, *, max_runs: int = 1000, max_values: int = 4096) -> None:
        self._engine, self._service = engine, service
        self._max_runs = max_runs
        self._max_values = max_values
        self._writing = threading.Lock()
        _METADATA.create_all(engine)

    def append(self, run_id: str, owner: str, post: RunPost) -> None:
        """Store what a run posted; begin the run if it is new.

        Raises `ForbiddenError` if another caller began it, `StudyBusyError` if another process stores the same.
        """
        try:
            self._append(run_id, owner, post)
        except IntegrityError as error:
            raise StudyBusyError(
                f"Another service of this name stores the same metrics of run {run_id}.",
                "Post them again, to one service; give each service of a database its own name.",
            ) from error

    def _append(self, run_id: str, owner: str, post: RunPost) -> None:
        # Connecting to a database that is away takes seconds, in which others may write.
        with self._engine.connect() as connection, self._writing, connection.begin():
            run = self._stored(connection, run_id)
            if run is not None and run.owner != owner:
                raise ForbiddenError(f"The run {run_id} was begun by another caller.", "Begin a run of your own.")
            after = -1 if run is None else run.newest.number
            values = sorted({each.number: each for each in post.values if each.number > after}.items())
            if not values:
                return
            readings = [each for _, each in values]
            newest = readings[-1]
            row: dict[str, object] = {
                "name": post.name,
                "heard": time.time(),
                "newest": msgspec.json.encode(newest).decode(),
                "seconds_by_precision": msgspec.json.encode(_seconds_by_precision(run, readings)).decode(),
            }
            if run is None:
                row |= {"service": self._service, "id": run_id, "owner": owner, "began": row["heard"]}
                connection.execute(insert(_RUNS).values(row))
                self._forget_surplus(connection)
            else:
                connection.execute(update(_RUNS).where(self._is_of(_RUNS, run_id)).values(row))
            rows = [
                {
                    "service": self._service,
                    "id": run_id,
                    "number": number,
                    "readings": msgspec.json.encode(each).decode(),
                }
                for number, each in values
            ]
            connection.execute(insert(_VALUES), rows)
            is_old = _VALUES.c.number <= newest.number - self._max_values
            connection.execute(delete(_VALUES).where(self._is_of(_VALUES, run_id), is_old))

    def _forget_surplus(self, connection: Connection) -> None:
        """Forget the oldest run of the owner who has most, so that nobody displaces those of others."""
        own = _RUNS.c.service == self._service
        num_runs = connection.execute(select(func.count()).select_from(_RUNS).where(own)).scalar_one()
        num_of_owner = func.count().over(partition_by=_RUNS.c.owner)
        order = (num_of_owner.desc(), _RUNS.c.heard, _RUNS.c.began)
        for _ in range(num_runs - self._max_runs):
            run_id = connection.execute(select(_RUNS.c.id).where(own).order_by(*order).limit(1)).scalar_one()
            for table in (_RUNS, _VALUES):
                connection.execute(delete(table).where(self._is_of(table, run_id)))

    def runs(self) -> list[StoredRun]:
        """Return all runs, the one heard of last first."""
        query = select(_RUNS).where(_RUNS.c.service == self._service).order_by(_RUNS.c.heard.desc())
        with self._engine.connect() as connection:
            rows = connection.execute(query).mappings().all()
        return [_run_of(row) for row in rows]

    def run(self, run_id: str) -> StoredRun | None:
        """Return a run, None if there is none of this id."""
        with self._engine.connect() as connection:
            return self._stored(connection, run_id)

    def log(self, run_id: str) -> LoggedRun:
        """Return the stored metrics of a run as the lines of a run log.

        Updates that were repeated, after a checkpoint was loaded, are left out as in a run log.
        """
        query = select(_VALUES.c.readings).where(self._is_of(_VALUES, run_id)).order_by(_VALUES.c.number.desc())
        with self._engine.connect() as connection:
            newest_first = [decode(text, PostedReadings).line() for text in connection.execute(query).scalars()]
        return LoggedRun(tuple(_without_repeated(newest_first))[::-1], 0, 0)

    def _stored(self, connection: Connection, run_id: str) -> StoredRun | None:
        row = connection.execute(select(_RUNS).where(self._is_of(_RUNS, run_id))).mappings().one_or_none()
        return None if row is None else _run_of(row)

    def _is_of(self, table: Table, run_id: str) -> ColumnElement[bool]:
        """Return the condition that a row is of this run of this service."""
        return (table.c.service == self._service) & (table.c.id == run_id)


def _run_of(row: RowMapping) -> StoredRun:
    documents = {name: msgspec.json.decode(row[name]) for name in ("newest", "seconds_by_precision")}
    return msgspec.convert({str(name): documents.get(name, value) for name, value in row.items()}, StoredRun)


def _seconds_by_precision(run: StoredRun | None, new: Sequence[PostedReadings]) -> dict[Precision, float]:
    """Return the run's seconds with those between the new metrics. A change of precision has metrics of its own."""
    seconds = {} if run is None else dict(run.seconds_by_precision)
    before = None if run is None else run.newest
    for readings in new:
        if before is not None and before.elapsed_seconds is not None and readings.elapsed_seconds is not None:
            passed = max(0.0, readings.elapsed_seconds - before.elapsed_seconds)
            seconds[before.precision] = seconds.get(before.precision, 0.0) + passed
        before = readings
    return seconds


def _without_repeated(newest_first: Sequence[Line]) -> Iterator[Line]:
    earliest = math.inf
    for line in newest_first:
        if line.update <= earliest:
            earliest = line.update
            yield line


def prometheus_text(store: RunStore) -> str:
    """Return the newest metrics of live runs in Prometheus' text format."""
    live = [(_labels(run), run.newest) for run in store.runs() if run.is_live]
    lines = []
    for field, metric in METRICS.items():
        if field == "precision":
            continue
        name = f"autotune_amp_run_{metric.name.removeprefix(PREFIX)}" + "_total" * metric.is_count
        values = [(labels, getattr(newest, field)) for labels, newest in live]
        samples = [f"{name}{labels} {value}" for labels, value in values if value is not None]
        if samples:
            kind = "counter" if metric.is_count else "gauge"
            lines += [f"# HELP {name} {metric.description}", f"# TYPE {name} {kind}", *samples]
    return "".join(f"{line}\n" for line in lines)


def _labels(run: StoredRun) -> str:
    escaped = run.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{{run="{run.id}",name="{escaped}",precision="{run.newest.precision}"}}'


def _post_schema() -> dict[str, object]:
    """Return the OpenAPI description of the body of a post, without references."""
    _, schemas = msgspec.json.schema_components((RunPost,))
    schemas["RunPost"]["properties"]["values"]["items"] = schemas["PostedReadings"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schemas["RunPost"]}}}}


async def _body(request: Request) -> bytes:
    return await request.body()


def router(store: RunStore, caller: Callable[..., str]) -> APIRouter:
    """Return the routes of the runs in `store`. `caller` is a dependency that returns the identity of who asks.

    Everyone can see all runs. The routes raise errors of `AutotuneAmpError`, which the application answers.
    """
    routes = APIRouter(prefix="/runs", tags=["runs"])

    def known(run_id: str) -> StoredRun:
        run = store.run(run_id) if _RUN_ID.fullmatch(run_id) else None
        if run is None:
            raise UnknownError("There is no run of this ID.", "GET /runs lists the runs that are kept.")
        return run

    @routes.get("")
    def list_runs() -> Response:
        """Return all runs with their newest metrics, the one heard of last first."""
        return _json([run.summary() for run in store.runs()])

    @routes.post("/{run_id}", status_code=204, openapi_extra=_post_schema())
    def post_metrics(
        run_id: str, owner: Annotated[str, Depends(caller)], body: Annotated[bytes, Depends(_body)]
    ) -> Response:
        """Store metrics of a run. Its first post begins it, with an id of 32 hexadecimal digits of its own choice."""
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidRequestError("The run's ID is not of 32 hexadecimal digits.", "Post with the sink http().")
        try:
            post = decode(body, RunPost)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                f"The body is not valid: {cause(error)}.", "Post with the sink http()."
            ) from error
        store.append(run_id, owner, post)
        return Response(status_code=204)

    @routes.get("/{run_id}")
    def show_run(run: Annotated[StoredRun, Depends(known)]) -> Response:
        """Return a run with its newest metrics, its seconds in each precision and its moves."""
        moves = [msgspec.to_builtins(move) for move in store.log(run.id).moves]
        return _json(run.summary() | {"moves": moves})

    @routes.get("/{run_id}/page")
    def show_page(request: Request, run: Annotated[StoredRun, Depends(known)]) -> Response:
        """Return the page of a run, which reloads itself."""
        tag = f'"{run.newest.number}"'
        headers = {"ETag": tag, **_PAGE_HEADERS}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return HTMLResponse(run_page(store.log(run.id), run.name, RELOAD_SECONDS), headers=headers)

    return routes


def _json(document: object) -> Response:
    return Response(msgspec.json.encode(document), media_type="application/json")

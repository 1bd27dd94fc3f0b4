"""Routes of a service, as a FastAPI application behind its gate. The page /docs lists them."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, TypeAlias, get_args

import msgspec
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from autotune_amp import __version__
from autotune_amp.core.documents import decode
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, StudyError
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.service_address import REQUEST_ID_HEADER
from autotune_amp.search.answer.decide import rerank_with_options
from autotune_amp.search.storage.database import study_error
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.service.docs_page import PAGE_HEADERS, docs_page
from autotune_amp.service.jobs import WAITING, ForbiddenError, QueueFullError, Search, State, UnknownError
from autotune_amp.service.runs import RunStore, prometheus_text, router
from autotune_amp.service.searching import OptionError, SearchThread, checked_option, error_fields, server_sent_event

_FOLLOW_SECONDS = 0.5  # between two looks for new events
_QUIET_SECONDS = 15.0  # without an event, after which a comment keeps the connection
_RETRY_SECONDS = 30  # for a client whose search has no place in the queue
_RequestId: TypeAlias = Annotated[str | None, Header(alias=REQUEST_ID_HEADER, pattern="^[0-9a-f]{32}$")]
_LOW_PRECISIONS = ("bf16", "fp16", "fp8")
_STATUSES: dict[type[AutotuneAmpError], int] = {
    UnknownError: 404,
    ForbiddenError: 403,
    QueueFullError: 429,
    StudyError: 503,  # the database is away, or records are
}


class Options(BaseModel):
    """Options of a search, as those of `autotune-amp search`. The target's limits hold for `budget` and `memory_limit`.

    `budget` is in seconds; `batch_size` is "LOW:HIGH"; `memory_limit` is a size such as "16GiB", or bytes. `fresh`
    repeats measurements that exist already; without it, those of the unchanged program are used.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    budget: float | None = None
    trials: int | None = None
    precision: str | list[str] | None = None
    batch_size: str | None = None
    effective_batch_size: int | str | None = None
    try_: Annotated[str | list[str] | None, Field(alias="try")] = None
    memory_limit: int | str | None = None
    memory_fraction: float | None = None
    objective: str | None = None
    steps: int | None = None
    samples: int | None = None
    price_per_hour: float | None = None
    seed: int | None = None
    fresh: bool = False


class SearchRequest(BaseModel):
    """Request for a search of a target of the service."""

    model_config = ConfigDict(extra="forbid", strict=True)

    target: str
    options: Options = Options()


class Ranking(BaseModel):
    """Limits and objective by which a finished search is ranked again; options as those of `autotune-amp show`."""

    model_config = ConfigDict(extra="forbid")

    precision_allowed: list[str] | None = None
    memory_limit: str | None = None
    objective: str | None = None
    steps: int | None = None
    samples: int | None = None
    price_per_hour: float | None = None


class JsonResponse(Response):
    """Response with bytes of JSON."""

    media_type = "application/json"


def error_response(error: AutotuneAmpError, status: int, field: str | None = None) -> JsonResponse:
    """Return an error as JSON: its kind, message and next step, and the field of the request that is wrong."""
    headers = {"Retry-After": str(_RETRY_SECONDS)} if status in (429, 503) else None
    return JsonResponse(msgspec.json.encode({"error": error_fields(error), "field": field}), status, headers)


def caller(request: Request) -> str:
    """Return the name of the caller that the gate has let through."""
    name: str = request.state.caller
    return name


def caller_of_request(request: Request, request_id: str | None) -> str:
    """Return the name of the caller, and after a space the ID that its client gave its request, if it has one."""
    return caller(request) if request_id is None else f"{caller(request)} {request_id}"


def create_app(searches: SearchThread, runs: RunStore) -> FastAPI:
    """Return the application that serves these searches and training runs."""
    summary = "Searches on request, and what was measured."
    app = FastAPI(title="autotune_amp", version=__version__, summary=summary, docs_url=None, redoc_url=None)
    targets = searches.settings.targets

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(request: Request, error: RequestValidationError) -> JsonResponse:  # noqa: ARG001
        found = error.errors()[0]
        # A value of one of several types has an error for each; the name of the type is no part of the field.
        path = [str(part) for part in found["loc"][1:] if str(part) not in ("str", "int", "list[str]")]
        field = ".".join(path) or "body"
        invalid = InvalidRequestError(f"{field}: {found['msg']}.", "The page /docs lists the fields.")
        return error_response(invalid, 422, field)

    @app.exception_handler(HTTPException)
    async def refuse_unknown(request: Request, error: HTTPException) -> JsonResponse:  # noqa: ARG001
        unknown = InvalidRequestError(f"{error.detail}.", "The page /docs lists the requests.")
        return error_response(unknown, error.status_code)

    @app.exception_handler(AutotuneAmpError)
    async def refuse(request: Request, error: AutotuneAmpError) -> JsonResponse:  # noqa: ARG001
        if isinstance(error, OptionError):
            return error_response(error, 422, error.field)
        return error_response(error, next((code for kind, code in _STATUSES.items() if isinstance(error, kind)), 422))

    @app.exception_handler(SQLAlchemyError)
    async def refuse_without_database(request: Request, error: SQLAlchemyError) -> JsonResponse:
        database = searches.queue.engine.url.render_as_string(hide_password=False)  # study_error() hides it everywhere
        return await refuse(request, study_error(database, error))

    def found(id_: str) -> Search:
        search = searches.queue.searches.get(id_)
        if search is None:
            raise UnknownError("There is no search of this ID.", "POST /searches begins one.")
        return search

    @app.post("/searches", status_code=202)
    def submit(request: SearchRequest, asked_by: Request, request_id: _RequestId = None) -> Response:
        """Queue a search, or join the equal one that waits or runs. GET its Location to follow it."""
        if request.target not in targets:
            message = f"target is {request.target[:80]!r}."
            raise OptionError("target", message, f"Name one of {', '.join(targets)}.")
        options = request.options.model_dump(exclude_none=True, by_alias=True)
        is_fresh = options.pop("fresh")
        search = searches.submit(request.target, options, caller_of_request(asked_by, request_id), is_fresh=is_fresh)
        return JsonResponse(searches.document(search), 202, {"Location": f"/searches/{search.id}"})

    @app.get("/searches/{id_}")
    async def follow(id_: str) -> Response:
        """Return the state of a search, its best so far, and its recommendation once it is done."""
        return JsonResponse(searches.document(found(id_)))

    @app.delete("/searches/{id_}")
    def end(id_: str, asked_by: Request, request_id: _RequestId = None) -> Response:
        """Withdraw the request with the ID of the header; without one, all requests of your name for this search.

        The search ends, and keeps its best so far, once nobody waits for it.
        """
        search = searches.withdraw(found(id_), caller_of_request(asked_by, request_id))
        return JsonResponse(searches.document(search), 202)

    @app.get("/searches/{id_}/events")
    async def stream(id_: str, request: Request) -> Response:
        """Stream the events of a search (phase, trial, best, note, end) as server-sent events."""
        found(id_)
        last = re.fullmatch(r"(\d{1,9})-(\d{1,9})", request.headers.get("last-event-id", ""))
        repetition, number = (int(last[1]), int(last[2])) if last else (0, -1)
        return StreamingResponse(_events(searches, id_, repetition, number + 1), media_type="text/event-stream")

    @lru_cache(64)
    def ranked_again(id_: str, measured: float | None, asked: str) -> bytes:  # noqa: ARG001 - part of the key
        ranking = msgspec.json.decode(asked, type=dict[str, Any])
        precision = ranking.pop("precision_allowed", None)
        search = searches.queue.searches[id_]
        saved = decode(searches.measured_json(search) or b"", Recommendation)
        again = rerank_with_options(
            saved,
            StudyFolder(searches.studies, saved.search.study).recommendation_path,
            **ranking,
            precision=precision,
        )
        return msgspec.json.encode(answer_document(search, again))

    @app.get("/recommendations/{target}")
    def recommend(target: str, ranking: Annotated[Ranking, Query()]) -> Response:
        """Return what to train a target with, ranked again from what was measured, without running anything."""
        asked = ranking.model_dump(exclude_none=True)
        for name, value in asked.items():
            checked_option(name, "precision" if name == "precision_allowed" else name, value)
        search = searches.newest_measured(target, ranking.precision_allowed or PRECISIONS)
        return JsonResponse(ranked_again(search.id, search.measured, msgspec.json.encode(asked).decode()))

    @app.get("/hardware")
    async def hardware() -> Response:
        """Return each device of the targets: its memory, and what it supports, as a probe measured it."""
        searches.want_hardware()
        if searches.hardware is None:
            later = QueueFullError("The devices are probed once no search runs.", "Ask again later.")
            return error_response(later, 503)
        return JsonResponse(msgspec.json.encode({"hardware": searches.hardware}))

    @app.get("/healthz")
    async def health() -> Response:
        """Return whether the service runs searches. It needs no token."""
        is_well = searches.is_alive()
        return JsonResponse(msgspec.json.encode({"status": "ok" if is_well else "broken"}), 200 if is_well else 503)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Return the page that lists the routes."""
        return HTMLResponse(docs_page(app.openapi()), headers=PAGE_HEADERS)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return counters of the service and the newest metrics of live runs, as text for Prometheus."""
        text = metrics_text(searches, request.app.state.num_answers) + await asyncio.to_thread(prometheus_text, runs)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    app.include_router(router(runs, caller))
    return app


async def _events(searches: SearchThread, id_: str, repetition: int, first: int) -> AsyncIterator[bytes]:
    """Yield the events of a search until it is over or the service stops.

    They begin with number `first` of `repetition`, or with the first one of a later repetition; those of an earlier
    one, which are shown if a later one made no trial, are left out. A client that comes back names the last event it
    has. The end has no ID, since the search may go on.
    """
    quiet_seconds = 0.0
    while True:
        search = searches.queue.searches.get(id_)  # before its events, so that none is missed at its end
        events = None if search is None else searches.events(search)
        if events is not None and events.repetition > repetition:
            repetition, first = events.repetition, 0
        new = events.lines[first:] if events is not None and events.repetition == repetition else []
        if new:
            yield b"".join(new)
            first, quiet_seconds = first + len(new), 0.0
        if search is None or search.state not in WAITING or searches.is_stopping:
            state = None if search is None else search.state
            yield server_sent_event("end", msgspec.json.encode({"state": state}))
            return
        if quiet_seconds >= _QUIET_SECONDS:
            yield b": waiting\n\n"
            quiet_seconds = 0.0
        await asyncio.sleep(_FOLLOW_SECONDS)
        quiet_seconds += _FOLLOW_SECONDS


def answer_document(search: Search, recommendation: Recommendation) -> dict[str, Any]:
    """Return whether to train in mixed precision, with what, why, and the whole recommendation."""
    return {
        "target": search.target,
        "search": search.id,
        "measured": search.measured,
        "mixed_precision": recommendation.config.precision in _LOW_PRECISIONS,
        "answer": dict(recommendation.answer()),
        "recommendation": recommendation,
    }


def metrics_text(searches: SearchThread, num_answers: Mapping[int, int]) -> str:
    """Return the counters of a service in Prometheus' text format."""
    states = Counter(search.state for search in list(searches.queue.searches.values()))
    lines = ["# TYPE autotune_amp_requests_total counter"]
    lines += [f'autotune_amp_requests_total{{status="{status}"}} {num}' for status, num in sorted(num_answers.items())]
    lines += ["# TYPE autotune_amp_searches gauge"]
    lines += [f'autotune_amp_searches{{state="{state}"}} {states[state]}' for state in get_args(State)]
    lines += ["# TYPE autotune_amp_trials_total counter", f"autotune_amp_trials_total {searches.num_trials}"]
    return "\n".join([*lines, ""])

"""The page of the routes: all of them, with their fields, escaped and complete without any other file."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from autotune_amp.service.app import create_app
from autotune_amp.service.docs_page import docs_page
from autotune_amp.service.jobs import Queue
from autotune_amp.service.runs import RunStore
from autotune_amp.service.searching import SearchThread
from autotune_amp.service.settings import Settings


@pytest.fixture
def app(tmp_path: Path) -> Iterator[FastAPI]:
    queue = Queue(f"sqlite:///{tmp_path / 'queue.db'}", "test", max_queued=1)
    yield create_app(SearchThread(Settings(folder=str(tmp_path), targets={}), queue), RunStore(queue.engine, "test"))
    queue.close()


def get(app: FastAPI, path: str) -> tuple[int, dict[str, str], str]:
    """The status, headers and text of the application's answer, without a server."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(message["body"] for message in sent[1:]).decode()


def test_the_page_lists_the_routes_and_fields_and_loads_nothing(app: FastAPI) -> None:
    status, headers, page = get(app, "/docs")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(r"<script|<link|src=|https?:", page)
    for path, operations in app.openapi()["paths"].items():
        assert all(f"<h2>{method.upper()} {path}</h2>" in page for method in operations)
    for field in ("options.budget", "options.try", "precision_allowed", "values[].number", "name"):
        assert f"<td>{field}</td>" in page
    assert get(app, "/redoc")[0] == 404


def test_texts_are_escaped() -> None:
    app = FastAPI(title="<i>")

    class Body(BaseModel):
        field: str = Field(description="<b>")

    def route(body: Body) -> None:
        """<u>"""

    route.__annotations__["body"] = Body
    app.post("/<s>")(route)
    page = docs_page(app.openapi())
    assert not any(tag in page for tag in ("<i>", "<b>", "<u>", "<s>"))
    assert all(f"&lt;{letter}&gt;" in page for letter in "ibus")

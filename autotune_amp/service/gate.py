"""Gate of a service: who may ask, how often, how much, and how long; everything else is refused before it is read.

Uvicorn has no limit on the time that a request takes to arrive: `TimedProtocol` closes a connection whose headers take
too long, and the gate reads a body within its own limit of time and size before anything else sees it. Nor has it one
on the time that a client takes to read its answer: `TimedProtocol` has one.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from autotune_amp.service.settings import LOOPBACK

MAX_BODY_BYTES = 64 * 1024
ARRIVAL_SECONDS = 10.0  # for the headers of a request, and again for its body
ANSWER_SECONDS = 60.0  # except a stream of events; and again for the client to read what was sent
MAX_STREAMS = 16  # of events, open at once, for each caller
OPEN_PATH = "/healthz"
LOCAL_CALLER = "local"


class Refusal(Exception):  # noqa: N818 - an answer rather than a failure of the service
    """Answer to a request that does not get through the gate."""

    def __init__(self, status: int, message: str, next_step: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.body = msgspec.json.encode(
            {"error": {"kind": "refused", "message": message, "next_step": next_step}, "field": None}
        )


class RateLimit:
    """Rate of requests for each caller: `per_minute` on average, a tenth of that at once."""

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst = per_minute / 60, max(1.0, per_minute / 10)
        self._now = now
        self._left: dict[str, tuple[float, float]] = {}  # requests left, and when that was so

    def seconds_to_wait(self, caller: str) -> float:
        """Count a request of the caller; return 0 if it may go on, else the seconds until the next one may."""
        left, before = self._left.get(caller, (self._burst, self._now()))
        left = min(self._burst, left + (self._now() - before) * self._per_second)
        is_free = left >= 1
        self._left[caller] = (left - is_free, self._now())
        return 0.0 if is_free else (1 - left) / self._per_second


def caller_of(authorization: str, tokens: Mapping[str, str]) -> str | None:
    """Return the name of the caller of an Authorization header, None for a wrong or missing token.

    The token is a bearer token or, for browsers, the password of Basic authentication.
    """
    scheme, _, text = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            text = base64.b64decode(text, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeError):
            return None
    elif scheme.lower() != "bearer":
        return None
    matches = [name for token, name in tokens.items() if hmac.compare_digest(token.encode(), text.strip().encode())]
    return matches[0] if matches else None


class Gate:
    """ASGI application in front of another. It answers what it refuses, and counts all answers by their status.

    The name of the caller is `caller` in the request's state. Without `tokens` everybody on this machine may ask,
    except web pages of other sites.
    """

    def __init__(self, app: ASGIApp, tokens: Mapping[str, str], requests_per_minute: int) -> None:
        self._app, self._tokens = app, tokens
        self._rate = RateLimit(requests_per_minute)
        self._num_streams: Counter[str] = Counter()  # open ones, by caller
        self.num_answers: dict[int, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on with its whole body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def count(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self.num_answers[message["status"]] = self.num_answers.get(message["status"], 0) + 1
            await send(message)

        try:
            self._admit(scope)
            body = await _whole_body(scope, receive)
            if scope["path"].endswith("/events"):
                with self._stream(scope["state"]["caller"]):
                    await self._app(scope, _replayed(body, receive), count)
            else:
                await asyncio.wait_for(self._app(scope, _replayed(body, receive), count), ANSWER_SECONDS)
        except Refusal as refusal:
            await _refuse(refusal, count)
        except asyncio.TimeoutError:
            if not has_begun:
                await _refuse(Refusal(504, "The answer took too long.", "Ask again later."), count)

    def _admit(self, scope: Scope) -> None:
        """Set the caller of a request. Raises `Refusal` if it may not go on."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and origin.partition("://")[2] != host:
            raise Refusal(403, f"The page {origin} is of another site.", f"Open http://{host} itself.")
        if scope["path"] == OPEN_PATH:
            return
        # Without tokens, a page of a name that was made to resolve to this machine must not get through.
        if not self._tokens and re.sub(r":\d+$", "", host).strip("[]") not in LOOPBACK:
            raise Refusal(403, f"{host!r} is no name of this machine.", "Use 127.0.0.1 in the address.")
        caller = caller_of(headers.get("authorization", ""), self._tokens) if self._tokens else LOCAL_CALLER
        if caller is None:
            raise Refusal(
                401,
                "The token is missing or wrong.",
                "Send the header `Authorization: Bearer TOKEN`.",
                {"WWW-Authenticate": 'Basic realm="autotune-amp"'},
            )
        wait_seconds = self._rate.seconds_to_wait(caller)
        if wait_seconds:
            raise Refusal(
                429, "Too many requests.", "Wait as Retry-After says.", {"Retry-After": f"{int(wait_seconds) + 1}"}
            )
        scope.setdefault("state", {})["caller"] = caller

    @contextmanager
    def _stream(self, caller: str) -> Iterator[None]:
        """Count an open stream of the caller. Raises `Refusal` if there are `MAX_STREAMS` already."""
        if self._num_streams[caller] >= MAX_STREAMS:
            next_step = "Close one, or ask for the search's state instead."
            raise Refusal(429, "Too many streams are open.", next_step, {"Retry-After": "30"})
        self._num_streams[caller] += 1
        try:
            yield
        finally:
            self._num_streams[caller] -= 1


async def _whole_body(scope: Scope, receive: Receive) -> bytes:
    """Return the body of a request. Raises `Refusal` if it is too large or takes too long to arrive."""
    too_large = Refusal(413, "The body is too large.", f"Send {MAX_BODY_BYTES} bytes at most.", {"Connection": "close"})
    length = dict(scope["headers"]).get(b"content-length", b"0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise too_large

    async def read() -> bytes:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                raise too_large
        return body

    try:
        return await asyncio.wait_for(read(), ARRIVAL_SECONDS)
    except asyncio.TimeoutError:
        raise Refusal(408, "The body did not arrive in time.", "Send it at once.", {"Connection": "close"}) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body that was read, and then what comes after it."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(refusal: Refusal, send: Send) -> None:
    headers = {"Content-Type": "application/json", "Content-Length": str(len(refusal.body)), **refusal.headers}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": refusal.body})


class TimedProtocol(H11Protocol):
    """HTTP connection that is closed if the headers of a request take longer than `ARRIVAL_SECONDS`.

    It is also closed if the client does not read what was sent within `ANSWER_SECONDS`.
    """

    _header_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # writing is paused while anything waits for the client
        self._restart_timer()

    def data_received(self, data: bytes) -> None:
        """Wait for the rest of a request's headers, if they are not complete."""
        super().data_received(data)
        self._restart_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        super().connection_lost(exc)
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._end_reading_timer()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._reading_timer = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on once the client has read everything."""
        super().resume_writing()
        self._end_reading_timer()

    def _end_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _restart_timer(self) -> None:
        """Run the timer while a request's headers are not complete, from their first byte on."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        elif not is_answering and self._header_timer is None:
            self._header_timer = self.loop.call_later(ARRIVAL_SECONDS, self.transport.close)

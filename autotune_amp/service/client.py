"""Client of a service: asks for a search, follows it, and returns its recommendation. Only the standard library."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from http.client import HTTPException, InvalidURL
from typing import Any
from urllib.parse import quote

import msgspec

from autotune_amp.core.documents import decode
from autotune_amp.core.errors import AutotuneAmpError, FormatError, InvalidRequestError, RunnerError
from autotune_amp.core.recommendation import Recommendation, SearchInterruptedError
from autotune_amp.integrations.service_address import REQUEST_ID_HEADER, checked_address, request_headers, send
from autotune_amp.search.progress import Progress

_POLL_SECONDS, _MAX_POLL_SECONDS = 1.0, 5.0
_ANSWER_SECONDS = 70.0  # longer than the service's own limit
_PATIENCE_SECONDS = 60.0  # for a service that is started again, or has no place in its queue
_LATER = (429, 502, 503, 504)

# Options of a search that a service takes.
OPTIONS = (
    *("budget", "trials", "precision", "batch_size", "effective_batch_size", "try_", "memory_limit", "memory_fraction"),
    *("objective", "steps", "samples", "price_per_hour", "seed", "fresh"),
)


def recommendation_from(
    server: str, target: str, options: Mapping[str, Any], progress: Progress, token: str | None = None
) -> Recommendation:
    """Return the recommendation of the service at the URL `server` for its target `target`.

    `options` are those of `recommend_config` that are not left at their defaults. `token` is by default that of the
    environment variable AUTOTUNE_AMP_TOKEN. Ctrl-C withdraws the request. Raises `InvalidRequestError` for what the
    service refuses, `RunnerError` if it cannot be reached for a minute or the search fails, and
    `SearchInterruptedError` at Ctrl-C and if somebody ended the search.
    """
    not_taken = sorted(options.keys() - set(OPTIONS))
    if not_taken:
        raise InvalidRequestError(
            f"A service does not take {', '.join(not_taken)}.", f"Leave out all but {', '.join(OPTIONS)}."
        )
    connection = _Connection(server, token)
    asked = {name.rstrip("_"): value for name, value in options.items()}
    if isinstance(asked.get("batch_size"), tuple):
        asked["batch_size"] = ":".join(map(str, asked["batch_size"]))
    body = {"target": target, "options": asked}
    search = connection.ask("POST", "/searches", body)
    path = f"/searches/{quote(search['id'], safe='')}"
    phase = None
    poll_seconds = _POLL_SECONDS
    try:
        while search["state"] in ("queued", "running"):
            now = search["phase"] or _waiting(search["position"])
            if now != phase:
                progress.phase(now)
                phase = now
            time.sleep(poll_seconds)
            poll_seconds = min(1.2 * poll_seconds, _MAX_POLL_SECONDS)
            search = connection.ask("GET", path)
    except KeyboardInterrupt:
        connection.ask("DELETE", path)
        raise SearchInterruptedError(
            "Interrupted. The service ends the search unless others wait for it, and keeps its best.",
            "Ask again to continue it.",
            (),
            None,
        ) from None
    if search["state"] == "failed":
        raise RunnerError(f"The service's search failed: {search['error']['message']}", search["error"]["next_step"])
    best = search["recommendation"]
    try:
        recommendation = None if best is None else decode(json.dumps(best), Recommendation)
    except msgspec.MsgspecError as error:
        raise FormatError(
            f"The recommendation of {server} cannot be read: {error}.", "Use the service's version of autotune_amp."
        ) from error
    if search["state"] == "done" and recommendation is not None:
        return recommendation
    raise SearchInterruptedError("Somebody ended the search.", "Ask again to continue it.", (), recommendation)


def _waiting(position: int | None) -> str:
    """Return in words that a search waits, with its position in the queue, 0 for the next one; None if it starts."""
    return "starting" if position is None else f"waiting at place {position + 1} of the service's queue"


class _Connection:
    """Address of a service, the token that it asks for, and the ID of this client's request."""

    def __init__(self, server: str, token: str | None) -> None:
        self._server = checked_address(server)
        self._headers = {**request_headers(token), REQUEST_ID_HEADER: uuid.uuid4().hex}

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON answer to a request, which is sent again for a minute if the service has no time for it.

        A GET waits without end while the service answers that there were too many requests.
        """
        data = None if body is None else json.dumps(body).encode()
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            request = urllib.request.Request(self._server + path, data, self._headers, method=method)  # noqa: S310 - http
            try:
                with send(request, _ANSWER_SECONDS) as answer:
                    document: dict[str, Any] = json.load(answer)
                    return document
            except urllib.error.HTTPError as error:
                if error.code == 429 and method == "GET":
                    until = time.monotonic() + _PATIENCE_SECONDS
                elif error.code not in _LATER or time.monotonic() > until:
                    raise _refused(self._server, error) from None
                error.close()
                retry_after = error.headers.get("Retry-After", "")
                wait_seconds = int(retry_after) if retry_after.isdigit() else 0
                time.sleep(min(max(wait_seconds, _POLL_SECONDS), _PATIENCE_SECONDS))
            except (OSError, ValueError, HTTPException) as error:  # not reached, cut off, or not JSON
                if isinstance(error, InvalidURL) or time.monotonic() > until:
                    raise RunnerError(
                        f"The service at {self._server} does not answer: {error}.",
                        "Check the address, and that `autotune-amp serve` runs there.",
                    ) from error
                time.sleep(_POLL_SECONDS)


def _refused(server: str, error: urllib.error.HTTPError) -> AutotuneAmpError:
    """Return the error of a request that the service refused, with its own message and next step."""
    with error:
        try:
            refusal = json.load(error)["error"]
            return InvalidRequestError(f"{server} refuses: {refusal['message']}", str(refusal["next_step"]))
        except (OSError, ValueError, HTTPException, LookupError, TypeError):
            return RunnerError(f"{server} answers {error.code} {error.reason}.", "Check that this is the service.")

"""Requests to a service, `autotune-amp serve`, that give its token to nobody else: for the sink and for the client."""

from __future__ import annotations

import os
import re
import urllib.request
from typing import Any

from autotune_amp.core.errors import InvalidRequestError

REQUEST_ID_HEADER = "Autotune-Amp-Request"  # 32 hexadecimal digits by which a client withdraws only its own request
TOKEN_VARIABLE = "AUTOTUNE_AMP_TOKEN"  # noqa: S105 - the name of a variable


def checked_address(server: str) -> str:
    """Return the address of a service without a slash at its end.

    Raises `InvalidRequestError` for another kind of address and for one with a password, neither of which it shows.
    """
    if re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#@]*)?", server) is None:
        raise InvalidRequestError(
            "The server is not an address that begins with http:// or https:// and holds no password.",
            f"Give the address that `autotune-amp serve` prints, and the token by {TOKEN_VARIABLE}.",
        )
    return server.rstrip("/")


def request_headers(token: str | None) -> dict[str, str]:
    """Return the headers of a JSON request with a token: by default AUTOTUNE_AMP_TOKEN of the environment, none if
    that is empty.

    Raises `InvalidRequestError`, which does not show it, for a token that no header can hold.
    """
    token = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    if re.fullmatch(r"[\x21-\x7e]*", token) is None:
        raise InvalidRequestError(
            "The token of the service holds a space, a line break or a letter beyond ASCII.",
            "Pass the token as the service has it, without what surrounds it in its file.",
        )
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return headers


def send(request: urllib.request.Request, timeout_seconds: float) -> Any:
    """Send a request and return its open response. Raises `HTTPError` for a redirection too."""
    return urllib.request.build_opener(_NoRedirects).open(request, timeout=timeout_seconds)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirection: the token is for the server that was named."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, by which the answer is an error."""

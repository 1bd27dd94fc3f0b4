"""Command that serves searches to a team: serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from autotune_amp.cli.app import Json, option, serve_until_interrupted
from autotune_amp.core.errors import InvalidRequestError


def serve(
    config: Annotated[Path, option("FILE", "TOML file that names the targets, their limits and the tokens.")],
    as_json: Json = False,
) -> bytes:
    """Answer a team's requests for searches over HTTP, until Ctrl-C or SIGTERM.

    Only this machine can connect, unless the file says otherwise and there is a token in AUTOTUNE_AMP_TOKEN or a file.
    Searches that run are ended with their best saved, and go on when the service is started again. Needs the extra
    `serve`.
    """
    from autotune_amp.service.settings import load_settings, read_tokens

    try:
        from autotune_amp.service.server import open_service
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"A service needs the package {error.name}, which is not installed.",
            "Run `pip install 'autotune_amp[serve]'`.",
        ) from error
    settings = load_settings(config)
    with open_service(settings, read_tokens(settings, os.environ)) as service:
        return serve_until_interrupted(service, as_json, "Ctrl-C stops it; searches that run save their best.")

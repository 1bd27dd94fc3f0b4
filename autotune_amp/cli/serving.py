"""Command that serves searches to a team: serve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from autotune_amp.cli.app import Json, option
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.report.output import write_message, write_output


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
        write_output((json.dumps({"format": 1, "url": service.url}) if as_json else service.url).encode() + b"\n")
        if not as_json:
            write_message("Ctrl-C stops it; searches that run save their best.\n")
        try:
            service.serve_forever()
        except KeyboardInterrupt:
            return b""
    return b""

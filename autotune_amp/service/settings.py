"""Settings of a service, from a TOML file: its targets with their limits, its address, its tokens.

    host = "0.0.0.0"                   # the default is 127.0.0.1
    token_file = "tokens"              # lines "NAME TOKEN"; or the environment variable AUTOTUNE_AMP_TOKEN
    database = "postgresql://amp@host/queue"    # the default is a file in `folder`
    name = "gpu-host"                  # of this service alone in `database`; the default is the host and `folder`

    [targets.mlp]
    workload = "train.py:workload"     # or: command = "python train.py --bs {batch_size=32}"
    folder = "/home/team/mlp"          # its working directory
    devices = "all"                    # or device = "cuda:0"; of a command, the GPUs that its processes use together
    budget = 900                       # the most seconds that a request may ask for
    memory_limit = "16GiB"             # the most memory that a trial may use

Paths are relative to the file's folder.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.documents import cause, read_file
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.service_address import TOKEN_VARIABLE
from autotune_amp.search.options import DEFAULT_BUDGET_SECONDS, SearchOptions

_MIN_TOKEN_CHARACTERS = 16
LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Whole = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A training run that may be searched: a Workload or a command, its working directory, devices and limits.

    `budget` is the most seconds of a search, `memory_limit` the most memory of a trial; a request may ask for less.
    """

    workload: str | None = None
    command: str | tuple[str, ...] | None = None
    values: dict[str, str] = {}
    files: tuple[str, ...] = ()
    folder: str = "."
    device: str = "auto"
    devices: str | tuple[int, ...] | None = None
    budget: float = DEFAULT_BUDGET_SECONDS
    memory_limit: str | int | None = None

    @property
    def limits(self) -> SearchOptions:
        """Return the options that the file sets. Raises `InvalidRequestError` for a wrong one."""
        return SearchOptions.from_user(
            device=self.device, devices=self.devices, budget=self.budget, memory_limit=self.memory_limit
        )

    def arguments(self) -> list[str]:
        """Return the arguments of `autotune-amp search` that name the training run; they come last."""
        if self.command is None:
            return [str(self.workload)]
        values = [word for name, value in self.values.items() for word in ("--value", f"{name}={value}")]
        files = [word for file in self.files for word in ("--file", file)]
        return [*values, *files, "--", *CommandTemplate.of(self.command).arguments]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a service, with absolute paths once they are loaded.

    `folder` holds the studies, results and by default the queue; `database` is an SQLAlchemy URL in its place, where
    `name` tells this service from others. In a container, whose host name changes, only a name of its own finds the
    queue again.
    `max_queued` searches wait at most. Each token may send `requests_per_minute`.
    """

    targets: dict[str, Target]
    host: str = "127.0.0.1"
    port: _Port = 8321
    token_file: str | None = None
    folder: str = "service"
    database: str | None = None
    name: _Name | None = None
    max_queued: _Whole = 16
    requests_per_minute: _Whole = 600

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in LOOPBACK


def load_settings(path: Path) -> Settings:
    """Read and check a settings file. Raises `InvalidRequestError` that names what is wrong in it."""
    try:
        settings = msgspec.toml.decode(read_file(path), type=Settings)
    except OSError as error:
        raise InvalidRequestError(
            f"{path} cannot be read: {cause(error)}.",
            "Name a TOML file as `pydoc autotune_amp.service.settings` shows.",
        ) from error
    except ImportError as error:  # Python 3.10 has no module for TOML
        raise InvalidRequestError(
            "Python 3.10 reads TOML with the package tomli, which is not installed.",
            "Run `pip install 'autotune_amp[serve]'`.",
        ) from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise _invalid(path, cause(error)) from error
    if not settings.targets:
        raise _invalid(path, "it names no target")
    home = path.absolute().parent
    targets = {name: _checked(path, home, name, target) for name, target in settings.targets.items()}
    token_file = None if settings.token_file is None else str(home / settings.token_file)
    return msgspec.structs.replace(settings, targets=targets, folder=str(home / settings.folder), token_file=token_file)


def _invalid(path: Path, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{path} is not valid: {reason.rstrip('.')}.", "See `python -m pydoc autotune_amp.service.settings`."
    )


def _checked(path: Path, home: Path, name: str, target: Target) -> Target:
    """Return the target with an absolute folder."""
    where = f"targets.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][\w-]{0,63}", name, re.ASCII):
        raise _invalid(path, f"{where} has a name that is not of letters, digits, '_' and '-'")
    if (target.workload is None) == (target.command is None):
        raise _invalid(path, f"{where} must have either workload or command")
    if target.workload is not None and not re.fullmatch(r"[^-:][^:]*:\w+", target.workload):
        raise _invalid(path, f"{where}.workload is {target.workload!r}, which is not FILE.py:FUNCTION")
    folder = home / target.folder
    if not folder.is_dir():
        raise _invalid(path, f"{where}.folder is {target.folder!r}, which is not a folder")
    try:
        _ = target.limits
        if target.command is not None:
            CommandTemplate.of(target.command, values=target.values)
    except (InvalidRequestError, ValueError) as error:  # the latter for an open quotation mark
        raise _invalid(path, f"{where}: {getattr(error, 'message', error)}") from error
    return msgspec.structs.replace(target, folder=str(folder.resolve()))


def read_tokens(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the caller of each token; empty for a service that asks for none.

    A line of the file is "NAME TOKEN", or a token alone, whose caller is "team", as is that of the environment's.
    Raises `InvalidRequestError` if others could read the file, for a short token, and if a service that other machines
    can reach has no token.
    """
    lines = [environment[TOKEN_VARIABLE]] if environment.get(TOKEN_VARIABLE) else []
    if settings.token_file is not None:
        file = Path(settings.token_file)
        try:
            mode = stat.S_IMODE(file.stat().st_mode)
            lines += read_file(file).decode().splitlines()
        except (OSError, UnicodeError) as error:
            raise InvalidRequestError(
                f"The token file {file} cannot be read: {cause(error)}.", "Write one line with a token into it."
            ) from error
        if mode & 0o077:
            raise InvalidRequestError(
                f"The token file {file} has mode {mode:04o}, so that others may read it.", f"Run `chmod 600 {file}`."
            )
    words = [line.split() for line in lines if line.strip()]
    if any(len(line) > 2 or len(line[-1]) < _MIN_TOKEN_CHARACTERS for line in words):
        raise InvalidRequestError(
            f"A token has fewer than {_MIN_TOKEN_CHARACTERS} characters, or its line is not NAME TOKEN.",
            "Make one with `python -c 'import secrets; print(secrets.token_urlsafe())'`.",
        )
    if not words and not settings.is_local:
        raise InvalidRequestError(
            f"host is {settings.host}, which other machines can reach, and there is no token.",
            f"Set {TOKEN_VARIABLE} or token_file, or leave host out.",
        )
    return {line[-1]: line[0] if len(line) == 2 else "team" for line in words}

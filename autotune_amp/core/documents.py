"""Safe reading of files that may come from others: only regular files are read, and all decoding errors are alike."""

from __future__ import annotations

import errno
import os
import stat
from typing import Annotated, TypeVar

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.text import one_line

# Numeric ranges enforced while decoding a document; the bounds keep sums and ratios of the values finite.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Integer = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Positive = Annotated[float, msgspec.Meta(gt=1e-30, le=1e30)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Number = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]

Kind = TypeVar("Kind")


def open_regular(path: str, flags: int) -> int:
    """Open the regular file at `path` and return its descriptor: an `opener` for Python's ``open``.

    Raises `OSError` for a folder, and for a FIFO, a socket or a device, which could block or never end.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file", path)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a regular file. Raises `OSError` for any other kind of file and for an invalid path."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read()
    except ValueError as error:  # for a NUL byte in the path
        raise OSError(errno.EINVAL, f"it is not a valid file name ({error})") from error


def raise_if_exists(option: str, path: str | os.PathLike[str] | None) -> None:
    """Raise `InvalidRequestError` if `path`, the output file given by `option`, exists already; None is accepted."""
    if path is not None and os.path.lexists(path):
        raise InvalidRequestError(
            f"{option} is {str(path)!r}, which exists and is not overwritten.", "Name a new file."
        )


def cause(error: Exception) -> str:
    """Return the reason in `error`, raised while a file was read, written or decoded, without the file's name."""
    return one_line(str(getattr(error, "strerror", None) or error))


def decode(text: bytes | str, kind: type[Kind] | msgspec.json.Decoder[Kind]) -> Kind:
    """Decode a JSON document into `kind`, a struct or a decoder for a union of structs.

    Raises `msgspec.ValidationError` for an invalid value, and `msgspec.DecodeError` for text that is not JSON, not
    UTF-8 or nested too deeply.
    """
    try:
        if isinstance(kind, msgspec.json.Decoder):
            return kind.decode(text)
        return msgspec.json.decode(text, type=kind)
    except InvalidRequestError as error:
        raise msgspec.ValidationError(error.message.rstrip(".")) from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
    except (UnicodeError, ValueError, OverflowError) as error:
        if isinstance(error, msgspec.MsgspecError):
            raise
        raise msgspec.DecodeError(str(error)) from error


def convert(value: object, kind: type[Kind]) -> Kind:
    """Convert already decoded data to `kind`. Raises `msgspec.ValidationError` for an invalid value."""
    try:
        return msgspec.convert(value, kind)
    except InvalidRequestError as error:
        raise msgspec.ValidationError(error.message.rstrip(".")) from error

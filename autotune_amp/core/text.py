"""Formats numbers and untrusted text for people. ASCII only, so that every terminal and encoding can show it."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable
from fractions import Fraction

_OUTCOMES = {
    "oom": "out of memory",
    "timeout": "timed out",
    "nonfinite": "non-finite loss",
    "crash": "crashed",
    "workload_error": "workload error",
    "untried": "not tried",
}

# Arguments of the functions in api.py, by the option of the command line that they correspond to.
_RENAMED_OPTIONS = {"batches": "num_batches", "for": "device", "fresh": "fresh=True", "try": "try_"}
_SAME_OPTIONS = (
    *("baseline", "batch-size", "budget", "device", "devices", "effective-batch-size", "fit", "memory-fraction"),
    *("memory-limit", "objective", "out", "precision", "price-per-hour", "ranks", "ray", "samples", "seed", "server"),
    *("snapshot", "steps", "storage", "study", "trace", "trials"),
)
ARGUMENTS = {name: name.replace("-", "_") for name in _SAME_OPTIONS} | _RENAMED_OPTIONS
_OPTION = re.compile(
    rf"(`[^`]*`)|(?<![\w'\"\[-])--({'|'.join(sorted(ARGUMENTS, key=len, reverse=True))})(?![\w-])"
    r"(?: (\d+(?![\w:.]*\w)|(?:cpu|free|none|energy|memory|speed|tokens)\b))?"
)


def in_python(words: str) -> str:
    """Return a message with the options of the command line replaced by Python arguments: ``budget=30``, ``try_``.

    Commands in backticks stay as they are.
    """

    def argument(match: re.Match[str]) -> str:
        command, option, value = match.groups()
        if command is not None:
            return str(command)
        assignment = "" if value is None else f"={value}" if value.isdigit() else f'="{value}"'
        return ARGUMENTS[option] + assignment

    return _OPTION.sub(argument, words)


def number(value: float) -> str:
    """Format `value` with three significant digits: ``1,234``, ``41.5``, ``0.852``."""
    for limit, decimals in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= limit:
            return f"{value:,.{decimals}f}"
    return f"{value:.3g}"


def exact(loss_scale: float) -> str:
    """Format a loss scale with every digit, or as a power of two if below 1: ``1048576``, ``2^-10``."""
    if loss_scale == int(loss_scale):
        return str(int(loss_scale))
    mantissa, exponent = math.frexp(loss_scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else repr(loss_scale)


def rate(samples_per_second: float) -> str:
    """Format a throughput: ``412 samples/s``."""
    return f"{number(samples_per_second)} samples/s"


def token_rate(tokens_per_second: float) -> str:
    """Format a throughput: ``1,240 tokens/s``."""
    return f"{number(tokens_per_second)} tokens/s"


def size(num_bytes: float) -> str:
    """Format a number of bytes: ``612 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{number(num_bytes)} {unit}"


SIZE_FORMATS = "a size such as 16GiB, 16GB, 16384MiB or a number of bytes"  # the inputs that `parse_size` accepts
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt]?)(i?)b)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str | int) -> int:
    """Return the bytes of a size: ``16GiB`` (1024^3), ``16GB`` (1000^3), ``16384MiB``, ``1.5 GiB``, or plain bytes.

    Raises `ValueError` for anything else, and for less than 1 byte.
    """
    match = None if isinstance(text, bool) else _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError(text)
    figure, letter, is_binary = match.groups()
    if not letter and ("." in figure or is_binary):
        raise ValueError(text)
    power = "kmgt".index(letter.lower()) + 1 if letter else 0
    num_bytes = int(Fraction(figure) * (1024 if is_binary else 1000) ** power)
    if num_bytes < 1:
        raise ValueError(text)
    return num_bytes


def duration(seconds: float) -> str:
    """Format a duration: ``77.6 ms``, ``3.1 s``, ``42 s``, ``1 min 30 s``, ``2 h 05 min``."""
    if seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def clock(seconds: float) -> str:
    """Format a countdown in minutes and seconds: ``1:05``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def flops(flops_per_second: float) -> str:
    """Format a rate of floating-point operations: ``1.24 TFLOP/s``."""
    unit, scale = next((pair for pair in (("T", 1e12), ("G", 1e9)) if flops_per_second >= pair[1]), ("M", 1e6))
    return f"{number(flops_per_second / scale)} {unit}FLOP/s"


def times(ratio: float) -> str:
    """Format a ratio: ``1.34x``."""
    return f"{ratio:.2f}x"


def percent(share: float) -> str:
    """Format a share with two significant digits, and no decimals from 99.5 % on: ``0.12 %``, ``41 %``, ``103 %``."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def count(num: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: ``1 trial``, ``3 trials``."""
    return f"{num} {noun if num == 1 else plural or noun + 's'}"


def outcome_name(status: str) -> str:
    """Return a failure's kind or a candidate's status in words: ``out of memory`` for ``oom``."""
    return _OUTCOMES.get(status, status)


def one_line(text: str) -> str:
    """Put untrusted text on one line, without control characters or lone surrogates that a terminal could act on."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def module_names(names: Iterable[str]) -> str:
    """List module names on one line; the empty name is the model itself."""
    return one_line(", ".join(name or "the model itself" for name in names))


def printable(text: str) -> str:
    """Escape the control characters of untrusted text, except line breaks and tabs."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shell_line(arguments: Iterable[str]) -> str:
    """Join arguments into a line for bash or zsh, as shlex.join does, but control characters as ``$'...'``."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in arguments)


def _escaped(word: str) -> str:
    short = {"\n": "\\n", "\t": "\\t", "'": "\\'", "\\": "\\\\"}
    octal = {c: "".join(f"\\{byte:03o}" for byte in os.fsencode(c)) for c in word if not c.isprintable()}
    return "".join((octal | short).get(c, c) for c in word)


def sentence(text: str) -> str:
    """Return `text` with exactly one full stop."""
    return f"{text.rstrip('.')}."

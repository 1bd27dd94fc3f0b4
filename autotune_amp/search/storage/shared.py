"""What an Optuna storage keeps for others who use it: the answer of each search, found by what it holds for.

The answers for one code on one model of device stand in a study without trials, one for each kind of request. What is
read is data: command, options and target of an answer are the reader's own.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from autotune_amp.core.documents import decode
from autotune_amp.core.hardware import LEAST_MEMORY_SHARE
from autotune_amp.core.recommendation import FORMAT, Fingerprint, Recommendation
from autotune_amp.search.storage.study import attributes, set_attribute

_MIN_HIDDEN = 8  # characters of a word of the command: shorter ones are words of ours, such as bf16

# In which devices of one model differ. Memory is compared on its own: two hosts never have the same to the byte.
_OF_ONE_DEVICE = ("device uuid", "device index", "device total_memory_bytes")


class Answer(NamedTuple):
    """A finished search's, the host that it ran on and when (ISO 8601, UTC). `kind` is that of the request."""

    kind: str
    host: str
    time: str
    recommendation: Recommendation

    @property
    def origin(self) -> str:
        """Where and when it was measured, in words."""
        return f"on {self.host}, {self.time[:10]}"


def answers(storage: str, fingerprint: Fingerprint) -> list[Answer]:
    """Those for the same code on a device of the same model, the latest first. Raises `StudyError`.

    What this version cannot read is left out.
    """
    found = []
    for kind, kept in attributes(storage, _name(fingerprint)).items():
        try:
            recommendation = decode(kept["recommendation"], Recommendation)
        except (msgspec.MsgspecError, KeyError, TypeError):
            continue
        if recommendation.format <= FORMAT:
            found.append(Answer(kind, str(kept.get("host")), str(kept.get("time")), recommendation))
    return sorted(found, key=lambda answer: answer.time, reverse=True)


def answer_for(answers: list[Answer], fingerprint: Fingerprint) -> Answer | None:
    """The one that holds for a request on another host of the same kind too, None where there is none. Pure."""
    memory_bytes = int(fingerprint.parts["device total_memory_bytes"].removeprefix("="))
    kind = _digest(_kind(fingerprint))
    for answer in answers:
        measured_with = answer.recommendation.hardware.identity.total_memory_bytes
        if answer.kind == kind and memory_bytes >= LEAST_MEMORY_SHARE * measured_with:
            return answer
    return None


def keep(storage: str, recommendation: Recommendation) -> None:
    """Keep the answer of a finished search for others, without its command. Raises `StudyError`."""
    found = recommendation.fingerprint
    kept = {
        "host": platform.node(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recommendation": _without_command(recommendation).to_json(),
    }
    set_attribute(storage, _name(found), _digest(_kind(found)), kept)


def _without_command(recommendation: Recommendation) -> Recommendation:
    """The recommendation without the command and its settings files, which may hold secrets, and without the target.

    Their words of `_MIN_HIDDEN` characters or more are hidden in its sentences too.
    """
    line, target = recommendation.launch_line, recommendation.target
    texts = [] if line is None else [*line.arguments, *line.values.values(), *line.files, *line.files.values()]
    said = [*texts, *([] if target is None else [target])]
    words = {word for text in said for word in (text, *text.split(), *re.split(r"[\s=:,'\"]+", text))}
    hidden = sorted((word for word in words if len(word) >= _MIN_HIDDEN), key=len, reverse=True)
    bare = replace(
        recommendation,
        target=None,
        launch_line=None,
        command=None,
        fingerprint=replace(recommendation.fingerprint, parts={}, unknown=()),
        workload=recommendation.workload and replace(recommendation.workload, loader=None),
    )
    return msgspec.convert(_hiding(msgspec.to_builtins(bare), hidden), Recommendation)


def _hiding(value: Any, words: Sequence[str]) -> Any:
    """Plain data with each of these words hidden in its sentences; what has no blank is a name or a number."""
    if isinstance(value, dict):
        return {name: _hiding(each, words) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hiding(each, words) for each in value]
    if isinstance(value, str) and " " in value:
        for word in words:
            value = value.replace(word, "...")
    return value


def _kind(fingerprint: Fingerprint) -> dict[str, str]:
    return {name: part for name, part in fingerprint.parts.items() if name not in _OF_ONE_DEVICE}


def _name(fingerprint: Fingerprint) -> str:
    """Of the study with the answers for the same code, asked for in any way."""
    alike = {name: part for name, part in _kind(fingerprint).items() if not name.startswith("option ")}
    return f"answers-{_digest(alike)}"


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:16]

"""Recommendations that an Optuna storage keeps for others who use it, found by fingerprint.

The recommendations for one code on one device model are attributes of a study without trials, one for each kind of
request. They are read as data: command, options and target of a returned recommendation are the reader's own.
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
from autotune_amp.search.storage.database import attributes, set_attribute

_MIN_HIDDEN = 8  # least length of a word of the command to hide: shorter words may be ours, such as bf16

# Parts of a fingerprint that differ between devices of one model. Memory is compared separately: no two hosts have the
# same to the byte.
_OF_ONE_DEVICE = ("device uuid", "device index", "device total_memory_bytes")


class SharedRecommendation(NamedTuple):
    """Recommendation of a finished search, with its host and time (ISO 8601, UTC). `kind` is a hash of the request."""

    kind: str
    host: str
    time: str
    recommendation: Recommendation

    @property
    def origin(self) -> str:
        """Return where and when it was measured, in words."""
        return f"on {self.host}, {self.time[:10]}"


def shared_recommendations(storage: str, fingerprint: Fingerprint) -> list[SharedRecommendation]:
    """Return the recommendations for the same code on a device of the same model, the latest first. Raises
    `StudyError`.

    Those in a format that this version cannot read are left out.
    """
    found = []
    for kind, kept in attributes(storage, _name(fingerprint)).items():
        try:
            recommendation = decode(kept["recommendation"], Recommendation)
        except (msgspec.MsgspecError, KeyError, TypeError):
            continue
        if recommendation.format <= FORMAT:
            found.append(SharedRecommendation(kind, str(kept.get("host")), str(kept.get("time")), recommendation))
    return sorted(found, key=lambda answer: answer.time, reverse=True)


def matching_recommendation(shared: list[SharedRecommendation], fingerprint: Fingerprint) -> SharedRecommendation | None:
    """Return the answer that holds for the same request on another host of the same kind, or None. Pure."""
    memory_bytes = int(fingerprint.parts["device total_memory_bytes"].removeprefix("="))
    kind = _digest(_kind(fingerprint))
    for answer in shared:
        measured_with = answer.recommendation.hardware.identity.total_memory_bytes
        if answer.kind == kind and memory_bytes >= LEAST_MEMORY_SHARE * measured_with:
            return answer
    return None


def store_recommendation(storage: str, recommendation: Recommendation) -> None:
    """Store the recommendation of a finished search for others, without its command. Raises `StudyError`."""
    found = recommendation.fingerprint
    kept = {
        "host": platform.node(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recommendation": _without_command(recommendation).to_json(),
    }
    set_attribute(storage, _name(found), _digest(_kind(found)), kept)


def _without_command(recommendation: Recommendation) -> Recommendation:
    """Return the recommendation without its target, command and settings files, which may hold secrets.

    Words of theirs of at least `_MIN_HIDDEN` characters are hidden in its sentences too.
    """
    line, target = recommendation.command_template, recommendation.target
    texts = [] if line is None else [*line.arguments, *line.values.values(), *line.files, *line.files.values()]
    said = [*texts, *([] if target is None else [target])]
    words = {word for text in said for word in (text, *text.split(), *re.split(r"[\s=:,'\"]+", text))}
    hidden = sorted((word for word in words if len(word) >= _MIN_HIDDEN), key=len, reverse=True)
    bare = replace(
        recommendation,
        target=None,
        command_template=None,
        command=None,
        fingerprint=replace(recommendation.fingerprint, parts={}, unknown=()),
        workload=recommendation.workload and replace(recommendation.workload, loader=None),
    )
    return msgspec.convert(_hiding(msgspec.to_builtins(bare), hidden), Recommendation)


def _hiding(value: Any, words: Sequence[str]) -> Any:
    """Return plain data with `words` hidden in its sentences; strings without a blank are names or numbers."""
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
    """Return the name of the study that keeps the recommendations for the same code, whatever the options."""
    alike = {name: part for name, part in _kind(fingerprint).items() if not name.startswith("option ")}
    return f"answers-{_digest(alike)}"


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:16]

"""Recommendations that users of an Optuna storage share, found by fingerprint.

The recommendations for the same code on the same device model are attributes of a study without trials, one for each
set of options. They are read as data only: the command and target are never taken from another user.
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
from autotune_amp.core.hardware import MIN_MEMORY_SHARE
from autotune_amp.core.recommendation import FORMAT, Fingerprint, Recommendation
from autotune_amp.search.storage.database import attributes, set_attribute

_MIN_HIDDEN = 8  # minimum length of a word of the command to hide: shorter ones may be our own, such as bf16

# Parts of a fingerprint that differ between devices of one model. Memory is compared separately, since hosts differ by
# a few bytes.
_OF_ONE_DEVICE = ("device uuid", "device index", "device total_memory_bytes")


class SharedRecommendation(NamedTuple):
    """Recommendation of a finished search, with its host and time (ISO 8601, UTC). `kind` is a hash of the request."""

    kind: str
    host: str
    time: str
    recommendation: Recommendation

    @property
    def origin(self) -> str:
        """Return the host and date of the measurement as text."""
        return f"on {self.host}, {self.time[:10]}"


def shared_recommendations(storage: str, fingerprint: Fingerprint) -> list[SharedRecommendation]:
    """Return the recommendations for the same code on a device of the same model, the latest first.

    Those in a format that this version cannot read are left out. Raises `StudyError` if the storage fails.
    """
    recommendations = []
    for kind, stored in attributes(storage, _study_name(fingerprint)).items():
        try:
            recommendation = decode(stored["recommendation"], Recommendation)
        except (msgspec.MsgspecError, KeyError, TypeError):
            continue
        if recommendation.format <= FORMAT:
            recommendations.append(
                SharedRecommendation(kind, str(stored.get("host")), str(stored.get("time")), recommendation)
            )
    return sorted(recommendations, key=lambda answer: answer.time, reverse=True)


def matching_recommendation(
    shared: list[SharedRecommendation], fingerprint: Fingerprint
) -> SharedRecommendation | None:
    """Return the recommendation for the same request on a device with enough memory for it, or None. Pure."""
    memory_bytes = int(fingerprint.parts["device total_memory_bytes"].removeprefix("="))
    kind = _digest(_request_parts(fingerprint))
    for candidate in shared:
        measured_memory_bytes = candidate.recommendation.hardware.identity.total_memory_bytes
        if candidate.kind == kind and memory_bytes >= MIN_MEMORY_SHARE * measured_memory_bytes:
            return candidate
    return None


def store_recommendation(storage: str, recommendation: Recommendation) -> None:
    """Share the recommendation of a finished search, without its command. Raises `StudyError` if the storage fails."""
    fingerprint = recommendation.fingerprint
    stored = {
        "host": platform.node(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recommendation": _without_command(recommendation).to_json(),
    }
    set_attribute(storage, _study_name(fingerprint), _digest(_request_parts(fingerprint)), stored)


def _without_command(recommendation: Recommendation) -> Recommendation:
    """Return the recommendation without its target, command and settings files, which may contain secrets.

    Their words of at least `_MIN_HIDDEN` characters are also hidden in its sentences.
    """
    line, target = recommendation.command_template, recommendation.target
    texts = [] if line is None else [*line.arguments, *line.values.values(), *line.files, *line.files.values()]
    secrets = [*texts, *([] if target is None else [target])]
    words = {word for text in secrets for word in (text, *text.split(), *re.split(r"[\s=:,'\"]+", text))}
    hidden = sorted((word for word in words if len(word) >= _MIN_HIDDEN), key=len, reverse=True)
    bare = replace(
        recommendation,
        target=None,
        command_template=None,
        command=None,
        fingerprint=replace(recommendation.fingerprint, parts={}, unknown=()),
        workload=recommendation.workload and replace(recommendation.workload, loader=None),
    )
    return msgspec.convert(_with_words_hidden(msgspec.to_builtins(bare), hidden), Recommendation)


def _with_words_hidden(value: Any, words: Sequence[str]) -> Any:
    """Return plain data with `words` hidden in its sentences. Strings without a space are names, and unchanged."""
    if isinstance(value, dict):
        return {name: _with_words_hidden(each, words) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_words_hidden(each, words) for each in value]
    if isinstance(value, str) and " " in value:
        for word in words:
            value = value.replace(word, "...")
    return value


def _request_parts(fingerprint: Fingerprint) -> dict[str, str]:
    """Return the fingerprint's parts that are equal on all devices of one model."""
    return {name: part for name, part in fingerprint.parts.items() if name not in _OF_ONE_DEVICE}


def _study_name(fingerprint: Fingerprint) -> str:
    """Return the name of the study with the recommendations for the same code, for any options."""
    parts = {name: part for name, part in _request_parts(fingerprint).items() if not name.startswith("option ")}
    return f"answers-{_digest(parts)}"


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:16]

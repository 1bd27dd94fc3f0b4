"""What an Optuna storage keeps for others who use it: the answer of each search, found by what it holds for.

The answers for one code on one model of device stand in a study without trials, one for each kind of request. What is
read is data: command, options and target of an answer are the reader's own.
"""

from __future__ import annotations

import hashlib
import platform
from datetime import datetime, timezone
from typing import NamedTuple

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.hardware import LEAST_MEMORY_SHARE
from autotune_amp.core.recommendation import FORMAT, Fingerprint, Recommendation
from autotune_amp.search.storage.study import attributes, set_attribute

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
            recommendation = msgspec.json.decode(kept["recommendation"], type=Recommendation)
        except (msgspec.MsgspecError, InvalidRequestError, KeyError, TypeError):
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
    """Keep the answer of a finished search for others. Raises `StudyError`."""
    found = recommendation.fingerprint
    kept = {
        "host": platform.node(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "recommendation": recommendation.to_json(),
    }
    set_attribute(storage, _name(found), _digest(_kind(found)), kept)


def _kind(fingerprint: Fingerprint) -> dict[str, str]:
    return {name: part for name, part in fingerprint.parts.items() if name not in _OF_ONE_DEVICE}


def _name(fingerprint: Fingerprint) -> str:
    """Of the study with the answers for the same code, asked for in any way."""
    alike = {name: part for name, part in _kind(fingerprint).items() if not name.startswith("option ")}
    return f"answers-{_digest(alike)}"


def _digest(parts: dict[str, str]) -> str:
    return hashlib.sha256(msgspec.json.encode(sorted(parts.items()))).hexdigest()[:16]

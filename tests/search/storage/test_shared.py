"""Whose answer holds for whom: other hosts of the same kind, and the same code asked for otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from test_rerank import HELD, OPTIONS, finished

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.recommendation import FORMAT, Fingerprint, Recommendation
from autotune_amp.search.command import CommandSource
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.source import Source
from autotune_amp.search.storage import cache, shared
from autotune_amp.search.storage.database import attributes, set_attribute
from autotune_amp.search.storage.folder import StudyFolder

__all__ = ["finished"]  # the fixture

MINE = CommandTemplate.of(["python", "mine.py", "{batch_size=4}"])
MEMORY_BYTES = 85 * 10**9
PARTS = {
    "function loss of train.py": "1a2b",
    "option budget_seconds": "=110",
    "device name": "=H100",
    "device uuid": "=GPU-1",
    "device index": "=0",
    "device total_memory_bytes": f"={MEMORY_BYTES}",
    "version of torch": "=2.13.0",
}


def fingerprint(**changes: str) -> Fingerprint:
    """That of a request with some parts changed, named with underscores for spaces."""
    parts = PARTS | {name.replace("_", " ", 1): value for name, value in changes.items()}
    return Fingerprint(digest=str(hash(tuple(parts.items()))), parts=parts)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/team.db"


@pytest.fixture
def found(finished: tuple[Recommendation, StudyFolder]) -> Recommendation:
    device = finished[0].hardware
    hardware = replace(device, identity=replace(device.identity, total_memory_bytes=MEMORY_BYTES))
    config = replace(finished[0].config, environment=HELD)
    options = {**finished[0].options, "device": "cpu; theirs"}
    return replace(
        finished[0], fingerprint=fingerprint(), hardware=hardware, config=config, options=options, command="theirs"
    )


@pytest.mark.parametrize(
    ("changes", "holds", "is_like"),
    [
        ({}, True, True),
        ({"device_uuid": "=GPU-2", "device_index": "=3"}, True, True),
        ({"device_total_memory_bytes": "=84900000000"}, True, True),
        ({"device_total_memory_bytes": "=40000000000"}, False, True),
        ({"option_budget_seconds": "=300"}, False, True),
        ({"device_name": "=A100"}, False, False),
        ({"version_of torch": "=2.14.0"}, False, False),
        ({"function_loss of train.py": "3c4d"}, False, False),
    ],
)
def test_an_answer_holds_for_the_same_request_on_a_machine_of_the_same_kind(
    url: str, found: Recommendation, changes: dict[str, str], holds: bool, is_like: bool
) -> None:
    shared.store_recommendation(url, found)
    now = fingerprint(**changes)
    answers = shared.shared_recommendations(url, now)
    answer = shared.matching_recommendation(answers, now)
    assert (answer is not None, bool(answers)) == (holds, is_like)
    if answer is not None:
        bare = replace(found, command=None, fingerprint=replace(found.fingerprint, parts={}))
        assert answer.recommendation.to_json() == bare.to_json()
        assert answer.host in answer.origin


def test_the_latest_of_a_request_is_kept_and_what_cannot_be_read_is_left_out(url: str, found: Recommendation) -> None:
    later = replace(found, reason="Measured once more.")
    for each in (found, later, replace(found, format=FORMAT + 1, fingerprint=fingerprint(option_trials="=4"))):
        shared.store_recommendation(url, each)
    name = shared._study_name(found.fingerprint)
    set_attribute(url, name, "damaged", {"recommendation": "{"})
    set_attribute(url, name, "somebody-else-s", 3)
    assert len(attributes(url, name)) == 4
    assert [answer.recommendation.reason for answer in shared.shared_recommendations(url, found.fingerprint)] == [
        later.reason
    ]


def test_the_latest_answer_comes_first_whatever_was_kept_first(url: str, found: Recommendation) -> None:
    others = [replace(found, reason=str(n), fingerprint=fingerprint(option_trials=f"={n}")) for n in (1, 2, 3)]
    name = shared._study_name(found.fingerprint)
    for other, time in zip(others, ("2026-03-01", "2026-05-01", "2026-04-01"), strict=True):
        before = attributes(url, name)
        shared.store_recommendation(url, other)
        ((kind, kept),) = [(kind, kept) for kind, kept in attributes(url, name).items() if kind not in before]
        set_attribute(url, name, kind, {**kept, "time": time})
    assert [answer.recommendation.reason for answer in shared.shared_recommendations(url, found.fingerprint)] == [
        "2",
        "3",
        "1",
    ]


def asked(url: str, folder: Path, now: Fingerprint, **options: Any) -> tuple[Recommendation | None, Sequence[str]]:
    """What is known for a request from `folder`, and what is said."""
    progress = Mock()
    source = CommandSource(MINE)
    request = replace(OPTIONS, storage=url, **options)
    there = StudyFolder(str(folder), "train")
    with there:
        found = cache.shared_recommendation(source, request, there, progress, now)
    return found, [call.args[0] for call in progress.note.call_args_list]


def test_an_answer_of_another_host_is_saved_with_its_origin_and_runs_nothing_of_its_writer_s(
    url: str, found: Recommendation, tmp_path: Path
) -> None:
    shared.store_recommendation(
        url, replace(found, command_template=CommandTemplate.of(["rm", "-rf", "{batch_size=4}"]))
    )
    now = fingerprint(device_uuid="=GPU-2")
    answer, notes = asked(url, tmp_path, now)
    assert answer is not None
    assert Recommendation.load(tmp_path / "train/recommendation.json").to_json() == answer.to_json()
    assert (answer.fingerprint, answer.search.study) == (now, "train")
    assert answer.config == found.config
    assert "theirs" not in answer.to_json()
    assert answer.command_template == MINE
    assert str(answer.command).endswith(" -- python mine.py 128")
    assert notes[0] in answer.warnings
    assert {path.name for path in (tmp_path / "train").iterdir()} <= {"recommendation.json", ".lock"}


def test_what_lacks_its_records_is_not_ranked_again(url: str, found: Recommendation, tmp_path: Path) -> None:
    shared.store_recommendation(url, found)
    now = fingerprint()
    answer, _ = asked(url, tmp_path, now)
    folder = StudyFolder(str(tmp_path), "train")
    same = cache.cached_recommendation(folder.cached(), OPTIONS, folder, Mock(), now)
    assert answer is not None
    assert same is not None
    assert same.to_json() == answer.to_json()
    assert cache.cached_recommendation(answer, replace(OPTIONS, objective="memory"), folder, Mock(), now) is None


@pytest.mark.parametrize("changes", [{"objective": "memory"}, {"num_steps": 77}, {"storage": None}])
def test_what_asks_for_another_ranking_or_no_storage_is_not_answered_so(
    url: str, found: Recommendation, tmp_path: Path, changes: dict[str, Any]
) -> None:
    shared.store_recommendation(url, found)
    request: SearchOptions = replace(OPTIONS, **({"storage": url} | changes))
    now = fingerprint()
    there = StudyFolder(str(tmp_path), "train")
    assert cache.shared_recommendation(Source("train.py:workload"), request, there, Mock(), now) is None
    unknown = replace(now, unknown=("a lambda",))
    assert cache.shared_recommendation(Source("train.py:workload"), request, there, Mock(), unknown) is None
    assert not there.path.exists()


def test_nothing_of_the_command_its_files_and_its_target_is_kept(url: str, found: Recommendation) -> None:
    token = "hf_Secret0123456789"
    line = CommandTemplate(
        arguments=("python", "private_script.py", f"--token={token}", "{batch_size=4}", "--word", "two words"),
        values={"bf16": "bfloat-sixteen"},
        files={"private.yaml": f"key: {token}-of-file\nbatch: {{batch_size}}\n"},
    )
    said = f"The command python private_script.py --token={token} read private.yaml ({token}-of-file)."
    assert found.workload is not None
    shared.store_recommendation(
        url,
        replace(
            found,
            command_template=line,
            command=f"python private_script.py --token={token}",
            target="private_script.py:secret_workload",
            warnings=(said,),
            reason=f"{said} It is the fastest.",
            fingerprint=replace(found.fingerprint, parts={**PARTS, "command": f"={token}"}),
            workload=replace(found.workload, loader="private_script.py:main:12", notes=(said,)),
        ),
    )
    kept = b"".join(path.read_bytes() for path in Path(url.removeprefix("sqlite:///")).parent.iterdir())
    for word in (token, "private_script", "private.yaml", "secret_workload", "bfloat-sixteen"):
        assert word.encode() not in kept
    assert b"It is the fastest." in kept

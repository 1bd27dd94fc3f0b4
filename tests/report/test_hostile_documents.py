"""Documents of a study in which single values were changed: whatever they hold, one error or an answer."""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import made_study
import pytest
from made_run_log import made_run
from rich.console import Console

from autotune_amp.core.errors import AutotuneAmpError, FormatError, InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.export import TARGETS, export, export_source
from autotune_amp.report.files import follow_run, write_if_replaceable, write_report, write_run_report
from autotune_amp.report.terminal import print_recommendation
from autotune_amp.runtime.run_log import RunLog, read
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.storage.folder import StudyFolder

VALUES: tuple[Any, ...] = (
    0,
    -1,
    1e308,
    -1e308,
    1e-308,
    "abc",
    "\x1b[31m\n\x00",
    "[/bold]",
    None,
    [],
    {},
    2**70,
    2**62,
    True,
    "\ud800",
)
NUM_CHANGED = 250


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a document."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from leaves(each, (*path, key))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


def mutants(document: Any) -> Iterator[tuple[str, Any]]:
    """The document with one value changed, and what was changed, in random order."""
    chance = random.Random(4)
    for path in chance.sample(list(leaves(document)), k=min(NUM_CHANGED, len(list(leaves(document))))):
        value = chance.choice(VALUES)
        yield f"{path} is {value!r}", changed(document, path, value)


def answered(what: str, find: Callable[[], Any]) -> Any:
    """What `find` returns, None where it raises an error of ours."""
    try:
        return find()
    except AutotuneAmpError:
        return None
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


def printed(shown: Recommendation) -> None:
    print_recommendation(shown, Console(file=io.StringIO()))


def options(shown: Recommendation) -> None:
    shown.options_as(SearchOptions)


def exported(target: str) -> Callable[[Recommendation], object]:
    return lambda shown: export(export_source(shown, "a study"), target)


@pytest.mark.timeout(120)
def test_a_changed_recommendation_is_shown_or_refused(tmp_path: Path) -> None:
    study = made_study.write(tmp_path)
    path = study / "recommendation.json"
    num_shown = 0
    for what, document in mutants(json.loads(path.read_text())):
        path.write_text(json.dumps(document))
        shown: Recommendation | None = answered(what, lambda: Recommendation.load(path))
        if shown is None:
            continue
        num_shown += 1
        for show in (printed, Recommendation.explain, Recommendation._repr_html_, options, *map(exported, TARGETS)):
            answered(what, partial(show, shown))
        if num_shown % 20 == 0:
            answered(what, lambda: write_report(study))
    assert 0 < num_shown < NUM_CHANGED


@pytest.mark.timeout(120)
def test_changed_outcomes_are_drawn_or_refused(tmp_path: Path) -> None:
    study = made_study.write(tmp_path)
    outcomes = study / "outcomes.jsonl"
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    num_read = 0
    for what, document in mutants(lines):
        outcomes.write_text("".join(f"{json.dumps(line)}\n" for line in document))
        records = answered(what, StudyFolder(str(tmp_path), "made").records)
        num_read += records is not None
        if records is not None and num_read % 20 == 0:
            answered(what, lambda: write_report(study))
    assert 0 < num_read < NUM_CHANGED


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_ranks", "abc"), ("num_ranks", 0), ("memory_fraction", 1e308), ("memory_limit", "x")],
)
def test_options_that_are_computed_with_are_checked_when_they_are_read(tmp_path: Path, name: str, value: Any) -> None:
    path = made_study.write(tmp_path) / "recommendation.json"
    document = json.loads(path.read_text())
    document["options"][name] = value
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=name):
        Recommendation.load(path)
    document["options"] = {"batch_size": "abc"}
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="options of study"):
        Recommendation.load(path).options_as(SearchOptions)


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("recommendation.json", write_report),
    ("recommendation.json", Recommendation.load),
    ("outcomes.jsonl", lambda path: write_report(path.parent)),
    ("outcomes.jsonl", lambda path: StudyFolder(str(path.parent.parent), path.parent.name).__enter__()),
    ("run.jsonl", lambda path: RunLog(path, checks=True)),
    ("run.jsonl", read),
    ("run.jsonl", write_run_report),
    ("run.jsonl", lambda path: next(follow_run(path))),
    ("out.html", lambda path: write_report(path.parent, path)),
    ("out.html", lambda path: write_if_replaceable(path, "text", "page", lambda _: True, "Name another.")),
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device"])
@pytest.mark.parametrize("reader", range(len(READERS)))
def test_nothing_waits_for_what_is_no_regular_file(tmp_path: Path, kind: str, reader: int) -> None:
    name, find = READERS[reader]
    path = made_study.write(tmp_path) / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(AutotuneAmpError, match=r"regular file|folder|No such file"):
        find(path)


@pytest.mark.parametrize("path", ["a\0b", "\ud800/x"], ids=["NUL", "surrogate"])
def test_a_run_log_whose_path_no_file_can_have_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InvalidRequestError, match="run_log"):
        RunLog(tmp_path / path, checks=True)
    RunLog(tmp_path / path).write(None)  # type: ignore[arg-type]  # it is said in the log that nothing is written


@pytest.mark.parametrize("name", ["scale", "steps", "update", "rung"])
def test_a_run_log_with_a_negative_number_is_damaged(tmp_path: Path, name: str) -> None:
    path = made_run(tmp_path / "run.jsonl")
    begin, *others = path.read_text().splitlines()
    line = {**json.loads(begin), name: -1}
    path.write_text("\n".join([json.dumps(line), *others]) + "\n")
    with pytest.raises(FormatError, match="damaged"):
        read(path)

"""A command as a source: what its answer depends on."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace
from scripted_backend import candidate, described

from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import FormatError
from autotune_amp.core.recommendation import Fingerprint
from autotune_amp.hardware import identify
from autotune_amp.search import command
from autotune_amp.search.command import CommandSource, files_of_command, fingerprint_parts, plan_lines
from autotune_amp.search.space import Space


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import part")
    (tmp_path / "part.py").write_text("")
    return tmp_path


def test_what_it_names_imports_and_calls_counts_and_nothing_beside_it(folder: Path) -> None:
    for name in ("cfg.yaml", "unrelated.py", "other.sh", "go.sh", "env.sh", "called.py", "quoted.py"):
        (folder / name).write_text("")
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("from .inner import x")
    (folder / "package" / "inner.py").write_text("from ..nothing import y")
    (folder / "package" / "unrelated.py").write_text("")
    (folder / "part.py").write_text("import json, package.inner")
    (folder / "go.sh").write_text("source ./env.sh && python called.py")
    (folder / ".#train.py").symlink_to("nobody@nowhere:1")
    found = files_of_command(
        ["python", "train.py", "--config=cfg.yaml", "a\0b", 5000 * "x", "bash", "-ec", "x=1 python quoted.py"]
    )
    assert {str(path) for path in found} == {
        *("train.py", "part.py", "cfg.yaml", "quoted.py", "package/__init__.py", "package/inner.py"),
    }
    assert {str(path) for path in files_of_command(["bash", "go.sh"])} == {"go.sh", "env.sh", "called.py"}


def fingerprint(folder: Path, command: str = "python train.py") -> tuple[CommandSource, Fingerprint]:
    """A source that searches in `folder`/study, and what its answer would hold for now."""
    (folder / "study").mkdir(exist_ok=True)
    source, backend = CommandSource(CommandTemplate.of(command)), Mock()
    source.keep_in(folder / "study")
    backend.submit().result.return_value = Fingerprint(digest="machine", parts={"version of torch": "=2"})
    return source, source.fingerprint_by_child({}, identify("cpu"), backend, {})


def test_an_answer_holds_for_what_its_trials_read(folder: Path) -> None:
    for name in ("plugin.py", "settings.json", "unrelated.py"):
        (folder / name).write_text("")
    source, before = fingerprint(folder)
    source.command.opened([str(folder / name) for name in ("train.py", "plugin.py", "settings.json")])
    found = source.with_opened(before)
    assert found.digest == before.digest, "what trials show of the files is no other search"
    assert {name for name in found.parts if name.startswith("file ")} == {
        *("file train.py", "file part.py", "file plugin.py", "file settings.json"),
    }
    assert fingerprint(folder)[1] == found, "they are known again"

    (folder / "unrelated.py").write_text("x = 1")
    (folder / "new.py").write_text("")
    (folder / "new.sh").write_text("")
    assert fingerprint(folder)[1] == found
    for name, change in (("plugin.py", "changed"), ("settings.json", "is gone"), ("part.py", "changed")):
        content = (folder / name).read_text()
        (folder / name).write_text("x = 1")
        if change == "is gone":
            (folder / name).unlink()
        now = fingerprint(folder)[1]
        assert now.digest != found.digest
        assert found.differences(now) == (f"file {name} changed",)
        (folder / name).write_text(content)
        assert fingerprint(folder)[1] == found
    (folder / "study" / "opened.json").write_text("[")
    with pytest.raises(FormatError, match=r"opened\.json is damaged"):
        fingerprint(folder)


def test_a_file_edited_while_the_search_runs_counts_as_its_trials_first_read_it(folder: Path) -> None:
    (folder / "plugin.py").write_text("x = 1")
    source, before = fingerprint(folder)
    source.command.opened([str(folder / "plugin.py")])
    (folder / "plugin.py").write_text("x = 2")
    found, now = source.with_opened(before), fingerprint(folder)[1]
    assert source.edited_files(found) == ["plugin.py"]
    assert now.digest != found.digest
    assert found.differences(now) == ("file plugin.py changed",)


def test_more_files_than_are_read_for_every_answer_cannot_be_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_SOURCES", 2)
    (folder / "plugin.py").write_text("")
    source, before = fingerprint(folder)
    assert before.unknown == ()
    source.command.opened([str(folder / "plugin.py")])
    assert "more than 2 files" in source.with_opened(before).unknown[0]


def test_the_environment_and_the_libraries_that_the_code_names_count(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "train.py").write_text(
        "import os, torch\nwidth = os.environ['WIDTH'], os.environ['SLURM_JOB_ID']\nOTHER = 1"
    )
    (folder / "go.sh").write_text("python train.py --depth ${DEPTH}")
    line = CommandTemplate.of(f"{shlex.quote(sys.executable)} train.py")
    for name in ("WIDTH", "DEPTH", "OTHER", "RANK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    before = fingerprint_parts(line)
    assert before["version of torch"] == f"={importlib.metadata.version('torch')}"
    assert [name for name in before if name.startswith("environment")] == ["environment variable WIDTH"]
    assert "environment variable DEPTH" in fingerprint_parts(CommandTemplate.of("bash go.sh"))
    monkeypatch.setenv("WIDTH", "secret")
    after = fingerprint_parts(line)
    assert {name for name, part in before.items() if after[name] != part} == {"environment variable WIDTH"}
    assert "secret" not in str(after)


def test_the_program_of_another_environment_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = CommandTemplate.of("python train.py")
    programs = set[str]()
    for name in ("one", "other"):
        (folder / name).mkdir()
        (folder / name / "python").touch(0o755)
        monkeypatch.setenv("PATH", f"{folder}/{name}:{os.environ['PATH']}")
        programs.add(fingerprint_parts(line)["program"])
    assert programs == {f"={folder}/{name}/python" for name in ("one", "other")}


def test_a_changed_command_is_told_as_it_was_typed(folder: Path) -> None:
    line = CommandTemplate.of("python train.py --bs {batch_size=8} '{precision:bf16=--half x|fp32=}'")
    other = CommandTemplate.of("python train.py --bs {batch_size=16} {precision=fp32}", values={"bf16": "bfloat16"})
    before, after = (Fingerprint(digest="", parts=fingerprint_parts(each)) for each in (line, other))
    typed = "command changed from python train.py --bs '{batch_size=8}' '{precision:bf16=--half x|fp32=}' to "
    assert before.differences(after) == (
        f"{typed}python train.py --bs '{{batch_size=16}}' '{{precision=fp32}}'", "--value bf16 is new"
    )  # fmt: skip
    (folder / "part.py").write_text("x = 1")
    changed = Fingerprint(digest="", parts=fingerprint_parts(other))
    assert after.differences(changed) == ("file part.py changed",)


def test_what_is_tried_and_what_needs_a_placeholder_is_known_before_the_trials() -> None:
    template = CommandTemplate.of("python t.py {batch_size=8} {!attn=sdpa:eager}")
    settings = [candidate(precision, size) for precision in ("fp32", "bf16") for size in (4, 8)]
    values = template.argument_values
    space = Space(
        candidates=tuple(settings), baseline=settings[1], argument_values=values, variants={"attn": ("eager",)}
    )
    description = described(missing_placeholders=("{accumulation_steps=1}",), suggestions=("--optim '{optim=a:b}'",))
    tried, missing, suggested = plan_lines(space, description, template)
    for text in ("fp32 or bf16 (set from outside)", "4 to 8 ({batch_size})", "attn sdpa or eager"):
        assert text in tried
    assert "{accumulation_steps=1}" in missing
    assert "--optim '{optim=a:b}'" in suggested
    assert "attn" not in plan_lines(replace(space, variants={}), description, template)[0], "with --try none"


def test_what_has_one_value_is_not_said_to_be_set() -> None:
    space = Space(candidates=(candidate("fp32", 8),), baseline=candidate("fp32", 8))
    (tried,) = plan_lines(space, described(), CommandTemplate.of("python t.py"))
    assert "precision fp32 only" in tried
    assert "batch size 8 only" in tried
    assert "outside" not in tried

"""A finished search and a probe on a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import pytest
from report_samples import hardware, recommendation, row
from rich.console import Console

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.recommendation import Exclusion, Recommendation, SearchSummary
from autotune_amp.report.terminal import hardware_table, print_recommendation


@pytest.fixture(autouse=True)
def terminal_without_opinion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def printed(shown: Recommendation | Hardware, **console: Any) -> str:
    stream = io.StringIO()
    target = Console(file=stream, width=80, **console)
    if isinstance(shown, Hardware):
        hardware_table(shown, target)
    else:
        print_recommendation(shown, target)
    return stream.getvalue()


def lines_of(shown: Recommendation | Hardware) -> list[str]:
    return [" ".join(line.split()) for line in printed(shown).splitlines()]


def flowing(text: str) -> str:
    """`text` without box, wrapping and runs of blanks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def test_every_candidate_has_a_row_with_its_role_and_its_outcome() -> None:
    shown = recommendation(
        candidates=(
            row("fp32", 32, 307.1),
            row("bf16", 64, 412.3),
            row("fp32", 256, None, reason="6.2 GiB"),
            row("bf16", 8, 114.0, status="cut"),
        )
    )
    lines = lines_of(shown)
    assert "fp32 32 307 104 ms 612 MiB baseline, measured" in lines
    assert "bf16 64 412 155 ms 612 MiB recommended, measured" in lines
    assert "fp32 256 - - - failed: 6.2 GiB" in lines
    assert any(line.startswith("bf16 8 114 70.2 ms 612 MiB cut") for line in lines)


def test_neighbours_with_one_fate_share_a_row() -> None:
    candidates = (
        *(row("fp32", size, None, status="untried", reason="no time") for size in (2, 4, 8)),
        row("fp32", 16, None, status="oom", reason="too large"),
        row("bf16", 2, None, status="untried", reason="no time"),
        row("bf16", 4, 100.0),
        row("bf16", 8, 100.0),
    )
    lines = lines_of(recommendation(candidates=candidates))
    start = lines.index("fp32 2-8 - - - not tried: no time")
    assert lines[start + 1 : start + 5] == [
        "fp32 16 - - - out of memory: too large",
        "bf16 2 - - - not tried: no time",
        "bf16 4 100 40.0 ms 612 MiB measured",
        "bf16 8 100 80.0 ms 612 MiB measured",
    ]
    accumulated = [row("fp32", 2**n, None, reason="no time", accumulation_steps=8 // 2**n) for n in range(3)]
    assert "fp32 1-4 2-8 - - - failed: no time" in lines_of(recommendation(candidates=tuple(accumulated)))


def test_exclusions_are_below_the_candidates_and_none_is_told_twice() -> None:
    excluded = (
        *(Exclusion(precision="bf16", batch_size=size, reason="needs more") for size in (128, 512)),
        Exclusion(precision="fp8", batch_size=None, reason="no autocast"),
        Exclusion(precision="fp32", batch_size=32, reason="told in its own row"),
    )
    text = flowing(printed(recommendation(excluded=excluded)))
    assert "bf16 128-512 - - - excluded: needs more" in text
    assert "fp8 any - - - excluded: no autocast" in text
    assert "told in its own row" not in text
    ruled_out = tuple(row("bf16", size, 100.0 + size, status="excluded", reason="it rounds") for size in (16, 32))
    everywhere = (Exclusion(precision="bf16", batch_size=None, reason="it rounds"),)
    text = printed(recommendation(candidates=ruled_out, excluded=everywhere))
    assert [text.count(word) for word in ("it rounds", "116", "132")] == [1, 1, 1]


def test_the_panel_holds_the_facts_and_is_headed_by_what_they_are() -> None:
    shown = recommendation(warnings=("fp16 was left out.",))
    text = flowing(printed(shown))
    assert all(f"{label} {value}" in text for label, value in shown.facts())
    assert "Recommended" in text
    interrupted = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=3.0, was_interrupted=True)
    assert "Best so far" in printed(recommendation(search=interrupted))


def test_lines_to_copy_are_whole() -> None:
    variables = {"MALLOC_TRIM_THRESHOLD_": "1", "PYTORCH_ALLOC_CONF": "x y" * 40}
    config = AmpConfig(precision="fp32", batch_size=32, environment=variables)
    assert (
        f"  export MALLOC_TRIM_THRESHOLD_=1 PYTORCH_ALLOC_CONF='{'x y' * 40}'"
        in printed(recommendation(config=config)).splitlines()
    )
    text = printed(recommendation())
    assert "before Python starts" not in text
    python, framework = text.split("In Python:\n")[1].split("In the words of a framework")
    compile(textwrap.dedent(python), "shown", "exec")
    assert framework.split(":\n")[1].strip() == "autotune-amp export studies/quiet-otter --to torch"


def test_foreign_text_is_neither_markup_nor_control() -> None:
    reason = "[bold]loud[/nope]\x1b[31m\nnext"
    text = printed(
        recommendation(reason=reason, candidates=(row("fp32", 32, None, reason=reason),)), force_terminal=True
    )
    assert "[bold]loud[/nope] [31m next" in text
    assert "\x1b[31m" not in text


def test_tables_fit_80_columns_and_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    print_recommendation(recommendation(warnings=("w" * 200,)), Console(file=stream, width=80))
    hardware_table(hardware(), Console(file=stream, width=80))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert len(lines) > 20
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80, "but for lines to copy"

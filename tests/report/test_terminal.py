"""A finished search and a probe on a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import textwrap
from typing import Any

import pytest
from report_samples import evidence, hardware, recommendation, row
from rich.console import Console

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.recommendation import Exclusion, Recommendation, SearchSummary, VariantRow
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


def test_neighbours_that_failed_alike_share_a_row() -> None:
    candidates = (
        *(row("fp32", size, None, status="oom", reason="too large") for size in (16, 32)),
        row("bf16", 2, None, status="crash", reason="it crashed"),
        row("bf16", 4, 100.0),
        row("bf16", 8, 100.0),
    )
    lines = lines_of(recommendation(candidates=candidates))
    start = lines.index("fp32 16-32 - - - out of memory: too large")
    assert lines[start + 1 : start + 4] == [
        "bf16 2 - - - crashed: it crashed",
        "bf16 4 100 40.0 ms 612 MiB measured",
        "bf16 8 100 80.0 ms 612 MiB measured",
    ]


def test_what_was_not_tried_is_one_line_and_its_reasons_are_in_the_report() -> None:
    candidates = (
        *(row("fp32", size, None, status="untried", reason="no time") for size in (2, 4, 8)),
        row("bf16", 4, 100.0),
        row("bf16", 8, None, status="excluded", reason="it rounds"),
    )
    excluded = (
        Exclusion(precision="bf16", batch_size=8, reason="it rounds"),
        Exclusion(precision="fp8", batch_size=None, reason="no autocast"),
    )
    variants = (
        VariantRow(name="compile", value="default", status="tried", speedup=1.1, speedup_interval=(1.05, 1.2)),
        VariantRow(name="allocator", value="expandable_segments", status="untried", reason="it is of CUDA's"),
    )
    shown = recommendation(candidates=candidates, excluded=excluded, variants=variants)
    text = flowing(printed(shown))
    assert "not tried fp32 batch 2-8, bf16 batch 8, fp8, 1 further value" in text
    assert "1.10x (1.05x to 1.20x)" in text
    assert not any(why in text for why in ("no time", "it rounds", "no autocast", "it is of CUDA's"))
    assert "every trial and every reason: studies/quiet-otter/report.html" in text


ORDER = ("gain 1.34x", "sure confirmed", "autotune-amp export", "Mind the gap", "baseline, measured")


def test_the_answer_comes_first_then_the_lines_to_copy_and_the_warnings() -> None:
    shown = recommendation(warnings=("Mind the gap.",), notes=("The driver is old.",))
    text = flowing(printed(shown))
    assert text.startswith("Recommended set bf16, batch size 64 speed 412 samples/s")
    places = [text.index(part) for part in ORDER]
    assert places == sorted(places)
    assert "The driver is old" not in text
    assert "1 note, " in text
    interrupted = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=3.0, was_interrupted=True)
    assert "Best so far" in printed(recommendation(search=interrupted))


def test_what_runs_today_is_kept_without_a_gain_of_nothing() -> None:
    todays = evidence().baseline.config
    shown = recommendation(config=todays, evidence=evidence(speedup=1.0, speedup_interval=(1.0, 1.0)))
    text = flowing(printed(shown))
    assert text.startswith("Keep what you have set nothing; fp32, batch size 32 stays")
    assert "1.00x" not in text
    assert "In Python" not in text, "there is nothing to set"
    assert "1.00x" not in shown.explain() + shown.answer_html()


def test_in_python_advice_names_arguments() -> None:
    advice = "Give --budget 120."
    shown = recommendation(reason=advice, warnings=(advice,), notes=(advice,))
    assert shown.explain().count("Give budget=120.") == 2
    assert shown._repr_html_().count("Give budget=120.") == 3
    assert advice not in shown.explain() + shown._repr_html_()
    assert advice in shown.answer_html() + flowing(printed(shown)), "of the command line they stay options"


def test_an_odd_backtick_in_one_line_takes_nothing_from_the_advice_of_the_next() -> None:
    shown = recommendation(reason="the ` key", warnings=("Give --budget 120 to `train`.",))
    assert "Give budget=120 to `train`." in shown.explain()


GREEN = "\x1b[32m"


@pytest.mark.parametrize(
    ("changes", "is_green", "said"),
    [
        ({}, True, "1.34x (1.28x to 1.41x)"),
        ({"speedup_interval": (0.28, 7.57)}, False, "not sure (0.28x to 7.57x)"),
        ({"is_confirmed": False, "num_processes": 1}, False, "unconfirmed"),
        ({"samples_per_second_interval": (18.5, 65_896.0)}, False, "too wide to promise a speed"),
    ],
)
def test_only_what_is_sure_to_be_better_is_green(changes: dict[str, Any], is_green: bool, said: str) -> None:
    shown = recommendation(evidence=evidence(**changes))
    assert (GREEN in printed(shown, force_terminal=True)) == is_green
    assert said in flowing(printed(shown))


def test_lines_to_copy_are_whole() -> None:
    variables = {"MALLOC_TRIM_THRESHOLD_": "1", "PYTORCH_ALLOC_CONF": "x y" * 40}
    config = AmpConfig(precision="fp32", batch_size=32, environment=variables)
    assert (
        f"  export MALLOC_TRIM_THRESHOLD_=1 PYTORCH_ALLOC_CONF='{'x y' * 40}'"
        in printed(recommendation(config=config)).splitlines()
    )
    text = printed(recommendation())
    assert "before Python starts" not in text
    python, framework = text.split("In Python:\n")[1].split("The whole loop")
    compile(textwrap.dedent(python), "shown", "exec")
    assert framework.split(":\n")[1].splitlines()[0].strip() == "autotune-amp export studies/quiet-otter --to torch"


def test_foreign_text_is_neither_markup_nor_control() -> None:
    reason = "[bold]loud[/nope]\x1b[31m\nnext"
    text = printed(
        recommendation(reason=reason, candidates=(row("fp32", 32, None, reason=reason),)), force_terminal=True
    )
    assert "[bold]loud[/nope] [31m next" in text
    assert "\x1b[31m" not in text


def test_the_brackets_of_an_arguments_value_are_shown() -> None:
    values = ("[all]", "[/mnt/a]")
    rows = tuple(row("fp32", 32, 300.0, arguments=(("data", value),)) for value in values)
    lines = lines_of(recommendation(candidates=rows))
    assert all(f"fp32 data={value} 32 300 107 ms 612 MiB measured" in lines for value in values)


def test_tables_fit_80_columns_and_ascii() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    print_recommendation(recommendation(warnings=("w" * 200,)), Console(file=stream, width=80))
    hardware_table(hardware(), Console(file=stream, width=80))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert len(lines) > 20
    assert max(len(line) for line in lines if not line.startswith("  ")) <= 80, "but for lines to copy"

"""Commands without their work: which options they pass on, what they print, with which exit code they end."""

from __future__ import annotations

import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from report_samples import recommendation

from autotune_amp.api import recommend_config
from autotune_amp.cli import run, training
from autotune_amp.core import errors
from autotune_amp.core.config import DemotedError
from autotune_amp.core.recommendation import Exclusion, NothingWorksError, SearchInterruptedError
from autotune_amp.report.errors import error_document, error_text
from autotune_amp.search.options import SearchOptions

BEST = recommendation()
EXCLUDED = (
    Exclusion(precision="fp16", batch_size=8, reason="out of memory"),
    Exclusion(precision="fp8", batch_size=None, reason="no kernels"),
)
NOTHING_WORKS = NothingWorksError("Nothing works.", "Try less.", EXCLUDED)
INTERRUPTED = SearchInterruptedError("Interrupted.", "Go on.", EXCLUDED, BEST)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What stands in for recommend_config()."""
    module = types.ModuleType("autotune_amp.api")
    vars(module)["recommend_config"] = stand_in = Mock(return_value=BEST)
    monkeypatch.setitem(sys.modules, "autotune_amp.api", module)
    return stand_in


# --- options -------------------------------------------------------------------------------------------------------


def test_an_option_is_the_same_on_the_command_line_in_the_api_and_in_what_checks_it() -> None:
    """Its name and its default."""
    said, called = (
        {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        for function in (training.search, recommend_config)
    )
    for name in training._COMMAND_LINE_OPTIONS:
        said.pop(name)
    assert called.pop("progress") is None
    assert said == called
    checked = {
        name: default for name, default in called.items() if name not in ("workload", "fresh", "server", "quiet")
    }
    assert SearchOptions.from_user(**checked) == SearchOptions.from_user() == SearchOptions()
    with pytest.raises(errors.InvalidRequestError, match="steps"):
        SearchOptions.from_user(steps=1, samples=1)


def test_search_passes_every_option_on(search: Mock) -> None:
    given: dict[str, Any] = {
        "budget": 120.0,
        "trials": 3,
        "precision": ["fp32", "bf16"],
        "batch_size": "8:64",
        "out": "o",
    }
    words = [
        word
        for name, value in given.items()
        for one in (value if isinstance(value, list) else [value])
        for word in (f"--{name.replace('_', '-')}", str(one))
    ]
    assert run(["search", "train.py:workload", *words, "--fresh", "--quiet", "--json"]) == 0
    called: dict[str, Any] = dict(search.call_args.kwargs)
    assert called == called | given | {"workload": "train.py:workload", "fresh": True, "quiet": True, "progress": None}
    assert called.keys() == inspect.signature(recommend_config).parameters.keys()


# --- results -------------------------------------------------------------------------------------------------------


def test_search_prints_the_recommendation_and_where_to_load_it(
    search: Mock, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["search", "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == (json.loads(BEST.to_json()), "")
    best, saved = recommendation(), tmp_path / "sent.json"
    best.save(saved)
    for command, path in (
        ("search", "studies/quiet-otter/recommendation.json"),
        ("search --out there", "there/quiet-otter/recommendation.json"),
        (f"show {saved}", str(saved)),
    ):
        search.return_value = best
        assert run(command.split()) == 0
        assert f'PrecisionController.load("{path}", "cpu")' in capsys.readouterr().out


def test_probe_prints_each_precision_with_its_rate_and_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "autotune_amp.hardware", Mock(probe={"cpu": BEST.hardware}.__getitem__))
    assert run(["probe", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["hardware"]["device"]) == (1, "cpu")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["probe", "--device", "cpu"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "device cpu: Some Processor",
        "memory 6.00 GiB available: 7.00 GiB free of 8.00 GiB, container limit 5.00 GiB",
        "warning another process holds 3 GiB",
        "fp32 native 121 GFLOP/s any CPU has it",
        "fp16 emulated - no avx512_fp16 [here]",
    ):
        assert line in lines


# --- errors --------------------------------------------------------------------------------------------------------

WRONG_REQUESTS = {"InvalidRequest", "Workload", "Device", "Study", "StudyBusy", "Format", "BudgetTooSmall"}
KINDS = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.AutotuneAmpError)]
RAISED: list[tuple[BaseException, int, str]] = [
    *((k("What was.", "Do."), 2 if k.__name__[:-5] in WRONG_REQUESTS else 1, k("", "").kind) for k in KINDS),
    (NOTHING_WORKS, 3, "nothing_works"),
    (INTERRUPTED, 130, "search_interrupted"),
    (KeyboardInterrupt(), 130, "search_interrupted"),
    (DemotedError("Stepped down.", "Start again.", BEST.config), 1, "demoted"),
]


@pytest.mark.parametrize(("error", "code", "kind"), RAISED, ids=lambda value: getattr(value, "kind", None))
def test_an_error_is_one_document_with_its_exit_code(
    error: BaseException, code: int, kind: str, search: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    search.side_effect = error
    assert run(["search", "--json"]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["format"] == 1
    assert sorted(document["error"]) == ["kind", "message", "next_step"]
    assert document["error"]["kind"] == kind
    has_excluded = isinstance(error, (NothingWorksError, SearchInterruptedError))
    told = [("fp16", 8, "out of memory"), ("fp8", None, "no kernels")]
    assert [tuple(one.values()) for one in document["excluded"]] == (told if has_excluded else [])
    assert document["best"] == (json.loads(BEST.to_json()) if error is INTERRUPTED else None)
    assert captured.err.startswith("Error: ")
    assert "\nNext step: " in captured.err
    assert run(["search"]) == code
    assert ("bf16, batch size 64" in capsys.readouterr().out) == (error is INTERRUPTED), "the best so far"


def test_an_error_is_read_with_the_reason_of_each_candidate() -> None:
    assert error_text(NOTHING_WORKS).splitlines() == [
        "Error: Nothing works.",
        "  fp16 batch 8: out of memory",
        "  fp8: no kernels",
        "Next step: Try less.",
    ]
    assert json.loads(error_document(errors.StudyError("\udcff", "Go on.")))["error"]["message"] == "\udcff"


@pytest.mark.parametrize("fault", [BrokenPipeError("ours"), EOFError("ours"), ValueError("ours")])
def test_our_own_faults_are_not_hidden(fault: Exception, search: Mock) -> None:
    search.side_effect = fault
    with pytest.raises(type(fault), match="ours"):
        run(["search"])

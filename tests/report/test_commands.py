from __future__ import annotations

import inspect
import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from report_samples import loop, recommendation

from autotune_amp import cli
from autotune_amp.api import recommend_config
from autotune_amp.cli import run
from autotune_amp.core import errors
from autotune_amp.core.recommendation import NothingWorksError, SearchInterruptedError
from autotune_amp.search.options import SearchOptions

if TYPE_CHECKING:
    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.recommendation import Recommendation

BEST = recommendation()
NOTHING_WORKS = NothingWorksError("Nothing works.", "Try less.", ())
INTERRUPTED = SearchInterruptedError("Interrupted.", "Go on.", (), BEST)


class Api:
    """Stands in for autotune_amp.api: remembers what it was asked, then raises or returns `answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: BaseException | Recommendation) -> None:
        self.answer = answer
        self.target: object = None
        self.options: dict[str, Any] = {}
        module = types.ModuleType("autotune_amp.api")
        vars(module)["recommend_config"] = self.recommend_config
        monkeypatch.setitem(sys.modules, "autotune_amp.api", module)

    def recommend_config(self, workload: object = None, **options: Any) -> Recommendation:
        self.target, self.options = workload, options
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (errors.BudgetTooSmallError("Too small.", "Give 20 s."), 2),
        (NOTHING_WORKS, 3),
        (INTERRUPTED, 130),
        (KeyboardInterrupt(), 130),
    ],
)
def test_search_that_fails_prints_one_document(
    answer: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Api(monkeypatch, answer)
    assert run(["search", "--json"]) == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["format"] == 1
    assert captured.err.startswith("Error: ")


def test_interrupted_search_prints_the_best(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Api(monkeypatch, INTERRUPTED)
    assert run(["search"]) == 130
    captured = capsys.readouterr()
    assert "bf16, batch size 64" in captured.out
    assert captured.err == "Error: Interrupted.\nNext step: Go on.\n"


@pytest.mark.parametrize("fault", [BrokenPipeError("ours"), EOFError("ours"), ValueError("ours")])
def test_our_own_faults_are_not_hidden(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    Api(monkeypatch, fault)
    with pytest.raises(type(fault), match="ours"):
        run(["search"])


def test_search_prints_the_recommendation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Api(monkeypatch, BEST)
    assert run(["search", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == json.loads(BEST.to_json())
    assert captured.err == ""


def test_a_loop_is_told_the_path_of_its_own_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    best, saved = recommendation(workload=loop()), tmp_path / "sent.json"
    Api(monkeypatch, best)
    best.save(saved)
    for command, path in (
        ("search", "studies/quiet-otter/recommendation.json"),
        ("search --out there", "there/quiet-otter/recommendation.json"),
        (f"show {saved}", str(saved)),
    ):
        assert run(command.split()) == 0
        assert f'PrecisionController.load("{path}", "cpu")' in capsys.readouterr().out


def test_an_option_is_the_same_on_the_command_line_in_the_api_and_in_what_checks_it() -> None:
    """Its name and its default; what the command line cannot say has a name of its own."""
    said, called, checked = (
        {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
        for function in (cli.search, recommend_config, SearchOptions.from_user)
    )
    said.pop("as_json")
    assert called.pop("progress") is None
    assert said == called
    for name in ("workload", "fresh", "quiet"):
        called.pop(name)
    assert checked.pop("num_ranks") == 1, "the launcher's to say"
    assert called == checked
    assert SearchOptions.from_user() == SearchOptions()


def test_search_passes_every_option_on(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Api(monkeypatch, BEST)
    line = (
        "search train.py:workload --budget 120 --trials 3 --device cuda:1 --precision fp32 --precision bf16 "
        "--batch-size 8:64 --effective-batch-size 128 --baseline fp32:32 --memory-fraction 0.5 "
        "--objective memory --steps 500 --samples 9 --price-per-hour 2.5 "
        "--study s --out o --storage sqlite:///x.db --seed 7 --fresh --quiet"
    )
    assert run(line.split()) == 0
    assert api.target == "train.py:workload"
    assert api.options == {
        "budget": 120.0,
        "trials": 3,
        "device": "cuda:1",
        "precision": ["fp32", "bf16"],
        "batch_size": "8:64",
        "effective_batch_size": "128",
        "baseline": "fp32:32",
        "memory_fraction": 0.5,
        "objective": "memory",
        "steps": 500,
        "samples": 9,
        "price_per_hour": 2.5,
        "study": "s",
        "out": "o",
        "storage": "sqlite:///x.db",
        "seed": 7,
        "fresh": True,
        "quiet": True,
        "progress": None,
    }


@pytest.mark.parametrize("is_json", [False, True])
def test_probe_prints_the_hardware(
    is_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("autotune_amp.hardware")
    asked = []

    def probe(device: str) -> Hardware:
        asked.append(device)
        return BEST.hardware

    vars(module)["probe"] = probe
    monkeypatch.setitem(sys.modules, "autotune_amp.hardware", module)
    assert run(["probe", "--device", "cpu", *(["--json"] if is_json else [])]) == 0
    assert asked == ["cpu"]
    out = capsys.readouterr().out
    if is_json:
        document = json.loads(out)
        assert (document["format"], document["hardware"]["device"]) == (1, "cpu")
    else:
        assert "7.00 GiB free of 8.00 GiB" in out

from __future__ import annotations

import json

import pytest
from report_samples import recommendation

from autotune_amp.cli import error_document, error_text
from autotune_amp.core import errors
from autotune_amp.core.config import DemotedError
from autotune_amp.core.recommendation import Exclusion, NothingWorksError, SearchInterruptedError

BEST = recommendation()
EXCLUDED = (
    Exclusion(precision="fp16", batch_size=8, reason="out of memory"),
    Exclusion(precision="fp8", batch_size=None, reason="no kernels"),
)
PLAIN = [
    (errors.AutotuneAmpError, 1, "autotune_amp"),
    (errors.InvalidRequestError, 2, "invalid_request"),
    (errors.WorkloadError, 2, "workload"),
    (errors.DeviceError, 2, "device"),
    (errors.StudyError, 2, "study"),
    (errors.StudyBusyError, 2, "study_busy"),
    (errors.FormatError, 2, "format"),
    (errors.BudgetTooSmallError, 2, "budget_too_small"),
    (errors.RunnerError, 1, "runner"),
    (errors.TrainingStoppedError, 1, "training_stopped"),
    (errors.NotPrecisionError, 1, "not_precision"),
    (errors.NoRungFitsError, 1, "no_rung_fits"),
]
NOTHING_WORKS = NothingWorksError("Nothing works.", "Try less.", EXCLUDED)
INTERRUPTED = SearchInterruptedError("Interrupted.", "Go on.", EXCLUDED, BEST)
DEMOTED = DemotedError("Stepped down.", "Start again.", BEST.config)
INTERRUPTED_EARLY = SearchInterruptedError("Interrupted.", "Go on.", (), None)
EXCLUDED_DOCUMENT = [
    {"precision": "fp16", "batch_size": 8, "reason": "out of memory"},
    {"precision": "fp8", "batch_size": None, "reason": "no kernels"},
]


@pytest.mark.parametrize(("kind", "code", "name"), PLAIN)
def test_error_becomes_a_document(kind: type[errors.AutotuneAmpError], code: int, name: str) -> None:
    error = kind("What \udcff was.", "What to do.")
    assert error.exit_code == code
    assert json.loads(error_document(error)) == {
        "format": 1,
        "error": {"kind": name, "message": "What \udcff was.", "next_step": "What to do."},
        "excluded": [],
        "best": None,
    }
    assert error_text(error) == "Error: What \udcff was.\nNext step: What to do.\n"


def test_every_error_class_has_its_exit_code_tested() -> None:
    plain = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    classes = plain | {NothingWorksError, SearchInterruptedError, DemotedError}
    tested = {kind for kind, _, _ in PLAIN} | {type(NOTHING_WORKS), type(INTERRUPTED), type(DEMOTED)}
    assert classes == tested


def test_a_demotion_carries_the_config_to_go_on_with() -> None:
    assert DEMOTED.config == BEST.config
    assert DEMOTED.exit_code == 1
    assert json.loads(error_document(DEMOTED))["error"]["kind"] == "demoted"


def test_nothing_works_gives_every_reason() -> None:
    document = json.loads(error_document(NOTHING_WORKS))
    assert NOTHING_WORKS.exit_code == 3
    assert document["error"]["kind"] == "nothing_works"
    assert document["excluded"] == EXCLUDED_DOCUMENT
    assert error_text(NOTHING_WORKS).splitlines() == [
        "Error: Nothing works.",
        "  fp16 batch 8: out of memory",
        "  fp8: no kernels",
        "Next step: Try less.",
    ]


def test_interruption_carries_the_best() -> None:
    document = json.loads(error_document(INTERRUPTED))
    assert INTERRUPTED.exit_code == 130
    assert document["error"]["kind"] == "search_interrupted"
    assert document["excluded"] == EXCLUDED_DOCUMENT
    assert document["best"] == json.loads(BEST.to_json())
    assert json.loads(error_document(INTERRUPTED_EARLY))["best"] is None

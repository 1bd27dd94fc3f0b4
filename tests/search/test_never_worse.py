"""No answer is slower than what runs today, nor a change whose gain is not sure: drawn ledgers and recorded ones."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import SUMMARY, described, fidelity, ledger_of, measurement

from autotune_amp.core.outcome import Failure, FailureKind, Outcome, Purpose, Record, Verdict
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Decision, Recommendation
from autotune_amp.core.setting import Setting
from autotune_amp.search.answer.decide import decide, rerank
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import Space
from autotune_amp.search.storage.folder import StudyFolder

STUDIES = Path(__file__).parents[2] / "studies"
RECORDED = sorted(
    path.parent
    for path in STUDIES.glob("*/results/**/recommendation.json")
    if (path.parent / "outcomes.jsonl").exists() and "real_text_and_digits" not in path.parts
)
ENVIRONMENT = {"MALLOC_TRIM_THRESHOLD_": "1"}
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
VERDICTS: tuple[Verdict, ...] = ("faithful", "unchecked", "doubtful", "unfaithful")
KINDS: tuple[FailureKind, ...] = ("oom", "timeout", "nonfinite", "crash")

settings = st.builds(
    Setting, precision=st.sampled_from(PRECISIONS), batch_size=st.sampled_from([8, 32, 128]), as_found=st.booleans()
)
outcomes = st.one_of(
    st.floats(50.0, 500.0).map(measurement), st.sampled_from(KINDS).map(lambda kind: Failure(kind=kind, message="so"))
)


def is_sound(decision: Decision) -> bool:
    """Whether it keeps what runs today, is surely faster, or what runs today has failed."""
    found, today = decision.evidence, decision.evidence.baseline
    is_kept = decision.reason.startswith(("Keep what you have", "Only "))
    if today.samples_per_second is None or is_kept:
        return is_kept or today.reason is not None
    surely = (
        found.speedup_interval is None or found.speedup_interval[0] > 1
    )  # None: one on all of a CPU, one on a share
    return surely and found.samples_per_second >= today.samples_per_second


@st.composite
def ledgers(draw: st.DrawFn) -> list[Record]:
    """A search's trials, its verdicts, and rounds of a confirmation, the baseline first."""
    tried = draw(st.lists(settings, min_size=1, max_size=6, unique=True))
    records: list[Record] = []

    def add(setting: Setting, purpose: Purpose, outcome: Outcome, **fields: object) -> None:
        records.append(
            msgspec.structs.replace(
                Record(search_id="s", number=1, candidate=setting, purpose=purpose, outcome=outcome, seconds=1.0),
                number=len(records),
                **fields,
            )
        )

    add(tried[0], "search", measurement(draw(st.floats(50.0, 500.0))))
    for setting in draw(st.lists(st.sampled_from(tried), max_size=8)):
        add(setting, "search", draw(outcomes))
    for precision in PRECISIONS[1:]:
        if (verdict := draw(st.sampled_from((None, *VERDICTS)))) is not None:
            records.append(
                Record(
                    search_id="s",
                    number=len(records),
                    candidate=Setting(precision=precision, batch_size=8),
                    purpose="fidelity",
                    outcome=fidelity(precision, verdict),
                    seconds=1.0,
                )
            )
    for number in range(draw(st.integers(0, 4))):
        for setting in draw(st.lists(st.sampled_from(tried), max_size=4, unique=True)):
            environment = draw(st.sampled_from([{}, ENVIRONMENT]))
            add(setting, "confirm", draw(outcomes), round=number, environment=environment)
    return records


@given(ledgers(), st.sampled_from([{}, ENVIRONMENT]))
def test_no_drawn_ledger_has_an_answer_that_is_not_surely_faster(
    records: list[Record], environment: dict[str, str]
) -> None:
    baseline = records[0].candidate
    candidates = tuple(dict.fromkeys(r.candidate for r in records if not r.candidate.as_found))
    ledger = ledger_of(records, Space(candidates=candidates, baseline=baseline, has_tf32=True))
    if all(c.as_found and c != baseline for c in ledger.merits):  # only a baseline has the user's own flags
        return
    decision = decide(ledger, environment=environment, search=SUMMARY, description=described())
    assert is_sound(decision), decision.reason
    assert not math.isnan(decision.evidence.samples_per_second)


def test_a_baseline_that_fails_in_its_confirmation_is_said_to_have_failed() -> None:
    today, other = Setting(precision="fp32", batch_size=8), Setting(precision="fp32", batch_size=32)
    drawn: list[tuple[Setting, Outcome]] = [
        (today, measurement(50.0)),
        (other, measurement(50.0)),
        (today, Failure(kind="oom", message="so")),
    ]
    records = [
        Record(search_id="s", number=number, candidate=c, purpose="search", outcome=outcome, seconds=1.0)
        for number, (c, outcome) in enumerate(drawn)
    ]
    records[-1] = msgspec.structs.replace(records[-1], purpose="confirm", round=0)
    ledger = ledger_of(records, Space(candidates=(today, other), baseline=today, has_tf32=True))
    decision = decide(ledger, environment={}, search=SUMMARY, description=described())
    assert decision.evidence.baseline.reason == "oom: so"
    assert "oom: so" in decision.reason


def test_there_are_recorded_studies() -> None:
    assert len(RECORDED) > 50


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.relative_to(STUDIES).as_posix())
def test_no_recorded_study_has_an_answer_that_is_not_surely_faster(folder: Path) -> None:
    known = Recommendation.load(folder / "recommendation.json")
    options = msgspec.convert(known.options, SearchOptions)
    again = rerank(known, options, StudyFolder(str(folder.parent), folder.name))
    if options.objective == "speed":
        assert is_sound(again), again.reason

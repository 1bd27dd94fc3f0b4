from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
from msgspec.structs import replace
from optuna.trial import FrozenTrial, TrialState
from scripted_backend import calibration, measurement
from test_decide import at

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import StudyError
from autotune_amp.core.outcome import CheckOutcome, Failure, Measurement, Outcome, Purpose, Record
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import FP8_RECIPE
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.loss_scales import Pair
from autotune_amp.search.space import Space
from autotune_amp.search.storage import database
from autotune_amp.search.storage import study as studies
from autotune_amp.search.storage.database import open_storage
from autotune_amp.search.storage.study import Study

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
SIZES = (4, 8, 16, 32, 64, 100)
OOM = Failure(kind="oom", message="it asked for 3 GiB of 2 GiB", details="a long traceback")


SPACE = Space(
    candidates=tuple(at(p, b) for p in PRECISIONS for b in SIZES),
    baseline=at("fp32", 32),
)


def measured(speed: float = 100.0) -> Measurement:
    return measurement(speed, 123, step_seconds=0.25)


def record(number: int, candidate: Setting, outcome: Outcome | CheckOutcome, purpose: Purpose = "search") -> Record:
    return Record(search_id="s1", number=number, candidate=candidate, purpose=purpose, outcome=outcome, seconds=1.0)


def calibrated(setting: Setting) -> list[Record]:
    """A trial of an fp16 setting, and its calibration, by which a loss scale of 2^14 is safe."""
    return [
        record(1, setting, measured()),
        record(2, setting, calibration(batch_size=setting.batch_size), "calibration"),
    ]


def opened(
    storage: str | Path, records: Sequence[Record] = (), *, owner: str = "", seed: int = 0
) -> AbstractContextManager[Study]:
    """The study of a search with these records."""
    return Study.open(storage, "demo", Ledger(SPACE, records, search_id="s1"), owner=owner, seed=seed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "study.db"


def trials(file: Path) -> list[FrozenTrial]:
    """What another reader of the storage sees, as a dashboard would."""
    with open_storage(f"sqlite:///{file}") as storage:
        return optuna.load_study(study_name="demo", storage=storage).get_trials(deepcopy=False)


def test_each_trial_is_written_with_its_result(file: Path) -> None:
    with opened(file, [record(7, at("bf16", 64), measured(200.0)), record(8, at("fp32", 100), OOM)]):
        pass
    trial, failed = trials(file)
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 200.0)
    assert trial.params == {"precision": "bf16", "batch_size": 64}
    assert trial.constraints == {}
    assert trial.duration == timedelta(seconds=1)
    known = {"candidate": "bf16 batch 64", "step_seconds": 0.25, "peak_memory_bytes": 123, "record": 7}
    assert trial.user_attrs == known
    assert (failed.state, failed.value, failed.constraints) == (TrialState.PRUNED, None, {"runs": 1.0}), "never failed"
    known = {"candidate": "fp32 batch 100", "failure": "oom", "reason": OOM.message, "record": 8}
    assert failed.user_attrs == known


def test_a_storage_of_others_is_not_told_the_words_of_a_failure(file: Path) -> None:
    failure = Failure(kind="crash", message="train.py --token=secret died")
    with opened(f"sqlite:///{file}", [record(1, at("fp32", 32), failure)]):
        pass
    (told,) = trials(file)
    assert told.user_attrs["failure"] == "crash"
    assert "secret" not in str(told.user_attrs)


def test_fp16_carries_the_loss_scale_and_the_others_do_not(file: Path) -> None:
    slow, fp32 = record(3, at("fp16", 100), measured(1.0)), record(4, at("fp32", 8), measured())
    with opened(file, [*calibrated(at("fp16", 8)), slow, fp32]) as study:
        assert study.pairs(at("fp16", 8)) == [(65536.0, 2000), (8192.0, 2000), (8192.0, 200)]
        assert study.pairs(at("fp16", 100)) == []
    first, second, _, uncalibrated, other = trials(file)
    assert first.params == {"precision": "fp16", "batch_size": 8, "init_scale": 65536.0, "growth_interval": 2000}
    assert first.value == 100.0 * first.user_attrs["applied_share"] != 100.0
    assert (first.user_attrs["num_skips"] > 0, first.user_attrs["record"]) == (True, 1)
    assert (second.value, second.user_attrs["snapped_init_scale"]) == (
        100.0 * second.user_attrs["applied_share"],
        8192.0,
    )
    assert "record" not in second.user_attrs
    assert (uncalibrated.value, uncalibrated.user_attrs["is_calibrated"]) == (1.0, False)
    assert other.params == {"precision": "fp32", "batch_size": 8}
    assert "is_calibrated" not in other.user_attrs


def test_a_further_dimension_is_a_parameter_of_the_trials_that_have_it(file: Path) -> None:
    space = replace(SPACE, variants={"compile": ("default",), "memory_format": ("channels_last",), "weights": ()})
    compiled = replace(at("fp32", 32), compile="default")
    records = [record(1, at("fp32", 32), measured()), record(2, compiled, measured(150.0))]
    records.append(record(3, at("fp32", 16), measured(50.0)))
    with Study.open(file, "demo", Ledger(space, records, search_id="s1"), owner="", seed=0):
        pass
    told = {frozenset(trial.params.items()): trial.value for trial in trials(file) if trial.value is not None}
    plain = {"precision": "fp32", "batch_size": 32}
    assert told == {
        frozenset((plain | {"batch_size": 16}).items()): 50.0,
        frozenset(plain.items()): 100.0,
        frozenset((plain | {"compile": "default", "memory_format": "contiguous"}).items()): 150.0,
    }


def test_a_trial_in_fp8_is_one_of_the_study_s(file: Path) -> None:
    space = replace(SPACE, variants={"fp8_recipe": ("rowwise", "tensorwise")})
    ours = [FP8_RECIPE.on(at("bf16", 32), recipe) for recipe in ("rowwise", "tensorwise")]
    records = [record(1, at("bf16", 32), measured()), *(record(2 + k, s, measured()) for k, s in enumerate(ours))]
    with Study.open(file, "demo", Ledger(space, records, search_id="s1"), owner="", seed=0):
        pass
    plain, *told = [trial.params for trial in trials(file) if trial.value is not None]
    assert plain == {"precision": "bf16", "batch_size": 32}
    assert told == [{"precision": "fp8", "batch_size": 32, "fp8_recipe": name} for name in ("rowwise", "tensorwise")]


def test_pairs_are_suggested_for_one_candidate_and_snapped(file: Path) -> None:
    with opened(file, calibrated(at("fp16", 16))) as study:
        study.suggest_pairs(at("fp16", 16), 20, lambda: 1.0)
        pairs = study.pairs(at("fp16", 16))
        assert len(pairs) == 20
        assert all(math.log2(scale).is_integer() and -24 <= math.log2(scale) <= 24 for scale, _ in pairs)
        assert all(10 <= interval <= 20_000 for _, interval in pairs)
        study.suggest_pairs(at("fp16", 16), 20, lambda: 1.0)
    told = trials(file)
    assert len(told) == 20, "no more than were asked for"
    assert len({trial.user_attrs["snapped_init_scale"] for trial in told}) > 5
    assert any(not math.log2(trial.params["init_scale"]).is_integer() for trial in told)


def test_a_trial_outside_the_space_is_not_in_the_study(file: Path) -> None:
    with opened(file, [record(1, at("fp32", 33), measured())]):
        assert trials(file) == []


@pytest.mark.parametrize(
    "enqueued", [{"precision": "bf16", "batch_size": 9}, {"precision": "int8", "init_scale": "no"}]
)
def test_what_somebody_enqueues_changes_no_trial_of_the_search(file: Path, enqueued: dict[str, Any]) -> None:
    records = [*calibrated(at("fp16", 16)), record(3, at("fp32", 8), measured(50.0))]
    with opened(file) as study:
        study._study.enqueue_trial(enqueued)
        study.catch_up(Ledger(SPACE, records, search_id="s1"))
        study.suggest_pairs(at("fp16", 16), 6, lambda: 1.0)
    waiting, *told = trials(file)
    assert waiting.state == TrialState.WAITING
    assert [trial.user_attrs["candidate"] for trial in told] == [
        *["fp16 batch 16"] * 3,
        "fp32 batch 8",
        *["fp16 batch 16"] * 3,
    ]
    assert all(trial.state == TrialState.COMPLETE for trial in told)


def test_the_same_seed_asks_for_the_same_pairs(tmp_path: Path) -> None:
    def asked(name: str, seed: int) -> list[Pair]:
        with opened(tmp_path / name, calibrated(at("fp16", 16)), seed=seed) as study:
            study.suggest_pairs(at("fp16", 16), 8, lambda: 1.0)
            return study.pairs(at("fp16", 16))

    assert asked("a.db", 1) == asked("b.db", 1) != asked("c.db", 2)


def test_a_search_is_resumed_where_other_precisions_and_variants_can_be_tried(file: Path) -> None:
    compiled = replace(at("fp32", 32), compile="default")
    sessions = [(PRECISIONS, ("default", "reduce-overhead")), (("fp32",), ("default",)), (PRECISIONS, ("default",))]
    records: list[Record] = []
    for number, (precisions, values) in enumerate(sessions):
        records += [record(2 * number, at("fp32", 32), measured()), record(2 * number + 1, compiled, measured())]
        candidates = tuple(at(p, 32) for p in precisions)
        space = Space(candidates=candidates, baseline=at("fp32", 32), variants={"compile": values})
        with Study.open(file, "demo", Ledger(space, records, search_id="s1")):
            pass
    assert [trial.user_attrs["record"] for trial in trials(file)] == [0, 1, 2, 3, 4, 5]


def test_records_of_trials_are_added_once(file: Path) -> None:
    records = [
        record(0, at("fp32", 32), measured(10.0)),
        record(1, at("fp16", 100), OOM),
        record(2, at("fp32", 32), measured(11.0), purpose="confirm"),
    ]
    for _ in range(3):
        with opened(file, records=records):
            pass
    assert [(t.user_attrs["record"], t.value) for t in trials(file)] == [(0, 10.0), (1, None)]
    assert trials(file)[1].params["growth_interval"] == LossScale().growth_interval


@pytest.mark.parametrize(
    ("bad_url", "shown"),
    [
        ("postgresql+nodriver://user:hunter2@host/db", "postgresql+nodriver://user:***@host/db"),
        ("nodriver://user:hunter2:hunter2/hunter2@hunter2@host/db", "nodriver://user:***@host/db"),
        ("user:hunter2@host", "user:***@host"),
        ("nodriver://host/db?user=amp&password=hunter2&x=1", "nodriver://host/db?user=amp&password=***&x=1"),
        ("sqlite:////nowhere/at/all/study.db", "sqlite:////nowhere/at/all/study.db"),
    ],
)
def test_a_storage_that_cannot_be_used_is_named_without_its_password(bad_url: str, shown: str) -> None:
    before = optuna.logging.get_verbosity()
    with pytest.raises(StudyError) as raised, opened(bad_url):
        pass
    assert f"The storage {shown} cannot be used: " in raised.value.message
    assert "hunter2" not in str(raised.value)
    assert "--storage" in raised.value.next_step
    assert optuna.logging.get_verbosity() == before


@pytest.mark.parametrize("url", ["postgresql://amp:hunter2@host/db", "postgresql://host/db?user=amp&password=hunter2"])
def test_a_password_is_masked_in_a_driver_s_message_too(url: str) -> None:
    said = str(database.study_error(url, OSError(f"cannot connect with {url!r} and hunter2")))
    assert "cannot connect" in said
    assert "hunter2" not in said


def test_a_search_goes_on_without_a_storage_that_breaks(file: Path) -> None:
    notes: list[str] = []
    ledger = Ledger(SPACE, calibrated(at("fp16", 32)), search_id="s1")
    with Study.open(file, "demo", ledger, note=notes.append) as study:
        with sqlite3.connect(file) as connection:
            connection.execute("DROP TABLE trial_user_attributes")
        connection.close()
        ledger.append(record(3, at("fp32", 32), measured()))
        study.catch_up(ledger)
        assert not study.is_reachable
        ledger.append(record(4, at("fp32", 16), measured()))
        study.catch_up(ledger)
        study.suggest_pairs(at("fp16", 32), 24, lambda: 100.0)
        assert study.pairs(at("fp16", 32)) == []
    assert len(notes) == 1
    assert "trial_user_attributes" in notes[0]


@pytest.mark.parametrize(("away_seconds", "is_over"), [(0.0, False), (3600.0, True)])  # the end waits for no next try
def test_a_study_that_somebody_deletes_in_mid_search_is_made_anew(
    file: Path, monkeypatch: pytest.MonkeyPatch, away_seconds: float, is_over: bool
) -> None:
    monkeypatch.setattr(studies, "AWAY_SECONDS", away_seconds)
    notes: list[str] = []
    ledger = Ledger(SPACE, search_id="s1")
    with Study.open(file, "demo", ledger, note=notes.append) as study:
        ledger.append(record(1, at("fp32", 8), measured()))
        study.catch_up(ledger)
        with open_storage(file) as storage:
            optuna.delete_study(study_name="demo", storage=storage)
        ledger.append(record(2, at("fp32", 32), measured()))
        study.catch_up(ledger)
        study.catch_up(ledger, is_over=is_over)
    assert len(notes) == 2
    assert [trial.user_attrs["record"] for trial in trials(file)] == [1, 2]


def test_what_is_no_storage_is_an_error(file: Path) -> None:
    file.write_text("this is no database, and long enough to be looked at as one")
    with pytest.raises(StudyError, match=r"study\.db cannot be used: file is not a database"), opened(file):
        pass


def test_any_path_can_hold_the_study(tmp_path: Path) -> None:
    name = "a b? {50%} #ü.db"
    with opened(tmp_path / name):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    connection = sqlite3.connect(tmp_path / name)
    assert connection.execute("SELECT study_name FROM studies").fetchall() == [("demo",)]
    connection.close()


def test_two_folders_that_share_a_storage_leave_each_others_trials_alone(file: Path) -> None:
    url = f"sqlite:///{file}"

    def of(folder: str) -> AbstractContextManager[Study]:
        return opened(url, [record(1, at("fp32", 32), measured())], owner=folder)

    with of("/a"):
        for folder, name in (("/b", "demo-s1"), ("/c", "demo-s1-2"), ("/d", "demo-s1-3"), ("/b", "demo-s1")):
            with of(folder) as other:
                assert other._study.study_name == name
    assert len(trials(file)) == 1
    with of("/a") as again:
        assert again._study.study_name == "demo"


def test_fp16_that_may_win_is_told_once_it_was_calibrated(file: Path) -> None:
    records = [record(1, at("fp32", 32), measured(100.0)), record(2, at("fp16", 32), measured(95.0))]
    with opened(file, records=records) as study:
        assert [trial.user_attrs["record"] for trial in trials(file)] == [1]
        refused = Failure(kind="nonfinite", message="no scale is safe")
        study.catch_up(Ledger(SPACE, [*records, record(3, at("fp16", 32), refused, "calibration")], search_id="s1"))
    assert [(t.user_attrs["record"], t.state) for t in trials(file)] == [
        (1, TrialState.COMPLETE),
        (2, TrialState.PRUNED),
    ]


def test_the_value_of_a_trial_is_what_the_objective_compares(file: Path) -> None:
    records = [record(1, at("bf16", 64), replace(measured(200.0), tokens_per_second=5000.0))]
    with Study.open(file, "demo", Ledger(SPACE, records, objective="tokens", search_id="s1")):
        pass
    assert [trial.value for trial in trials(file)] == [5000.0]

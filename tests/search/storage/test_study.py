from __future__ import annotations

import math
import os
import signal
import sqlite3
import sys
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import optuna
import pytest
from forked_python import ForkServer
from msgspec.structs import replace
from optuna.trial import FrozenTrial, TrialState
from scripted_backend import measurement
from test_decide import at

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import StudyError
from autotune_amp.core.outcome import Failure, Measurement, Outcome, Purpose, Record
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import FP8_RECIPE
from autotune_amp.numerics.scaler_replay import Replay
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


def record(number: int, candidate: Setting, outcome: Outcome, purpose: Purpose = "search") -> Record:
    return Record(search_id="s1", number=number, candidate=candidate, purpose=purpose, outcome=outcome, seconds=1.0)


class Judged(Ledger):
    """A quarter of the gradient is lost at every loss scale but 2^10; batch 100 was not calibrated."""

    def outcome_with_pair(self, setting: Setting, outcome: Outcome, pair: Pair | None) -> tuple[Outcome, Replay | None]:
        if pair is None or isinstance(outcome, Failure) or setting.batch_size == 100:
            return outcome, None
        return outcome, Replay(3, 0, 1.0 if pair[0] == 1024 else 0.75, pair[0])


def opened(
    storage: str | Path, records: Sequence[Record] = (), *, kind: type[Ledger] = Ledger, owner: str = "", seed: int = 0
) -> AbstractContextManager[Study]:
    """The study of a search with these records."""
    return Study.open(storage, "demo", kind(SPACE, records, search_id="s1"), owner=owner, seed=seed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "study.db"


def trials(file: Path) -> list[FrozenTrial]:
    """What another reader of the storage sees, as a dashboard would."""
    with open_storage(f"sqlite:///{file}") as storage:
        return optuna.load_study(study_name="demo", storage=storage).get_trials(deepcopy=False)


def test_what_is_asked_for_is_run_as_given_and_told(file: Path) -> None:
    with opened(file) as study:
        asked = study.ask(at("bf16", 64))
        assert asked.setting == at("bf16", 64)
        study.tell(asked, measured(200.0), number=7)
        study.tell(study.ask(at("fp32", 100)), OOM)
    trial, failed = trials(file)
    assert (trial.state, trial.value) == (TrialState.COMPLETE, 200.0)
    assert trial.params == {"precision": "bf16", "batch_size": 64}
    assert trial.constraints == {}
    known = {"candidate": "bf16 batch 64", "step_seconds": 0.25, "peak_memory_bytes": 123, "record": 7}
    assert trial.user_attrs == known
    assert (failed.state, failed.value, failed.constraints) == (TrialState.PRUNED, None, {"runs": 1.0}), "never failed"
    assert (failed.user_attrs["failure"], failed.user_attrs["reason"]) == ("oom", OOM.message)


def test_a_storage_of_others_is_not_told_the_words_of_a_failure(file: Path) -> None:
    with opened(f"sqlite:///{file}") as study:
        study.tell(study.ask(at("fp32", 32)), Failure(kind="crash", message="train.py --token=secret died"))
    (told,) = trials(file)
    assert told.user_attrs["failure"] == "crash"
    assert "secret" not in str(told.user_attrs)


def test_fp16_carries_the_loss_scale_and_the_others_do_not(file: Path) -> None:
    with opened(file, kind=Judged) as study:
        study.tell(study.ask(at("fp16", 8)), measured(), number=1)
        study.tell(study.ask(at("fp16", 8), (1024.0, 50)), measured())
        study.tell(study.ask(at("fp16", 100)), measured())
        study.tell(study.ask(at("fp32", 8)), measured())
        assert study.pairs(at("fp16", 8)) == [(65536.0, 2000), (1024.0, 50)]
        assert study.pairs(at("fp16", 100)) == []
    first, second, uncalibrated, fp32 = trials(file)
    assert first.params == {"precision": "fp16", "batch_size": 8, "init_scale": 65536.0, "growth_interval": 2000}
    assert (first.value, first.user_attrs["applied_share"], first.user_attrs["num_skips"]) == (75.0, 0.75, 3)
    assert (second.value, second.user_attrs["snapped_init_scale"]) == (100.0, 1024.0)
    assert "record" not in second.user_attrs
    assert (uncalibrated.value, uncalibrated.user_attrs["is_calibrated"]) == (100.0, False)
    assert fp32.params == {"precision": "fp32", "batch_size": 8}
    assert "is_calibrated" not in fp32.user_attrs


def test_a_further_dimension_is_a_parameter_of_the_trials_that_have_it(file: Path) -> None:
    space = replace(SPACE, variants={"compile": ("default",), "memory_format": ("channels_last",), "weights": ()})
    compiled = replace(at("fp32", 32), compile="default")
    records = [record(1, at("fp32", 32), measured()), record(2, compiled, measured(150.0))]
    with Study.open(file, "demo", Ledger(space, records, search_id="s1"), owner="", seed=0) as study:
        study.tell(study.ask(at("fp32", 16)), measured(50.0))
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
    with opened(file, kind=Judged) as study:
        for _ in range(20):
            asked = study.ask(at("fp16", 16), None)
            assert asked.setting == at("fp16", 16)
            assert asked.pair is not None
            assert math.log2(asked.pair[0]).is_integer()
            assert -24 <= math.log2(asked.pair[0]) <= 24
            assert 10 <= asked.pair[1] <= 20_000
            study.tell(asked, measured())
        assert len(study.pairs(at("fp16", 16))) == 20
    raw = [trial.params["init_scale"] for trial in trials(file)]
    assert len({trial.user_attrs["snapped_init_scale"] for trial in trials(file)}) > 5
    assert any(not math.log2(scale).is_integer() for scale in raw)


def test_a_candidate_outside_the_space_is_refused_and_leaves_nothing_behind(file: Path) -> None:
    with opened(file) as study:
        with pytest.raises(ValueError, match="not in the space"):
            study.ask(at("fp32", 33))
        assert trials(file) == []


@pytest.mark.parametrize("raw", [4, 9, 45, 90, 100])
def test_what_somebody_enqueues_comes_first_and_is_snapped_to_the_nearest_size(file: Path, raw: int) -> None:
    with opened(file) as study:
        study._study.enqueue_trial({"precision": "bf16", "batch_size": raw})
        asked = study.ask(at("fp32", 32))
        assert asked.setting in SPACE.candidates
        assert asked.setting.precision == "bf16"
        ours = asked.setting.batch_size
        assert all(max(ours, raw) / min(ours, raw) <= max(b, raw) / min(b, raw) for b in SIZES)
        study.tell(asked, measured())
        assert study.ask(at("fp32", 8)).setting == at("fp32", 32), "what was asked for comes next"


def test_the_same_seed_asks_for_the_same_pairs(tmp_path: Path) -> None:
    def asked(name: str, seed: int) -> list[Pair | None]:
        with opened(tmp_path / name, seed=seed) as study:
            return [study.ask(at("fp16", 16), None).pair for _ in range(8)]

    assert asked("a.db", 1) == asked("b.db", 1) != asked("c.db", 2)


def test_a_killed_search_leaves_trials_that_the_next_one_marks_and_goes_on_from(
    file: Path, fork_server: ForkServer
) -> None:
    program = """
        import os, pathlib, signal, sys
        sys.path += sys.argv[2:]
        import test_study as t
        context = t.opened(pathlib.Path(sys.argv[1]))
        study = context.__enter__()
        study.tell(study.ask(t.at("fp32", 32)), t.measured(10.0), number=0)
        study.ask(t.at("bf16", 32))
        ours = {"candidate": "fp32 batch 8"}
        study._study.enqueue_trial({"precision": "fp32", "batch_size": 8}, user_attrs=ours)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = ["-c", textwrap.dedent(program), str(file), *sys.path]
    done = fork_server.run(command, cwd=file.parent, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [t.state for t in trials(file)] == [TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING]

    records = [record(0, at("fp32", 32), measured(10.0)), record(1, at("bf16", 32), OOM)]
    with opened(file, records=records) as study:
        assert study.ask(at("fp32", 16)).setting == at("fp32", 16)
    kept, left, waiting, added, _ = trials(file)
    assert kept.value == 10.0
    for trial in (left, waiting):
        assert trial.state == TrialState.FAIL
        assert trial.user_attrs["failure"] == "interrupted"
        assert "killed" in trial.user_attrs["reason"]
    assert added.state == TrialState.PRUNED
    assert added.user_attrs["reason"] == OOM.message
    assert added.user_attrs["record"] == 1
    assert added.constraints == {"runs": 1.0}


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
    ledger = Ledger(SPACE, [record(1, at("fp16", 32), measured())], search_id="s1")
    with Study.open(file, "demo", ledger, note=notes.append) as study:
        asked = study.ask(at("fp32", 32))
        with sqlite3.connect(file) as connection:
            connection.execute("DROP TABLE trial_user_attributes")
        connection.close()
        study.tell(asked, measured())
        assert not study.is_reachable
        without = study.ask(at("fp32", 16))
        assert (without.setting, without.trial) == (at("fp32", 16), None)
        study.tell(without, measured())
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
        study.tell(study.ask(at("fp32", 8)), measured())
        asked = study.ask(at("fp32", 32))
        with open_storage(file) as storage:
            optuna.delete_study(study_name="demo", storage=storage)
        study.tell(asked, measured())
        ledger.append(record(1, at("fp32", 32), measured()))
        study.catch_up(ledger, is_over=is_over)
    assert len(notes) == 2
    assert [(trial.user_attrs["record"], trial.state) for trial in trials(file)] == [(1, TrialState.COMPLETE)]


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
        return opened(url, owner=folder)

    with of("/a") as first:
        running = first.ask(at("fp32", 32))
        for folder, name in (("/b", "demo-s1"), ("/c", "demo-s1-2"), ("/d", "demo-s1-3"), ("/b", "demo-s1")):
            with of(folder) as other:
                assert other.name == name
        first.tell(running, measured(10.0))
    assert [(t.state, t.value) for t in trials(file)] == [(TrialState.COMPLETE, 10.0)]
    with of("/a") as again:
        assert again.name == "demo"


@pytest.mark.parametrize("enqueued", [{"precision": "int8"}, {"precision": "fp32", "batch_size": "many"}])
def test_an_enqueued_trial_that_makes_no_sense_is_an_error_once(file: Path, enqueued: dict[str, Any]) -> None:
    with opened(file) as study:
        study._study.enqueue_trial(enqueued)
        with pytest.raises(StudyError, match=r"enqueued in study demo.*(int8|many)"):
            study.ask(at("fp32", 32))
    with opened(file) as study:
        assert study.ask(at("fp32", 32)).setting == at("fp32", 32)
    assert trials(file)[0].state == TrialState.FAIL


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
    with opened(file) as study:
        study._ledger.requested_objective = "tokens"
        study.tell(study.ask(at("bf16", 64)), replace(measured(200.0), tokens_per_second=5000.0))
    assert [trial.value for trial in trials(file)] == [5000.0]

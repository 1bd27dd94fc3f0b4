"""What a search says and keeps, through the command line: one real search for each way that it ends."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import CommandLine, SharedOnce
from real_searches import FOUND, FP32, TRAINING_TO_COME, WORKLOADS, Searched, searched

from autotune_amp.core.hardware import MachineLoad


@pytest.fixture(scope="session")
def found(shared_once: SharedOnce) -> Searched:
    """A search that recommends: fp32 batch 16 over fp32 batch 4, with a failure at 8."""
    return shared_once("found", lambda folder: searched(folder, WORKLOADS, *FOUND, *TRAINING_TO_COME))


@pytest.fixture(scope="session")
def failed(shared_once: SharedOnce) -> Searched:
    """A search in which nothing works: each batch size fails in a way of its own, and prints megabytes."""
    arguments = ("train.py:failing", *FP32, "--budget", "60", "--baseline", "fp32:4", "--batch-size", "4:32")
    return shared_once("failed", lambda folder: searched(folder, WORKLOADS, *arguments))


@pytest.fixture
def copied(found: Searched, cli: CommandLine) -> CommandLine:
    """The command line in a copy of the folder of the search that recommends."""
    shutil.copytree(found.folder, cli.folder, dirs_exist_ok=True)
    return cli


# --- a search that recommends --------------------------------------------------------------------------------------


def test_the_document(found: Searched) -> None:
    assert found.done.code == 0, found.done.err
    document = found.document
    assert document == json.loads((found.study / "recommendation.json").read_text())
    assert document["format"] == 1
    config = document["config"]
    # A step takes the same time for any batch: the largest is the fastest, four times the baseline.
    assert (config["precision"], config["batch_size"], config["accumulation_steps"]) == ("fp32", 16, 1)
    assert (config["loss_scale"], config["fallback"], config["pinned_modules"]) == (None, [], [])
    evidence = document["evidence"]
    assert evidence["is_confirmed"] != any("Unconfirmed" in warning for warning in document["warnings"])
    assert evidence["speedup"] > 1.5
    for low, value, high in (
        (*evidence["speedup_interval"], evidence["speedup"]),
        (*evidence["samples_per_second_interval"], evidence["samples_per_second"]),
    ):
        assert low <= high
        assert low <= value or value <= high
    assert evidence["peak_memory_bytes"] > 0
    baseline = evidence["baseline"]
    assert (baseline["config"]["precision"], baseline["config"]["batch_size"]) == ("fp32", 4)
    assert 0 < baseline["samples_per_second"] <= 4 / 0.02  # a step sleeps 20 ms
    assert any("learning rate" in warning for warning in document["warnings"]), "the effective batch size was free"
    assert document["search"]["study"] == "train"
    assert msgspec.convert(document["search"]["load"], MachineLoad).num_cpus == evidence["load"]["num_cpus"]
    assert set(document["versions"]) >= {"python", "torch", "optuna", "autotune_amp"}
    assert len(document["fingerprint"]["digest"]) == 64


def test_every_trial_is_a_line_and_the_winner_and_the_baseline_take_turns(found: Searched) -> None:
    records, environment = found.records, found.document["config"]["environment"]
    assert found.document["search"]["num_trials"] == len(records)
    confirming = [line for line in records if line["purpose"] == "confirm"]
    ran = [json.dumps((line["candidate"]["batch_size"], line["environment"])) for line in confirming]
    assert {json.dumps((16, environment)), json.dumps((4, {}))} >= set(ran)
    for number in {line["round"] for line in confirming}:
        in_round = [line["candidate"]["batch_size"] for line in confirming if line["round"] == number]
        assert len(set(in_round)) == len(in_round)


def test_a_failing_candidate_is_tried_once_and_told_with_the_users_traceback(found: Searched) -> None:
    (excluded,) = [entry for entry in found.document["excluded"] if entry["batch_size"] == 8]
    assert excluded["reason"].startswith("workload_error")
    assert "not eight" in excluded["reason"]
    outcomes = [line["outcome"]["outcome"] for line in found.records if line["candidate"]["batch_size"] == 8]
    assert outcomes == ["failure"]
    assert 'train.py", line' in found.done.err
    assert "autotune_amp/trial" not in found.done.err


def test_the_study_opens_in_optuna_and_says_why_a_trial_failed(found: Searched) -> None:
    database = sqlite3.connect(f"file:{found.study}/study.db?mode=ro", uri=True)
    attributes = database.execute("select key, value_json from trial_user_attributes").fetchall()
    parameters = database.execute("select distinct param_name from trial_params").fetchall()
    database.close()
    assert ("failure", '"workload_error"') in attributes
    assert any(key == "reason" and "not eight" in value for key, value in attributes)
    assert {name for (name,) in parameters} == {"precision", "batch_size"}
    assert all(isinstance(json.loads(value), (str, int, float, bool)) for _, value in attributes), "data, nothing else"


def test_what_a_search_leaves_in_its_folder(found: Searched) -> None:
    names = {path.name for path in found.study.iterdir()}
    assert names == {"study.db", "outcomes.jsonl", "recommendation.json", "report.html", ".lock"}
    assert {path.name for path in found.folder.iterdir()} - {"__pycache__"} == {"train.py", "studies"}


def test_the_same_command_is_answered_from_the_cache_and_ranked_again_for_another_objective(
    found: Searched, copied: CommandLine
) -> None:
    file, log = (copied.folder / "studies/train" / name for name in ("recommendation.json", "outcomes.jsonl"))
    measured = log.read_bytes()
    again = copied.search(*FOUND, *TRAINING_TO_COME, "--quiet")
    assert (again.code, again.err, again.document) == (0, "", found.document)

    shown = copied("show", "studies/train", "--objective", "memory", "--json")
    assert shown.code == 0, shown.err
    assert shown.document["objective"] == "memory"
    assert json.loads(file.read_text()) == found.document, "nothing is saved"
    ranked = copied.search(*FOUND, "--objective", "memory")
    assert ranked.code == 0, ranked.err
    assert (ranked.document["job"], ranked.document["config"]) == (None, shown.document["config"])
    assert json.loads(file.read_text()) == ranked.document
    assert log.read_bytes() == measured, "nothing was run"


def test_the_hours_and_the_price_follow_from_the_speed(found: Searched) -> None:
    job, speed = found.document["job"], found.document["evidence"]["samples_per_second"]
    assert (job["num_steps"], job["num_samples"]) == (1000, 16_000)
    assert job["hours"] == pytest.approx(16_000 / speed / 3600)
    assert job["price"] == pytest.approx(3 * job["hours"])


def test_a_folder_with_half_a_line_and_hostile_files_goes_on_and_runs_none_of_them(copied: CommandLine) -> None:
    study = copied.folder / "studies/train"
    whole = (study / "outcomes.jsonl").read_text()
    with (study / "outcomes.jsonl").open("a") as file:
        file.write('{"format":1,"search_id":"half a li')
    for name in ("payload.pkl", "outcomes.pkl", "recommendation.pkl"):
        (study / name).write_bytes(b"cos\nsystem\n(S'touch exploded'\ntR.")
    (study / "recommendation.json").unlink()
    done = copied.search(*FOUND, *TRAINING_TO_COME)
    assert done.code == 0, done.err
    assert (study / "outcomes.jsonl").read_text().startswith(whole)
    searches = [record["purpose"] for record in map(json.loads, (study / "outcomes.jsonl").read_text().splitlines())]
    known = [json.loads(line)["purpose"] for line in whole.splitlines()]
    assert searches.count("search") == known.count("search"), "nothing is searched twice"
    assert not (copied.folder / "exploded").exists()


# --- a search in which nothing works -------------------------------------------------------------------------------


def test_where_every_candidate_fails_every_reason_is_given(failed: Searched) -> None:
    assert failed.done.code == 3, failed.done.err[-2000:]
    document = failed.document
    assert (document["error"]["kind"], document["best"]) == ("nothing_works", None)
    assert document["error"]["next_step"]
    by_size = {entry["batch_size"]: entry["reason"] for entry in document["excluded"]}
    for size, kind, word in (
        (4, "workload_error", "ValueError: the moon is full"),
        (8, "crash", "SIGKILL"),
        (16, "workload_error", "sys.exit(0)"),
        (32, "nonfinite", "nan"),
    ):
        assert by_size[size].startswith(kind)
        assert word in by_size[size]


def test_what_failed_is_on_standard_error_with_the_megabytes_that_it_printed(failed: Searched) -> None:
    assert 'raise ValueError("the moon is full")' in failed.done.err
    assert "fp32 batch 4" in failed.done.err
    assert failed.done.err.count("x") >= 2_000_000
    assert "othing was recommended" in (failed.study / "report.html").read_text()


# --- other kinds of search -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_effective_batch_size_is_kept_exactly_in_a_storage_of_the_users_own(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--effective-batch-size", "24", "--device", "cpu")
    storage = f"sqlite:///{cli.folder}/own.db"
    done = cli.search("train.py:plain", "--budget", "30", *options, "--storage", storage)
    assert done.code == 0, done.err
    document = done.document
    assert document["evidence"]["accumulation"]["verdict"] == "mean"
    assert not any("learning rate" in warning for warning in document["warnings"])
    rows = [row for row in document["candidates"] if row["precision"] == "fp32"]
    assert all(row["batch_size"] * row["accumulation_steps"] == 24 for row in [document["config"], *rows])
    # One optimizer step is 24 / b passes of at least 20 ms, so that the largest batch is the fastest.
    assert document["config"]["batch_size"] == max(row["batch_size"] for row in rows if row["step_seconds"])
    assert (cli.folder / "own.db").exists()
    assert not (cli.folder / "studies/train-plain/study.db").exists()


@pytest.mark.slow
def test_the_budget_is_kept_with_long_steps_and_a_long_set_up(cli: CommandLine) -> None:
    """The model takes ten seconds to build and a step one."""
    text = WORKLOADS.replace("time.sleep(0.02)", "time.sleep(1.0)")
    cli.write("train.py", text.replace("lambda: nn.Linear(8, 1)", "lambda: time.sleep(10) or nn.Linear(8, 1)"))
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--device", "cpu", "--effective-batch-size", "free")
    done = cli.search("train.py:plain", "--budget", "80", *options)
    assert done.code == 0, done.err
    assert done.document["search"]["seconds"] < 80 + 8, "beyond the budget processes end, no trial begins"
    assert "built once and shared" in done.err
    unconfirmed = any("nconfirmed" in warning for warning in done.document["warnings"])
    assert unconfirmed != done.document["evidence"]["is_confirmed"]


@pytest.mark.slow
def test_the_embedded_default_needs_no_argument(cli: CommandLine) -> None:
    done = cli("search", "--budget", "25")
    assert done.code == 0, done.err
    assert "fp32 batch 32" in done.err
    assert (cli.folder / "studies/embedded/recommendation.json").exists()
    assert "Recommended" in cli("show").out


FP16 = """
def fp16():
    def loss(model, batch):
        time.sleep(0.1)
        return model(batch).square().mean()
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return Workload(model, loss, lambda size: torch.randn(size, 8), lambda p: torch.optim.SGD(p, lr=1e-6))

class Offset(nn.Module):
    '''Inputs around 1000, which bf16 cannot tell apart before their mean is taken off.'''
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs):
        hidden = self.first(inputs).float()
        return self.rest(hidden - hidden.mean(0))

def offset():
    def loss(model, batch):
        time.sleep(0.1)
        return (model(batch[0]).squeeze(-1) - batch[1]).square().mean()
    def batch(size):
        inputs = torch.randn(size, 8)
        return inputs + 1000, inputs.sum(1)
    return Workload(Offset, loss, batch, lambda p: torch.optim.SGD(p, lr=1e-6))
"""
CHECKED = ("--device", "cpu", "--baseline", "fp32:4", "--batch-size", "16:16", "--effective-batch-size", "free")


def fp16_trials(study: Path) -> list[dict[str, Any]]:
    """What the study knows of each trial of fp16, its parameters among it."""
    trials: dict[int, dict[str, Any]] = {}
    database = sqlite3.connect(study / "study.db")
    for number, key, value in database.execute("select trial_id, key, value_json from trial_user_attributes"):
        trials.setdefault(number, {})[key] = json.loads(value)
    for number, key, value in database.execute("select trial_id, param_name, param_value from trial_params"):
        trials.setdefault(number, {})[key] = value
    database.close()
    return [trial for trial in trials.values() if str(trial["candidate"]).startswith("fp16")]


@pytest.mark.slow
def test_fp16_is_measured_once_calibrated_and_says_what_its_loss_scale_is_based_on(tmp_path: Path) -> None:
    arguments = ("train.py:fp16", *CHECKED, "--budget", "90", "--precision", "fp16", "--steps", "3000")
    search = searched(tmp_path, WORKLOADS + FP16, *arguments)
    assert search.done.code == 0, search.done.err
    config, evidence = search.document["config"], search.document["evidence"]
    assert config["precision"] == "fp16"
    scale = evidence["loss_scale"]
    assert scale["num_steps"] == 3000
    assert scale["num_skips"] <= scale["default_num_skips"]
    assert config["loss_scale"]["init_scale"] <= 2 ** scale["log2_safe_scale_min"]
    assert evidence["fidelity"]["verdict"] == "faithful"
    assert search.document["fidelity"] == [evidence["fidelity"]]
    checks = [line for line in search.records if line["purpose"] in ("fidelity", "calibration")]
    assert search.document["search"]["num_trials"] == len(search.records) - len(checks)
    (calibrated,) = [line["outcome"] for line in checks if line["purpose"] == "calibration"]
    trials = fp16_trials(search.study)
    assert all({"init_scale", "growth_interval", "applied_share", "num_skips"} <= set(trial) for trial in trials)
    assert sum("record" in trial for trial in trials) < len(trials), "the others were replayed"
    assert calibrated["init_scale"] in {trial["snapped_init_scale"] for trial in trials}


@pytest.mark.slow
def test_a_precision_that_pins_heal_is_recommended_with_them(tmp_path: Path) -> None:
    # Finding the pins takes the longest of all checks, and on a busy machine several times as long.
    arguments = ("train.py:offset", *CHECKED, "--budget", "90", "--precision", "bf16")
    search = searched(tmp_path, WORKLOADS + FP16, *arguments)
    assert search.done.code == 0, search.done.err
    config = search.document["config"]
    assert (config["precision"], config["batch_size"], config["pinned_modules"]) == ("bf16", 16, ["first"])
    assert [check["verdict"] for check in search.document["fidelity"]] == ["unfaithful", "faithful"]
    assert search.document["evidence"]["fidelity"]["pinned_modules"] == ["first"]

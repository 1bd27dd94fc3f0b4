"""What a search says and keeps, through the command line: one real search for each way that it ends."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from conftest import CommandLine, SharedOnce
from forked_python import ForkServer
from real_searches import CHECKS, FOUND, FP32, TRAINING_TO_COME, WORKLOADS, Searched, searched

pytestmark = pytest.mark.slow


@pytest.fixture
def found(shared_once: SharedOnce, cli_server: ForkServer | None) -> Searched:
    """A search that recommends: fp32 batch 16 over fp32 batch 4, with a failure at 32."""
    return shared_once("found", lambda folder: searched(cli_server, folder, WORKLOADS, *FOUND, *TRAINING_TO_COME))


@pytest.fixture
def failed(shared_once: SharedOnce, cli_server: ForkServer | None) -> Searched:
    """A search in which nothing works: each batch size fails in a way of its own, and prints megabytes."""
    arguments = ("train.py:failing", *FP32, "--budget", "60", "--baseline", "fp32:4", "--batch-size", "4:32")
    return shared_once("failed", lambda folder: searched(cli_server, folder, WORKLOADS, *arguments))


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
    config, evidence, job = document["config"], document["evidence"], document["job"]
    # A step takes the same time for any batch: the largest is the fastest, four times the baseline.
    assert (config["precision"], config["batch_size"], config["accumulation_steps"]) == ("fp32", 16, 1)
    assert evidence["speedup"] > 1.5
    assert evidence["peak_memory_bytes"] > 0
    assert 0 < evidence["baseline"]["samples_per_second"] <= 4 / 0.02  # a step sleeps 20 ms
    said = (*document["warnings"], *document["notes"])  # a busy machine has warnings of its own
    assert any("learning rate" in text for text in said), "the effective batch size was free"
    assert evidence["is_confirmed"] != any("Unconfirmed" in text for text in said)
    assert document["search"]["num_trials"] == sum(line["purpose"] not in CHECKS for line in found.records)
    assert set(document["versions"]) >= {"python", "torch", "optuna", "autotune_amp"}
    assert len(document["fingerprint"]["digest"]) == 64
    assert (job["num_steps"], job["num_samples"]) == (1000, 16_000)
    assert job["hours"] == pytest.approx(16_000 / evidence["samples_per_second"] / 3600)
    assert job["price"] == pytest.approx(3 * job["hours"])


def test_a_failing_candidate_is_tried_once_and_told_with_the_users_traceback(found: Searched) -> None:
    (excluded,) = [entry for entry in found.document["excluded"] if entry["batch_size"] == 32]
    assert excluded["reason"].startswith("workload_error")
    assert "not thirty-two" in excluded["reason"]
    outcomes = [line["outcome"]["outcome"] for line in found.records if line["candidate"]["batch_size"] == 32]
    assert outcomes == ["failure"]
    assert 'train.py", line' in found.done.err
    assert "autotune_amp/trial" not in found.done.err


def test_what_a_search_leaves_in_its_folder_and_what_optuna_reads_there(found: Searched) -> None:
    names = {path.name for path in found.study.iterdir()}
    assert names == {"study.db", "outcomes.jsonl", "recommendation.json", "report.html", ".lock"}
    assert {path.name for path in found.folder.iterdir()} - {"__pycache__"} == {"train.py", "studies"}
    database = sqlite3.connect(f"file:{found.study}/study.db?mode=ro", uri=True)
    attributes = database.execute("select key, value_json from trial_user_attributes").fetchall()
    parameters = database.execute("select distinct param_name from trial_params").fetchall()
    database.close()
    assert ("failure", '"workload_error"') in attributes
    assert any(key == "reason" and "not thirty-two" in value for key, value in attributes)
    further = {"optimizer_impl", "compile"}  # of trials on what leads, where they were worth one
    assert {name for (name,) in parameters} - further == {"precision", "batch_size"}


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
    now = (study / "outcomes.jsonl").read_text()
    assert now.startswith(whole)
    before, since = (
        {json.dumps(one["candidate"]) for one in map(json.loads, text.splitlines()) if one["purpose"] == "search"}
        for text in (whole, now[len(whole) :])
    )
    assert before
    assert not before & since, "nothing is searched twice"
    assert not (copied.folder / "exploded").exists()


# --- a search in which nothing works -------------------------------------------------------------------------------


def test_where_every_candidate_fails_every_reason_is_given_and_all_that_it_printed(failed: Searched) -> None:
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
    assert 'raise ValueError("the moon is full")' in failed.done.err
    assert failed.done.err.count("x") >= 2_000_000
    assert "othing was recommended" in (failed.study / "report.html").read_text()


# --- other kinds of search -----------------------------------------------------------------------------------------


def test_an_effective_batch_size_is_kept_exactly_in_a_storage_of_the_users_own(cli: CommandLine) -> None:
    cli.write("train.py", WORKLOADS)
    options = ("--precision", "fp32", "--baseline", "fp32:4", "--effective-batch-size", "24", "--device", "cpu")
    done = cli.search("train.py:plain", "--budget", "60", *options, "--storage", f"sqlite:///{cli.folder}/own.db")
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


def test_the_embedded_default_needs_no_argument(cli: CommandLine) -> None:
    done = cli("search", "--budget", "40")
    assert done.code == 0, done.err
    assert (cli.folder / "studies/embedded/recommendation.json").exists()
    assert re.search("Recommended|Keep what you have", cli("show").out)


FP16 = """
def fp16():
    def loss(model, batch):
        time.sleep(0.1)
        return model(batch).square().mean()
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return Workload(model, loss, lambda size: torch.randn(size, 8), lambda p: torch.optim.SGD(p, lr=1e-6))
"""
CHECKED = ("--device", "cpu", "--baseline", "fp32:4", "--batch-size", "16:16", "--effective-batch-size", "free")


def test_fp16_is_calibrated_once_and_says_what_its_loss_scale_is_based_on(
    cli_server: ForkServer | None, tmp_path: Path
) -> None:
    arguments = ("train.py:fp16", *CHECKED, "--budget", "90", "--precision", "fp16", "--steps", "3000")
    search = searched(cli_server, tmp_path, WORKLOADS + FP16, *arguments)
    assert search.done.code == 0, search.done.err
    config, evidence = search.document["config"], search.document["evidence"]
    scale = evidence["loss_scale"]
    assert (config["precision"], evidence["fidelity"]["verdict"], scale["num_steps"]) == ("fp16", "faithful", 3000)
    assert scale["num_skips"] <= scale["default_num_skips"]
    assert config["loss_scale"]["init_scale"] <= 2 ** scale["log2_safe_scale_min"]
    checks = [line["purpose"] for line in search.records if line["purpose"] in CHECKS]
    assert checks.count("calibration") == 1
    assert search.document["search"]["num_trials"] == len(search.records) - len(checks)
    database = sqlite3.connect(search.study / "study.db")
    names = {name for (name,) in database.execute("select distinct param_name from trial_params")}
    database.close()
    assert {"init_scale", "growth_interval"} <= names

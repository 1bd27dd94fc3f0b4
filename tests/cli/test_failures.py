"""Whatever a workload does, the search goes on; where nothing works it says why. Every failure is provoked for real."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import CommandLine

WORKLOAD = """
import os, signal, sys, time
import torch
from torch import nn
from autotune_amp import Workload

def fail(size):
    {failure}

def make_batch(size):
    return torch.randn(size, 8), torch.randn(size, 1)

def loss(model, batch):
    inputs, targets = batch
    result = (model(inputs) - targets).square().mean()
    if {when}:
        changed = fail(len(inputs))
        return result if changed is None else result * changed
    return result

def workload():
    return Workload(lambda: nn.Linear(8, 1), loss, make_batch, lambda p: torch.optim.SGD(p, lr=0.01))
"""

# The failure, and what its reason must say. The kind stands first in every reason.
FAILURES = {
    "raises": ("raise ValueError('the moon is full')", ["workload_error", "ValueError: the moon is full"]),
    "raises bytes": ("raise ValueError('caf\\udce9')", ["workload_error", "ValueError: caf"]),
    "out of memory": ("torch.ones(1 << 40).sum()", ["oom"]),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", ["crash", "SIGKILL"]),
    "segfaults": ("import ctypes; ctypes.string_at(0)", ["crash", "segmentation fault"]),
    "exits": ("os._exit(0)", ["crash", "exited with status 0 before it reported"]),
    "sys.exit": ("sys.exit(0)", ["workload_error", "sys.exit(0)"]),
    "hangs": ("time.sleep(1000)", ["timeout"]),
    "non-finite": ("return float('nan')", ["nonfinite", "nan"]),
}
FREE = ("--effective-batch-size", "free")
SHORT = ("--budget", "24", "--precision", "fp32", "--memory-fraction", "0.05", "--device", "cpu", *FREE)


def reasons(document: dict[str, Any]) -> str:
    return "\n".join(entry["reason"] for entry in document["excluded"])


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_candidate_does_not_end_the_search(cli: CommandLine, name: str) -> None:
    failure, words = FAILURES[name]
    target = cli.write("train.py", WORKLOAD.format(failure=failure, when="len(inputs) == 16"))
    done = cli.search(target, *SHORT, "--baseline", "fp32:8", "--batch-size", "16:16")
    assert done.code == 0, done.err
    document = done.document
    assert (document["config"]["precision"], document["config"]["batch_size"]) == ("fp32", 8)
    assert document["search"]["num_failures"] >= 1  # on a busy machine a confirmation may be cut off as well
    (failed,) = [entry for entry in document["excluded"] if entry["batch_size"] == 16]
    outcomes = (cli.folder / "studies/train/outcomes.jsonl").read_text().splitlines()
    tried = [json.loads(line) for line in outcomes if json.loads(line)["candidate"]["batch_size"] == 16]
    assert [line["outcome"]["outcome"] for line in tried] == ["failure"], "it is not tried twice"
    for word in words:
        assert word in failed["reason"]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("raises", "raises bytes"),
        ("killed", "segfaults"),
        ("exits", "sys.exit"),
        ("non-finite", "hangs"),
        ("out of memory", "out of memory"),
    ],
)
def test_where_every_candidate_fails_every_reason_is_given(cli: CommandLine, name: str, other: str) -> None:
    failures = {8: FAILURES[name], 16: FAILURES[other]}
    body = "\n".join(f"    if size == {size}:\n        {failure}" for size, (failure, _) in failures.items())
    target = cli.write("train.py", WORKLOAD.format(failure=body.strip(), when="True"))
    done = cli.search(target, *SHORT, "--baseline", "fp32:8", "--batch-size", "8:16")
    assert done.code == 3, done.err
    document = done.document
    assert document["error"]["kind"] == "nothing_works"
    assert document["error"]["next_step"]
    assert document["best"] is None
    by_size = {entry["batch_size"]: entry["reason"] for entry in document["excluded"]}
    expected = {8: FAILURES[name][1], 16: FAILURES[other][1] if name != other else ["fp32 batch 8 ran out of memory"]}
    for size, words in expected.items():
        for word in words:
            assert word in by_size[size]


def test_the_users_traceback_arrives_with_the_candidate(cli: CommandLine) -> None:
    failure = "raise ValueError('the moon is full')"
    target = cli.write("train.py", WORKLOAD.format(failure=failure, when="True"))
    done = cli("search", target, *SHORT, "--baseline", "fp32:8", "--batch-size", "8:8")
    assert done.code == 3
    assert done.out == ""
    assert 'train.py", line' in done.err
    assert failure in done.err
    assert "fp32 batch 8" in done.err
    assert "autotune_amp/trial" not in done.err


def test_megabytes_of_prints_reach_standard_error_and_spoil_nothing(cli: CommandLine) -> None:
    noise = "print('x' * 2_000_000); sys.stderr.write('y' * 2_000_000); sys.stdout.write('{\"event\": \"result\"}\\n')"
    target = cli.write("train.py", WORKLOAD.format(failure=noise, when="True"))
    # The noise takes its time: in place of the short budget.
    done = cli.search(target, *SHORT, "--budget", "60", "--baseline", "fp32:8", "--batch-size", "8:8")
    assert done.code == 0, done.err[-2000:]
    assert done.document["config"]["batch_size"] == 8
    assert done.err.count("x") >= 2_000_000
    assert done.err.count("y") >= 2_000_000


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ("lambda size: iter([])", "it yielded no batch"),
        ("lambda size: (torch.randn(size // 2, 8), torch.randn(size // 2, 1))", "was asked for 8 samples and gave 4"),
        ("lambda size: iter([(torch.randn(3, 8), torch.randn(3, 1))])", "its largest batch held 3"),
    ],
)
def test_data_with_no_batch_or_too_few_samples(cli: CommandLine, data: str, word: str) -> None:
    text = WORKLOAD.format(failure="pass", when="False").replace("loss, make_batch,", f"loss, {data},")
    done = cli.search(cli.write("train.py", text), *SHORT, "--baseline", "fp32:8", "--batch-size", "8:8")
    assert done.code == 3
    assert word in reasons(done.document)
    assert "workload_error" in reasons(done.document)


@pytest.mark.parametrize(
    ("text", "target", "word"),
    [
        ("import a_module_that_is_missing\n", "train.py:workload", "No module named 'a_module_that_is_missing'"),
        ("def other(): pass\n", "train.py:workload", "train.py has no 'workload'"),
        ("", "missing.py:workload", "There is no file missing.py"),
        ("", "missing_package.module:workload", "There is no module 'missing_package'"),
        ("", "train.py", "names no workload"),
        ("def workload(size): pass\n", "train.py:workload", "wrong signature (size)"),
        ("def workload(): return 3\n", "train.py:workload", "returned a int"),
        ("workload = 3\n", "train.py:workload", "is a int"),
        ("def workload(): raise KeyError('gone')\n", "train.py:workload", "KeyError: 'gone'"),
        ("import os; os.kill(os.getpid(), 11)\n", "train.py:workload", "segmentation fault"),
        ("import autotune_amp\nautotune_amp.recommend_config()\n", "train.py:workload", "called inside a trial"),
    ],
)
def test_a_workload_that_cannot_be_loaded(cli: CommandLine, text: str, target: str, word: str) -> None:
    cli.write("train.py", text)
    done = cli.search(target, *SHORT)
    assert done.code == 2, done.err
    document = done.document
    assert word in document["error"]["message"]
    assert document["error"]["next_step"]
    assert document["excluded"] == []
    assert document["best"] is None


def test_a_misspelt_function_is_told_what_there_is_and_leaves_no_folder(cli: CommandLine) -> None:
    text = "from autotune_amp import Workload\ndef load(path): ...\ndef tiny(size=8): ...\nREADY = Workload\n"
    cli.write("train.py", text)
    done = cli.search("train.py:tinny", *SHORT)
    assert done.document["error"]["next_step"] == "Name one that returns a Workload; it has tiny."
    assert not (cli.folder / "studies/train-tinny").exists()


def test_a_model_that_cannot_be_built(cli: CommandLine) -> None:
    text = WORKLOAD.format(failure="pass", when="False").replace("lambda: nn.Linear(8, 1)", "lambda: nn.Linear('8', 1)")
    done = cli.search(cli.write("train.py", text), *SHORT)
    assert done.code == 3
    assert "TypeError" in reasons(done.document)
    assert "train.py" in reasons(done.document)


def test_leftover_processes_of_a_trial_are_ended(cli: CommandLine) -> None:
    spawn = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    target = cli.write("train.py", WORKLOAD.format(failure=spawn, when="True"))
    assert cli.search(target, *SHORT, "--baseline", "fp32:8", "--batch-size", "8:8").code == 0

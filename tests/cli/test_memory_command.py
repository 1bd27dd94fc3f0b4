"""`autotune-amp memory` and `fidelity` in real processes: what they hold, what fits, wrong sizes; a search's limit."""

from __future__ import annotations

import json

import pytest
from conftest import CommandLine

from autotune_amp.cli import run

WIDTH, BATCH = 64, 8
WORKLOAD = f"""
import torch
from torch import nn
from autotune_amp import Workload

def loss(model, batch):
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16:
        raise torch.OutOfMemoryError("fp16 takes too much")
    return (model(batch[0]) - batch[1]).square().mean()

def data(size):
    x = torch.randn(size, {WIDTH})
    return x, x[:, :1].clone()

def workload():
    return Workload(lambda: nn.Linear({WIDTH}, 1), loss, data, torch.optim.AdamW)
"""


@pytest.mark.slow
def test_one_document_of_exact_parts_what_fits_and_what_runs_out_of_memory_alone(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    precisions = ("--precision", "fp32", "--precision", "fp16")
    done = cli("memory", target, "--device", "cpu", "--batch-size", str(BATCH), *precisions, "--fit", "1GiB", "--json")
    assert done.code == 0, done.err
    document = done.document
    fp32, fp16 = document["rows"]
    assert (fp16["breakdown"], fp16["failure"], fp16["reason"]) == (
        None,
        "oom",
        "OutOfMemoryError: fp16 takes too much",
    )
    parts = fp32["breakdown"]
    parameters = 4 * (WIDTH + 1)
    assert parts["parameters_bytes"] == parts["gradients_bytes"] == parameters
    assert parts["optimizer_state_bytes"] == 2 * parameters + 2 * 4
    assert parts["batch_bytes"] == 4 * BATCH * (WIDTH + 1)
    assert parts["modules"] == [{"name": "", "num_bytes": 4 * BATCH}]
    assert (document["limit_bytes"], document["batch_size"]) == (2**30, BATCH)
    assert [size for size, _ in fp32["largest"]["measured"]][:2] == [BATCH, 2 * BATCH]
    assert "fp32, batch size 16" in done.err


@pytest.mark.slow
def test_a_fidelity_check_is_one_document_whatever_it_says_and_text_without_json(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    done = cli("fidelity", target, "--device", "cpu", "--precision", "fp16", "--json", "--quiet")
    assert done.code == 0, done.err
    assert done.err == ""
    assert done.document["format"] == 1
    found = done.document["fidelity"]
    assert (found["precision"], found["verdict"], found["batch_size"]) == ("fp16", "unchecked", 1)
    shown = cli("fidelity", target, "--device", "cpu", "--batch-size", "4", "--seed", "3")
    assert (shown.code, "bf16 against fp32, batch size 4: " in shown.out) == (0, True)


@pytest.mark.slow
def test_a_search_whose_limit_nothing_fits_into_names_the_limit(cli: CommandLine) -> None:
    target = cli.write("train.py", WORKLOAD)
    done = cli.search(target, "--device", "cpu", "--precision", "fp32", "--memory-limit", "1MiB", "--budget", "60")
    assert done.code == 3, done.err
    assert {excluded["precision"] for excluded in done.document["excluded"]} == {"fp32"}
    assert "over the limit of 1 MiB" in done.document["excluded"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["memory", "--fit", "16 gigs"], "--fit is '16 gigs'"),
        (["memory", "--batch-size", "0"], "--batch-size is 0"),
        (["memory", "--snapshot", "memory.pickle", "--device", "cpu"], "--snapshot needs a CUDA device"),
        (["search", "--memory-limit", "lots"], "--memory-limit is 'lots'"),
        (["fidelity", "--precision", "half"], "'half'"),
        (["fidelity", "--budget", "-1"], "--budget is -1"),
    ],
)
def test_a_wrong_request_is_a_document_with_what_was_given(
    arguments: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json", "--quiet"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "invalid_request"
    assert given in error["message"]
    assert error["next_step"]

"""The run log: what it says of a real training, across resumptions and kills, and that the training stays the same."""

from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from resumable import BEYOND_FP16, CLEAN, LARGE_GRADIENT, Run
from test_status import CLEAN as STEP
from test_status import scripted
from torch import nn
from training import fp16

from autotune_amp import LossScale, PrecisionController
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.runtime import run_log
from autotune_amp.runtime.run_log import BeginLine, SampleLine
from autotune_amp.runtime.status import SAMPLE_EVERY


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def training(path: Path) -> Run:
    """An optimizer step is two passes; without a rerun, what overflows in the forward pass steps down on trial."""
    torch.manual_seed(0)
    config = fp16(accumulation_steps=2, loss_scale=LossScale(init_scale=4096.0))
    run = Run(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), config, attaches=False)
    run.controller = PrecisionController(config, device="cpu", halt=False, run_log=path)
    return run


def documents(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_provoked_overflow_and_the_demotion_after_it_stand_in_the_log(path: Path) -> None:
    run = training(path)
    steps = [*CLEAN[:12], *[LARGE_GRADIENT] * 2, *CLEAN[:2], *[BEYOND_FP16] * 4, *CLEAN[:6]]
    for batch in steps:
        run.step(batch)
    status, found = run.controller.status(), run_log.read(path)
    begin, *rest = found.lines
    assert isinstance(begin, BeginLine)
    assert (begin.update, begin.precision, begin.scale, begin.is_resumed) == (0, "fp16", 4096.0, False)
    assert (begin.device, begin.rank, begin.num_ranks) == ("cpu", 0, 1)
    assert begin.config.plans[0].precision == "bf16"
    overflows = [line for line in rest if isinstance(line, SampleLine)]
    assert [(line.update, line.scale, line.num_skips) for line in overflows] == [(7, 2048.0, 1)]
    assert overflows[0].loss is not None
    assert math.isfinite(overflows[0].loss)
    assert [(move.kind, move.update, move.before, move.after, move.reason) for move in found.moves] == [
        (record.kind, record.update, record.before, record.after, record.reason) for record in status.history
    ]
    assert [move.kind for move in found.moves] == ["demotion"]
    assert (found.moves[0].num_skips, found.moves[0].num_steps) == (3, 7)
    assert found.moves[0].precision == "bf16"
    assert found.moves[0].scale is None, "bf16 is not scaled"


def test_a_loss_that_is_not_finite_is_null_and_what_is_off_is_said_once(path: Path) -> None:
    trained = scripted(fp16(fallback=["fp32"]), run_log=path, halt=False)
    trained.run(*STEP * (SAMPLE_EVERY - 1), "bad loss")
    trained.controller.disable()
    trained.run(*STEP * 3)
    lines = documents(path)[1:]
    assert [(line["event"], line["update"], line["precision"], line["scale"]) for line in lines] == [
        ("sample", SAMPLE_EVERY, "fp16", 1024.0),
        ("move", SAMPLE_EVERY, "fp32", None),
    ]
    assert lines[0]["loss"] is None


def test_a_resumed_run_says_so_and_what_it_trains_again_counts_once(path: Path) -> None:
    first = training(path)
    for batch in CLEAN[:12]:
        first.step(batch)
    saved = first.save()
    for batch in [*[BEYOND_FP16] * 4, *CLEAN[:2]]:  # after the checkpoint: lost, with the demotion
        first.step(batch)
    assert len(run_log.read(path).moves) == 1
    second = training(path).load(saved)
    for batch in [*[LARGE_GRADIENT] * 2, *CLEAN[:4]]:
        second.step(batch)
    found = run_log.read(path)
    assert [type(line) for line in found.lines] == [BeginLine, BeginLine, SampleLine]
    begins = [(line.update, line.is_resumed) for line in found.lines if isinstance(line, BeginLine)]
    assert begins == [(0, False), (6, True)]
    assert found.lines[-1].scale == 2048.0
    assert (found.num_other_runs, found.num_cut_lines) == (0, 0)
    assert [line["event"] for line in documents(path)] == ["begin", "move", "begin", "sample"], "nothing was taken out"


def test_a_resumed_run_goes_on_with_its_own_lines_past_another_run(path: Path) -> None:
    first = scripted(run_log=path).run("clean", "overflow")
    file = io.BytesIO()
    torch.save(first.controller.state_dict(), file)
    first.run("overflow")  # lost: after the checkpoint
    scripted(fp16(batch_size=2), run_log=path).run("clean", "overflow")
    file.seek(0)
    resumed = scripted(run_log=path)
    resumed.controller.load_state_dict(torch.load(file, weights_only=True))
    resumed.run("overflow")
    found = run_log.read(path)
    assert [(type(line), line.update, line.scale) for line in found.lines] == [
        (BeginLine, 0, 1024.0),
        (SampleLine, 2, 512.0),
        (BeginLine, 2, 512.0),
        (SampleLine, 3, 256.0),
    ]
    assert (found.begin.config.batch_size, found.num_other_runs) == (4, 1)


def test_a_line_cut_short_by_a_kill_spoils_nothing(path: Path) -> None:
    run = scripted(run_log=path).run("clean", "overflow", "clean", "overflow")
    path.write_bytes(path.read_bytes()[:-40])
    found = run_log.read(path)
    assert (len(found.lines), found.num_cut_lines) == (2, 1)
    resumed = scripted(run_log=path)
    resumed.controller.load_state_dict(run.controller.state_dict())
    resumed.run("overflow")
    found = run_log.read(path)
    assert [type(line) for line in found.lines] == [BeginLine, SampleLine, BeginLine, SampleLine]
    assert found.num_cut_lines == 1
    assert found.lines[-1].scale == 128.0


def test_damage_elsewhere_is_an_error_that_names_the_line(path: Path) -> None:
    scripted(run_log=path).run("clean", "overflow", "overflow")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"event":"sample"}\n', *lines[2:]]))
    with pytest.raises(FormatError, match="line 2 is damaged"):
        run_log.read(path)
    path.write_text("".join([lines[0].replace('"format":1', '"format":9'), *lines[1:]]))
    with pytest.raises(FormatError, match="format 9"):
        run_log.read(path)
    path.write_text(lines[0].replace('"batch_size":4', '"batch_size":0'))
    with pytest.raises(FormatError, match="batch_size"):
        run_log.read(path)
    path.write_text(lines[1])
    with pytest.raises(FormatError, match="before any run"):
        run_log.read(path)
    path.write_text("not a log")
    with pytest.raises(FormatError, match="holds no run"):
        run_log.read(path)


def test_only_rank_0_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # as torchrun says it, before init_process_group
    scripted(run_log=path).run("clean", "overflow")
    assert not path.exists()


def test_a_file_that_cannot_be_a_run_log_is_refused_at_once(tmp_path: Path) -> None:
    other = tmp_path / "data.jsonl"
    other.write_text('{"text": "mine"}\n')
    for name, why in ((other, "is no run log"), (tmp_path, "Is a directory"), (tmp_path / "a/b", "No such file")):
        with pytest.raises(InvalidRequestError, match=why):
            scripted(run_log=name)
    assert other.read_text() == '{"text": "mine"}\n'


def test_a_log_that_can_no_longer_be_written_does_not_end_the_training(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="autotune_amp.runtime")
    trained = scripted(run_log=path).run("clean")
    path.unlink()
    path.mkdir()
    trained.run("overflow", "overflow", "clean")
    trained.assert_trained_on(2)
    assert [record.getMessage() for record in caplog.records] == [
        f"The run log {path} cannot be written, and ends here: Is a directory."
    ]

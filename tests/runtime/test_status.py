"""What the controller tells: status, statistics file, listeners, scalars, logs. Its numbers are those of a script."""

from __future__ import annotations

import gc
import io
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resumable import BEYOND_FP16, LARGE_GRADIENT, Run
from resumable import CLEAN as STEADY_BATCHES
from torch import Tensor, nn

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.config import FallbackPlan
from autotune_amp.core.errors import FormatError, InvalidRequestError, StudyError
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.hardware import cpu
from autotune_amp.precision import torch_state
from autotune_amp.runtime import metrics, run_log
from autotune_amp.runtime.metrics import SAMPLE_EVERY
from autotune_amp.runtime.run_log import BeginLine, SampleLine
from autotune_amp.runtime.status import MoveRecord

Kind: TypeAlias = Literal["clean", "overflow", "bad loss"]
CLEAN: list[Kind] = ["clean"]
BAD_LOSS: list[Kind] = ["bad loss"]
SCRIPT: list[Kind] = ["clean", "clean", "clean", "overflow", "overflow", "clean", "clean", "bad loss", "clean", "clean"]


def fp16(**options: Any) -> AmpConfig:
    return AmpConfig(**{"precision": "fp16", "batch_size": 4, "loss_scale": LossScale(init_scale=1024.0), **options})


class Scripted:
    """One weight trained by a script of what each step meets."""

    def __init__(self, controller: PrecisionController) -> None:
        self.controller = controller
        self.weight = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.125)
        self.has_stepped = False

    def loss(self, kind: Kind) -> Tensor:
        loss = self.weight.square().sum()
        if kind == "overflow":
            loss = loss + (self.weight - self.weight.detach()).sqrt().sum()
        return loss * float("nan") if kind == "bad loss" else loss

    def run(self, *kinds: Kind) -> Scripted:
        for kind in kinds:
            self.optimizer.zero_grad()
            with self.controller.autocast():
                loss = self.loss(kind)
            self.controller.backward(loss)
            self.has_stepped = bool(self.controller.step(self.optimizer))
            self.controller.update()
        return self

    def assert_trained_on(self, num_clean: int) -> None:
        """By a plain loop of clean steps alone: each is times 1 - 2 * 0.125."""
        weight = torch.tensor([1.0, -2.0])
        for _ in range(num_clean):
            weight = weight - 0.125 * (2 * weight)
        assert torch.equal(self.weight, weight)


def scripted(config: AmpConfig | None = None, **options: Any) -> Scripted:
    return Scripted(PrecisionController(config or fp16(), device="cpu", **options))


def test_the_numbers_are_those_of_the_script() -> None:
    training = scripted()
    status = training.controller.status()
    assert (status.num_updates, status.skip_share, status.amp_share, status.step_seconds) == (0, 0.0, 0.0, None)
    assert (status.precision, status.scale, status.history, status.pinned_modules) == ("fp16", 1024.0, (), ())
    status = training.run(*SCRIPT).controller.status()
    assert (status.num_updates, status.num_steps, status.num_skips) == (10, 7, 3)
    assert (status.skip_share, status.amp_share, status.forward_max) == (0.3, 1.0, None)
    assert status.scale == 256.0  # two overflows; a loss that is not finite lowers nothing
    assert (status.peak_memory_bytes or 0) > 2**20
    training.assert_trained_on(7)


def test_the_median_time_of_the_current_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 9.0, 10.0, 20.0, 22.0])
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    training = scripted(fp16(fallback=["fp32"])).run(*CLEAN * 5)
    assert training.controller.status().step_seconds == 1.0
    training.controller.set_precision("fp32")
    training.run("clean", "clean")
    assert training.controller.status().step_seconds == 2.0


def test_the_history_has_every_move_with_its_reason_and_listeners_hear_of_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="autotune_amp.runtime")
    training = scripted(fp16(fallback=["bf16", "fp32"]), halt=False)
    heard: list[MoveRecord] = []
    training.controller.on_move(heard.append)
    training.run(*CLEAN * 6, *BAD_LOSS * 2, *BAD_LOSS * 3, *BAD_LOSS * 10, "clean")
    training.controller.set_precision("fp32")
    history = training.controller.status().history
    moves: list[tuple[int, str, Precision, Precision]] = [
        (8, "demotion", "fp16", "bf16"),
        (11, "revert", "bf16", "fp16"),
        (11, "stop", "fp16", "fp16"),
        (21, "stop", "fp16", "fp16"),
        (22, "by_hand", "fp16", "fp32"),
    ]
    assert [(record.update, record.kind, record.before, record.after) for record in history] == moves
    assert [record.config.precision for record in history] == ["bf16", "fp16", "fp16", "fp16", "fp32"]
    assert tuple(heard) == history
    logged = [record.getMessage() for record in caplog.records if " at update " in record.getMessage()]
    assert [history[index].reason in line for index, line in enumerate(logged)] == [True] * 5
    training.assert_trained_on(7)


def test_an_advisory_controller_says_so_once_records_its_advice_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    training = scripted(fp16(fallback=["fp32"]))
    for _ in range(3):
        training.controller.scale(training.loss("bad loss"))
        training.weight.grad = torch.zeros(2)
        training.controller.step(training.optimizer)
        training.controller.update()
    status = training.controller.status()
    assert status.is_advisory
    assert [(record.kind, record.after) for record in status.history] == [("advice", "fp32")]
    assert "no way to change it" in status.history[0].reason
    assert status.precision == "fp16"
    assert caplog.text.count("The controller is advisory") == 1
    training.assert_trained_on(0)


@pytest.mark.parametrize("largest", [3.0, math.nan])
def test_the_statistics_file_is_json_whatever_was_seen(tmp_path: Path, largest: float) -> None:
    training = scripted(fp16(fallback=["bf16"]))
    controller = training.controller
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, largest)
    controller.attach(layer)
    training.run("clean")
    for _ in range(10):  # one of them is looked at
        with controller.autocast(), torch.no_grad():
            layer(torch.ones(1, 1))
        training.run("clean")
    controller.set_precision("bf16")
    path = tmp_path / "stats.json"
    controller.save_stats(path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(path.read_text(), parse_constant=refuse)
    status = controller.status()
    assert {field.encode_name for field in msgspec.structs.fields(status)} == set(document)
    assert document["updates"] == status.num_updates == 11
    assert document["forward_max"] == (3.0 if largest == 3.0 else None)
    assert [entry["kind"] for entry in document["history"]] == ["by_hand"]
    assert AmpConfig.from_json(document["history"][0]["config"]) == status.history[0].config
    assert list(tmp_path.iterdir()) == [path]


def test_a_controller_from_a_recommendation_has_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"recommendation.json": SimpleNamespace(training_config=fp16(fallback=["fp32"]), measured_flops=None)}
    monkeypatch.setattr(Recommendation, "load", files.__getitem__)
    assert PrecisionController.load("recommendation.json", "cpu", halt=False).config == fp16(fallback=["fp32"])


BY_HAND: dict[str, Any] = {
    "disable": PrecisionController.disable,
    "enable": PrecisionController.enable,
    "to fp32": lambda controller: controller.set_precision("fp32"),
    "to fp16": lambda controller: controller.set_precision("fp16"),
    "reset": PrecisionController.reset_stats,
    "epoch": lambda controller: controller.epoch(3),
    "save and load": lambda controller: controller.load_state_dict(controller.state_dict()),
}


@settings(max_examples=40)
@given(
    guard=st.booleans(),
    has_two=st.booleans(),
    events=st.lists(st.sampled_from(["clean", "overflow", "bad loss", *BY_HAND]), max_size=30),
)
def test_every_update_is_a_step_or_a_skip_whatever_is_called(guard: bool, has_two: bool, events: list[Any]) -> None:
    controller = PrecisionController(fp16(fallback=["fp32"]), device="cpu", guard=guard, halt=False)
    training = Scripted(controller)
    second = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.125)
    moves: list[MoveRecord] = []
    controller.on_move(moves.append)
    num_tried = num_taken = 0  # since the statistics were reset
    for event in events:
        if event in BY_HAND:
            BY_HAND[event](controller)
            num_tried, num_taken = (0, 0) if event == "reset" else (num_tried, num_taken)
            continue
        if has_two:  # whose gradients are fine where the other's are not
            second.param_groups[0]["params"][0].grad = torch.ones(())
            controller.scale(torch.ones(()))
            controller.step(second)
        training.run(event)
        num_tried += 1
        num_taken += training.has_stepped
        status = controller.status()
        assert (status.num_updates, status.num_steps, status.num_skips) == (num_tried, num_taken, num_tried - num_taken)
        assert status.num_skips == status.num_overflows + status.num_bad_batches
        assert sum(status.steps_by_precision.values()) == status.num_steps
    assert tuple(moves) == controller.status().history or "save and load" in events


def test_disabling_and_enabling_are_moves_and_metrics_go_on(tmp_path: Path) -> None:
    heard: list[MoveRecord] = []
    training = scripted(run_log=tmp_path / "run.jsonl").run(*CLEAN * 3)
    controller = training.controller
    controller.on_move(heard.append)
    controller.disable()
    controller.disable()
    training.run(*CLEAN * metrics.SAMPLE_EVERY)
    controller.enable()
    moves = [(move.update, move.before, move.after) for move in controller.status().history]
    assert moves == [(3, "fp16", "fp32"), (3 + metrics.SAMPLE_EVERY, "fp32", "fp16")]
    assert tuple(heard) == controller.status().history
    assert [move.update for move in run_log.read(tmp_path / "run.jsonl").moves] == [update for update, *_ in moves]
    (sample,) = [line for line in run_log.read(tmp_path / "run.jsonl").lines if isinstance(line, SampleLine)]
    assert (sample.update, sample.precision, sample.scale, sample.num_steps) == (64, "fp32", None, 64)


# -- what the status answers -------------------------------------------------------------------------------------------


def test_overflows_and_bad_batches_are_told_apart_and_each_precision_has_its_steps_and_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    training = scripted(fp16(fallback=["fp32"])).run(*SCRIPT)
    status = training.controller.status()
    assert (status.num_overflows, status.num_bad_batches) == (2, 1)
    assert (status.growth_tracker, status.scale, status.rung) == (4, 256.0, 0)
    training.controller.set_precision("fp32")
    status = training.run(*CLEAN * 3).controller.status()
    assert status.steps_by_precision == {"fp16": 7, "fp32": 3}
    assert status.seconds_by_precision == {"fp16": 9.0, "fp32": 2.0}
    assert (status.scale, status.growth_tracker, status.rung, status.num_moves) == (None, None, 1, 1)
    assert status.amp_share == 0.7


def test_statistics_begin_anew_and_epochs_are_told_past_a_checkpoint(tmp_path: Path) -> None:
    training = scripted(run_log=tmp_path / "run.jsonl").run(*SCRIPT)
    training.controller.epoch(4)
    training.controller.reset_stats()
    status = training.run("clean", "overflow").controller.status()
    assert (status.num_updates, status.num_steps, status.num_skips, status.num_overflows) == (2, 1, 1, 1)
    assert (status.update, status.epoch) == (12, 4)
    assert run_log.read(tmp_path / "run.jsonl").lines[-1].num_skips == 4, "the log goes on"
    resumed = scripted()
    resumed.controller.load_state_dict(training.controller.state_dict())
    again = resumed.run("clean").controller.status()
    assert (again.num_updates, again.num_steps, again.num_skips, again.epoch) == (3, 2, 1, 4)


def test_memory_saved_is_against_the_measured_plan_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "peak_memory_bytes", lambda device: 3 * 2**30)
    assert scripted(fp16(fallback=["fp32"])).controller.status().saved_memory_bytes is None, "it was not measured"
    plan = FallbackPlan(precision="fp32", batch_size=4, accumulation_steps=1, slowdown=1.5, peak_memory_bytes=5 * 2**30)
    assert scripted(fp16(fallback=[plan])).controller.status().saved_memory_bytes == 2 * 2**30


def test_growths_and_backoffs_of_the_scale_are_counted_apart_from_what_sets_it_otherwise(tmp_path: Path) -> None:
    loss_scale = LossScale(init_scale=1024.0, growth_interval=2)
    training = scripted(fp16(loss_scale=loss_scale, fallback=["bf16"]), run_log=tmp_path / "run.jsonl")
    controller = training.run(*CLEAN * 5, "overflow", "bad loss").controller
    counts = (status := controller.status()).num_scaler_updates, status.num_growths, status.num_backoffs
    assert (counts, status.scale) == ((7, 2, 1), 2048.0)
    training.run("clean")
    controller.load_state_dict(controller.state_dict())
    controller.set_precision("bf16")
    status = training.run(*CLEAN * 3).controller.status()
    assert (status.num_scaler_updates, status.num_growths, status.num_backoffs) == (8, 2, 1), "bf16 is not scaled"
    controller.reset_stats()
    status = controller.status()
    assert (status.num_scaler_updates, status.num_growths, status.num_backoffs) == (0, 0, 0)
    last = run_log.read(tmp_path / "run.jsonl").lines[-1]
    assert (last.num_scaler_updates, last.num_growths, last.num_backoffs) == (8, 2, 1), "the log goes on"


def test_a_scale_at_its_limits_neither_grows_nor_backs_off() -> None:
    loss_scale = LossScale(init_scale=4.0, growth_interval=1, min_scale=4.0, max_scale=4.0)
    status = scripted(fp16(loss_scale=loss_scale), halt=False).run("clean", "clean", "overflow").controller.status()
    assert (status.num_scaler_updates, status.num_growths, status.num_backoffs) == (3, 0, 0)


def test_the_devices_support_of_each_precision_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = scripted().controller
    capabilities = controller.status().capabilities
    assert capabilities == cpu.capabilities("cpu")
    assert (capabilities["fp32"].level, capabilities["tf32"].level) == ("native", "unsupported")
    monkeypatch.setattr(cpu, "capabilities", None)
    assert controller.status().capabilities == capabilities


def test_the_share_of_flushed_gradients_is_sampled() -> None:
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    controller = PrecisionController(fp16(loss_scale=LossScale(init_scale=1.0)), device="cpu")
    for _ in range(12):  # one of which is looked at
        with controller.autocast():
            loss = weight.sum() * 0.0
        controller.backward(loss)
        # A quarter stands in fp16's lowest octaves: six of them are taken to stand for one that was flushed.
        weight.grad = torch.where(torch.arange(64) < 16, 2.0**-23, 2.0**-10)
        controller.step(optimizer)
        controller.update()
    status = controller.status()
    assert status.flushed_share == pytest.approx(1 / 4 / 6)
    assert status.flushed_entries == round(64 / 4 / 6)
    controller.disable()
    assert controller.status().flushed_share is None, "nothing is scaled any more"


def test_entries_of_an_optimizer_that_another_has_replaced_do_not_count() -> None:
    training = scripted().run("clean")
    old, training.optimizer = training.optimizer, torch.optim.SGD([training.weight], lr=0.1)
    del old
    gc.collect()
    training.run("clean")
    assert training.controller._metrics.num_gradient_entries == 2


def test_a_statistics_file_that_cannot_be_written_names_no_option_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be written") as caught:
        scripted().controller.save_stats(tmp_path / "missing" / "stats.json")
    assert "--" not in caught.value.next_step


def test_nothing_is_told_as_flushed_by_a_sample_that_overflowed() -> None:
    training = scripted(fp16(loss_scale=LossScale(init_scale=128.0))).run(*CLEAN * 8, "overflow", "clean")
    assert training.controller.status().flushed_share is None


def test_validation_runs_in_the_precision_that_is_asked_for_and_leaves_all_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = scripted(fp16())
    layer, seen = nn.Linear(2, 2), []
    flags = torch.backends.cuda.matmul.fp32_precision
    started = Mock(return_value=None)  # a state with attention backends would use the current GPU, not the model's
    monkeypatch.setattr(torch_state, "started_accelerator", started)
    asked: tuple[Precision | None, ...] = (None, "fp32", "bf16")
    for precision in asked:
        with training.controller.validation(precision):
            seen.append(layer(torch.ones(2)).dtype)
            assert not torch.is_grad_enabled()
    assert seen == [torch.float16, torch.float32, torch.bfloat16]
    assert torch.backends.cuda.matmul.fp32_precision == flags
    assert not started.called
    assert training.run(*CLEAN).controller.status().precision == "fp16"


def test_a_move_asked_for_in_a_validation_is_made_whole_after_it() -> None:
    model = nn.Linear(2, 2)
    controller = PrecisionController(fp16(fallback=["bf16"]), device="cpu")
    controller.attach(model)
    with controller.validation("fp32"):
        controller.set_precision("bf16")
        assert model(torch.ones(2)).dtype == torch.float32
    with controller.autocast():
        assert model(torch.ones(2)).dtype == torch.bfloat16
    status = controller.status()
    assert (status.precision, status.scale) == ("bf16", None)


# -- the log of the process --------------------------------------------------------------------------------------------


def test_the_log_has_a_line_at_the_start_one_for_each_move_and_why_the_scale_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="autotune_amp.runtime")
    loss_scale = LossScale(init_scale=1024.0, growth_interval=3)
    training = scripted(fp16(loss_scale=loss_scale, fallback=["fp32"])).run(*CLEAN * 3, "overflow", *CLEAN)
    training.controller.set_precision("fp32")
    training.run("clean")
    by_level: dict[str, list[str]] = {}
    for record in caplog.records:
        by_level.setdefault(record.levelname, []).append(record.getMessage())
    first, move = by_level["INFO"]
    assert all(word in first for word in ("fp16", "1024", "fp32", "not finite", "as its config says"))
    assert "fp16 -> fp32" in move
    grown, fallen, moved = by_level["DEBUG"]
    assert "3 steps without overflow" in grown
    assert "an overflow" in fallen
    assert "by_hand" in moved
    caplog.clear()
    resumed = scripted(fp16(loss_scale=loss_scale, fallback=["fp32"]))
    resumed.controller.load_state_dict(training.controller.state_dict())
    resumed.run("clean")
    assert "asked for" in caplog.records[0].getMessage(), "why it is in fp32"


# -- the run log -------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def training(path: Path) -> Run:
    """An optimizer step is two passes; without a rerun, what overflows in the forward pass steps down on trial."""
    torch.manual_seed(0)
    config = fp16(accumulation_steps=2, loss_scale=LossScale(init_scale=4096.0), fallback=["bf16", "fp32"])
    run = Run(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), config, attaches=False)
    run.controller = PrecisionController(config, device="cpu", halt=False, run_log=path)
    return run


def documents(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_provoked_overflow_and_the_demotion_after_it_stand_in_the_log(path: Path) -> None:
    run = training(path)
    steps = [*STEADY_BATCHES[:12], *[LARGE_GRADIENT] * 2, *STEADY_BATCHES[:2], *[BEYOND_FP16] * 4, *STEADY_BATCHES[:6]]
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
    trained.run(*CLEAN * (SAMPLE_EVERY - 1), "bad loss")
    trained.controller.disable()
    trained.run(*CLEAN * 3)
    lines = documents(path)[1:]
    assert [(line["event"], line["update"], line["precision"], line["scale"]) for line in lines] == [
        ("sample", SAMPLE_EVERY, "fp16", 1024.0),
        ("move", SAMPLE_EVERY, "fp32", None),
    ]
    assert lines[0]["loss"] is None


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
    assert [line.is_resumed for line in found.lines if isinstance(line, BeginLine)] == [False, True]
    assert (found.begin.config.batch_size, found.num_other_runs) == (4, 1)
    assert [line["event"] for line in documents(path)].count("sample") == 4, "nothing was taken out"


def test_lines_of_runs_that_log_at_the_same_time_are_told_apart(path: Path) -> None:
    first, second = (scripted(fp16(batch_size=size), run_log=path) for size in (4, 2))
    for run in (first, second, second, first):
        run.run("overflow")
    found = run_log.read(path)
    assert [line.scale for line in found.lines] == [1024.0, 512.0, 256.0]
    assert (found.begin.config.batch_size, found.num_other_runs) == (2, 1)


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
    path.write_text("".join([lines[0].replace('"format":3', '"format":9'), *lines[1:]]))
    with pytest.raises(FormatError, match="format 9"):
        run_log.read(path)
    path.write_text(lines[0].replace('"batch_size":4', '"batch_size":0'))
    with pytest.raises(FormatError, match="batch_size"):
        run_log.read(path)
    path.write_text(lines[1])
    with pytest.raises(FormatError, match="before its run"):
        run_log.read(path)
    path.write_text("not a log")
    with pytest.raises(FormatError, match="holds no run"):
        run_log.read(path)


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

"""TensorBoard, W&B, MLflow and OpenTelemetry: what is read back from what they wrote is what the controller told."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations import sinks
from autotune_amp.runtime.sinks import MetricValues, Sink

if TYPE_CHECKING:
    from forked_python import ForkServer

SCALE, STEPS, SKIPS, MOVE = (f"autotune_amp/{name}" for name in ("scale", "steps", "skips", "move"))


def needs(package: str) -> pytest.MarkDecorator:
    """Without importing it: that makes folders."""
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def train(sink: Sink) -> list[MetricValues]:
    """An overflow at once, a move by hand at update 100; gives what is to be found again."""
    told: list[MetricValues] = []
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=2.0**20), fallback=["fp32"])
    controller = PrecisionController(config, device="cpu", sinks=[sink, told.append])
    inputs, targets = torch.randn(4, 4), 10 * torch.randn(4, 1)
    for update in range(130):
        if update == 100:
            controller.set_precision("fp32")
        controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets), optimizer)
    controller.detach()
    assert told
    return told


def of(told: list[MetricValues], name: str) -> list[tuple[Any, Any]]:
    return [(values["autotune_amp/update"], values[name]) for values in told if name in values]


def test_tensorboard_reads_its_files_back(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = train(sinks.tensorboard(tmp_path))
    events = event_accumulator.EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    for name in (SCALE, STEPS, SKIPS):
        assert [(event.step, event.value) for event in events.Scalars(name)] == of(told, name)
    (move,) = events.Tensors(f"{MOVE}/text_summary")
    assert move.step == 100
    assert b"fp16 -> fp32" in move.tensor_proto.string_val[0]


WANDB = """
import os, time, wandb
from test_sinks_of_others import *
run = wandb.init(project="offline", dir=os.getcwd())
class Rows:
    def __init__(self, run):
        self.run, self.rows = run, []
    def log(self, row, commit):
        assert not commit
        self.rows.append(row)
        self.run.log(row, commit=commit)
    def define_metric(self, *arguments, **options):
        self.run.define_metric(*arguments, **options)
rows = Rows(run)
rows.summary = run.summary
told = train(sinks.wandb(rows))
assert rows.rows == told
assert run.step == 0, "the training's own steps are its own"
run.log({"loss": 1.0}, step=5)
sinks.wandb()  # the active one
run.log({"loss": 1.0}, step=6)
deadline = time.monotonic() + 30  # the summary is another process's
while "autotune_amp/steps" not in run.summary.keys() and time.monotonic() < deadline:
    time.sleep(0.1)
assert run.summary["autotune_amp/steps"] == told[-1]["autotune_amp/steps"]
assert "fp16 -> fp32" in run.summary["autotune_amp/move/100"]
step = run.step
train(sinks.wandb(own_rows=True))
assert run.step > step
run.finish()
try:
    sinks.wandb()
except InvalidRequestError as error:
    assert "wandb.init()" in error.next_step
else:
    raise AssertionError("no run is active any more")
"""


@needs("wandb")
def test_wandb_offline_has_the_last_of_it_and_keeps_its_own_steps(tmp_path: Path, fork_server: ForkServer) -> None:
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(tmp_path)}
    in_a_process(WANDB, tmp_path, environment, fork_server)
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"autotune_amp/scale" in written.read_bytes()


def test_other_ranks_than_the_first_make_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    made = sinks.tensorboard(tmp_path), sinks.wandb(), sinks.mlflow(), sinks.opentelemetry()
    assert all(map(callable, made))
    assert list(tmp_path.iterdir()) == []


@needs("tensorboard")
def test_each_of_several_runs_that_srun_starts_side_by_side_has_its_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    train(sinks.tensorboard(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1


MLFLOW = """
import mlflow
from test_sinks_of_others import *
mlflow.set_tracking_uri("file:runs")
with mlflow.start_run() as run:
    told = train(sinks.mlflow())
client = mlflow.MlflowClient()
for name in (SCALE, STEPS, SKIPS):
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] == of(told, name)
tags = client.get_run(run.info.run_id).data.tags
assert tags["autotune_amp/precision"] == "fp32"
assert "fp16 -> fp32" in tags["autotune_amp/move/100"]
sinks.mlflow(run.info.run_id)
try:
    sinks.mlflow()
except InvalidRequestError as error:
    assert "start_run()" in error.next_step
else:
    raise AssertionError("no run is active any more")
"""


@needs("mlflow")
def test_mlflow_in_a_folder_has_the_whole_history(tmp_path: Path, fork_server: ForkServer) -> None:
    in_a_process(MLFLOW, tmp_path, {"MLFLOW_ALLOW_FILE_STORE": "true", "HOME": str(tmp_path)}, fork_server)
    assert (tmp_path / "runs").is_dir()


def in_a_process(program: str, folder: Path, environment: dict[str, str], server: ForkServer) -> None:
    """These start threads and services of their own, and change what a process warns of."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": path, "TMPDIR": str(folder), **environment}
    done = server.run(["-c", program], cwd=folder, env={**os.environ, **own}, timeout=240)
    assert done.returncode == 0, done.stderr


def test_opentelemetry_has_counters_gauges_and_an_event_of_the_move() -> None:
    metrics_sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader, logs = InMemoryMetricReader(), LoggerProvider()
    exporter = InMemoryLogRecordExporter()  # type: ignore[no-untyped-call] # it has no types
    logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    meters = metrics_sdk.MeterProvider([reader])
    told = train(sinks.opentelemetry(meters, logs))
    data: Any = reader.get_metrics_data()
    (scope,) = data.resource_metrics[0].scope_metrics
    by_name = {metric.name: metric for metric in scope.metrics}
    assert by_name[SCALE].unit == "1"
    assert by_name[STEPS].data.is_monotonic
    assert sum(point.value for point in by_name[STEPS].data.data_points) == told[-1][STEPS]
    (scale,) = by_name[SCALE].data.data_points
    assert (scale.value, dict(scale.attributes)) == (of(told, SCALE)[-1][1], {"autotune_amp/precision": "fp16"})
    (event,) = exporter.get_finished_logs()
    record: Any = event.log_record
    assert record.event_name == MOVE
    assert record.attributes["autotune_amp/before"] == "fp16"
    meters.shutdown()
    logs.shutdown()


@pytest.mark.parametrize(
    ("make", "module", "extra"),
    [
        (lambda: sinks.tensorboard("runs"), "torch.utils.tensorboard", "tensorboard"),
        (sinks.wandb, "wandb", "wandb"),
        (sinks.mlflow, "mlflow", "mlflow"),
        (sinks.opentelemetry, "opentelemetry.metrics", "opentelemetry"),
    ],
)
def test_a_package_that_is_not_there_is_named_with_its_extra(
    make: Callable[[], Sink], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidRequestError) as raised:
        make()
    assert f"autotune_amp[{extra}]" in raised.value.next_step


def test_none_of_them_is_imported_before_it_is_used(tmp_path: Path, fork_server: ForkServer) -> None:
    program = (
        "import sys, autotune_amp.integrations.sinks, autotune_amp.runtime.controller\n"
        "assert not {'tensorboard', 'wandb', 'mlflow', 'opentelemetry'} & set(sys.modules)\n"
    )
    done = fork_server.run(["-c", program], cwd=tmp_path, env=dict(os.environ))
    assert done.returncode == 0, done.stderr

"""Ready-made sinks: the controller's metrics and moves to where a run is watched. Each needs its own package.

``PrecisionController(config, sinks=[tensorboard("runs/1"), wandb()])``. What they write is named as in
`autotune_amp.runtime.readings.METRICS`. Any callable that takes a mapping of such names is a sink, too.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import Any

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.runtime.readings import METRICS, PREFIX
from autotune_amp.runtime.sinks import Sink, Values

_UPDATE, _MOVE, _PRECISION = (PREFIX + name for name in ("update", "move", "precision"))


def tensorboard(where: str | os.PathLike[str] | Any) -> Sink:
    """To TensorBoard: `where` is a ``SummaryWriter`` or the folder for one. Moves are text. Extra: ``tensorboard``."""
    writer: Any = where
    if isinstance(where, str | os.PathLike):
        writer = _needed("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(where))

    def sink(values: Values) -> None:
        step = int(values[_UPDATE])
        for name, value in _numbers(values).items():
            writer.add_scalar(name, value, step)
        if _MOVE in values:
            writer.add_text(_MOVE, _sentence(values), step)
        writer.flush()

    return sink


def wandb(run: Any = None) -> Sink:
    """To a W&B run, by default the active one, over ``autotune_amp/update``. Extra: ``wandb``.

    The metrics go with the next row that the training logs (W&B has one step for all that a run logs), at the latest
    when the run finishes. Raises `InvalidRequestError` where no run is active.
    """
    run = run or _needed("wandb", "wandb").run
    if run is None:
        raise InvalidRequestError("No W&B run is active.", "Call wandb.init() first, or pass the run: wandb(run).")
    run.define_metric(_UPDATE, hidden=True)
    run.define_metric(PREFIX + "*", step_metric=_UPDATE)

    def sink(values: Values) -> None:
        run.log(dict(values), commit=False)

    return sink


def mlflow(run_id: str | None = None) -> Sink:
    """To an MLflow run, by default the active one; precision and moves are tags. Extra: ``mlflow``.

    Raises `InvalidRequestError` where no run is active.
    """
    package = _needed("mlflow", "mlflow")
    active = package.active_run()
    if run_id is None and active is None:
        raise InvalidRequestError("No MLflow run is active.", "Call mlflow.start_run() first, or pass mlflow(run_id).")
    own_id = run_id or active.info.run_id
    client = package.MlflowClient()

    def sink(values: Values) -> None:
        step, now = int(values[_UPDATE]), int(time.time() * 1000)
        entities = package.entities
        tags = [entities.RunTag(_PRECISION, str(values[_PRECISION]))]
        if _MOVE in values:
            tags.append(entities.RunTag(f"{_MOVE}/{step}", _sentence(values)))
        measured = [entities.Metric(name, value, now, step) for name, value in _numbers(values).items()]
        client.log_batch(own_id, metrics=measured, tags=tags)

    return sink


def opentelemetry(meter_provider: Any = None, logger_provider: Any = None) -> Sink:
    """To OpenTelemetry: counts as counters, the rest as gauges with the precision as attribute, moves as events.

    The providers are the global ones where None. Extra: ``opentelemetry``.
    """
    meter = _needed("opentelemetry.metrics", "opentelemetry").get_meter("autotune_amp", meter_provider=meter_provider)
    logs = _needed("opentelemetry._logs", "opentelemetry")
    logger = logs.get_logger("autotune_amp", logger_provider=logger_provider)
    known = {metric.name: metric for metric in METRICS.values()}
    instruments: dict[str, Any] = {}
    told: dict[str, float] = {}

    def sink(values: Values) -> None:
        attributes = {_PRECISION: values[_PRECISION]}
        for name, value in _numbers(values).items():
            metric = known[name]
            if name not in instruments:
                make = meter.create_counter if metric.is_count else meter.create_gauge
                instruments[name] = make(name, unit=metric.unit, description=metric.description)
            if metric.is_count:
                instruments[name].add(max(0.0, value - told.get(name, 0.0)), attributes)
                told[name] = value
            else:
                instruments[name].set(value, attributes)
        if _MOVE in values:
            logger.emit(logs.LogRecord(event_name=_MOVE, body=_sentence(values), attributes=dict(values)))

    return sink


def _numbers(values: Values) -> dict[str, float]:
    return {name: value for name, value in values.items() if not isinstance(value, str)}


def _sentence(values: Values) -> str:
    """A move in words."""
    before, after, reason = (values[PREFIX + name] for name in ("before", "precision", "reason"))
    return f"{values[_MOVE]} at update {values[_UPDATE]}, {before} -> {after}: {reason}"


def _needed(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"The sink needs the package {error.name}, which is not installed.",
            f"Run `pip install 'autotune_amp[{extra}]'`.",
        ) from error

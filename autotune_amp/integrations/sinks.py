"""Sinks that send the controller's metrics and its changes of precision ("moves") to experiment trackers.

`http(server)` sends them to the service of a team, ``autotune-amp serve``, which shows its runs while they go on.

Use as ``PrecisionController(config, sinks=[tensorboard("runs/1"), wandb()])``. A sink is any callable that takes a
mapping from metric names, such as ``autotune_amp/scale``, to numbers or text; `autotune_amp.runtime.status.METRICS`
lists the names.

`wandb()` and `mlflow()` use the active run. W&B has one step for everything that a run logs, so `wandb()` adds its
metrics to the rows that your training run logs; if it logs seldom, use `wandb(own_rows=True)`. Sinks are called for
every 64th update (attempted optimizer step), each change of the loss scale and each move: on rank 0 of torch's process
group, or without one in every process. Each sink runs in a thread of its own: if it raises or hangs, a warning is
logged once, and training goes on. Each needs its package: `pip install -e '.[tensorboard]'`, `wandb`, `mlflow` or
`opentelemetry`. No sink is needed to draw the controller's own run log (``run_log="run.jsonl"``): use `autotune-amp
report run.jsonl`, with `--follow` while the run goes on.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import sys
import time
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec
from urllib.error import HTTPError

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.text import one_line
from autotune_amp.distributed import place
from autotune_amp.integrations.service_address import checked_address, request_headers, send
from autotune_amp.runtime.sinks import MAX_WAITING, BatchSink, MetricValues, Sink
from autotune_amp.runtime.status import BEFORE, METRICS, MOVE, PREFIX, REASON

P = ParamSpec("P")

log = logging.getLogger("autotune_amp.runtime")

MAX_TEXT = 1000  # characters of a text that is posted, such as the reason of a move
MAX_POSTED = 16  # metrics in one request, which a service takes up to 64 KiB of
_POST_SECONDS = 3.0  # for each read and write of a connection
_MAX_ANSWER_BYTES = 1000  # of a refusal, for the log

_UPDATE, _PRECISION = METRICS["update"].name, METRICS["precision"].name


def _on_first_rank(make: Callable[P, Sink]) -> Callable[P, Sink]:
    """Decorate a function that returns a sink: on ranks other than 0 it is called with the first metrics.

    A controller gives such a rank metrics only if it turns out to be a run of its own, as ``srun -n 4`` may start.
    """

    @wraps(make)
    def make_on_first_rank(*args: P.args, **kwargs: P.kwargs) -> Sink:
        if place().rank == 0:
            return make(*args, **kwargs)
        made = cache(lambda: make(*args, **kwargs))
        return lambda values: made()(values)

    return make_on_first_rank


@_on_first_rank
def tensorboard(where: str | os.PathLike[str] | Any) -> Sink:
    """Return a sink for TensorBoard. `where` is a ``SummaryWriter``, or the folder for a new one.

    Moves are written as text. Raises `InvalidRequestError` if the package (extra ``tensorboard``) is not installed.
    """
    writer: Any = where
    if isinstance(where, str | os.PathLike):
        writer = _import_package("torch.utils.tensorboard", "tensorboard").SummaryWriter(os.fspath(where))

    def sink(values: MetricValues) -> None:
        step = int(values[_UPDATE])
        for name, value in _numeric_values(values).items():
            writer.add_scalar(name, value, step)
        if MOVE in values:
            writer.add_text(MOVE, _move_text(values), step)
        writer.flush()

    return sink


@_on_first_rank
def wandb(run: Any = None, *, own_rows: bool = False) -> Sink:
    """Return a sink for a W&B run, by default the active one.

    The x axis of its charts is ``autotune_amp/update``; moves go to the run's summary. W&B has one step for everything
    that a run logs, so metrics are logged with the training run's next row, only the latest if several wait. With
    `own_rows` they are logged at once: for a run that logs seldom, and passes no ``step=``, since W&B drops rows whose
    step is below the latest one. Raises `InvalidRequestError` if no run is active or the package (extra ``wandb``) is
    not installed.
    """
    run = run or _import_package("wandb", "wandb").run
    if run is None:
        raise InvalidRequestError("No W&B run is active.", "Call wandb.init() first, or pass the run: wandb(run).")
    run.define_metric(_UPDATE, hidden=True)
    run.define_metric(PREFIX + "*", step_metric=_UPDATE)

    def sink(values: MetricValues) -> None:
        run.log(dict(values), commit=own_rows)
        if MOVE in values:
            run.summary[f"{MOVE}/{values[_UPDATE]}"] = _move_text(values)

    return sink


@_on_first_rank
def mlflow(run_id: str | None = None) -> Sink:
    """Return a sink for an MLflow run, by default the active one. The precision and moves are tags.

    Raises `InvalidRequestError` if no run is active or the package (extra ``mlflow``) is not installed.
    """
    package = _import_package("mlflow", "mlflow")
    active = package.active_run()
    if run_id is None and active is None:
        raise InvalidRequestError("No MLflow run is active.", "Call mlflow.start_run() first, or pass mlflow(run_id).")
    target_run_id = run_id or active.info.run_id
    client = package.MlflowClient()

    def sink(values: MetricValues) -> None:
        step, now = int(values[_UPDATE]), int(time.time() * 1000)
        entities = package.entities
        tags = [entities.RunTag(_PRECISION, str(values[_PRECISION]))]
        if MOVE in values:
            tags.append(entities.RunTag(f"{MOVE}/{step}", _move_text(values)))
        metrics = [entities.Metric(name, value, now, step) for name, value in _numeric_values(values).items()]
        client.log_batch(target_run_id, metrics=metrics, tags=tags)

    return sink


@_on_first_rank
def opentelemetry(meter_provider: Any = None, logger_provider: Any = None) -> Sink:
    """Return a sink for OpenTelemetry, with the global providers for None.

    Metrics that never decrease are counters; others are gauges, with the precision as an attribute; moves are events.
    Raises `InvalidRequestError` if the package (extra ``opentelemetry``) is not installed.
    """
    metrics_api = _import_package("opentelemetry.metrics", "opentelemetry")
    meter = metrics_api.get_meter("autotune_amp", meter_provider=meter_provider)
    logs = _import_package("opentelemetry._logs", "opentelemetry")
    logger = logs.get_logger("autotune_amp", logger_provider=logger_provider)
    gauges: dict[str, Any] = {}
    counts: dict[str, float] = {}

    def observe_count(name: str) -> Callable[[object], list[Any]]:  # the API calls back when it collects counters
        return lambda _: [metrics_api.Observation(counts[name])] if name in counts else []

    for metric in METRICS.values():
        unit_and_description = {"unit": metric.unit, "description": metric.description}
        if metric.is_count:
            meter.create_observable_counter(metric.name, [observe_count(metric.name)], **unit_and_description)
        else:
            gauges[metric.name] = meter.create_gauge(metric.name, **unit_and_description)

    def sink(values: MetricValues) -> None:
        attributes = {_PRECISION: values[_PRECISION]}
        for name, value in _numeric_values(values).items():
            if name in gauges:
                gauges[name].set(value, attributes)
            else:
                counts[name] = value
        if MOVE in values:
            logger.emit(logs.LogRecord(event_name=MOVE, body=_move_text(values), attributes=dict(values)))

    return sink


@_on_first_rank
def http(server: str, token: str | None = None, *, name: str | None = None) -> Sink:
    """Return a sink for the service at an address such as ``http://gpu-host:8321``, which shows this run.

    The address of the run's page is logged. `token` is that of the service, by default AUTOTUNE_AMP_TOKEN of the
    environment. `name` is how the service calls the run, by default the script and the host. While the service cannot
    be reached, the newest 256 metrics are kept for it. Raises `InvalidRequestError` for another kind of address, and
    for a token that no header can hold.
    """
    address, headers = checked_address(server), request_headers(token)
    script = Path(next(iter(sys.argv), "")).name or "python"
    poster = _RunPoster(address, headers, name or f"{script} on {platform.node()}")
    log.info("The run is shown at %s/page", poster.address)
    return poster


class _RunPoster(BatchSink):
    """Sink that posts the metrics of one run. Each has a number, by which the service knows what came twice."""

    def __init__(self, server: str, headers: dict[str, str], name: str) -> None:
        self.address = f"{server}/runs/{uuid.uuid4().hex}"
        self._name = one_line(name)[:MAX_TEXT]
        self._headers = headers
        self._unsent: deque[dict[str, float | str]] = deque(maxlen=MAX_WAITING)
        self._num_values = 0

    def __repr__(self) -> str:
        return f"http({self.address!r})"

    def send(self, batch: Sequence[MetricValues]) -> None:
        """Post metrics, with those that could not be posted before. Raises `OSError` if that fails."""
        for values in batch:
            texts = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in values.items()}
            posted = {name.removeprefix(PREFIX): value for name, value in texts.items()}
            self._unsent.append({"number": self._num_values, **posted})
            self._num_values += 1
        while self._unsent:
            first = list(itertools.islice(self._unsent, MAX_POSTED))
            try:
                self._post(first)
            except HTTPError as error:
                with error:
                    detail = one_line(error.read(_MAX_ANSWER_BYTES).decode(errors="replace"))
                if error.code < 500 and error.code != 429:  # it will not take them the next time either
                    self._forget(first)
                raise ConnectionError(f"The service answered {error.code}: {detail}") from None
            self._forget(first)

    def _forget(self, posted: Sequence[object]) -> None:
        for _ in posted:
            self._unsent.popleft()

    def _post(self, values: Sequence[dict[str, float | str]]) -> None:
        body = msgspec.json.encode({"name": self._name, "values": values})
        request = urllib.request.Request(self.address, body, self._headers)  # noqa: S310 # http or https
        send(request, _POST_SECONDS).close()


def _numeric_values(values: MetricValues) -> dict[str, float]:
    """Return the metrics that are numbers; the precision and the keys of a move are text."""
    return {name: value for name, value in values.items() if not isinstance(value, str)}


def _move_text(values: MetricValues) -> str:
    """Return a move as text: its kind, its update, the precisions before and after, and its reason."""
    return f"{values[MOVE]} at update {values[_UPDATE]}, {values[BEFORE]} -> {values[_PRECISION]}: {values[REASON]}"


def _import_package(module: str, extra: str) -> Any:
    """Import a module. Raises `InvalidRequestError`, naming the `extra` to install, if it or its package is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            f"The sink needs the package {error.name}, which is not installed.",
            f"Run `pip install 'autotune_amp[{extra}]'`.",
        ) from error

"""The Trainer's arguments from a config."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.integrations.lightning.callback import AutotuneCallback
from autotune_amp.integrations.lightning.plugin import AutotunePrecision


def trainer_arguments(config: AmpConfig | Recommendation, **others: Any) -> dict[str, Any]:
    """Keyword arguments for ``lightning.Trainer``: the config's own beside `others`, which are the Trainer's too.

    They are not for the Trainer of the standalone ``pytorch_lightning``; see `AutotunePrecision`.

    ``Trainer(**trainer_arguments(config, max_epochs=3, callbacks=[mine]))``: `AutotunePrecision` joins the plugins and
    `AutotuneCallback` the callbacks, each unless there is one. What a Trainer cannot hold is left to you: batch
    size and workers go to the DataLoader, ``config.environment`` to the shell.

    Raises `InvalidRequestError` where `others` contradict the config: a precision, a precision plugin of Lightning's or
    with another config, another accumulation.
    """
    own = config if isinstance(config, AmpConfig) else config.config
    plugins, callbacks = _listed(others.pop("plugins", None)), _listed(others.pop("callbacks", None))
    precision: Any = others.pop("precision", None)
    precision = precision or next((p for p in plugins if isinstance(p, Precision | str)), None)
    if precision is not None and not isinstance(precision, AutotunePrecision):
        raise InvalidRequestError(
            f"The Trainer was given a precision of its own, {precision!r}, beside the config's {own.precision}.",
            "Leave it out: AutotunePrecision is the Trainer's precision.",
        )
    if precision is not None and precision.config != own:
        raise InvalidRequestError(
            f"The plugins hold an AutotunePrecision for another config, {precision.config}.",
            "Leave it out, or make it with the config that the Trainer's arguments are made from.",
        )
    accumulation = others.pop("accumulate_grad_batches", own.accumulation_steps)
    if accumulation != own.accumulation_steps:
        raise InvalidRequestError(
            f"accumulate_grad_batches={accumulation!r} contradicts the config's {own.accumulation_steps} accumulation "
            "steps.",
            "Leave it out, or make a config with it.",
        )
    if precision is None:
        plugins.append(AutotunePrecision(own))
    if not any(isinstance(callback, AutotuneCallback) for callback in callbacks):
        callbacks.append(AutotuneCallback())
    return {**others, "plugins": plugins, "callbacks": callbacks, "accumulate_grad_batches": accumulation}


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | Callback) else [given]

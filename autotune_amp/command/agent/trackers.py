"""Switch of experiment trackers: a trial must not appear among the user's own runs, whatever mode or address its script
gives. Environment variables, which the search sets too, only replace what a script does not say.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from .channel import Channel
from .imports import after_import

# Of each tracker's module: the function that begins a run, and the mode in which that records nothing.
_MODES = {"neptune": ("init_run", "debug"), "swanlab": ("init", "disabled"), "wandb": ("init", "disabled")}


def turn_off(channel: Channel) -> None:
    """Turn off the trackers once they are imported. MLflow, which has no such mode, keeps the trial's own address."""
    for module, (name, mode) in _MODES.items():
        after_import(module, channel.shield(functools.partial(_set_mode, name=name, mode=mode)))
    address = os.environ.get("MLFLOW_TRACKING_URI")
    if address:
        keep_address = functools.partial(_keep_address, address=address)
        after_import("mlflow.tracking._tracking_service.utils", channel.shield(keep_address))


def _set_mode(module: Any, name: str, mode: str) -> None:
    original = getattr(module, name, None)
    if original is None:  # an old version, or another module of that name
        return

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "mode": mode})

    setattr(module, name, begin)


def _keep_address(mlflow: Any, address: str) -> None:
    mlflow.set_tracking_uri = lambda uri: None  # noqa: ARG005 - MLflow's signature
    mlflow.get_tracking_uri = lambda: address
    mlflow._resolve_tracking_uri = lambda tracking_uri=None: address  # noqa: ARG005 - of a client with its own address

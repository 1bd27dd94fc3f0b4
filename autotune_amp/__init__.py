"""Measures the precision, batch size and loss scale to train with. Importing this imports neither torch nor optuna."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.api import check_fidelity as check_fidelity
    from autotune_amp.api import check_workload as check_workload
    from autotune_amp.api import profile_amp as profile_amp
    from autotune_amp.api import profile_memory as profile_memory
    from autotune_amp.api import recommend_config as recommend_config
    from autotune_amp.check.findings import CheckReport as CheckReport
    from autotune_amp.core.config import AmpConfig as AmpConfig
    from autotune_amp.core.config import LossScale as LossScale
    from autotune_amp.core.launch_line import LaunchLine as LaunchLine
    from autotune_amp.core.outcome import Fidelity as Fidelity
    from autotune_amp.core.recommendation import Recommendation as Recommendation
    from autotune_amp.core.workload import Workload as Workload
    from autotune_amp.hardware import probe as probe
    from autotune_amp.memory.results import MemoryProfile as MemoryProfile
    from autotune_amp.profile.results import AmpProfile as AmpProfile
    from autotune_amp.runtime.controller import PrecisionController as PrecisionController
    from autotune_amp.variants.prepare import prepare as prepare

__version__ = "0.1.0"

_HOMES = {
    "AmpConfig": "core.config",
    "AmpProfile": "profile.results",
    "CheckReport": "check.findings",
    "Fidelity": "core.outcome",
    "LaunchLine": "core.launch_line",
    "LossScale": "core.config",
    "MemoryProfile": "memory.results",
    "PrecisionController": "runtime.controller",
    "Recommendation": "core.recommendation",
    "Workload": "core.workload",
    "check_fidelity": "api",
    "check_workload": "api",
    "prepare": "variants.prepare",
    "probe": "hardware",
    "profile_amp": "api",
    "profile_memory": "api",
    "recommend_config": "api",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it exports {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

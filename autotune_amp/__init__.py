"""Measures the precision, batch size and loss scale to train with. Importing this imports neither torch nor optuna.

What users call is here; the rest by folder, from which it imports downwards alone (`tests/test_imports.py` holds
that): `cli → api → service → report → diagnostics → search → processes, command → trial → numerics → dimensions →
precision → core`, `integrations → runtime → numerics`.

    autotune_amp/
      cli/            every command; the only place that prints or exits
      api.py          recommend_config(), check_fidelity(), profile_amp(), profile_memory()
      core/           plain data and pure text: Setting, AmpConfig, Workload, outcomes, Recommendation, errors;
                      imports nothing beside it
      precision/      what a precision sets: autocast, TF32 flags, scaler, casts around modules; the caller's own
                      torch state
      hardware/       what the machine can do, with reasons, and what others do on it; one file for each kind of
                      device
      distributed.py  the ranks of the caller's launcher, torchrun or srun
      interruption.py  Ctrl-C and SIGTERM: the best so far is saved, and SIGTERM ends the process
      fingerprint.py  what a cached recommendation holds for, known without running anything
      dimensions/     one file for each thing that a setting decides: its values, how it is applied, its risk and cost;
                      `prepare()`
      numerics/       a precision against fp32, where it goes wrong, the largest safe loss scale measured,
                      GradScaler's rule as arithmetic
      trial/          jobs, and in the child: builds, warms up, times, checks; `judge`: evidence to a failure;
                      `worst_batch`: what memory is measured on; `step_profile/`: parts of a step's time;
                      `observed_steps`: a job on the steps of a command, called by its agent
      processes/      where jobs run: forked or kept processes, behind one Backend
      command/        a training command as that Backend; `agent/` is what runs inside it: hooks, guard, what is set
                      from outside
      search/         the parent: space, stages, Optuna, confirmation, `ranking` (its plateau), the choice,
                      `loss_scales`; imports no torch
      diagnostics/    without a search, each with its job, result and parent side: `check/` (code that breaks under
                      autocast, from one step), `memory/` (what fills it, which batch fits), `profile_amp`
                      (gain of mixed precision, parts of a step's time), `check_fidelity`
      runtime/        the training job: PrecisionController, its `policy` (pure: when to step down), its diagnosis
      integrations/   Lightning, Transformers, Accelerate, exports for these and others, sinks for a run's metrics
      report/         what is shown: terminal, progress, report.html, dashboard
      service/        `autotune-amp serve`: searches on request over HTTP; the only place that knows FastAPI
      workloads.py    the built-in one
    studies/          one folder for each question answered by measurement, and the facts that the code relies on
    tests/            mirrors the source; needs no GPU and no network
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.api import check_fidelity as check_fidelity
    from autotune_amp.api import check_workload as check_workload
    from autotune_amp.api import profile_amp as profile_amp
    from autotune_amp.api import profile_memory as profile_memory
    from autotune_amp.api import recommend_config as recommend_config
    from autotune_amp.core.command_template import CommandTemplate as CommandTemplate
    from autotune_amp.core.config import AmpConfig as AmpConfig
    from autotune_amp.core.config import LossScale as LossScale
    from autotune_amp.core.outcome import Fidelity as Fidelity
    from autotune_amp.core.recommendation import Recommendation as Recommendation
    from autotune_amp.core.workload import Workload as Workload
    from autotune_amp.diagnostics.check.findings import CheckReport as CheckReport
    from autotune_amp.diagnostics.memory.results import MemoryProfile as MemoryProfile
    from autotune_amp.diagnostics.profile_amp import AmpProfile as AmpProfile
    from autotune_amp.dimensions.prepare import prepare as prepare
    from autotune_amp.hardware import probe as probe
    from autotune_amp.runtime.controller import PrecisionController as PrecisionController

__version__ = "0.1.0"

_HOMES = {
    "AmpConfig": "core.config",
    "AmpProfile": "diagnostics.profile_amp",
    "CheckReport": "diagnostics.check.findings",
    "CommandTemplate": "core.command_template",
    "Fidelity": "core.outcome",
    "LossScale": "core.config",
    "MemoryProfile": "diagnostics.memory.results",
    "PrecisionController": "runtime.controller",
    "Recommendation": "core.recommendation",
    "Workload": "core.workload",
    "check_fidelity": "api",
    "check_workload": "api",
    "prepare": "dimensions.prepare",
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

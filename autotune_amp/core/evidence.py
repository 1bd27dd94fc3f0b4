"""What was measured of a recommended config, and on what: plain data."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.hardware import LoadEvidence
from autotune_amp.core.outcome import Accumulation, Fidelity
from autotune_amp.core.setting import Setting

Objective: TypeAlias = Literal["speed", "memory", "energy"]


class PlainEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended config run once without `config.environment`, as a user would who forgets to set it."""

    samples_per_second: float | None
    speedup: float | None


# Fresh processes behind a confirmed number: fewer say nothing of the spread between processes, which dominates
# (studies/README.md).
MIN_PROCESSES = 3


class BaselineEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the user runs today, measured in the user's own environment; None with `reason` where it does not run."""

    config: AmpConfig
    samples_per_second: float | None
    samples_per_second_interval: tuple[float, float] | None
    step_seconds: float | None
    peak_memory_bytes: int | None
    reason: str | None = None


class LossScaleEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the recommended init_scale and growth_interval are based on: a replay of the measured largest safe scales.

    Over the horizon of `num_steps` optimizer steps `num_skips` are foretold, and `applied_share` of the gradient
    reaches the optimizer; `default_...` is the same with the defaults of ``torch.amp.GradScaler``. In the
    `num_confirming_steps` measured by the confirmation `num_skips_seen` were skipped, where `num_skips_foretold` were
    foretold. The largest safe scale was measured at `num_calibrated_steps` steps; a real training has other batches.
    `flushed_share` of the gradient's entries, true zeros left out, are flushed to zero at the init_scale.
    """

    num_steps: int
    num_skips: int
    applied_share: float
    default_num_skips: int
    default_applied_share: float
    num_confirming_steps: int
    num_skips_seen: int
    num_skips_foretold: int
    num_calibrated_steps: int
    log2_safe_scale_min: float
    log2_safe_scale_median: float
    flushed_share: float


class WorkersTried(msgspec.Struct, frozen=True, kw_only=True):
    """A trial of `candidate` with another number of loader workers; None where it failed."""

    candidate: str
    num_workers: int
    samples_per_second: float | None
    data_share: float | None


class LoaderEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data loader sets the speed: what the step alone could reach, and which numbers of workers were tried.

    `data_share` is the share of a step of the recommended candidate spent waiting for data with the user's own
    `num_workers` (None: it has no workers to change), `step_samples_per_second` what its steps reach without waiting.
    """

    num_workers: int | None
    data_share: float
    step_samples_per_second: float
    tried: tuple[WorkersTried, ...] = ()


class ProcessPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one process, and the optimizer steps that it took."""

    num_steps: int
    peak_memory_bytes: int


class MemoryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the peak memory was measured on.

    `worst_case` says which batch in a sentence, None where all batches are alike or nobody knows; `num_seen` of
    `num_samples` samples were looked at for it, None where it was named. `has_evaluation` and `has_checkpoint` say
    whether the confirmation ran the workload's own. `processes` are those behind the peak, which is their highest.
    """

    worst_case: str | None
    num_seen: int | None = None
    num_samples: int | None = None
    has_evaluation: bool = False
    has_checkpoint: bool = False
    processes: tuple[ProcessPeak, ...] = ()


class Outlook(Setting, frozen=True, kw_only=True):
    """The fastest setting with a larger effective batch size than the one that is kept, measured by one process.

    It is shown and never recommended: it would ask for another learning rate. `speedup` is over the baseline, None
    where that was not measured.
    """

    samples_per_second: float
    peak_memory_bytes: int
    speedup: float | None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The training to come: `num_steps` optimizer steps over `num_samples` samples, in hours and money.

    Intervals are 95 % and follow from that of the throughput. `baseline_hours` is the same training as it runs today,
    None where that was not measured. Prices are in the currency of `price_per_hour`, None where that was not given.
    """

    num_steps: int
    num_samples: int
    hours: float
    hours_interval: tuple[float, float]
    baseline_hours: float | None = None
    price_per_hour: float | None = None
    price: float | None = None
    price_interval: tuple[float, float] | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of the recommended config.

    Intervals are 95 %: `samples_per_second_interval` is where a new run is expected to land, `speedup_interval` holds
    the mean ratio to the baseline. `num_processes` fresh processes of the config stand behind them; `is_confirmed` is
    false where they or the baseline's are fewer than three. `peak_memory_bytes` is the highest of theirs; on a CPU
    their resident size, without that of loader workers. `data_share` is the share of a step spent waiting for data,
    `update_share` that spent in the optimizer, None where it was not timed apart. `fidelity` is the verdict on the
    config's precision, *unchecked* where no check was made; None for fp32, which the others are held to. `loss_scale`
    is None for fp16 not calibrated, and for every other precision. `accumulation` is what was found of it, None where
    nobody asked; `loader` is None where the data loader does not set the speed. `is_build_shared`: the processes shared
    a model that was built once, so that the interval does not hold what building it anew changes.
    `are_processes_shared`: each of them measured everything that was confirmed, in turn. `joules_per_sample`
    is None where nothing says what the device draws, `load` where nobody looked what others did on the machine.
    `search_samples_per_second` is what the search's trials reached, where the confirmation is more than half off it:
    then the interval holds both.
    """

    samples_per_second: float
    samples_per_second_interval: tuple[float, float]
    step_seconds: float
    peak_memory_bytes: int
    baseline: BaselineEvidence
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    num_processes: int
    is_confirmed: bool
    data_share: float
    update_share: float | None = None
    plain_environment: PlainEnvironment | None = None
    fidelity: Fidelity | None = None
    loss_scale: LossScaleEvidence | None = None
    accumulation: Accumulation | None = None
    loader: LoaderEvidence | None = None
    memory: MemoryEvidence | None = None
    is_build_shared: bool = False
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    joules_per_sample: float | None = None
    load: LoadEvidence | None = None
    search_samples_per_second: float | None = None
    are_processes_shared: bool = False

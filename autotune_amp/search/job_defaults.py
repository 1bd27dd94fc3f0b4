"""Fields that all trials and checks of a search have in common."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.precision.modes import MODES
from autotune_amp.search.ledger import LOSS_SCALE, Ledger
from autotune_amp.search.space import HOPELESS_SLOWDOWN
from autotune_amp.trial.jobs import Check, CheckKind, Trial


class JobDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all jobs of one search have in common.

    `environment` are the recommended environment variables, and `ready_seconds` the time from starting a process until
    it has imported the workload. `max_trials` limits the whole search, None for no limit. `similar_best` is the best
    setting of an earlier search for the same code with other options, or None. `are_trials_fresh`: each trial starts a
    process of its own, as a command does, and counts as a confirmation. `loads_together`: the processes of the
    confirmation rounds load at the same time.
    """

    hardware: Hardware
    description: Description
    memory_limit_bytes: int
    torch_state: dict[str, Any] = {}
    environment: dict[str, str] = {}
    seed: int = 0
    ready_seconds: float = 0.0
    max_trials: int | None = None
    similar_best: Setting | None = None
    are_trials_fresh: bool = False
    loads_together: bool = False

    @property
    def setup_seconds(self) -> float:
        """Return the seconds before the first step of a trial that builds its own model."""
        return self.description.build_seconds + self.description.context_seconds

    @property
    def start_seconds(self) -> float:
        """Return the predicted seconds from starting a fresh process to its first step."""
        return self.ready_seconds + self.setup_seconds

    @property
    def shares_processes(self) -> bool:
        """Whether the runs of a confirmation round share a process.

        Runs of a command do not, nor runs on a CPU, where the state of the heap affects the measurement. On an
        accelerator the allocator's cache is emptied between runs, and no recommended variables need another process.
        """
        return self.hardware.device != "cpu" and not self.are_trials_fresh

    @property
    def num_cpus(self) -> int:
        """Return the number of CPU cores for each rank."""
        return max(1, self.hardware.identity.num_cpus // self.description.num_ranks)

    @property
    def has_cpus_for_more_workers(self) -> bool:
        """Whether the user's data loader has fewer worker processes than each rank has CPUs."""
        num_workers = self.description.num_workers
        return num_workers is not None and num_workers < self.num_cpus

    def trial(self, ledger: Ledger, setting: Setting, **fields: Any) -> Trial:
        """Return a trial of `setting`; `fields` override the defaults."""
        sizes = self.description.sample_sizes
        values: dict[str, Any] = {
            "hold_heap": bool(self.environment),
            "num_ranks": self.description.num_ranks,
            "has_unused_parameters": self.description.has_unused_parameters,
            "loss_scale": LOSS_SCALE if MODES[setting.precision].takes_scaler else None,
        }
        return Trial(
            candidate=setting,
            device=self.hardware.device,
            seed=self.seed,
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            worst_samples=() if sizes is None else sizes.largest[: setting.batch_size],
            is_loss_sum=ledger.is_loss_sum,
            **(values | fields),
        )

    def check(self, what: CheckKind, setting: Setting, seconds: float) -> Check:
        """Return a check of the kind `what` for `setting`, with a deadline of `seconds`.

        It runs with the setting's pinned modules or, if there are none, searches for modules to pin.
        """
        return Check(
            what=what,
            candidate=setting,
            device=self.hardware.device,
            find_pins=not setting.pinned_modules,
            seed=self.seed,
            deadline_seconds=max(0.0, seconds),
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            hold_heap=bool(self.environment),
        )


def is_hopeless(hardware: Hardware, precision: Precision) -> bool:
    """Whether a precision is emulated and its matrix products are `HOPELESS_SLOWDOWN` times slower than fp32's."""
    capability, reference = hardware.precisions[precision], hardware.precisions.get("fp32")
    if capability.level != "emulated" or reference is None or reference.matmul_flops_per_second is None:
        return False
    return HOPELESS_SLOWDOWN * (capability.matmul_flops_per_second or 0.0) < reference.matmul_flops_per_second

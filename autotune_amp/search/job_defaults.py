"""Fields that all trials and checks of a search have in common, and constants from which the search is planned."""

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
    """Constants of one search: the fields that its trials and checks have in common, and facts to plan them with.

    `description` describes the workload. `memory_limit_bytes` limits each process's use of the device's memory.
    `torch_state` is the caller's global state of torch, such as its flags, which each job restores. `environment` holds
    the environment variables that are recommended for the training run; there are some only for a CPU, where they make
    malloc keep freed memory. `ready_seconds` is the time from starting a process until it has imported the workload.

    `max_trials` limits the whole search, None for no limit. `similar_best` is the best setting of an earlier search for
    the same code with other options, or None. `are_trials_fresh`: each trial starts a process of its own, since the
    workload is a training command; so it counts as one of the runs that confirm the winner against the baseline in
    rounds. `loads_together`: the processes for these rounds are started together and load at the same time.
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
        """Return the seconds in which a trial starts the accelerator and builds model, data and optimizer."""
        return self.description.build_seconds + self.description.context_seconds

    @property
    def start_seconds(self) -> float:
        """Return the predicted seconds from starting a fresh process to its first step."""
        return self.ready_seconds + self.setup_seconds

    @property
    def shares_processes(self) -> bool:
        """Whether the runs of a confirmation round share a process.

        Runs of a training command do not, nor runs on a CPU, where memory freed by earlier runs affects the
        measurement. On an accelerator the allocator's cache is emptied between runs, and there is no `environment` that
        only a new process could get.
        """
        return self.hardware.device != "cpu" and not self.are_trials_fresh

    @property
    def num_cpus(self) -> int:
        """Return the number of CPU cores for each rank, at least one."""
        return max(1, self.hardware.identity.num_cpus // self.description.num_ranks)

    @property
    def has_cpus_for_more_workers(self) -> bool:
        """Whether the user's data loader has fewer worker processes than each rank has CPU cores.

        False without a loader whose number of workers can be changed.
        """
        num_workers = self.description.num_workers
        return num_workers is not None and num_workers < self.num_cpus

    def trial(self, ledger: Ledger, setting: Setting, **fields: Any) -> Trial:
        """Return a trial of `setting`; `fields` are further fields of `Trial`.

        They may override `hold_heap`, `num_ranks`, `has_unused_parameters` and `loss_scale`, but no other field that is
        set here. fp16 has the default loss scale, unless `fields` has a calibrated one. `ledger` knows whether the loss
        is a sum over samples. The largest samples make up the worst batch, whose memory is measured.
        """
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
        """Return a check of the kind `what` for `setting`, with a deadline of `seconds`, 0 if they are negative.

        It runs with the setting's pinned modules in fp32. If there are none, a fidelity check that finds harm searches
        for modules to pin.
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
    """Whether `precision` is emulated and its matrix products are over `HOPELESS_SLOWDOWN` times slower than fp32's.

    False if the device's speed in fp32 was not measured. An emulated precision without a measured speed is hopeless.
    """
    capability, reference = hardware.precisions[precision], hardware.precisions.get("fp32")
    if capability.level != "emulated" or reference is None or reference.matmul_flops_per_second is None:
        return False
    return HOPELESS_SLOWDOWN * (capability.matmul_flops_per_second or 0.0) < reference.matmul_flops_per_second

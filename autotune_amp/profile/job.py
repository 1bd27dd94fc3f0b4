"""The profile's job: one precision's step taken apart in a process of its own; plain data and no torch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from autotune_amp.core.job import Job
from autotune_amp.precision.modes import MODES
from autotune_amp.trial.jobs import Trial

LOW = tuple(precision for precision, mode in MODES.items() if mode.uses_autocast)  # what mixed precision means


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as torch.profiler saw it, in seconds.

    `operation_seconds` are those of operations by `gap.Kind`: of their kernels on a device that shows them, else of
    the host, each without the operations that it calls. `step_seconds` is the step by the host's clock, slower for
    being profiled. `busy_seconds` is how long the device had any kernel to run, 0 where none was seen.
    """

    operation_seconds: dict[str, float]
    step_seconds: float
    busy_seconds: float = 0.0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The profiled steps of one precision, alike but for what else ran on the machine.

    `largest` names the operations that took most in each kind, over all steps, the largest first. `is_device`: it is
    kernels that were seen.
    """

    steps: tuple[ProfiledStep, ...]
    largest: dict[str, tuple[str, ...]]
    is_device: bool = False


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="profiled"):
    """What the child found.

    `split` is None with a `split_problem`. `flops_per_step` are those of the matrix products of one step, None with a
    `flops_problem`. `flops_per_second` is the machine's rate of large matrix products right after the steps, None where
    there was no memory to measure it. `unfused_optimizer` is the class of an optimizer that could step in fused kernels
    and does not, None without one; `is_compiled` says that torch.compile was at work; `num_loader_workers` is None
    without a DataLoader.
    """

    split: Split | None = None
    split_problem: str | None = None
    flops_per_step: int | None = None
    flops_problem: str | None = None
    flops_per_second: float | None = None
    unfused_optimizer: str | None = None
    is_compiled: bool = False
    num_loader_workers: int | None = None


class Profile(Job[Profiled], frozen=True, kw_only=True):
    """A few steps, of the training that `trial` describes, under torch.profiler.

    The Chrome trace is written to `trace_file`; the operations of a step and the machine's rate are counted after it.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.profile.child:profile"

    trial: Trial
    trace_file: str

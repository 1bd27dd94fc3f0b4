"""What a profile's child is asked to do and what it found: plain data, JSON both ways. No torch."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from autotune_amp.core.config import Precision
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure
from autotune_amp.trial.jobs import Trial

LOW: tuple[Precision, ...] = ("bf16", "fp16")  # what mixed precision means: autocast casts to them
# A precision whose steps take so many times those of fp32, beside which they are run, is left after a few of them.
CUT_RATIO = 5.0


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step as torch.profiler saw it, in seconds.

    `operation_seconds` are those of operations by `trace.Kind`: of their kernels on a device that shows them, else of
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


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """One precision as it ran beside the others.

    `block_seconds` is a step of each block without the wait for its data, which `data_seconds` are; the child's blocks
    are a few steps each, those of `rounds` whole processes. `num_steps` are the steps in all of them. `split` is None
    where it was not profiled. `failure` ended it, after the blocks that are there; `was_cut`: it was left after them as
    hopelessly slow.
    """

    precision: Precision
    block_seconds: tuple[float, ...] = ()
    data_seconds: tuple[float, ...] = ()
    num_steps: int = 0
    split: Split | None = None
    failure: Failure | None = None
    was_cut: bool = False


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="profiled"):
    """What the child found.

    `loads_ahead`: worker processes load while a step computes, so that a step of one precision alone waits longer for
    its data than these did. `split_problem` says why no step was profiled, None where they were or were not to be.
    `flops_per_step` are those of the matrix products of one step, None with a `flops_problem`. `unfused_optimizer` is
    the class of an optimizer that could step in fused kernels and does not, None without one; `is_compiled` says that
    torch.compile was at work. `rates` are those of large matrix products by precision, in FLOP/s, measured right after
    the steps.
    """

    lanes: tuple[Lane, ...] = ()
    loads_ahead: bool = False
    split_problem: str | None = None
    flops_per_step: int | None = None
    flops_problem: str | None = None
    unfused_optimizer: str | None = None
    is_compiled: bool = False
    num_loader_workers: int | None = None
    rates: dict[Precision, float] = {}


class ProfileSpec(Job[Profiled], frozen=True, kw_only=True):
    """Precisions to run side by side, one trial's spec for each, over `num_batches` batches that all of them share.

    `num_batches_per_block` are timed between two synchronisations. Where `takes_apart`, steps are profiled after that,
    with the Chrome trace written to `trace_file` (None for none), and operations and the machine's rates are counted.
    `seed` of the trials seeds the model and the order of the batches.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.profile.child:profile"

    trials: tuple[Trial, ...]
    num_batches: int
    num_batches_per_block: int = 1
    takes_apart: bool = True
    trace_file: str | None = None

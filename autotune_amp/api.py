"""recommend_config(): the whole flow on one screen; and what can be asked without a search, as check_workload()."""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from autotune_amp.core.documents import check_new
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.launch_line import LaunchLine
from autotune_amp.core.recommendation import NothingWorksError, Recommendation, SearchInterruptedError
from autotune_amp.core.text import shell_line
from autotune_amp.core.workload import Workload
from autotune_amp.distributed import answer_on_first, place
from autotune_amp.interruption import interruptible
from autotune_amp.launch.startable import likely_command, require_startable
from autotune_amp.report.files import keep_report
from autotune_amp.search.command import CommandSource
from autotune_amp.search.options import DEFAULT_BUDGET_SECONDS, SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.source import Source, live, target
from autotune_amp.search.storage.cache import search

if TYPE_CHECKING:
    from autotune_amp.check.findings import CheckReport
    from autotune_amp.core.outcome import Fidelity
    from autotune_amp.memory.results import MemoryProfile
    from autotune_amp.profile.results import AmpProfile

WorkloadArgument: TypeAlias = Workload | Callable[[], Workload] | LaunchLine | str | None

DEFAULT_TARGET = "autotune_amp.workloads:workload"


@interruptible()
def recommend_config(
    workload: WorkloadArgument = None,
    *,
    budget: float = DEFAULT_BUDGET_SECONDS,
    trials: int | None = None,
    device: str = "auto",
    devices: Sequence[int] | str | None = None,
    slots: int | None = None,
    ray: str | None = None,
    ranks: int = 1,
    precision: Sequence[str] | str | None = None,
    batch_size: str | tuple[int, int] | None = None,
    effective_batch_size: int | str | None = None,
    try_: str | Sequence[str] = "auto",
    baseline: str | tuple[str, int] | None = None,
    memory_fraction: float = 0.9,
    memory_limit: str | int | None = None,
    objective: str = "speed",
    steps: int | None = None,
    samples: int | None = None,
    price_per_hour: float | None = None,
    study: str | None = None,
    out: str = "studies",
    storage: str | None = None,
    seed: int = 0,
    fresh: bool = False,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Measure which precision and batch size to train `workload` with, or answer from the cache.

    `workload` is a Workload, a function that returns one, "path/file.py:function" or "package.module:function", or a
    LaunchLine: any training command. The embedded one if left out. `budget` is wall-clock seconds for everything, at
    most: a search ends before, once it is decided and confirmed.
    `devices` are NVIDIA cards to search on at the same time, "all" or their numbers as CUDA counts them; they must be
    of one model. `slots` is a number of shares of the CPU, for trials alone: what is promised is confirmed with all of
    it. `ray` is the address of a Ray cluster ("auto" for the one of this host), whose nodes are searched on at the same
    time; they get the working directory. `ranks` processes of one host train each trial together under
    DistributedDataParallel, on a CPU on shares of it, on cards one on each.
    `batch_size` is "LOW:HIGH" or a pair, `baseline` "PRECISION:BATCH" or a pair: what you run today.
    `effective_batch_size` is kept exactly, by accumulation: samples per optimizer step over all ranks; left out, each
    rank has that of the DataLoader; "free" lets the search change it.
    `try_` names what else to try: "auto" for what this model and device can have safely, "none", or names in a list:
    "compile", "memory_format" (or "channels_last"), "optimizer_impl" (or "fused", "foreach"), "fp8_recipe",
    "cudnn_benchmark", "activation_checkpointing", "allocator" and "weights".
    `memory_fraction` is the share of the available memory that a trial may take, `memory_limit` what each process of it
    may take in any case, as "16GiB" or in bytes: for a training on a smaller device than this one.
    `objective` is "speed", "memory" (the least, no slower than the baseline) or "energy". `steps` or `samples` is how
    long the training will be: fp16's loss scale is chosen for it (10,000 steps if left out), and with `price_per_hour`
    the recommendation's `job` has its hours and its price. These change nothing of what is measured: a finished search
    is ranked again.
    Results go to `out`/`study`, report.html among them; where it cannot be drawn there is a warning, no more. `fresh`
    measures again what was measured already. `progress` hears how it goes; by default that is standard error, in a
    notebook the cell, unless `quiet`.

    Under torchrun, srun or another launcher (WORLD_SIZE above 1), or in a process group, call it on all ranks alike:
    rank 0 searches and shows its progress, the others wait for its answer. Before init_process_group() it works as well
    as after. In the processes that Lightning starts by running the script again, it takes the answer that the first one
    has saved.

    Raises `InvalidRequestError` (a wrong option, workload, device or folder), `BudgetTooSmallError`,
    `NothingWorksError` (every candidate failed) and `SearchInterruptedError` (Ctrl-C; the best so far is saved),
    on every rank alike; and on the others `RunnerError` where rank 0 died. SIGTERM saves the best so far too and then
    ends the process with exit code 143, unless there is a handler for it already.
    """
    asked = {name: given for name, given in locals().items() if name not in ("workload", "fresh", "quiet", "progress")}
    where = place()

    def find() -> Recommendation:
        options = SearchOptions.from_user(num_ranks=where.num_ranks, **asked)
        origin = _origin(workload, "recommend_config", "search")
        with _shown(quiet, progress) as shown:
            warn = _warn if quiet else shown.note
            try:
                found = search(origin, options, shown, is_fresh=fresh, is_rerun=where.is_rerun)
            except (NothingWorksError, SearchInterruptedError):
                keep_report(Path(out, study or origin.name), shown.note, warn)
                raise
            keep_report(Path(out, found.search.study), shown.note, warn)
            return found

    return answer_on_first(find, where, budget)


@interruptible()
def check_fidelity(
    workload: WorkloadArgument = None,
    precision: str = "bf16",
    *,
    batch_size: int | None = None,
    device: str = "auto",
    pinned_modules: Sequence[str] = (),
    seed: int = 0,
    budget: float = 110.0,
    quiet: bool = False,
) -> Fidelity:
    """Whether training `workload` in `precision` learns what fp32 learns: one step and a short training run in both.

    `workload` is as `recommend_config` takes it; it runs in a process of its own, on copies. `batch_size` is the
    workload's own, 16 at most, unless given; fewer samples are used where memory is short. `pinned_modules` run in
    fp32 meanwhile: a bad verdict's `healing_pins` are such. `budget` is wall-clock seconds for everything.

    What could not be checked, for want of memory or because the workload does not run in that precision, is
    "unchecked", and what there was too little time to decide is "undecided", with the reason. Raises
    `InvalidRequestError` (a wrong option, device, module name, or a precision that the device does not have),
    `WorkloadError` (the workload cannot be loaded or built, or does not run in fp32 either), `NothingWorksError` (the
    device cannot be probed) and `BudgetTooSmallError` (the budget ended before it was loaded).
    """
    from autotune_amp.search.checks import run_check

    origin = _origin(workload, "check_fidelity", "check")
    with _shown(quiet) as progress:
        return run_check(origin, progress, precision, batch_size, device, pinned_modules, seed, budget)


@interruptible()
def check_workload(
    workload: WorkloadArgument = None,
    *,
    device: str = "cuda",
    batch_size: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> CheckReport:
    """What of `workload` breaks or hurts under the autocast of a device, found on the CPU: no such device is needed.

    `workload` is as `recommend_config` takes it, but for a LaunchLine; it runs in a process of its own, on copies.
    `device` is "cuda", "cpu" or "mps". One fp32 step of `batch_size` samples (2 unless given, or where it does not run
    with 2 the workload's own, 8 at most) is recorded, and the dtype of each of its tensors is what torch's own autocast
    for that device makes of it; then the user's source files are read. A branch that the step does not take is not
    seen, nor are numbers that only training brings about: those `check_fidelity` finds.

    Raises `InvalidRequestError` (a wrong option or device) and `WorkloadError` (the workload cannot be loaded or built,
    or one fp32 step of it does not work on the CPU).
    """
    from autotune_amp.search.checks import run_look

    origin = _origin(workload, "check_workload", "check")
    with _shown(quiet) as progress:
        return run_look(origin, progress, device, batch_size, seed)


@interruptible()
def profile_amp(
    workload: WorkloadArgument = None,
    num_batches: int = 10,
    *,
    device: str = "auto",
    precision: Sequence[str] | str | None = None,
    batch_size: int | None = None,
    trace: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> AmpProfile:
    """Whether mixed precision pays for `workload` here, and why: fp32 against bf16 and fp16 on the same batches.

    `workload` is as `recommend_config` takes it. It runs in processes of its own, on copies, at the user's own batch
    size unless `batch_size` is given: all precisions in turns over `num_batches` training steps each, divided among
    three processes, then a few steps of each under torch.profiler. What takes more than five times as long as fp32, and
    more than a second a step, is cut. `precision` names those to hold against fp32 (TF32 too, by default, where the
    device has it). `trace` is a new file for the profiler's Chrome trace, which https://ui.perfetto.dev opens.

    A precision that the device lacks, that runs out of memory or that fails has a row with the reason. Raises
    `InvalidRequestError` (a wrong option or device), `WorkloadError` (the workload cannot be loaded or built, or does
    not run in fp32 either) and `NothingWorksError` (the device cannot be probed, or no precision could be measured).
    """
    from autotune_amp.search.profile_amp import run_profile

    check_new("--trace", trace)
    origin = _origin(workload, "profile_amp", "profile")
    with _shown(quiet) as progress:
        return run_profile(origin, progress, num_batches, device, precision, batch_size, trace)


@interruptible()
def profile_memory(
    workload: WorkloadArgument = None,
    *,
    batch_size: int | None = None,
    precision: Sequence[str] | str | None = None,
    device: str = "auto",
    fit: str | int | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    quiet: bool = False,
) -> MemoryProfile:
    """What fills the memory of a training step of `workload`, in each precision, and which batch fits into how much.

    `workload` is as `recommend_config` takes it. It runs in processes of its own, on copies, at the user's own batch
    size unless `batch_size` is given: a few steps for the peak, and one in which every tensor is looked at. `precision`
    names those to measure; left out, fp32, bf16 and fp16, without what the device emulates many times slower. `fit` is
    a size, as "16GiB" or in bytes: up to six batch sizes of each precision are measured, within the memory of this
    device, for the largest batch that would fit into it. `snapshot` is a new file for torch's own memory snapshot of
    the first precision's step, on CUDA, which https://pytorch.org/memory_viz opens.

    A precision that the device lacks, that runs out of memory or that fails has a row with the reason. Raises
    `InvalidRequestError` (a wrong option or device), `WorkloadError` (the workload cannot be loaded or built, or does
    not run in fp32 either) and `NothingWorksError` (the device cannot be probed, or no precision could be measured).
    """
    from autotune_amp.memory.profile_memory import run_memory_profile

    check_new("--snapshot", snapshot)
    origin = _origin(workload, "profile_memory", "memory profile")
    with _shown(quiet) as progress:
        return run_memory_profile(origin, progress, precision, batch_size, device, fit, snapshot)


def _origin(workload: WorkloadArgument, caller: str, what: str) -> Source:
    if "AUTOTUNE_AMP_TRIAL" in os.environ:
        raise InvalidRequestError(
            f"{caller}() was called inside a trial: the workload's own file runs a {what} when it is imported.",
            'Put that call behind `if __name__ == "__main__":`.',
        )
    if isinstance(workload, LaunchLine):
        require_startable(workload.arguments, os.environ.get("PATH"))
        return CommandSource(workload)
    if isinstance(workload, str) and ":" not in workload and caller == "recommend_config":
        words = likely_command([workload])
        if words is not None:
            line, is_script = shell_line(words), workload.endswith(".py")
            function = (
                f"Name the function in it that returns a Workload: {workload}:FUNCTION. Or search"
                if is_script
                else "Search"
            )
            raise WorkloadError(
                f"{workload!r} names no workload.",
                f"{function} the command: `autotune-amp search -- {line}`, in Python LaunchLine.of({line!r}).",
            )
    return target(workload or DEFAULT_TARGET) if workload is None or isinstance(workload, str) else live(workload)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def _shown(quiet: bool, given: Progress | None = None) -> Iterator[Progress]:
    """The progress that was given, else on standard error unless `quiet`; it is ended.

    The caller's random numbers are what they would be without it: rich draws some when it is imported.
    """
    state = random.getstate()
    progress = given or Progress()
    if given is None and not quiet:
        from autotune_amp.report.progress import TerminalProgress

        progress = TerminalProgress(sys.stderr)
    try:
        yield progress
    finally:
        progress.ended()
        random.setstate(state)

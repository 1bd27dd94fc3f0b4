"""Public functions: recommend_config() runs a search; the others check or profile a workload without a search."""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from autotune_amp.command.startable import likely_command, require_startable
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.documents import raise_if_exists
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.recommendation import Fingerprint, NothingWorksError, Recommendation, SearchInterruptedError
from autotune_amp.core.text import shell_line
from autotune_amp.core.workload import Workload
from autotune_amp.distributed import answer_on_first, left_no_answer, place
from autotune_amp.hardware import identify
from autotune_amp.interruption import interruptible
from autotune_amp.report.files import update_report
from autotune_amp.search.command import CommandSource
from autotune_amp.search.options import DEFAULT_BUDGET_SECONDS, RANKING, SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.source import Source, live_source, target
from autotune_amp.search.storage.cache import cached_recommendation, shared_recommendation
from autotune_amp.search.storage.folder import StudyFolder

if TYPE_CHECKING:
    from autotune_amp.core.outcome import Fidelity
    from autotune_amp.diagnostics.check.findings import CheckReport
    from autotune_amp.diagnostics.memory.results import MemoryProfile
    from autotune_amp.diagnostics.profile_amp import AmpProfile

WorkloadArgument: TypeAlias = Workload | Callable[[], Workload] | CommandTemplate | str | None

DEFAULT_TARGET = "autotune_amp.workloads:workload"
# Options that do not change the measurements: where a search writes, its devices, and its ranking.
_OPTIONS_OUTSIDE_FINGERPRINT = ("study", "out", "storage", "devices", "ray", *RANKING)


@interruptible()
def recommend_config(
    workload: WorkloadArgument = None,
    *,
    budget: float = DEFAULT_BUDGET_SECONDS,
    trials: int | None = None,
    device: str = "auto",
    devices: Sequence[int] | str | None = None,
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
    server: str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Recommendation:
    """Measure which precision and batch size to train `workload` with, or answer from the cache.

    `workload` is a Workload, a function that returns one, "path/file.py:function" or "package.module:function", or a
    CommandTemplate for any training command. If left out, it is a small embedded one. `budget` is the most wall-clock
    seconds for everything: a search ends earlier once it is decided and confirmed.
    `devices` are NVIDIA GPUs to search on at the same time, "all" or their numbers in CUDA's order; they must be of one
    model. `ray` is the address of a Ray cluster ("auto" for that of this host) to search on all of its nodes at the
    same time; they receive the working directory. `ranks` processes of one host train each trial together under
    DistributedDataParallel, each on its own GPU or its own share of the CPU.
    `batch_size` is "LOW:HIGH" or a pair. `baseline` is the setting in use today, "PRECISION:BATCH" or a pair.
    `effective_batch_size` is the samples per optimizer step over all ranks, which accumulation keeps exactly. If left
    out, each rank keeps the batch size of the DataLoader; "free" lets the search change it.
    `try_` names the further dimensions to try: "auto" for those that are safe for this model and device, "none", or a
    list of "compile", "memory_format" (or "channels_last"), "optimizer_impl" (or "fused", "foreach"), "fp8_recipe",
    "attention" (or "flash", "efficient", "math", "cudnn"), "cudnn_benchmark", "activation_checkpointing", "allocator"
    and "weights".
    `memory_fraction` is the share of the available memory that a trial may take. `memory_limit` is an absolute limit
    for each process of a trial, as "16GiB" or in bytes, for a training run on a smaller device than this one.
    `objective` is "speed", "tokens" (speed in tokens that are no padding), "memory" (the least memory, no slower than
    the baseline) or "energy". `steps` or `samples`
    is the length of the training run: fp16's loss scale is chosen for it (10,000 steps if left out), and the
    recommendation's `job` has its hours, with `price_per_hour` its price too, and `unit_price` that of a million tokens
    or samples. Changing these options needs no new measurements: a finished search is ranked again.
    Results go to `out`/`study`, including report.html; if that cannot be written, a warning is given. `fresh`
    repeats measurements that exist already. `progress` receives the events of the search; by default they are shown on
    standard error or in the notebook's cell, unless `quiet`.
    `server` is the URL of a service (`autotune-amp serve`) that searches in place of this machine: `workload` is then
    the name of one of its targets. Its token is taken from the environment variable AUTOTUNE_AMP_TOKEN.

    Under torchrun, srun or another launcher (WORLD_SIZE above 1), or in a process group, call it on all ranks alike,
    before or after init_process_group(): rank 0 searches and shows its progress, the others wait for its result. A
    process that Lightning starts by running the script again loads the result that the first process has saved.

    Raises on every rank alike `InvalidRequestError` (a wrong option, workload, device or folder),
    `BudgetTooSmallError`, `NothingWorksError` (every candidate failed) and `SearchInterruptedError` (Ctrl-C; the best
    so far is saved, unless a finished search of the same name is); on ranks above 0 also `RunnerError` if rank 0 died.
    SIGTERM does the same and then ends the process with exit code 143, unless there is a handler for it already.
    """
    arguments = dict(locals())
    search_arguments = {
        name: value
        for name, value in arguments.items()
        if name not in ("workload", "fresh", "server", "quiet", "progress")
    }
    launch = place()

    def run_search() -> Recommendation:
        if server is not None:
            return _ask_service(server, workload, {**search_arguments, "fresh": fresh}, quiet, progress)
        options = SearchOptions.from_user(num_ranks=launch.num_ranks, **search_arguments)
        source = _workload_source(workload, "recommend_config", "search")
        with _shown_progress(quiet, progress) as shown_progress:
            warn = _warn if quiet else shown_progress.note
            try:
                recommendation = _search(source, options, shown_progress, is_fresh=fresh, is_rerun=launch.is_rerun)
            except (NothingWorksError, SearchInterruptedError):
                update_report(Path(out, study or source.name), shown_progress.note, warn)
                raise
            update_report(Path(out, recommendation.search.study), shown_progress.note, warn)
            return recommendation

    return answer_on_first(run_search, launch, budget if server is None else math.inf)  # a service has a queue


def _ask_service(
    server: str, target: object, arguments: dict[str, object], quiet: bool, progress: Progress | None
) -> Recommendation:
    """Return the recommendation of a service for its target, with the arguments that are not at their defaults."""
    from autotune_amp.service.client import recommendation_from

    if not isinstance(target, str):
        raise InvalidRequestError(
            "A service searches only the targets that its own file names.", "Pass the name of one as the workload."
        )
    defaults = inspect.signature(recommend_config).parameters
    changed = {name: value for name, value in arguments.items() if value != defaults[name].default}
    with _shown_progress(quiet, progress) as shown_progress:
        return recommendation_from(server, target, changed, shown_progress)


def _search(
    source: Source, options: SearchOptions, progress: Progress, *, is_fresh: bool, is_rerun: bool = False
) -> Recommendation:
    """Return the cached recommendation, or search. With `is_rerun`, only return the one saved by the first process."""
    folder = StudyFolder(options.out, options.study or source.name)
    fields = msgspec.to_builtins(options)
    settings = {name: fields[name] for name in fields if name not in _OPTIONS_OUTSIDE_FINGERPRINT}
    cached = folder.cached()
    # The hardware of a cluster's node is known once it is reached.
    fingerprint = None if options.ray else source.fingerprint(settings, identify(options.first_device))
    if fingerprint is not None and (is_rerun or not is_fresh):
        recommendation = cached_recommendation(cached, options, folder, progress, fingerprint)
        if recommendation is not None:
            return recommendation
    if is_rerun:
        raise left_no_answer(folder.path, cached, fingerprint)
    from autotune_amp.search.search import run_search

    def saved_recommendation_for(fingerprint: Fingerprint) -> Recommendation | None:
        """Return the saved recommendation for `fingerprint`, or None. Call it with the folder locked."""
        recommendation = cached_recommendation(cached, options, folder, progress, fingerprint)
        return recommendation or shared_recommendation(source, options, folder, progress, fingerprint)

    return run_search(
        source, options, progress, folder, settings, cached, fingerprint, saved_recommendation_for, is_fresh=is_fresh
    )


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
    """Check whether training `workload` in `precision` learns the same as in fp32, by one step and a short training
    run in both.

    `workload` is as in `recommend_config`; it runs in a process of its own, on copies. `batch_size` is the workload's
    own, 16 at most, unless given; fewer samples are used if memory is short. `pinned_modules` run in fp32 meanwhile,
    for example the `healing_pins` of a bad verdict. `budget` is wall-clock seconds for everything. Of a command only
    gradients at its first weights and today's batch size are compared, and no modules can be pinned.

    The verdict is "unchecked" if memory was short or the workload does not run in that precision, and "undecided" if
    there was too little time, with the reason. Raises
    `InvalidRequestError` (a wrong option, device, module name, or a precision that the device does not have),
    `WorkloadError` (the workload cannot be loaded or built, or does not run in fp32 either), `NothingWorksError` (the
    device cannot be probed) and `BudgetTooSmallError` (the budget ended before it was loaded).
    """
    from autotune_amp.diagnostics.check_fidelity import run_fidelity_check

    source = _workload_source(workload, "check_fidelity", "fidelity")
    with _shown_progress(quiet) as progress:
        return run_fidelity_check(source, progress, precision, batch_size, device, pinned_modules, seed, budget)


@interruptible()
def check_workload(
    workload: WorkloadArgument = None,
    *,
    device: str = "cuda",
    batch_size: int | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> CheckReport:
    """Find code in `workload` that breaks or hurts under a device's autocast. Runs on the CPU, without that device.

    `workload` is as in `recommend_config`; it runs in a process of its own, on copies. `device` is "cuda", "cpu" or
    "mps". One fp32 step of `batch_size` samples is recorded (by default 2, or if that does not run the workload's own,
    8 at most), and torch's autocast for that device determines the dtype of each of its tensors; then the user's source
    files are read. Of a command, which runs where it trains, the second step is recorded, at its own batch size.
    Branches that the step does not take are not seen, nor are values that only arise in training, which
    `check_fidelity` finds.

    Raises `InvalidRequestError` (a wrong option or device) and `WorkloadError` (the workload cannot be loaded or built,
    or one fp32 step of it does not work on the CPU; a command fails, or its Python cannot import this package).
    """
    from autotune_amp.diagnostics.check.check_workload import run_workload_check

    source = _workload_source(workload, "check_workload", "check")
    with _shown_progress(quiet) as progress:
        return run_workload_check(source, progress, device, batch_size, seed)


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
    """Measure whether mixed precision pays for `workload` here, and why: bf16 and fp16 compared with fp32.

    `workload` is as in `recommend_config`. It runs in processes of its own, on copies, at the user's own batch size
    unless `batch_size` is given: all precisions in turns on the same batches, over `num_batches` training steps each,
    divided among three processes (fewer for a command whose starts are long), then a few steps of each under
    torch.profiler. A precision that takes more than five times as long as fp32, and more than a second a step, is cut
    short. `precision` names those to compare with fp32; by default TF32 is included if the device has it. `trace` is a
    new file for the profiler's Chrome trace, which https://ui.perfetto.dev opens.

    A precision that the device lacks, that runs out of memory or that fails has a row with the reason. Raises
    `InvalidRequestError` (a wrong option or device), `WorkloadError` (the workload cannot be loaded or built, or does
    not run in fp32 either) and `NothingWorksError` (the device cannot be probed, or no precision could be measured).
    """
    from autotune_amp.diagnostics.profile_amp import run_profile

    raise_if_exists("--trace", trace)
    source = _workload_source(workload, "profile_amp", "profile")
    with _shown_progress(quiet) as progress:
        return run_profile(source, progress, num_batches, device, precision, batch_size, trace)


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
    """Measure the memory of a training step of `workload` by kind, in each precision, and the batch size that fits.

    `workload` is as in `recommend_config`. It runs in processes of its own, on copies, at the user's own batch size
    unless `batch_size` is given: a few steps for the peak, and one in which every tensor is examined. `precision` names
    those to measure: by default fp32, bf16 and fp16, without those that the device emulates many times slower. Each
    other value of a command's own placeholders, such as ``{seq=2048:1024}``, is measured in today's precision. `fit` is
    a size of memory, as "16GiB" or in bytes: up to six batch sizes of each precision and value are measured, within the
    memory of this device, to find the largest batch that would fit into that size. `snapshot` is a new file for torch's
    own memory snapshot of the first precision's step, on CUDA and not for a command, which
    https://pytorch.org/memory_viz opens.

    A precision that the device lacks, that runs out of memory or that fails has a row with the reason. Raises
    `InvalidRequestError` (a wrong option or device), `WorkloadError` (the workload cannot be loaded or built, or does
    not run in fp32 either) and `NothingWorksError` (the device cannot be probed, or no precision could be measured).
    """
    from autotune_amp.diagnostics.memory.profile_memory import run_memory_profile

    raise_if_exists("--snapshot", snapshot)
    source = _workload_source(workload, "profile_memory", "memory")
    with _shown_progress(quiet) as progress:
        return run_memory_profile(source, progress, precision, batch_size, device, fit, snapshot)


def _workload_source(workload: WorkloadArgument, caller: str, shell_command: str) -> Source:
    """Return the source of a workload or command; `shell_command` is that of the command line for `caller`."""
    if "AUTOTUNE_AMP_TRIAL" in os.environ:
        raise InvalidRequestError(
            f"{caller}() was called inside a trial: the workload's own file calls it when it is imported.",
            'Put that call behind `if __name__ == "__main__":`.',
        )
    if isinstance(workload, CommandTemplate):
        require_startable(workload.arguments, os.environ.get("PATH"))
        return CommandSource(workload)
    if isinstance(workload, str) and ":" not in workload:
        command = likely_command([workload])
        if command is not None:
            line = shell_line(command)
            next_step = f"Give the command: `autotune-amp {shell_command} -- {line}`, in Python "
            next_step += f"CommandTemplate.of({line!r})."
            if workload.endswith(".py"):
                next_step += f" Or name the function in it that returns a Workload: {workload}:FUNCTION."
            raise WorkloadError(f"{workload!r} names no workload.", next_step)
    if workload is None or isinstance(workload, str):
        return target(workload or DEFAULT_TARGET)
    return live_source(workload)


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def _shown_progress(quiet: bool, user_progress: Progress | None = None) -> Iterator[Progress]:
    """Provide `user_progress` or, unless `quiet`, progress on standard error; end it when the context ends.

    The state of `random` is restored at the end, since rich draws random numbers when it is imported.
    """
    state = random.getstate()
    progress = user_progress or Progress()
    if user_progress is None and not quiet:
        from autotune_amp.report.progress import TerminalProgress

        progress = TerminalProgress(sys.stderr)
    try:
        yield progress
    finally:
        progress.ended()
        random.setstate(state)

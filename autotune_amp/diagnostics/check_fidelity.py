"""Implementation of check_fidelity(): checks one precision in a child process, without a search."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.outcome import Failure, Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import FP8_RECIPE
from autotune_amp.search.options import SearchOptions, is_count
from autotune_amp.search.planner import IN_TIME, Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import OpenedWorkload, Source, failure_message, loaded_backend, open_workload
from autotune_amp.search.space import build_space
from autotune_amp.trial.jobs import Check


def run_fidelity_check(
    source: Source,
    progress: Progress,
    precision: str,
    batch_size: int | None,
    device: str,
    pinned_modules: Sequence[str],
    seed: int,
    budget_seconds: float,
) -> Fidelity:
    """Check the fidelity of one precision in a child process; see `autotune_amp.check_fidelity` for the arguments."""
    for name, value, is_valid, expected in (
        ("precision", precision, isinstance(precision, str), 'one name, such as "bf16"'),
        ("batch_size", batch_size, is_count(batch_size), "a whole number from 1 up, or left out"),
        ("pinned_modules", pinned_modules, not isinstance(pinned_modules, str), "a list of module names"),
    ):
        if not is_valid:
            raise InvalidRequestError(
                f"{name} is {value!r}; it must be {expected}.",
                "Leave it out for the default, or see help(autotune_amp.check_fidelity).",
            )
    if source.command_template is not None and batch_size is not None:
        raise InvalidRequestError(
            f"batch_size is {batch_size}, but a command is compared at the batch size that it has today.",
            "Leave --batch-size out, or write another size in the command.",
        )
    options = SearchOptions.from_user(budget=budget_seconds, device=device, precision=precision, seed=seed)
    budget = Budget(options.budget_seconds)
    watcher = ProgressWatcher(progress, budget)
    progress.work_started(budget.seconds)
    with loaded_backend(source, watcher, budget.left()) as backend:
        is_batch_free = source.command_template is None
        opened = open_workload(backend, source, options.device, watcher, is_batch_free=is_batch_free)
        check = check_job(opened, options, batch_size, tuple(pinned_modules), max(0.0, budget.left()))
        watcher.phase(f"checking {check.candidate.precision} against fp32")
        outcome = backend.submit(check).result()
    for line in source.leftovers():
        progress.note(line)
    if isinstance(outcome, Fidelity):
        return outcome
    assert isinstance(outcome, Failure)
    if outcome.kind == "workload_error":
        raise WorkloadError(*failure_message(outcome))
    return check.unchecked(outcome)


def check_job(
    opened: OpenedWorkload,
    options: SearchOptions,
    batch_size: int | None,
    pinned_modules: tuple[str, ...],
    seconds: float,
) -> Check:
    """Return the job that checks the requested precision within `seconds`.

    Raises `InvalidRequestError` for a precision that cannot be checked here.
    """
    hardware, description = opened.hardware, opened.description
    assert options.precisions is not None
    (precision,) = options.precisions
    if precision == "fp32" and description.weights not in ("bf16", "fp16"):
        raise InvalidRequestError("precision is 'fp32', the reference of the comparison.", "Give tf32, bf16 or fp16.")
    if precision == "fp8":  # emulated if the device has none: its numerics are the same
        reasons = description.variants.get(FP8_RECIPE.name, {FP8_RECIPE.default: "the model's layers are unknown"})
        if (reason := reasons[FP8_RECIPE.default]) is not None:
            raise InvalidRequestError(f"fp8 cannot be checked here: {reason}.", "Give tf32, bf16 or fp16.")
        options = msgspec.structs.replace(options, precisions=None)
    space = build_space(hardware, description, options)  # raises for a precision that the device does not have
    default_size = min(space.check_batch_size, space.baseline.batch_size)
    if description.num_samples is not None:  # two batches of the same samples would have no noise between them
        default_size = max(1, min(default_size, description.num_samples // 2))
    return Check(
        what="fidelity",
        candidate=Setting(precision=precision, batch_size=batch_size or default_size, pinned_modules=pinned_modules),
        device=hardware.device,
        seed=options.seed,
        deadline_seconds=seconds,
        aim_seconds=IN_TIME * seconds,
        loading_seconds=seconds,
        memory_limit_bytes=options.limit_bytes(hardware.memory.available),
        torch_state=opened.torch_state,
    )

"""Evidence for a recommended config: measurements as plain data, and functions that format them as text and code.

The formatted lines are shared by the terminal, the report, `explain()` and the exports.
"""

from __future__ import annotations

import math
import shlex
from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig, LossScale, allocator_variable
from autotune_amp.core.documents import Count, NotNegative, Number, Positive, Share, Whole
from autotune_amp.core.hardware import LoadEvidence
from autotune_amp.core.outcome import Accumulation, Description, Fidelity, after_steps
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import VARIANT_VALUES, Setting
from autotune_amp.core.text import (
    count,
    duration,
    exact,
    flops,
    module_names,
    number,
    one_line,
    percent,
    rate,
    size,
    times,
    token_rate,
)

Objective: TypeAlias = Literal["speed", "tokens", "memory", "energy"]
# Objectives that compare throughput: samples or real tokens per second.
THROUGHPUT_OBJECTIVES = ("speed", "tokens")


class PlainEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of the recommended config if the variables in `config.environment` are not set."""

    samples_per_second: Positive | None
    speedup: Positive | None


# Number of fresh processes from which on a speed counts as confirmed. With fewer the spread between processes, which
# dominates the error, is unknown (studies/README.md).
MIN_PROCESSES = 3


class BaselineEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the user's present configuration in its own environment.

    Numbers are None, with a `reason`, if it does not run.
    """

    config: AmpConfig
    samples_per_second: Positive | None
    samples_per_second_interval: tuple[Positive, Positive] | None
    step_seconds: Positive | None
    peak_memory_bytes: Whole | None
    reason: str | None = None
    tokens_per_second: Positive | None = None


class LossScaleEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Basis for the recommended init_scale and growth_interval: a replay of the measured largest safe loss scales.

    For `num_steps` optimizer steps `num_skips` skips are predicted, and `applied_share` of the gradient reaches the
    optimizer; `default_...` are the same numbers for the defaults of ``torch.amp.GradScaler``. In the
    `num_confirming_steps` of the confirmation `num_skips_seen` skips were observed and `num_skips_foretold` predicted.
    The largest safe scale was measured at `num_calibrated_steps` steps; a real training run has other batches.
    `flushed_share` of the gradient's entries, true zeros left out, are flushed to zero at the init_scale.
    """

    num_steps: Count
    num_skips: Whole
    applied_share: Share
    default_num_skips: Whole
    default_applied_share: Share
    num_confirming_steps: Whole
    num_skips_seen: Whole
    num_skips_foretold: Whole
    num_calibrated_steps: Whole
    log2_safe_scale_min: Number
    log2_safe_scale_median: Number
    flushed_share: Share


class WorkersTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a trial of `candidate` with another number of loader workers; numbers are None if it failed."""

    candidate: str
    num_workers: Whole
    samples_per_second: Positive | None
    data_share: Number | None


class LoaderEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence that the data loader limits the speed, with the numbers of workers tried.

    `data_share` is the share of a step of the recommended candidate spent waiting for data with the user's own
    `num_workers` (None: the loader's workers cannot be changed), `step_samples_per_second` the throughput without
    waiting for data.
    """

    num_workers: Whole | None
    data_share: Number
    step_samples_per_second: Positive
    tried: tuple[WorkersTrial, ...] = ()


class ProcessPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of one process, and the number of optimizer steps behind it."""

    num_steps: Whole
    peak_memory_bytes: Whole


class MemoryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions under which the peak memory was measured.

    `worst_case` describes the largest batch, None if all are alike or it is unknown. `has_evaluation`,
    `has_checkpoint`: the confirmation ran the workload's own. `processes` holds the peak of each process; the reported
    peak is the highest.
    """

    worst_case: str | None
    has_evaluation: bool = False
    has_checkpoint: bool = False
    processes: tuple[ProcessPeak, ...] = ()


class LargerBatchOption(Setting, frozen=True, kw_only=True):
    """The fastest setting with a larger effective batch size than the user's, measured in one process.

    It is shown but never recommended, since it needs another learning rate. `speedup` is over the baseline, None if the
    baseline was not measured.
    """

    samples_per_second: Positive
    peak_memory_bytes: Whole
    speedup: Positive | None


class TrainingCost(msgspec.Struct, frozen=True, kw_only=True):
    """Duration and price of the planned training run of `num_steps` optimizer steps over `num_samples` samples.

    Intervals are 95 % and follow from the throughput's. `baseline_hours` is the duration with the present
    configuration, None if not measured. Prices are in the currency of `price_per_hour`, None if that was not given.
    """

    num_steps: Count
    num_samples: Count
    hours: Positive
    hours_interval: tuple[Positive, Positive]
    baseline_hours: Positive | None = None
    price_per_hour: NotNegative | None = None
    price: NotNegative | None = None
    price_interval: tuple[NotNegative, NotNegative] | None = None


class UnitPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Price of training on a million real tokens, or on a million samples if the batches hold no token ids.

    It is `price_per_hour`, in its currency, by the throughput of the recommended config; the 95 % interval follows from
    the throughput's. `baseline_price` is that of the present configuration, None if it was not measured.
    """

    unit: Literal["tokens", "samples"]
    price: NotNegative
    price_interval: tuple[NotNegative, NotNegative]
    baseline_price: NotNegative | None
    price_per_hour: NotNegative


class Utilization(msgspec.Struct, frozen=True, kw_only=True):
    """Use that the recommended config makes of the device's arithmetic.

    `flops_per_second` are the floating-point operations of training, counted once by their operators
    (`command.agent.flops`), at the measured throughput; None with a `problem`. `machine_flops_per_second` is the rate
    of large matrix products in `precision`, that of the config's own products, as measured on this machine, and
    `data_sheet_flops_per_second` that of the GPU's data sheet (`hardware.data_sheets`), each for all devices of the
    run; None if unknown. `mfu` and `data_sheet_mfu` are the first over each of these.
    """

    precision: Precision | None = None
    flops_per_second: Positive | None = None
    machine_flops_per_second: Positive | None = None
    data_sheet_flops_per_second: Positive | None = None
    mfu: Positive | None = None
    data_sheet_mfu: Positive | None = None
    problem: str | None = None


class MeasuredFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Floating-point operations of training on a sample, and the rates of matrix products that this machine reaches on
    one rank, by the precision of a config. With these a run knows its utilization (MFU) from the time of its steps.
    """

    flops_per_sample: Positive
    machine_flops_per_second: dict[Precision, Positive]


class RanksEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Scaling of data-parallel training over `num_ranks` ranks.

    `efficiency` is the throughput of all ranks over `num_ranks` times that of one rank alone, both with `setting`; None
    if there was no time to measure it.
    """

    num_ranks: Count
    setting: str | None = None
    one_rank_samples_per_second: Positive | None = None
    efficiency: Positive | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements behind the recommended config.

    Intervals are 95 %: `samples_per_second_interval` is where a new run is expected to land, `speedup_interval` holds
    the mean ratio to the baseline (99 % from the fourth round on, see `search.gains.speedup`), of tokens per second if
    these were the objective, else of samples per second.
    `tokens_per_second`, its interval and the `padded_share` of all positions are None without token ids.
    `num_processes` is the number of fresh processes that measured the config; `is_confirmed` is false if they or the
    baseline's are fewer than three. `peak_memory_bytes` is the highest of their peaks, without loader workers.
    `data_share` of a step is spent waiting for data, `update_share` in the optimizer. `fidelity` is the verdict on the
    config's precision, None for fp32. `loss_scale` is None except for calibrated fp16, `accumulation` if it was not
    checked, `loader` if the data loader does not limit the speed, `joules_per_sample` if the device reports no power,
    `load` if it was not observed. `is_build_shared`: the processes shared one built model. `are_processes_shared`: each
    process measured all confirmed settings in turn. `search_samples_per_second` is the throughput in the search's
    trials if the confirmation differs by more than half; then the interval includes both. `devices` are those that
    trials ran on at the same time, empty if one job ran at a time. `ranks` is None if one process trained, or a command
    with its own ranks.
    """

    samples_per_second: Positive
    samples_per_second_interval: tuple[Positive, Positive]
    step_seconds: Positive
    peak_memory_bytes: Whole
    baseline: BaselineEvidence
    speedup: Positive | None
    speedup_interval: tuple[Positive, Positive] | None
    num_processes: Whole
    is_confirmed: bool
    data_share: Number
    update_share: Number | None = None
    plain_environment: PlainEnvironment | None = None
    fidelity: Fidelity | None = None
    loss_scale: LossScaleEvidence | None = None
    accumulation: Accumulation | None = None
    loader: LoaderEvidence | None = None
    memory: MemoryEvidence | None = None
    is_build_shared: bool = False
    evaluation_seconds: NotNegative | None = None
    checkpoint_seconds: NotNegative | None = None
    joules_per_sample: Number | None = None
    load: LoadEvidence | None = None
    search_samples_per_second: Positive | None = None
    are_processes_shared: bool = False
    devices: tuple[str, ...] = ()
    ranks: RanksEvidence | None = None
    tokens_per_second: Positive | None = None
    tokens_per_second_interval: tuple[Positive, Positive] | None = None
    padded_share: Share | None = None


# --- formatting as lines of text

# Upper over lower end from which on an interval is called too wide: the speed is known to less than a factor of two.
_MAX_USEFUL_RATIO = 2.0


def config_line(config: AmpConfig, num_batches: int = 1) -> str:
    """Return the config's precision, batch size, accumulation, further dimensions and loader workers on one line.

    `num_batches` ranks each take a batch of that size.
    """
    text = f"{config.precision}, batch size {config.batch_size}"
    effective = f"effective batch size {config.effective_batch_size * num_batches}"
    if num_batches > 1:
        text += f" on each of {num_batches} ranks"
    if config.accumulation_steps > 1:
        text += f", {config.accumulation_steps} accumulation steps ({effective})"
    elif num_batches > 1:
        text += f", {effective}"
    further = [config.labelled([name]) for name in (*VARIANT_VALUES, "arguments")]
    workers = None if config.num_workers is None else count(config.num_workers, "loader worker")
    return ", ".join(filter(None, (text, *further, workers)))


def throughput_line(evidence: Evidence) -> str:
    """Return the throughput in samples and tokens, the time of a step, and the shares of it spent waiting for data and
    in the optimizer.
    """
    tokens = "" if evidence.tokens_per_second is None else f"{token_rate(evidence.tokens_per_second)}, "
    text = f"{rate(evidence.samples_per_second)}, {tokens}{duration(evidence.step_seconds)} a step"
    for share, where in ((evidence.data_share, "waiting for data"), (evidence.update_share, "in the optimizer")):
        if share is not None and share >= 0.01:
            text += f", {100 * share:.0f} % of it {where}"
    return text


def tokens_line(evidence: Evidence) -> str | None:
    """Return the throughput in real tokens with its interval, and the share of padding; None without token ids."""
    if evidence.tokens_per_second is None:
        return None
    text = token_rate(evidence.tokens_per_second)
    if evidence.tokens_per_second_interval is not None:
        text += f" ({new_run_line(evidence.tokens_per_second_interval)})"
    share = evidence.padded_share
    return f"{text}, without padding, which is {_share(share)} of all positions" if share else text


def new_run_line(interval: tuple[float, float], unit: str = "") -> str:
    """Return the interval in which a new run is expected, in samples per second, with a remark if it is too wide."""
    low, high = interval
    return f"a new run: {number(low)} to {number(high)}{unit}" + ", too wide to promise a speed" * is_wide(interval)


def is_wide(interval: tuple[float, float]) -> bool:
    """Whether an interval of speeds is too wide to promise a speed."""
    low, high = interval
    return high > _MAX_USEFUL_RATIO * low


def gain_line(speedup: float, interval: tuple[float, float] | None) -> str:
    """Return a ratio of speeds with its interval, or "not sure" with the interval if that includes 1."""
    if interval is None:
        return times(speedup)
    low, high = interval
    between = f"{times(low)} to {times(high)}"
    return f"not sure ({between})" if low < 1 < high else f"{times(speedup)} ({between})"


def speedup_line(evidence: Evidence) -> str:
    """Return the speed-up over the baseline, or the reason why it is unknown."""
    baseline = evidence.baseline
    if evidence.speedup is None or baseline.samples_per_second is None:
        reason = one_line(baseline.reason or "it was not measured")
        return f"unknown; the baseline is {Setting.of(baseline.config)}: {reason}"
    text = gain_line(evidence.speedup, evidence.speedup_interval)
    text += f" over the baseline, {Setting.of(baseline.config)} at {rate(baseline.samples_per_second)}"
    if baseline.tokens_per_second is not None:
        text += f", {token_rate(baseline.tokens_per_second)}"
    return text


def certainty_line(evidence: Evidence) -> str:
    """Return the certainty of the speed: the number of processes that measured it, and the interval of a new run."""
    landing = new_run_line(evidence.samples_per_second_interval, " samples/s")
    processes = count(evidence.num_processes, "process", "processes")
    if evidence.num_processes < MIN_PROCESSES:
        return f"unconfirmed, measured in {processes} only; {landing}"
    if not evidence.is_confirmed:
        return f"unconfirmed, fewer than {MIN_PROCESSES} processes measured the baseline; {landing}"
    certainty = "measured" if is_wide(evidence.samples_per_second_interval) else "confirmed"
    return f"{certainty} in {processes}; {landing}"


def plain_environment_line(evidence: Evidence) -> str | None:
    """Return the speed without the recommended environment variables; None if that was not measured."""
    plain = evidence.plain_environment
    if plain is None or plain.samples_per_second is None:
        return None
    speedup = "" if plain.speedup is None else f" ({times(plain.speedup)})"
    return f"{rate(plain.samples_per_second)}{speedup} without the environment variables"


def memory_line(evidence: Evidence, device_type: str) -> str:
    """Return the peak memory and the conditions of its measurement; on a CPU also the number of processes behind it."""
    text, memory = f"{size(evidence.peak_memory_bytes)} at the peak", evidence.memory
    if memory is not None:
        extras = ["an evaluation"] * memory.has_evaluation + ["a checkpoint"] * memory.has_checkpoint
        text += f", with {' and '.join(extras)}" if extras else ""
        text += f", on {memory.worst_case}" if memory.worst_case is not None else ""
        if device_type == "cpu" and len(memory.processes) > 1:
            text += f"; the highest of {len(memory.processes)} processes"
    return text


def job_line(job: TrainingCost) -> str:
    """Return the duration and price of a training run on one line.

    Example: ``0.84 h (0.71 to 1.13) for 10,000 steps, 2.52 (2.13 to 3.39) at 3 an hour; 1.70 h as it runs today``.
    """
    low, high = job.hours_interval
    text = f"{number(job.hours)} h ({number(low)} to {number(high)}) for {job.num_steps:,} steps"
    if job.price is not None and job.price_interval is not None:
        low, high = job.price_interval
        text += f", {job.price:,.2f} ({low:,.2f} to {high:,.2f}) at {job.price_per_hour:g} an hour"
    return text if job.baseline_hours is None else f"{text}; {number(job.baseline_hours)} h as it runs today"


def utilization_line(utilization: Utilization) -> str:
    """Return the utilization on one line, or the reason why it is unknown.

    Example: ``41 % of this machine's own rate in bf16 (298 of 727 TFLOP/s), 30 % of the data sheet's 990 TFLOP/s``.
    """
    attained, machine = utilization.flops_per_second, utilization.machine_flops_per_second
    precision = utilization.precision
    if attained is None:
        return f"unknown: {one_line(utilization.problem or 'its operations were not counted')}"
    parts = []
    if utilization.mfu is not None and machine is not None:
        rates = f"{flops(attained)} of {flops(machine)}"
        parts.append(f"{percent(utilization.mfu)} of this machine's own rate in {precision} ({rates})")
    if utilization.data_sheet_mfu is not None and utilization.data_sheet_flops_per_second is not None:
        rate_of_sheet = flops(utilization.data_sheet_flops_per_second)
        parts.append(f"{percent(utilization.data_sheet_mfu)} of the data sheet's {rate_of_sheet}")
    why = utilization.problem or f"the machine's own rate in {precision} was not measured"
    return ", ".join(parts) or f"{flops(attained)}; {one_line(why)}"


def unit_price_line(cost: UnitPrice) -> str:
    """Return the price of a million tokens or samples on one line.

    Example: ``0.352 (0.31 to 0.38) for a million tokens, at 2.5 an hour; 0.61 as it runs today``.
    """
    low, high = cost.price_interval
    text = f"{number(cost.price)} ({number(low)} to {number(high)}) for a million {cost.unit}"
    text += f", at {cost.price_per_hour:g} an hour"
    if cost.baseline_price is None or cost.baseline_price == cost.price:
        return text
    return f"{text}; {number(cost.baseline_price)} as it runs today"


def outlook_line(outlook: LargerBatchOption) -> str:
    """Return the throughput at another effective batch size, with the warning about the learning rate."""
    speedup = "" if outlook.speedup is None else f", {outlook.speedup:.1f} times today's"
    reached = measured_line(f"{outlook}{speedup}", outlook.samples_per_second, outlook.peak_memory_bytes)
    return f"with another effective batch size: {reached}; the learning rate would have to be adapted"


def check_line(fidelity: Fidelity) -> str:
    """Return a fidelity check on one line: the verdict with its reason, the numbers, and the modules to pin."""
    pinned = f"with {module_names(fidelity.pinned_modules)} in fp32 " if fidelity.pinned_modules else ""
    parts = [pinned + one_line(fidelity.reason).rstrip("."), *_fidelity_numbers(fidelity)]
    if fidelity.later is not None:
        parts.append(f"{fidelity.later.verdict}{after_steps(fidelity.later.num_steps)}")
    if fidelity.healing_pins:
        parts.append(f"with {module_names(fidelity.healing_pins)} in fp32 it is faithful")
    return "; ".join(parts)


def accumulation_line(accumulation: Accumulation) -> str:
    """Return how accumulated gradients compare with the gradient of the whole batch."""
    by = f" by {accumulation.weighted_by}" if accumulation.weighted_by else ""
    error = "" if accumulation.error is None else f", {small(accumulation.error)} off the whole batch's gradient"
    return f"{accumulation.verdict}{by}{error}"


def devices_line(evidence: Evidence) -> str | None:
    """Return the devices that trials ran on at the same time, None if one job ran at a time."""
    confirmation = ", the confirmation on one of them" if evidence.is_confirmed else ""
    return f"trials ran on {', '.join(evidence.devices)} at the same time{confirmation}" if evidence.devices else None


def ranks_line(ranks: RanksEvidence, device_type: str) -> str:
    """Return the number of ranks, and their combined speed as a share of that many times one rank's speed."""
    text = f"{ranks.num_ranks} train together under DistributedDataParallel"
    if ranks.efficiency is None or ranks.one_rank_samples_per_second is None:
        return f"{text}; one rank alone was not measured: too little time"
    where = "on its share of the CPU" if device_type == "cpu" else "on its GPU"
    share = f"{100 * ranks.efficiency:.0f} % of {ranks.num_ranks} times the speed of one alone {where}"
    return f"{text}: {ranks.setting} at {share} ({rate(ranks.one_rank_samples_per_second)}, in one process)"


def ranked_run_line(config: AmpConfig, workload: Description) -> str:
    """Return the torchrun command and the script changes for a training run over several ranks."""
    unused = ", find_unused_parameters=True" if workload.has_unused_parameters else ""
    text = f"torchrun --nproc_per_node {workload.num_ranks}, with DistributedDataParallel(model{unused}) and "
    text += f"each rank's own samples (DistributedSampler), {config.batch_size} a pass"
    return f"{text}; all passes but the last of a step in no_sync()" if config.accumulation_steps > 1 else text


def loss_scale_line(scale: LossScale, evidence: LossScaleEvidence | None) -> str:
    """Return fp16's init_scale and growth interval, and the skips predicted and observed with them."""
    text = f"starts at {exact(scale.init_scale)}, growth interval {scale.growth_interval}"
    if evidence is None:
        return text
    text += (
        f"; over {evidence.num_steps:,} steps {count(evidence.num_skips, 'skip')} predicted, "
        f"{_share(evidence.applied_share)} of the gradient applied "
        f"(GradScaler's defaults: {evidence.default_num_skips}, {_share(evidence.default_applied_share)})"
    )
    if evidence.num_confirming_steps:
        text += (
            f"; in {evidence.num_confirming_steps:,} measured steps {count(evidence.num_skips_seen, 'skip')} seen, "
            f"{evidence.num_skips_foretold} predicted"
        )
    return f"{text}; {_share(evidence.flushed_share)} of the gradient's entries flushed"


def _fidelity_numbers(fidelity: Fidelity) -> list[str]:
    parts = []
    if fidelity.noise_ratio is not None:
        parts.append(f"noise ratio {small(fidelity.noise_ratio)}")
    if fidelity.flushed_share is not None:
        parts.append(f"{_share(fidelity.flushed_share)} flushed")
    if fidelity.forward_max:  # 0 if no output is in half precision
        limit = (
            f" of {fidelity.format_max:.5g}" if fidelity.precision == "fp16" and fidelity.format_max is not None else ""
        )
        parts.append(f"activations up to {fidelity.forward_max:.3g}{limit}")
    if fidelity.training_gap is not None:
        parts.append(f"training gap {small(fidelity.training_gap)} over {count(fidelity.num_paired_steps, 'step')}")
    if fidelity.low_weights is not None:
        parts.append(f"{_share(fidelity.low_weights.lost_share)} of the updates round away")
    return parts


def small(value: float) -> str:
    """Format `value` with two significant digits, or as "not finite"."""
    return f"{value:.2g}" if math.isfinite(value) else "not finite"


def _share(share: float) -> str:
    if share in (0.0, 1.0):
        return f"{100 * share:.0f} %"
    # 99.997 % must not read as 100 %, nor 0.003 % as 0 %.
    digits = max(0, -math.floor(math.log10(min(share, 1 - share))) - 2)
    return f"{100 * share:.{digits}f} %"


def measured_line(name: object, samples_per_second: float | None, peak_memory_bytes: int | None) -> str:
    """Return a name with its measured throughput and peak memory."""
    speed = [] if samples_per_second is None else [rate(samples_per_second)]
    return ", ".join([str(name), *speed, *([] if peak_memory_bytes is None else [size(peak_memory_bytes)])])


AUTOCAST_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.bfloat16"}
LOSS = "compute_loss(model, batch)"
LOADER_COMMENT = "# Your loader's other arguments stay: shuffle, collate_fn, ..."


def strict_flag_lines(precision: Precision) -> list[str]:
    """Return the Python lines that set the TF32 flags for `precision`: the part of `torch_state.set_flags` for CUDA."""
    is_tf32 = precision == "tf32"
    return [
        f'torch.set_float32_matmul_precision("{"high" if is_tf32 else "highest"}")',
        'torch.backends.cudnn.fp32_precision = "none"',  # would override the next flag
        f"torch.backends.cudnn.allow_tf32 = {is_tf32}",
    ]


def export_lines(config: AmpConfig) -> list[str]:
    """Return the shell line that exports the config's environment variables; an empty list if there are none."""
    variables = {**config.environment, **allocator_variable(config.allocator, config.environment)}
    if not variables:
        return []
    return ["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())]


def loader_line(config: AmpConfig) -> str:
    """Return a line of Python that makes the DataLoader with the config's batch size and its other arguments."""
    options = ", ".join(f"{name}={value}" for name, value in config.loader_options.items())
    return f"loader = DataLoader(dataset, {options})"


def has_accumulation(config: AmpConfig) -> bool:
    """Return whether the config or one of its fallback plans accumulates gradients."""
    return max([config.accumulation_steps, *(plan.accumulation_steps for plan in config.plans)]) > 1


def pass_loss(combination: Literal["mean", "sum", "weighted"], steps: str, share: str) -> str:
    """Return the expression for the loss of one forward pass, weighted so that the passes of a step add up.

    `steps` is the expression for the number of passes in a step, `share` that for the pass's share of the weights.
    """
    return {"mean": f"{LOSS} / {steps}", "sum": LOSS, "weighted": f"{LOSS} * {share}"}[combination]


def controlled_loop(windows: str, loss: str) -> list[str]:
    """Return a training loop with a `PrecisionController`.

    `windows` are the arguments of its `windows()`, `loss` is the expression for the loss of a pass.
    """
    return [
        "controller.attach(model)",
        f"for batch, is_last in controller.windows({windows}):",
        "    with controller.autocast():",
        f"        loss = {loss}",
        "    controller.backward(loss)",
        "    if is_last:",
        "        controller.step(optimizer)",
        "        controller.update()",
        "        optimizer.zero_grad()",
    ]

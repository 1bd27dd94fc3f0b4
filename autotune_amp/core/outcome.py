"""Outcomes of trials and checks: measurements, verdicts and failures as plain data, readable and writable as JSON."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from autotune_amp.core import markup
from autotune_amp.core.config import RECOMMENDED_VARIABLES, LossScale, is_recommended
from autotune_amp.core.documents import Count, Integer, NotNegative, Number, Positive, Share, Whole
from autotune_amp.core.hardware import MachineLoad
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import exact, module_names, number, one_line

# Purposes of a trial. search: measures a candidate; fallback: measures a fallback plan; confirm: repeats a setting in a
# fresh process with the recommended environment (the baseline: with the user's own); plain: repeats the best setting in
# the user's own environment; one_rank: runs a setting of several ranks on one; outlook: tries a larger effective batch
# size. The others are not trials, but checks of a precision's or accumulation's gradients, and a profile of a step.
Purpose: TypeAlias = Literal[
    "search",
    "fallback",
    "confirm",
    "plain",
    "one_rank",
    "outlook",
    "fidelity",
    "calibration",
    "accumulation",
    "profile",
]
FailureKind: TypeAlias = Literal["oom", "timeout", "nonfinite", "unsupported", "crash", "workload_error"]


class CountedFlops(msgspec.Struct, frozen=True, kw_only=True):
    """Floating-point operations of forward and backward pass over `num_samples` samples, counted by their operators.

    `flops` is None if there is a `problem`. `num_positions` are those of the tokens in the samples, padding included,
    None without token ids.
    """

    flops: Whole | None
    num_samples: Count
    num_positions: Whole | None = None
    problem: str | None = None


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="measurement"):
    """Result of a trial that ran.

    `step_seconds` is one optimizer step (with all its accumulation steps), including the wait for its data, which
    `data_seconds` gives separately, and `update_seconds` in the optimizer, None if not timed separately.
    `raw_step_seconds` are as timed, each the mean of `num_steps_together` steps, or of a command of about as many;
    `step_seconds_interval` is their trimmed 95 % interval, widened to include their mean `step_seconds`. `was_cut`: the
    trial was stopped as clearly slower than the best. `peak_memory_bytes` is the peak resident memory of the process on
    a CPU, the peak allocated on an accelerator; `reserved_memory_bytes` counts against the limit. `num_skips` are
    measured steps that the loss scaler or DeepSpeed skipped, `num_compiling_steps` were timed again because a compiler
    ran in them, which made `num_graph_breaks` graph breaks, `num_steps_taken` are all steps behind the peak (0: written
    by a version that did not count them).
    `build_seconds` is the time to make model, data and optimizer, `context_seconds` to start the accelerator,
    `first_step_seconds` the first step with its compilation. `is_build_shared`: the model was built once for several
    trials. `evaluation_seconds` and `checkpoint_seconds` are the workload's own, None without one or if it did not end;
    `ending_seconds` is both, None if they were not run, `ending_problem` the reason why one did not end.
    `joules_per_sample` is the energy of the device, None if unknown. `is_own_loop`: the steps ran in the framework's
    own Trainer, including its work between steps, and `why_not_own_loop` is the reason if a confirmation could not use
    it. `tokens_per_second` are real tokens over the measured steps, and `padded_share` is the share of all positions
    that is padding; both None if no batch held token ids (`command.agent.tokens`). `first_losses` are those of a
    command's first optimizer steps, and `num_first_tokens` the real tokens in these, None without token ids.
    `counted_flops` are the operations of a command's second step, counted if it has arguments other than today's.
    """

    step_seconds: Positive
    step_seconds_interval: tuple[Number, Number]
    samples_per_second: Positive
    data_seconds: Number
    peak_memory_bytes: Whole
    reserved_memory_bytes: Whole
    raw_step_seconds: tuple[NotNegative, ...]
    num_steps_together: Count = 1
    build_seconds: NotNegative
    context_seconds: NotNegative
    first_step_seconds: NotNegative
    num_skips: Whole = 0
    last_loss: float | None = None
    was_cut: bool = False
    update_seconds: NotNegative | None = None
    num_compiling_steps: Whole = 0
    num_graph_breaks: Whole = 0
    is_build_shared: bool = False
    evaluation_seconds: NotNegative | None = None
    checkpoint_seconds: NotNegative | None = None
    ending_seconds: NotNegative | None = None
    ending_problem: str | None = None
    joules_per_sample: Number | None = None
    num_steps_taken: Whole = 0
    is_own_loop: bool = False
    why_not_own_loop: str | None = None
    tokens_per_second: Positive | None = None
    padded_share: Share | None = None
    first_losses: tuple[float, ...] = ()
    num_first_tokens: Whole | None = None
    counted_flops: CountedFlops | None = None

    @property
    def num_steps(self) -> int:
        """Return the number of measured optimizer steps."""
        return len(self.raw_step_seconds) * self.num_steps_together

    @property
    def num_unmeasured_steps(self) -> int:
        """Return the number of optimizer steps besides the measured ones, mostly warm-up; 0 if unknown."""
        return max(0, self.num_steps_taken - self.num_steps)


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failure"):
    """Failure of a job. `message` is one sentence, `details` a traceback or the end of the job's output.

    `is_loading`: time was up before the process was ready, so the failure says little about the setting.
    """

    kind: FailureKind
    message: str
    details: str | None = None
    is_loading: bool = False


# Kinds of failure of a check that count against the precision; any other is a failure of the check itself.
PRECISION_FAILURE_KINDS: Final = ("unsupported", "nonfinite")
# undecided: no harm was found, but the deciding part was not run; unchecked: nothing was checked.
Verdict: TypeAlias = Literal["faithful", "undecided", "doubtful", "unfaithful", "unchecked"]


DAMAGE_COLUMNS = ("module", "noise ratio", "common error", "cosine", "norm ratio", "flushed to 0")
_NUM_SHOWN_MODULES = 8  # number of modules in a table


class GradientDamage(msgspec.Struct, frozen=True, kw_only=True):
    """Errors in the gradient of one parameter, or of all parameters of a module; fields as in `Fidelity`."""

    name: str
    noise_ratio: float
    common_error: float | None = None
    common_error_interval: tuple[float, float] | None = None
    cosine: float
    norm_ratio: float
    flushed_share: Share

    def cells(self) -> list[str]:
        """Return the table cells for the columns `DAMAGE_COLUMNS`."""
        values = (self.noise_ratio, self.common_error, self.cosine, self.norm_ratio)
        ratios = ["-" if value is None else number(value) for value in values]
        return [module_names([self.name]), *ratios, f"{100 * self.flushed_share:.3g} %"]


class LostUpdates(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of rounding on an optimizer step whose trainable weights are kept in low precision.

    `lost_share` is the share of weights with a non-zero update that the step leaves unchanged.
    """

    weights: Literal["bf16", "fp16"]
    lost_share: Share


def after_steps(num_steps: int) -> str:
    """Return the point of training at which a check ran: `` after 300 fp32 steps``, or "" for the initial weights."""
    return f" after {num_steps} fp32 steps" if num_steps else ""


class LaterVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """Verdict of a fidelity check on weights that were first trained in fp32 for `num_steps`."""

    num_steps: Whole
    verdict: Verdict
    reason: str


class Fidelity(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="fidelity"):
    """Fidelity of a precision's loss and gradients to fp32, on the same weights, batches and random draws.

    `noise_ratio` is the size of the gradient's rounding error over the standard deviation of the fp32 gradient from
    batch to batch of `batch_size`: noise of ratio r acts like a batch 1 + r^2 times smaller. `common_error` is the part
    of that error that is the same in every batch, over the size of the gradient, with its 95 % interval: it is harmful,
    unlike noise. `loss_error` is relative to the fp32 loss. `gradient_cosine` and `gradient_norm_ratio` (low over fp32)
    are of the whole gradient, `flushed_share` is the share of significant entries that are zero only in the low
    precision. `forward_max` is the largest magnitude of a module's output, `format_max` the largest number of the
    precision. `training_gap` is the mean distance between the losses of paired training runs over `num_paired_steps`
    steps, in units of the distance between fp32 runs whose initial weights differ by one rounding of the precision,
    None if `training_noise_gap` is small: the same distance in units of the loss's own scatter from batch to batch;
    `num_skips` of its steps overflowed, and `has_moved` is False if fp32 changed no weight. `modules` are in the order
    of the model, each with its own parameters, only the noisiest if there are too many; "" is the model itself.
    `gradient_histogram` counts the non-zero entries of an fp32 gradient, as in `Calibration`. `culprits` are the
    modules responsible ("" is the model's own forward), or code outside of the model; with `healing_pins` in fp32 the
    precision is faithful; `pinned_modules` were in fp32 during the check. `num_passes` counts forward and backward
    passes. None stands for a number that could not be measured. The weights had been trained in fp32 for
    `num_steps_before`; `later` is the verdict on trained weights, if it did not change that on the initial weights.
    `counted_flops` are the operations of one of its batches, None if they were not counted.
    """

    precision: Precision
    batch_size: Count
    verdict: Verdict
    reason: str
    next_step: str
    pinned_modules: tuple[str, ...] = ()
    noise_ratio: float | None = None
    common_error: float | None = None
    common_error_interval: tuple[float, float] | None = None
    loss_error: float | None = None
    gradient_cosine: float | None = None
    gradient_norm_ratio: float | None = None
    flushed_share: Share | None = None
    forward_max: float | None = None
    format_max: float | None = None
    loss_scale: Positive | None = None
    training_gap: float | None = None
    training_noise_gap: float | None = None
    num_paired_steps: Whole = 0
    num_skips: Whole = 0
    has_moved: bool = True
    worst_parameters: tuple[GradientDamage, ...] = ()
    modules: tuple[GradientDamage, ...] = ()
    gradient_histogram: tuple[tuple[Integer, Whole], ...] = ()
    culprits: tuple[str, ...] = ()
    healing_pins: tuple[str, ...] = ()
    low_weights: LostUpdates | None = None
    num_passes: Whole = 0
    seconds: NotNegative = 0.0
    fp32_step_seconds: NotNegative | None = None
    num_steps_before: Whole = 0
    later: LaterVerdict | None = None
    counted_flops: CountedFlops | None = None

    @property
    def is_equal(self) -> bool:
        """Return whether loss and gradients equal fp32's bit by bit, in a check whose fp32 steps changed weights."""
        return self.noise_ratio == self.loss_error == 0.0 and self.has_moved and bool(self.worst_parameters)

    def heading(self) -> str:
        """Return a title that names the compared precisions."""
        return f"{self.precision} against fp32, batch size {self.batch_size}"

    def most_damaged(self) -> list[GradientDamage]:
        """Return the modules with the largest gradient noise, in descending order."""
        return sorted(self.modules, key=lambda module: -module.noise_ratio)[:_NUM_SHOWN_MODULES]

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs for the verdict and each known number, with its meaning."""
        lines = [("verdict", one_line(self.reason)), ("next step", one_line(self.next_step))]
        paired = (
            f"is the distance of the losses of {self.num_paired_steps} paired steps ({self.num_skips} skipped) from "
            "fp32, over that of an fp32 run whose initial weights were rounded once"
        )
        ratios = (
            ("noise", self.noise_ratio, "is the effect of rounding on the gradient over that of another batch"),
            ("common", self.common_error, "of the gradient is an error common to all batches"),
            ("direction", self.gradient_cosine, "is the cosine between the gradient and that of fp32"),
            ("length", self.gradient_norm_ratio, "is the length of the gradient over that of fp32"),
            ("training", self.training_gap, paired),
        )
        shares = (
            ("loss", self.loss_error, "is the relative error of the loss"),
            ("flushed", self.flushed_share, "of the gradient's significant entries are 0 in this precision only"),
        )
        lines += [(label, f"{number(value)} {meaning}") for label, value, meaning in ratios if value is not None]
        lines += [(label, f"{100 * value:.3g} % {meaning}") for label, value, meaning in shares if value is not None]
        if self.forward_max is not None and self.format_max is not None:
            ends = (
                f", out of {number(self.format_max)} that the precision can represent" if self.format_max < 1e9 else ""
            )
            lines.append(("largest", f"{number(self.forward_max)} is the largest output of a module{ends}"))
        if self.loss_scale is not None:
            lines.append(("loss scale", exact(self.loss_scale)))
        for label, names in (
            ("pinned", self.pinned_modules),
            ("culprits", self.culprits),
            ("healed by", self.healing_pins),
        ):
            if names:
                lines.append((label, module_names(names) + (" in fp32" if label != "culprits" else "")))
        return lines

    def _repr_html_(self) -> str:
        cells = [module.cells() for module in self.most_damaged()]
        table = markup.table(DAMAGE_COLUMNS, cells, num_numeric=5) if cells else ""
        return markup.notebook_box(f"{self.heading()}: {self.verdict}", markup.definition_list(self.facts()), table)


# Least number of samples for a check of accumulation: two micro-batches of two, since BatchNorm cannot train on one.
MIN_ACCUMULATION_SAMPLES = 4
AccumulationVerdict: TypeAlias = Literal["mean", "sum", "weighted", "inexact", "unchecked"]


class Accumulation(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="accumulation"):
    """Result of the check whether micro-batch gradients add up to that of the whole batch, in fp32 without dropout.

    `verdict` is the combination that does: their *mean*, their *sum*, a *weighted* mean (for a loss that is a mean over
    items of which micro-batches hold unequal numbers, such as tokens: `weighted_by`, e.g. "labels != -100"), none
    (*inexact*), or unknown (*unchecked*). `error` is the distance of the best combination from the whole batch's
    gradient, relative to it; `mean_error` that of the plain mean. `batch_size` samples were cut into
    `num_micro_batches`.
    """

    verdict: AccumulationVerdict
    reason: str
    next_step: str
    batch_size: Count
    num_micro_batches: Whole
    error: float | None = None
    mean_error: float | None = None
    weighted_by: str | None = None
    num_passes: Whole = 0
    seconds: NotNegative = 0.0

    @property
    def is_exact(self) -> bool:
        """Return whether accumulation can be used: with the right weights it is equivalent to the large batch."""
        return self.verdict in ("mean", "sum", "weighted")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="calibration"):
    """Largest safe loss scale S* at each step of a short real fp16 training run, and the range of its gradients.

    `log2_scales` holds log2 S*(t), None for a step that is non-finite at every scale. `gradient_histogram` counts the
    gradient's non-zero entries by floor(log2 |g|) at loss scale 1, each octave once, in rising order. `init_scale`,
    below the smallest S*, is the starting point for choosing one (`search.loss_scales`); None if no step had a safe
    scale. `forward_max` is the largest magnitude of a module's output.
    """

    batch_size: Count
    log2_scales: tuple[Number | None, ...]
    gradient_histogram: tuple[tuple[Integer, Whole], ...]
    init_scale: Positive | None
    forward_max: float
    pinned_modules: tuple[str, ...] = ()
    num_passes: Whole = 0
    seconds: NotNegative = 0.0


class ProfiledStep(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one step in seconds, as seen by torch.profiler.

    `operation_seconds` is the time of operations by `step_profile.child.Kind`: of their kernels on a device that
    reports them, otherwise on the host, each without the operations that it calls; convolutions count as matrix
    products and take `convolution_seconds` of them. `step_seconds` is measured by the host's clock, including the
    profiler's overhead. `busy_seconds` is the time in which the device ran any kernel, 0 if none was seen.
    """

    operation_seconds: dict[str, NotNegative]
    step_seconds: NotNegative
    busy_seconds: NotNegative = 0.0
    convolution_seconds: NotNegative = 0.0


class StepSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Profiled steps of one precision, equal but for other load on the machine.

    `largest` names the operations that took most time in each kind, over all steps, in descending order. `is_device`:
    the times are those of device kernels.
    """

    steps: tuple[ProfiledStep, ...]
    largest: dict[str, tuple[str, ...]]
    is_device: bool = False


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="profiled"):
    """Result of a profile of a few steps on a device of `device_type`.

    `split` is None if there is a `split_problem`. `flops_per_step` counts the matrix products of one step, None if
    there is a `flops_problem`. `unfused_optimizer` is the class of an optimizer that
    supports fused kernels but does not use them, None if there is none.
    """

    device_type: str
    split: StepSplit | None = None
    split_problem: str | None = None
    flops_per_step: Whole | None = None
    flops_problem: str | None = None
    unfused_optimizer: str | None = None


Outcome: TypeAlias = Measurement | Failure
CheckOutcome: TypeAlias = Fidelity | Calibration | Accumulation | Failure


_OUTCOME_TYPES: Final[dict[Purpose, type]] = {
    "fidelity": Fidelity,
    "calibration": Calibration,
    "accumulation": Accumulation,
    "profile": Profiled,
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of outcomes.jsonl: a trial, a check or a profile, and its outcome.

    A resumed search uses only the lines with its `search_id`. `seconds` is the cost of the job, process start and
    set-up included; `start_seconds` of it is the start of its process: 0.0 in a process kept from an earlier trial,
    None in a forked one and for a check. `round` numbers the confirmation rounds from 0, `session` the runs of the
    search from 1: a resumed search goes on in the next one. `loss_scale` is fp16's, `load` the load by other processes
    meanwhile. `slot` is the device it ran on, None if the search uses one; up to `num_beside` other jobs ran at the
    same time. Fields that an earlier version did not write have their defaults.
    """

    format: int = 1
    search_id: str
    number: Whole
    candidate: Setting
    purpose: Purpose
    outcome: Measurement | Failure | Fidelity | Calibration | Accumulation | Profiled
    seconds: NotNegative
    round: Whole | None = None
    environment: dict[str, str] = {}
    loss_scale: LossScale | None = None
    load: MachineLoad | None = None
    start_seconds: NotNegative | None = None
    slot: str | None = None
    num_beside: Whole = 0
    session: Count = 1

    def __post_init__(self) -> None:
        outcome_type = _OUTCOME_TYPES.get(self.purpose, Measurement)
        if not isinstance(self.outcome, (outcome_type, Failure)):
            raise ValueError(f"a {type(self.outcome).__name__} does not answer a trial for {self.purpose!r}")
        if not is_recommended(self.environment):
            raise ValueError(f"its environment has more than {', '.join(RECOMMENDED_VARIABLES)}")


class SampleSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of single samples, in elements of their tensors and sequences, from a scan with a time limit.

    `num_seen` of `num_samples` samples were scanned, in random order. `largest` are the dataset indices of the largest
    samples in descending order, as many as the largest batch may need. `smallest` are a few of the others, in ascending
    order.
    """

    num_seen: Whole
    num_samples: Whole
    smallest_size: Whole
    median_size: Whole
    largest_size: Whole
    largest: tuple[Whole, ...]
    smallest: tuple[Whole, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a workload, made in a child process before the first trial.

    `batch_size` is that of the user's own loader, `num_samples` the dataset's length, `num_workers` the loader's worker
    processes; None without one, or if the workers cannot be changed. `pins_memory` and `prefetch_factor` are of the
    loader too. `as_found_precision` is the precision of the
    caller's own autocast and TF32 flags; with `is_as_found_strict` they equal its strict flags, so that the baseline is
    an ordinary candidate. `build_seconds` is the time to build model, data and optimizer. `sample_sizes` is None if all
    samples are alike or cannot be scanned, or if the workload names its worst batch (`has_worst_batch`);
    `batch_sizes_seen` are the smallest and the largest size of a batch if samples cannot be scanned, None if all are
    alike; `scan_problem` is the error that ended a scan. `has_ending`: it has an evaluation or a checkpoint. `is_loop`:
    the user's code takes the training steps. `accumulation_steps` is the present number of passes per optimizer step;
    with `weighs_passes` the training code weights them, with `keeps_effective_batch_size` it takes as many as give
    the same number of samples at every batch size. `trainer` names the framework's loop used for confirmation,
    None for that of the trials, and `trainer_ranks` the number of devices that it trains on, of which trials use one.
    `unsettable` maps a precision, or the name of a dimension, to the reason why it cannot
    be changed; `notes` are for the user. Throughput is that of all `num_ranks` ranks together, of which `num_sharing`
    divide each batch among them; `is_ranked` if they are started by the search, and not by the command itself;
    `has_unused_parameters` is known only then. `checks` are the
    possible kinds of check, *later* being fidelity on trained weights and *profile* the time of a step by operation, at
    a batch size of `check_batch_size` at most: rounding hardly depends on the batch size (studies/README.md). `loader`
    is the place in a command's code where its training loader is made, ``file:function:line``; without one, samples are
    counted along `sample_dim` of the model's inputs. `variants` maps the name of a further dimension to its values,
    each with the reason why the model and optimizer do not support it, None if they do. `argument_values` maps the
    name of a command's own placeholder to its values, today's first; the name begins with ``!`` if the argument does
    not affect numerics. `missing_placeholders` would let a search of a command try more, each with the value in use;
    `suggestions` are arguments with placeholders that the user may add to the command.
    `counted_flops` are the operations of a command's second step, None if they were not counted, as of a Workload,
    whose checks count them.
    """

    name: str
    batch_size: Count | None
    num_samples: Whole | None
    data: str
    num_parameters: Whole
    num_trainable_parameters: Whole
    weights: Literal["fp32", "bf16", "fp16", "frozen_low"]
    as_found_precision: Precision
    is_as_found_strict: bool
    build_seconds: NotNegative
    context_seconds: NotNegative
    num_workers: Whole | None = None
    pins_memory: bool | None = None
    prefetch_factor: Whole | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[Whole, Whole] | None = None
    scan_problem: str | None = None
    has_worst_batch: bool = False
    has_ending: bool = False
    is_loop: bool = False
    accumulation_steps: Count = 1
    weighs_passes: bool = False
    keeps_effective_batch_size: bool = False
    trainer: str | None = None
    trainer_ranks: Count = 1
    unsettable: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    num_ranks: Count = 1
    num_sharing: Count = 1
    is_ranked: bool = False
    has_unused_parameters: bool = False
    checks: tuple[str, ...] = ("fidelity", "later", "calibration", "accumulation", "profile")
    check_batch_size: Count = 16
    loader: str | None = None
    sample_dim: Integer = 0
    variants: dict[str, dict[str, str | None]] = {}
    argument_values: dict[str, tuple[str, ...]] = {}
    missing_placeholders: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()
    counted_flops: CountedFlops | None = None

    def available_bytes(self, of_device: int, device: str) -> int:
        """Return the memory per process in bytes out of `of_device`: on a CPU the ranks share it."""
        return of_device // self.num_ranks if self.is_ranked and device == "cpu" else of_device

    @property
    def num_batches(self) -> int:
        """Return the number of batches that all ranks together take at once."""
        return self.num_ranks // self.num_sharing

    @property
    def today(self) -> Setting:
        """Return the setting that the user trains with at present."""
        return Setting(
            precision=self.as_found_precision,
            batch_size=self.batch_size or 1,
            accumulation_steps=self.accumulation_steps,
        )

"""What came back from a trial or a check: what it found, or a failure; plain data, JSON both ways."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

import msgspec

from autotune_amp.core import pieces
from autotune_amp.core.config import RECOMMENDED_VARIABLES, LossScale, is_recommended
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.documents import Count, Integer, NotNegative, Number, Positive, Share, Whole
from autotune_amp.core.hardware import MachineLoad
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import exact, module_names, number, one_line

# search: a candidate tried; fallback: a plan for a lower rung; confirm: again in a fresh process in the recommended
# environment (the baseline: in the user's own); plain: the winner once in the user's own environment; one_rank: what
# several ranks train, on one of them; outlook: beyond the effective batch size. The others are no
# trials but checks, of what a precision or accumulation does to the gradient, and a profile of the winner.
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


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="measurement"):
    """A candidate that ran.

    `step_seconds` is one optimizer step (all its accumulation steps) with the wait for its data, which `data_seconds`
    holds apart, and of which `update_seconds` is the optimizer's part, None where it was not timed apart.
    `raw_step_seconds` are as timed, each the mean of `num_steps_together` steps; `step_seconds_interval` is the trimmed
    95 % interval over them, widened to hold their mean `step_seconds`. `was_cut`: stopped as clearly slower than the
    best. `peak_memory_bytes` is the peak resident memory of the process on a CPU, the peak allocated on an accelerator;
    `reserved_memory_bytes` is what counts against the limit. `num_skips` are measured steps that the loss scaler
    skipped, `num_compiling_steps` were timed anew because a compiler ran in them, which had to leave code to Python
    `num_graph_breaks` times, `num_steps_taken` are all behind the peak (0: an earlier version did not count them).
    `build_seconds` is model, data and optimizer, `context_seconds` starting the accelerator, `first_step_seconds` the
    first step with its compilation. `is_build_shared`: the model was built once for several trials.
    `evaluation_seconds` and `checkpoint_seconds` are the workload's own, None where it has none or they did not end;
    `ending_seconds` both, None where they were not to be run, `ending_problem` why one did not end. `joules_per_sample`
    is what the device drew, None where nothing says so. `is_own_loop`: the steps are those of the framework's own
    Trainer, with whatever it does between them, and `why_not_own_loop` is what kept a confirmation from them.
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

    @property
    def num_steps(self) -> int:
        """The measured optimizer steps."""
        return len(self.raw_step_seconds) * self.num_steps_together

    @property
    def num_unmeasured_steps(self) -> int:
        """The optimizer steps that were taken beside the measured ones, most of them to warm up; 0 where unknown."""
        return max(0, self.num_steps_taken - self.num_steps)


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failure"):
    """A candidate that did not run; `message` is one sentence, `details` a traceback or the end of its output.

    `is_loading`: time was up before its process was ready, which says nothing of the candidate.
    """

    kind: FailureKind
    message: str
    details: str | None = None
    is_loading: bool = False


# A check or calibration that fails so tells of the precision; any other failure tells of the check itself.
OF_THE_PRECISION: Final = ("unsupported", "nonfinite")
# undecided: what was looked at shows no harm, and what would decide was not; unchecked: nothing was looked at.
Verdict: TypeAlias = Literal["faithful", "undecided", "doubtful", "unfaithful", "unchecked"]


DAMAGE_COLUMNS = ("module", "noise ratio", "common error", "cosine", "norm ratio", "flushed to 0")
_NUM_DAMAGED = 8  # modules that are shown


class GradientDamage(msgspec.Struct, frozen=True, kw_only=True):
    """How the gradient of one parameter, or of all those of a module, fared; fields as in `Fidelity`."""

    name: str
    noise_ratio: float
    common_error: float | None = None
    common_error_interval: tuple[float, float] | None = None
    cosine: float
    norm_ratio: float
    flushed_share: Share

    def cells(self) -> list[str]:
        """What stands under `DAMAGE_COLUMNS`."""
        values = (self.noise_ratio, self.common_error, self.cosine, self.norm_ratio)
        ratios = ["-" if value is None else number(value) for value in values]
        return [module_names([self.name]), *ratios, f"{100 * self.flushed_share:.3g} %"]


class LowWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What rounding does to an optimizer step where trainable weights are kept in low precision.

    `lost_share`: entries whose update is not zero and that the step leaves as they were.
    """

    weights: Literal["bf16", "fp16"]
    lost_share: Share


def after_steps(num_steps: int) -> str:
    """When a check looked: `` after 300 fp32 steps``, nothing at the first weights."""
    return f" after {num_steps} fp32 steps" if num_steps else ""


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """What a check said of weights that had been trained in fp32 for `num_steps`."""

    num_steps: Whole
    verdict: Verdict
    reason: str


class Fidelity(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="fidelity"):
    """How faithful a precision's loss and gradients are to fp32, on the same weights, batches and draws.

    `noise_ratio` is the size of rounding's error of the gradient over the standard deviation of the fp32 gradient from
    batch to batch of `batch_size`: noise of ratio r acts like a batch 1 + r^2 times smaller. `common_error` is the part
    of that error that is the same in every batch, over the size of the gradient, with its 95 % interval: it harms,
    where noise does not. `loss_error` is relative to the fp32 loss. `gradient_cosine` and `gradient_norm_ratio` (low
    over fp32) are of the whole gradient, `flushed_share` the entries that count and are zero only in the low precision.
    `forward_max` is the largest magnitude a module put out, `format_max` the largest that the precision holds.
    `training_gap` is the mean distance between the losses of a paired training run over `num_paired_steps` steps, in
    units of that between fp32 runs whose first weights differ by one rounding of the precision, None where
    `training_noise_gap` is small: the same in units of the loss's own scatter from batch to batch; `num_skips` of its
    steps overflowed, and
    `has_moved` is False where fp32 moved no weight in it. `modules` are in the order of the model, each with its own
    parameters, the noisiest where there would be too many; "" is the model itself. `gradient_histogram` counts the
    non-zero entries of an fp32 gradient, as `Calibration` does. `culprits` are the modules responsible ("" is the
    model's own forward), or code outside of the model; with `healing_pins` in fp32 the precision was found faithful;
    `pinned_modules` were in fp32 during the check. `num_passes` counts forward and backward passes. None stands where a
    number could not be had. The weights had been trained in fp32 for `num_steps_before`; `later` is what was found once
    they were, where the verdict is that of the first weights and stands.
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
    low_weights: LowWeights | None = None
    num_passes: Whole = 0
    seconds: NotNegative = 0.0
    fp32_step_seconds: NotNegative | None = None
    num_steps_before: Whole = 0
    later: Later | None = None

    @property
    def is_equal(self) -> bool:
        """Whether gradients that say something, and their loss, are fp32's bit for bit."""
        return self.noise_ratio == self.loss_error == 0.0 and self.has_moved and bool(self.worst_parameters)

    def heading(self) -> str:
        """What was held against what."""
        return f"{self.precision} against fp32, batch size {self.batch_size}"

    def most_damaged(self) -> list[GradientDamage]:
        """The modules whose gradients fared worst, the worst first."""
        return sorted(self.modules, key=lambda found: -found.noise_ratio)[:_NUM_DAMAGED]

    def facts(self) -> list[tuple[str, str]]:
        """Label and text of the verdict and of each number that could be had, with what it means."""
        lines = [("verdict", one_line(self.reason)), ("next step", one_line(self.next_step))]
        paired = (
            f"is how far {self.num_paired_steps} paired steps ({self.num_skips} skipped) part from fp32, over how far "
            "one rounding of the first weights alone takes fp32 from itself"
        )
        ratios = (
            ("noise", self.noise_ratio, "is what rounding does to the gradient over what another batch does to it"),
            ("common", self.common_error, "of the gradient is an error that is the same in every batch"),
            ("direction", self.gradient_cosine, "is the cosine between the gradient and that of fp32"),
            ("length", self.gradient_norm_ratio, "is the length of the gradient over that of fp32"),
            ("training", self.training_gap, paired),
        )
        shares = (
            ("loss", self.loss_error, "is the loss off that of fp32"),
            ("flushed", self.flushed_share, "of the gradient's entries that count are 0 in this precision alone"),
        )
        lines += [(label, f"{number(value)} {meaning}") for label, value, meaning in ratios if value is not None]
        lines += [(label, f"{100 * value:.3g} % {meaning}") for label, value, meaning in shares if value is not None]
        if self.forward_max is not None and self.format_max is not None:
            ends = f", where the format ends at {number(self.format_max)}" if self.format_max < 1e9 else ""
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
        cells = [found.cells() for found in self.most_damaged()]
        table = pieces.table(DAMAGE_COLUMNS, cells, num_numeric=5) if cells else ""
        return pieces.fragment(f"{self.heading()}: {self.verdict}", pieces.facts(self.facts()), table)


# What a check of accumulation takes at the least: two micro-batches of two, since BatchNorm cannot train on one sample.
MIN_CUT_SAMPLES = 4
AccumulationVerdict: TypeAlias = Literal["mean", "sum", "weighted", "inexact", "unchecked"]


class Accumulation(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="accumulation"):
    """Whether the gradients of micro-batches add up to that of the whole batch, found out in fp32 without dropout.

    `verdict`: their *mean* does, their *sum* does, a *weighted* mean does (a loss that is a mean over something of
    which they hold unequal shares, as tokens: `weighted_by`, such as "labels != -100"), none does (*inexact*), or
    nobody could find out (*unchecked*). `error` is the distance of the best of these from the whole batch's gradient,
    relative to it; `mean_error` that of the plain mean. `batch_size` samples were cut into `num_micro_batches`.
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
        """Whether accumulation can be offered: with the right weights it learns what the large batch learns."""
        return self.verdict in ("mean", "sum", "weighted")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="calibration"):
    """The largest safe loss scale S* at each step of a short real training in fp16, and how small its gradients get.

    `log2_scales` holds log2 S*(t), None for a step that is non-finite at every scale. `gradient_histogram` counts the
    gradient's non-zero entries by floor(log2 |g|) at loss scale 1, each octave once, in rising order.
    `init_scale`, below the least of them, is where choosing one begins (`search.loss_scales`); None where no step had a
    safe scale. `forward_max` is the largest magnitude that a module put out.
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
    """One step as torch.profiler saw it, in seconds.

    `operation_seconds` are those of operations by `profile.gap.Kind`: of their kernels on a device that shows them,
    else of the host, each without the operations that it calls; convolutions count as matrix products, of which they
    are `convolution_seconds`. `step_seconds` is the step by the host's clock, slower for being profiled. `busy_seconds`
    is how long the device had any kernel to run, 0 where none was seen.
    """

    operation_seconds: dict[str, NotNegative]
    step_seconds: NotNegative
    busy_seconds: NotNegative = 0.0
    convolution_seconds: NotNegative = 0.0


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """The profiled steps of one precision, alike but for what else ran on the machine.

    `largest` names the operations that took most in each kind, over all steps, the largest first. `is_device`: it is
    kernels that were seen.
    """

    steps: tuple[ProfiledStep, ...]
    largest: dict[str, tuple[str, ...]]
    is_device: bool = False


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="profiled"):
    """Where the time of a few steps on a device of `device_type` went.

    `split` is None with a `split_problem`. `flops_per_step` are those of the matrix products of one step, None with a
    `flops_problem` or where nobody asked. `unfused_optimizer` is the class of an optimizer that could step in fused
    kernels and does not, None without one.
    """

    device_type: str
    split: Split | None = None
    split_problem: str | None = None
    flops_per_step: Whole | None = None
    flops_problem: str | None = None
    unfused_optimizer: str | None = None


Outcome: TypeAlias = Measurement | Failure
CheckOutcome: TypeAlias = Fidelity | Calibration | Accumulation | Failure


_ANSWERS: Final[dict[Purpose, type]] = {
    "fidelity": Fidelity,
    "calibration": Calibration,
    "accumulation": Accumulation,
    "profile": Profiled,
}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of outcomes.jsonl: a trial, a check or a profile, and its outcome.

    Only lines of the running `search_id` are resumed. `seconds` is what it cost, process start and set-up included, of
    which `start_seconds` is the start of its process: 0.0 in one kept from an earlier trial, None in a forked one and
    of a check. `round` numbers the confirmation rounds from 0. `loss_scale` is what fp16 ran with, `load` what others
    did on the machine meanwhile. None also stands where an earlier version did not log it. `slot` is where it ran, None
    where the search has one place only; beside it ran up to `num_beside` other jobs of the search, and `has_share` that
    it had a share of the CPU and not all of it.
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
    has_share: bool = False

    def __post_init__(self) -> None:
        answers = _ANSWERS.get(self.purpose, Measurement)
        if not isinstance(self.outcome, (answers, Failure)):
            raise ValueError(f"a {type(self.outcome).__name__} does not answer a trial for {self.purpose!r}")
        if not is_recommended(self.environment):
            raise ValueError(f"its environment has more than {', '.join(RECOMMENDED_VARIABLES)}")


class SampleSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How large single samples are, in numbers that their tensors and sequences hold, from a scan cut off by the clock.

    `num_seen` samples of `num_samples` were looked at, in random order. `largest` are indices into the dataset, the
    largest first; as many as the largest batch may need. `smallest` are a few of the others, the smallest first.
    """

    num_seen: Whole
    num_samples: Whole
    smallest_size: Whole
    median_size: Whole
    largest_size: Whole
    largest: tuple[Whole, ...]
    smallest: tuple[Whole, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload is, found out in a child before the first trial.

    `batch_size` is that of the user's own loader, `num_samples` the dataset's length, `num_workers` the loader's worker
    processes; None where there is none, or none that could be changed. `as_found_precision` is what the caller's own
    autocast and TF32 flags amount to; `is_as_found_strict`: they equal its strict flags, so that the baseline is an
    ordinary candidate. `build_seconds` is one building of model, data and optimizer. `sample_sizes` is None where the
    samples are alike, cannot be scanned, or the workload names its worst batch (`has_worst_batch`); `batch_sizes_seen`
    are the least and the largest size of batches drawn where they cannot be scanned, None where alike; `scan_problem`
    is the error that ended either look. `has_ending`: it has an evaluation or a checkpoint. `is_loop`: it takes its
    training steps itself. `accumulation_steps` are the passes behind an optimizer step today; with `weighs_passes` the
    training weighs them, with `keeps_effective_batch_size` it takes as many as make up the same samples at every batch
    size. `trainer` names the framework's loop that it is confirmed in, None for that of the trials.
    `unsettable` says of a precision, or of a dimension by its name, why it cannot be set to anything but what it is
    today; `notes` what the user is to know of the measurements. Throughput is that of all its `num_ranks` together;
    it `is_ranked` where these are ours, and not a command's own; then it is known whether it `has_unused_parameters`.
    `checks` are the kinds of check that can be answered, *later* being fidelity on trained weights and *profile* where
    the time of a step goes, at a batch size of `check_batch_size` at most: what rounding does hardly moves with it
    (studies/README.md). `loader` is what makes a command's training loader: ``file:function:line``; without one,
    samples are counted along `sample_dim` of what enters its model.
    `variants` are the values of further dimensions, by name, that its model and optimizer can have: None, or why not.
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
    unsettable: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    num_ranks: Count = 1
    is_ranked: bool = False
    has_unused_parameters: bool = False
    checks: tuple[str, ...] = ("fidelity", "later", "calibration", "accumulation", "profile")
    check_batch_size: Count = 16
    loader: str | None = None
    sample_dim: Integer = 0
    variants: dict[str, dict[str, str | None]] = {}

    def available_bytes(self, of_device: int, device: str) -> int:
        """What each of its processes may take of the memory that the device has: our own ranks share a CPU's."""
        return of_device // self.num_ranks if self.is_ranked and device == "cpu" else of_device

    @property
    def today(self) -> Setting:
        """What the training does as it is."""
        return Setting(
            precision=self.as_found_precision,
            batch_size=self.batch_size or 1,
            accumulation_steps=self.accumulation_steps,
        )

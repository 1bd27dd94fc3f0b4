"""Recommendation: a config with its evidence, to load, save and explain. A file is data: nothing in it is executed.

How to read one:

* The answer comes first: what to set, what it gains, how sure that is and why. **Warnings**, three at most, change what
  you do; **notes** are further facts about the numbers.
* **speed** is the median over fresh processes, and the interval is where a new run is expected to land (95 %). On a
  GPU, where a process takes seconds to start, each process measures all confirmed settings in turn; on a CPU
  each measures one. The width of the interval comes from the differences between processes on your machine, including
  those between the search's own repetitions.
* **machine** is the load by others meanwhile: CPU time of other processes, time given away by a hypervisor, the
  GPU's lowered clocks and other processes on it (on Linux; elsewhere the load average alone). If it is large enough to
  matter, the report warns of it before the first trial, and the interval is widened for the CPU time lost.
* **speed-up** is over the *baseline*: your own batch size, with your TF32 flags and autocast, in
  your own environment. "Keep what you have" is a frequent and good answer.
* **environment** holds variables to set before Python starts. On Linux CPUs they keep freed memory in the process,
  which steadies the step time and often shortens it; *plain* is the speed without them.
* The choice is, within 3 % of the fastest, the safest precision and, within that, the smallest batch.
* **fidelity**: each precision that may be recommended, and your own, is compared with fp32 on the same weights,
  batches and random draws, in one step and in a short training run. *noise ratio* is the effect of rounding on the
  gradient over that of another batch. *Unfaithful* precisions are excluded, and the modules where the error begins are
  named; if a few modules in fp32 fix it, the precision is measured with them (**pinned**, `config.pinned_modules`;
  `PrecisionController.attach` keeps them so). *Unchecked* means that there was no time or memory for the check; such a
  precision is never called faithful, and ranks after fp32 and all faithful ones. *Doubtful* ranks last. The leading
  setting is checked once more on weights trained in fp32 for up to 300 steps, in a tenth of the budget (*after 300 fp32
  steps*): a setting that fails there, such as a logarithm of a number that has come to round to 0, is excluded too. If
  random numbers drawn in half precision would differ from fp32's, both use the same draws, and the report says so.
* **loss scale** (fp16): the largest safe scale is measured over a short real training run; GradScaler's rule is then
  replayed over `--steps` for any init_scale and growth interval, without a training step. The predicted skips are shown
  beside those of GradScaler's defaults and those observed in the confirmation. fp16 that is more than 10 % slower than
  the fastest keeps GradScaler's defaults. fp16 is excluded if more than 1 % of the gradient's entries are flushed
  to zero at every safe scale, or if an activation exceeds a quarter of fp16's maximum.
* **memory** is the peak of a whole training run in miniature: the worst batch first and last, with an evaluation and a
  checkpoint if the workload has them.
* **accumulation** is the result of its check: exact, exact with the weights that it names (the lines to copy and the
  exports weight the passes so, by a `count(batch)` of yours), or not used, with the reason.
* **unconfirmed** stands beside *sure* if three fresh processes of the choice, or of your present settings, did not fit
  into the budget.
* **The machine changed**: the confirmation differs by more than half from the search's own trials of the choice; the
  interval includes both.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from autotune_amp.core import evidence as explain
from autotune_amp.core import markup
from autotune_amp.core.command_template import EXAMPLE_VALUES, CommandTemplate
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import (
    Count,
    Integer,
    NotNegative,
    Number,
    Positive,
    Share,
    Whole,
    cause,
    convert,
    decode,
    read_file,
)
from autotune_amp.core.errors import AutotuneAmpError, FormatError, StudyError
from autotune_amp.core.evidence import (
    Evidence,
    LargerBatchOption,
    MeasuredFlops,
    Objective,
    TrainingCost,
    UnitPrice,
    Utilization,
)
from autotune_amp.core.hardware import Hardware, MachineLoad
from autotune_amp.core.outcome import Description, Fidelity
from autotune_amp.core.precisions import PRECISIONS, Precision, product_precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import (
    count,
    duration,
    in_python,
    module_names,
    number,
    one_line,
    shell_line,
    size,
    times,
)

FORMAT = 1
MAX_WARNINGS = 3  # readers skip longer lists
_RESTORE_ADVICE = "Move the file away and search again, or restore it from a backup."
Options = TypeVar("Options")


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were not recommended because they failed, could not run, or were left untried, with the reason.

    `batch_size` is None if the reason holds for every batch size of the precision.
    """

    precision: Precision
    batch_size: Count | None
    reason: str


class SearchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a search. Checks and calibrations do not count as trials.

    `search_id` names its lines in outcomes.jsonl; `warnings` and `notes` are about the search itself and hold for every
    ranking; `files` are messages about files that trials left. `load` is the load by others before the first
    trial, `start_seconds` the time that a new process takes to load the workload.
    """

    study: str
    num_trials: Whole
    num_failures: Whole
    seconds: NotNegative
    start_seconds: NotNegative = 0.0
    was_interrupted: bool = False
    search_id: str = ""
    is_budget_spent: bool = False
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    load: MachineLoad | None = None


class CandidateRow(Setting, frozen=True, kw_only=True):
    """Row of the table of all candidates.

    Numbers were measured in the recommended environment if the candidate was confirmed there. The baseline's are those
    in the user's own environment; if it was confirmed in the recommended one too, a second row `has_environment`.
    """

    status: str
    samples_per_second: Positive | None
    step_seconds: Positive | None
    peak_memory_bytes: Whole | None
    reason: str | None
    joules_per_sample: Number | None = None
    has_environment: bool = False
    tokens_per_second: Positive | None = None


class VariantRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the table of further dimensions: the result for one value.

    `status` is "chosen", "tried" (too little gain), "excluded", "untried" or the kind of a failure, with the `reason`.
    `speedup` and `memory_change_bytes` compare `setting` with the setting `beside` it, which lacks the value; the
    interval is that of the steps within one process each. `first_step_seconds` includes the compilation, which had
    `num_graph_breaks` and pays off after `break_even_steps`, None if never. `max_speedup` is the upper bound from a
    profile of the step, None if the profile gives none.
    """

    name: str
    value: str
    status: str
    setting: str | None = None
    beside: str | None = None
    speedup: Positive | None = None
    speedup_interval: tuple[Positive, Positive] | None = None
    memory_change_bytes: Integer | None = None
    first_step_seconds: NotNegative | None = None
    num_graph_breaks: Whole = 0
    break_even_steps: Number | None = None
    max_speedup: Positive | None = None
    reason: str | None = None


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions under which a recommendation is valid: a digest for each part, and parts that cannot be compared.

    `files` are the digests of the user's files by their paths, while a search runs; they are not saved.
    """

    digest: str
    parts: dict[str, str]
    unknown: tuple[str, ...] = ()
    files: dict[str, str] = {}

    def differences(self, now: Fingerprint) -> tuple[str, ...]:
        """Return a line for each difference to `now` and each unknown part; empty if both are the same."""
        lines = []
        for name in {**now.parts, **self.parts}:
            before, after = self.parts.get(name), now.parts.get(name)
            if before == after:
                continue
            if before is None:
                lines.append(f"{name} is new")
            elif after is None:
                lines.append(f"{name} is gone")
            elif before.startswith("=") and after.startswith("="):
                lines.append(f"{name} changed from {before[1:]} to {after[1:]}")
            else:
                lines.append(f"{name} changed")
        return (*lines, *dict.fromkeys((*now.unknown, *self.unknown)))


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ranking a search's records: the config, its evidence, and the outcome of every other candidate.

    `warnings` are those that change what the reader does, at most `MAX_WARNINGS`, the most important first; `notes` are
    further facts about the numbers. `fidelity` holds all checks against fp32; `variants` the results for the values of
    further dimensions; `outlook` is the speed at another effective batch size, None if that was not measured or is no
    faster.
    """

    config: AmpConfig
    evidence: Evidence
    reason: str
    warnings: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    candidates: tuple[CandidateRow, ...]
    fidelity: tuple[Fidelity, ...] = ()
    variants: tuple[VariantRow, ...] = ()
    outlook: LargerBatchOption | None = None
    notes: tuple[str, ...] = ()


class _ShownOptions(msgspec.Struct):
    """Valid ranges of the options that are needed to show a recommendation or to rank it again."""

    num_ranks: Count = 1
    memory_fraction: Share = 0.9
    memory_limit: Count | None = None
    num_steps: Count | None = None
    num_samples: Count | None = None
    price_per_hour: NotNegative | None = None


class Recommendation(Decision, frozen=True, kw_only=True):
    """A decision and the conditions under which it was measured.

    `objective` is the quantity that was optimized; `job` is the planned training run, if its length was given;
    `unit_price` is the price of a million tokens or samples, if that of an hour was given. `utilization` is None in
    documents of an earlier version.
    `workload` and `options` (a `SearchOptions`) allow a finished search to be ranked again. `target` is the workload's
    name on the command line, if it has one; `command_template` is the command that was searched, if there was one, and
    `command` the one to run instead.
    """

    format: int = FORMAT
    search: SearchSummary
    hardware: Hardware
    versions: dict[str, str]
    fingerprint: Fingerprint
    workload: Description | None = None
    options: dict[str, Any] = {}
    objective: Objective = "speed"
    job: TrainingCost | None = None
    unit_price: UnitPrice | None = None
    utilization: Utilization | None = None
    target: str | None = None
    command_template: CommandTemplate | None = msgspec.field(default=None, name="launch_line")
    command: str | None = None

    def __post_init__(self) -> None:
        convert(self.options, _ShownOptions)

    def options_as(self, kind: type[Options]) -> Options:
        """Return `options` as `kind`. Raises `FormatError` if they are invalid."""
        try:
            return convert(self.options, kind)
        except msgspec.MsgspecError as error:
            raise FormatError(
                f"The options of study {self.search.study} are damaged: {error}.", _RESTORE_ADVICE
            ) from error

    def recommended_command(self, study: Path) -> tuple[bool, str]:
        """Return whether the recommended command must run under `autotune-amp run`, and the command line.

        `autotune-amp run` sets the environment and the values without a placeholder; it reads the folder `study`.
        """
        assert self.command_template is not None
        assert self.workload is not None  # a search of a command describes it
        command = shell_line(self.filled_command(study)[0])
        if not self.command_template.outside(self.config, self.workload.today):
            return False, command
        return True, f"autotune-amp run {shell_line([study.as_posix()])} -- {command}"

    def filled_command(self, study: Path) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the searched command with the recommended values, and its filled settings files by their paths in
        `study`. Placeholders of a trial without a present value have example values.
        """
        template = self.command_template
        assert template is not None
        trial_values = {name: value for name, value in EXAMPLE_VALUES.items() if template.today(name) is None}
        return template.of_setting(self.config, study.as_posix(), **trial_values)

    def to_json(self) -> str:
        """Return the JSON document; a missing number is null, never NaN."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document atomically: a reader sees the old file or the new one, never a part."""
        write_atomically(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recommendation:
        """Read a document. Raises `FormatError` if it is missing, damaged or of a newer format."""
        path = Path(path)
        try:
            text = read_file(path)
        except OSError as error:
            is_missing = isinstance(error, FileNotFoundError)
            raise FormatError(
                f"{path} cannot be read: {cause(error)}.",
                "Run `autotune-amp search` to make one." if is_missing else "Name a file that a search wrote.",
            ) from error
        try:
            format_version = decode(text, _Format).format
            if format_version <= FORMAT:
                return decode(text, cls)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path} is damaged: {error}.", _RESTORE_ADVICE) from error
        raise FormatError(
            f"{path} has format {format_version}; this version reads up to {FORMAT}.",
            "Upgrade autotune_amp, or move the file away and search again.",
        )

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """Return the answer, the variables to set, the warnings and further facts as a few lines of plain text.

        Advice names arguments of Python.
        """
        exports = [("before Python starts", line) for line in explain.export_lines(self.config)]
        warnings = [("warning", one_line(warning)) for warning in self.warnings]
        lines = [*self.answer(), *exports, *warnings, *self.further_facts()]
        return "\n".join(f"{label}: {in_python(text)}" for label, text in lines)

    @property
    def is_kept(self) -> bool:
        """Whether the recommendation is to keep the present setting and environment."""
        baseline = self.evidence.baseline.config
        return Setting.of(self.config) == Setting.of(baseline) and not self.config.environment

    @property
    def is_sure(self) -> bool:
        """Whether the speed-up is confirmed: by enough processes, with an interval above 1."""
        evidence, interval = self.evidence, self.evidence.speedup_interval
        is_wide = explain.is_wide(evidence.samples_per_second_interval)
        return evidence.is_confirmed and not is_wide and interval is not None and interval[0] > 1

    def title(self) -> str:
        """Return the kind of recommendation: "Recommended", "Keep what you have", or the best so far."""
        kept = "keep what you have" if self.is_kept else "recommended"
        if self.search.was_interrupted:
            return f"Best so far, the search was interrupted: {kept}"
        return kept[0].upper() + kept[1:]

    def answer(self) -> list[tuple[str, str]]:
        """Return the (label, text) pairs to read first: what to set, its gain, how certain that is, and the reason."""
        config, evidence, utilization = self.config, self.evidence, self.utilization
        own = explain.config_line(config, self.num_batches)
        return [
            ("set", f"nothing; {own} stays" if self.is_kept else own),
            ("speed", explain.throughput_line(evidence)),
            *([] if self.is_kept else [("gain", explain.speedup_line(evidence))]),
            ("sure", explain.certainty_line(evidence)),
            ("memory", explain.memory_line(evidence, self.hardware.identity.type)),
            *([("MFU", explain.utilization_line(utilization))] if utilization and utilization.flops_per_second else []),
            *([] if self.unit_price is None else [("cost", explain.unit_price_line(self.unit_price))]),
            ("why", one_line(self.reason)),
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs for all facts about the recommended config, those of `answer` first."""
        return [*self.answer(), *self.further_facts()]

    def further_facts(self) -> list[tuple[str, str]]:
        """Return (label, text) pairs for the facts that neither `answer` nor the warnings contain."""
        config, evidence, workload, utilization = self.config, self.evidence, self.workload, self.utilization
        joules = evidence.joules_per_sample
        uncounted = None if utilization is None or utilization.flops_per_second else utilization
        device_type = self.hardware.identity.type
        scale = config.loss_scale if self.command_template is None else None  # a script has its own
        limit_bytes = self.options.get("memory_limit")
        accumulation = evidence.accumulation if config.accumulation_steps > 1 else None
        pauses = {"an evaluation": evidence.evaluation_seconds, "a checkpoint": evidence.checkpoint_seconds}
        pause_texts = [f"{name} takes {duration(seconds)}" for name, seconds in pauses.items() if seconds is not None]
        lines = [
            ("tokens", explain.tokens_line(evidence)),
            ("plain", explain.plain_environment_line(evidence)),
            ("limit", None if limit_bytes is None else f"{size(limit_bytes)} of memory for each trial, as requested"),
            ("objective", None if self.objective == "speed" else self.objective),
            ("energy", None if joules is None else f"{joules:.3g} J a sample"),
            ("job", None if self.job is None else explain.job_line(self.job)),
            ("MFU", explain.utilization_line(uncounted) if uncounted else None),
            ("devices", explain.devices_line(evidence)),
            ("ranks", None if evidence.ranks is None else explain.ranks_line(evidence.ranks, device_type)),
            ("run", None if workload is None or not workload.is_ranked else explain.ranked_run_line(config, workload)),
            ("outlook", None if self.outlook is None else explain.outlook_line(self.outlook)),
            ("pauses", ", ".join(pause_texts) or None),
            ("loss scale", None if scale is None else explain.loss_scale_line(scale, evidence.loss_scale)),
            ("accumulation", None if accumulation is None else explain.accumulation_line(accumulation)),
            ("pinned", f"{module_names(config.pinned_modules)} in fp32" if config.pinned_modules else None),
            *(("fidelity", explain.check_line(check)) for check in self.checks()),
            *(("fallback", explain.measured_line(p, p.samples_per_second, p.peak_memory_bytes)) for p in config.plans),
        ]
        return [(label, text) for label, text in lines if text is not None]

    def answer_html(self) -> str:
        """Return HTML for a report or a notebook: the key numbers, how sure they are, and the reason."""
        evidence, search, hardware = self.evidence, self.search, self.hardware
        baseline = evidence.baseline
        today = f"{baseline.config.precision} batch {baseline.config.batch_size}"
        limit = f"of {size(self.available_bytes)} available"
        tiles = [
            ("speed-up", *self._gain_tile(f"over the baseline, {today}")),
            ("samples/s", number(evidence.samples_per_second), f"{duration(evidence.step_seconds)} a step"),
            *(
                []
                if evidence.tokens_per_second is None
                else [("tokens/s", number(evidence.tokens_per_second), "without padding")]
            ),
            ("peak memory", size(evidence.peak_memory_bytes), limit),
        ]
        trials = f"{count(search.num_trials, 'trial')}, {search.num_failures} failed, {duration(search.seconds)}"
        device = f"{hardware.device} ({one_line(hardware.identity.name)})"
        certainty = [fact for fact in self.answer() if fact[0] in ("sure", "why")]
        return markup.tiles(tiles) + markup.definition_list([*certainty, ("search", f"{trials} on {device}")])

    def warnings_html(self) -> str:
        """Return the warnings as HTML; "" without any."""
        interrupted = ["The search was interrupted: this is the best so far."] * self.search.was_interrupted
        return "".join(markup.paragraph(one_line(text), "warning") for text in (*interrupted, *self.warnings))

    def notes_html(self) -> str:
        """Return the notes as HTML; "" without any."""
        return "".join(markup.paragraph(one_line(note)) for note in self.notes)

    def _gain_tile(self, baseline: str) -> tuple[str, str]:
        """Return the number of the speed-up tile and the note below it."""
        speedup, interval = self.evidence.speedup, self.evidence.speedup_interval
        if self.is_kept:
            return "none", "what runs today is kept"
        if speedup is None:
            return "unknown", baseline
        between = "" if interval is None else f"{times(interval[0])} to {times(interval[1])} "
        is_unclear = interval is not None and interval[0] < 1 < interval[1]
        return "not sure" if is_unclear else times(speedup), f"{between}{baseline}"

    def _repr_html_(self) -> str:
        further = [fact for fact in self.facts() if fact[0] not in ("set", "sure", "why")]
        title = f"{self.title()}: {explain.config_line(self.config, self.num_batches)}"
        details = {"Evidence": markup.definition_list(further), "Notes": self.notes_html()}
        folded = (markup.collapsible(name, body) for name, body in details.items() if body)
        return in_python(markup.notebook_box(title, self.answer_html(), self.warnings_html(), *folded))

    @property
    def training_config(self) -> AmpConfig:
        """Return the config to train with: that of a command keeps the script's own TF32 flags (`as_found`), as its
        trials did, unless it leaves the script's precision for fp32 or TF32, which are set by these flags.
        """
        precision, today = self.config.precision, self.workload and self.workload.today.precision
        is_set_by_flags = precision == "tf32" or (precision == "fp32" and today != "fp32")
        keeps_flags = self.command_template is not None and not is_set_by_flags
        return msgspec.structs.replace(self.config, as_found=True) if keeps_flags else self.config

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks that share an optimizer step."""
        own = 1 if self.workload is None else self.workload.num_ranks
        ranks: int = self.options.get("num_ranks", 1)
        return own * ranks

    @property
    def num_batches(self) -> int:
        """Return the number of batches that all ranks together take at once: some launchers divide one among ranks."""
        return self.num_ranks if self.workload is None else self.num_ranks // self.workload.num_sharing

    @property
    def measured_flops(self) -> MeasuredFlops | None:
        """Return the operations of a sample and the machine's rates, for a `PrecisionController`; None if unknown."""
        if self.utilization is None or self.utilization.flops_per_second is None:
            return None
        # The ranks of a CPU share the rate that was measured on all of it.
        num_sharing_rate = self.num_ranks if self.hardware.identity.type == "cpu" else 1
        num_sharing_batch = 1 if self.workload is None else self.workload.num_sharing
        weights = "fp32" if self.workload is None else self.workload.weights
        products = {p: product_precision(p, weights, as_found=self.config.as_found) for p in PRECISIONS}
        rates = {p: capability.peak_flops_per_second for p, capability in self.hardware.precisions.items()}
        return MeasuredFlops(
            # A controller counts the samples of a whole batch, of which its rank computes a part.
            flops_per_sample=self.utilization.flops_per_second / self.evidence.samples_per_second / num_sharing_batch,
            machine_flops_per_second={
                precision: rate / num_sharing_rate
                for precision, product in products.items()
                if product is not None and (rate := rates.get(product))
            },
        )

    @property
    def available_bytes(self) -> int:
        """Return the memory in bytes that was available to each training process."""
        available = self.hardware.memory.available
        return available if self.workload is None else self.workload.available_bytes(available, self.hardware.device)

    def checks(self) -> list[Fidelity]:
        """Return all fidelity checks, with that of the config's own precision first if the list lacks it."""
        own, checks = self.evidence.fidelity, list(self.fidelity)
        return checks if own is None or own in checks else [own, *checks]


class _Format(msgspec.Struct):
    """Format version of a document, read before the rest of it."""

    format: int = FORMAT


class NothingWorksError(AutotuneAmpError):
    """Raised if every candidate failed; `excluded` holds the reasons."""

    exit_code = 3

    def __init__(self, message: str, next_step: str, excluded: tuple[Exclusion, ...]) -> None:
        super().__init__(message, next_step)
        self.excluded = excluded


class SearchInterruptedError(AutotuneAmpError):
    """Raised if Ctrl-C ended the search; `best` is the best recommendation so far.

    It is None if nothing was measured, or if the recommendation of an earlier search stays in the study's folder.
    """

    exit_code = 130

    def __init__(
        self, message: str, next_step: str, excluded: tuple[Exclusion, ...], best: Recommendation | None
    ) -> None:
        super().__init__(message, next_step)
        self.excluded = excluded
        self.best = best


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file and rename it to `path`. Raises `StudyError` if the folder cannot be written."""
    # Not with tempfile: it makes files that only their owner can read, whatever the umask.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # the latter for a NUL in the path
        raise StudyError(
            f"{path} cannot be written: {cause(error)}.", "Free some space, or choose another folder."
        ) from error
    finally:
        with suppress(OSError, ValueError):  # already moved, or never made
            temporary.unlink()

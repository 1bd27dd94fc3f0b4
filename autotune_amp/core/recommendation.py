"""Recommendation: a config with its evidence; load, save, explain. A file is data: nothing read here is executed.

How to read one:

* The answer comes first: what to set, what it gains, how sure that is and why. **Warnings**, three at most, change what
  you do; **notes** are what else is to be known of the numbers.
* **speed** is the median over fresh processes, and the interval is where a new run is expected to land (95 %). On a
  GPU, where a process takes seconds to start, each of them measures everything that is confirmed, in turn; on a CPU
  one thing alone. Its width is that of what differed between processes on your machine, the search's own repetitions
  included.
* **machine** is what others did on it meanwhile: CPU time of other processes, time that a hypervisor gave away, the
  card's lowered clocks and other processes on it (on Linux; elsewhere the load average alone). Where that is worth a
  word it is said before the first trial and warned of, and the interval is widened for what others took of the CPUs.
* **speed-up** is against the *baseline*: your own batch size, with the TF32 flags and autocast that it found, in
  your own environment. "Keep what you have" is a frequent and good answer.
* **environment** holds variables to set before Python starts. On Linux CPUs they keep freed memory in the process,
  which steadies the step time and often shortens it; *plain* is the speed without them.
* The choice is, within 3 % of the fastest, the precision with the least to go wrong and, within that, the smallest
  batch.
* **fidelity**: each precision that may be recommended, and your own, is held against fp32 on the same weights,
  batches and draws, in one step and in a short training run. *noise ratio* is what rounding does to the gradient
  over what another batch does to it. *Unfaithful* is excluded, with the modules that it begins in; where a few
  modules in fp32 heal it, it is measured with them (**pinned**, `config.pinned_modules`;
  `PrecisionController.attach` keeps them so). *Unchecked* says that there was no time or memory for it; it is never
  called faithful, and comes after fp32 and all that is. *Doubtful* comes last. What is about to be recommended is
  looked at once more on weights that up to 300 steps of fp32 have moved, in a tenth of the budget (*after 300 fp32
  steps*): what fails there, as a logarithm of what has come to round to 0, is excluded too. Where noise drawn in
  half precision would be other numbers than fp32's, both are given the same, and it says so.
* **loss scale** (fp16): the largest safe scale is measured over a short real training; GradScaler's rule is then
  replayed over `--steps` for any init_scale and growth interval, without a training step. Beside the skips foretold
  stand those of GradScaler's defaults and those seen in the confirmation. fp16 that is more than 10 % slower than
  the fastest keeps GradScaler's defaults. fp16 is excluded where more than 1 % of the gradient's entries are flushed
  to zero at every safe scale, or where an activation exceeds a quarter of what it holds.
* **memory** is the peak of whole trainings in miniature: the worst batch first and last, with an evaluation and a
  checkpoint where the workload has them.
* **accumulation** says what was found of it: exact, exact with the weights that it names (the lines to copy and the
  exports weigh so, by a `count(batch)` of yours), or withheld and why.
* **unconfirmed** stands beside the speed where three fresh processes of the choice did not fit into the budget, and
  beside the speed-up where those of today's settings did not.
* **The machine changed**: the confirmation is more than half off the search's own trials of the choice; the interval
  holds both.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from autotune_amp.core import evidence as explain
from autotune_amp.core import pieces
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.dimensions import Precision
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
from autotune_amp.core.evidence import Evidence, Job, Objective, Outlook
from autotune_amp.core.hardware import Hardware, MachineLoad
from autotune_amp.core.launch_line import LaunchLine
from autotune_amp.core.outcome import Description, Fidelity
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, module_names, number, one_line, rate, shell_line, size, times

FORMAT = 1
MAX_WARNINGS = 3  # more are not read
_DAMAGED = "Move the file away and search again, or restore it from a backup."
Options = TypeVar("Options")


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were not recommended because they failed, could not run, or were left untried, with the reason.

    `batch_size` is None where the reason holds for every batch size of the precision. It holds for every value of a
    further dimension that is not named; the document holds those that are.
    """

    precision: Precision
    batch_size: Count | None
    reason: str
    accumulation_steps: int | UnsetType = UNSET
    as_found: bool | UnsetType = UNSET
    pinned_modules: tuple[str, ...] | UnsetType = UNSET
    num_workers: int | UnsetType | None = UNSET

    def covers(self, setting: Setting) -> bool:
        """Whether the reason holds for this setting."""
        named = msgspec.structs.asdict(self) | ({"batch_size": UNSET} if self.batch_size is None else {})
        return all(named.get(name, UNSET) in (UNSET, getattr(setting, name)) for name in Setting.__struct_fields__)


class SearchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the search went. Checks and calibrations are no trials, and not counted.

    `search_id` names its lines in outcomes.jsonl; `warnings` and `notes` are of its circumstances, which no ranking
    changes. `load` is what others did on the machine before the first trial, `start_seconds` what a new process takes
    until it has the workload.
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
    load: MachineLoad | None = None


class CandidateRow(Setting, frozen=True, kw_only=True):
    """One line of the table of all candidates: what became of it.

    Numbers are those in the recommended environment where it was confirmed there. The baseline's are those in the
    user's own; where it was confirmed in the recommended one too, a second line `has_environment`.
    """

    status: str
    samples_per_second: Positive | None
    step_seconds: Positive | None
    peak_memory_bytes: Whole | None
    reason: str | None
    joules_per_sample: Number | None = None
    has_environment: bool = False


class VariantRow(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one value of a further dimension.

    `status` is "chosen", "tried" (it gained too little), "excluded", "untried" or the kind of a failure, with the
    `reason`. `speedup` and `memory_change_bytes` are those of `setting` over the one `beside` it, which lacks the
    value; the interval is that of the steps within one process each. `first_step_seconds` holds the compilation, with
    its `num_graph_breaks`, which pays from `break_even_steps` on, None where it never does. `max_speedup` is what a
    profile of the step left it to gain at most, None where it says nothing of it.
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
    """What a recommendation holds for: a digest of each part; `unknown` names parts that cannot be compared."""

    digest: str
    parts: dict[str, str]
    unknown: tuple[str, ...] = ()

    def differences(self, now: Fingerprint) -> tuple[str, ...]:
        """What `now` has different, one readable line each; empty where all is the same and could be compared."""
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
    """What the records of a search come to: a config, the evidence behind it, and what became of all the others.

    `warnings` are at most `MAX_WARNINGS`, those that change what the reader does, the most important first; `notes` are
    what else is to be known of the numbers. `fidelity` holds every check against fp32; `variants` what came of every
    value of further dimensions; `outlook` is what another effective batch size would reach, None where
    that was not measured or is no faster.
    """

    config: AmpConfig
    evidence: Evidence
    reason: str
    warnings: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    candidates: tuple[CandidateRow, ...]
    fidelity: tuple[Fidelity, ...] = ()
    variants: tuple[VariantRow, ...] = ()
    outlook: Outlook | None = None
    notes: tuple[str, ...] = ()


class _ShownOptions(msgspec.Struct):
    """Ranges of the options that are computed with where a recommendation is shown or ranked again."""

    num_ranks: Count = 1
    memory_fraction: Share = 0.9
    memory_limit: Count | None = None
    num_steps: Count | None = None
    num_samples: Count | None = None
    price_per_hour: NotNegative | None = None


class Recommendation(Decision, frozen=True, kw_only=True):
    """A decision, and what it was measured on.

    `objective` is what the config was chosen for; `job` is there where the length of the training was given. `workload`
    and `options` (a `SearchOptions`) are what a finished search is ranked again with. `target` names the workload as
    the command line does, where it has a name there; `launch_line` is the command that was searched, where it was one,
    and `command` what to type in its place.
    """

    format: int = FORMAT
    search: SearchSummary
    hardware: Hardware
    versions: dict[str, str]
    fingerprint: Fingerprint
    workload: Description | None = None
    options: dict[str, Any] = {}
    objective: Objective = "speed"
    job: Job | None = None
    target: str | None = None
    launch_line: LaunchLine | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        convert(self.options, _ShownOptions)

    def options_as(self, kind: type[Options]) -> Options:
        """The `options` as `kind`; raises `FormatError` where they are none."""
        try:
            return convert(self.options, kind)
        except msgspec.MsgspecError as error:
            raise FormatError(f"The options of study {self.search.study} are damaged: {error}.", _DAMAGED) from error

    def answered_command(self, study: Path) -> tuple[bool, str]:
        """The `launch_line` to run with what the folder `study` holds, and whether by `autotune-amp run`, which sets
        the variables and what has no placeholder."""
        assert self.launch_line is not None
        assert self.workload is not None  # a search of a command describes it
        line = self.launch_line
        others = {"trial_dir": "OUTPUT_DIR", "seed": 0, "port": 29500}  # where today's are not said
        of_trial = {name: value for name, value in others.items() if line.today(name) is None}
        command = shell_line(line.of_setting(self.config, study.as_posix(), **of_trial)[0])
        if not line.outside(self.config, self.workload.today):
            return False, command
        return True, f"autotune-amp run {shell_line([study.as_posix()])} -- {command}"

    def to_json(self) -> str:
        """The document; a missing number is null, never NaN."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document atomically: a reader sees the old file or the new one, never half of one."""
        write_atomically(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recommendation:
        """Read a document; raises `FormatError` if it is missing, damaged or of a newer format."""
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
            written = decode(text, _Format).format
            if written <= FORMAT:
                return decode(text, cls)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path} is damaged: {error}.", _DAMAGED) from error
        raise FormatError(
            f"{path} has format {written}; this version reads up to {FORMAT}.",
            "Upgrade autotune_amp, or move the file away and search again.",
        )

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """The reason, the evidence and the warnings as a few lines of plain text."""
        exports = explain.export_lines(self.config)
        lines = [f"{label}: {text}" for label, text in self.facts()]
        return "\n".join([*lines, *(f"before Python starts: {line}" for line in exports)])

    @property
    def is_kept(self) -> bool:
        """Whether it is to keep what runs today, environment and all."""
        return explain.is_todays(self.config, self.evidence.baseline.config)

    @property
    def is_sure(self) -> bool:
        """Whether a gain was confirmed that no chance explains."""
        evidence, interval = self.evidence, self.evidence.speedup_interval
        is_wide = explain.is_wide(evidence.samples_per_second_interval)
        return evidence.is_confirmed and not is_wide and interval is not None and interval[0] > 1

    def title(self) -> str:
        """Say what kind of an answer it is."""
        kept = "keep what you have" if self.is_kept else "recommended"
        if self.search.was_interrupted:
            return f"Best so far, the search was interrupted: {kept}"
        return kept[0].upper() + kept[1:]

    def answer(self) -> list[tuple[str, str]]:
        """Label and text of what is to be read first: what to set, what it gains, how sure that is, and why."""
        config, evidence = self.config, self.evidence
        own = explain.config_line(config, self.num_ranks)
        return [
            ("set", f"nothing; {own} stays" if self.is_kept else own),
            ("speed", f"{rate(evidence.samples_per_second)}, {explain.step_line(evidence)}"),
            *([] if self.is_kept else [("gain", explain.speedup_line(config, evidence))]),
            ("sure", explain.certainty_line(evidence)),
            ("memory", explain.memory_line(evidence, self.hardware.identity.type)),
            ("why", one_line(self.reason)),
        ]

    def facts(self) -> list[tuple[str, str]]:
        """Label and text of everything to know about the recommended config."""
        config, evidence, workload = self.config, self.evidence, self.workload
        joules, scale = evidence.joules_per_sample, config.loss_scale
        limit_bytes = self.options.get("memory_limit")
        accumulation = evidence.accumulation if config.accumulation_steps > 1 else None
        pauses = {"an evaluation": evidence.evaluation_seconds, "a checkpoint": evidence.checkpoint_seconds}
        taken = [f"{name} takes {duration(seconds)}" for name, seconds in pauses.items() if seconds is not None]
        lines = [
            ("config", explain.config_line(config, self.num_ranks)),
            ("speed", explain.speed_line(evidence)),
            ("speed-up", explain.speedup_line(config, evidence)),
            ("plain", explain.plain_environment_line(evidence)),
            ("memory", explain.memory_line(evidence, self.hardware.identity.type)),
            ("limit", None if limit_bytes is None else f"{size(limit_bytes)} of memory for any trial, as asked"),
            ("objective", None if self.objective == "speed" else self.objective),
            ("energy", None if joules is None else f"{joules:.3g} J a sample"),
            ("job", None if self.job is None else explain.job_line(self.job)),
            ("slots", None if evidence.slots is None else explain.slots_line(evidence.slots)),
            (
                "ranks",
                None if evidence.ranks is None else explain.ranks_line(evidence.ranks, self.hardware.identity.type),
            ),
            ("run", None if workload is None or not workload.is_ranked else explain.ranked_run_line(config, workload)),
            ("reason", one_line(self.reason)),
            ("outlook", None if self.outlook is None else explain.outlook_line(self.outlook)),
            ("pauses", ", ".join(taken) or None),
            ("loss scale", None if scale is None else explain.loss_scale_line(scale, evidence.loss_scale)),
            ("accumulation", None if accumulation is None else explain.accumulation_line(accumulation)),
            ("pinned", f"{module_names(config.pinned_modules)} in fp32" if config.pinned_modules else None),
            *(("fidelity", explain.check_line(found)) for found in self.checks()),
            *(("fallback", explain.measured_line(p, p.samples_per_second, p.peak_memory_bytes)) for p in config.plans),
            *(("warning", one_line(warning)) for warning in self.warnings),
        ]
        return [(label, text) for label, text in lines if text is not None]

    def to_html(self) -> str:
        """What a page and a notebook show first: the numbers that say most, the reason and the warnings."""
        evidence, search, hardware = self.evidence, self.search, self.hardware
        baseline = evidence.baseline
        today = f"{baseline.config.precision} batch {baseline.config.batch_size}"
        low, high = evidence.samples_per_second_interval
        landing = explain.landing_line((low, high))
        limit = f"of {size(self.available_bytes)} available"
        tiles = [
            ("speed-up", *self._gain_tile(f"over the baseline, {today}")),
            ("samples/s", number(evidence.samples_per_second), f"{landing}; {duration(evidence.step_seconds)} a step"),
            ("peak memory", size(evidence.peak_memory_bytes), limit),
        ]
        warnings = ["The search was interrupted: this is the best so far."] * search.was_interrupted
        counted = f"{count(search.num_trials, 'trial')}, {search.num_failures} failed, {duration(search.seconds)}"
        on = f"{hardware.device} ({one_line(hardware.identity.name)})"
        notes = "".join(pieces.paragraph(one_line(note)) for note in self.notes)
        return "".join(
            [
                pieces.tiles(tiles),
                pieces.paragraph(one_line(self.reason), "reason"),
                *(pieces.paragraph(one_line(warning), "warning") for warning in (*warnings, *self.warnings)),
                pieces.folded(count(len(self.notes), "note"), notes) if notes else "",
                pieces.paragraph(f"{counted} on {on}.", "absent"),
            ]
        )

    def _gain_tile(self, over: str) -> tuple[str, str]:
        """The number of the first tile, and what stands below it."""
        speedup, interval = self.evidence.speedup, self.evidence.speedup_interval
        if self.is_kept:
            return "none", "what runs today is kept"
        if speedup is None:
            return "unknown", over
        between = "" if interval is None else f"{times(interval[0])} to {times(interval[1])} "
        is_unclear = interval is not None and interval[0] < 1 < interval[1]
        return "not sure" if is_unclear else times(speedup), f"{between}{over}"

    def _repr_html_(self) -> str:
        told = [fact for fact in self.facts() if fact[0] not in ("config", "reason", "warning")]
        title = f"{self.title()}: {explain.config_line(self.config, self.num_ranks)}"
        return pieces.fragment(title, self.to_html(), pieces.folded("Evidence", pieces.facts(told)))

    @property
    def num_ranks(self) -> int:
        """The ranks that an optimizer step is shared by."""
        own = 1 if self.workload is None else self.workload.num_ranks
        ranks: int = self.options.get("num_ranks", 1)
        return own * ranks

    @property
    def available_bytes(self) -> int:
        """The memory that was there for each process of the training."""
        available = self.hardware.memory.available
        return available if self.workload is None else self.workload.available_bytes(available, self.hardware.device)

    def checks(self) -> list[Fidelity]:
        """The checks that were made, and that of the config's own precision where it was not."""
        own, made = self.evidence.fidelity, list(self.fidelity)
        return made if own is None or own in made else [own, *made]


class _Format(msgspec.Struct):
    """All that is read of a document before it is known to be none of a newer format."""

    format: int = FORMAT


class NothingWorksError(AutotuneAmpError):
    """Every candidate failed; `excluded` holds the reason of each."""

    exit_code = 3

    def __init__(self, message: str, next_step: str, excluded: tuple[Exclusion, ...]) -> None:
        super().__init__(message, next_step)
        self.excluded = excluded


class SearchInterruptedError(AutotuneAmpError):
    """Ctrl-C ended the search; `best` is the recommendation that was saved, if any candidate was measured."""

    exit_code = 130

    def __init__(
        self, message: str, next_step: str, excluded: tuple[Exclusion, ...], best: Recommendation | None
    ) -> None:
        super().__init__(message, next_step)
        self.excluded = excluded
        self.best = best


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and move it there; raises `StudyError` if the folder cannot be written."""
    # Not tempfile's: its files are for nobody else to read, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # the latter for a NUL in the path
        raise StudyError(
            f"{path} cannot be written: {cause(error)}.", "Free some space, or choose another folder with --out."
        ) from error
    finally:
        with suppress(OSError, ValueError):  # it was moved, or could not be made
            temporary.unlink()

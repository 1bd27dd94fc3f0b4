"""Recommendation: a config with its evidence; load, save, explain. A file is data: nothing read here is executed."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import FormatError, InvalidRequestError, StudyError
from autotune_amp.core.fidelity import Accumulation, Fidelity
from autotune_amp.core.hardware import Hardware, LoadEvidence, MachineLoad
from autotune_amp.core.outcome import Description
from autotune_amp.core.setting import Precision, Setting

FORMAT = 1

Objective: TypeAlias = Literal["speed", "memory", "energy"]


class PlainEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended config run once without `config.environment`, as a user would who forgets to set it."""

    samples_per_second: float | None
    speedup: float | None


# Fresh processes behind a confirmed number: fewer say nothing of the spread between processes, which dominates
# (measurement.md, Timing).
MIN_PROCESSES = 3


class BaselineEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the user runs today, measured in the user's own environment; None with `reason` where it does not run."""

    config: AmpConfig
    samples_per_second: float | None
    samples_per_second_interval: tuple[float, float] | None
    step_seconds: float | None
    peak_memory_bytes: int | None
    reason: str | None = None


class LossScaleEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the recommended init_scale and growth_interval are based on: a replay of the measured largest safe scales.

    Over the horizon of `num_steps` optimizer steps `num_skips` are foretold, and `applied_share` of the gradient
    reaches the optimizer; `default_...` is the same with the defaults of ``torch.amp.GradScaler``. In the
    `num_confirming_steps` measured by the confirmation `num_skips_seen` were skipped, where `num_skips_foretold` were
    foretold. The largest safe scale was measured at `num_calibrated_steps` steps; a real training has other batches.
    `flushed_share` of the gradient's entries, true zeros left out, are flushed to zero at the init_scale.
    """

    num_steps: int
    num_skips: int
    applied_share: float
    default_num_skips: int
    default_applied_share: float
    num_confirming_steps: int
    num_skips_seen: int
    num_skips_foretold: int
    num_calibrated_steps: int
    log2_safe_scale_min: float
    log2_safe_scale_median: float
    flushed_share: float


class WorkersTried(msgspec.Struct, frozen=True, kw_only=True):
    """A trial of `candidate` with another number of loader workers; None where it failed."""

    candidate: str
    num_workers: int
    samples_per_second: float | None
    data_share: float | None


class LoaderEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Where the data loader sets the speed: what the step alone could reach, and which numbers of workers were tried.

    `data_share` is the share of a step of the recommended candidate spent waiting for data with the user's own
    `num_workers` (None: it has no workers to change), `step_samples_per_second` what its steps reach without waiting.
    """

    num_workers: int | None
    data_share: float
    step_samples_per_second: float
    tried: tuple[WorkersTried, ...] = ()


class ProcessPeak(msgspec.Struct, frozen=True, kw_only=True):
    """The peak of one process, and the optimizer steps that it took."""

    num_steps: int
    peak_memory_bytes: int


class MemoryEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the peak memory was measured on.

    `worst_case` says which batch in a sentence, None where all batches are alike or nobody knows; `num_seen` of
    `num_samples` samples were looked at for it, None where it was named. `has_evaluation` and `has_checkpoint` say
    whether the confirmation ran the workload's own. `processes` are those behind the peak, which is their highest.
    """

    worst_case: str | None
    num_seen: int | None = None
    num_samples: int | None = None
    has_evaluation: bool = False
    has_checkpoint: bool = False
    processes: tuple[ProcessPeak, ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The training to come: `num_steps` optimizer steps over `num_samples` samples, in hours and money.

    Intervals are 95 % and follow from that of the throughput. `baseline_hours` is the same training as it runs today,
    None where that was not measured. Prices are in the currency of `price_per_hour`, None where that was not given.
    """

    num_steps: int
    num_samples: int
    hours: float
    hours_interval: tuple[float, float]
    baseline_hours: float | None = None
    price_per_hour: float | None = None
    price: float | None = None
    price_interval: tuple[float, float] | None = None


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of the recommended config.

    Intervals are 95 %: `samples_per_second_interval` is where a new run is expected to land, `speedup_interval` holds
    the mean ratio to the baseline. `num_processes` fresh processes of the config stand behind them; `is_confirmed` is
    false where they or the baseline's are fewer than three. `peak_memory_bytes` is the highest of theirs; on a CPU
    their resident size, without that of loader workers. `data_share` is the share of a step spent waiting for data,
    `update_share` that spent in the optimizer, None where it was not timed apart. `fidelity` is the verdict on the
    config's precision, *unchecked* where no check was made; None for fp32, which the others are held to. `loss_scale`
    is None for fp16 not calibrated, and for every other precision. `accumulation` is what was found of it, None where
    nobody asked; `loader` is None where the data loader does not set the speed. `is_build_shared`: the processes shared
    a model that was built once, so that the interval does not hold what building it anew changes.
    `are_processes_shared`: each of them measured everything that was confirmed, in turn. `joules_per_sample`
    is None where nothing says what the device draws, `load` where nobody looked what others did on the machine.
    `search_samples_per_second` is what the search's trials reached, where the confirmation is more than half off it:
    then the interval holds both.
    """

    samples_per_second: float
    samples_per_second_interval: tuple[float, float]
    step_seconds: float
    peak_memory_bytes: int
    baseline: BaselineEvidence
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    num_processes: int
    is_confirmed: bool
    data_share: float
    update_share: float | None = None
    plain_environment: PlainEnvironment | None = None
    fidelity: Fidelity | None = None
    loss_scale: LossScaleEvidence | None = None
    accumulation: Accumulation | None = None
    loader: LoaderEvidence | None = None
    memory: MemoryEvidence | None = None
    is_build_shared: bool = False
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    joules_per_sample: float | None = None
    load: LoadEvidence | None = None
    search_samples_per_second: float | None = None
    are_processes_shared: bool = False


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that were not recommended because they failed, could not run, or were left untried, with the reason.

    `batch_size` is None where the reason holds for every batch size of the precision. It holds for every value of a
    further dimension that is not named; the document holds those that are.
    """

    precision: Precision
    batch_size: int | None
    reason: str
    accumulation_steps: int | UnsetType = UNSET
    as_found: bool | UnsetType = UNSET
    pinned_modules: tuple[str, ...] | UnsetType = UNSET
    num_workers: int | UnsetType | None = UNSET

    def covers(self, setting: Setting) -> bool:
        """Whether the reason holds for this setting."""
        wanted = {name: getattr(self, name, UNSET) for name in Setting.__struct_fields__}
        if self.batch_size is None:
            wanted["batch_size"] = UNSET
        return all(value is UNSET or value == getattr(setting, name) for name, value in wanted.items())


class SearchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the search went. Checks and calibrations are no trials, and not counted.

    `search_id` names its lines in outcomes.jsonl; `warnings` are those of its circumstances, which no ranking changes.
    `load` is what others did on the machine before the first trial.
    """

    study: str
    num_trials: int
    num_failures: int
    seconds: float
    was_interrupted: bool = False
    search_id: str = ""
    is_budget_spent: bool = False
    warnings: tuple[str, ...] = ()
    load: MachineLoad | None = None


class CandidateRow(Setting, frozen=True, kw_only=True):
    """One line of the table of all candidates: what became of it.

    Numbers are those in the recommended environment where it was confirmed there. The baseline's are those in the
    user's own; where it was confirmed in the recommended one too, a second line `has_environment`.
    """

    status: str
    samples_per_second: float | None
    step_seconds: float | None
    peak_memory_bytes: int | None
    reason: str | None
    joules_per_sample: float | None = None
    has_environment: bool = False


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a recommendation holds for: a digest of each part; `unknown` names parts that cannot be compared."""

    digest: str
    parts: dict[str, str]
    unknown: tuple[str, ...] = ()


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A config, the evidence behind it, and what it was measured on. `fidelity` holds every check against fp32.

    `objective` is what the config was chosen for; `job` is there where the length of the training was given. `workload`
    and `options` (a `SearchOptions`) are what a finished search is ranked again with.
    """

    format: int = FORMAT
    config: AmpConfig
    evidence: Evidence
    reason: str
    warnings: tuple[str, ...]
    excluded: tuple[Exclusion, ...]
    candidates: tuple[CandidateRow, ...]
    search: SearchSummary
    hardware: Hardware
    versions: dict[str, str]
    fingerprint: Fingerprint
    fidelity: tuple[Fidelity, ...] = ()
    workload: Description | None = None
    options: dict[str, Any] = {}
    objective: Objective = "speed"
    job: Job | None = None

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
            text = path.read_bytes()
        except OSError as error:
            raise FormatError(
                f"{path} cannot be read: {error.strerror}.", "Run `autotune-amp search` to make one."
            ) from error
        try:
            document: Any = msgspec.json.decode(text)
            written = document.get("format") if isinstance(document, dict) else None
            if isinstance(written, int) and written > FORMAT:
                raise FormatError(
                    f"{path} has format {written}; this version reads up to {FORMAT}.",
                    "Upgrade autotune_amp, or move the file away and search again.",
                )
            return msgspec.convert(document, type=cls)
        except FormatError:
            raise
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, InvalidRequestError) as error:
            what = error.message.rstrip(".") if isinstance(error, InvalidRequestError) else error
            raise FormatError(
                f"{path} is damaged: {what}.", "Move it away and search again, or restore it from a backup."
            ) from error

    def __str__(self) -> str:
        return self.explain()

    def explain(self) -> str:
        """The reason, the evidence and the warnings as a few lines of plain text."""
        from autotune_amp.report.terminal import explain  # rich is imported only where something is shown

        return explain(self)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and move it there; raises `StudyError` if the folder cannot be written."""
    # Not tempfile's: its files are for nobody else to read, whatever the umask says.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise StudyError(
                f"{path} cannot be written: {error.strerror}.",
                "Free some space, or choose another folder with --out.",
            ) from error
        raise

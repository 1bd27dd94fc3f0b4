"""Recommendation: a config with its evidence; load, save, explain. A file is data: nothing read here is executed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp.config import AmpConfig, Precision
from autotune_amp.errors import FormatError, InvalidRequestError, StudyError
from autotune_amp.hardware.types import Hardware
from autotune_amp.numerics.results import Fidelity

FORMAT = 1


class PlainEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended config run once without `config.environment`, as a user would who forgets to set it."""

    samples_per_second: float | None
    speedup: float | None


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


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of the recommended config.

    Intervals are 95 %: `samples_per_second_interval` is where a new run is expected to land, `speedup_interval`
    holds the mean ratio to the baseline. `num_processes` fresh processes stand behind them; `is_confirmed` is false
    with fewer than three. `data_share` is the share of a step spent waiting for data. `is_as_found`: the recommended
    config keeps the TF32 flags and autocast that the caller had. `fidelity` is the verdict on the config's precision,
    *unchecked* where no check was made; None for fp32, which the others are held to. `loss_scale` is None for fp16
    that was not calibrated, and for every other precision.
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
    plain_environment: PlainEnvironment | None = None
    is_as_found: bool = False
    fidelity: Fidelity | None = None
    loss_scale: LossScaleEvidence | None = None


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was not recommended because it failed, could not run, or was left untried, with the reason.

    `batch_size` is None where the reason holds for every batch size of the precision.
    """

    precision: Precision
    batch_size: int | None
    reason: str


class SearchSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How the search went. Checks and calibrations are no trials, and not counted."""

    study: str
    num_trials: int
    num_failures: int
    seconds: float
    was_interrupted: bool = False


class CandidateRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table of all candidates: what became of it."""

    precision: Precision
    batch_size: int
    accumulation_steps: int
    as_found: bool
    status: str
    samples_per_second: float | None
    step_seconds: float | None
    peak_memory_bytes: int | None
    reason: str | None
    pinned_modules: tuple[str, ...] = ()


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What a recommendation holds for: a digest of each part; `unknown` names parts that cannot be compared."""

    digest: str
    parts: dict[str, str]
    unknown: tuple[str, ...] = ()


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """A config, the evidence behind it, and what it was measured on. `fidelity` holds every check against fp32."""

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

    def explain(self) -> str:
        """The reason, the evidence and the warnings as a few lines of plain text."""
        from autotune_amp.report.terminal import explain  # rich is imported only where something is shown

        return explain(self)


def write_atomically(path: Path, text: str) -> None:
    """Write `text` beside `path` and move it there; raises `StudyError` if the folder cannot be written."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise StudyError(
            f"{path} cannot be written: {error.strerror}.", "Free some space, or choose another folder with --out."
        ) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StudyError(
                f"{path} cannot be written: {error.strerror}.",
                "Free some space, or choose another folder with --out.",
            ) from error
        raise

"""Text for the terminal and the page: table cells and lines about candidates, exclusions and trials; code to copy."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from autotune_amp.core import evidence as explain
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.outcome import Accumulation, Calibration, Failure, Fidelity, Measurement, Profiled
from autotune_amp.core.recommendation import CandidateRow, Exclusion, Recommendation, VariantRow
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import (
    count,
    duration,
    number,
    one_line,
    outcome_name,
    rate,
    shell_line,
    size,
    times,
    token_rate,
)
from autotune_amp.dimensions import TRIED_ON_LEADER
from autotune_amp.trial.step_profile.breakdown import profiled_line

# Columns with the value that most searches have in every row: such a column is left out.
_USUAL_CELLS = {"accum": "1", "workers": "-", "tokens/s": "-", "J/sample": "-"}


def recommended_row(recommendation: Recommendation) -> CandidateRow | None:
    """Return the measured row of the recommended config, or None without one.

    A setting may have several rows: with the script's own TF32 flags (`as_found`) or strict ones, with or without
    environment variables. The row that has these as the config does is preferred.
    """
    config = recommendation.config
    rows = [row for row in _rows_with_setting(recommendation, config) if row.step_seconds is not None]
    flags = config.as_found, bool(config.environment)
    return min(rows, key=lambda row: (row.as_found != flags[0], row.has_environment != flags[1]), default=None)


def baseline_row(recommendation: Recommendation) -> CandidateRow | None:
    """Return the row of the setting that the user runs today, with the script's own TF32 flags if possible, or None."""
    rows = _rows_with_setting(recommendation, recommendation.evidence.baseline.config)
    return max((row for row in rows if not row.has_environment), key=lambda row: row.as_found, default=None)


def _rows_with_setting(recommendation: Recommendation, config: AmpConfig) -> list[CandidateRow]:
    """Return the rows with the setting of `config`, whatever their TF32 flags."""

    def comparable(setting: Setting) -> Setting:
        return msgspec.structs.replace(Setting.of(setting), as_found=True)

    return [row for row in recommendation.candidates if comparable(row) == comparable(config)]


def table(recommendation: Recommendation) -> list[tuple[CandidateRow, dict[str, str]]]:
    """Return each candidate with its cells by column, without the columns that have only their usual value."""
    rows = [(row, _cells(row)) for row in recommendation.candidates]
    for name, usual_cell in _USUAL_CELLS.items():
        if all(cells[name] == usual_cell for _, cells in rows):
            for _, cells in rows:
                del cells[name]
    return rows


def _cells(row: CandidateRow) -> dict[str, str]:
    return {
        "precision": row.labelled(["precision", *(dimension.name for dimension in TRIED_ON_LEADER), "arguments"])
        + " as found" * row.as_found
        + " pinned" * bool(row.pinned_modules),
        "batch": str(row.batch_size),
        "accum": str(row.accumulation_steps),
        "workers": "-" if row.num_workers is None else str(row.num_workers),
        "samples/s": "-" if row.samples_per_second is None else number(row.samples_per_second),
        "tokens/s": "-" if row.tokens_per_second is None else number(row.tokens_per_second),
        "step": "-" if row.step_seconds is None else duration(row.step_seconds),
        "memory": "-" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
        "J/sample": "-" if row.joules_per_sample is None else f"{row.joules_per_sample:.3g}",
    }


VARIANT_COLUMNS = ("also tried", "gain", "memory", "outcome")


def variants(recommendation: Recommendation) -> list[tuple[VariantRow, tuple[str, str, str, str]]]:
    """Return each variant of the best setting with its cells for `VARIANT_COLUMNS`."""
    return [(row, _variant_cells(row)) for row in recommendation.variants]


def is_untried(row: CandidateRow | VariantRow) -> bool:
    """Whether a candidate or variant never ran, since it was excluded before or time was up."""
    has_run = (row.samples_per_second if isinstance(row, CandidateRow) else row.speedup) is not None
    return row.status in ("untried", "excluded") and not has_run


def untried_line(recommendation: Recommendation) -> str:
    """Return a line about settings that never ran: precisions with batch sizes, and the number of variants."""
    sizes: dict[str, set[int | None]] = {}
    for row in recommendation.candidates:
        if is_untried(row):
            sizes.setdefault(row.precision, set()).add(row.batch_size)
    tried = {row.precision for row in recommendation.candidates if not is_untried(row)}
    for excluded in recommendation.excluded:
        if excluded.precision not in tried:
            sizes[excluded.precision] = {None}
    texts = [
        precision
        if None in batch_sizes
        else f"{precision} batch {value_range(*(size for size in batch_sizes if size is not None))}"
        for precision, batch_sizes in sizes.items()
    ]
    num_values = sum(is_untried(row) for row in recommendation.variants)
    return ", ".join([*texts, *([count(num_values, "further value")] if num_values else [])])


def report_path(recommendation: Recommendation, path: str | None = None) -> str:
    """Return the path of report.html. `path` is that of the recommendation.json, or None for the default."""
    folder = Path(path).parent if path is not None else Path("studies", recommendation.search.study)
    return one_line((folder / "report.html").as_posix())


def _variant_cells(row: VariantRow) -> tuple[str, str, str, str]:
    gain = memory = "-"
    if row.speedup is not None and row.speedup_interval is not None:
        gain = explain.gain_line(row.speedup, row.speedup_interval)
    if row.memory_change_bytes is not None:
        change = row.memory_change_bytes
        memory = f"{'+' if change > 0 else '-'}{size(abs(change))}" if change else "0"
    parts = [
        "not tried"
        if row.status == "untried"
        else "recommended"
        if row.status == "chosen"
        else outcome_name(row.status),
        f"beside {row.beside}" if row.beside else "",
        f"first step {duration(row.first_step_seconds)}, which pays off after {row.break_even_steps:,.0f} steps"
        if row.break_even_steps is not None and row.first_step_seconds is not None
        else "",
        count(row.num_graph_breaks, "graph break") if row.num_graph_breaks else "",
        f"at most {times(row.max_speedup)} by the profile" if row.max_speedup is not None else "",
    ]
    reason = f": {one_line(row.reason)}" if row.reason else ""
    return f"{row.name} {row.value}", gain, memory, ", ".join(filter(None, parts)) + reason


def outcome_words(row: CandidateRow, recommended: CandidateRow | None, baseline: CandidateRow | None) -> str:
    """Return roles and outcome of a candidate, such as ``recommended, confirmed, with the variables`` (environment)."""
    roles = "recommended, " * (row is recommended) + "baseline, " * (row is baseline)
    return roles + outcome_name(row.status) + ", with the variables" * row.has_environment


def reason_words(row: CandidateRow) -> str:
    """Return the reason for a candidate's outcome, without the name of the outcome."""
    if row.status == "cut" and not row.reason:
        return "far slower"
    return one_line(row.reason or "").removeprefix(f"{outcome_name(row.status)}: ")


def exclusions(excluded: Iterable[Exclusion]) -> list[tuple[str, str, str]]:
    """Return a row for each reason: the precisions, their batch sizes, and the reason that they share."""
    batch_sizes: dict[tuple[str, str], list[int]] = {}
    for exclusion in excluded:
        sizes = batch_sizes.setdefault((exclusion.precision, one_line(exclusion.reason)), [])
        sizes += [] if exclusion.batch_size is None else [exclusion.batch_size]
    precisions: dict[tuple[str, str], list[str]] = {}
    for (precision, reason), sizes in batch_sizes.items():
        precisions.setdefault((value_range(*sizes) if sizes else "any", reason), []).append(precision)
    return [(", ".join(names), where, reason) for (where, reason), names in precisions.items()]


def value_range(*values: int) -> str:
    """Return the range of the values as text, such as ``2-8``; a single value if all are equal."""
    return "-".join(str(end) for end in sorted({min(values), max(values)}))


def outcome_line(outcome: Measurement | Failure | Fidelity | Calibration | Accumulation | Profiled) -> str:
    """Return the outcome of a trial, a check or a profile in a few words."""
    if isinstance(outcome, Measurement):
        tokens = "" if outcome.tokens_per_second is None else f", {token_rate(outcome.tokens_per_second)}"
        return rate(outcome.samples_per_second) + tokens + ", cut as far slower" * outcome.was_cut
    if isinstance(outcome, Failure):
        return f"{outcome_name(outcome.kind)}: {one_line(outcome.message)}"
    if isinstance(outcome, Fidelity):
        ratio = "" if outcome.noise_ratio is None else f", noise ratio {explain.small(outcome.noise_ratio)}"
        return f"{outcome.verdict}{ratio}"
    if isinstance(outcome, Calibration):
        return "no loss scale is safe" if outcome.init_scale is None else f"loss scale {number(outcome.init_scale)}"
    if isinstance(outcome, Profiled):
        return profiled_line(outcome)
    return f"accumulation {explain.accumulation_line(outcome)}"


IN_PYTHON = "In Python"
PREPARED = "model, optimizer = autotune_amp.prepare({}.config, model, optimizer)"


# --- lines to copy -------------------------------------------------------------------------------------------------


def usage_lines(recommendation: Recommendation, path: str | None = None) -> list[tuple[str, list[str]]]:
    """Return the ways to train with the recommendation: titles, each with its lines to copy.

    `path` is that of the recommendation.json; None is the default path of a search.
    """
    path = path or f"studies/{recommendation.search.study}/recommendation.json"
    exports = explain.export_lines(recommendation.config)
    shell = [("In the shell, before Python starts", exports)] if exports else []
    if recommendation.command_template is not None:
        by_run, command = recommendation.recommended_command(Path(path).parent)
        if not by_run:
            return [*shell, ("The command", [command])]
        edits = command.replace("autotune-amp run", "autotune-amp apply", 1)
        return [("The command", [command]), ("Or the diff that sets it for good", [edits])]
    title, command = export_command(path)
    return [*shell, (IN_PYTHON, python_lines(recommendation, path)), (title, [command])]


def short_usage_lines(recommendation: Recommendation, path: str | None = None) -> list[tuple[str, list[str]]]:
    """Return `usage_lines` for a terminal: of the Python only the lines that load the config (none if it is kept)."""
    essential = () if recommendation.is_kept else ("autotune_amp.", explain.loader_line(recommendation.config))
    shown = []
    for title, lines in usage_lines(recommendation, path):
        essential_lines = [line for line in lines if any(part in line for part in essential)]
        shown.append((title, essential_lines if title == IN_PYTHON else lines))
    return shown


def python_lines(recommendation: Recommendation, path: str) -> list[str]:
    """Return lines of Python that train with the config, through a controller that reads `path`.

    `path` is that of the recommendation.json. The script has to define `dataset`, `model`, `optimizer` and
    `compute_loss(model, batch)`. For lines without a controller, see `export_command`.
    """
    config, device_type = recommendation.config, recommendation.hardware.identity.type
    loader = [explain.LOADER_COMMENT, explain.loader_line(config)]
    load = f'autotune_amp.PrecisionController.load({json.dumps(path)}, "{device_type}")'
    if recommendation.workload is not None and recommendation.workload.is_loop:
        prepare_lines = (
            ["# for each model of the state, with its optimizer:", PREPARED.format("amp")]
            if config.active_variants
            else []
        )
        return [*loader, f"amp = {load}", *prepare_lines, "train_step(state, batch, amp)"]
    loop = explain.controlled_loop("loader", explain.LOSS)
    if explain.has_accumulation(config):  # the losses of a window add up to the loss of the whole batch
        accumulation = recommendation.evidence.accumulation
        combination = (
            "mean" if accumulation is None or accumulation.verdict not in ("sum", "weighted") else accumulation.verdict
        )
        loss = explain.pass_loss(combination, "controller.window_size", "controller.window_share")
        loop = explain.controlled_loop("loader, weigh=count" if combination == "weighted" else "loader", loss)
        if combination == "weighted":
            weight = (accumulation and accumulation.weighted_by) or "the items that the loss is a mean over"
            loop.insert(0, f"# Define count(batch) for a batch: {weight}")
    prepared = [PREPARED.format("controller")] if config.active_variants else []
    return [*loader, f"controller = {load}", *prepared, *loop]


def export_command(path: str) -> tuple[str, str]:
    """Return a title for the export command, and the command. `path` is that of the recommendation.json."""
    file = Path(path)
    study = file.parent if file.name == "recommendation.json" else file
    command = f"autotune-amp export {shell_line([study.as_posix()])} --to torch"
    return "The whole loop, or --to lightning, transformers, accelerate, deepspeed, env", command


def origin_line(path: Path, recommendation: Recommendation) -> str:
    """Return the first line of an export: study, recommended setting, measured speed, and whether it is unconfirmed."""
    config, evidence = recommendation.config, recommendation.evidence
    source = path.parent if path.name == "recommendation.json" and path.parent.name else path
    unconfirmed = "" if evidence.is_confirmed else ", unconfirmed"
    ranks = f" of all {recommendation.num_ranks} ranks" if recommendation.num_ranks > 1 else ""
    speed = f"{rate(evidence.samples_per_second)}{ranks}{unconfirmed}"
    return one_line(f"{source}: {Setting.of(config)}, measured at {speed}")

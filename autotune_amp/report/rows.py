"""Text that the terminal and the page share: candidates, exclusions and trials in words and cells, lines to copy."""

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
from autotune_amp.core.text import count, duration, number, one_line, outcome_name, rate, shell_line, size, times
from autotune_amp.dimensions import TRIED_ON_LEADER
from autotune_amp.trial.step_profile.breakdown import profiled_line

# Columns that are left out if every candidate has this value there.
_OPTIONAL = {"accum": "1", "workers": "-", "J/sample": "-"}


def recommended_row(recommendation: Recommendation) -> CandidateRow | None:
    """Return the measured candidate of the recommended config, or None without one.

    A setting may have several rows: as found or strict, with or without environment variables. The row that agrees with
    the config in this is preferred.
    """
    config = recommendation.config
    rows = [row for row in _rows_of(recommendation, config) if row.step_seconds is not None]
    state = config.as_found, bool(config.environment)
    return min(rows, key=lambda row: (row.as_found != state[0], row.has_environment != state[1]), default=None)


def baseline_row(recommendation: Recommendation) -> CandidateRow | None:
    """Return the candidate that the user runs today, or None without a row; as found rather than strict."""
    rows = _rows_of(recommendation, recommendation.evidence.baseline.config)
    return max((row for row in rows if not row.has_environment), key=lambda row: row.as_found, default=None)


def _rows_of(recommendation: Recommendation, config: AmpConfig) -> list[CandidateRow]:
    """Return the candidates with the setting of `config`, both as found and strict."""

    def alike(setting: Setting) -> Setting:
        return msgspec.structs.replace(Setting.of(setting), as_found=True)

    return [row for row in recommendation.candidates if alike(row) == alike(config)]


def table(recommendation: Recommendation) -> list[tuple[CandidateRow, dict[str, str]]]:
    """Return each candidate with its cells by column, without the columns of `_OPTIONAL` that tell nothing."""
    rows = [(row, _cells(row)) for row in recommendation.candidates]
    for name, usual in _OPTIONAL.items():
        if all(cells[name] == usual for _, cells in rows):
            for _, cells in rows:
                del cells[name]
    return rows


def _cells(row: CandidateRow) -> dict[str, str]:
    return {
        "precision": row.labelled(["precision", *(dimension.name for dimension in TRIED_ON_LEADER)])
        + " as found" * row.as_found
        + " pinned" * bool(row.pinned_modules),
        "batch": str(row.batch_size),
        "accum": str(row.accumulation_steps),
        "workers": "-" if row.num_workers is None else str(row.num_workers),
        "samples/s": "-" if row.samples_per_second is None else number(row.samples_per_second),
        "step": "-" if row.step_seconds is None else duration(row.step_seconds),
        "memory": "-" if row.peak_memory_bytes is None else size(row.peak_memory_bytes),
        "J/sample": "-" if row.joules_per_sample is None else f"{row.joules_per_sample:.3g}",
    }


VARIANT_COLUMNS = ("also tried", "gain", "memory", "outcome")


def variants(recommendation: Recommendation) -> list[tuple[VariantRow, tuple[str, str, str, str]]]:
    """Return each further value with its cells by `VARIANT_COLUMNS`: value, gain, change in memory, outcome."""
    return [(row, _variant(row)) for row in recommendation.variants]


def is_untried(row: CandidateRow | VariantRow) -> bool:
    """Whether a setting or a further value did not run, since it was excluded before or there was no time."""
    has_run = (row.samples_per_second if isinstance(row, CandidateRow) else row.speedup) is not None
    return row.status in ("untried", "excluded") and not has_run


def untried_line(recommendation: Recommendation) -> str:
    """Return one line about settings that did not run: precisions with batch sizes, the number of further values."""
    sizes: dict[str, set[int | None]] = {}
    for row in recommendation.candidates:
        if is_untried(row):
            sizes.setdefault(row.precision, set()).add(row.batch_size)
    ran = {row.precision for row in recommendation.candidates if not is_untried(row)}
    for excluded in recommendation.excluded:
        if excluded.precision not in ran:
            sizes[excluded.precision] = {None}
    told = [
        precision if None in found else f"{precision} batch {span(*(size for size in found if size is not None))}"
        for precision, found in sizes.items()
    ]
    num_values = sum(is_untried(row) for row in recommendation.variants)
    return ", ".join([*told, *([count(num_values, "further value")] if num_values else [])])


def report_path(recommendation: Recommendation, path: str | None = None) -> str:
    """Return the path of the search's report; `path` is as in `uses`."""
    folder = Path(path).parent if path is not None else Path("studies", recommendation.search.study)
    return one_line((folder / "report.html").as_posix())


def _variant(row: VariantRow) -> tuple[str, str, str, str]:
    gain = memory = "-"
    if row.speedup is not None and row.speedup_interval is not None:
        gain = explain.gain_line(row.speedup, row.speedup_interval)
    if row.memory_change_bytes is not None:
        change = row.memory_change_bytes
        memory = f"{'+' if change > 0 else '-'}{size(abs(change))}" if change else "0"
    words = [
        "not tried"
        if row.status == "untried"
        else "recommended"
        if row.status == "chosen"
        else outcome_name(row.status),
        f"beside {row.beside}" if row.beside else "",
        f"first step {duration(row.first_step_seconds)}, pays after {row.break_even_steps:,.0f} steps"
        if row.break_even_steps is not None and row.first_step_seconds is not None
        else "",
        count(row.num_graph_breaks, "graph break") if row.num_graph_breaks else "",
        f"by a profile {times(row.max_speedup)} at most" if row.max_speedup is not None else "",
    ]
    reason = f": {one_line(row.reason)}" if row.reason else ""
    return f"{row.name} {row.value}", gain, memory, ", ".join(filter(None, words)) + reason


def outcome_words(row: CandidateRow, recommended: CandidateRow | None, baseline: CandidateRow | None) -> str:
    """Return the roles and the outcome of a candidate, such as ``recommended, confirmed, with the variables``."""
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
        precisions.setdefault((span(*sizes) if sizes else "any", reason), []).append(precision)
    return [(", ".join(names), where, reason) for (where, reason), names in precisions.items()]


def span(*values: int) -> str:
    """Return the range of the values as text, such as ``2-8``; a single value if all are equal."""
    return "-".join(str(end) for end in sorted({min(values), max(values)}))


def outcome_line(outcome: Measurement | Failure | Fidelity | Calibration | Accumulation | Profiled) -> str:
    """Return the outcome of a trial, a check or a profile in a few words."""
    if isinstance(outcome, Measurement):
        return rate(outcome.samples_per_second) + ", cut as far slower" * outcome.was_cut
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


def uses(recommendation: Recommendation, path: str | None = None) -> list[tuple[str, list[str]]]:
    """Return the ways to train with the recommendation: titles, each with its lines to copy.

    `path` is the path of the recommendation's file; None is the default one of a search.
    """
    path = path or f"studies/{recommendation.search.study}/recommendation.json"
    exports = explain.export_lines(recommendation.config)
    shell = [("In the shell, before Python starts", exports)] if exports else []
    if recommendation.command_template is not None:
        by_run, command = recommendation.recommended_command(Path(path).parent)
        return [*([] if by_run else shell), ("The command", [command])]
    title, command = export_command(path)
    return [*shell, (IN_PYTHON, python_lines(recommendation, path)), (title, [command])]


def shortest_use(recommendation: Recommendation, path: str | None = None) -> list[tuple[str, list[str]]]:
    """Return the lines of `uses` for a terminal: those in Python only if they set something, without the loop."""
    set_here = () if recommendation.is_kept else ("autotune_amp.", explain.loader_line(recommendation.config))
    shown = []
    for title, lines in uses(recommendation, path):
        own = [line for line in lines if any(part in line for part in set_here)]
        shown.append((title, own if title == IN_PYTHON else lines))
    return shown


def python_lines(recommendation: Recommendation, path: str) -> list[str]:
    """Return lines of Python that train with the config, through a controller that reads `path`.

    `path` is the path of the recommendation's file. The script has to define `dataset`, `model`, `optimizer` and
    `compute_loss(model, batch)`. For lines without a controller, see `export_command`.
    """
    config, device_type = recommendation.config, recommendation.hardware.identity.type
    loader = [explain.LOADER_COMMENT, explain.loader_line(config)]
    loaded = f'autotune_amp.PrecisionController.load({json.dumps(path)}, "{device_type}")'
    if recommendation.workload is not None and recommendation.workload.is_loop:
        each = (
            ["# of each model in the state and its optimizer:", PREPARED.format("amp")]
            if config.active_variants
            else []
        )
        return [*loader, f"amp = {loaded}", *each, "train_step(state, batch, amp)"]
    loop = explain.controlled_loop("loader", explain.LOSS)
    if explain.has_accumulation(config):  # the losses of a window add up to the loss of the whole batch
        found = recommendation.evidence.accumulation
        combination = "mean" if found is None or found.verdict not in ("sum", "weighted") else found.verdict
        loss = explain.pass_loss(combination, "controller.window_size", "controller.window_share")
        loop = explain.controlled_loop("loader, weigh=count" if combination == "weighted" else "loader", loss)
        if combination == "weighted":
            counted = (found and found.weighted_by) or "what the loss is a mean over"
            loop.insert(0, f"# count(batch) is yours: of a batch, {counted}")
    prepared = [PREPARED.format("controller")] if config.active_variants else []
    return [*loader, f"controller = {loaded}", *prepared, *loop]


def export_command(path: str) -> tuple[str, str]:
    """Return a title for the export command, and the command; `path` is as in `python_lines`."""
    file = Path(path)
    study = file.parent if file.name == "recommendation.json" else file
    command = f"autotune-amp export {shell_line([study.as_posix()])} --to torch"
    return "The whole loop, or --to lightning, transformers, accelerate, deepspeed, env", command


def origin_line(path: Path, recommendation: Recommendation) -> str:
    """Return the origin of an export in one line: study, recommended setting and speed, and whether unconfirmed."""
    config, evidence = recommendation.config, recommendation.evidence
    place = path.parent if path.name == "recommendation.json" and path.parent.name else path
    doubt = "" if evidence.is_confirmed else ", unconfirmed"
    return one_line(f"{place}: {Setting.of(config)}, measured at {rate(evidence.samples_per_second)}{doubt}")

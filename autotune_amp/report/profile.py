"""A profile in words and on a terminal: what each precision is worth, where a step's time goes, what to try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.text import count, duration, flops, one_line, outcome_name, size, times

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from autotune_amp.profile.results import AmpProfile, Gap, NextStep, Part, PrecisionRow, Verdict

_PARTS = {
    "matrix_products": "matrix products",
    "slow_matrix_products": "matrix products below the machine's rate",
    "casts": "casts",
    "fp32_operations": "operations kept in fp32",
    "optimizer": "optimizer",
    "loader": "waiting for the loader",
    "idle": "idle between kernels",
    "rest": "rest of the step",
}
_LEAST_SHARE = 0.0005  # of a step; less is not worth a number
_NUM_NEXT_STEPS = 3
_AT_RATE = "matrix products at the machine's rate"
_STYLES = {"excellent": "bold green", "significant": "green", "slower": "yellow"}


def explain(profile: AmpProfile) -> str:
    """The verdict, each precision, where the time goes and what to try, as a few lines of plain text."""
    lines = [_heading(profile)]
    lines += [f"{row.precision}: {', '.join(filter(None, _cells(row)))}" for row in profile.rows]
    return "\n".join([*lines, *(f"{label}: {text}" for label, text in facts(profile))])


def facts(profile: AmpProfile) -> list[tuple[str, str]]:
    """Label and text of what the numbers come to."""
    lines = [("verdict", _verdict(profile))]
    shown = [row for row in profile.rows if row.gap is not None and row.precision in ("fp32", profile.best_precision)]
    lines += [
        ("rate", _rate(row.precision, row.gap)) for row in shown if row.gap is not None and row.gap.flops_per_step
    ]
    # The step to be mended, and where mixed precision does not pay, why not.
    gaps = {row.precision: row.gap for row in shown if row.gap is not None}
    names = dict.fromkeys((profile.gap_precision, profile.best_precision))
    lines += [("gap", _gap(name, gaps[name])) for name in names if name in gaps]
    labels = ("next step", *["then"] * (_NUM_NEXT_STEPS - 1))
    lines += [(label, next_step_line(step)) for label, step in zip(labels, profile.next_steps, strict=False)]
    if profile.trace is not None:
        lines.append(("trace", f"{profile.trace} opens at https://ui.perfetto.dev"))
    return [*lines, *(("note", one_line(note)) for note in profile.notes)]


def next_step_line(step: NextStep) -> str:
    """``waiting for the loader, 62 % (58 to 66) of a step in bf16: num_workers=2; at most 2.63x if it vanished``."""
    share = f"{_percent(step)} of a step in {step.precision}"
    return f"{_PARTS[step.part]}, {share}: {step.action}; at most {times(step.max_speedup)} if it vanished"


def print_profile(profile: AmpProfile, console: Console) -> None:
    """The precisions, where a step's time goes in fp32 and in the best of the others, and what to try."""
    from rich.panel import Panel
    from rich.text import Text

    from autotune_amp.report.terminal import grid

    console.print(Text(_heading(profile)))
    console.print(_rows(profile))
    if any(row.gap is not None for row in profile.rows):
        console.print(_parts(profile))
    title = Text("Does mixed precision pay here?", "bold")
    console.print(Panel(grid(facts(profile)), title=title, title_align="left", border_style="green"))


def _rows(profile: AmpProfile) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("precision", no_wrap=True)
    for name in ("step", "speed-up", "memory"):  # where it is narrow the speed-up and the verdict share what there is
        table.add_column(name, justify="right", no_wrap=name != "speed-up")
    table.add_column("verdict", overflow="fold")
    for row in profile.rows:
        step, speedup, memory, verdict = _cells(row)
        style = "dim" if row.step_seconds is None else _STYLES.get(row.verdict or "", "")
        table.add_row(row.precision, step or "-", speedup or "-", memory or "-", Text(verdict), style=style)
    return table


def _parts(profile: AmpProfile) -> Table:
    from rich import box
    from rich.table import Table

    shown = {
        row.precision: row.gap
        for row in profile.rows
        if row.gap is not None and row.precision in ("fp32", profile.best_precision)
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("where a step's time goes")
    for precision in shown:
        table.add_column(precision, justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for name, words in _PARTS.items():
        found = [next((part for part in gap.parts if part.name == name), None) for gap in shown.values()]
        if any(found):
            has_rate = name == "matrix_products" and any(gap.share("slow_matrix_products") for gap in shown.values())
            cells = [cell for part in found for cell in _part_cells(part)]
            table.add_row(_AT_RATE if has_rate else words, *cells)
    return table


def _part_cells(part: Part | None) -> tuple[str, str]:
    if part is None or part.share < _LEAST_SHARE:
        return "-", ""
    return duration(part.seconds), f"{100 * part.share:.0f} %"


def _heading(profile: AmpProfile) -> str:
    size = count(profile.batch_size, "sample")
    nums = [row.num_steps for row in profile.rows if row.num_steps and row.failure is None and not row.was_cut] or [0]
    num = str(max(nums)) if len(set(nums)) == 1 else f"{min(nums)} to {max(nums)}"
    if profile.accumulation_steps == 1:
        what = f"{num} {'batch' if num == '1' else 'batches'} of {size}"
    else:
        what = f"{num} {'step' if num == '1' else 'steps'} of {profile.accumulation_steps} batches of {size}"
    return (
        f"{one_line(profile.workload)}: {what} in each precision on {profile.device} ({one_line(profile.device_name)})"
    )


def _cells(row: PrecisionRow) -> tuple[str, str, str, str]:
    """Step, speed-up, memory and verdict; empty where there is none."""
    speedup = ""
    if row.speedup is not None and row.speedup_interval is not None:
        low, high = row.speedup_interval
        speedup = f"{times(row.speedup)} ({low:.2f} to {high:.2f})"
    elif row.speedup is not None:
        speedup = _at_most(row.speedup)
    step = "" if row.step_seconds is None else duration(row.step_seconds)
    memory = "" if row.peak_memory_bytes is None else size(row.peak_memory_bytes)
    return step, speedup, memory, _row_verdict(row)


def _at_most(speedup: float) -> str:
    return f"<= {times(speedup)}" if speedup >= 0.01 else "< 0.01x"


def _row_verdict(row: PrecisionRow) -> str:
    if row.reason is not None:
        reason = one_line(row.reason)
        return reason if row.failure is None else f"{outcome_name(row.failure)}: {reason}"
    if row.precision == "fp32":
        return "reference"
    if row.verdict is None:
        return "no fp32 to compare with"
    return f"{row.verdict}{_doubt(row)}" if _doubt(row) else _words(row.verdict)


def _words(verdict: Verdict) -> str:
    return "slower: leave it off" if verdict == "slower" else verdict


def _doubt(row: PrecisionRow) -> str:
    if row.verdicts is None or len(set(row.verdicts)) == 1:
        return ""
    low, high = row.verdicts
    return f"; the interval spans {low} to {high}"


def _verdict(profile: AmpProfile) -> str:
    if profile.best_precision is None or profile.speedup is None or profile.verdict is None:
        reasons = "; ".join(f"{row.precision}: {_row_verdict(row)}" for row in profile.rows if row.reason)
        return f"none: {reasons or 'only fp32 was run'}"
    row = profile.row(profile.best_precision)
    name, how = row.precision, _words(profile.verdict)
    if row.speedup_interval is None:
        return f"{name}: {how}, {_at_most(profile.speedup)} over fp32"
    low, high = row.speedup_interval
    speedup = f"{times(profile.speedup)} ({times(low)} to {times(high)}) over fp32"
    if not _doubt(row):
        return f"{name}: {how}, {speedup}"
    return f"{name}: {profile.verdict}, {speedup}{_doubt(row)}"


def _rate(precision: str, gap: Gap) -> str:
    attained = gap.attained_flops_per_second or 0.0
    if gap.machine_flops_per_second is None:
        return f"{precision}: a step attains {flops(attained)}; the machine's own rate could not be measured"
    share = 100 * attained / gap.machine_flops_per_second
    return (
        f"{precision}: {flops(gap.machine_flops_per_second)} by the machine, {flops(attained)} by a step, {share:.2g} %"
    )


def _percent(part: Part | NextStep) -> str:
    """Its share with the least and the largest, where they differ."""
    least, largest = (f"{100 * share:.0f}" for share in part.share_range)
    return f"{100 * part.share:.0f} %" + (f" ({least} to {largest})" if least != largest else "")


def _gap(precision: str, gap: Gap) -> str:
    largest = sorted((part for part in gap.parts if part.name != "matrix_products"), key=lambda part: -part.seconds)
    named = [
        f"{_percent(part)} {_PARTS[part.name]}" + (f" ({', '.join(part.largest)})" if part.largest else "")
        for part in largest
        if part.share >= 0.01
    ]
    return f"{precision}: {', '.join(named)}" if named else f"{precision}: none, it is all matrix products"

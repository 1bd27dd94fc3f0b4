"""Commands that examine a machine or a model without a search: check, probe, profile, fidelity, memory.

Each function is a command: its docstring is the command's help, and it returns the bytes for standard output, `check`
with an exit code. An `AutotuneAmpError` is reported by the caller.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune_amp.cli.app import CommandOutput, Device, File, Json, Precision, Quiet, Target, Value, option
from autotune_amp.core.errors import WILL_BREAK_EXIT_CODE
from autotune_amp.report.output import json_document, render_to_bytes

if TYPE_CHECKING:
    from autotune_amp.core.command_template import CommandTemplate

BatchSize = Annotated[int | None, option("N", "Samples in a batch. Default: the batch size in use today.")]


def _command_or_target(
    context: typer.Context, target: str | None, value: list[str] | None, file: list[str] | None
) -> CommandTemplate | str | None:
    """Return the training command after ``--``, or the target if there is none."""
    from autotune_amp.core.command_template import from_command_line

    return from_command_line(context.obj, target, value or [], file or [], is_dry=False) or target


def check(
    context: typer.Context,
    target: Target = None,
    device: Annotated[
        str,
        typer.Option(
            "--for",
            help="Device whose autocast rules to check: cuda, cpu or mps. It need not be present.",
            metavar="DEVICE",
        ),
    ] = "cuda",
    batch_size: BatchSize = None,
    value: Value = None,
    file: File = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> CommandOutput:
    """List the operations that autocast would break or degrade, each with its fix.

    Checks a TARGET, or a training command: check -- python train.py. Runs one fp32 step, of a TARGET on the CPU, and
    reads your source; the device itself is not needed. The exit code is 4 if an operation will break.
    """
    from autotune_amp.api import check_workload

    report = check_workload(
        _command_or_target(context, target, value, file), device=device, batch_size=batch_size, quiet=quiet
    )
    exit_code = WILL_BREAK_EXIT_CODE if report.will_break else 0
    if as_json:
        return CommandOutput(f"{report.to_json()}\n".encode(), exit_code)
    from autotune_amp.report.diagnostics import print_check

    return CommandOutput(render_to_bytes(lambda console: print_check(report, console)), exit_code)


def probe(device: Device = "auto", as_json: Json = False) -> bytes:
    """Show the device and its precisions.

    Prints device, driver and memory, and for each precision its measured rate and whether it is native, emulated or
    unsupported, with the reason.
    """
    from rich.console import Console

    from autotune_amp.hardware import probe as probe_hardware

    with Console(stderr=True).status("Probing the device"):
        hardware = probe_hardware(device)
    if as_json:
        return json_document({"format": 1, "hardware": hardware})
    from autotune_amp.report.terminal import hardware_table

    return render_to_bytes(lambda console: hardware_table(hardware, console))


def profile(
    context: typer.Context,
    target: Target = None,
    batches: Annotated[int, option("N", "Training steps to time in each precision.")] = 10,
    device: Device = "auto",
    precision: Precision = None,
    batch_size: BatchSize = None,
    trace: Annotated[
        Path | None, option("FILE", "Write a trace of the profiled steps to this file, for ui.perfetto.dev.")
    ] = None,
    value: Value = None,
    file: File = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Measure whether mixed precision is faster here, and why.

    Profiles a TARGET, or a training command: profile -- python train.py --amp {precision=fp32}. Compares bf16 and fp16
    with fp32 on the same batches: speed-up, memory, the parts of a step's time, and advice.
    """
    from autotune_amp.api import profile_amp

    report = profile_amp(
        _command_or_target(context, target, value, file),
        batches,
        device=device,
        precision=precision,
        batch_size=batch_size,
        trace=trace,
        quiet=quiet,
    )
    if as_json:
        return f"{report.to_json()}\n".encode()
    from autotune_amp.report.diagnostics import print_profile

    return render_to_bytes(lambda console: print_profile(report, console))


def fidelity(
    context: typer.Context,
    target: Target = None,
    precision: Annotated[str, option("PRECISION", "Precision to compare with fp32: tf32, bf16, fp16 or fp8.")] = "bf16",
    batch_size: Annotated[
        int | None, option("N", "Samples in a batch. Default: the workload's batch size, 16 at most.")
    ] = None,
    device: Device = "auto",
    pin: Annotated[list[str] | None, option("MODULE", "Keep this module in fp32. Repeatable.")] = None,
    seed: Annotated[int, option("N", "Seed of the initial weights, the batches and other random numbers.")] = 0,
    budget: Annotated[float, option("SECONDS", "Longest duration in seconds.")] = 110.0,
    value: Value = None,
    file: File = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Check whether training in a precision learns as well as in fp32.

    Checks a TARGET, or a training command: fidelity -- python train.py --amp {precision=fp32}. Compares one step and a
    short training run in both, from the same weights and batches; of a command the gradients of six steps. Prints the
    verdict, its numbers, the modules that cause the damage, and those to keep in fp32. The exit code is 0 for every
    verdict.
    """
    from autotune_amp.api import check_fidelity

    result = check_fidelity(
        _command_or_target(context, target, value, file),
        precision,
        batch_size=batch_size,
        device=device,
        pinned_modules=pin or [],
        seed=seed,
        budget=budget,
        quiet=quiet,
    )
    if as_json:
        return json_document({"format": 1, "fidelity": result})
    from autotune_amp.report.diagnostics import print_fidelity

    return render_to_bytes(lambda console: print_fidelity(result, console))


def memory(
    context: typer.Context,
    target: Target = None,
    batch_size: BatchSize = None,
    precision: Annotated[
        list[str] | None, option("PRECISION", "Measure only this precision: fp32, tf32, bf16 or fp16. Repeatable.")
    ] = None,
    device: Device = "auto",
    fit: Annotated[
        str | None,
        option("SIZE", "Find the largest batch size that fits into this much memory, such as 16GiB; takes minutes."),
    ] = None,
    snapshot: Annotated[
        Path | None, option("FILE", "On CUDA, write PyTorch's memory snapshot of the first precision to this file.")
    ] = None,
    value: Value = None,
    file: File = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Measure the memory of a training step by its parts, and show how to reduce it.

    Measures a TARGET, or a training command: memory -- python train.py --bs {batch_size=32}. Prints parameters,
    gradients, optimizer state and each module's activations in each precision; with --fit the largest batch size that
    fits.
    """
    from autotune_amp.api import profile_memory

    report = profile_memory(
        _command_or_target(context, target, value, file),
        batch_size=batch_size,
        precision=precision,
        device=device,
        fit=fit,
        snapshot=snapshot,
        quiet=quiet,
    )
    if as_json:
        return f"{report.to_json()}\n".encode()
    from autotune_amp.report.diagnostics import print_memory

    return render_to_bytes(lambda console: print_memory(report, console))

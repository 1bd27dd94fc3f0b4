"""Commands that judge a machine or a model without a search: check, probe, profile, fidelity, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.cli.options import CommandOutput, Device, Json, Precision, Quiet, Target, option
from autotune_amp.core.errors import WILL_BREAK_EXIT_CODE
from autotune_amp.report.output import json_document, render_to_bytes

BatchSize = Annotated[int | None, option("N", "Samples in a batch. Without it, the workload's own.")]


def check(
    target: Target = None,
    device: Annotated[
        str, typer.Option("--for", help="Whose autocast: cuda, cpu or mps. It need not be here.", metavar="DEVICE")
    ] = "cuda",
    batch_size: BatchSize = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> CommandOutput:
    """Name what will break or hurt under a device's autocast, and the line that mends it.

    One fp32 step on the CPU and a look at the source; no such device is needed. Exit code 4 where something will break.
    """
    from autotune_amp.api import check_workload

    found = check_workload(target, device=device, batch_size=batch_size, quiet=quiet)
    exit_code = WILL_BREAK_EXIT_CODE if found.will_break else 0
    if as_json:
        return CommandOutput(f"{found.to_json()}\n".encode(), exit_code)
    from autotune_amp.report.diagnostics import print_check

    return CommandOutput(render_to_bytes(lambda console: print_check(found, console)), exit_code)


def probe(device: Device = "auto", as_json: Json = False) -> bytes:
    """Say what this machine can do, and why not more.

    Device, driver, memory, and each precision as native, emulated or unsupported with a measured rate.
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
    target: Target = None,
    batches: Annotated[int, option("N", "Training steps to time in each precision.")] = 10,
    device: Device = "auto",
    precision: Precision = None,
    batch_size: BatchSize = None,
    trace: Annotated[Path | None, option("FILE", "Write the profiled steps here, for ui.perfetto.dev.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Say whether mixed precision pays here, and why.

    fp32 against bf16 and fp16 on the same batches: speed-up, memory, where a step's time goes, what to try next.
    """
    from autotune_amp.api import profile_amp

    found = profile_amp(
        target, batches, device=device, precision=precision, batch_size=batch_size, trace=trace, quiet=quiet
    )
    if as_json:
        return f"{found.to_json()}\n".encode()
    from autotune_amp.report.diagnostics import print_profile

    return render_to_bytes(lambda console: print_profile(found, console))


def fidelity(
    target: Target = None,
    precision: Annotated[str, option("PRECISION", "What to hold against fp32: tf32, bf16, fp16 or fp8.")] = "bf16",
    batch_size: Annotated[
        int | None, option("N", "Samples in a batch. Without it, the workload's own, 16 at most.")
    ] = None,
    device: Device = "auto",
    pin: Annotated[list[str] | None, option("MODULE", "Keep this module in fp32 meanwhile. Repeatable.")] = None,
    seed: Annotated[int, option("N", "Seed of the first weights, batches and draws.")] = 0,
    budget: Annotated[float, option("SECONDS", "Seconds that everything may take.")] = 110.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Say whether training in a precision learns what fp32 learns.

    One step and a short training in both, from the same weights on the same batches: a verdict, the numbers behind it,
    which modules are at fault, and which ones heal it in fp32. Whatever the verdict, the exit code is 0.
    """
    from autotune_amp.api import check_fidelity

    found = check_fidelity(
        target,
        precision,
        batch_size=batch_size,
        device=device,
        pinned_modules=pin or [],
        seed=seed,
        budget=budget,
        quiet=quiet,
    )
    if as_json:
        return json_document({"format": 1, "fidelity": found})
    from autotune_amp.report.diagnostics import print_fidelity

    return render_to_bytes(lambda console: print_fidelity(found, console))


def memory(
    target: Target = None,
    batch_size: BatchSize = None,
    precision: Annotated[
        list[str] | None, option("PRECISION", "Measure only this precision: fp32, tf32, bf16 or fp16. Repeatable.")
    ] = None,
    device: Device = "auto",
    fit: Annotated[
        str | None, option("SIZE", "Say which batch fits into this much memory, such as 16GiB; takes minutes.")
    ] = None,
    snapshot: Annotated[
        Path | None, option("FILE", "On CUDA, write PyTorch's own memory snapshot here, of the first precision.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Say what fills the memory of a training step, and what would free most.

    Parameters, gradients, optimizer state and the activations of each module, in each precision; with --fit the
    largest batch that fits into a memory.
    """
    from autotune_amp.api import profile_memory

    found = profile_memory(
        target, batch_size=batch_size, precision=precision, device=device, fit=fit, snapshot=snapshot, quiet=quiet
    )
    if as_json:
        return f"{found.to_json()}\n".encode()
    from autotune_amp.report.diagnostics import print_memory

    return render_to_bytes(lambda console: print_memory(found, console))

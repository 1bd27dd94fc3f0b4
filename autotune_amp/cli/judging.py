"""Commands that judge a machine or a model without a search: check, probe, profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.cli.options import Answer, Device, Json, Precision, Quiet, Target, option
from autotune_amp.core.errors import WILL_BREAK_EXIT_CODE
from autotune_amp.report.output import json_document, rendered


def check(
    target: Target = None,
    device: Annotated[
        str, typer.Option("--for", help="Whose autocast: cuda, cpu or mps. It need not be here.", metavar="DEVICE")
    ] = "cuda",
    batch_size: Annotated[int | None, option("N", "Samples in the step. Without it, the workload's own.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> Answer:
    """Name what will break or hurt under a device's autocast, and the line that mends it.

    One fp32 step on the CPU and a look at the source; no such device is needed. Exit code 4 where something will break.
    """
    from autotune_amp.api import check_workload

    found = check_workload(target, device=device, batch_size=batch_size, quiet=quiet)
    exit_code = WILL_BREAK_EXIT_CODE if found.will_break else 0
    if as_json:
        return Answer(f"{found.to_json()}\n".encode(), exit_code)
    from autotune_amp.report.terminal import print_check

    return Answer(rendered(lambda console: print_check(found, console)), exit_code)


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

    return rendered(lambda console: hardware_table(hardware, console))


def profile(
    target: Target = None,
    batches: Annotated[int, option("N", "Training steps to time in each precision.")] = 10,
    device: Device = "auto",
    precision: Precision = None,
    batch_size: Annotated[int | None, option("N", "Samples in a batch. Without it, the workload's own.")] = None,
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
    from autotune_amp.report.terminal import print_profile

    return rendered(lambda console: print_profile(found, console))

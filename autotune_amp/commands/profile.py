"""`autotune-amp profile`: does mixed precision pay here?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.commands.shared import Device, Json, Target, Work, rendered


def profile(
    target: Target = None,
    batches: Annotated[int, typer.Option(help="Training steps to time in each precision.", metavar="N")] = 10,
    device: Device = "auto",
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="Hold only this precision against fp32: tf32, bf16 or fp16. Repeatable.", metavar="PRECISION"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples in a batch. Without it, the workload's own.", metavar="N")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the profiled steps to this file, for ui.perfetto.dev.", metavar="FILE")
    ] = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> Work:
    """Say whether mixed precision pays here, and why.

    fp32 against bf16 and fp16 on the same batches: speed-up, memory, where a step's time goes, what to try next.
    """

    def work() -> bytes:
        from autotune_amp.api import profile_amp

        found = profile_amp(
            target, batches, device=device, precision=precision, batch_size=batch_size, trace=trace, quiet=quiet
        )
        if as_json:
            return f"{found.to_json()}\n".encode()
        from autotune_amp.report.profile import print_profile

        return rendered(lambda console: print_profile(found, console))

    return work

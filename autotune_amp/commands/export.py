"""`autotune-amp export`: a recommendation as a framework takes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune_amp.commands.shared import Folder, Json, Work, recommendation_file

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation


def export(
    to: Annotated[
        str,
        typer.Option(
            help="lightning, transformers, accelerate, deepspeed, torch, or env for the shell.", metavar="TARGET"
        ),
    ],
    folder: Folder = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write it to this file. With --to accelerate, a .yaml is the file of `accelerate launch "
            "--config_file`.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Json = False,
) -> Work:
    """Print a recommendation as text to paste into a training script, or write it to a file and print its path.

    A file is written over an earlier export and over no other file.
    """

    def work() -> bytes:
        from autotune_amp.core.recommendation import Recommendation
        from autotune_amp.integrations.export import accelerate_file, setting_of
        from autotune_amp.integrations.export import export as exported

        path = recommendation_file(folder)
        recommendation = Recommendation.load(path)
        setting = setting_of(recommendation, _origin(path, recommendation))
        is_launch_file = to == "accelerate" and out is not None and out.suffix in (".yaml", ".yml")
        made = accelerate_file(setting) if is_launch_file else exported(setting, to)
        if out is not None:
            _write(out, made.text)
        for note in made.notes:
            sys.stderr.write(f"Note: {note}\n")
        if as_json:
            import msgspec

            return msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"
        return (made.text if out is None else f"{out.as_posix()}\n").encode()

    return work


def _write(path: Path, text: str) -> None:
    """Write over an earlier export; raises `StudyError` where that cannot be or another file is there."""
    from autotune_amp.core.errors import StudyError
    from autotune_amp.core.recommendation import write_atomically
    from autotune_amp.integrations.export import is_exported

    elsewhere = "Name another file with --out, or leave --out away and paste what is printed."
    try:
        is_free = is_exported(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        is_free = True
    except OSError as error:
        raise StudyError(f"{path} cannot be written: {error.strerror}.", elsewhere) from error
    if not is_free:
        raise StudyError(f"{path} is there and is no export of autotune-amp's: it is left alone.", elsewhere)
    write_atomically(path, text)


def _origin(path: Path, recommendation: Recommendation) -> str:
    """Which study, what it recommends, and how sure that is."""
    from autotune_amp.core.setting import Setting
    from autotune_amp.core.text import one_line, rate

    config, evidence = recommendation.config, recommendation.evidence
    candidate = Setting(
        precision=config.precision, batch_size=config.batch_size, accumulation_steps=config.accumulation_steps
    )
    place = path.parent if path.name == "recommendation.json" and path.parent.name else path
    doubt = "" if evidence.is_confirmed else ", unconfirmed"
    return one_line(f"{place}: {candidate}, measured at {rate(evidence.samples_per_second)}{doubt}")

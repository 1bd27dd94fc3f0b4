"""The log of a training run that met an overflow, a pin, a demotion and a resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.run_log import BeginLine, Line, MoveLine, RunLog, SampleLine

CONFIG = AmpConfig(precision="fp16", batch_size=8, loss_scale=LossScale(), fallback=["bf16", "fp32"])
REASON = "8 of 200 steps skipped <b>& more</b>"


def _line(update: int, precision: Precision, scale: float | None, num_skips: int) -> dict[str, Any]:
    num_steps = update - num_skips
    counts = {"num_steps": num_steps, "num_skips": num_skips, "num_overflows": num_skips, "num_bad_batches": 0}
    rung = ("fp16", "bf16", "fp32").index(precision)
    known = {"run_id": "made", "update": update, "precision": precision, "rung": rung, "scale": scale, "num_moves": 0}
    return known | counts


def begin(
    update: int = 0, precision: Precision = "fp16", scale: float | None = 65536.0, num_skips: int = 0
) -> BeginLine:
    made: dict[str, Any] = {"is_resumed": update > 0, "device": "cuda", "rank": 0, "num_ranks": 2}
    line = _line(update, precision, scale, num_skips)
    return BeginLine(**line, **made, time="2026-01-01T00:00:00+00:00", config=CONFIG)


def sample(update: int, scale: float | None, num_skips: int, precision: Precision = "fp16", **loss: Any) -> SampleLine:
    return SampleLine(**_line(update, precision, scale, num_skips), **{"loss": 2.0 / (1 + update / 100)} | loss)


def move(update: int, kind: str, before: Precision, after: Precision, num_skips: int, **fields: Any) -> MoveLine:
    line = _line(update, after, 512.0 if after == "fp16" else None, num_skips)
    return MoveLine(**line, kind=kind, before=before, after=after, **{"reason": REASON, "pinned_modules": ()} | fields)


def made_run(path: Path) -> Path:
    """fp16 until 400 with an overflow at 100, a pin at 300; bf16 from 400 on, resumed at 512."""
    lines: list[Line] = [
        begin(),
        *(sample(update, 65536.0, 0) for update in (64,)),
        *(sample(update, 32768.0, 1) for update in (100, 128, 192, 256)),
        move(300, "pin", "fp16", "fp16", 5, pinned_modules=("encoder.wo",)),
        sample(320, 512.0, 5),
        sample(384, 512.0, 5, loss=None),
        move(400, "demotion", "fp16", "bf16", 9),
        *(sample(update, None, 9, "bf16") for update in (448, 512)),
        begin(512, "bf16", None, 9),
        *(sample(update, None, 9, "bf16") for update in (576, 640)),
    ]
    log = RunLog(path)
    for line in lines:
        log.write(line)
    return path

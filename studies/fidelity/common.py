"""What the scripts of this study share: the cases of a zoo, subjects made from them, and resumable raw files."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from case import Case

import autotune_amp
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.passes import CheckInputs
from autotune_amp.precision import torch_state
from autotune_amp.trial import data
from autotune_amp.trial.context import make_model, make_optimizer

RAW = Path(__file__).parent / "raw"
ZOOS = {  # the module, and the cases in it
    "healthy": ("zoo_healthy", ("HEALTHY",)),
    "sick": ("zoo_sick", ("SICK",)),
    "sick_later": ("zoo_sick_later", ("SICK_LATER",)),
    "held_out": ("zoo_held_out", ("HELD_OUT_HEALTHY", "HELD_OUT_SICK")),
    "bias": ("zoo_sick_bias", ("BIAS",)),
    "vanishing": ("zoo_sick_vanishing", ("VANISHING",)),
    "field": ("zoo_field", ("FIELD",)),
}


def cases(zoo: str, only: Sequence[str] = ()) -> list[Case]:
    """Imported only when asked for: the held-out cases stay unseen until the thresholds are frozen."""
    module, names = ZOOS[zoo]
    found = [case for name in names for case in getattr(importlib.import_module(module), name)]
    return [case for case in found if not only or case.name in only]


def expected(case: Case, precision: Precision) -> str:
    """What a true check says of it; unsupported on the CPU at least."""
    if precision in case.sick_in:
        return "sick"
    return "unsupported" if precision in case.is_unsupported_in else "healthy"


def quieten() -> None:
    """One thread, and none of what torch and transformers say at each of thousands of passes."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)


def subject(case: Case, seed: int, num_batches: int, device: torch.device) -> CheckInputs:
    """The case's model and batches, made after seeding, on the device."""
    torch_state.seed(seed)
    workload = case.make()
    model = make_model(workload).to(device)
    stream = data.stream(workload.data, case.batch_size)
    batches = [data.move_batch(batch, device) for batch in itertools.islice(stream, num_batches)]
    return CheckInputs(model, workload.loss, batches, lambda model: make_optimizer(workload, model), device, seed)


def code() -> str:
    """Which numerics gave the answers: a digest of their sources, the thresholds among them."""
    folder = Path(autotune_amp.__file__).parent
    sources = sorted(path for name in ("numerics", "precision") for path in (folder / name).glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class RawFile:
    """Outcomes, one JSON line each, appended at once; what is there already is not measured again.

    Numbers that are not finite stand as Python's json writes them: NaN, Infinity.
    """

    def __init__(self, path: Path, keys: tuple[str, ...]) -> None:
        self._path, self._keys = path, keys
        self._done = {self._key({"seed": 0, **row}) for row in read(path)}
        path.parent.mkdir(exist_ok=True)

    def has(self, **key: Any) -> bool:
        return self._key(key) in self._done

    def append(self, row: dict[str, Any]) -> None:
        """Append the row in one write, so that several processes can append to the file."""
        self._done.add(self._key(row))
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(map(repr, (row[key] for key in self._keys)))


def raw_path(name: str, device: torch.device) -> Path:
    """raw/<name>.jsonl, and one of its own for each kind of accelerator."""
    return RAW / f"{name}{'' if device.type == 'cpu' else '_' + device.type}.jsonl"


def said(error: Exception) -> str:
    """Its kind and first line."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

"""SearchOptions: what the user asked for, checked before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import get_args

import msgspec

from autotune_amp.config import PRECISIONS, Precision
from autotune_amp.errors import InvalidRequestError

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options; `from_user` makes one from what a user typed or passed.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may take.
    """

    budget_seconds: float = 110.0
    max_trials: int | None = None
    device: str = "auto"
    precisions: tuple[Precision, ...] | None = None
    batch_size: tuple[int, int] | None = None
    effective_batch_size: int | None = None
    baseline: tuple[Precision, int] | None = None
    memory_fraction: float = 0.9
    study: str | None = None
    out: str = "studies"
    storage: str | None = None
    seed: int = 0

    @classmethod
    def from_user(
        cls,
        *,
        budget: float = 110.0,
        trials: int | None = None,
        device: str = "auto",
        precision: Sequence[str] | str | None = None,
        batch_size: str | tuple[int, int] | None = None,
        effective_batch_size: int | None = None,
        baseline: str | tuple[str, int] | None = None,
        memory_fraction: float = 0.9,
        study: str | None = None,
        out: str = "studies",
        storage: str | None = None,
        seed: int = 0,
    ) -> SearchOptions:
        """Check every value; raises `InvalidRequestError` naming the option, what was given and what would do."""
        _check(0 < budget < math.inf, "budget", budget, "a number of seconds above 0")
        _check(trials is None or trials >= 1, "trials", trials, "a whole number from 1 up")
        _check(bool(_DEVICE.fullmatch(device)), "device", device, "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N")
        _check(0 < memory_fraction <= 1, "memory-fraction", memory_fraction, "a share above 0 and at most 1")
        _check(
            study is None or (bool(re.fullmatch(r"[\w.-]+", study)) and study.strip(".") != ""),
            "study",
            study,
            "a folder name of letters, digits, '.', '_' and '-'",
        )
        _check(
            effective_batch_size is None or effective_batch_size >= 1,
            "effective-batch-size",
            effective_batch_size,
            "a whole number from 1 up",
        )
        return cls(
            budget_seconds=float(budget),
            max_trials=trials,
            device=device,
            precisions=_precisions(precision),
            batch_size=_batch_range(batch_size),
            effective_batch_size=effective_batch_size,
            baseline=_baseline(baseline),
            memory_fraction=float(memory_fraction),
            study=study,
            out=out,
            storage=storage,
            seed=seed,
        )


def _check(condition: bool, option: str, given: object, wanted: str) -> None:
    if not condition:
        raise InvalidRequestError(f"--{option} is {given!r}; it must be {wanted}.", f"Give --{option} {wanted}.")


def _precision(option: str, name: str) -> Precision:
    for precision in PRECISIONS:
        if precision == name:
            return precision
    raise InvalidRequestError(
        f"--{option} is {name!r}; it must be one of {', '.join(get_args(Precision))}.", "Pick one of the names given."
    )


def _precisions(given: Sequence[str] | str | None) -> tuple[Precision, ...] | None:
    if not given:
        return None
    names = (given,) if isinstance(given, str) else tuple(given)
    return tuple(dict.fromkeys(_precision("precision", name) for name in names))


def _batch_range(given: str | tuple[int, int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", given if isinstance(given, str) else ":".join(map(str, given)))
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    _check(1 <= low <= high, "batch-size", given, "LOW:HIGH with 1 <= LOW <= HIGH, such as 8:256")
    return low, high


def _baseline(given: str | tuple[str, int] | None) -> tuple[Precision, int] | None:
    if given is None:
        return None
    match = re.fullmatch(r"(\w+):(\d+)", given if isinstance(given, str) else ":".join(map(str, given)))
    if match is None or int(match[2]) < 1:
        raise InvalidRequestError(
            f"--baseline is {given!r}; it must be PRECISION:BATCH.", "Give for example --baseline fp32:32."
        )
    return _precision("baseline", match[1]), int(match[2])

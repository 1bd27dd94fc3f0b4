"""SearchOptions: what the user asked for, checked before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import get_args

import msgspec

from autotune_amp.config import PRECISIONS, Precision
from autotune_amp.errors import InvalidRequestError

SEED_LIMIT = 2**32 - 10_000  # numpy's, with room for resumed trials, which add their number to the seed
MAX_STEPS = 1_000_000  # a replay holds a number for each, and takes up to 0.1 s then

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
_NAME = re.compile(r"[\w.-]+")
_RANGE = re.compile(r"(\d+):(\d+)")
_BASELINE = re.compile(r"(\w+):(\d+)")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options; `from_user` makes one from what a user typed or passed.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may take, `num_steps` the optimizer steps of the training to come,
    over which a loss scale is judged.
    """

    budget_seconds: float = 110.0
    max_trials: int | None = None
    device: str = "auto"
    precisions: tuple[Precision, ...] | None = None
    batch_size: tuple[int, int] | None = None
    effective_batch_size: int | None = None
    baseline: tuple[Precision, int] | None = None
    memory_fraction: float = 0.9
    num_steps: int = 10_000
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
        steps: int = 10_000,
        study: str | None = None,
        out: str = "studies",
        storage: str | None = None,
        seed: int = 0,
    ) -> SearchOptions:
        """Check every value; raises `InvalidRequestError` naming the option, what was given and what would do."""
        _check(_is_number(budget) and 0 < budget < math.inf, "budget", budget, "a number of seconds above 0")
        _check(_is_count(trials), "trials", trials, "a whole number from 1 up")
        _check(_matches(_DEVICE, device), "device", device, "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N")
        _check(
            _is_number(memory_fraction) and 0 < memory_fraction <= 1,
            "memory-fraction",
            memory_fraction,
            "a share above 0 and at most 1",
        )
        _check(_is_whole(steps) and 1 <= steps <= MAX_STEPS, "steps", steps, f"a whole number from 1 to {MAX_STEPS}")
        _check(
            study is None or (_matches(_NAME, study) and study.strip(".") != ""),
            "study",
            study,
            "a folder name of letters, digits, '.', '_' and '-'",
        )
        _check(
            _is_count(effective_batch_size), "effective-batch-size", effective_batch_size, "a whole number from 1 up"
        )
        _check(isinstance(out, str), "out", out, "a folder's path, as a string")
        _check(storage is None or isinstance(storage, str), "storage", storage, "an Optuna storage URL, as a string")
        _check(_is_whole(seed) and 0 <= seed < SEED_LIMIT, "seed", seed, f"a whole number from 0 to {SEED_LIMIT - 1}")
        return cls(
            budget_seconds=float(budget),
            max_trials=trials,
            device=device,
            precisions=_precisions(precision),
            batch_size=_batch_range(batch_size),
            effective_batch_size=effective_batch_size,
            baseline=_baseline(baseline),
            memory_fraction=float(memory_fraction),
            num_steps=steps,
            study=study,
            out=out,
            storage=storage,
            seed=seed,
        )


def _check(condition: bool, option: str, given: object, wanted: str) -> None:
    if not condition:
        raise InvalidRequestError(f"--{option} is {given!r}; it must be {wanted}.", f"Give --{option} {wanted}.")


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_number(given: object) -> bool:
    return isinstance(given, float) or _is_whole(given)


def _is_count(given: int | None) -> bool:
    return given is None or (_is_whole(given) and given >= 1)


def _matches(pattern: re.Pattern[str], given: object) -> bool:
    return isinstance(given, str) and pattern.fullmatch(given) is not None


def _pair(pattern: re.Pattern[str], given: object) -> re.Match[str] | None:
    """What matches of "A:B", or of a pair of the two."""
    if isinstance(given, (tuple, list)):
        given = ":".join(map(str, given))
    return pattern.fullmatch(given) if isinstance(given, str) else None


def _precision(option: str, name: str) -> Precision:
    for precision in PRECISIONS:
        if precision == name:
            return precision
    raise InvalidRequestError(
        f"--{option} is {name!r}; it must be one of {', '.join(get_args(Precision))}.", "Pick one of the names given."
    )


def _precisions(given: Sequence[str] | str | None) -> tuple[Precision, ...] | None:
    names = (given,) if isinstance(given, str) else given
    if names is None or (isinstance(names, Sequence) and not names):
        return None
    _check(isinstance(names, Sequence), "precision", given, "a name, or several in a list")
    return tuple(dict.fromkeys(_precision("precision", name) for name in names))


def _batch_range(given: str | tuple[int, int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    match = _pair(_RANGE, given)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    _check(1 <= low <= high, "batch-size", given, "LOW:HIGH with 1 <= LOW <= HIGH, such as 8:256")
    return low, high


def _baseline(given: str | tuple[str, int] | None) -> tuple[Precision, int] | None:
    if given is None:
        return None
    match = _pair(_BASELINE, given)
    if match is None or int(match[2]) < 1:
        raise InvalidRequestError(
            f"--baseline is {given!r}; it must be PRECISION:BATCH.", "Give for example --baseline fp32:32."
        )
    return _precision("baseline", match[1]), int(match[2])

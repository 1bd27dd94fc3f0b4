"""SearchOptions: what the user asked for, checked before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec

from autotune_amp.core.dimensions import PRECISIONS, Precision
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import Objective

SEED_LIMIT = 2**32 - 10_000  # numpy's, with room for resumed trials, which add their number to the seed
DEFAULT_NUM_STEPS = 10_000
MAX_STEPS = 1_000_000  # a replay holds a number for each, and takes up to 0.1 s then

# What changes nothing of what is measured, only what is chosen and said: a finished search is ranked again for these.
RANKING = ("objective", "num_steps", "num_samples", "price_per_hour")

Name = TypeVar("Name")
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")
_NAME = re.compile(r"[\w.-]+")
_RANGE = re.compile(r"(\d+):(\d+)")
_BASELINE = re.compile(r"(\w+):(\d+)")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options; `from_user` makes one from what a user typed or passed.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may take. `effective_batch_size` is that of all `num_ranks` together;
    None is what the data comes with, "free" none at all. The training to come has `num_steps` optimizer steps or
    `num_samples` samples: a loss scale is judged over them, `DEFAULT_NUM_STEPS` where neither is given. `objective`,
    the length and the price change nothing of what is measured.
    """

    budget_seconds: float = 110.0
    max_trials: int | None = None
    device: str = "auto"
    precisions: tuple[Precision, ...] | None = None
    batch_size: tuple[int, int] | None = None
    effective_batch_size: int | Literal["free"] | None = None
    num_ranks: int = 1
    baseline: tuple[Precision, int] | None = None
    memory_fraction: float = 0.9
    objective: Objective = "speed"
    num_steps: int | None = None
    num_samples: int | None = None
    price_per_hour: float | None = None
    study: str | None = None
    out: str = "studies"
    storage: str | None = None
    seed: int = 0

    def horizon_steps(self, effective_batch_size: int) -> int:
        """Optimizer steps that a loss scale is judged over, given the samples of one step on one rank."""
        steps = self.num_steps
        if self.num_samples is not None:
            steps = -(-self.num_samples // (effective_batch_size * self.num_ranks))
        return DEFAULT_NUM_STEPS if steps is None else min(steps, MAX_STEPS)

    @classmethod
    def from_user(cls, *, num_ranks: int = 1, **given: Any) -> SearchOptions:
        """Check what `recommend_config` was given, by the names that it has there; what is left out has its default.

        Raises `InvalidRequestError` naming the option, what was given and what would do.
        """
        for name, (is_right, wanted) in _WANTED.items():
            value = given.get(name)
            _check(name not in given or is_right(value), name, value, wanted)
        steps, samples, price = given.get("steps"), given.get("samples"), given.get("price_per_hour")
        _check(steps is None or samples is None, "samples", samples, "left out where --steps is given")
        _check(
            price is None or steps is not None or samples is not None,
            "price-per-hour",
            price,
            "given together with --steps or --samples",
        )
        read = {name: _READ[name](value) if name in _READ else value for name, value in given.items()}
        effective = _effective(read.pop("effective_batch_size", None), num_ranks)
        fields = {_FIELDS.get(name, name): value for name, value in read.items()}
        return cls(num_ranks=num_ranks, effective_batch_size=effective, **fields)


def _check(condition: bool, option: str, given: object, wanted: str) -> None:
    if not condition:
        option = option.replace("_", "-")
        raise InvalidRequestError(f"--{option} is {given!r}; it must be {wanted}.", f"Give --{option} {wanted}.")


def _effective(given: str | int | None, num_ranks: int) -> int | Literal["free"] | None:
    if given == "free":
        return "free"
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    _check(is_count(number), "effective-batch-size", given, 'a whole number from 1 up, or "free"')
    assert number is None or isinstance(number, int)
    _check(
        number is None or number % num_ranks == 0,
        "effective-batch-size",
        given,
        f"a multiple of the {num_ranks} ranks that share it",
    )
    return number


def _one_of(option: str, given: object, names: Sequence[Name]) -> Name:
    for name in names:
        if name == given:
            return name
    raise InvalidRequestError(
        f"--{option} is {given!r}; it must be one of {', '.join(map(str, names))}.", "Pick one of the names given."
    )


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_number(given: Any) -> bool:
    return (isinstance(given, float) or _is_whole(given)) and math.isfinite(given)


def is_count(given: Any) -> bool:
    """Whether it is a whole number from 1 up, or left out."""
    return given is None or (_is_whole(given) and given >= 1)


def _matches(pattern: re.Pattern[str], given: object) -> bool:
    return isinstance(given, str) and pattern.fullmatch(given) is not None


def _pair(pattern: re.Pattern[str], given: object) -> re.Match[str] | None:
    """What matches of "A:B", or of a pair of the two."""
    if isinstance(given, (tuple, list)):
        given = ":".join(map(str, given))
    return pattern.fullmatch(given) if isinstance(given, str) else None


def _precisions(given: Sequence[str] | str | None) -> tuple[Precision, ...] | None:
    names = (given,) if isinstance(given, str) else given
    if names is None or (isinstance(names, Sequence) and not names):
        return None
    _check(isinstance(names, Sequence), "precision", given, "a name, or several in a list")
    return tuple(dict.fromkeys(_one_of("precision", name, PRECISIONS) for name in names))


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
    return _one_of("baseline", match[1], PRECISIONS), int(match[2])


_FIELDS = {
    "budget": "budget_seconds",
    "trials": "max_trials",
    "precision": "precisions",
    "steps": "num_steps",
    "samples": "num_samples",
}
# Of each option a test of what was given, and what would do.
_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "budget": (lambda given: _is_number(given) and given > 0, "a number of seconds above 0"),
    "trials": (is_count, "a whole number from 1 up"),
    "device": (lambda given: _matches(_DEVICE, given), "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
    "memory_fraction": (lambda given: _is_number(given) and 0 < given <= 1, "a share above 0 and at most 1"),
    "steps": (lambda given: is_count(given) and (given or 1) <= MAX_STEPS, f"a whole number from 1 to {MAX_STEPS}"),
    "samples": (is_count, "a whole number from 1 up"),
    "price_per_hour": (
        lambda given: given is None or (_is_number(given) and given >= 0),
        "an amount of money from 0 up",
    ),
    "study": (
        lambda given: given is None or (_matches(_NAME, given) and given.strip(".") != ""),
        "a folder name of letters, digits, '.', '_' and '-'",
    ),
    "out": (lambda given: isinstance(given, str), "a folder's path, as a string"),
    "storage": (lambda given: given is None or isinstance(given, str), "an Optuna storage URL, as a string"),
    "seed": (lambda given: _is_whole(given) and 0 <= given < SEED_LIMIT, f"a whole number from 0 to {SEED_LIMIT - 1}"),
}
# What is made of an option that may be given in more than one way.
_READ: dict[str, Callable[[Any], Any]] = {
    "budget": float,
    "memory_fraction": float,
    "price_per_hour": lambda given: None if given is None else float(given),
    "objective": lambda given: _one_of("objective", given, get_args(Objective)),
    "precision": _precisions,
    "batch_size": _batch_range,
    "baseline": _baseline,
}

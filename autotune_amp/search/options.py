"""Options of a search, validated before anything is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import Objective
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.text import SIZE_FORMATS, parse_size
from autotune_amp.dimensions import VARIANTS

SEED_LIMIT = 2**32 - 10_000  # numpy's, with room for resumed trials, which add their number to the seed
DEFAULT_NUM_STEPS = 10_000
DEFAULT_BUDGET_SECONDS = 600.0  # maximum: a search ends once it is decided and confirmed
MAX_STEPS = 1_000_000  # a replay stores a number for each step, and takes up to 0.1 s for this many

# Options that change only the choice and the report, not the measurements: a finished search is ranked again for these.
RANKING = ("objective", "num_steps", "num_samples", "price_per_hour")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Validated options; `from_user` makes them from command-line or Python arguments.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may use, `memory_limit` the bytes that each of its processes may use at
    most, None for no limit. `effective_batch_size` is the total over all `num_ranks`; None keeps that of the data,
    "free" lets it change. `variants` are the further dimensions to try, None for the safe ones. `devices` are the
    indices of the NVIDIA GPUs to use at the same time, `ray` the address of a cluster whose nodes are used; with both
    None a single device is used, given by `device`. `ranks` processes train a trial together. The planned training run
    has `num_steps` optimizer steps or `num_samples` samples; loss scales are judged over it, or over
    `DEFAULT_NUM_STEPS` if neither is given.
    """

    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    max_trials: int | None = None
    device: str = "auto"
    devices: tuple[int, ...] | Literal["all"] | None = None
    ray: str | None = None
    ranks: int = 1
    precisions: tuple[Precision, ...] | None = None
    variants: tuple[str, ...] | None = None
    batch_size: tuple[int, int] | None = None
    effective_batch_size: int | Literal["free"] | None = None
    num_ranks: int = 1
    baseline: tuple[Precision, int] | None = None
    memory_fraction: float = 0.9
    memory_limit: int | None = None
    objective: Objective = "speed"
    num_steps: int | None = None
    num_samples: int | None = None
    price_per_hour: float | None = None
    study: str | None = None
    out: str = "studies"
    storage: str | None = None
    seed: int = 0

    @property
    def first_device(self) -> str:
        """Return the device, or the first of several."""
        if self.devices is not None:
            return "cuda" if self.devices == "all" else f"cuda:{self.devices[0]}"
        return self.device

    @property
    def can_use_ray(self) -> bool:
        """Whether the nodes of a Ray cluster could be used for these options."""
        is_general = self.device in ("auto", "cpu", "cuda") and self.objective != "energy"
        return is_general and self.devices is None

    def limit_bytes(self, available_bytes: int) -> int:
        """Return the bytes of memory that a process of a trial may use, given those available to it."""
        share = int(self.memory_fraction * available_bytes)
        return share if self.memory_limit is None else min(share, self.memory_limit)

    def horizon_steps(self, effective_batch_size: int) -> int:
        """Return the optimizer steps that loss scales are judged over, given the samples of a step on all ranks."""
        steps = self.num_steps
        if self.num_samples is not None:
            steps = -(-self.num_samples // effective_batch_size)
        return DEFAULT_NUM_STEPS if steps is None else min(steps, MAX_STEPS)

    @classmethod
    def from_user(cls, *, num_ranks: int = 1, **given: Any) -> SearchOptions:
        """Return options from the arguments of `recommend_config`, by their names there; a missing one has its default.

        Raises `InvalidRequestError` with the option, the value given, and the valid values.
        """
        fields: dict[str, Any] = {"num_ranks": num_ranks}
        for name, value in given.items():
            read, wanted = _OPTIONS[name]
            try:
                fields[_FIELDS.get(name, name)] = read(value)
            except (ValueError, TypeError) as error:
                raise _wrong(name, value, wanted) from error
        found = cls(**fields)
        if found.ranks > 1 and (num_ranks > 1 or found.devices is not None):
            raise _wrong("ranks", found.ranks, "1 under a launcher, and where --devices is given")
        if found.ranks > 1 and found.device not in ("auto", "cpu", "cuda"):
            raise _wrong("device", found.device, "auto, cpu or cuda where --ranks is given: it takes the first GPUs")
        num_ranks *= found.ranks
        effective = found.effective_batch_size
        if isinstance(effective, int) and effective % num_ranks:
            raise _wrong("effective_batch_size", effective, f"a multiple of the {num_ranks} ranks that share it")
        if found.num_steps is not None and found.num_samples is not None:
            raise _wrong("samples", found.num_samples, "left out where --steps is given")
        if found.devices is not None and not found.device.startswith(("auto", "cuda")):
            raise _wrong("device", found.device, "auto or cuda where --devices is given")
        if found.ray is not None and (num_ranks > found.ranks or not found.can_use_ray):
            wanted = "left out under a launcher, for energy, and beside --devices or the number of a GPU"
            raise _wrong("ray", found.ray, wanted)
        if found.price_per_hour is not None and found.num_steps is None and found.num_samples is None:
            raise _wrong("price_per_hour", found.price_per_hour, "given together with --steps or --samples")
        return found

    def arguments(self) -> list[str]:
        """Return the command-line options that request the same search, without those for where the study is kept."""
        found = []
        for name in _OPTIONS:
            field = _FIELDS.get(name, name)
            value, default = getattr(self, field), SearchOptions.__struct_defaults__
            if field in ("study", "out", "storage") or value == default[self.__struct_fields__.index(field)]:
                continue
            option = f"--{name.rstrip('_').replace('_', '-')}"
            if name == "precision":
                found += [word for precision in value for word in (option, precision)]
            else:
                separator = "," if name in ("try_", "devices") else ":"
                shown = separator.join(map(str, value)) or "none" if isinstance(value, tuple) else f"{value}"
                found += [option, shown]
        return found


def _wrong(name: str, given: Any, wanted: str) -> InvalidRequestError:
    option = f"--{name.rstrip('_').replace('_', '-')}"
    shown = given[0] if isinstance(given, list) and len(given) == 1 else given
    way_out = "Leave it out for the default; `autotune-amp search --help` says what it does."
    return InvalidRequestError(f"{option} is {shown!r}; it must be {wanted}.", way_out)


def is_count(given: Any) -> bool:
    """Whether `given` is an integer of at least 1, or None."""
    return given is None or (_is_whole(given) and given >= 1)


def _is_whole(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_number(given: Any) -> bool:
    return (isinstance(given, float) or _is_whole(given)) and math.isfinite(given)


def _that(is_right: Callable[[Any], bool], kind: Callable[[Any], Any] = lambda given: given) -> Callable[[Any], Any]:
    """Return a reader that converts a valid value with `kind` and raises `ValueError` for any other."""

    def read(given: Any) -> Any:
        if not is_right(given):
            raise ValueError(given)
        return None if given is None else kind(given)

    return read


def _matching(pattern: str) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, str) and re.fullmatch(pattern, given) is not None


def _effective(given: Any) -> int | Literal["free"] | None:
    if given == "free":
        return "free"
    number = int(given) if isinstance(given, str) else given
    if not is_count(number):
        raise ValueError(given)
    return number


def _pair(given: Any) -> tuple[str, int]:
    """Return the two parts of "A:B", or of a sequence of two."""
    parts = given.split(":") if isinstance(given, str) else [str(part) for part in given]
    first, second = parts
    return first, int(second)


def _batch_range(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    first, high = _pair(given)
    low = int(first)
    if not 1 <= low <= high:
        raise ValueError(given)
    return low, high


def _devices(given: Any) -> tuple[int, ...] | Literal["all"] | None:
    if given is None:
        return None
    if given == "all":
        return "all"
    numbers = [int(part) for part in given.split(",")] if isinstance(given, str) else list(given)
    if not numbers or not all(_is_whole(number) and number >= 0 for number in numbers):
        raise ValueError(given)
    return tuple(dict.fromkeys(numbers))


def _baseline(given: Any) -> tuple[Precision, int] | None:
    if given is None:
        return None
    precision, size = _pair(given)
    if size < 1 or precision not in PRECISIONS:
        raise ValueError(given)
    return precision, size


def _precisions(given: Any) -> tuple[Precision, ...] | None:
    names = (given,) if isinstance(given, str) else given
    if not names and names is not False:
        return None
    if not isinstance(names, Sequence) or not all(name in PRECISIONS for name in names):
        raise ValueError(given)
    return tuple(dict.fromkeys(names))


_VARIANTS = tuple(name for variant in VARIANTS.values() for name in (variant.name, *variant.others))


def _variants(given: Any) -> tuple[str, ...] | None:
    names = given.split(",") if isinstance(given, str) else given
    if names in (["auto"], ["none"]):
        return None if names == ["auto"] else ()
    if not isinstance(names, Sequence) or not all(name in _VARIANTS for name in names):
        raise ValueError(given)
    return tuple(dict.fromkeys(names))


# Fields that have another name than their option.
_FIELDS = {
    "budget": "budget_seconds",
    "trials": "max_trials",
    "try_": "variants",
    "precision": "precisions",
    "steps": "num_steps",
    "samples": "num_samples",
}
# For each option: a reader that raises `ValueError` or `TypeError` for an invalid value, and a text of the valid
# values.
_OPTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "budget": (_that(lambda given: _is_number(given) and given > 0, float), "a number of seconds above 0"),
    "trials": (_that(is_count), "a whole number from 1 up"),
    "device": (_that(_matching(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")), "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N"),
    "devices": (_devices, "all, or numbers of GPUs such as 0,1"),
    "ray": (_that(lambda given: given is None or (isinstance(given, str) and given != "")), "auto, or HOST:PORT"),
    "ranks": (_that(lambda given: _is_whole(given) and given >= 1), "a whole number from 1 up"),
    "precision": (_precisions, f"one of {', '.join(PRECISIONS)}, or several in a list"),
    "try_": (_variants, f"auto, none or some of {', '.join(_VARIANTS)}"),
    "batch_size": (_batch_range, "LOW:HIGH with 1 <= LOW <= HIGH, such as 8:256"),
    "effective_batch_size": (_effective, 'a whole number from 1 up, or "free"'),
    "baseline": (_baseline, "PRECISION:BATCH, such as fp32:32"),
    "memory_fraction": (
        _that(lambda given: _is_number(given) and 0 < given <= 1, float),
        "a share above 0 and at most 1",
    ),
    "memory_limit": (lambda given: None if given is None else parse_size(given), SIZE_FORMATS),
    "objective": (_that(lambda given: given in get_args(Objective)), f"one of {', '.join(get_args(Objective))}"),
    "steps": (
        _that(lambda given: is_count(given) and (given or 1) <= MAX_STEPS),
        f"a whole number from 1 to {MAX_STEPS}",
    ),
    "samples": (_that(is_count), "a whole number from 1 up"),
    "price_per_hour": (
        _that(lambda given: given is None or (_is_number(given) and given >= 0), float),
        "an amount of money from 0 up",
    ),
    "study": (
        _that(lambda given: given is None or (_matching(r"[\w.-]+")(given) and given.strip(".") != "")),
        "a folder name of letters, digits, '.', '_' and '-'",
    ),
    "out": (_that(lambda given: isinstance(given, str)), "a folder's path, as a string"),
    "storage": (_that(lambda given: given is None or isinstance(given, str)), "an Optuna storage URL, as a string"),
    "seed": (
        _that(lambda given: _is_whole(given) and 0 <= given < SEED_LIMIT),
        f"a whole number from 0 to {SEED_LIMIT - 1}",
    ),
}

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

SEED_LIMIT = 2**32 - 10_000  # NumPy's limit, less the number of trials that a resumed search adds to the seed
DEFAULT_NUM_STEPS = 10_000
DEFAULT_BUDGET_SECONDS = 600.0  # upper limit: a search ends once its choice is confirmed
MAX_STEPS = 1_000_000  # a replay stores a number for each step, and takes up to 0.1 s for this many

# Options that change the choice and the report but no measurement: a finished search is ranked again for them.
RANKING = ("objective", "num_steps", "num_samples", "price_per_hour")


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Validated options of a search; `from_user` creates them from command-line or Python arguments.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may use, `memory_limit` the bytes that each of its processes may use at
    most, None for no limit. `effective_batch_size` is the total over all `num_ranks`; None keeps that of the data,
    "free" lets the search change it. `variants` are the further dimensions to try, None for the safe ones. `devices`
    are the indices of the NVIDIA GPUs to use at the same time, `ray` is the address of a cluster whose nodes are used;
    with both None only `device` is used. A trial is trained by `ranks` processes together. The planned training run has
    `num_steps` optimizer steps or `num_samples` samples; loss scales are judged over it, or over `DEFAULT_NUM_STEPS` if
    neither is given.
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
        """Whether a Ray cluster may be used with these options."""
        is_general = self.device in ("auto", "cpu", "cuda") and self.objective != "energy"
        return is_general and self.devices is None

    def limit_bytes(self, available_bytes: int) -> int:
        """Return the bytes of memory that a process of a trial may use, given those available to it."""
        share = int(self.memory_fraction * available_bytes)
        return share if self.memory_limit is None else min(share, self.memory_limit)

    def horizon_steps(self, effective_batch_size: int) -> int:
        """Return the length of the planned training run in optimizer steps, `DEFAULT_NUM_STEPS` if it is unknown.

        `effective_batch_size` is that of all ranks.
        """
        steps = self.num_steps
        if self.num_samples is not None:
            steps = -(-self.num_samples // effective_batch_size)
        return DEFAULT_NUM_STEPS if steps is None else steps

    @classmethod
    def from_user(cls, *, num_ranks: int = 1, **arguments: Any) -> SearchOptions:
        """Return options from the arguments of `recommend_config`; a missing one has its default.

        Raises `InvalidRequestError` with the option, its value, and the valid values.
        """
        fields: dict[str, Any] = {"num_ranks": num_ranks}
        for name, value in arguments.items():
            parse, wanted = _OPTIONS[name]
            try:
                fields[_FIELDS.get(name, name)] = parse(value)
            except (ValueError, TypeError) as error:
                raise _invalid_option(name, value, wanted) from error
        options = cls(**fields)
        if options.ranks > 1 and (num_ranks > 1 or options.devices is not None):
            raise _invalid_option("ranks", options.ranks, "1 under a launcher or together with --devices")
        if options.ranks > 1 and options.device not in ("auto", "cpu", "cuda"):
            raise _invalid_option(
                "device", options.device, "auto, cpu or cuda together with --ranks, which uses the first GPUs"
            )
        num_ranks *= options.ranks
        effective = options.effective_batch_size
        if isinstance(effective, int) and effective % num_ranks:
            raise _invalid_option(
                "effective_batch_size", effective, f"a multiple of the {num_ranks} ranks that share it"
            )
        if options.num_steps is not None and options.num_samples is not None:
            raise _invalid_option("samples", options.num_samples, "left out together with --steps")
        if options.devices is not None and not options.device.startswith(("auto", "cuda")):
            raise _invalid_option("device", options.device, "auto or cuda together with --devices")
        if options.ray is not None and (num_ranks > options.ranks or not options.can_use_ray):
            wanted = "left out under a launcher, for energy, and together with --devices or the number of a GPU"
            raise _invalid_option("ray", options.ray, wanted)
        return options

    def arguments(self) -> list[str]:
        """Return the command-line options of the same search, without those for its folder and storage."""
        words = []
        for name in _OPTIONS:
            field = _FIELDS.get(name, name)
            value, default = getattr(self, field), SearchOptions.__struct_defaults__
            if field in ("study", "out", "storage") or value == default[self.__struct_fields__.index(field)]:
                continue
            option = f"--{name.rstrip('_').replace('_', '-')}"
            if name == "precision":
                words += [word for precision in value for word in (option, precision)]
            else:
                separator = "," if name in ("try_", "devices") else ":"
                shown = separator.join(map(str, value)) or "none" if isinstance(value, tuple) else f"{value}"
                words += [option, shown]
        return words


def _invalid_option(name: str, value: Any, wanted: str) -> InvalidRequestError:
    option = f"--{name.rstrip('_').replace('_', '-')}"
    shown = value[0] if isinstance(value, list) and len(value) == 1 else value
    next_step = "Leave it out for the default; see `autotune-amp search --help`."
    return InvalidRequestError(f"{option} is {shown!r}; it must be {wanted}.", next_step)


def is_count(value: Any) -> bool:
    """Whether `value` is an integer of at least 1, or None."""
    return value is None or (_is_whole(value) and value >= 1)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return (isinstance(value, float) or _is_whole(value)) and math.isfinite(value)


def _parser_of_valid(
    is_valid: Callable[[Any], bool], kind: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], Any]:
    """Return a parser that converts a valid value with `kind` and raises `ValueError` for any other."""

    def parse(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(value)
        return None if value is None else kind(value)

    return parse


def _matching(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _effective(value: Any) -> int | Literal["free"] | None:
    if value == "free":
        return "free"
    number = int(value) if isinstance(value, str) else value
    if not is_count(number):
        raise ValueError(value)
    return number


def _pair(value: Any) -> tuple[str, int]:
    """Return the two parts of "A:B", or of a sequence of two."""
    parts = value.split(":") if isinstance(value, str) else [str(part) for part in value]
    first, second = parts
    return first, int(second)


def _batch_range(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    first, high = _pair(value)
    low = int(first)
    if not 1 <= low <= high:
        raise ValueError(value)
    return low, high


def _devices(value: Any) -> tuple[int, ...] | Literal["all"] | None:
    if value is None:
        return None
    if value == "all":
        return "all"
    numbers = [int(part) for part in value.split(",")] if isinstance(value, str) else list(value)
    if not numbers or not all(_is_whole(number) and number >= 0 for number in numbers):
        raise ValueError(value)
    return tuple(dict.fromkeys(numbers))


def _baseline(value: Any) -> tuple[Precision, int] | None:
    if value is None:
        return None
    precision, size = _pair(value)
    if size < 1 or precision not in PRECISIONS:
        raise ValueError(value)
    return precision, size


def _precisions(value: Any) -> tuple[Precision, ...] | None:
    names = (value,) if isinstance(value, str) else value
    if not names and names is not False:
        return None
    if not isinstance(names, Sequence) or not all(name in PRECISIONS for name in names):
        raise ValueError(value)
    return tuple(dict.fromkeys(names))


_VARIANTS = tuple(name for variant in VARIANTS.values() for name in (variant.name, *variant.others))


def _variants(value: Any) -> tuple[str, ...] | None:
    names = value.split(",") if isinstance(value, str) else value
    if names in (["auto"], ["none"]):
        return None if names == ["auto"] else ()
    if not isinstance(names, Sequence) or not all(name in _VARIANTS for name in names):
        raise ValueError(value)
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
# Parser of each option, which raises `ValueError` or `TypeError` for an invalid value, and a text of the valid values.
_OPTIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "budget": (_parser_of_valid(lambda value: _is_number(value) and value > 0, float), "a number of seconds above 0"),
    "trials": (_parser_of_valid(is_count), "a whole number from 1 up"),
    "device": (
        _parser_of_valid(_matching(r"auto|cpu|mps|(cuda|xpu)(:\d+)?")),
        "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N",
    ),
    "devices": (_devices, "all, or numbers of GPUs such as 0,1"),
    "ray": (
        _parser_of_valid(lambda value: value is None or (isinstance(value, str) and value != "")),
        "auto, or HOST:PORT",
    ),
    "ranks": (_parser_of_valid(lambda value: _is_whole(value) and value >= 1), "a whole number from 1 up"),
    "precision": (_precisions, f"one of {', '.join(PRECISIONS)}, or several in a list"),
    "try_": (_variants, f"auto, none or some of {', '.join(_VARIANTS)}"),
    "batch_size": (_batch_range, "LOW:HIGH with 1 <= LOW <= HIGH, such as 8:256"),
    "effective_batch_size": (_effective, 'a whole number from 1 up, or "free"'),
    "baseline": (_baseline, "PRECISION:BATCH, such as fp32:32"),
    "memory_fraction": (
        _parser_of_valid(lambda value: _is_number(value) and 0 < value <= 1, float),
        "a share above 0 and at most 1",
    ),
    "memory_limit": (lambda value: None if value is None else parse_size(value), SIZE_FORMATS),
    "objective": (
        _parser_of_valid(lambda value: value in get_args(Objective)),
        f"one of {', '.join(get_args(Objective))}",
    ),
    "steps": (
        _parser_of_valid(lambda value: is_count(value) and (value or 1) <= MAX_STEPS),
        f"a whole number from 1 to {MAX_STEPS}",
    ),
    "samples": (_parser_of_valid(is_count), "a whole number from 1 up"),
    "price_per_hour": (
        _parser_of_valid(lambda value: value is None or (_is_number(value) and value >= 0), float),
        "an amount of money from 0 up",
    ),
    "study": (
        _parser_of_valid(lambda value: value is None or (_matching(r"[\w.-]+")(value) and value.strip(".") != "")),
        "a folder name of letters, digits, '.', '_' and '-'",
    ),
    "out": (_parser_of_valid(lambda value: isinstance(value, str)), "a folder's path, as a string"),
    "storage": (
        _parser_of_valid(lambda value: value is None or isinstance(value, str)),
        "an Optuna storage URL, as a string",
    ),
    "seed": (
        _parser_of_valid(lambda value: _is_whole(value) and 0 <= value < SEED_LIMIT),
        f"a whole number from 0 to {SEED_LIMIT - 1}",
    ),
}

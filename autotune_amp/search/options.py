"""Options of a search, validated before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from autotune_amp.core.documents import Count, NotNegative, Positive, Whole
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
    """Options of a search; `from_user` creates them from command-line or Python arguments and validates them.

    `batch_size` is an inclusive range in samples, `baseline` a precision and a batch size. `memory_fraction` is the
    share of the available memory that a trial may use, `memory_limit` the bytes that each of its processes may use at
    most, None for no limit. `effective_batch_size` is the total over all `num_ranks`; None keeps that of the data,
    "free" lets the search change it. `variants` are the further dimensions to try, None for the safe ones. `devices`
    are the indices of the NVIDIA GPUs to use at the same time, `ray` is the address of a cluster whose nodes are used;
    with both None only `device` is used. A trial is trained by `ranks` processes together. The planned training run has
    `num_steps` optimizer steps or `num_samples` samples; loss scales are judged over it, or over `DEFAULT_NUM_STEPS` if
    neither is given.
    """

    budget_seconds: Positive = DEFAULT_BUDGET_SECONDS
    max_trials: Count | None = None
    device: Annotated[str, Meta(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)\Z")] = "auto"
    devices: Annotated[tuple[Whole, ...], Meta(min_length=1)] | Literal["all"] | None = None
    ray: Annotated[str, Meta(min_length=1)] | None = None
    ranks: Count = 1
    precisions: tuple[Precision, ...] | None = None
    variants: tuple[str, ...] | None = None
    batch_size: tuple[Count, Count] | None = None
    effective_batch_size: Count | Literal["free"] | None = None
    num_ranks: Count = 1
    baseline: tuple[Precision, Count] | None = None
    memory_fraction: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    memory_limit: Count | None = None
    objective: Objective = "speed"
    num_steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)] | None = None
    num_samples: Count | None = None
    price_per_hour: NotNegative | None = None
    study: Annotated[str, Meta(pattern=r"^(?=.*[^.])[\w.-]+\Z")] | None = None
    out: str = "studies"
    storage: str | None = None
    seed: Annotated[int, Meta(ge=0, lt=SEED_LIMIT)] = 0

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
            field = _FIELDS.get(name, name)
            try:
                plain = _without_numpy(value)
                parsed = _PARSERS[name](plain) if name in _PARSERS else plain
                fields[field] = msgspec.convert(parsed, _DECLARED[field].type)
            except (ValueError, TypeError, msgspec.ValidationError) as error:
                raise _invalid_option(name, value, _OPTIONS[name]) from error
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
            value = getattr(self, field)
            if field in ("study", "out", "storage") or value == _DECLARED[field].default:
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
    return value is None or (type(value) is int and value >= 1)


def _without_numpy(value: Any) -> Any:
    """Return a value whose numbers are Python's where they were NumPy's."""
    if isinstance(value, (list, tuple)):
        return [_without_numpy(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _effective(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value != "free" else value


def _pair(value: Any) -> Any:
    """Return the parts of "A:B", numbers as such; any other value unchanged."""
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part for part in map(str.strip, value.split(":"))]


def _batch_range(value: Any) -> Any:
    if value is None:
        return None
    low, high = pair = _pair(value)
    if low > high:
        raise ValueError(value)
    return pair


def _devices(value: Any) -> Any:
    if value is None or value == "all":
        return value
    return tuple(dict.fromkeys([int(part) for part in value.split(",")] if isinstance(value, str) else value))


def _precisions(value: Any) -> tuple[str, ...] | None:
    names = [value] if isinstance(value, str) else () if value is None else value
    if not isinstance(names, Sequence):
        raise TypeError(value)
    return tuple(dict.fromkeys(names)) or None


_VARIANTS = tuple(name for variant in VARIANTS.values() for name in (variant.name, *variant.others))


def _variants(value: Any) -> tuple[str, ...] | None:
    names = value.split(",") if isinstance(value, str) else value
    if names in (["auto"], ["none"]):
        return None if names == ["auto"] else ()
    if not isinstance(names, Sequence) or not all(name in _VARIANTS for name in names):
        raise ValueError(value)
    return tuple(dict.fromkeys(names))


_DECLARED = {field.name: field for field in msgspec.structs.fields(SearchOptions)}
# Fields that have another name than their option.
_FIELDS = {
    "budget": "budget_seconds",
    "trials": "max_trials",
    "try_": "variants",
    "precision": "precisions",
    "steps": "num_steps",
    "samples": "num_samples",
}
# Valid values of each option, as text.
_OPTIONS = {
    "budget": "a number of seconds above 0",
    "trials": "a whole number from 1 up",
    "device": "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N",
    "devices": "all, or numbers of GPUs such as 0,1",
    "ray": "auto, or HOST:PORT",
    "ranks": "a whole number from 1 up",
    "precision": f"one of {', '.join(PRECISIONS)}, or several in a list",
    "try_": f"auto, none or some of {', '.join(_VARIANTS)}",
    "batch_size": "LOW:HIGH with 1 <= LOW <= HIGH, such as 8:256",
    "effective_batch_size": 'a whole number from 1 up, or "free"',
    "baseline": "PRECISION:BATCH, such as fp32:32",
    "memory_fraction": "a share above 0 and at most 1",
    "memory_limit": SIZE_FORMATS,
    "objective": f"one of {', '.join(get_args(Objective))}",
    "steps": f"a whole number from 1 to {MAX_STEPS}",
    "samples": "a whole number from 1 up",
    "price_per_hour": "an amount of money from 0 up",
    "study": "a folder name of letters, digits, '.', '_' and '-'",
    "out": "a folder's path, as a string",
    "storage": "an Optuna storage URL, as a string",
    "seed": f"a whole number from 0 to {SEED_LIMIT - 1}",
}
# Functions that convert the forms of an option other than its field's; they raise `ValueError` or `TypeError`.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "devices": _devices,
    "precision": _precisions,
    "try_": _variants,
    "batch_size": _batch_range,
    "effective_batch_size": _effective,
    "baseline": _pair,
    "memory_limit": lambda value: None if value is None else parse_size(value),
}

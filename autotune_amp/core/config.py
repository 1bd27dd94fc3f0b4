"""AmpConfig and LossScale: the recommended settings of a training run, validated and stored as plain JSON.

msgspec rather than pydantic: a cached recommendation must be read within 50 ms, and importing pydantic alone takes 160
ms where msgspec takes 4 (measured, Python 3.11).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence  # msgspec reads it from the annotations
from itertools import pairwise
from typing import Any, TypeGuard

import msgspec

from autotune_amp.core.documents import Positive, Whole, decode
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.setting import DEFAULTS, VARIANT_VALUES, Setting

# Smallest number above 0 that fp16 can represent. An fp16 loss starts backward with the loss scale itself as its
# gradient, so below this scale every gradient is 0.
MIN_LOSS_SCALE = 2.0**-24

FP16_MAX = 65504.0  # largest finite number in fp16


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the older name last; torch reads both
# The only environment variables that a recommendation may set: a document with any other could run arbitrary code.
RECOMMENDED_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", *ALLOCATOR_VARIABLES)


def is_recommended(environment: object) -> bool:
    """Return whether `environment` maps only `RECOMMENDED_VARIABLES`, to values without control characters."""
    return isinstance(environment, Mapping) and all(
        name in RECOMMENDED_VARIABLES and _is_printable(value) for name, value in environment.items()
    )


def allocator_variable(mode: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable, with value, that sets a mode of the allocator and keeps its other settings."""
    if mode == "as_found":
        return {}
    name = next((name for name in ALLOCATOR_VARIABLES if name in environment), ALLOCATOR_VARIABLES[0])
    others = [part for part in environment.get(name, "").split(",") if part and not part.startswith(mode)]
    return {name: ",".join((*others, f"{mode}:True"))}


def _must_be(struct: msgspec.Struct, names: str, expected: str, is_valid: Callable[[Any], bool]) -> None:
    """Raise `InvalidRequestError` for the first field for which `is_valid(value)` is false.

    `names` lists the fields to check, separated by blanks; `expected` completes "it must be …" in the message.
    """
    for name in names.split():
        value = getattr(struct, name)
        if not is_valid(value):
            raise InvalidRequestError(
                f"{type(struct).__name__}.{name} is {value!r}; it must be {expected}.",
                f"Change {name}; to use the default, leave it out.",
            )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _are_texts(value: object) -> bool:
    return _is_list(value) and all(map(_is_printable, value))


def _are_pairs(value: object) -> bool:
    return _is_list(value) and all(_are_texts(pair) and len(pair) == 2 for pair in value)


SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")  # of torch.amp.GradScaler


class LossScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the fp16 loss scaler. The defaults are those of ``torch.amp.GradScaler``.

    `growth_interval` is in optimizer steps. `hysteresis` is the number of overflows after which the scale backs off;
    the count restarts when the scale grows. `min_scale` and `max_scale` bound the scale; without a `min_scale` the
    lower bound is `floor`. Raises `InvalidRequestError` for a value that cannot work.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float = 16777216.0

    def __post_init__(self) -> None:
        _must_be(self, "init_scale growth_factor backoff_factor max_scale", "a finite number above 0", _is_positive)
        _must_be(self, "growth_factor", "above 1", lambda factor: factor > 1)
        _must_be(self, "backoff_factor", "at most 1", lambda factor: factor <= 1)
        _must_be(self, "growth_interval hysteresis", "a whole number from 1 up", _is_count)
        least = "at least 2**-24, the least that fp16 holds"
        _must_be(
            self, "min_scale", least, lambda scale: scale is None or (_is_positive(scale) and scale >= MIN_LOSS_SCALE)
        )
        bounds = f"within min_scale and max_scale, from {self.floor!r} to {self.max_scale!r}"
        _must_be(self, "init_scale", bounds, lambda scale: self.floor <= scale <= self.max_scale)

    @property
    def floor(self) -> float:
        """Return the lower bound of the scale: `min_scale` if set, else min(1, init_scale / 2^12), at least 2^-24.

        A scale that falls to 0 destroys the weights: 0 times a gradient is finite, so the step is taken, and unscaling
        by 1/0 makes them NaN (pytorch#99640). A scale below 1 alone is not an error: a sum-reduced loss may train well
        at 2^-6. Below 2^-24 fp16 cannot represent the scale (`MIN_LOSS_SCALE`).
        """
        if self.min_scale is not None:
            return self.min_scale
        return max(MIN_LOSS_SCALE, min(1.0, self.init_scale * 2.0**-12))


def _check_setting(setting: Setting) -> None:
    _must_be(setting, "precision", f"one of {', '.join(PRECISIONS)}", PRECISIONS.__contains__)
    _must_be(setting, "batch_size accumulation_steps", "a whole number from 1 up", _is_count)
    or_none = "a whole number from 0 up, or None to keep the data's own"
    _must_be(setting, "num_workers", or_none, lambda num: num is None or (type(num) is int and num >= 0))
    _must_be(setting, "pinned_modules", "a list of module names, each a text without control characters", _are_texts)
    msgspec.structs.force_setattr(setting, "pinned_modules", tuple(setting.pinned_modules))
    _must_be(setting, "arguments", "a list of [name, value] pairs of texts without control characters", _are_pairs)
    msgspec.structs.force_setattr(setting, "arguments", tuple(sorted(map(tuple, setting.arguments))))
    for name, values in VARIANT_VALUES.items():
        _must_be(setting, name, f"one of {', '.join(values)}", values.__contains__)
    for name, allowed in setting.misfits.items():
        _must_be(setting, name, allowed, lambda _: False)


class FallbackPlan(Setting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A safer setting to fall back to, measured to fit in memory.

    `samples_per_second` is its throughput. `slowdown` is the throughput of the recommended config over the plan's: with
    1.5 training takes 1.5 times as long. For a compiled config all numbers are measured without compilation, which
    needs more memory.
    """

    peak_memory_bytes: Whole | None = None
    samples_per_second: Positive | None = None
    slowdown: Positive | None = None

    def __post_init__(self) -> None:
        _check_setting(self)
        _must_be(self, "slowdown", "above 0, or None", lambda factor: factor is None or _is_positive(factor))


class AmpConfig(Setting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration recommended for a training run.

    Inherited fields are documented in `Setting`. `loss_scale` is required for fp16 and forbidden otherwise. `fallback`
    lists the settings to step down to, first choice first: measured plans, or names of precisions, which are not
    checked; read them through `plans`. `environment` holds variables to set before Python starts, out of
    `RECOMMENDED_VARIABLES`. Raises `InvalidRequestError` for a value that cannot work.
    """

    loss_scale: LossScale | None = None
    fallback: Sequence[FallbackPlan | Precision] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_setting(self)
        variables = f"values without control characters for variables of {', '.join(RECOMMENDED_VARIABLES)}"
        _must_be(self, "environment", variables, is_recommended)
        is_fp16 = self.precision == "fp16"
        expected = "LossScale() with fp16" if is_fp16 else f"left out with {self.precision}: only fp16 has a loss scale"
        if is_fp16 and self.loss_scale is None:
            raise InvalidRequestError(
                f"{type(self).__name__}.loss_scale is None with fp16, which scales the loss.",
                "Add loss_scale=LossScale().",
            )
        _must_be(self, "loss_scale", expected, lambda scale: (scale is not None) == is_fp16)
        _must_be(self, "fallback", 'a list of precisions or plans, as ["fp32"]', _is_list)
        msgspec.structs.force_setattr(self, "fallback", tuple(self.fallback))
        safety = [PRECISIONS.index(rung.precision) for rung in (self, *self.plans)]
        below = ", ".join(PRECISIONS[: safety[0]][::-1]) or "none"
        order = f"precisions below {self.precision}, each safer than the one before: out of {below}, in this order"
        _must_be(self, "fallback", order, lambda _: all(after < before for before, after in pairwise(safety)))

    __str__ = msgspec.Struct.__repr__  # print all fields of a config, and not only those of its setting

    @property
    def plans(self) -> tuple[FallbackPlan, ...]:
        """Return `fallback` as plans. A bare precision name becomes this config in that precision, without numbers."""
        return tuple(
            rung
            if isinstance(rung, FallbackPlan)
            else FallbackPlan.of(
                msgspec.structs.replace(Setting.of(self).without_fp8, precision=rung, pinned_modules=(), as_found=False)
            )
            for rung in self.fallback
        )

    def to_training_arguments(self, *, like: Any = None, **others: Any) -> Any:
        """Return ``transformers.TrainingArguments`` with this config's batch size, accumulation, precision and workers.

        `like` are existing arguments: the result has their class and keeps every value that neither this config nor
        `others` (further keyword arguments) set, such as the learning rate. Values that their class derived from the
        old batch size are kept too: pass those in `others` (for TRL's ``GRPOConfig`` its ``generation_batch_size``).

        TrainingArguments cannot express the loss scale, the fallbacks, the pinned modules, the environment, the memory
        format, bf16 weights, fp8 layers and the implementation of optimizers other than AdamW; use
        ``AutotuneTrainer(amp_config=config)`` for those. A model that is not from Transformers does not accept
        ``activation_checkpointing``: set it to False, and AutotuneTrainer checkpoints its blocks. Raises
        `InvalidRequestError` for an argument that this config sets and for a `like` of another type, and passes on the
        errors of TrainingArguments.
        """
        import dataclasses

        from transformers import TrainingArguments

        if like is None:
            return TrainingArguments(**training_arguments(self, others))
        if not isinstance(like, TrainingArguments):
            raise InvalidRequestError(
                f"to_training_arguments(like=...) got a {type(like).__name__}; it must be TrainingArguments.",
                "Pass those of your Trainer: like=trainer.args.",
            )
        without_workers = {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
        changed = without_workers if self.num_workers == 0 else {}
        decided = training_arguments(self, others)
        if like.optim not in ("adamw_torch", "adamw_torch_fused") and "optim" not in others:
            decided.pop("optim", None)
        return dataclasses.replace(like, **changed | decided)

    @property
    def loader_options(self) -> dict[str, int]:
        """Return the arguments of ``DataLoader`` that were measured: ``DataLoader(dataset, **config.loader_options)``.

        They are `batch_size` and, unless the loader's own were the best, `num_workers`, `pin_memory` and
        `prefetch_factor`. Your loader's other arguments were measured as they are, so keep them.
        """
        return {"batch_size": self.batch_size, **self.loader_arguments}

    def to_json(self) -> str:
        """Return this config as a JSON document."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> AmpConfig:
        """Read a config from a JSON document. Raises `InvalidRequestError` that names the invalid part."""
        try:
            return decode(text, cls)
        except msgspec.MsgspecError as error:
            if isinstance(error.__cause__, InvalidRequestError):
                raise error.__cause__ from None
            raise InvalidRequestError(
                f"This is not an AmpConfig: {error}.", "Compare it with AmpConfig.json_schema()."
            ) from error

    @staticmethod
    def json_schema() -> dict[str, object]:
        """Return the JSON schema of an AmpConfig document."""
        return msgspec.json.schema(AmpConfig)


def training_arguments(config: AmpConfig, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return keyword arguments for ``TrainingArguments`` from `config`, merged with `others`.

    Raises `InvalidRequestError` if `others` sets an argument that the config sets. On a CPU a plain ``Trainer`` trains
    in fp32 even if `fp16` is set.
    """
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "fp16": config.precision == "fp16",
        "bf16": config.autocast_precision == "bf16",
    }
    if not config.as_found:
        arguments["tf32"] = config.precision == "tf32"
    arguments |= {f"dataloader_{name}": value for name, value in config.loader_arguments.items()}
    if config.is_compiled:
        arguments |= {"torch_compile": True, "torch_compile_mode": config.compile}
    if config.uses("activation_checkpointing"):
        arguments |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    if config.optimizer_impl == "fused":
        arguments["optim"] = "adamw_torch_fused"
    further = dict(others or {})
    if conflicts := [name for name in arguments if name in further]:
        raise InvalidRequestError(
            f"{', '.join(f'{name}={further[name]!r}' for name in conflicts)}: the config decides that.",
            f"Leave {', '.join(conflicts)} out, or change the config: msgspec.structs.replace(config, ...).",
        )
    return arguments | further


def setting_beyond_training_arguments(config: AmpConfig) -> Setting:
    """Return the config's setting without compilation, which ``TrainingArguments`` set up themselves."""
    return msgspec.structs.replace(Setting.of(config), compile=DEFAULTS["compile"])


class DemotedError(TrainingStoppedError):
    """Raised when the controller falls back to a safer setting in which the running loop is not to go on.

    That is so if `on_demotion` is ``"checkpoint_and_stop"``, and for another batch size that the loop cannot follow.
    The training script should save a checkpoint and restart with `config`, the safer setting.
    """

    def __init__(self, message: str, next_step: str, config: AmpConfig) -> None:
        super().__init__(message, next_step)
        self.config = config

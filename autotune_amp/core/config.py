"""AmpConfig and LossScale: what a training run is to use, validated, as plain JSON.

msgspec rather than pydantic: a cached recommendation must be read within 50 ms, and importing pydantic alone
takes 160 ms where msgspec takes 4 (measured, Python 3.11).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence  # msgspec reads it from the annotations
from itertools import pairwise
from typing import Any

import msgspec

from autotune_amp.core.dimensions import PRECISIONS as PRECISIONS
from autotune_amp.core.dimensions import Precision as Precision
from autotune_amp.core.errors import InvalidRequestError, TrainingStoppedError
from autotune_amp.core.setting import Setting

# The least number above 0 that fp16 holds: the gradient of an fp16 loss begins as the scale itself, so that below
# this every gradient is 0.
MIN_LOSS_SCALE = 2.0**-24

FP16_MAX = 65504.0  # the largest number that fp16 holds


def _require(condition: bool, message: str, next_step: str) -> None:
    if not condition:
        raise InvalidRequestError(message, next_step)


def _require_positive(given: msgspec.Struct, *names: str, or_none: bool = False) -> None:
    for name in names:
        value = getattr(given, name)
        _require(
            (value is None and or_none) or (isinstance(value, (int, float)) and math.isfinite(value) and value > 0),
            f"{type(given).__name__}.{name} is {value!r}; it must be a finite number above 0.",
            f"Leave {name} out to use the default.",
        )


def _require_count(given: msgspec.Struct, *names: str, least: int = 1) -> None:
    for name in names:
        value = getattr(given, name)
        _require(
            (value is None and least == 0) or (type(value) is int and value >= least),
            f"{type(given).__name__}.{name} is {value!r}; it must be a whole number from {least} up.",
            f"Pass {name}={least} or more" + (", or leave it out to keep the data's own." if least == 0 else "."),
        )


class LossScale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The loss scaler's parameters; the defaults are those of ``torch.amp.GradScaler``.

    `growth_interval` is in optimizer steps. `hysteresis` is how many overflows it takes before the scale backs off;
    the count begins anew when the scale grows. `min_scale` and `max_scale` bound the scale; without a `min_scale`
    the bound is `floor`. Raises `InvalidRequestError` when a value cannot work.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float | None = None
    max_scale: float = 16777216.0

    def __post_init__(self) -> None:
        _require_positive(self, "init_scale", "growth_factor", "backoff_factor", "max_scale")
        _require_positive(self, "min_scale", or_none=True)
        _require_count(self, "growth_interval", "hysteresis")
        for name, is_within, bound in (
            ("growth_factor", self.growth_factor > 1, "above 1"),
            ("backoff_factor", self.backoff_factor <= 1, "at most 1"),
            ("min_scale", self.floor >= MIN_LOSS_SCALE, "at least 2**-24, the least that fp16 holds"),
        ):
            found = f"LossScale.{name} is {getattr(self, name)!r}"
            _require(is_within, f"{found}; it must be {bound}.", f"Leave {name} out to use the default.")
        _require(
            self.floor <= self.init_scale <= self.max_scale,
            f"LossScale.init_scale is {self.init_scale!r}, outside [min_scale, max_scale] = "
            f"[{self.floor!r}, {self.max_scale!r}].",
            "Move init_scale inside the bounds, or widen them (min_scale goes down to 2**-24).",
        )

    @property
    def floor(self) -> float:
        """The least scale: `min_scale`, or else 2^12 below `init_scale` or 1, whichever is less, but not below 2^-24.

        A scale that falls to 0 destroys the weights: 0 times a gradient is finite, so the step is taken, and
        unscaling by 1/0 makes them NaN (pytorch#99640). A scale below 1 alone is no fault: a sum-reduced loss may
        train well at 2^-6. Below 2^-24 fp16 holds nothing (`MIN_LOSS_SCALE`).
        """
        if self.min_scale is not None:
            return self.min_scale
        return max(MIN_LOSS_SCALE, min(1.0, self.init_scale * 2.0**-12))


def _require_setting(setting: Setting) -> None:
    owner = type(setting).__name__
    _require(
        setting.precision in PRECISIONS,
        f"{owner}.precision is {setting.precision!r}; it must be one of {', '.join(PRECISIONS)}.",
        "Pick one of the names given.",
    )
    _require_count(setting, "batch_size", "accumulation_steps")
    _require_count(setting, "num_workers", least=0)
    _make_tuple(setting, "pinned_modules", "module names", "head")


def _make_tuple(given: msgspec.Struct, name: str, what: str, example: str) -> None:
    value = getattr(given, name)
    _require(
        isinstance(value, Sequence) and not isinstance(value, str),
        f"{type(given).__name__}.{name} is {value!r}; it must be a list of {what}.",
        f'Write it as a list, e.g. {name}=["{example}"].',
    )
    msgspec.structs.force_setattr(given, name, tuple(value))


class FallbackPlan(Setting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A setting with less to go wrong that was measured to fit; throughput in samples per second.

    `slowdown` is the throughput of the recommended config over the plan's: 1.5 takes 1.5 times as long.
    """

    peak_memory_bytes: int | None = None
    samples_per_second: float | None = None
    slowdown: float | None = None

    def __post_init__(self) -> None:
        _require_setting(self)
        _require_positive(self, "slowdown", or_none=True)


class AmpConfig(Setting, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a training run is to use.

    `batch_size` is the number of samples in one forward pass on one device; `accumulation_steps` such passes make
    one optimizer step. `loss_scale` belongs to fp16 and to nothing else. `fallback` is what to step down to, first
    choice first: measured plans, or names of precisions, which are taken at their word; read it through `plans`.
    `num_workers` is the DataLoader's number of worker processes, None for the one that the data came with.
    `environment` holds variables to set before Python starts. `as_found` keeps the TF32 flags and autocast that the
    script has, instead of the strict flags of `precision`: they are what was measured. Raises `InvalidRequestError`
    when a value cannot work.
    """

    loss_scale: LossScale | None = None
    fallback: Sequence[FallbackPlan | Precision] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_setting(self)
        _require(
            (self.loss_scale is not None) == (self.precision == "fp16"),
            f"AmpConfig.loss_scale is {self.loss_scale!r} under precision {self.precision!r}; "
            "fp16 needs a loss scale and no other precision takes one.",
            "Pass loss_scale=LossScale() with fp16 and leave it out otherwise.",
        )
        _make_tuple(self, "fallback", "precisions or plans", "fp32")
        rungs = [self.precision, *(plan.precision for plan in self.plans)]
        safety = [PRECISIONS.index(rung) for rung in rungs]
        below = PRECISIONS[: safety[0]][::-1]
        _require(
            all(after < before for before, after in pairwise(safety)),
            f"AmpConfig.fallback is {', '.join(rungs[1:])} below {self.precision}; each precision must have less to go "
            "wrong than the one before it.",
            f"Choose from {', '.join(below)}, in this order."
            if below
            else "Leave fallback out: nothing is below fp32.",
        )

    __str__ = msgspec.Struct.__repr__  # a printed config says all that it holds, and not its setting alone

    @property
    def plans(self) -> tuple[FallbackPlan, ...]:
        """`fallback` as plans: a plain name keeps this config's batch size and accumulation, unmeasured."""
        return tuple(
            rung
            if isinstance(rung, FallbackPlan)
            else FallbackPlan(precision=rung, batch_size=self.batch_size, accumulation_steps=self.accumulation_steps)
            for rung in self.fallback
        )

    def to_training_arguments(self, *, like: Any = None, **others: Any) -> Any:
        """``transformers.TrainingArguments`` with this config's batch size, accumulation, precision and loader workers.

        `like` are today's: the result is of their class, ``Seq2SeqTrainingArguments`` or TRL's for example, and keeps
        what neither this config nor `others`, its other arguments, decide: learning rate, optimizer, schedule. What
        their class has derived from the former batch size is kept too, as ``dataclasses.replace`` does: name it in
        `others` (of TRL's ``GRPOConfig`` its ``generation_batch_size``).

        It cannot hold the loss scale, the fallbacks, the pinned modules and the environment:
        ``AutotuneTrainer(amp_config=config)`` of `autotune_amp.integrations.transformers` keeps to them, a plain
        ``Trainer`` scales fp16 with GradScaler's defaults. Raises `InvalidRequestError` for an argument that this
        config decides, for fp8 and for a `like` of another kind, ``ImportError`` without transformers, and what
        TrainingArguments raises itself, as for bf16 without an accelerator unless ``use_cpu=True``.
        """
        import dataclasses

        from transformers import TrainingArguments

        if like is None:
            return TrainingArguments(**training_arguments(self, others))
        _require(
            isinstance(like, TrainingArguments),
            f"to_training_arguments(like=...) got a {type(like).__name__}; it must be TrainingArguments.",
            "Pass those of your Trainer: like=trainer.args.",
        )
        without_workers = {"dataloader_prefetch_factor": None, "dataloader_persistent_workers": False}
        changed = without_workers if self.num_workers == 0 else {}
        return dataclasses.replace(like, **changed | training_arguments(self, others))

    def to_json(self) -> str:
        """This config as a JSON document."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> AmpConfig:
        """The config in a JSON document; raises `InvalidRequestError` naming what is wrong with it."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise InvalidRequestError(
                f"This is not an AmpConfig: {error}.", "Compare it with AmpConfig.json_schema()."
            ) from error

    @staticmethod
    def json_schema() -> dict[str, object]:
        """The JSON schema of an AmpConfig document."""
        return msgspec.json.schema(AmpConfig)


def training_arguments(config: AmpConfig, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Keyword arguments for ``TrainingArguments``, those of `others` among them.

    Raises `InvalidRequestError` where `others` names what the config decides, and for fp8, which Transformers cannot be
    asked for. On a CPU a plain ``Trainer`` trains in fp32 where `fp16` is set.
    """
    if config.precision == "fp8":
        raise InvalidRequestError("TrainingArguments has no fp8.", "Use a config in bf16, fp16, tf32 or fp32.")
    decided: dict[str, Any] = {
        "per_device_train_batch_size": config.batch_size,
        "gradient_accumulation_steps": config.accumulation_steps,
        "fp16": config.precision == "fp16",
        "bf16": config.precision == "bf16",
    }
    if not config.as_found:
        decided["tf32"] = config.precision == "tf32"
    if config.num_workers is not None:
        decided["dataloader_num_workers"] = config.num_workers
    given = dict(others or {})
    if twice := [name for name in decided if name in given]:
        raise InvalidRequestError(
            f"{', '.join(f'{name}={given[name]!r}' for name in twice)}: the config decides that.",
            f"Leave {', '.join(twice)} out, or change the config: msgspec.structs.replace(config, ...).",
        )
    return decided | given


class DemotedError(TrainingStoppedError):
    """The rung was stepped down and `on_demotion` is ``"checkpoint_and_stop"``; `config` is what to go on with.

    The training saves a checkpoint and starts again.
    """

    def __init__(self, message: str, next_step: str, config: AmpConfig) -> None:
        super().__init__(message, next_step)
        self.config = config

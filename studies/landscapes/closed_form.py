"""Landscapes whose step time is known in closed form, so that what a search misses is no matter of measuring.

Each is a training on a made device: the seconds of a forward and backward pass and of an update at every setting, the
memory, and how much processes differ. A process is drawn when it is asked for. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import msgspec
from landscape import Cell, Header, Process

from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import Space, build_space

SETUP_SECONDS, START_SECONDS = 0.3, 3.0
STEP_NOISE_SHARE = 0.5  # of the spread between processes: how steps of one process differ
NUM_STEPS = 20  # of a process; where more are asked for, they are drawn from these
TODAYS_BATCH_SIZE = 32
SIZES = tuple(2**k for k in range(3, 11))
Form: TypeAlias = Callable[[Precision, int], float]
MIB, LIMIT_BYTES = 2**20, 8 * 2**30
NATIVE: Mapping[Precision, float] = {"fp32": 1.0, "tf32": 2.0, "bf16": 4.0}
EMULATED: Mapping[Precision, float] = {"fp32": 1.0, "bf16": 0.4, "fp16": 0.05}
VARIANTS = {
    "memory_format": ("channels_last",),
    "optimizer_impl": ("foreach", "fused"),
    "compile": ("default", "max-autotune-no-cudagraphs"),
}
COMPILING_SECONDS = 12.0


@dataclass(frozen=True)
class Shape:
    """What a training on a device would take, without noise.

    `pass_seconds` is a forward and backward pass of so many samples in a precision, `update_seconds` the optimizer's
    part, `pass_bytes` the memory of a pass, `loading_seconds` that of a sample in one process. With `gains` the values
    of further dimensions (`variants`) change the pass's or the update's seconds by these factors.
    `effective_batch_size` None: it is free. `sizes` are the least and the largest batch to try, None for the search's
    own range.
    """

    name: str
    pass_seconds: Form
    update_seconds: float = 0.002
    pass_bytes: Form = lambda _, size: 2 * MIB * size
    held_bytes: float = 256 * MIB  # weights, gradients, optimizer state
    accumulating_bytes: float = 0.0
    loading_seconds: float = 0.0
    matmul_rates: Mapping[Precision, float] = field(default_factory=lambda: NATIVE)
    effective_batch_size: int | None = None
    gains: Mapping[str, float] = field(default_factory=dict)
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: VARIANTS)
    device: str = "cpu"
    limit_bytes: int = LIMIT_BYTES
    todays_batch_size: int = TODAYS_BATCH_SIZE
    sizes: tuple[int, int] | None = (min(SIZES), max(SIZES))
    is_as_found_strict: bool = True

    def step_seconds(self, setting: Setting) -> float:
        """One optimizer step, with what it waits for its data."""
        passing = self.pass_seconds(setting.precision, setting.batch_size) * self._gain(setting, of_update=False)
        computing = passing + self.update_seconds * self._gain(setting, of_update=True) / setting.accumulation_steps
        loading = setting.batch_size * self.loading_seconds
        num_workers = setting.num_workers or 0
        waiting = max(0.0, loading / num_workers - computing) if num_workers else loading
        return setting.accumulation_steps * (computing + waiting)

    def first_step_seconds(self, setting: Setting) -> float:
        """The first step of a process, with compilation."""
        return 2 * self.step_seconds(setting) + (COMPILING_SECONDS if setting.is_compiled else 0.0)

    def _gain(self, setting: Setting, *, of_update: bool) -> float:
        kept = {n: v for n, v in setting.active_variants.items() if (n == "optimizer_impl") == of_update}
        return math.prod(self.gains.get(value, 1.0) for value in kept.values())

    def data_seconds(self, setting: Setting) -> float:
        """The part of a step that waits for its data."""
        if not self.loading_seconds:
            return 0.0
        return self.step_seconds(setting) - dataclasses.replace(self, loading_seconds=0.0).step_seconds(setting)

    def memory_bytes(self, setting: Setting) -> float:
        """What counts against the limit."""
        accumulating = self.accumulating_bytes if setting.accumulation_steps > 1 else 0.0
        return self.held_bytes + accumulating + self.pass_bytes(setting.precision, setting.batch_size)


class ClosedForm:
    """A shape as a landscape that searches are played on; processes differ by `noise`, a standard deviation of the
    logarithm. `with_variants`: further dimensions are in the space.
    """

    def __init__(self, shape: Shape, noise: float, *, with_variants: bool = False) -> None:
        self.shape, self.noise, self.with_variants = shape, noise, with_variants
        self.header = _header(shape)

    def space(self) -> Space:
        """What a search has of it."""
        header, effective, sizes = self.header, self.shape.effective_batch_size, self.shape.sizes
        options = SearchOptions(
            precisions=header.precisions,
            batch_size=sizes and (sizes[0], effective or sizes[1]),
            effective_batch_size=effective or "free",
        )
        space = build_space(header.hardware, header.description, options)
        return msgspec.structs.replace(space, variants=dict(self.shape.variants) if self.with_variants else {})

    @cached_property
    def rates(self) -> dict[Setting, float]:
        """The true samples per second of every setting that can be had, 0 where memory is short."""
        found, num_cpus = self.space(), self.header.hardware.identity.num_cpus
        kinds = [
            dict(zip(found.variants, values, strict=True))
            for values in itertools.product(*(("", *values) for values in found.variants.values()))
        ]
        has_workers = self.header.description.num_workers is not None
        workers = (None, *(num for num in (1, 2, 4, 8, 16) if num <= num_cpus and has_workers))
        settings = [
            msgspec.structs.replace(cell, num_workers=num, **{name: value for name, value in kind.items() if value})
            for cell in (*found.candidates, found.baseline)
            for kind in (kinds[:1] if cell.as_found else kinds)  # no config can express that as found
            for num in workers
        ]
        return {setting: self.rate(setting) for setting in dict.fromkeys(settings)}

    def rate(self, setting: Setting) -> float:
        """True samples per second of any setting, 0 where memory is short."""
        if self.shape.memory_bytes(setting) > self.shape.limit_bytes:
            return 0.0
        return setting.effective_batch_size / self.shape.step_seconds(setting)

    def regret(self, setting: Setting) -> float:
        """The share of the best setting's samples per second that it does not reach; 1 where memory is short."""
        return 1 - self.rate(setting) / max(self.rates.values())

    def draw(self, setting: Setting, chance: random.Random) -> Process:
        """A process of it: slower or faster than the truth as a whole, and its steps among each other."""
        cell = Cell("grid", "fork", 0, setting.precision, setting.batch_size)
        speed = math.exp(chance.gauss(0.0, self.noise))
        truth = self.shape.step_seconds(setting) * speed
        memory = self.shape.memory_bytes(setting)
        if memory > self.shape.limit_bytes:
            out = Failure(kind="oom", message="it took more than its limit")
            return Process(cell=cell, outcome=out, seconds=SETUP_SECONDS + truth, deadline_seconds=math.inf)
        # Whole steps of it; a trial times fewer passes of a long window, which is left out.
        spread = STEP_NOISE_SHARE * self.noise
        steps = tuple(truth * math.exp(chance.gauss(0.0, spread)) for _ in range(NUM_STEPS))
        first = self.shape.first_step_seconds(setting) * speed
        mean = sum(steps) / NUM_STEPS
        outcome = Measurement(
            step_seconds=mean,
            step_seconds_interval=(min(steps), max(steps)),
            samples_per_second=setting.effective_batch_size / mean,
            data_seconds=self.shape.data_seconds(setting) * speed,
            peak_memory_bytes=int(memory),
            reserved_memory_bytes=int(memory),
            raw_step_seconds=steps,
            build_seconds=0.01,
            context_seconds=0.0,
            first_step_seconds=first,
        )
        warm_up = (first, truth, truth)
        seconds = SETUP_SECONDS + sum(warm_up) + sum(steps)
        return Process(
            cell=cell, outcome=outcome, seconds=seconds, deadline_seconds=math.inf, warmup_step_seconds=warm_up
        )

    def step_seconds(self, precision: Precision, batch_size: int) -> float:
        """A pass and an update of any batch."""
        return self.shape.step_seconds(Setting(precision=precision, batch_size=batch_size))

    def setup_seconds(self) -> float:
        """What a process takes before its first step."""
        return SETUP_SECONDS


class Repeated(ClosedForm):
    """One whose n-th process of a setting is the same for a `seed`, in whatever order processes are drawn.

    As on cards no variables are recommended.
    """

    def __init__(self, form: ClosedForm, seed: int) -> None:
        super().__init__(form.shape, form.noise, with_variants=form.with_variants)
        self.header = msgspec.structs.replace(self.header, environment={})
        self._seed = seed
        self._num_drawn: Counter[Setting] = Counter()

    def draw(self, setting: Setting, chance: random.Random) -> Process:
        """A process of it."""
        self._num_drawn[setting] += 1
        return super().draw(setting, random.Random(f"{self._seed} {setting} {self._num_drawn[setting]}"))


def _header(shape: Shape) -> Header:
    limit, on_cpu = shape.limit_bytes, shape.device == "cpu"
    return Header(
        workload=shape.name,
        hardware=Hardware(
            device=shape.device,
            identity=DeviceIdentity(type=shape.device, name="in closed form", num_cpus=4, total_memory_bytes=limit),
            memory=DeviceMemory(total=limit, free=limit, available=limit),
            precisions={
                precision: Capability(
                    level="native" if rate >= 1 else "emulated", reason="made", matmul_flops_per_second=rate * 1e11
                )
                for precision, rate in shape.matmul_rates.items()
            },
        ),
        description=Description(
            name=shape.name,
            batch_size=shape.todays_batch_size,
            num_samples=1_000_000,
            data="DataLoader, 0 workers",
            num_parameters=1000,
            num_trainable_parameters=1000,
            weights="fp32",
            as_found_precision="fp32",
            is_as_found_strict=shape.is_as_found_strict,
            build_seconds=0.01,
            context_seconds=0.0,
            num_workers=0 if shape.loading_seconds else None,
            checks=("fidelity", "calibration", "accumulation"),
        ),
        versions={},
        torch_state={},
        precisions=tuple(shape.matmul_rates),
        batch_sizes=SIZES,
        todays_batch_size=shape.todays_batch_size,
        memory_limit_bytes=limit,
        start_seconds=START_SECONDS,
        holds_heap=on_cpu,
        environment={"MALLOC_TRIM_THRESHOLD_": "1"} if on_cpu else {},
        settings={},
    )


# -- the shapes --------------------------------------------------------------------------------------------------------


def _line(**of: tuple[float, float]) -> Form:
    """a + c * b, in milliseconds, of each precision."""
    return lambda precision, size: (of[precision][0] + of[precision][1] * size) / 1000


def _times(
    base: Callable[[Precision, int], float], factor: Callable[[Precision, int], float]
) -> Callable[[Precision, int], float]:
    return lambda precision, size: base(precision, size) * factor(precision, size)


def _cliff(precision: Precision, size: int) -> float:
    """What no longer fits into a cache costs 1.8 times as much, in half precision at twice the batch."""
    return 1.8 if size > (128 if precision == "bf16" else 64) else 1.0


def _dip(precision: Precision, size: int) -> float:  # noqa: ARG001 - a factor takes both
    """Two batches in the middle get a slow kernel."""
    return 1.35 if size in (64, 128) else 1.0


def _falling(precision: Precision, size: int) -> float:  # noqa: ARG001 - a factor takes both
    """Every doubling beyond 8 costs 6 % more a sample."""
    return math.pow(1.06, math.log2(size / 8))


def _ragged(precision: Precision, size: int) -> float:
    """Half precision wants batches that are multiples of 16."""
    return 1.5 if precision == "bf16" and size % 16 else 1.0


_EVEN = _line(fp32=(6, 0.4), bf16=(6, 0.2), tf32=(6, 0.21))
_CLOSE = _line(fp32=(5, 0.4), bf16=(6, 0.37), tf32=(6, 0.44))

SHAPES = (
    Shape("plateau", _EVEN, gains={"channels_last": 0.85, "fused": 0.5, "foreach": 0.7, "default": 0.8}),
    Shape("cliff", _times(_CLOSE, _cliff), gains={"default": 0.9}),
    Shape(
        "crossing", _line(fp32=(4, 0.4), bf16=(14, 0.25), tf32=(30, 0.22)), gains={"channels_last": 1.1, "default": 0.7}
    ),
    Shape(
        "wall in fp32",
        _line(fp32=(8, 0.2), bf16=(30, 0.17), tf32=(9, 0.21)),
        pass_bytes=lambda precision, size: (24 if precision == "bf16" else 80) * MIB * size,
        gains={"default": 0.95, "max-autotune-no-cudagraphs": 0.88},
    ),
    Shape(
        "emulated",
        _line(fp32=(6, 0.5), bf16=(8, 1.3), fp16=(20, 12.0)),
        matmul_rates=EMULATED,
        gains={"channels_last": 0.8},
    ),
    Shape(
        "launch-bound",
        _line(fp32=(20, 0.02), bf16=(24, 0.01), tf32=(26, 0.01)),
        update_seconds=0.008,
        gains={"default": 0.6, "max-autotune-no-cudagraphs": 0.55, "fused": 0.3, "foreach": 0.4},
    ),
    Shape("two peaks", _times(_line(fp32=(3, 0.4), bf16=(4, 0.36), tf32=(4, 0.45)), _dip), gains={"foreach": 0.6}),
    Shape("falling", _times(_line(fp32=(0.5, 0.4), bf16=(1.5, 0.3), tf32=(2.5, 0.3)), _falling)),
    Shape("loader-bound", _EVEN, loading_seconds=0.0006, gains={"default": 0.7}),
    Shape(
        "wall that accumulation moves",
        _EVEN,
        pass_bytes=lambda precision, size: (22 if precision == "bf16" else 41) * MIB * size,
        accumulating_bytes=4 * 2**30,
        update_seconds=0.01,
        effective_batch_size=192,
        gains={"fused": 0.4, "default": 0.85},
    ),
    Shape(
        "ragged",
        _times(_line(fp32=(4, 0.4), bf16=(5, 0.28), tf32=(5, 0.3)), _ragged),
        effective_batch_size=144,
        gains={"channels_last": 0.9, "default": 0.95},
    ),
    Shape("nothing to gain", _line(fp32=(0.2, 0.4), bf16=(0.2, 0.43), tf32=(0.2, 0.43)), gains={"default": 1.05}),
)
NOISES = (0.0, 0.05, 0.15)


def landscapes(*, with_variants: bool = False) -> dict[str, ClosedForm]:
    """Every shape at every noise, by name."""
    return {
        f"{shape.name}, {100 * noise:.0f} %": ClosedForm(shape, noise, with_variants=with_variants)
        for shape in SHAPES
        for noise in NOISES
    }

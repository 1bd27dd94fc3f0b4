"""What the agent in a command's processes says: one struct for each event, as `agent` sends it."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """`pid` of the process that says it, `time` on the host's monotonic clock."""

    pid: int
    time: float


class _OfRank(_Message, frozen=True, kw_only=True):
    rank: int
    world: int
    local_rank: int


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """A Python has started."""

    parent_pid: int
    python: str


class Torch(_OfRank, frozen=True, kw_only=True, tag="torch"):
    """A Python has imported torch; its rank is as a launcher says. `worker` is the name that multiprocessing gave the
    process, None where it started it not."""

    arguments: tuple[str, ...]
    parent_pid: int
    folder: str
    torch: str
    worker: str | None


class Optimizer(_OfRank, frozen=True, kw_only=True, tag="optimizer"):
    """An optimizer is about to take its first step, or has just taken it. `num_parameters` is by dtype, as is
    `num_frozen`, of parameters that the modules seen so far do not train."""

    index: int
    name: str
    num_parameters: dict[str, int]
    num_frozen: dict[str, int] = {}
    devices: tuple[str, ...]
    is_fused: bool
    uses_tf32: bool
    line: str
    num_threads: int
    host: str


class Loader(_Message, frozen=True, kw_only=True, tag="loader"):
    """A DataLoader was made: by `maker`, which is the same in every run, at `line` of the user's own."""

    index: str
    maker: str
    line: str
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    shuffles: bool
    num_samples: int | None


class Scaler(_Message, frozen=True, kw_only=True, tag="scaler"):
    """A GradScaler was made, as `Loader` says; one that is not enabled does nothing."""

    is_enabled: bool
    maker: str
    line: str


class Site(_Message, frozen=True, kw_only=True, tag="site"):
    """A call that made something which training uses, of class `name`: a `kind` of ``loader``, ``batch_sampler``,
    ``autocast``, ``scaler``, ``forward``, ``training_arguments``, ``lightning_trainer`` or ``accelerator``.

    It is at `line` and ends at `end` (line, column), where that is known. `maker` is the module of a library that made
    the call, "" where the user's own line did. `values` are what came of it; `parameters` the names of what can be
    given by position. `loader` is a DataLoader's index, `dataset` the same for all over the same data.
    """

    kind: str
    name: str
    line: str
    end: tuple[int, int] | None
    maker: str
    parameters: tuple[str, ...]
    values: dict[str, bool | int | float | str | None]
    loader: str | None = None
    dataset: int | None = None


class Step(_Message, frozen=True, kw_only=True, tag="step"):
    """An optimizer step. Samples by loader, batches, waits, backward passes and compilations are counted from the
    beginning; losses, forwards and autocast regions are since the step before. A loss that is not finite is text
    (``nan``, ``inf``, ``-inf``), since JSON has no such numbers. A forward is the class of an outermost module, the
    size of what entered it, the dtype that its weights were used in. `is_settled`: the device was waited for, so that
    intervals between such steps are true."""

    optimizer: int
    is_skipped: bool
    losses: tuple[float | str, ...]
    num_backward: int
    forwards: tuple[tuple[str, int | None, str], ...]
    regions: tuple[str, ...]
    num_samples: dict[str, int]
    num_batches: int
    wait_seconds: float
    num_compilations: int
    is_settled: bool = False
    overhead_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    num_ooms: int = 0


class Gradient(_OfRank, frozen=True, kw_only=True, tag="gradient"):
    """A frozen step: its gradient is at `path`, in float32, `sizes` entries of each parameter; digests of the rest.
    `has_low_weights`: some weights are kept in half precision."""

    optimizer: int
    number: int
    path: str
    sizes: tuple[int, ...]
    weights: str
    batch: str | None
    has_low_weights: bool = False


class Set(_Message, frozen=True, kw_only=True, tag="set"):
    """The value of `name`, a field of a setting, was set from outside, in `what` at `line`."""

    name: str
    what: str
    was: int | str | None
    value: int | str
    line: str


class Switch(_Message, frozen=True, kw_only=True, tag="switch"):
    """A framework's object was made through which training can be set: `arguments` are those of its class `owner` for
    fields of a setting, `today` what they are, as far as they say it. `parser` is what took them from the command line
    of `script`, "" where nothing did."""

    owner: str
    arguments: dict[str, str]
    today: dict[str, int | str]
    parser: str
    script: str
    line: str


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The process is ending rather than changing what was there before; `path` is an address for an upload."""

    what: str
    path: str
    line: str


class Error(_OfRank, frozen=True, kw_only=True, tag="error"):
    """An exception ends the process: `types` are the names of its class and that one's bases, `free_memory_share` the
    least share of its accelerator's memory that was left, None where that is not known."""

    types: tuple[str, ...]
    message: str
    traceback: str
    free_memory_share: float | None = None


class Unstepped(_Message, frozen=True, kw_only=True, tag="unstepped"):
    """So many backward passes were made, and no optimizer of torch's has taken a step."""

    num_backward: int


class Exit(_OfRank, frozen=True, kw_only=True, tag="exit"):
    """The process ends by itself."""


class Stack(_Message, frozen=True, kw_only=True, tag="stack"):
    """Where the threads of a process are; `at` are the files that the main thread is in, the innermost last."""

    text: str
    at: tuple[str, ...]


Message: TypeAlias = (
    Hello
    | Torch
    | Optimizer
    | Loader
    | Scaler
    | Site
    | Step
    | Gradient
    | Set
    | Switch
    | Refused
    | Unstepped
    | Error
    | Exit
    | Stack
)

"""Messages that the agent in a command's processes sends: one struct for each kind of event."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class AgentMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of all messages: `pid` of the sending process, `time` in seconds on the host's monotonic clock."""

    pid: int
    time: float


class _OfRank(AgentMessage, frozen=True, kw_only=True):
    rank: int
    world: int


class Hello(AgentMessage, frozen=True, kw_only=True, tag="hello"):
    """Message that a Python process has started."""


class Torch(_OfRank, frozen=True, kw_only=True, tag="torch"):
    """Message that a Python process has imported torch. Its rank is from the launcher's environment variables. `worker`
    is the process's name in multiprocessing, None if multiprocessing did not start it.
    """

    arguments: tuple[str, ...]
    parent_pid: int
    folder: str
    worker: str | None


class Optimizer(_OfRank, frozen=True, kw_only=True, tag="optimizer"):
    """Message that an optimizer is about to take its first step, or has just taken it.

    `num_parameters` is the number of its parameters by dtype, and `num_frozen` that of untrained parameters in the
    modules that have run. `line` is the user's line that calls `step`.
    """

    index: int
    name: str
    num_parameters: dict[str, int]
    num_frozen: dict[str, int] = {}
    devices: tuple[str, ...]
    uses_tf32: bool
    line: str


class Loader(AgentMessage, frozen=True, kw_only=True, tag="loader"):
    """Message that a DataLoader was created: by the call `maker` (``file:function:line``), the same in every run,
    possibly in a library; at the user's `line`.
    """

    index: str
    maker: str
    line: str
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    shuffles: bool
    num_samples: int | None


class Scaler(AgentMessage, frozen=True, kw_only=True, tag="scaler"):
    """Message that a GradScaler was created, enabled or not."""


class Site(AgentMessage, frozen=True, kw_only=True, tag="site"):
    """Message about the call that created an object of class `name` used in training. `kind` is ``loader``,
    ``batch_sampler``, ``autocast``, ``scaler``, ``forward``, ``training_arguments``, ``lightning_trainer`` or
    ``accelerator``.

    The call is at `line` and ends at `end` (line, column), None if unknown. `maker` is the module of the library that
    made the call, "" for the user's code. `values` are the object's values, `parameters` the names of the positional
    arguments. `loader` is the index of a DataLoader; `dataset` is equal for loaders of the same data.
    """

    kind: str
    name: str
    line: str
    end: tuple[int, int] | None
    maker: str
    parameters: tuple[str, ...]
    values: dict[str, bool | int | str | None]
    loader: str | None = None
    dataset: int | None = None


class Loaded(_OfRank, frozen=True, kw_only=True, tag="loaded"):
    """Message that the first forward pass in training begins: all that comes before is done.

    `device` is the type of the parameters' device. Bytes of its memory: `total_bytes` in all, `used_bytes` by all
    processes, and `reserved_bytes` by the allocator of this one; 0 if they are not known.
    """

    device: str
    total_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0


class Step(AgentMessage, frozen=True, kw_only=True, tag="step"):
    """Message about an optimizer step.

    Samples by loader, batches, seconds of waiting for them, backward passes and compilations are counted from the start
    of the process; losses, forwards and autocast regions from the previous step. A loss that is not finite is text
    (``nan``, ``inf``, ``-inf``), since JSON has no such numbers. A forward is the class of an outermost module, the
    size of its input in samples, and the dtype of its weights. `tokens` in the inputs of these forwards, and
    `tokens_by_loader` from the start of the process, are pairs of the number of real tokens and of all positions; None
    or empty without token ids. `is_settled`: the device was synchronized before `time` was taken.
    """

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
    tokens: tuple[int, int] | None = None
    tokens_by_loader: dict[str, tuple[int, int]] = {}
    is_settled: bool = False
    overhead_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    num_ooms: int = 0


class Gradient(_OfRank, frozen=True, kw_only=True, tag="gradient"):
    """Message about a step that was replaced by recording its gradient, in the file `path`: float32, with `sizes`
    entries of each parameter. `weights` and `batch` are digests. `has_low_weights`: some weights are in half precision.
    `part` is the number of the group of parameters, where an optimizer steps each by itself.
    """

    optimizer: int
    number: int
    part: int = 0
    path: str
    sizes: tuple[int, ...]
    weights: str
    batch: str | None
    has_low_weights: bool = False


class Flops(AgentMessage, frozen=True, kw_only=True, tag="flops"):
    """Message about the floating-point operations of one optimizer step, and the samples and positions of tokens that
    loaders yielded for it. With a `problem` some operations were not counted.
    """

    flops: int
    problem: str | None
    num_samples: int
    num_positions: int


class Diagnosed(_OfRank, frozen=True, kw_only=True, tag="diagnosed"):
    """Message with the `result` of a diagnosis as a JSON document; None if `autotune_amp` cannot be imported by the
    command's Python, the program `python`, with the `problem`.
    """

    result: str | None
    problem: str
    python: str


class Set(AgentMessage, frozen=True, kw_only=True, tag="set"):
    """Message that the agent set the field `name` of a setting in the object `what` at `line`."""

    name: str
    what: str
    line: str


class Switch(AgentMessage, frozen=True, kw_only=True, tag="switch"):
    """Message that an object of a framework's class `owner` was created whose arguments set the training.

    `arguments` maps fields of a setting to arguments of `owner`, `today` to their values, if given; of
    TrainingArguments also ``optim``, ``gradient_checkpointing`` and ``n_gpu``, and ``attn_implementation`` of the
    Trainer's model. `parser` is ``HfArgumentParser`` if it read them from the command line of `script`, else "".
    """

    owner: str
    arguments: dict[str, str]
    today: dict[str, int | str]
    parser: str
    script: str


class Refused(AgentMessage, frozen=True, kw_only=True, tag="refused"):
    """Message that the process exits because it was about to change the existing file `path`, or to upload to the
    address `path`.
    """

    what: str
    path: str
    line: str


class Error(_OfRank, frozen=True, kw_only=True, tag="error"):
    """Message that an exception ends the process, or that the agent itself raised one (`is_of_agent`).

    `types` are the names of its class and base classes. `free_memory_share` is the smallest share of the accelerator's
    memory that was free, None if unknown.
    """

    types: tuple[str, ...]
    message: str
    traceback: str
    free_memory_share: float | None = None
    is_of_agent: bool = False


class Captured(AgentMessage, frozen=True, kw_only=True, tag="captured"):
    """Message that an optimizer step was captured into a CUDA graph, whose replays are not observed."""


class Unstepped(AgentMessage, frozen=True, kw_only=True, tag="unstepped"):
    """Message that after `num_backward` backward passes no optimizer of torch has taken a step."""

    num_backward: int


class Exit(_OfRank, frozen=True, kw_only=True, tag="exit"):
    """Message that the process exits normally."""


class Stack(AgentMessage, frozen=True, kw_only=True, tag="stack"):
    """Message with the stacks of a process's threads. `at` are the files of the main thread's frames, the innermost
    last.
    """

    text: str
    at: tuple[str, ...]


class ConnectionClosed(AgentMessage, frozen=True, kw_only=True, tag="closed"):
    """Message that the listener adds when the connection of the process `pid` has ended."""


Message: TypeAlias = (
    Hello
    | Torch
    | Optimizer
    | Loader
    | Scaler
    | Site
    | Step
    | Gradient
    | Flops
    | Diagnosed
    | Set
    | Switch
    | Loaded
    | Refused
    | Captured
    | Unstepped
    | Error
    | Exit
    | Stack
    | ConnectionClosed
)

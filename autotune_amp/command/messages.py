"""Messages from the agent in a command's processes: one struct for each event, as `agent` sends it."""

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
    local_rank: int


class Hello(AgentMessage, frozen=True, kw_only=True, tag="hello"):
    """Message that a Python process has started."""

    parent_pid: int
    python: str


class Torch(_OfRank, frozen=True, kw_only=True, tag="torch"):
    """Message that a Python process has imported torch; its rank is as the launcher says. `worker` is the name that
    multiprocessing gave to the process, None if multiprocessing did not start it.
    """

    arguments: tuple[str, ...]
    parent_pid: int
    folder: str
    torch: str
    worker: str | None


class Optimizer(_OfRank, frozen=True, kw_only=True, tag="optimizer"):
    """Message that an optimizer is about to take its first step, or has just taken it.

    `num_parameters` is by dtype, as is `num_frozen`, the number of parameters of the modules seen so far that are not
    trained.
    """

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


class Loader(AgentMessage, frozen=True, kw_only=True, tag="loader"):
    """Message that a DataLoader was made: by `maker`, which is the same in every run, at `line` of the user's
    own code.
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
    """Message that a GradScaler was made; `maker` and `line` as in `Loader`. A scaler that is not enabled
    does nothing.
    """

    is_enabled: bool
    maker: str
    line: str


class Site(AgentMessage, frozen=True, kw_only=True, tag="site"):
    """Call that made an object of class `name` which training uses. `kind` is ``loader``, ``batch_sampler``,
    ``autocast``, ``scaler``, ``forward``, ``training_arguments``, ``lightning_trainer`` or ``accelerator``.

    The call is at `line` and ends at `end` (line, column), None if not known. `maker` is the module of a library that
    made the call, "" for the user's own code. `values` are the resulting values; `parameters` the names of the
    arguments that can be given by position. `loader` is the index of a DataLoader; `dataset` is the same for all
    loaders of the same data.
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


class Step(AgentMessage, frozen=True, kw_only=True, tag="step"):
    """Message about an optimizer step.

    Samples by loader, batches, waits, backward passes and compilations are counted from the start of the process;
    losses, forwards and autocast regions since the previous step. A loss that is not finite is text (``nan``, ``inf``,
    ``-inf``), since JSON has no such numbers. A forward is the class of an outermost module, the size of its input, and
    the dtype that its weights were used in. `is_settled`: the device was synchronized, so that intervals between such
    steps are true.
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
    is_settled: bool = False
    overhead_seconds: float = 0.0
    peak_memory_bytes: int | None = None
    reserved_memory_bytes: int | None = None
    num_ooms: int = 0


class Gradient(_OfRank, frozen=True, kw_only=True, tag="gradient"):
    """Message about a frozen step (one whose update is not applied): its gradient is in the file `path`, in float32,
    with `sizes` entries of each parameter. `weights` and `batch` are digests. `has_low_weights`: some weights are kept
    in half precision.
    """

    optimizer: int
    number: int
    path: str
    sizes: tuple[int, ...]
    weights: str
    batch: str | None
    has_low_weights: bool = False


class Set(AgentMessage, frozen=True, kw_only=True, tag="set"):
    """Message that the value of `name`, a field of a setting, was set from outside, in `what` at `line`."""

    name: str
    what: str
    was: int | str | None
    value: int | str
    line: str


class Switch(AgentMessage, frozen=True, kw_only=True, tag="switch"):
    """Message that a framework's object was made through which training can be set.

    `arguments` maps fields of a setting to the arguments of its class `owner`, `today` to their values as far as they
    are given. `parser` is the parser that took them from the command line of `script`, "" if none did.
    """

    owner: str
    arguments: dict[str, str]
    today: dict[str, int | str]
    parser: str
    script: str
    line: str


class Refused(AgentMessage, frozen=True, kw_only=True, tag="refused"):
    """Message that the process ends because it was about to change a file that was there before; for an upload, `path`
    is its address.
    """

    what: str
    path: str
    line: str


class Error(_OfRank, frozen=True, kw_only=True, tag="error"):
    """Message that an exception ends the process.

    `types` are the names of its class and the base classes, `free_memory_share` is the least share of the accelerator's
    memory that was free, None if not known.
    """

    types: tuple[str, ...]
    message: str
    traceback: str
    free_memory_share: float | None = None


class Unstepped(AgentMessage, frozen=True, kw_only=True, tag="unstepped"):
    """Message that `num_backward` backward passes were made, but no optimizer of torch has taken a step."""

    num_backward: int


class Exit(_OfRank, frozen=True, kw_only=True, tag="exit"):
    """Message that the process ends by itself."""


class Stack(AgentMessage, frozen=True, kw_only=True, tag="stack"):
    """Stacks of all threads of a process. `at` are the files that the main thread is in, the innermost last."""

    text: str
    at: tuple[str, ...]


class ConnectionClosed(AgentMessage, frozen=True, kw_only=True, tag="closed"):
    """Message of the listener, in the name of a process whose connection has ended."""


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
    | ConnectionClosed
)

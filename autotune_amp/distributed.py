"""Search on rank 0 for all ranks of the caller's launcher. The other ranks wait for the answer.

It is sent through the store of torch's process groups, without making a group. With a single rank, torch is not used.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune_amp.core import errors
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError, RunnerError
from autotune_amp.core.recommendation import (
    Exclusion,
    Fingerprint,
    NothingWorksError,
    Recommendation,
    SearchInterruptedError,
)
from autotune_amp.interruption import heed

# Rank 0 may come later than the others, and its budget does not include its work before and after the search.
_LATE_SECONDS = 600.0

# Variables that torchrun, MPI and Slurm set for each rank. Mostly exact names: MASTER_KEY may be the user's own.
_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"}
    | {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    | {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"}
)
_FAMILIES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "MPI_LOCAL", "PMI_", "PMIX_")
_SETTINGS = "PMIX_MCA_"  # set by the user, not by the launcher

_HEARD_SECONDS = 30.0
_INTERRUPTED_SECONDS = 2.0
_POLL_SECONDS = 0.1

_SLURM_PORTS = range(15_000, 30_000)  # below the ephemeral ports of Linux

_own_store: Any = None  # open until the process ends: a process group made later uses the same server
_num_calls = 0


def is_from_launcher(variable: str) -> bool:
    """Whether an environment variable of this name tells the rank of the process, or where the other ranks are.

    Such variables are hidden from trials, which are no ranks of the caller's launcher.
    """
    return variable in _NAMES or (variable.startswith(_FAMILIES) and not variable.startswith(_SETTINGS))


class OwnRank(NamedTuple):
    """Rank of this process, and the number of ranks.

    `is_rerun`: Lightning started this process by running the script again, after rank 0 made the same call as the only
    rank. It takes the recommendation that rank 0 saved.
    """

    rank: int
    num_ranks: int
    is_rerun: bool = False


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Message with rank 0's answer for the other ranks: a recommendation, or the name and fields of our `error`."""

    recommendation: Recommendation | None = None
    error: str | None = None
    message: str = ""
    next_step: str = ""
    excluded: tuple[Exclusion, ...] = ()
    best: Recommendation | None = None

    @classmethod
    def of(cls, error: BaseException) -> _Answer:
        """Return the message for an error of rank 0: one of ours with its fields, any other as a `RunnerError`."""
        if not isinstance(error, AutotuneAmpError):
            error = RunnerError(f"Rank 0 failed: {type(error).__name__}: {error}", "See the traceback of rank 0.")
        held = {name: value for name, value in vars(error).items() if name in cls.__struct_fields__}
        return cls(error=type(error).__name__, **held)

    def opened(self) -> Recommendation:
        """Return the recommendation, or raise the error of rank 0."""
        if self.recommendation is not None:
            return self.recommendation
        if self.error == NothingWorksError.__name__:
            raise NothingWorksError(self.message, self.next_step, self.excluded)
        if self.error == SearchInterruptedError.__name__:
            raise SearchInterruptedError(self.message, self.next_step, self.excluded, self.best)
        raise vars(errors)[str(self.error)](self.message, self.next_step)


def place() -> OwnRank:
    """Return the rank of this process by torch's process group, else by a launcher's RANK and WORLD_SIZE, else by
    Slurm's srun.

    Raises `InvalidRequestError` if the variables are not a rank and a larger number of ranks.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return OwnRank(distributed.get_rank(), distributed.get_world_size())
    names = place_variables()
    size, rank = os.environ.get(names[0], "1"), os.environ.get(names[1], "")
    if size == "1":
        return OwnRank(0, 1)
    if not rank and os.environ.get("LOCAL_RANK", "0") != "0":
        return OwnRank(0, 1, is_rerun=True)
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise InvalidRequestError(
            f"{names[0]} is {size!r} and {names[1]} is {rank!r}; a launcher sets whole numbers, {names[1]} below "
            f"{names[0]}.",
            f"Start the ranks with torchrun or srun, or unset {names[0]} to search in this process alone.",
        )
    return OwnRank(int(rank), int(size))


def place_variables() -> tuple[str, str]:
    """Return the names of the variables for the number of ranks and for the rank: torch's, or else Slurm's."""
    # Only srun starts a step. A batch script without one has SLURM_PROCID=0 and the SLURM_NTASKS of its job too.
    is_step = "SLURM_STEP_NUM_TASKS" in os.environ and "WORLD_SIZE" not in os.environ and "RANK" not in os.environ
    return ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID") if is_step else ("WORLD_SIZE", "RANK")


def answer_on_first(find: Callable[[], Recommendation], where: OwnRank, budget_seconds: object) -> Recommendation:
    """Call `find` on rank 0 only; return its recommendation, or raise its error, on every rank.

    Raises `RunnerError` on the other ranks if rank 0 dies, raises an error that is not ours, or gives no answer within
    ten minutes and twice the budget, and `SearchInterruptedError` at Ctrl-C. With an infinite budget they wait as long
    as rank 0 lives.
    """
    if where.num_ranks == 1:
        return find()
    # An invalid budget is left for rank 0 to reject.
    is_budget = isinstance(budget_seconds, (int, float)) and budget_seconds > 0
    limit_seconds = _LATE_SECONDS + (2 * float(budget_seconds) if is_budget else 0.0)  # type: ignore[arg-type]
    try:
        store = RankStore(where.rank, where.num_ranks, limit_seconds)
        if where.rank > 0:
            return msgspec.json.decode(store.hear(), type=_Answer).opened()
    except KeyboardInterrupt:
        raise SearchInterruptedError(
            f"Rank {where.rank} was interrupted before rank 0 had an answer.", "Start all ranks again.", (), None
        ) from None
    try:
        found = find()
    except (SearchInterruptedError, KeyboardInterrupt) as error:  # the others were interrupted too, as a rule
        store.tell(msgspec.json.encode(_Answer.of(error)), _INTERRUPTED_SECONDS)
        raise
    except BaseException as error:
        store.tell(msgspec.json.encode(_Answer.of(error)))
        raise
    store.tell(msgspec.json.encode(_Answer(recommendation=found)))
    return found


def left_no_answer(path: Path, cached: Recommendation | None, fingerprint: Fingerprint | None) -> InvalidRequestError:
    """Return the error for a rerun if rank 0 has saved no recommendation that holds for the rerun's own call."""
    changes = cached.fingerprint.differences(fingerprint) if cached is not None and fingerprint is not None else ()
    return InvalidRequestError(
        f"LOCAL_RANK is {os.environ.get('LOCAL_RANK', '')!r} without a RANK, as in the processes that Lightning starts "
        "by running the script again. They take the answer of the first process, and for this call there is none in "
        f"{path}{''.join(f'; {change}' for change in changes[:3])}.",
        "Call recommend_config() alike in every process and before the training starts, with the workload itself and "
        "not its name; or start the script with torchrun, which needs neither.",
    )


def free_port() -> int:
    """Return a port of this host on which no process listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def alone(num_ranks: int, trainer_ranks: int, device: str) -> tuple[str, ...]:
    """Return a warning that one rank was measured alone of `num_ranks`, which the search's options count, or of
    `trainer_ranks`, which a Trainer starts itself; empty if it is the only one.
    """
    num_all = max(num_ranks, trainer_ranks)
    beside = ", and their load was not on the CPU" if device == "cpu" else ""
    per_device = " Effective batch size, hours and price are one device's." if trainer_ranks > num_ranks else ""
    warning = (
        f"Measured on one of {num_all} ranks alone: gradients were not exchanged{beside}. A rank will be slower than "
        f"this in training.{per_device}"
    )
    return (warning,) if num_all > 1 else ()


class RankStore:
    """Store through which rank 0 sends one answer to all ranks; every rank must make the same number of these.

    It uses the store of the default process group, or else one at MASTER_ADDR and MASTER_PORT, which a process group
    made later shares. Raises `InvalidRequestError` if there is neither, `RunnerError` if rank 0 is not reached within
    `limit_seconds`, or ten minutes if that is infinite.
    """

    def __init__(self, rank: int, num_ranks: int, limit_seconds: float) -> None:
        global _num_calls
        _num_calls += 1
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # its stubs do not export it

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives the ranks
        meeting_seconds = limit_seconds if math.isfinite(limit_seconds) else _LATE_SECONDS
        self._store = PrefixStore(f"autotune_amp/{attempt}/{_num_calls}", _store(rank, num_ranks, meeting_seconds))
        self._num_ranks = num_ranks
        self._deadline = time.monotonic() + limit_seconds

    def tell(self, answer: bytes, heard_seconds: float = _HEARD_SECONDS) -> None:
        """Send the answer to the other ranks. If the store may end with rank 0, wait at most `heard_seconds` until they
        have it."""
        self._store.set("answer", answer.decode())
        deadline = time.monotonic() + (0.0 if _is_held_by_agent() else heard_seconds)
        while time.monotonic() < deadline and self._store.add("num_heard", 0) < self._num_ranks - 1:
            time.sleep(_POLL_SECONDS)

    def hear(self) -> str:
        """Return rank 0's answer. Raises `RunnerError` if rank 0 ends without one, or does not answer in time."""
        from torch.distributed import DistError

        try:
            while not self._store.check(["answer"]):
                heed()
                if time.monotonic() > self._deadline:
                    raise RunnerError(
                        "Rank 0 gave no answer in several times its budget: it hangs, died or never searched.",
                        "Call recommend_config() on all ranks alike; if that is so, see what rank 0 wrote.",
                    )
                time.sleep(_POLL_SECONDS)
            answer = str(self._store.get("answer"), "utf-8")
            self._store.add("num_heard", 1)
        except DistError as error:
            raise _lost("Rank 0 ended without an answer", error) from error
        return answer


def _is_held_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(rank: int, num_ranks: int, limit_seconds: float) -> Any:
    """Return the store that all ranks share."""
    global _own_store
    from torch import distributed

    if distributed.is_initialized():
        return distributed.distributed_c10d._get_default_store()
    if _own_store is not None:
        return _own_store
    found = _meeting_place()
    if found is None:
        raise InvalidRequestError(
            f"This is rank {rank} of {num_ranks}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet.",
            "Call init_process_group() before recommend_config(), start the ranks with torchrun, or set both.",
        )
    address, port, name = found
    try:
        # With the arguments of init_process_group(), which then finds this server, except that rank 0 does not wait.
        store = distributed.TCPStore(  # type: ignore[attr-defined]  # its stubs do not export it
            address,
            port,
            num_ranks,
            is_master=rank == 0 and not _is_held_by_agent(),
            timeout=timedelta(seconds=limit_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except distributed.DistError as error:
        raise _lost(f"Rank {rank} cannot reach rank 0 at {address}:{port}", error) from error
    # The port was derived, not agreed on: the store of another Slurm step may be there.
    _own_store = store if name is None else distributed.PrefixStore(name, store)  # type: ignore[attr-defined]  # as above
    return _own_store


def _meeting_place() -> tuple[str, int, str | None] | None:
    """Return address and port of rank 0, and a name for the store, which is None if the launcher gave the port.

    Under Slurm alone, rank 0 is on the first host of the step, and port and name are derived from the step. None if the
    place of rank 0 is unknown.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if address and port.isdecimal():
        return address, int(port), None
    hosts, job, step = (os.environ.get(f"SLURM_{name}", "") for name in ("STEP_NODELIST", "JOB_ID", "STEP_ID"))
    if "WORLD_SIZE" in os.environ or not (hosts and job.isdecimal() and step.isdecimal()):
        return None
    first_host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts).split(",")[0]  # "node[03-06,9],gpu1" is node03, ...
    return first_host, _SLURM_PORTS[(int(job) + int(step)) % len(_SLURM_PORTS)], f"{job}.{step}"


def _lost(what: str, error: BaseException) -> RunnerError:
    line = str(error).partition("\n")[0].rstrip(".")
    next_step = "See what rank 0 wrote before it ended, and start all ranks again; MASTER_PORT names another port."
    return RunnerError(f"{what}: {line}.", next_step)

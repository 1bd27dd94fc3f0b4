"""Text from the first rank to the others, through the store that torch's process groups meet at. Makes no group."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # its stubs do not export them

from autotune_amp.core.errors import InvalidRequestError, RunnerError

_HEARD_SECONDS = 30.0
_POLL_SECONDS = 0.1

_LOST = "See what rank 0 wrote before it ended, and start all ranks again."
_own_store: Any = None  # open until the process ends: a group that is made later meets at the same server
_num_calls = 0


class RankStore:
    """One answer of rank 0 for `num_ranks` ranks; every rank makes as many of these as the others.

    Uses the store of the default process group, or else one at MASTER_ADDR and MASTER_PORT, which a process group made
    afterwards shares. Waits up to `limit_seconds` for rank 0 to be there. Raises `InvalidRequestError` where there is
    neither, `RunnerError` where rank 0 cannot be reached.
    """

    def __init__(self, rank: int, num_ranks: int, limit_seconds: float) -> None:
        global _num_calls
        _num_calls += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the agent's store outlives the ranks
        self._store = PrefixStore(f"autotune_amp/{attempt}/{_num_calls}", _store(rank, num_ranks, limit_seconds))
        self._num_ranks = num_ranks
        self._deadline = time.monotonic() + limit_seconds

    def tell(self, answer: str) -> None:
        """Give the others their answer; where rank 0 may hold the store, wait a while until they have it."""
        self._store.set("answer", answer)
        if _is_held_by_agent():
            return
        deadline = time.monotonic() + _HEARD_SECONDS
        while self._store.add("num_heard", 0) < self._num_ranks - 1 and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def hear(self) -> str:
        """Rank 0's answer. Raises `RunnerError` where rank 0 ended without one, or is too late."""
        try:
            while not self._store.check(["answer"]):
                if time.monotonic() > self._deadline:
                    raise RunnerError(
                        "Rank 0 gave no answer in several times its budget: it hangs, died or never searched.",
                        "Call recommend_config() on all ranks alike; if that is so, see what rank 0 wrote.",
                    )
                time.sleep(_POLL_SECONDS)
            answer = str(self._store.get("answer"), "utf-8")
            self._store.add("num_heard", 1)
        except dist.DistError as error:
            raise RunnerError(f"Rank 0 ended without an answer: {_first_line(error)}.", _LOST) from error
        return answer


def _is_held_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(rank: int, num_ranks: int, limit_seconds: float) -> Any:
    global _own_store
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if _own_store is None:
        _own_store = _connected(rank, num_ranks, limit_seconds)
    return _own_store


def _connected(rank: int, num_ranks: int, limit_seconds: float) -> Any:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise InvalidRequestError(
            f"This is rank {rank} of {num_ranks}, but MASTER_ADDR and MASTER_PORT do not say where the ranks meet.",
            "Call init_process_group() before recommend_config(), start the ranks with torchrun, or set both.",
        )
    try:
        # As init_process_group() makes it, which then finds this server; but rank 0 waits for nobody.
        return TCPStore(
            address,
            int(port),
            num_ranks,
            is_master=rank == 0 and not _is_held_by_agent(),
            timeout=timedelta(seconds=limit_seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise RunnerError(
            f"Rank {rank} cannot reach rank 0 at {address}:{port}: {_first_line(error)}.", _LOST
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
